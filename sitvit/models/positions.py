"""Where a token stands: the fixed 2-D sin-cos table and the 2-D rotary embedding.

sin-cos (DiT, SiT): half of the width encodes the column, half the row; each half is
[sin(p w_k), cos(p w_k)] with w_k = 10000^(-k / (D/4)), k = 0 .. D/4 - 1.

2-D RoPE (ViT-5, arXiv 2602.08071): the first half of a head's dimensions turns with the row, the
second half with the column. Dimension pair k (interleaved: x_2k, x_2k+1) of a half turns by
p * theta^(-k / (d/4)), d the head dimension:

    (a, b) -> (a cos - b sin, a sin + b cos)
"""

import torch
from einops import rearrange
from torch import Tensor

from .fused import wide


def sincos_1d(dim: int, positions: Tensor) -> Tensor:
    """Sines then cosines of `positions` (N,) in float64, shape (N, dim); `dim` is even."""
    omega = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.outer(positions.double(), omega)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(hidden_size: int, grid_height: int, grid_width: int) -> Tensor:
    """The fixed position table of DiT, row-major, float32, shape (H*W, hidden_size).

    The column fills the first half of the width, the row the second half, as in the official code.
    """
    rows, columns = grid_coordinates(grid_height, grid_width)
    half = hidden_size // 2
    return torch.cat([sincos_1d(half, columns), sincos_1d(half, rows)], dim=1).float()


def grid_coordinates(grid_height: int, grid_width: int) -> tuple[Tensor, Tensor]:
    """Row and column of each cell of a row-major grid, each of shape (H*W,)."""
    rows = torch.arange(grid_height).repeat_interleave(grid_width)
    columns = torch.arange(grid_width).repeat(grid_height)
    return rows, columns


def rotation_angles(head_dim: int, rows: Tensor, columns: Tensor, theta: float) -> Tensor:
    """Angle of each dimension pair at each position, float64, shape (N, head_dim / 2)."""
    freqs = theta ** (-torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim // 4))
    return torch.cat([torch.outer(rows.double(), freqs), torch.outer(columns.double(), freqs)], 1)


def rotation_table(angles: Tensor) -> Tensor:
    """Cosine and sine of `angles` (N, d/2), float32, shape (2, N, d), each value once per pair member."""
    return torch.stack([angles.cos(), angles.sin()]).repeat_interleave(2, dim=-1).float()


def complex_table(table: Tensor) -> Tensor:
    """The same table (2, N, d) as unit complex numbers, one per dimension pair: (N, 1, d / 2)."""
    cos, sin = table[:, :, ::2]
    return torch.complex(cos, sin).unsqueeze(1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the interleaved pairs of `x` (..., N, heads, d) by `table` (2, N, d); float32 inside."""
    cos, sin = table.unsqueeze(2)  # (N, 1, d)
    even, odd = rearrange(wide(x), "... (k pair) -> pair ... k", pair=2)
    turned = rearrange([-odd, even], "pair ... k -> ... (k pair)")
    return (wide(x) * cos + turned * sin).to(x.dtype)
