"""Names to architectures: `SiT-XL/2`, `DiT-XL/2`, `SiT-ViT5-XL/2` (DiT and SiT, table 1; ViT-5), and the
image classifiers `ViT5-B/16` (arXiv 2602.08071) and `ViT-B/16` (arXiv 2010.11929).

Pure Python, so that a configuration can be checked without importing torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .shapes import Shape, SiTShape, ViTShape, check_multiple

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
DIT: dict[str, Any] = {**VANILLA, "learn_sigma": True}

PRESETS: dict[str, dict[str, Any]] = {
    f"{family}-{size}/{patch}": {**SIZES[size], "patch_size": patch, **backbone}
    for family, backbone in (("SiT", VANILLA), ("DiT", DIT), ("SiT-ViT5", VIT5))
    for size in SIZES
    for patch in PATCH_SIZES
}

CLASSIFIER_SIZES = {
    "S": {"depth": 12, "embed_dim": 384, "num_heads": 6},
    "B": {"depth": 12, "embed_dim": 768, "num_heads": 12},
    "L": {"depth": 24, "embed_dim": 1024, "num_heads": 16},
    "XL": {"depth": 28, "embed_dim": 1152, "num_heads": 16},
    "H": {"depth": 32, "embed_dim": 1280, "num_heads": 16},
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    f"{family}-{size}/{patch}": {
        **CLASSIFIER_SIZES[size],
        "patch_size": patch,
        **backbone,
        "class_position": class_position,
    }
    for family, backbone, class_position, members in (
        ("ViT5", VIT5, False, (("S", 16), ("B", 16), ("L", 16), ("XL", 16))),
        ("ViT", VANILLA, True, (("B", 16), ("L", 16), ("L", 14), ("H", 14))),
    )
    for size, patch in members
}
"""Image classifiers; `class_position` says that the position table has a row for the class token."""


def preset(name: str) -> dict[str, Any]:
    """Constructor arguments of the architecture `name`; ValueError naming the nearest known name."""
    return dict(_named(name, PRESETS))


def build_model(name: str, **overrides: Any) -> SiT:
    """The network `name` with random weights; `overrides` are constructor arguments of `SiT`.

    Raises:
        ValueError: an unknown name, or sizes that do not fit together.
        TypeError: an argument that `SiT` does not have.
    """
    from .sit import SiT

    return SiT(**{**preset(name), **overrides})


def preset_shape(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    image_size: tuple[int, int] | None = None,
    downsampling: int = 8,
) -> Shape:
    """The checked arguments of `name`, a network or a classifier; `overrides` as values or as text ("16,32").

    `image_size` (height, width) in pixels sets the input's size: the image's for a classifier, the
    latent's, smaller by the autoencoder's `downsampling`, for a velocity network.

    Raises:
        ValueError: an unknown name or key, a value of a wrong type, sizes that do not fit together.
    """
    arguments = _named(name, {**PRESETS, **CLASSIFIERS})
    family, size_key = (SiTShape, "input_size") if name in PRESETS else (ViTShape, "img_size")
    arguments = {**arguments, **_typed(name, family, overrides or {})}
    if image_size is not None:
        if size_key in (overrides or {}):
            raise ValueError(f"the image size and {size_key} say the same thing; give one of them")
        unit = downsampling if family is SiTShape else 1
        patch_size = max(arguments["patch_size"], 1)  # a patch below 1 is refused further down
        for side, pixels in zip(("height", "width"), image_size, strict=True):
            what = f"for {name} (patch {patch_size} x downsampling {unit}), image {side}"
            check_multiple(what, pixels, unit * patch_size)
        arguments[size_key] = (image_size[0] // unit, image_size[1] // unit)
    return family(**arguments)


def _named(name: str, presets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if name not in presets:
        near = difflib.get_close_matches(name, presets, n=3, cutoff=0.3) or list(presets)[:3]
        raise ValueError(f"no model is called {name!r}; did you mean {' or '.join(near)}?")
    return presets[name]


def _typed(name: str, family: type[Shape], overrides: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {field.name: str(field.type) for field in dataclasses.fields(family)}
    for key in overrides:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(kinds)}"
            raise ValueError(f"{name} has no argument {key!r}; {hint}")
    return {key: _read(key, kinds[key], value) for key, value in overrides.items()}


def _read(key: str, kind: str, value: Any) -> Any:
    """`value`, as it was typed or as Python has it, in the type that the annotation `kind` names."""
    text = str(value).strip().lower()
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text]
        if kind == "float | None" and text in ("none", "null"):
            return None
        if kind.startswith("float"):
            return float(text)
        if kind == "int":
            return int(text)
        if kind == "int | tuple[int, int]":
            sides = [int(side) for side in text.strip("()[]").split(",")]
            return sides[0] if len(sides) == 1 else {2: tuple(sides)}[len(sides)]
    except (KeyError, ValueError):
        raise ValueError(f"{key} must be of type {kind}, got {value!r}") from None
    return str(value)
