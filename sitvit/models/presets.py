"""Names to architectures: `SiT-XL/2`, `SiT-ViT5-XL/2`, ... (DiT and SiT, table 1; ViT-5).

Pure Python, so that a configuration can be checked without importing torch.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sit import SiT

SIZES = {
    "S": {"depth": 12, "hidden_size": 384, "num_heads": 6},
    "B": {"depth": 12, "hidden_size": 768, "num_heads": 12},
    "L": {"depth": 24, "hidden_size": 1024, "num_heads": 16},
    "XL": {"depth": 28, "hidden_size": 1152, "num_heads": 16},
}
PATCH_SIZES = (2, 4, 8)

VANILLA: dict[str, Any] = {
    "norm": "layernorm",
    "qkv_bias": True,
    "qk_norm": False,
    "rope": False,
    "num_registers": 0,
    "layer_scale_init": None,
}
VIT5: dict[str, Any] = {
    "norm": "rmsnorm",
    "qkv_bias": False,
    "qk_norm": True,
    "rope": True,
    "num_registers": 4,
    "layer_scale_init": 1e-4,
}

PRESETS: dict[str, dict[str, Any]] = {
    f"{family}-{size}/{patch}": {**SIZES[size], "patch_size": patch, **backbone}
    for family, backbone in (("SiT", VANILLA), ("SiT-ViT5", VIT5))
    for size in SIZES
    for patch in PATCH_SIZES
}


def preset(name: str) -> dict[str, Any]:
    """Constructor arguments of the architecture `name`; ValueError naming the nearest known name."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.3) or list(PRESETS)[:3]
        raise ValueError(f"no model is called {name!r}; did you mean {' or '.join(near)}?")
    return dict(PRESETS[name])


def build_model(name: str, **overrides: Any) -> SiT:
    """The network `name` with random weights; `overrides` are constructor arguments of `SiT`.

    Raises:
        ValueError: an unknown name, or sizes that do not fit together.
        TypeError: an argument that `SiT` does not have.
    """
    from .sit import SiT

    return SiT(**{**preset(name), **overrides})
