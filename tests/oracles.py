"""Closed forms to prove samplers and objectives against."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sitvit.flow.paths import Linear, Path, per_sample


@dataclass(frozen=True)
class GaussianData:
    """Data x_1 ~ N(mean, std^2) per element on a path x_t = alpha x_1 + sigma x_0.

    x_t ~ N(alpha mean, V) with V = alpha^2 std^2 + sigma^2, and by Bayes for Gaussians E[x_1 | x_t] and
    E[x_0 | x_t] are affine in x_t. The flow keeps the standard score of x_t. The coefficients are written
    out here for each path, from the paths' definitions and not by the package's functions.
    """

    mean: float = 0.7
    std: float = 0.4
    path: Path = field(default_factory=Linear)

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """alpha, sigma, d_alpha, d_sigma."""
        if self.path.name == "linear":
            return t, 1 - t, torch.ones_like(t), -torch.ones_like(t)
        if self.path.name == "gvp":
            angle = torch.pi / 2 * t
            return angle.sin(), angle.cos(), torch.pi / 2 * angle.cos(), -torch.pi / 2 * angle.sin()
        exponent = -0.25 * (1 - t) ** 2 * 19.9 - 0.05 * (1 - t)
        slope = 0.5 * (1 - t) * 19.9 + 0.05
        alpha = exponent.exp()
        sigma = (1 - alpha**2).clamp(min=1e-12).sqrt()  # torchdiffeq looks past t = 1
        return alpha, sigma, alpha * slope, -(alpha**2) * slope / sigma

    def moments(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of x_t."""
        alpha, sigma, _, _ = self.coefficients(t)
        return alpha * self.mean, alpha**2 * self.std**2 + sigma**2

    def predict(self, kind: str, x: Tensor, t: Tensor) -> Tensor:
        """The velocity, noise, score or data that the best network would predict at x (B, ...), t (B,)."""
        t = per_sample(t, x).to(x.dtype)
        alpha, sigma, d_alpha, d_sigma = self.coefficients(t)
        mean, variance = self.moments(t)
        data = self.mean + alpha * self.std**2 / variance * (x - mean)
        noise = sigma / variance * (x - mean)
        if kind == "velocity":
            return d_alpha * data + d_sigma * noise
        return {"noise": noise, "data": data, "score": -(x - mean) / variance}[kind]

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """dx/dt of the probability flow."""
        return self.predict("velocity", x, t)

    def flow_map(self, x: Tensor, t_start: float = 0.0, t_end: float = 1.0) -> Tensor:
        """Where the ODE carries x from t_start to t_end."""
        (mean_a, var_a), (mean_b, var_b) = (
            self.moments(torch.tensor(t, dtype=x.dtype)) for t in (t_start, t_end)
        )
        return mean_b + (var_b / var_a).sqrt() * (x - mean_a)

    def log_density(self, x: Tensor) -> Tensor:
        """log p of data x (B, ...), a sum over its elements."""
        normal = torch.distributions.Normal(self.mean, self.std)
        return normal.log_prob(x).flatten(1).sum(dim=1)


@dataclass(frozen=True)
class MixtureData:
    """Data of two Gaussians per element, on any path: a non-linear velocity.

    x_t is a mixture with the components' means and variances moved along the path; the velocity is the
    components' mean, weighted by how likely each is at x. In one dimension a flow keeps quantiles.
    """

    path: Path
    weights: tuple[float, float] = (0.3, 0.7)
    means: tuple[float, float] = (-1.5, 1.0)
    stds: tuple[float, float] = (0.35, 0.5)

    def parts(self) -> list[GaussianData]:
        return [GaussianData(m, s, self.path) for m, s in zip(self.means, self.stds, strict=True)]

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        wide = per_sample(t, x).to(x.dtype)
        logs = []
        for weight, part in zip(self.weights, self.parts(), strict=True):
            mean, variance = part.moments(wide)
            logs.append(torch.log(weight / variance.sqrt()) - (x - mean) ** 2 / (2 * variance))
        share = torch.softmax(torch.stack(logs), dim=0)
        return sum(s * part.velocity(x, t) for s, part in zip(share, self.parts(), strict=True))

    def cdf(self, x: Tensor, t: float) -> Tensor:
        """P(x_t <= x)."""
        total = torch.zeros_like(x)
        for weight, part in zip(self.weights, self.parts(), strict=True):
            mean, variance = part.moments(torch.tensor(t, dtype=x.dtype))
            total += weight * torch.special.ndtr((x - mean) / variance.sqrt())
        return total


def gaussian_frechet_by_eigenvalues(mean_a, cov_a, mean_b, cov_b) -> float:
    """The Frechet distance from the eigenvalues of S_1 S_2: another formula for the trace term."""
    eigenvalues = torch.linalg.eigvals(torch.from_numpy(cov_a @ cov_b)).real.clamp(min=0)
    squared = float(((mean_a - mean_b) ** 2).sum())
    return squared + float(cov_a.trace() + cov_b.trace()) - 2 * float(eigenvalues.sqrt().sum())
