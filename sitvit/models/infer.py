"""Which network a state dict belongs to, read off its key names and shapes.

What shapes cannot tell: the number of heads without QK-norm (published widths are known), height and
width of a grid that is not square, and the norm and RoPE of a mix between vanilla and ViT-5.
"""

import math
import re
from typing import Any

import torch
from torch import Tensor

from .positions import check_grid, sincos_2d
from .presets import VANILLA, VIT5

State = dict[str, Tensor]
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16, 1280: 16}
"""Heads of the published widths."""


def is_diffusion_transformer(state: State) -> bool:
    """Whether the keys are those of SiT and DiT."""
    return any(key.startswith(("x_embedder.", "y_embedder.", "final_layer.")) for key in state)


def is_classifier(state: State) -> bool:
    """Whether the keys are those of ViT-5 and ViT."""
    return "patch_embed.proj.weight" in state and "cls_token" in state


def has_qk_norm(state: State) -> bool:
    """Whether queries and keys are normed; then the head's dimension, so the number of heads, is known."""
    return "blocks.0.attn.q_norm.weight" in state


def diffusion_arguments(
    state: State,
    num_heads: int | None,
    input_size: tuple[int, int] | None,
    num_classes: int | None = None,
    with_table: bool = True,
) -> dict[str, Any]:
    """Constructor arguments of the `DiffusionTransformer` that has these weights.

    The last label row stands for "no class", unless `num_classes` says that there is one for each row.
    Without `with_table` the positions are the fixed ones of `input_size`, which the state does not hold.

    Raises:
        ValueError: something that shapes cannot tell was not given.
        KeyError: a tensor that is needed, by name.
    """
    width, channels, patch = _shape(state, "x_embedder.proj.weight", 4)[:3]
    sizes = _sizes(state, width, num_heads)
    final_rows = _shape(state, "final_layer.linear.weight", 2)[0]
    arguments = {
        **_backbone(state),
        **sizes,
        "hidden_size": width,
        "patch_size": patch,
        "in_channels": channels,
        **_classes(_shape(state, "y_embedder.embedding_table.weight", 2)[0], num_classes),
        "learn_sigma": final_rows == 2 * patch * patch * channels,
    }
    if "reg_token" in state:
        arguments["num_registers"] = _shape(state, "reg_token", 3)[1]
    if not with_table:
        return {**arguments, "positions": "sincos", "input_size": input_size}
    table = state["pos_embed"]  # a file without it is damaged far more often than it is without positions
    _shape(state, "pos_embed", 3)
    input_size = _fixed_size(table[0], patch) or input_size  # a fixed table tells, whatever was asked for
    grid = _grid(table.shape[1], patch, input_size)
    arguments["input_size"] = tuple(side * patch for side in grid)
    fixed = sincos_2d(width, *grid)
    close = fixed.shape == table[0].shape and torch.allclose(table[0].float(), fixed, atol=1e-2)
    arguments["positions"] = "sincos" if close else "learned"
    return arguments


def _classes(rows: int, num_classes: int | None) -> dict[str, Any]:
    """The number of classes, and 0 for the label dropout of a network that has no row for "no class"."""
    if num_classes in (None, rows - 1):
        return {"num_classes": rows - 1}
    if num_classes != rows:
        raise ValueError(
            f"it has {rows} label rows: num_classes is {rows - 1}, or {rows} where none means no class, not "
            f"{num_classes}"
        )
    return {"num_classes": rows, "class_dropout_prob": 0.0}


def assumed(state: State, has_null: bool) -> str:
    """What `diffusion_arguments` takes for granted of a bare file, in words."""
    backbone = _backbone(state)
    rows = state["y_embedder.embedding_table.weight"].shape[0]
    rope = "RoPE" if backbone["rope"] else "no RoPE"
    last = f"; the last of {rows} label rows is the null label" if has_null else ""
    return f" (taken for granted: {backbone['norm']}, {rope} and GELU's tanh form, as published{last})"


def classifier_arguments(
    state: State, num_heads: int | None, input_size: tuple[int, int] | None
) -> dict[str, Any]:
    """Constructor arguments of the `ViT5` that has these weights; ValueError as above."""
    width, channels, patch = _shape(state, "patch_embed.proj.weight", 4)[:3]
    num_positions = _shape(state, "pos_embed", 3)[1]
    class_position = math.isqrt(num_positions) ** 2 != num_positions and input_size is None
    if input_size is not None:
        class_position = num_positions != input_size[0] // patch * (input_size[1] // patch)
    grid = _grid(num_positions - class_position, patch, input_size)
    first = "blocks.0."
    return {
        **_sizes(state, width, num_heads),
        "embed_dim": width,
        "patch_size": patch,
        "in_channels": channels,
        "img_size": tuple(side * patch for side in grid),
        "num_classes": _shape(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "num_registers": _shape(state, "reg_token", 3)[1] if "reg_token" in state else 0,
        "qkv_bias": f"{first}attn.qkv.bias" in state,
        "qk_norm": has_qk_norm(state),
        "rope": has_qk_norm(state) or any(key.endswith(".attn.rope.freqs") for key in state),
        "layer_scale_init": 1e-4 if f"{first}gamma_1" in state else None,
        "norm_layer": "layernorm" if "norm.bias" in state else "rmsnorm",
        "class_position": class_position,
    }


def _shape(state: State, key: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor that sizes are read off; ValueError where it has other dimensions or no rows."""
    shape = tuple(state[key].shape)
    if len(shape) != dimensions or 0 in shape:
        raise ValueError(f"{key} has the shape {shape}; {dimensions} dimensions with values are needed")
    return shape


def _sizes(state: State, width: int, num_heads: int | None) -> dict[str, Any]:
    blocks = {int(match[1]) for key in state if (match := re.match(r"blocks\.(\d+)\.", key))}
    if not blocks:
        raise ValueError("there is no block in it (blocks.0. ...)")
    if max(blocks) >= len(blocks):  # before a network of that depth is built
        lacking = next(i for i in range(len(blocks) + 1) if i not in blocks)
        raise ValueError(f"it has blocks.{max(blocks)}. but no blocks.{lacking}.")
    fc1, fc2 = state.get("blocks.0.mlp.fc1.weight"), state.get("blocks.0.mlp.fc2.weight")
    if fc1 is None or fc2 is None:
        raise ValueError("blocks.0.mlp.fc1.weight or blocks.0.mlp.fc2.weight is missing")
    for key in ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"):
        _shape(state, key, 2)
    sizes: dict[str, Any] = {"depth": max(blocks) + 1}
    if fc1.shape[0] == fc2.shape[1]:
        ratio = fc1.shape[0] / width
        # The division's rounding must not lose a row when the network multiplies again.
        sizes["mlp_ratio"] = ratio if int(width * ratio) == fc1.shape[0] else math.nextafter(ratio, math.inf)
    else:  # SwiGLU at the parameters of ratio r: 3 D h + 2 h = 2 D H + H
        sizes |= {
            "mlp": "swiglu",
            "mlp_ratio": round(fc2.shape[1] * (3 * width + 2) / (2 * width + 1) / width, 2),
        }
    q_norm = state.get("blocks.0.attn.q_norm.weight")
    found = width // len(q_norm) if q_norm is not None else num_heads or HEADS.get(width)
    if found is None:
        raise ValueError(f"the number of heads at width {width} cannot be read off; give num_heads")
    return sizes | {"num_heads": found}


def _fixed_size(table: Tensor, patch: int) -> tuple[int, int] | None:
    """The size whose fixed position table this is, the square one first; None where it is learned."""
    count, width = table.shape
    sides = sorted((h for h in range(1, count + 1) if count % h == 0), key=lambda h: abs(h - count // h))
    for rows in sides:
        if width % 4 == 0 and torch.allclose(table.float(), sincos_2d(width, rows, count // rows), atol=1e-2):
            return rows * patch, count // rows * patch
    return None


def _grid(num_patches: int, patch: int, input_size: tuple[int, int] | None) -> tuple[int, int]:
    side = math.isqrt(num_patches)
    if input_size is not None:
        grid = check_grid(input_size, patch, "input_size")
    elif num_patches and side * side == num_patches:
        grid = side, side
    else:
        raise ValueError(f"{num_patches} positions are no square grid; give input_size (height, width)")
    if num_patches and grid[0] * grid[1] != num_patches:
        raise ValueError(
            f"the position table has {num_patches} rows, but input_size {input_size} at patch {patch} "
            f"has {grid[0] * grid[1]}"
        )
    return grid


def _backbone(state: State) -> dict[str, Any]:
    """The vanilla or the ViT-5 switches; ValueError for a mix, whose norm and RoPE leave no trace."""
    first = "blocks.0."
    bias = "attn.qkv.bias"
    if first + bias not in state and any(key.endswith(f".{bias}") for key in state):
        raise KeyError(first + bias)
    signs = {
        "QK-norm": has_qk_norm(state),
        "LayerScale": f"{first}gamma_1" in state,
        "no qkv bias": f"{first}attn.qkv.bias" not in state,
    }
    if not any(signs.values()) and f"{first}norm1.weight" not in state:
        return dict(VANILLA)
    if all(signs.values()):
        affine = f"{first}norm1.weight" in state
        return {**VIT5, "num_registers": 0, "norm_affine": affine}
    found = ", ".join(sign for sign, there in signs.items() if there) or "a norm with weights"
    raise ValueError(
        f"it is a mix of vanilla and ViT-5 ({found}), whose norm and RoPE weights cannot tell; load the "
        "folder that has its config.json"
    )
