"""The ViT-5 image classifier (arXiv 2602.08071), and the ViT of 2020 (arXiv 2010.11929) by its switches.

    tokens = [class, patches + learned positions, registers]
    tokens = block(tokens) for each block, queries and keys turned by 2-D RoPE (the class token is not)
    logits = head(norm(tokens)[class])

The ViT of 2020: LayerNorm, biases everywhere, no RoPE, no registers, no LayerScale, no QK-norm, and a
position for the class token too (`class_position`).
"""

import dataclasses
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .layers import NORMS, Block, PatchEmbed
from .positions import Rotation, check_grid, resample_table
from .shapes import ViTShape


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
        ValueError: a value of another type, or sizes that do not fit together, naming the legal ones.
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
        shape = ViTShape.of(self.config)
        self.register_to_config(**dataclasses.asdict(shape))  # numpy's numbers could not be saved
        self.grid, self.patch_size = shape.grid, shape.patch_size
        self.pool, self.class_position = shape.pool, shape.class_position
        self.num_registers, self.head_dim = shape.num_registers, shape.embed_dim // shape.num_heads
        self.thetas = shape.rope_theta, shape.register_rope_theta
        self.gradient_checkpointing = False

        width = shape.embed_dim
        self.patch_embed = PatchEmbed(shape.patch_size, shape.in_channels, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if shape.num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.num_registers, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.patches + shape.class_position, width))
        self.blocks = nn.ModuleList(
            Block(
                width,
                shape.num_heads,
                shape.mlp_ratio,
                shape.norm_layer,
                True,
                shape.norm_eps,
                shape.qkv_bias,
                shape.qk_norm,
                shape.mlp,
                shape.layer_scale_init,
                adaln=False,
            )
            for _ in range(shape.depth)
        )
        self.norm = NORMS[shape.norm_layer](width, shape.norm_eps, True)
        self.head = nn.Linear(width, shape.num_classes) if shape.num_classes else nn.Identity()
        table = self.head_dim, self.grid, shape.num_registers, *self.thetas
        self.rotation = Rotation(*table, num_still=1) if shape.rope else None
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
        if images.shape[1] != self.config["in_channels"]:
            raise ValueError(
                f"the model takes {self.config['in_channels']} channels, got images {tuple(images.shape)}"
            )
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
        same = len(found) == module.head_dim // 4 and torch.allclose(
            found.double().cpu(), expected, rtol=1e-5
        )
        if not same:
            raise ValueError(f"{name} holds other frequencies than theta {theta:g} gives")


ViT5.__module__ = "sitvit"
