"""Names to architectures: `SiT-XL/2`, `SiT-ViT5-XL/2`, `DiT-XL/2`, `ViT5-B/16`, `ViT-B/16`, ...

Sizes: DiT, table 1; ViT-5 (arXiv 2602.08071); ViT (arXiv 2010.11929).

Pure Python, so that a configuration can be checked without importing torch.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dit import DiT
    from .sit import SiT
    from .vit5 import ViT5

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
    for family, backbone in (
        ("SiT", VANILLA),
        ("DiT", {**VANILLA, "learn_sigma": True}),
        ("SiT-ViT5", VIT5),
    )
    for size in SIZES
    for patch in PATCH_SIZES
}
"""The diffusion transformers."""

VIT_2020: dict[str, Any] = {
    "norm_layer": "layernorm",
    "qkv_bias": True,
    "qk_norm": False,
    "rope": False,
    "num_registers": 0,
    "layer_scale_init": None,
    "class_position": True,
}
_VIT_SIZES = {"B": (12, 768, 12), "L": (24, 1024, 16), "H": (32, 1280, 16)}

CLASSIFIERS: dict[str, dict[str, Any]] = {
    f"ViT5-{name}/16": {
        "depth": size["depth"],
        "embed_dim": size["hidden_size"],
        "num_heads": size["num_heads"],
        "patch_size": 16,
    }
    for name, size in SIZES.items()
} | {
    f"ViT-{name}/{patch}": {
        "depth": depth,
        "embed_dim": width,
        "num_heads": heads,
        "patch_size": patch,
        **VIT_2020,
    }
    for name, (depth, width, heads) in _VIT_SIZES.items()
    for patch in ((14,) if name == "H" else (14, 16))
}
"""The image classifiers: ViT-5, and the ViT of 2020 (arXiv 2010.11929, table 1)."""


def preset(name: str) -> dict[str, Any]:
    """Constructor arguments of the diffusion transformer `name`; ValueError naming the nearest name."""
    return dict(look_up(PRESETS, name))


def build_model(name: str, **overrides: Any) -> SiT | DiT | ViT5:
    """The network `name` with random weights; `overrides` are constructor arguments.

    `SiT-*`, `SiT-ViT5-*`, `DiT-*`: see `DiffusionTransformer`; `ViT5-*`, `ViT-*`: see `ViT5`.

    Raises:
        ValueError: an unknown name, or sizes that do not fit together.
        TypeError: an argument that the network does not have.
    """
    arguments = {**look_up(PRESETS | CLASSIFIERS, name), **overrides}
    if name in CLASSIFIERS:
        from .vit5 import ViT5

        return ViT5(**arguments)
    if name.startswith("DiT-"):
        from .dit import DiT

        return DiT(**arguments)
    from .sit import SiT

    return SiT(**arguments)


def look_up(presets: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """`presets[name]`; ValueError naming the nearest known names."""
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=3, cutoff=0.3) or list(presets)[:3]
        raise ValueError(f"no model is called {name!r}; did you mean {' or '.join(near)}?")
    return presets[name]
