"""Where a token stands: the fixed 2-D sin-cos table and the 2-D rotary embedding.

sin-cos (DiT, SiT): half of the width encodes the column, half the row; each half is
[sin(p w_k), cos(p w_k)] with w_k = 10000^(-k / (D/4)), k = 0 .. D/4 - 1.

2-D RoPE (ViT-5, arXiv 2602.08071): the first half of a head's dimensions turns with the row, the
second half with the column. Dimension pair k (interleaved: x_2k, x_2k+1) of a half turns by
p * theta^(-k / (d/4)), d the head dimension:

    (a, b) -> (a cos - b sin, a sin + b cos)
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .fused import wide


def sincos_1d(dim: int, positions: Tensor) -> Tensor:
    """Sines then cosines of `positions` (N,) in float64, shape (N, dim); `dim` is even."""
    omega = 10000.0 ** (-_count(dim // 2) / (dim // 2))
    angles = torch.outer(positions.double(), omega)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(hidden_size: int, grid_height: int, grid_width: int) -> Tensor:
    """The fixed position table of DiT, row-major, float32, shape (H*W, hidden_size).

    The column fills the first half of the width, the row the second half, as in the official code.
    """
    rows, columns = grid_coordinates(grid_height, grid_width)
    half = hidden_size // 2
    return torch.cat([sincos_1d(half, columns), sincos_1d(half, rows)], dim=1).float()


def grid_coordinates(
    grid_height: int, grid_width: int, trained: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Row and column of each cell of a row-major grid, float64, each of shape (H*W,).

    On another grid than the `trained` one they are rescaled to it, arange(n) / n * trained_n (ViT-5).
    """
    rows, columns = _count(grid_height), _count(grid_width)
    if trained is not None and trained != (grid_height, grid_width):
        rows, columns = rows / grid_height * trained[0], columns / grid_width * trained[1]
    return rows.repeat_interleave(grid_width), columns.repeat(grid_height)


def _count(n: int) -> Tensor:
    """0 .. n - 1 in float64, numbers even where the device in force is "meta"."""
    return torch.arange(n, dtype=torch.float64, device="cpu")


def resample_table(table: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """A learned table (1, H*W, D) of `grid`, interpolated (bicubic) to `new_grid`."""
    if grid == new_grid:
        return table
    maps = rearrange(table.float(), "one (h w) d -> one d h w", h=grid[0])
    maps = F.interpolate(maps, new_grid, mode="bicubic", align_corners=False)
    return rearrange(maps, "one d h w -> one (h w) d").to(table.dtype)


def as_pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) of a size that is given as one number where they are equal."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def check_grid(size: Sequence[int], patch_size: int, what: str) -> tuple[int, int]:
    """Rows and columns of patches of a (height, width); ValueError naming the nearest legal sizes."""
    if len(size) != 2:
        raise ValueError(f"a batch of {what}s has four dimensions, (batch, channels, height, width)")
    height, width = size
    if patch_size < 1:
        raise ValueError(f"patch_size must be at least 1, got {patch_size}")
    for name, length in (("height", height), ("width", width)):
        if length < 1 or length % patch_size:
            lower = max(length // patch_size, 1) * patch_size
            raise ValueError(
                f"{what} {name} {length} is not a multiple of patch_size {patch_size}; "
                f"the nearest legal values are {lower} and {lower + patch_size}"
            )
    return height // patch_size, width // patch_size


class Rotation(nn.Module):
    """One cos/sin table for [still tokens, patches, registers] of any grid, float32.

    The registers stand on their own square grid; the still tokens (a class token) do not turn. The table
    is no weight: it is in no state dict, stays exact in a model that is cast, and is computed again
    wherever the model goes, so that a model made empty (on the meta device) has it too.
    """

    def __init__(
        self,
        head_dim: int,
        trained_grid: tuple[int, int],
        num_registers: int,
        theta: float,
        register_theta: float,
        num_still: int = 0,
    ) -> None:
        super().__init__()
        self.head_dim, self.trained_grid = head_dim, trained_grid
        self.num_registers, self.num_still = num_registers, num_still
        self.thetas = theta, register_theta
        self.table: Tensor
        self.register_buffer("table", self._compute(trained_grid), persistent=False)
        self._elsewhere: dict[tuple[int, int], Tensor] = {}

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """The table of `grid`, (2, num_still + N + R, head_dim / 2); the last other grid's is kept."""
        if grid == self.trained_grid:
            return self.table
        if grid not in self._elsewhere:
            with torch.inference_mode(False):  # what is kept must serve training too
                self._elsewhere = {grid: self._compute(grid).to(self.table.device)}
        return self._elsewhere[grid]

    def _compute(self, grid: tuple[int, int]) -> Tensor:
        still = torch.zeros(self.num_still, self.head_dim // 2, dtype=torch.float64, device="cpu")
        coordinates = grid_coordinates(*grid, self.trained_grid)
        patches = rotation_angles(self.head_dim, *coordinates, self.thetas[0])
        side = math.isqrt(self.num_registers)
        registers = rotation_angles(self.head_dim, *grid_coordinates(side, side), self.thetas[1])
        return rotation_table(torch.cat([still, patches, registers]))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.table = self._compute(self.trained_grid).to(self.table.device)
        self._elsewhere = {}
        return self


def rotation_angles(head_dim: int, rows: Tensor, columns: Tensor, theta: float) -> Tensor:
    """Angle of each dimension pair at each position, float64, shape (N, head_dim / 2)."""
    freqs = theta ** (-_count(head_dim // 4) / (head_dim // 4))
    return torch.cat([torch.outer(rows.double(), freqs), torch.outer(columns.double(), freqs)], 1)


def rotation_table(angles: Tensor) -> Tensor:
    """Cosine and sine of `angles` (N, d/2), float32, shape (2, N, d/2)."""
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the interleaved pairs of `x` (..., N, heads, d) by `table` (2, N, d/2); float32 inside."""
    cos, sin = table.unsqueeze(2)  # (N, 1, d/2)
    a, b = wide(x).unflatten(-1, (-1, 2)).unbind(-1)  # einops here costs a compiled block 2 % more
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
