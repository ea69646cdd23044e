"""The networks' constructor arguments, checked without torch.

The constructors check theirs here, and geometry is computed from them. Names and defaults are those of the
constructors; sizes are (height, width).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
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
    mlp: str
    class_tokens = 0
    min_classes = 1
    size_key: ClassVar[str]
    width_key: ClassVar[str]

    @property
    @abstractmethod
    def norm_kind(self) -> str:
        """ "layernorm" or "rmsnorm"."""

    @property
    def width(self) -> int:
        """Values per token: D."""
        width: int = getattr(self, self.width_key)
        return width

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the input: latent pixels, or a classifier's image pixels."""
        size: int | tuple[int, int] = getattr(self, self.size_key)
        return (size, size) if isinstance(size, int) else size

    @property
    def gated(self) -> bool:
        """Whether the MLP is a SwiGLU."""
        return self.mlp == "swiglu"

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

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The arguments in a network's `config`, checked, each in Python's own type."""
        return cls(**{field.name: config[field.name] for field in dataclasses.fields(cls)})

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = checked(field.name, str(field.type), getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        _at_least(self, 1, "patch_size", "in_channels", self.width_key, "depth", "num_heads")
        _at_least(self, self.min_classes, "num_classes")
        for side, pixels in zip(("height", "width"), self.size, strict=True):
            check_multiple(f"{self.size_key} {side}", pixels, self.patch_size, "patch_size ")
        _one_of("the norm", self.norm_kind, ("layernorm", "rmsnorm"))
        _one_of("mlp", self.mlp, ("gelu_tanh", "gelu", "swiglu"))
        if not 1 <= self.width * self.mlp_ratio < math.inf:
            raise ValueError(f"mlp_ratio must give the MLP a hidden width, got {self.mlp_ratio}")
        if self.width % self.num_heads:
            raise ValueError(
                f"{self.width_key} {self.width} must be a multiple of num_heads {self.num_heads}"
            )
        if self.rope and self.width // self.num_heads % 4:
            raise ValueError(
                "2-D RoPE needs a head dimension that is a multiple of 4, got "
                f"{self.width} / {self.num_heads}"
            )
        if self.num_registers < 0 or math.isqrt(self.num_registers) ** 2 != self.num_registers:
            raise ValueError(f"num_registers must be a square (0, 1, 4, 9, ...), got {self.num_registers}")
        if self.layer_scale_init is not None:
            _above_zero(self, "layer_scale_init")


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
    size_key = "input_size"
    width_key = "hidden_size"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("positions", self.positions, ("sincos", "learned", "none"))
        if self.positions == "sincos" and self.hidden_size % 4:
            raise ValueError(
                f"hidden_size must be a multiple of 4 for sincos positions, got {self.hidden_size}"
            )
        if not 0 <= self.class_dropout_prob < 1:
            raise ValueError(f"class_dropout_prob must be from 0 to below 1, got {self.class_dropout_prob}")

    @property
    def norm_kind(self) -> str:
        return self.norm

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

    img_size: int | tuple[int, int] = 224
    patch_size: int = 16
    in_channels: int = 3
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    num_classes: int = 1000
    num_registers: int = 4
    mlp_ratio: float = 4.0
    qkv_bias: bool = False
    rope: bool = True
    rope_theta: float = 10000.0
    register_rope_theta: float = 100.0
    qk_norm: bool = True
    layer_scale_init: float | None = 1e-4
    norm_layer: str = "rmsnorm"
    norm_eps: float = 1e-6
    mlp: str = "gelu"
    class_position: bool = False
    pool: str = "class"
    class_tokens = 1
    min_classes = 0
    size_key = "img_size"
    width_key = "embed_dim"

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of("pool", self.pool, ("class", "mean"))
        _above_zero(self, "rope_theta", "register_rope_theta", "norm_eps")

    @property
    def norm_kind(self) -> str:
        return self.norm_layer


Shape = SiTShape | ViTShape


def check_multiple(what: str, size: int, unit: int, called: str = "") -> None:
    """ValueError with the nearest legal values where `size` is not a positive multiple of `unit`."""
    if size < 1 or size % unit:
        lower = max(size // unit, 1) * unit
        raise ValueError(
            f"{what} {size} is not a multiple of {called}{unit}; the nearest legal values are "
            f"{lower} and {lower + unit}"
        )


def _at_least(shape: object, least: int, *keys: str) -> None:
    for key in keys:
        if getattr(shape, key) < least:
            raise ValueError(f"{key} must be at least {least}, got {getattr(shape, key)}")


def _above_zero(shape: object, *keys: str) -> None:
    for key in keys:
        if not 0 < getattr(shape, key) < math.inf:
            raise ValueError(f"{key} must be above 0 and finite, got {getattr(shape, key)}")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")


def checked(key: str, kind: str, value: Any) -> Any:
    """`value` in Python's own type of the annotation `kind`, numpy's numbers too; ValueError where none."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if number and kind.startswith("int") and isinstance(value, numbers.Integral):
        return int(value)
    if number and kind.startswith("float"):
        return float(value)
    if kind == "float | None" and value is None:
        return None
    if (kind == "bool" and isinstance(value, bool)) or (kind == "str" and isinstance(value, str)):
        return value
    if kind == "int | tuple[int, int]" and isinstance(value, (tuple, list)) and len(value) == 2:
        with contextlib.suppress(ValueError):
            return tuple(checked(key, "int", side) for side in value)
    raise ValueError(f"{key} must be of type {kind}, got {value!r}")
