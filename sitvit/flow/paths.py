"""Interpolants between noise x_0 and data x_1: x_t = alpha(t) x_1 + sigma(t) x_0 (SiT, Eq. 1 and table 1).

    linear  alpha = t                sigma = 1 - t
    gvp     alpha = sin(pi t / 2)    sigma = cos(pi t / 2)
    vp      alpha = exp(-(b1 - b0)(1 - t)^2 / 4 - b0 (1 - t) / 2),  sigma = sqrt(1 - alpha^2),
            b0 = 0.1, b1 = 20: the variance-preserving diffusion of arXiv 2011.13456 with time turned round

t = 0 is noise, t = 1 is data, as everywhere in sitvit. On `vp` alpha(0) is 0.0066, not 0.

An end of a path is a place where a coefficient vanishes, and there formulas divide by it. In denominators
alpha and sigma therefore count as at least `FLOOR` = 1e-3, which leaves every value finite and touches
linear and gvp paths only for t below 0.001 or above 0.999, and vp only above 1 - 1e-5: outside the
intervals in which the official code trains and samples (`intervals`).
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .names import PATH_NAMES

FLOOR = 1e-3
"""What alpha and sigma count as at least, in denominators."""


def per_sample(t: Tensor, x: Tensor) -> Tensor:
    """Shape `t` (B,) so that it broadcasts over `x` (B, ...)."""
    return t.view(-1, *[1] * (x.dim() - 1))


class Path(ABC):
    """alpha, sigma and their derivatives, each a function of times of any shape."""

    name: str

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Weight of the data."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Weight of the noise."""

    @abstractmethod
    def d_alpha(self, t: Tensor) -> Tensor:
        """Derivative of alpha."""

    @abstractmethod
    def d_sigma(self, t: Tensor) -> Tensor:
        """Derivative of sigma."""

    def speed(self, t: Tensor) -> Tensor:
        """d_alpha sigma - alpha d_sigma > 0: how fast data and noise change places. Linear 1, gvp pi/2."""
        return self.d_alpha(t) * self.sigma(t) - self.alpha(t) * self.d_sigma(t)

    def interpolate(self, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        """x_t for noise and data (B, ...) and `t` (B,)."""
        t = per_sample(t, x_1)
        return self.alpha(t) * x_1 + self.sigma(t) * x_0

    def velocity(self, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        """dx_t/dt = d_alpha x_1 + d_sigma x_0, the target of training (SiT, Eq. 2)."""
        t = per_sample(t, x_1)
        return self.d_alpha(t) * x_1 + self.d_sigma(t) * x_0


class Linear(Path):
    """The straight line, whose velocity x_1 - x_0 does not depend on t."""

    name = "linear"

    def alpha(self, t: Tensor) -> Tensor:
        return t

    def sigma(self, t: Tensor) -> Tensor:
        return 1 - t

    def d_alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)


class GVP(Path):
    """The quarter circle, alpha^2 + sigma^2 = 1 at constant speed pi/2."""

    name = "gvp"

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi / 2 * t)

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sin(math.pi / 2 * (1 - t))  # the cosine, and exactly 0 at t = 1

    def d_alpha(self, t: Tensor) -> Tensor:
        return math.pi / 2 * self.sigma(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        return -math.pi / 2 * self.alpha(t)


class VP(Path):
    """The circle walked as the variance-preserving diffusion does; d_sigma is -50 at t = 1, its floor."""

    name = "vp"
    beta_min = 0.1
    beta_max = 20.0

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(self._log_alpha(t))

    def sigma(self, t: Tensor) -> Tensor:
        # torchdiffeq's adaptive methods look past t = 1, where the square would be negative.
        return torch.sqrt((-torch.expm1(2 * self._log_alpha(t))).clamp(min=0))

    def d_alpha(self, t: Tensor) -> Tensor:
        return self.alpha(t) * (self.beta_min + (1 - t) * (self.beta_max - self.beta_min)) / 2

    def d_sigma(self, t: Tensor) -> Tensor:
        # sigma d_sigma = -alpha d_alpha, and sigma goes to 0 as the square root of 1 - t.
        return -self.alpha(t) * self.d_alpha(t) / self.sigma(t).clamp(min=FLOOR)

    def _log_alpha(self, t: Tensor) -> Tensor:
        return -(1 - t) * ((1 - t) * (self.beta_max - self.beta_min) / 4 + self.beta_min / 2)


PATHS: dict[str, Path] = dict(zip(PATH_NAMES, (Linear(), GVP(), VP()), strict=True))


def find_path(name: str) -> Path:
    """The path of that name; ValueError with the known ones."""
    if name not in PATHS:
        raise ValueError(f"no path is called {name!r}; known are {', '.join(PATHS)}")
    return PATHS[name]
