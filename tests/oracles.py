"""Closed forms to prove samplers and objectives against."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GaussianData:
    """Data x_1 ~ N(mean, std^2) per element on the Linear path x_t = t x_1 + (1 - t) x_0.

    x_t ~ N(t mean, t^2 std^2 + (1 - t)^2). The velocity is E[x_1 - x_0 | x_t] (Bayes for Gaussians), and
    the flow keeps the standard score of x_t, so noise x_0 arrives at mean + std x_0.
    """

    mean: float = 0.7
    std: float = 0.4

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        t = t.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        variance = t**2 * self.std**2 + (1 - t) ** 2
        return self.mean + (t * self.std**2 - (1 - t)) / variance * (x - t * self.mean)

    def flow_map(self, x_0: Tensor) -> Tensor:
        return self.mean + self.std * x_0


def gaussian_frechet_by_eigenvalues(mean_a, cov_a, mean_b, cov_b) -> float:
    """The Frechet distance from the eigenvalues of S_1 S_2: another formula for the trace term."""
    eigenvalues = torch.linalg.eigvals(torch.from_numpy(cov_a @ cov_b)).real.clamp(min=0)
    squared = float(((mean_a - mean_b) ** 2).sum())
    return squared + float(cov_a.trace() + cov_b.trace()) - 2 * float(eigenvalues.sqrt().sum())
