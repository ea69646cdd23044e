"""The ViT-5 image classifier (arXiv 2602.08071), and the ViT of 2020 (arXiv 2010.11929) by its switches.

    tokens = [class, patches + learned positions, registers]
    tokens = block(tokens) for each block, queries and keys turned by 2-D RoPE (the class token is not)
    logits = head(norm(tokens)[class])

The ViT of 2020: LayerNorm, biases everywhere, no RoPE, no registers, no LayerScale, no QK-norm, and a
position for the class token too (`class_position`).
"""

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .layers import NORMS, Block, PatchEmbed
from .positions import Rotation, as_pair, check_grid, resample_table
from .transformer import check_arguments

POOLS = ("class", "mean")


class ViT5(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Image classifier: `model(images)` with normalised images (B, C, H, W) -> logits (B, num_classes).

    Args:
        img_size: height and width that the positions are learned at, an int where they are equal; other
            sizes can be given to `forward` (positions interpolated, RoPE rescaled).
        patch_size, in_channels, embed_dim, depth, num_heads, mlp_ratio: the network's size.
        num_classes: 0 for no head; `forward` then returns the pooled features.
        num_registers, qkv_bias, qk_norm, layer_scale_init, rope, mlp: as in `DiffusionTransformer`.
        norm_layer: "rmsnorm" or "layernorm", with its own weight (and bias).
        rope_theta, register_rope_theta, norm_eps: constants of the released models.
        class_position: the position table has a first row for the class token.
        pool: "class" reads the class token, "mean" the mean of the patch tokens, after the final norm.

    Raises:
        ValueError: sizes that do not fit together, naming the legal ones.
    """

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        num_classes: int = 1000,
        num_registers: int = 4,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = False,
        rope: bool = True,
        rope_theta: float = 10000.0,
        register_rope_theta: float = 100.0,
        qk_norm: bool = True,
        layer_scale_init: float | None = 1e-4,
        norm_layer: str = "rmsnorm",
        norm_eps: float = 1e-6,
        mlp: str = "gelu",
        class_position: bool = False,
        pool: str = "class",
    ) -> None:
        super().__init__()
        check_arguments(embed_dim, num_heads, rope, num_registers, norm_layer, mlp)
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        self.grid = check_grid(as_pair(img_size), patch_size, "image")
        self.patch_size, self.pool, self.class_position = patch_size, pool, class_position
        self.num_registers, self.head_dim = num_registers, embed_dim // num_heads
        self.thetas = float(rope_theta), float(register_rope_theta)
        self.gradient_checkpointing = False

        self.patch_embed = PatchEmbed(patch_size, in_channels, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        if num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, num_registers, embed_dim))
        num_positions = self.grid[0] * self.grid[1] + class_position
        self.pos_embed = nn.Parameter(torch.zeros(1, num_positions, embed_dim))
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                mlp_ratio,
                norm_layer,
                True,
                norm_eps,
                qkv_bias,
                qk_norm,
                mlp,
                layer_scale_init,
                adaln=False,
            )
            for _ in range(depth)
        )
        self.norm = NORMS[norm_layer](embed_dim, norm_eps, True)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        table = self.head_dim, self.grid, num_registers, *self.thetas
        self.rotation = Rotation(*table, num_still=1) if rope else None
        self._initialize()
        self.register_load_state_dict_pre_hook(_drop_rope_frequencies)

    def forward(self, images: Tensor) -> Tensor:
        """`images` (B, C, H, W) -> logits (B, num_classes)."""
        return self.head(self.pooled(self.norm(self.tokens(images))))

    def features(self, images: Tensor, blocks: list[int]) -> list[Tensor]:
        """The tokens [class, patches, registers] (B, 1 + N + R, D) after each block of `blocks`, un-normed.

        Blocks count from 0; negative ones from the end. ValueError for one that the model does not have.
        """
        depth = len(self.blocks)
        wrong = [index for index in blocks if not -depth <= index < depth]
        if wrong:
            raise ValueError(f"there is no block {wrong[0]}: the model has blocks 0 to {depth - 1}")
        kept: dict[int, Tensor] = {}
        self.tokens(images, kept)
        return [kept[index % depth] for index in blocks]

    def pooled(self, tokens: Tensor) -> Tensor:
        """One vector (B, D) of tokens [class, patches, registers]."""
        if self.pool == "class":
            return tokens[:, 0]
        return tokens[:, 1 : tokens.shape[1] - self.num_registers].mean(dim=1)

    def tokens(self, images: Tensor, kept: dict[int, Tensor] | None = None) -> Tensor:
        """Tokens after the last block, before the final norm; `kept` receives those of each block."""
        grid = check_grid(images.shape[2:], self.patch_size, "image")
        patches = self.patch_embed(images)  # (B, N, D)
        patches = patches.to(self.pos_embed.dtype)  # the stream is float32 under autocast
        first, positions = self.pos_embed.tensor_split([int(self.class_position)], dim=1)
        patches = patches + resample_table(positions, self.grid, grid).to(patches.dtype)
        cls_token = self.cls_token + first if self.class_position else self.cls_token
        rows = [cls_token.to(patches.dtype).expand(len(images), -1, -1), patches]
        if self.num_registers:
            rows.append(self.reg_token.to(patches.dtype).expand(len(images), -1, -1))
        x = torch.cat(rows, dim=1)  # (B, 1 + N + R, D)
        rotation = None if self.rotation is None else self.rotation(grid)
        for index, block in enumerate(self.blocks):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
            if kept is not None:
                kept[index] = x
        return x

    def _initialize(self) -> None:
        """Truncated normal of 0.02 for weights and tokens, zero biases."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02)


def _drop_rope_frequencies(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Released files hold each block's RoPE frequencies; they are constants here, checked and dropped."""
    for name in [key for key in state if ".attn.rope" in key and key.endswith(".freqs")]:
        found = state.pop(name)
        theta = module.thetas["rope_reg" in name]
        expected = theta ** (-torch.arange(len(found), dtype=torch.float64) / len(found))
        if not torch.allclose(found.double().cpu(), expected, rtol=1e-5):
            raise ValueError(f"{name} holds other frequencies than theta {theta:g} gives")


ViT5.__module__ = "sitvit"
