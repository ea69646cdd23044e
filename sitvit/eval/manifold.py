"""Improved precision and recall (arXiv 1904.06991), in blocks, so that memory does not grow with N^2.

A set's manifold is the union of balls around its features; a ball's radius is the distance to the k-th
nearest other feature. Precision: the share of samples in the reference's manifold; recall: the share of
references in the samples'. Distances are squared, |u|^2 - 2 u.v + |v|^2 cut at zero.

`distances` is "float32": features are centred by the reference's mean in float64 first, so that the
difference of large numbers costs no digits; or "adm", which rounds to float16 where ADM's suite does (inputs,
norms, products, sums; a block with an overflow is done in float32), and is worse arithmetic.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

DISTANCES = ("float32", "adm")
ROWS, COLUMNS = 1_000, 10_000
NEIGHBOURS = 3


def precision_recall(
    reference: np.ndarray,
    samples: np.ndarray,
    distances: str = "float32",
    neighbours: int = NEIGHBOURS,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda rows: None,
) -> tuple[float, float]:
    """Precision and recall of features `samples` (M, D) against `reference` (N, D), each from 0 to 1.

    `progress` is told of each block of rows; there are 2 M + N in all.

    Raises:
        ValueError: unknown `distances`, another width, or no more features than `neighbours` in a set.
    """
    if distances not in DISTANCES:
        raise ValueError(f"distances must be {' or '.join(DISTANCES)}, got {distances!r}")
    for name, features in (("reference", reference), ("samples", samples)):
        if len(features) <= neighbours:
            raise ValueError(
                f"precision and recall need more than {neighbours} images in each set; the {name} "
                f"{'have' if name == 'samples' else 'has'} {len(features)}"
            )
    if reference.shape[1] != samples.shape[1]:
        raise ValueError(f"features of width {samples.shape[1]} and {reference.shape[1]} do not compare")
    real, made = _prepare(reference, samples, distances, device)
    block = _adm_block if distances == "adm" else _float32_block
    real_radii = _radii(real, block, neighbours, progress)
    made_radii = _radii(made, block, neighbours, progress)
    made_in, real_in = torch.zeros(len(made), dtype=torch.bool), torch.zeros(len(real), dtype=torch.bool)
    for rows in made.split(ROWS):
        first = int(rows.storage_offset() // made.shape[1])
        for start in range(0, len(real), COLUMNS):
            found = block(rows, real[start : start + COLUMNS])  # (rows, columns)
            made_in[first : first + len(rows)] |= (found <= real_radii[start : start + COLUMNS]).any(1).cpu()
            inside = found <= made_radii[first : first + len(rows), None]
            real_in[start : start + COLUMNS] |= inside.any(0).cpu()
        progress(len(rows))
    return float(made_in.double().mean()), float(real_in.double().mean())


def nearest_radii(
    features: np.ndarray, distances: str = "float32", neighbours: int = NEIGHBOURS
) -> np.ndarray:
    """Squared distance (N,) of each feature to its `neighbours`-th nearest other one."""
    own, _ = _prepare(features, features[:0], distances, "cpu")
    block = _adm_block if distances == "adm" else _float32_block
    return _radii(own, block, neighbours, lambda rows: None).numpy()


def _prepare(
    reference: np.ndarray, samples: np.ndarray, distances: str, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    sets = torch.as_tensor(reference), torch.as_tensor(samples)
    if distances == "adm":
        return sets[0].to(device, torch.float32), sets[1].to(device, torch.float32)
    centre = torch.zeros(reference.shape[1], dtype=torch.float64)
    for rows in sets[0].split(ROWS):  # no float64 copy of the whole
        centre += rows.double().sum(0) / len(sets[0])
    shifted = [
        torch.cat([(rows.double() - centre).float() for rows in part.split(ROWS)]) if len(part) else part
        for part in sets
    ]
    return shifted[0].to(device), shifted[1].to(device)


def _radii(
    features: Tensor,
    block: Callable[[Tensor, Tensor], Tensor],
    neighbours: int,
    progress: Callable[[int], object],
) -> Tensor:
    """(N,): rank `neighbours` of the distances to all, of which rank 0 is the feature itself."""
    radii = []
    for rows in features.split(ROWS):
        nearest = torch.empty(len(rows), 0, device=features.device)
        for columns in features.split(COLUMNS):
            found = block(rows, columns)
            found = found.topk(min(neighbours + 1, found.shape[1]), largest=False).values
            nearest = torch.cat([nearest, found], dim=1)
        radii.append(nearest.kthvalue(neighbours + 1).values)
        progress(len(rows))
    return torch.cat(radii)


def _float32_block(u: Tensor, v: Tensor) -> Tensor:
    norms = u.square().sum(1)[:, None] + v.square().sum(1)[None]
    return torch.addmm(norms, u, v.T, alpha=-2).clamp_(min=0)


def _adm_block(u: Tensor, v: Tensor) -> Tensor:
    u16, v16 = _half(u), _half(v)
    norms_u, norms_v = (_half(_half(x.square()).sum(1)) for x in (u16, v16))
    products = _half(u16 @ v16.T)
    distances = _half(_half(norms_u[:, None] - 2 * products) + norms_v[None])
    if torch.isfinite(distances).all():
        return distances.clamp_(min=0)
    norms = u.square().sum(1)[:, None] - 2 * (u @ v.T)
    return (norms + v.square().sum(1)[None]).clamp_(min=0)


def _half(values: Tensor) -> Tensor:
    """Rounded to float16, held in float32."""
    return values.half().float()
