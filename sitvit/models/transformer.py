"""The one transformer behind SiT, DiT and SiT on ViT-5 (DiT, arXiv 2212.09748; SiT, arXiv 2401.08740).

    x = patches(x_t) + positions (+ register tokens, appended last)
    c = t_embed(t) + y_embed(label)
    x = block(x, c) for each block (`layers.Block`, with adaLN-Zero)
    prediction = unpatchify(final_layer(x without registers, c))

Every line of the ViT-5 table (arXiv 2602.08071) is a switch of its own, and any mix is legal: vanilla
SiT is one setting (LayerNorm, qkv bias, no LayerScale), SiT on ViT-5 another (RMSNorm, LayerScale from
1e-4, QK-norm, 2-D RoPE beside the absolute positions, 4 registers, no qkv bias).

Difference from the official code: labels are dropped by the training stream and not in here, so the
network is a pure function of its inputs.
"""

import dataclasses
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .fused import is_plain
from .layers import Block, FinalLayer, LabelEmbedder, PatchEmbed, TimestepEmbedder
from .positions import Rotation, check_grid, resample_table, sincos_2d
from .shapes import SiTShape


class DiffusionTransformer(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A network of (x_t, t, label); `SiT` and `DiT` say what it predicts.

    Args:
        input_size: the latent's height and width, an int where they are equal; multiples of `patch_size`.
        patch_size, in_channels: latent pixels per token side; latent channels.
        hidden_size, depth, num_heads, mlp_ratio: the transformer's size.
        class_dropout_prob: above zero, the label table has a last row for "no class" (`null_label`).
            The rate itself is the training stream's.
        num_classes: labels run from 0 to num_classes - 1.
        learn_sigma: the last layer has twice the channels.
        norm, norm_affine: "layernorm" or "rmsnorm"; with its own weight (and LayerNorm's bias) or without.
        qkv_bias, qk_norm: attention's bias and RMSNorm of queries and keys.
        rope: 2-D rotary embedding of queries and keys; registers turn on their own square grid.
        positions: absolute ones: "sincos" (fixed), "learned" or "none".
        num_registers: extra tokens, a square number (0, 1, 4, 9, ...).
        layer_scale_init: LayerScale's initial gamma, or None for no LayerScale.
        mlp: "gelu_tanh", "gelu" (erf) or "swiglu" (at equal parameters).

    Raises:
        ValueError: a value of another type, or sizes that do not fit together, naming the legal ones.
    """

    ROPE_THETA = 10000.0
    REGISTER_ROPE_THETA = 100.0
    NORM_EPS = 1e-6
    _supports_gradient_checkpointing = True

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
        norm_affine: bool = False,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        rope: bool = False,
        positions: str = "sincos",
        num_registers: int = 0,
        layer_scale_init: float | None = None,
        mlp: str = "gelu_tanh",
    ) -> None:
        super().__init__()
        shape = SiTShape.of(self.config)
        self.register_to_config(**dataclasses.asdict(shape))  # numpy's numbers could not be saved
        self.grid = shape.grid
        self.height, self.width = shape.size
        self.patch_size, self.in_channels = shape.patch_size, shape.in_channels
        self.num_classes, self.has_null = shape.num_classes, shape.class_dropout_prob > 0
        self.out_channels = shape.in_channels * (2 if shape.learn_sigma else 1)
        self.hidden_size, self.head_dim = shape.hidden_size, shape.hidden_size // shape.num_heads
        self.num_registers, self.positions_kind = shape.num_registers, shape.positions
        self.gradient_checkpointing = False
        self._compiled = False

        self.x_embedder = PatchEmbed(self.patch_size, self.in_channels, self.hidden_size)
        self.t_embedder = TimestepEmbedder(self.hidden_size)
        self.y_embedder = LabelEmbedder(self.num_classes, self.hidden_size, self.has_null)
        self.pos_embed = self._positions()
        if self.num_registers:
            self.reg_token = nn.Parameter(torch.zeros(1, self.num_registers, self.hidden_size))
        thetas = self.ROPE_THETA, self.REGISTER_ROPE_THETA
        self.rotation = (
            Rotation(self.head_dim, self.grid, self.num_registers, *thetas) if shape.rope else None
        )
        self._elsewhere: dict[tuple[tuple[int, int], torch.device], Tensor] = {}
        self.blocks = nn.ModuleList(
            Block(
                self.hidden_size,
                shape.num_heads,
                shape.mlp_ratio,
                shape.norm,
                shape.norm_affine,
                self.NORM_EPS,
                shape.qkv_bias,
                shape.qk_norm,
                shape.mlp,
                shape.layer_scale_init,
                adaln=True,
            )
            for _ in range(shape.depth)
        )
        self.final_layer = FinalLayer(
            self.hidden_size, self.patch_size, self.out_channels, shape.norm, shape.norm_affine
        )
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

    def predict(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """`x_t` (B, C, H, W), `t` (B,), `labels` (B,) int64 -> (B, out_channels, H, W).

        A `t` or label of one element is all images'. H and W may differ from `input_size`: fixed positions
        are computed for that grid, learned ones interpolated, RoPE rescaled.

        Raises:
            ValueError: shapes that do not fit; labels on a CPU that are out of range. Elsewhere nobody looks,
                since that would wait for the device.
        """
        grid = check_grid(x_t.shape[2:], self.patch_size, "latent")
        if x_t.shape[1] != self.in_channels:
            raise ValueError(f"the model takes {self.in_channels} channels, got x_t {tuple(x_t.shape)}")
        positions, rotation = self.tables(grid)
        x = self.x_embedder(x_t)  # (B, N, D)
        # The residual stream has the weights' type: float32 under autocast, else LayerScale's small
        # updates would be rounded away.
        x = x.to(self.x_embedder.proj.weight.dtype)
        num_patches = x.shape[1]
        if positions is not None:
            x = x + positions.to(x.dtype)
        if self.num_registers:
            registers = self.reg_token.to(x.dtype).expand(len(x), -1, -1)
            x = torch.cat([x, registers], dim=1)  # (B, N + R, D)
        t, labels = _per_image("t", t, len(x)), _per_image("labels", labels, len(x))
        self._check_labels(labels)
        c = self.t_embedder(t) + self.y_embedder(labels)  # (B, D)
        if self._compiled:  # else the first smaller batch would compile everything again
            for tensor in (x, c):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        for block in self.blocks:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, c, use_reentrant=False)
            else:
                x = block(x, rotation, c)
        x = self.final_layer(x[:, :num_patches], c)  # (B, N, p*p*out)
        p = self.patch_size
        return rearrange(x, "b (h w) (p q c) -> b c (h p) (w q)", h=grid[0], w=grid[1], p=p, q=p)

    def compile_blocks(self) -> None:
        """Compile the block's code once for all blocks and batch sizes (torch.compile, in place)."""
        self._compiled = True
        for block in self.blocks:
            block.compile()

    def tables(self, grid: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
        """Absolute positions (1, N, D) and rotation (2, N + R, head_dim / 2) of a grid, None where absent."""
        rotation = None if self.rotation is None else self.rotation(grid)
        if grid == self.grid or self.pos_embed is None:
            return self.pos_embed, rotation
        if self.positions_kind == "learned":  # its weights move, so it is not kept
            return resample_table(self.pos_embed, self.grid, grid), rotation
        where = grid, self.pos_embed.device
        if where not in self._elsewhere:  # the last grid alone is kept
            with torch.inference_mode(False):  # what is kept must serve training too
                self._elsewhere = {where: sincos_2d(self.hidden_size, *grid)[None].to(where[1])}
        return self._elsewhere[where], rotation

    def _check_labels(self, labels: Tensor) -> None:
        if labels.device.type != "cpu" or is_plain():  # traced or transformed code cannot look at values
            return
        wrong = labels[(labels < 0) | (labels >= self.num_classes + self.has_null)]
        if len(wrong):
            null = f", and {self.num_classes} for no class" if self.has_null else ""
            raise ValueError(
                f"label {int(wrong[0])} is out of range: this model has {self.num_classes} classes, "
                f"labels 0 to {self.num_classes - 1}{null}"
            )

    def _positions(self) -> nn.Parameter | None:
        if self.positions_kind == "sincos":
            return nn.Parameter(sincos_2d(self.hidden_size, *self.grid)[None], requires_grad=False)
        if self.positions_kind == "learned":
            return nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], self.hidden_size))
        return None

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
        if self.positions_kind == "learned":
            small.append(network.pos_embed)
        for weight in small:
            nn.init.normal_(weight, std=0.02)
        zeros = [block.adaLN_modulation[-1] for block in network.blocks]
        zeros += [network.final_layer.adaLN_modulation[-1], network.final_layer.linear]
        for layer in zeros:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)


def _per_image(name: str, value: Tensor, batch_size: int) -> Tensor:
    """`value` as (B,); ValueError unless it is that, or of one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(1).expand(batch_size)
    if not isinstance(value, Tensor) or value.shape != (batch_size,):
        got = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name} must be a tensor with one element for each of the {batch_size} images, or one for all; "
            f"got {got}"
        )
    return value
