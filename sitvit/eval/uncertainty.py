"""How far a Frechet distance of N images can be trusted: its spread and its bias.

Spread: the standard deviation over bootstrap resamples of the N features. (Their mean is no estimate: a
resample repeats images, and so is further away.)

Bias: a distance of N images lies above the limit by about b / N (arXiv 1911.07023). FID-infinity is the
intercept of the straight line through the distances of random subsets, over 1 / N.
"""

from collections.abc import Callable

import numpy as np
import torch

from .metrics import Gaussian, distance_of_gaussians
from .statistics import FeatureStatistics

ROWS = 5_000


def bootstrap_spread(
    features: np.ndarray,
    reference: Gaussian,
    num_resamples: int = 10,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda count: None,
) -> float:
    """Standard deviation of the distance over resamples with replacement of `features` (N, D).

    Raises:
        ValueError: fewer than 2 resamples, which have no spread.
    """
    if num_resamples < 2:
        raise ValueError(f"a spread needs at least 2 resamples, got {num_resamples}")
    draw = np.random.default_rng(seed)
    values = []
    for _ in range(num_resamples):
        rows = draw.integers(len(features), size=len(features))
        values.append(_distance(features, np.sort(rows), reference, device))
        progress(1)
    return float(np.std(values, ddof=1))


def infinite_distance(
    features: np.ndarray,
    reference: Gaussian,
    num_points: int = 15,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda count: None,
) -> float:
    """The distance extrapolated to endlessly many images, from subsets of a tenth of N (at least D) to N.

    Raises:
        ValueError: too few features to leave a range of sizes.
    """
    total, width = features.shape
    smallest = max(total // 10, min(width, total // 2), 2)
    if num_points < 2 or total < 2 * smallest:
        raise ValueError(f"FID-infinity needs at least {2 * smallest} images, got {total}")
    draw = np.random.default_rng(seed)
    sizes = np.linspace(smallest, total, num_points).astype(int)
    values = []
    for size in sizes:
        rows = np.sort(draw.choice(total, size, replace=False))
        values.append(_distance(features, rows, reference, device))
        progress(1)
    slope_and_intercept = np.polyfit(1 / sizes, values, 1)
    return float(slope_and_intercept[1])


def _distance(
    features: np.ndarray, rows: np.ndarray, reference: Gaussian, device: torch.device | str
) -> float:
    statistics = FeatureStatistics(features.shape[1], device)
    for start in range(0, len(rows), ROWS):
        statistics.update(features[rows[start : start + ROWS]])
    return distance_of_gaussians(Gaussian.of(statistics.mean, statistics.covariance), reference)
