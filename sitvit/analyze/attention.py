"""How far attention reaches (ViT, arXiv 2010.11929, appendix D.7), and how much of it registers take.

    distance = mean over queries of  sum_k a(q, k) |place(q) - place(k)| / sum_k a(q, k)

over the patches: queries and keys that are registers have no place. In patches; 0 where each token looks at
itself alone, `uniform_distance` where it looks everywhere alike.
"""

import torch
from torch import Tensor

from ..models.layers import Attention


def attention_weights(attention: Attention, x: Tensor, rotation: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d)), (B, heads, N + R, N + R), of an attention's inputs; float32."""
    q, k, _ = attention.heads(x, rotation)
    logits = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5
    return logits.softmax(dim=-1)


def patch_distances(grid: tuple[int, int]) -> Tensor:
    """Distance between the patches of a grid (rows, columns), row-major, (N, N) float32."""
    places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).float()
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


def uniform_distance(grid: tuple[int, int]) -> float:
    """The mean distance where every patch looks at all patches alike."""
    return patch_distances(grid).double().mean().item()


def attention_distance(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean distance of attention `weights` (B, heads, N + R, N + R), (B, heads)."""
    distances = patch_distances(grid).to(weights.device)
    among = weights[..., : len(distances), : len(distances)]
    return ((among * distances).sum(-1) / among.sum(-1)).mean(-1)


def register_share(weights: Tensor, num_patches: int) -> Tensor:
    """The part of the patches' attention that goes to registers, from 0 to 1, (B, heads)."""
    return weights[..., :num_patches, num_patches:].sum(-1).mean(-1)


def centre_map(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """What the centre patch looks at, (B, heads, rows, columns); what registers take is missing from it."""
    rows, columns = grid
    centre = rows // 2 * columns + columns // 2
    return weights[..., centre, : rows * columns].unflatten(-1, grid)
