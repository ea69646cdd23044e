"""The memory of a training step: weights, gradients, EMA, AdamW, activations, in closed form.

What one device holds at the end of the forward pass, in bytes; the backward pass's temporaries, the
allocator's slack, CUDA's own memory and the autoencoder come on top. Weights stay float32 under bf16
autocast, as in PyTorch: there is no second master copy, but autograd holds bf16 copies of the matrices.

Activations: a block keeps, per token, in values of s = 4 or (bf16) 2 bytes, but for a LayerNorm's input,
which is float32 always, as the residual stream is (D the width, h the MLP's hidden width):

    norm, modulation    layernorm: input D (4 bytes), normed D, modulated D
                        rmsnorm, fused with the modulation: normed D; in bf16 modulated D too, which
                        float32 makes again in the backward pass
                        a classifier's, not modulated: input D (4 bytes), output D
    attention           q, k, v 3 D; with QK-norm or RoPE the turned q and k 2 D; the heads' output D
    MLP                 before and after the activation 2 h (SwiGLU: 4 h)
    gate or LayerScale  the outputs of attention and MLP, D each
    statistics          4 bytes each: mean (not rmsnorm) and scale of a norm; softmax's sum of each head;
                        with QK-norm two scales of each head

So SiT keeps 12 D + 2 h = 20 D values a token and block. The final layer, float32, keeps input D (not
rmsnorm), normed D and modulated D of each patch.

With gradient checkpointing a block keeps its input, D (4 bytes), and one block at a time all of the above.

Assumed: attention that keeps no N x N matrix, eager mode, sitvit's fused norms.
Left out: whatever has no token axis or no batch axis (modulations, rotation tables, the input). Measured: at
S/2's width, 2 blocks, 256 tokens, batch 4, float32 and bf16, autograd keeps 0.3 % (SiT) and 0.6 % (SiT on
ViT-5) more. Other switches and the classifiers are by the formula alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from .geometry import Parts, block_matrices, geometry
from .shapes import Shape, SiTShape

BYTES = {"float32": 4, "bf16": 2}
"""Bytes of an activation, by name of the precision: all float32, or bf16 autocast."""


@dataclass(frozen=True)
class Memory(Parts):
    """Bytes held by training on one device."""

    weights: int  # float32
    gradients: int  # float32, of what is trained
    ema: int  # float32
    adamw: int  # two float32 moments of what is trained
    autocast_copies: int
    activations: int


def memory(
    shape: Shape, batch_size: int, dtype: str, num_averages: int = 1, checkpointing: bool = False
) -> Memory:
    """Bytes of a training step at `batch_size` images a device; `dtype` is a key of `BYTES`.

    `num_averages` of the weights are held; `checkpointing` is of gradients.

    Raises:
        ValueError: an unknown dtype, or a batch without images.
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype must be one of {', '.join(BYTES)}, got {dtype!r}")
    if batch_size < 1:
        raise ValueError(f"the batch size must be at least 1, got {batch_size}")
    sizes = geometry(shape)
    matrices = shape.depth * sum(block_matrices(shape)) + shape.width * shape.patch_values
    if not isinstance(shape, SiTShape):  # a velocity network's final layer runs in float32
        matrices += shape.width * shape.num_classes
    return Memory(
        weights=4 * sizes.parameters.total,
        gradients=4 * sizes.trainable_parameters,
        ema=4 * sizes.parameters.total * num_averages,
        adamw=8 * sizes.trainable_parameters,
        autocast_copies=0 if dtype == "float32" else BYTES[dtype] * matrices,
        activations=batch_size * _activation_bytes(shape, BYTES[dtype], checkpointing),
    )


def _activation_bytes(shape: Shape, s: int, checkpointing: bool) -> int:
    """Bytes that autograd keeps of one image; the table above."""
    d, rms = shape.width, shape.norm_kind == "rmsnorm"
    if isinstance(shape, SiTShape):
        kept_by_rms = 1 if s == BYTES["float32"] else 2
        norm = kept_by_rms * s if rms else 4 + 2 * s
        gated_outputs = 2
        final = shape.patches * 4 * d * (2 if rms else 3)
    else:
        norm = 4 + s
        gated_outputs = 0 if shape.layer_scale_init is None else 2
        final = shape.tokens * 4 * d
    attention = 3 + (2 if shape.qk_norm or shape.rope else 0) + 1
    per_token = d * (2 * norm + s * (attention + gated_outputs))
    per_token += s * (4 if shape.gated else 2) * shape.mlp_width
    per_token += 4 * (2 * (1 if rms else 2) + shape.num_heads * (3 if shape.qk_norm else 1))
    blocks = 4 * d * shape.depth + per_token if checkpointing else shape.depth * per_token
    return shape.tokens * blocks + final
