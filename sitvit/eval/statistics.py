"""Mean and covariance of a stream of features, in float64, one batch at a time.

Kept are n, the mean and M2 = sum (x - mean)(x - mean)^T. Two sets merge by

    delta = mean_b - mean_a
    M2    = M2_a + M2_b + delta delta^T n_a n_b / (n_a + n_b)

(Chan, Golub, LeVeque 1979), so batch size, order and process count change nothing but the last bits.
"""

from __future__ import annotations

import numpy as np


class FeatureStatistics:
    """n, mean (D,) and M2 (D, D) of the features seen so far."""

    def __init__(self, num_features: int) -> None:
        self.n = 0
        self.mean = np.zeros(num_features)
        self.m2 = np.zeros((num_features, num_features))

    def update(self, features: np.ndarray) -> None:
        """Take in `features` (B, D); ValueError where one is not finite."""
        batch = FeatureStatistics(len(self.mean))
        values = np.asarray(features, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("a feature is not finite; is one of the images damaged?")
        batch.n, batch.mean = len(values), values.mean(axis=0)
        centred = values - batch.mean
        batch.m2 = centred.T @ centred
        self.merge(batch)

    def merge(self, other: FeatureStatistics) -> None:
        """Take in another set of the same width."""
        total = self.n + other.n
        delta = other.mean - self.mean
        self.m2 += other.m2 + np.outer(delta, delta) * (self.n * other.n / total)
        self.mean = self.mean + delta * (other.n / total)
        self.n = total

    @property
    def covariance(self) -> np.ndarray:
        """Unbiased covariance (D, D), M2 / (n - 1), as numpy.cov; ValueError below two samples."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.n}")
        return self.m2 / (self.n - 1)
