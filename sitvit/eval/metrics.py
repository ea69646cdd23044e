"""Distances between two sets of features.

Frechet distance of two Gaussians (arXiv 1706.08500):

    |mu_1 - mu_2|^2 + tr S_1 + tr S_2 - 2 tr (S_1 S_2)^(1/2)

With S = L L^T the last trace is the sum of the singular values of L_1^T L_2. L comes from a symmetric
eigendecomposition with eigenvalues cut at zero, so that rank-deficient covariances (fewer images than
features) are exact too, where a matrix square root is not.
"""

import numpy as np

from .statistics import FeatureStatistics


def frechet_distance(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """The squared Frechet (2-Wasserstein) distance of the Gaussians fitted to `a` and `b`, from 0."""
    return gaussian_frechet_distance(a.mean, a.covariance, b.mean, b.covariance)


def gaussian_frechet_distance(
    mean_a: np.ndarray, covariance_a: np.ndarray, mean_b: np.ndarray, covariance_b: np.ndarray
) -> float:
    """The same from means (D,) and covariances (D, D)."""
    overlap = np.linalg.svd(_root(covariance_a).T @ _root(covariance_b), compute_uv=False).sum()
    distance = np.square(mean_a - mean_b).sum() + np.trace(covariance_a) + np.trace(covariance_b)
    return max(float(distance - 2 * overlap), 0.0)  # equal sets differ by rounding alone


def _root(covariance: np.ndarray) -> np.ndarray:
    """L (D, D) with L L^T = covariance."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(values.clip(min=0))
