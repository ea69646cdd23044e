"""The small parts that the transformers are made of.

Submodule names follow the official SiT and ViT-5 code (`attn.qkv`, `mlp.fc1`, `q_norm`, ...), so
that a published state dict loads as it is.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .fused import is_plain, linear_after_norm, norm_rotate_heads, rms_modulate, wide
from .positions import rotate


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else wide(self.weight)
        return F.rms_norm(wide(x), (self.dim,), weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, in float32."""

    def __init__(self, dim: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.bias is None:
            return F.layer_norm(wide(x), (self.dim,), eps=self.eps).to(x.dtype)
        weight, bias = wide(self.weight), wide(self.bias)
        return F.layer_norm(wide(x), (self.dim,), weight, bias, self.eps).to(x.dtype)


NORMS: dict[str, Callable[[int, float, bool], nn.Module]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
"""The norms by name: (dim, eps, affine) -> module."""


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """adaLN: x (B, N, D) * (1 + scale) + shift, both (B, D)."""
    return _plus(x * (1 + scale.unsqueeze(1)), shift.unsqueeze(1))


def modulated_norm(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """modulate(norm(x), shift, scale), fused in eager mode where `norm` is an RMSNorm."""
    if isinstance(norm, RMSNorm) and not is_plain():
        factor = 1 + wide(scale)
        if norm.weight is not None:
            factor = factor * wide(norm.weight)
        return rms_modulate(x, shift, factor, norm.eps)
    return modulate(norm(x).to(shift.dtype), shift, scale)


class Attention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d)) v, with ViT-5's optional parts.

    `qk_norm` is an RMSNorm over each head's dimensions with one learned weight for all heads, before
    the rotation; the scale 1/sqrt(d) stays.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, qk_norm: bool, eps: float) -> None:
        super().__init__()
        self.num_heads, self.qk_norm = num_heads, qk_norm
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = RMSNorm(dim // num_heads, eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim // num_heads, eps) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """`x` (B, N, D); `rotation` (2, N, d / 2), d = D / num_heads, turns queries and keys, or None."""
        q, k, v = self.heads(x, rotation)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(rearrange(x, "b h n d -> b n (h d)"))

    def heads(self, x: Tensor, rotation: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed and turned, and values, (B, heads, N, d) each."""
        qkv = linear_after_norm(self.qkv, x)
        qkv = rearrange(qkv, "b n (qkv h d) -> b n qkv h d", qkv=3, h=self.num_heads)
        q_norm: Any = self.q_norm
        k_norm: Any = self.k_norm
        if self.qk_norm and rotation is not None and not is_plain():
            q, k, v = norm_rotate_heads(qkv, q_norm.weight, k_norm.weight, rotation, q_norm.eps)
        else:
            q, k, v = qkv.unbind(2)  # (B, N, heads, d)
            q, k = q_norm(q), k_norm(k)
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's tanh form, as in SiT and DiT."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": gelu_tanh, "gelu": F.gelu}
"""Activations of the plain MLP by name; `swiglu` is an MLP of its own."""


class Mlp(nn.Module):
    """Linear, activation, Linear; or SwiGLU (arXiv 2002.05202): W_2 (silu(W_a x) * W_b x).

    `hidden_dim` is the plain MLP's width. SwiGLU's is h = (2 D H + H) / (3 D + 2), rounded, which gives
    the same number of parameters to within (3 D + 2) / 2.
    """

    def __init__(self, dim: int, hidden_dim: int, kind: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS.get(kind)
        if self.activation is None:
            hidden_dim = round((2 * dim * hidden_dim + hidden_dim) / (3 * dim + 2))
        self.fc1 = nn.Linear(dim, hidden_dim if self.activation else 2 * hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = linear_after_norm(self.fc1, x)
        if self.activation is not None:
            return self.fc2(self.activation(x))
        gate, value = x.chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


class Block(nn.Module):
    """The one pre-norm transformer block of SiT, DiT, ViT-5 and ViT.

        x += gate_1 * gamma_1 * attn(modulate(norm1(x), shift_1, scale_1))
        x += gate_2 * gamma_2 * mlp (modulate(norm2(x), shift_2, scale_2))

    with (shift, scale, gate) x 2 = adaLN(c). Without `adaln` they are absent; without LayerScale
    (`layer_scale_init` None) the gammas are.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        norm: str,
        norm_affine: bool,
        norm_eps: float,
        qkv_bias: bool,
        qk_norm: bool,
        mlp: str,
        layer_scale_init: float | None,
        adaln: bool,
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](dim, norm_eps, norm_affine)
        self.attn = Attention(dim, num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm, eps=norm_eps)
        self.norm2 = NORMS[norm](dim, norm_eps, norm_affine)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), mlp)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim)) if adaln else None
        self.gamma_1: Tensor | None
        self.gamma_2: Tensor | None
        if layer_scale_init is None:
            self.gamma_1 = self.gamma_2 = None
        else:
            self.gamma_1 = nn.Parameter(torch.full((dim,), layer_scale_init))
            self.gamma_2 = nn.Parameter(torch.full((dim,), layer_scale_init))

    def forward(self, x: Tensor, rotation: Tensor | None, c: Tensor | None = None) -> Tensor:
        """`x` (B, N, D), `rotation` (2, N, head_dim / 2) or None, `c` (B, D) where there is adaLN."""
        if self.adaLN_modulation is None:
            x = _add(x, self.gamma_1, self.attn(self.norm1(x), rotation))
            return _add(x, self.gamma_2, self.mlp(self.norm2(x)))
        modulation = self.adaLN_modulation(c)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.chunk(6, dim=1)
        if self.gamma_1 is not None and self.gamma_2 is not None:  # one multiplication a token
            gate_1, gate_2 = gate_1 * self.gamma_1, gate_2 * self.gamma_2
        h = self.attn(modulated_norm(self.norm1, x, shift_1, scale_1), rotation)
        x = _add(x, gate_1.unsqueeze(1), h)
        h = self.mlp(modulated_norm(self.norm2, x, shift_2, scale_2))
        return _add(x, gate_2.unsqueeze(1), h)


def _add(x: Tensor, gate: Tensor | None, h: Tensor) -> Tensor:
    """x + gate h in the type of x; the product is in the type of h, as the matrices' results are."""
    return x + h if gate is None else _plus(gate.to(h.dtype) * h, x)


def _plus(product: Tensor, x: Tensor) -> Tensor:
    """product + x in their common type, written over the product.

    The bits are the same; on a CPU the pages of one more (B, N, D) cost as much as the addition.
    """
    return product.to(torch.promote_types(product.dtype, x.dtype)).add_(x)


class PatchEmbed(nn.Module):
    """A strided convolution: (B, C, H, W) -> tokens (B, H/p * W/p, D), row-major.

    They are laid out as later blocks' are: code compiled for the first block serves all.
    """

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(self.proj(x), "b d h w -> b (h w) d").contiguous()


class TimestepEmbedder(nn.Module):
    """t (B,) -> (B, D): cosines then sines of t * 10000^(-k/128), then Linear-SiLU-Linear; float32.

    SiT feeds t in [0, 1] unscaled. bfloat16 would turn t = 0.999 into 1, so autocast is off here.
    """

    FREQUENCY_DIM = 256

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.FREQUENCY_DIM, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        with torch.autocast(t.device.type, enabled=False):
            half = self.FREQUENCY_DIM // 2
            k = torch.arange(half, dtype=torch.float32, device=t.device)
            angles = t.float()[:, None] * torch.exp(-math.log(10000.0) * k / half)
            features = torch.cat([angles.cos(), angles.sin()], dim=-1)
            first: Any = self.mlp[0]
            return self.mlp(features.to(first.weight.dtype))


class LabelEmbedder(nn.Module):
    """A row per class and, where the class is dropped in training, a last row for "no class"."""

    def __init__(self, num_classes: int, dim: int, has_null: bool) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + has_null, dim)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)


class FinalLayer(nn.Module):
    """adaLN-modulated norm and a zero-initialised projection to p*p*C values a token; float32."""

    def __init__(self, dim: int, patch_size: int, out_channels: int, norm: str, affine: bool) -> None:
        super().__init__()
        self.norm_final = NORMS[norm](dim, 1e-6, affine)
        self.linear = nn.Linear(dim, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            dtype = self.linear.weight.dtype  # float32 under autocast, the model's where it was cast
            shift, scale = self.adaLN_modulation(c.to(dtype)).chunk(2, dim=1)
            return self.linear(modulated_norm(self.norm_final, x.to(dtype), shift, scale))
