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

from .fused import is_plain, norm_rotate, rms_modulate, wide
from .positions import complex_table, rotate


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
    """(x - mean) / sqrt(var + eps) over the last dimension, without affine, in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(wide(x), (self.dim,), eps=self.eps).to(x.dtype)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layernorm": LayerNorm,
    "rmsnorm": lambda dim: RMSNorm(dim, affine=False),
}
"""The norm before attention and MLP, without affine: adaLN supplies scale and shift."""


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """adaLN: x (B, N, D) * (1 + scale) + shift, both (B, D)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulated_norm(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """modulate(norm(x), shift, scale), fused in eager mode where `norm` is an RMSNorm."""
    if isinstance(norm, RMSNorm) and norm.weight is None and not is_plain():
        return rms_modulate(x, shift, scale, norm.eps)
    return modulate(norm(x), shift, scale)


class Attention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d)) v, with ViT-5's optional parts.

    `qk_norm` is an RMSNorm over each head's dimensions with one learned weight for all heads, before
    the rotation; the scale 1/sqrt(d) stays.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads, self.qk_norm = num_heads, qk_norm
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = RMSNorm(dim // num_heads) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim // num_heads) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, rotation: Tensor | None = None) -> Tensor:
        """`x` (B, N, D); `rotation` (2, N, D / num_heads) turns queries and keys, or None."""
        qkv = rearrange(self.qkv(x), "b n (qkv h d) -> b n qkv h d", qkv=3, h=self.num_heads)
        q, k, v = qkv.unbind(2)  # (B, N, heads, d)
        q_norm: Any = self.q_norm
        k_norm: Any = self.k_norm
        if self.qk_norm and rotation is not None and not is_plain():
            table = complex_table(rotation)
            q = norm_rotate(q, q_norm.weight, table, q_norm.eps)
            k = norm_rotate(k, k_norm.weight, table, k_norm.eps)
        else:
            q, k = q_norm(q), k_norm(k)
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, heads, N, d)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(rearrange(x, "b h n d -> b n (h d)"))


class Mlp(nn.Module):
    """Linear, GELU (tanh form, as in SiT), Linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PatchEmbed(nn.Module):
    """A strided convolution: (B, C, H, W) -> tokens (B, H/p * W/p, D), row-major."""

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return rearrange(self.proj(x), "b d h w -> b (h w) d")


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
            return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class LabelEmbedder(nn.Module):
    """A row per class and, where the class is dropped in training, a last row for "no class"."""

    def __init__(self, num_classes: int, dim: int, has_null: bool) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + has_null, dim)

    def forward(self, labels: Tensor) -> Tensor:
        return self.embedding_table(labels)


class FinalLayer(nn.Module):
    """adaLN-modulated norm and a zero-initialised projection to p*p*C values a token; float32."""

    def __init__(self, dim: int, patch_size: int, out_channels: int, norm: str) -> None:
        super().__init__()
        self.norm_final = NORMS[norm](dim)
        self.linear = nn.Linear(dim, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            shift, scale = self.adaLN_modulation(c.float()).chunk(2, dim=1)
            return self.linear(modulated_norm(self.norm_final, x.float(), shift, scale))
