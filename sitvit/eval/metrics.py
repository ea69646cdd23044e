"""Distances between two sets of features, and the Inception Score.

Frechet distance of two Gaussians (arXiv 1706.08500):

    |mu_1 - mu_2|^2 + tr S_1 + tr S_2 - 2 tr (S_1 S_2)^(1/2)

With S = L L^T the last trace is the nuclear norm (sum of the singular values) of L_1^T L_2. L is Cholesky's
where S is well away from singular, else of a symmetric eigendecomposition cut at zero, so that rank-deficient
covariances (fewer images than features) are exact too, where a matrix square root is not.

Inception Score (arXiv 1606.03498), over splits of consecutive images:  exp(mean_i KL(p_i || mean_i p_i)).

Kernel Inception Distance (arXiv 1801.01401): the unbiased MMD^2 of subsets of both sets under the kernel
(x . y / D + 1)^3, averaged.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .statistics import FeatureStatistics

CHOLESKY_PIVOT = 1e-9
"""Relative to the largest variance: with a smaller pivot, rounding would count as variance."""


@dataclass(frozen=True)
class Gaussian:
    """A fitted Gaussian: mean (D,), covariance (D, D), and what a distance needs of the latter."""

    mean: np.ndarray
    trace: float
    root: np.ndarray  # L (D, rank) with L L^T = covariance

    @classmethod
    def of(cls, mean: np.ndarray, covariance: np.ndarray) -> "Gaussian":
        """From mean and covariance, float64."""
        mean, covariance = np.asarray(mean, np.float64), np.asarray(covariance, np.float64)
        return cls(mean, float(np.trace(covariance)), _root((covariance + covariance.T) / 2))


def _root(covariance: np.ndarray) -> np.ndarray:
    """L (D, rank) with L L^T = covariance."""
    try:
        root = np.linalg.cholesky(covariance)
        if np.diagonal(root).min() ** 2 > CHOLESKY_PIVOT * np.diagonal(covariance).max():
            return root
    except np.linalg.LinAlgError:
        pass
    values, vectors = np.linalg.eigh(covariance)
    kept = values > len(values) * np.finfo(np.float64).eps * max(values[-1], 0)  # the rest is rounding
    return vectors[:, kept] * np.sqrt(values[kept])


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """The squared Frechet (2-Wasserstein) distance of the Gaussians fitted to `a` and `b`, from 0."""
    return gaussian_frechet_distance(a.mean, a.covariance, b.mean, b.covariance)


def gaussian_frechet_distance(
    mean_a: np.ndarray, covariance_a: np.ndarray, mean_b: np.ndarray, covariance_b: np.ndarray
) -> float:
    """The same from means (D,) and covariances (D, D)."""
    return distance_of_gaussians(Gaussian.of(mean_a, covariance_a), Gaussian.of(mean_b, covariance_b))


def distance_of_gaussians(a: Gaussian, b: Gaussian) -> float:
    """The same from `Gaussian`s, whose roots can be used again."""
    overlap = np.linalg.svd(a.root.T @ b.root, compute_uv=False).sum()
    distance = np.square(a.mean - b.mean).sum() + a.trace + b.trace - 2 * overlap
    return max(float(distance), 0.0)  # equal sets differ by rounding alone


def inception_score(
    logits: np.ndarray, split_size: int = 5000, dtype: type[np.floating[Any]] = np.float32
) -> float:
    """Mean score of splits of `split_size` consecutive rows of `logits` (N, classes).

    The last split is what remains. The arithmetic is `dtype`'s: ADM's suite has float32, to which published
    scores belong; float64 differs by about 1e-7 of the score. From 1 to the number of classes.
    """
    scores = []
    for start in range(0, len(logits), split_size):
        part = np.asarray(logits[start : start + split_size], dtype)
        p = np.exp(part - part.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        kl = p * (_log(p) - _log(p.mean(axis=0, keepdims=True)))
        scores.append(np.exp(kl.sum(axis=1).mean()))
    return float(np.mean(scores))


def _log(p: np.ndarray) -> np.ndarray:
    """log p, and 0 where p is 0, since 0 log 0 = 0 is all that it is used for."""
    return np.log(p, where=p > 0, out=np.zeros_like(p))


def kernel_distance(
    a: np.ndarray, b: np.ndarray, num_subsets: int = 100, subset_size: int = 1000, seed: int = 2020
) -> tuple[float, float]:
    """KID of features `a` (N, D) and `b` (M, D): mean and standard deviation over subsets.

    The subsets are those that torch-fidelity draws, so that its numbers come out. A set with fewer than
    `subset_size` features shrinks the subsets to its size.

    Raises:
        ValueError: fewer than 2 features in a set, or another width.
    """
    size = min(subset_size, len(a), len(b))
    if size < 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"KID needs two sets of at least 2 features of one width, got {a.shape}, {b.shape}")
    draw = np.random.RandomState(seed)
    values = []
    for _ in range(num_subsets):
        x = a[draw.choice(len(a), size, replace=False)].astype(np.float64)
        y = b[draw.choice(len(b), size, replace=False)].astype(np.float64)
        values.append(_unbiased_mmd2(x, y))
    return float(np.mean(values)), float(np.std(values))


def _unbiased_mmd2(x: np.ndarray, y: np.ndarray) -> float:
    m = len(x)
    within = sum(kernel.sum() - np.trace(kernel) for kernel in (_cubic(x, x), _cubic(y, y)))
    return float(within / (m * (m - 1)) - 2 * _cubic(x, y).mean())


def _cubic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x @ y.T / x.shape[1] + 1) ** 3
