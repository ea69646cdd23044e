"""The networks' constructor arguments, checked without torch: what geometry is computed from.

Names and defaults are those of the networks' constructors; sizes are (height, width).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .presets import CLASSIFIERS, PRESETS, look_up


class _Transformer(ABC):
    """What both families have, and what follows from it."""

    patch_size: int
    in_channels: int
    depth: int
    num_heads: int
    mlp_ratio: float
    num_classes: int
    qkv_bias: bool
    qk_norm: bool
    rope: bool
    num_registers: int
    layer_scale_init: float | None
    class_tokens = 0

    @property
    @abstractmethod
    def norm_kind(self) -> str:
        """ "layernorm" or "rmsnorm"."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Values per token: D."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Height and width of the input: latent pixels, or a classifier's image pixels."""

    @property
    def gated(self) -> bool:
        """Whether the MLP is a SwiGLU."""
        return False

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.size[0] // self.patch_size, self.size[1] // self.patch_size

    @property
    def patches(self) -> int:
        """Tokens that are patches."""
        return self.grid[0] * self.grid[1]

    @property
    def extra_tokens(self) -> int:
        """Tokens that are not patches: class token and registers."""
        return self.class_tokens + self.num_registers

    @property
    def tokens(self) -> int:
        """All tokens: N."""
        return self.patches + self.extra_tokens

    @property
    def patch_values(self) -> int:
        """Input values under a patch."""
        return self.in_channels * self.patch_size**2

    @property
    def mlp_width(self) -> int:
        """Width of the MLP's hidden layer: h. SwiGLU's gives it the parameters that GELU's has."""
        wide = int(self.width * self.mlp_ratio)
        return round((2 * self.width + 1) * wide / (3 * self.width + 2)) if self.gated else wide

    def __post_init__(self) -> None:
        for key in ("patch_size", "in_channels", "width", "depth", "num_heads", "num_classes"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        for side, pixels in zip(("height", "width"), self.size, strict=True):
            check_multiple(f"input {side}", pixels, self.patch_size)
        _one_of("the norm", self.norm_kind, ("layernorm", "rmsnorm"))
        if not 1 <= self.width * self.mlp_ratio < math.inf:
            raise ValueError(f"mlp_ratio must give the MLP a hidden width, got {self.mlp_ratio}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of num_heads {self.num_heads}")
        if self.rope and self.width // self.num_heads % 4:
            raise ValueError(
                "2-D RoPE needs a head dimension that is a multiple of 4, got "
                f"{self.width} / {self.num_heads}"
            )
        if self.num_registers < 0 or math.isqrt(self.num_registers) ** 2 != self.num_registers:
            raise ValueError(f"num_registers must be a square (0, 1, 4, 9, ...), got {self.num_registers}")


@dataclass(frozen=True, kw_only=True)
class SiTShape(_Transformer):
    """A velocity network (SiT, DiT, SiT on ViT-5); `input_size` is the latent's.

    Raises:
        ValueError: sizes that do not fit together, naming the legal ones.
    """

    input_size: int | tuple[int, int] = 32
    patch_size: int = 2
    in_channels: int = 4
    hidden_size: int = 1152
    depth: int = 28
    num_heads: int = 16
    mlp_ratio: float = 4.0
    class_dropout_prob: float = 0.1
    num_classes: int = 1000
    learn_sigma: bool = False
    norm: str = "layernorm"
    norm_affine: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    rope: bool = False
    positions: str = "sincos"
    num_registers: int = 0
    layer_scale_init: float | None = None
    mlp: str = "gelu_tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("positions", self.positions, ("sincos", "learned", "none"))
        _one_of("mlp", self.mlp, ("gelu_tanh", "gelu", "swiglu"))
        if self.positions == "sincos" and self.hidden_size % 4:
            raise ValueError(
                f"hidden_size must be a multiple of 4 for sincos positions, got {self.hidden_size}"
            )
        if not 0 <= self.class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob must be from 0 to below 1, got {self.class_dropout_prob}")

    @property
    def size(self) -> tuple[int, int]:
        return _pair(self.input_size)

    @property
    def width(self) -> int:
        return self.hidden_size

    @property
    def norm_kind(self) -> str:
        return self.norm

    @property
    def gated(self) -> bool:
        return self.mlp == "swiglu"

    @property
    def output_values(self) -> int:
        """Values that the network predicts per patch."""
        return self.patch_values * (2 if self.learn_sigma else 1)


@dataclass(frozen=True, kw_only=True)
class ViTShape(_Transformer):
    """An image classifier (ViT-5, or the ViT of 2020); `img_size` is in pixels.

    `class_position`: the learned position table has a row for the class token (2020), or has not (ViT-5).

    Raises:
        ValueError: sizes that do not fit together, naming the legal ones.
    """

    embed_dim: int
    depth: int
    num_heads: int
    img_size: int | tuple[int, int] = 224
    patch_size: int = 16
    in_channels: int = 3
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    norm_layer: str = "rmsnorm"
    qkv_bias: bool = False
    qk_norm: bool = True
    rope: bool = True
    num_registers: int = 4
    layer_scale_init: float | None = 1e-4
    class_position: bool = False
    class_tokens = 1

    @property
    def size(self) -> tuple[int, int]:
        return _pair(self.img_size)

    @property
    def width(self) -> int:
        return self.embed_dim

    @property
    def norm_kind(self) -> str:
        return self.norm_layer


Shape = SiTShape | ViTShape


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


def check_multiple(what: str, size: int, unit: int) -> None:
    """ValueError with the nearest legal values where `size` is not a positive multiple of `unit`."""
    if size < 1 or size % unit:
        lower = max(size // unit, 1) * unit
        raise ValueError(
            f"{what} {size} is not a multiple of {unit}; the nearest legal values are "
            f"{lower} and {lower + unit}"
        )


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")


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
