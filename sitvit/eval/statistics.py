"""Mean and covariance of a stream of features, in float64, one batch at a time.

Kept are n, the mean and M2 = sum (x - mean)(x - mean)^T. Two sets merge by

    delta = mean_b - mean_a
    M2    = M2_a + M2_b + delta delta^T n_a n_b / (n_a + n_b)

(Chan, Golub, LeVeque 1979), so batch size, order and process count change nothing but the last bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class FeatureStatistics:
    """n, mean (D,) and M2 (D, D) of the features seen so far; the sums are done on `device`."""

    def __init__(self, num_features: int, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self.n = 0
        self._mean = torch.zeros(num_features, dtype=torch.float64, device=self.device)
        self._m2 = torch.zeros(num_features, num_features, dtype=torch.float64, device=self.device)

    @classmethod
    def of(cls, features: np.ndarray | Tensor, device: torch.device | str = "cpu") -> FeatureStatistics:
        """The statistics of `features` (N, D)."""
        statistics = cls(features.shape[1], device)
        statistics.update(features)
        return statistics

    @property
    def num_features(self) -> int:
        """D."""
        return len(self._mean)

    def update(self, features: np.ndarray | Tensor) -> None:
        """Take in `features` (B, D); ValueError where one is not finite, or their width is another."""
        values = torch.as_tensor(features).to(self.device, torch.float64)
        if values.ndim != 2 or values.shape[1] != self.num_features:
            raise ValueError(f"features must be (B, {self.num_features}), got {tuple(values.shape)}")
        if not len(values):
            return
        if not torch.isfinite(values).all():
            raise ValueError("a feature is not finite; is one of the images damaged?")
        mean = values.mean(dim=0)
        centred = values - mean
        self._take_in(len(values), mean, centred.T @ centred)

    def merge(self, other: FeatureStatistics) -> None:
        """Take in another set of the same width; ValueError where it has another."""
        if other.num_features != self.num_features:
            raise ValueError(f"features of width {other.num_features} and {self.num_features} do not merge")
        if other.n:
            self._take_in(other.n, other._mean.to(self.device), other._m2.to(self.device))

    def _take_in(self, n: int, mean: Tensor, m2: Tensor) -> None:
        total = self.n + n
        delta = mean - self._mean
        self._m2 += m2
        self._m2.addr_(delta, delta, alpha=self.n * n / total)
        self._mean += delta * (n / total)
        self.n = total

    @property
    def mean(self) -> np.ndarray:
        """Mean (D,), float64."""
        return self._mean.cpu().numpy()

    @property
    def covariance(self) -> np.ndarray:
        """Unbiased covariance (D, D), M2 / (n - 1), as numpy.cov; ValueError below two samples."""
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.n}")
        return (self._m2 / (self.n - 1)).cpu().numpy()
