"""SiT: a transformer that predicts the velocity of a latent, with the vanilla or the ViT-5 backbone.

One skeleton (DiT, arXiv 2212.09748; SiT, arXiv 2401.08740) and one block. With c = t_embed + y_embed
and (shift, scale, gate) x 2 = adaLN(c), a block is

    x += gate_1 * gamma_1 * attn(modulate(norm(x), shift_1, scale_1))
    x += gate_2 * gamma_2 * mlp (modulate(norm(x), shift_2, scale_2))

Vanilla SiT: LayerNorm, qkv bias, gamma = 1. SiT on ViT-5 (arXiv 2602.08071): RMSNorm, LayerScale gamma
from 1e-4, QK-norm, 2-D RoPE beside the absolute positions, 4 register tokens appended last and dropped
before the final layer, no qkv bias. Each is an argument of its own and any mix is legal.

Differences from the official SiT: labels are dropped by the training stream and not in here, so the
network is a pure function; `learn_sigma` is off by default, since SiT throws that half away.
"""

import math
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from einops import rearrange
from torch import Tensor, nn

from .layers import (
    NORMS,
    Attention,
    FinalLayer,
    LabelEmbedder,
    Mlp,
    PatchEmbed,
    TimestepEmbedder,
    modulated_norm,
)
from .positions import grid_coordinates, rotation_angles, rotation_table, sincos_2d


class SiTBlock(nn.Module):
    """A transformer block with adaLN-Zero conditioning (the equations above)."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        norm: str,
        qkv_bias: bool,
        qk_norm: bool,
        layer_scale_init: float | None,
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](dim)
        self.attn = Attention(dim, num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm)
        self.norm2 = NORMS[norm](dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        if layer_scale_init is None:
            self.gamma_1 = self.gamma_2 = None
        else:
            self.gamma_1 = nn.Parameter(torch.full((dim,), layer_scale_init))
            self.gamma_2 = nn.Parameter(torch.full((dim,), layer_scale_init))

    def forward(self, x: Tensor, c: Tensor, rotation: Tensor | None) -> Tensor:
        """`x` (B, N, D), `c` (B, D), `rotation` (2, N, head_dim) or None."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.adaLN_modulation(c).chunk(6, dim=1)
        if self.gamma_1 is not None and self.gamma_2 is not None:  # one multiplication a block
            gate_1, gate_2 = gate_1 * self.gamma_1, gate_2 * self.gamma_2
        h = self.attn(modulated_norm(self.norm1, x, shift_1, scale_1), rotation)
        x = x + (gate_1.unsqueeze(1) * h).to(x.dtype)
        h = self.mlp(modulated_norm(self.norm2, x, shift_2, scale_2))
        return x + (gate_2.unsqueeze(1) * h).to(x.dtype)


class SiT(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Velocity network: `model(x_t, t, labels)` -> dx_t/dt of the shape of `x_t`.

    Args:
        input_size: latent height and width, an int where they are equal; multiples of `patch_size`.
        patch_size, in_channels: latent pixels per token side; latent channels.
        hidden_size, depth, num_heads, mlp_ratio: the transformer's size.
        class_dropout_prob: above zero, the label table has a last row for "no class" (`null_label`).
            The rate itself is the training stream's.
        num_classes: labels run from 0 to num_classes - 1.
        learn_sigma: the output has twice the channels and the second half is thrown away (official
            checkpoints have this).
        norm: "layernorm" or "rmsnorm", both without affine.
        qkv_bias, qk_norm: attention's bias and RMSNorm of queries and keys.
        rope: 2-D rotary embedding of queries and keys; registers turn on their own square grid.
        num_registers: extra tokens, a square number (0, 1, 4, 9, ...).
        layer_scale_init: LayerScale's initial gamma, or None for no LayerScale.

    Raises:
        ValueError: sizes that do not fit together, naming the legal ones.
    """

    ROPE_THETA = 10000.0
    REGISTER_ROPE_THETA = 100.0

    @register_to_config
    def __init__(
        self,
        input_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int = 1000,
        learn_sigma: bool = False,
        norm: str = "layernorm",
        qkv_bias: bool = True,
        qk_norm: bool = False,
        rope: bool = False,
        num_registers: int = 0,
        layer_scale_init: float | None = None,
    ) -> None:
        super().__init__()
        height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
        _check_sizes(height, width, patch_size, hidden_size, num_heads, rope, norm, num_registers)
        self.height, self.width, self.patch_size = height, width, patch_size
        self.in_channels, self.num_classes = in_channels, num_classes
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.has_null = class_dropout_prob > 0
        grid = height // patch_size, width // patch_size

        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, self.has_null)
        self.pos_embed = nn.Parameter(sincos_2d(hidden_size, *grid)[None], requires_grad=False)
        self.num_registers = num_registers
        if num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, num_registers, hidden_size))
        self.rotation: Tensor | None
        self.head_dim = hidden_size // num_heads
        rotation = self._rotation(self.head_dim, grid) if rope else None
        self.register_buffer("rotation", rotation, persistent=False)
        self.blocks = nn.ModuleList(
            SiTBlock(hidden_size, num_heads, mlp_ratio, norm, qkv_bias, qk_norm, layer_scale_init)
            for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels, norm)
        self._initialize()

    @property
    def null_label(self) -> int:
        """The label that means "no class"; ValueError where the model was trained without one."""
        if not self.has_null:
            raise ValueError(
                "this model has no null label (class_dropout_prob is 0), so it cannot be guided: "
                "sample with cfg_scale 1, or train with class_dropout_prob above 0"
            )
        return self.num_classes

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """`x_t` (B, C, H, W), `t` (B,) in [0, 1], `labels` (B,) int64 -> velocity (B, C, H, W)."""
        if x_t.shape[1:] != (self.in_channels, self.height, self.width):
            raise ValueError(
                f"the model takes latents of shape (B, {self.in_channels}, {self.height}, "
                f"{self.width}), got {tuple(x_t.shape)}"
            )
        x = self.x_embedder(x_t)  # (B, N, D)
        # A float32 table would promote the whole residual stream under autocast.
        x = x + self.pos_embed.to(x.dtype)
        if self.num_registers:
            registers = self.reg_token.to(x.dtype).expand(len(x), -1, -1)
            x = torch.cat([x, registers], dim=1)  # (B, N + R, D)
        c = self.t_embedder(t) + self.y_embedder(labels)  # (B, D)
        for block in self.blocks:
            x = block(x, c, self.rotation)
        x = self.final_layer(x[:, : self.pos_embed.shape[1]], c)  # (B, N, p*p*out)
        p = self.patch_size
        x = rearrange(
            x, "b (h w) (p q c) -> b c (h p) (w q)", h=self.height // p, w=self.width // p, p=p, q=p
        )
        return x[:, : self.in_channels]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As torch does; but a cast model keeps its rotation exact, in float32."""
        super()._apply(fn, recurse)
        if self.rotation is not None and self.rotation.dtype != torch.float32:
            grid = self.height // self.patch_size, self.width // self.patch_size
            exact = self._rotation(self.head_dim, grid)
            self.rotation = exact.to(self.rotation.device)
        return self

    def _rotation(self, head_dim: int, grid: tuple[int, int]) -> Tensor:
        """One cos/sin table for patches and registers together, (2, N + R, head_dim)."""
        angles = rotation_angles(head_dim, *grid_coordinates(*grid), self.ROPE_THETA)
        side = math.isqrt(self.num_registers)
        register_angles = rotation_angles(head_dim, *grid_coordinates(side, side), self.REGISTER_ROPE_THETA)
        return rotation_table(torch.cat([angles, register_angles]))

    def _initialize(self) -> None:
        """SiT's initialisation: Xavier, small normal embeddings, adaLN and output zero."""
        network: Any = self  # torch leaves the types of submodules open
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        patch_weight = network.x_embedder.proj.weight
        nn.init.xavier_uniform_(patch_weight.view(len(patch_weight), -1))
        nn.init.zeros_(network.x_embedder.proj.bias)
        small = [network.y_embedder.embedding_table.weight]
        small += [network.t_embedder.mlp[0].weight, network.t_embedder.mlp[2].weight]
        if self.num_registers:
            small.append(network.reg_token)
        for weight in small:
            nn.init.normal_(weight, std=0.02)
        zeros = [block.adaLN_modulation[-1] for block in network.blocks]
        zeros += [network.final_layer.adaLN_modulation[-1], network.final_layer.linear]
        for layer in zeros:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)


def _check_sizes(
    height: int,
    width: int,
    patch_size: int,
    hidden_size: int,
    num_heads: int,
    rope: bool,
    norm: str,
    num_registers: int,
) -> None:
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % patch_size:
            lower = max(size // patch_size, 1) * patch_size
            raise ValueError(
                f"latent {name} {size} is not a multiple of patch_size {patch_size}; "
                f"the nearest legal values are {lower} and {lower + patch_size}"
            )
    if hidden_size % num_heads or hidden_size % 4:
        raise ValueError(f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads} and of 4")
    if rope and (hidden_size // num_heads) % 4:
        raise ValueError(
            f"2-D RoPE needs a head dimension that is a multiple of 4, got {hidden_size} / {num_heads}"
        )
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    if num_registers < 0 or math.isqrt(num_registers) ** 2 != num_registers:
        raise ValueError(f"num_registers must be a square (0, 1, 4, 9, ...), got {num_registers}")


# Saved configurations name the public class, so that moving this file breaks nobody's checkpoint.
SiT.__module__ = "sitvit"
