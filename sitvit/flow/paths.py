"""Interpolants between noise x_0 and data x_1: x_t = alpha(t) x_1 + sigma(t) x_0 (SiT, Eq. 1).

Linear: alpha = t, sigma = 1 - t. t = 0 is noise, t = 1 is data, as everywhere in sitvit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def per_sample(t: Tensor, x: Tensor) -> Tensor:
    """Shape `t` (B,) so that it broadcasts over `x` (B, ...)."""
    return t.view(-1, *[1] * (x.dim() - 1))


@dataclass(frozen=True)
class Linear:
    """alpha = t, sigma = 1 - t; the velocity x_1 - x_0 does not depend on t (SiT, table 1)."""

    name: str = "linear"

    def alpha(self, t: Tensor) -> Tensor:
        """Weight of the data, the shape of `t`."""
        return t

    def sigma(self, t: Tensor) -> Tensor:
        """Weight of the noise, the shape of `t`."""
        return 1 - t

    def d_alpha(self, t: Tensor) -> Tensor:
        """Derivative of alpha."""
        return torch.ones_like(t)

    def d_sigma(self, t: Tensor) -> Tensor:
        """Derivative of sigma."""
        return -torch.ones_like(t)

    def interpolate(self, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        """x_t = alpha x_1 + sigma x_0 for noise and data (B, ...) and `t` (B,)."""
        t = per_sample(t, x_1)
        return self.alpha(t) * x_1 + self.sigma(t) * x_0

    def velocity(self, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        """dx_t/dt = d_alpha x_1 + d_sigma x_0, the target of training (SiT, Eq. 2)."""
        t = per_sample(t, x_1)
        return self.d_alpha(t) * x_1 + self.d_sigma(t) * x_0
