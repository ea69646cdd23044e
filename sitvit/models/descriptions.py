"""From a model's name, or from its arguments as text, to its checked arguments; without torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from .presets import CLASSIFIERS, PRESETS, look_up
from .shapes import Shape, SiTShape, ViTShape, check_multiple, checked


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
    arguments = look_up({**PRESETS, **CLASSIFIERS}, name)
    family = SiTShape if name in PRESETS else ViTShape
    return _shape(name, family, arguments, overrides or {}, image_size, downsampling)


def described_shape(
    description: Mapping[str, Any], image_size: tuple[int, int] | None = None, downsampling: int = 8
) -> tuple[str, Shape]:
    """Whose arguments these are, and they checked: a network that no preset names.

    It is a "ViT5" where they speak of `embed_dim` or `img_size`, else a "SiT". What is left out is the
    constructor's default, but the sizes have to be there.

    Raises:
        ValueError: a size is missing; else as in `preset_shape`.
    """
    classifier = {ViTShape.width_key, ViTShape.size_key} & description.keys()
    name, family = ("ViT5", ViTShape) if classifier else ("SiT", SiTShape)
    needed = [family.size_key, "patch_size", family.width_key, "depth", "num_heads"]
    lacking = [key for key in needed if key not in description]
    if image_size is not None and family.size_key in lacking:
        lacking.remove(family.size_key)
    if lacking:
        raise ValueError(
            f"name a model, such as SiT-XL/2, or describe one by {', '.join(needed)}; missing: "
            f"{', '.join(lacking)}"
        )
    return name, _shape(name, family, {}, description, image_size, downsampling)


def _shape(
    name: str,
    family: type[Shape],
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
    image_size: tuple[int, int] | None,
    downsampling: int,
) -> Shape:
    arguments = {**arguments, **_typed(name, family, overrides)}
    if image_size is None:
        return family(**arguments)
    if family.size_key in overrides:
        raise ValueError(f"the image size and {family.size_key} say the same thing; give one of them")
    unit = downsampling if family is SiTShape else 1
    # A patch below 1 is refused further down.
    patch_size = max(checked("patch_size", "int", arguments["patch_size"]), 1)
    for side, pixels in zip(("height", "width"), image_size, strict=True):
        what = f"for {name} (patch {patch_size} x downsampling {unit}), image {side}"
        check_multiple(what, pixels, unit * patch_size)
    arguments[family.size_key] = (image_size[0] // unit, image_size[1] // unit)
    return family(**arguments)


def _typed(name: str, family: type[Shape], overrides: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {field.name: str(field.type) for field in dataclasses.fields(family)}
    for key in overrides:
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(kinds)}"
            raise ValueError(f"{name} has no argument {key!r}; {hint}")
    return {
        key: _parsed(kinds[key], value) if isinstance(value, str) else value
        for key, value in overrides.items()
    }


def _parsed(kind: str, text: str) -> Any:
    """The value that `text` means for the annotation `kind`; `text` itself, refused later, where none."""
    word = text.strip().lower()
    try:
        if kind == "bool":
            return {"true": True, "false": False}[word]
        if kind == "float | None" and word in ("none", "null"):
            return None
        if kind.startswith("float"):
            return float(word)
        if kind.startswith("int"):
            sides = tuple(int(side) for side in word.strip("()[]").split(","))
            return sides[0] if len(sides) == 1 else sides
    except (KeyError, ValueError):
        return text
    return text
