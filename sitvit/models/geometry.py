"""The geometry of a network: tokens, parameters and multiply-adds, in closed form.

D is the width, h the MLP's hidden width, N the tokens (patches, registers, class token). A block has

    parameters       4 D^2 + 4 D      attention (3 D less without qkv bias)
                     2 D h + h + D    MLP (SwiGLU: 3 D h + 2 h + D)
                     6 D^2 + 6 D      adaLN
    multiply-adds    N (4 D^2 + 2 D h) + 6 D^2, and 2 N^2 D for q k^T and its product with v

Multiply-adds are those of the linear layers (the patch convolution among them) and of attention's two
products. Left out: softmax, norms, activations, biases, modulation, rotation, look-ups. The "Gflops" that
DiT and SiT publish are these: DiT-XL/2 has 118.6 G, 524.5 G at 512 px (DiT's README: 119 and 525).
1 multiply-add is 2 FLOPs; training takes 3 times the forward pass, since the backward pass takes twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .shapes import Shape, SiTShape

FREQUENCY_DIM = 256  # inputs of the timestep embedding

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s by a part of the device's name (NVIDIA's data sheets): what MFU is a share of."""


@dataclass(frozen=True)
class Parts:
    """Numbers that add up."""

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Parameters(Parts):
    """Parameters by part of the network; a frozen sin-cos table counts, a rotation table does not."""

    patch_embedding: int
    positions: int
    extra_tokens: int  # class token and registers
    conditioning: int  # time and label embedding
    attention: int  # this and the next three: all blocks together
    mlp: int
    adaln: int
    norms_and_scales: int  # the norms' affine, QK-norm, LayerScale
    final_layer: int  # with its norm and its adaLN


@dataclass(frozen=True)
class MultiplyAdds(Parts):
    """Multiply-adds of one image's forward pass by part of the network."""

    patch_embedding: int
    conditioning: int
    attention_linear: int
    attention_products: int
    mlp: int
    adaln: int
    final_layer: int


@dataclass(frozen=True)
class Geometry:
    """What a network's arguments imply; operations are those of one image."""

    size: tuple[int, int]  # input height and width: latent pixels, or a classifier's image pixels
    grid: tuple[int, int]  # rows and columns of patches
    patches: int
    tokens: int
    parameters: Parameters
    trainable_parameters: int
    multiply_adds: MultiplyAdds

    @property
    def forward_flops(self) -> int:
        """FLOPs of a forward pass."""
        return 2 * self.multiply_adds.total

    @property
    def training_flops(self) -> int:
        """FLOPs of a forward and a backward pass, nothing recomputed."""
        return 3 * self.forward_flops


def geometry(shape: Shape) -> Geometry:
    """The token grid, parameters and multiply-adds of a network."""
    parameters = _parameters(shape)
    frozen = parameters.positions if isinstance(shape, SiTShape) and shape.positions == "sincos" else 0
    return Geometry(
        size=shape.size,
        grid=shape.grid,
        patches=shape.patches,
        tokens=shape.tokens,
        parameters=parameters,
        trainable_parameters=parameters.total - frozen,
        multiply_adds=_multiply_adds(shape),
    )


def block_matrices(shape: Shape) -> tuple[int, int, int]:
    """Weights of one block's matrices: attention, MLP, adaLN."""
    d = shape.width
    mlp = (3 if shape.gated else 2) * d * shape.mlp_width
    return 4 * d * d, mlp, 6 * d * d if isinstance(shape, SiTShape) else 0


def _parameters(shape: Shape) -> Parameters:
    d, depth = shape.width, shape.depth
    attention, mlp, adaln = block_matrices(shape)
    affine = d if shape.norm_kind == "rmsnorm" else 2 * d
    if isinstance(shape, SiTShape):
        affine *= shape.norm_affine
        positions = 0 if shape.positions == "none" else shape.patches
        label_rows = shape.num_classes + (shape.class_dropout_prob > 0)
        conditioning = (FREQUENCY_DIM + 1 + d + 1 + label_rows) * d
        final = (shape.output_values + 2 * d) * (d + 1)
    else:
        positions, conditioning = shape.patches + shape.class_position, 0
        final = shape.num_classes * (d + 1)
    scales = 2 * affine
    scales += 2 * (d // shape.num_heads) if shape.qk_norm else 0
    scales += 2 * d if shape.layer_scale_init is not None else 0
    return Parameters(
        patch_embedding=d * (shape.patch_values + 1),
        positions=positions * d,
        extra_tokens=shape.extra_tokens * d,
        conditioning=conditioning,
        attention=depth * (attention + (4 if shape.qkv_bias else 1) * d),
        mlp=depth * (mlp + (2 if shape.gated else 1) * shape.mlp_width + d),
        adaln=depth * (adaln + adaln // d),
        norms_and_scales=depth * scales,
        final_layer=final + affine,
    )


def _multiply_adds(shape: Shape) -> MultiplyAdds:
    d, depth, tokens = shape.width, shape.depth, shape.tokens
    attention, mlp, adaln = block_matrices(shape)
    if isinstance(shape, SiTShape):
        conditioning = (FREQUENCY_DIM + d) * d
        final = shape.patches * d * shape.output_values + 2 * d * d
    else:
        conditioning, final = 0, d * shape.num_classes
    return MultiplyAdds(
        patch_embedding=shape.patches * d * shape.patch_values,
        conditioning=conditioning,
        attention_linear=depth * tokens * attention,
        attention_products=depth * 2 * tokens**2 * d,
        mlp=depth * tokens * mlp,
        adaln=depth * adaln,
        final_layer=final,
    )


@dataclass(frozen=True)
class PatchGrid:
    """Patches over an image that they need not divide; all pairs are (height, width) or (rows, columns).

    By floor, the rule of a convolution without padding, the pixels that remain are cropped; by ceil the
    image is padded.
    """

    image: tuple[int, int]  # pixels
    patch_size: int
    floor: tuple[int, int]
    cropped: tuple[int, int]  # pixels
    ceil: tuple[int, int]
    padded: tuple[int, int]  # pixels


def patch_grid(image: tuple[int, int], patch_size: int) -> PatchGrid:
    """Patches of `patch_size` pixels over an image of (height, width) pixels, by both rounding rules.

    Raises:
        ValueError: a patch without pixels, or larger than the image.
    """
    height, width = image
    if not 1 <= patch_size <= min(image):
        raise ValueError(
            f"the patch must be from 1 to {min(image)} pixels, the image's shorter side, got {patch_size}"
        )
    rows, columns = -(-height // patch_size), -(-width // patch_size)
    return PatchGrid(
        image=image,
        patch_size=patch_size,
        floor=(height // patch_size, width // patch_size),
        cropped=(height % patch_size, width % patch_size),
        ceil=(rows, columns),
        padded=(rows * patch_size - height, columns * patch_size - width),
    )
