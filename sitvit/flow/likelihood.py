"""Likelihood by the instantaneous change of variables (arXiv 1810.01367; SiT, Sec. 2):

    log p_1(x_1) = log N(x_0; 0, I) - integral_0^1 div v(x_t, t) dt

along the ODE's way from x_1 back to the noise x_0. The divergence is an exact trace (one gradient a
dimension), or Hutchinson's estimate e^T (dv/dx) e with signs e = +-1 that are drawn once for a whole way,
so that the integrand is a smooth function of t. Several probes share the network's forward pass, and
their spread gives the standard error.

Difference from the official code: there each evaluation draws a new probe, and current PyTorch refuses it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .evaluations import NoiseSource
from .ode import integrate
from .parameterization import Velocity


@dataclass(frozen=True)
class Likelihood:
    """log p (B,) in nats, its standard error over the probes (B,), the noise reached, and the calls made.

    The standard error is 0 for the exact trace and nan for a single probe.
    """

    log_p: Tensor
    standard_error: Tensor
    x_0: Tensor
    num_evaluations: int

    def bits_per_dim_error(self) -> Tensor:
        """The standard error of `bits_per_dim` (B,)."""
        return self.standard_error / (self.x_0[0].numel() * math.log(2))

    def bits_per_dim(self, bin_width: float = 1.0) -> Tensor:
        """-log2 p per dimension (B,): of a density, or with `bin_width` of data quantised so finely.

        Pixels of 8 bits in [-1, 1] have bins of 2/255 (their noise must have been spread over the bin).
        """
        dims = self.x_0[0].numel()
        return -(self.log_p / dims + math.log(bin_width)) / math.log(2)


def log_likelihood(
    velocity: Velocity,
    x_1: Tensor,
    times: Sequence[float],
    method: str,
    probes: NoiseSource | None,
    num_probes: int = 1,
    on_step: Callable[[Tensor], object] = lambda x: None,
    atol: float = 1e-6,
    rtol: float = 1e-3,
) -> Likelihood:
    """log p of data `x_1` (B, ...) under the flow; `times` fall from data to noise.

    `probes(k)` gives normal noise of x_1's shape, whose signs are probe k: made from each image's own
    generator it keeps an image's estimate free of its batch mates. None asks for the exact trace.

    The density at the last time is taken for a standard normal one. On the vp path, where alpha(0) is
    0.0066, that is off by a few thousandths of a nat a dimension; so is a way that leaves out the margins of
    1e-3 that noise, score and data predictions need (`intervals`).

    Raises:
        ValueError: no probe, times that do not fall, or a velocity that turns gradients off.
        FloatingPointError: as `integrate`.
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    if len(times) < 2 or times[0] < times[-1]:
        raise ValueError("a likelihood follows data to noise: its times must decrease")
    x_1 = x_1.to(torch.promote_types(x_1.dtype, torch.float32))
    shape, dims = x_1.shape, x_1[0].numel()
    if probes is None:
        signs, num_probes = None, 1
    else:
        signs = [torch.where(probes(k).to(x_1) >= 0, 1.0, -1.0).to(x_1) for k in range(num_probes)]

    def joint(state: Tensor, t: Tensor) -> Tensor:
        x = state[:, :dims].reshape(shape)
        slope, divergences = _slope_and_divergences(velocity, x, t, signs)
        return torch.cat([slope.flatten(1), divergences], dim=1)

    start = torch.cat([x_1.flatten(1), x_1.new_zeros(len(x_1), num_probes)], dim=1)
    solution = integrate(joint, start, times, method, on_step, atol, rtol)
    x_0 = solution.state[:, :dims].reshape(shape)
    # The way back integrates from 1 to 0, which turns the sign.
    estimates = solution.state[:, dims:] + _log_normal(x_0)[:, None]  # (B, K)
    if signs is None:
        error = torch.zeros_like(estimates[:, 0])
    else:
        error = estimates.std(dim=1) / math.sqrt(num_probes) if num_probes > 1 else estimates[:, 0] * math.nan
    return Likelihood(estimates.mean(dim=1), error, x_0, solution.num_evaluations)


def _slope_and_divergences(
    velocity: Velocity, x: Tensor, t: Tensor, signs: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """v (B, ...) and, for each probe or exactly, its divergence (B, K)."""
    with torch.inference_mode(False), torch.enable_grad():
        x, t = x.detach().clone().requires_grad_(), t.clone()  # what inference mode made has no gradient
        slope = velocity(x, t)
        if not slope.requires_grad and not torch.equal(slope, velocity(x.detach() + 1, t)):
            raise ValueError("the velocity turns gradients off, which its divergence needs")
        if signs is None:
            divergences = [_exact_divergence(slope, x)]
        else:
            divergences = [(sign * _pull_back(slope, x, sign)).flatten(1).sum(dim=1) for sign in signs]
    return slope.detach(), torch.stack(divergences, dim=1).detach()


def _exact_divergence(slope: Tensor, x: Tensor) -> Tensor:
    total = x.new_zeros(len(x))
    for index in range(x[0].numel()):
        unit = torch.zeros_like(x).flatten(1)
        unit[:, index] = 1
        total = total + _pull_back(slope, x, unit.view_as(x)).flatten(1)[:, index]
    return total


def _pull_back(slope: Tensor, x: Tensor, vector: Tensor) -> Tensor:
    """vector^T dv/dx of each sample; samples do not mix in a velocity, so one gradient serves the batch."""
    if not slope.requires_grad:
        return torch.zeros_like(x)  # the velocity does not depend on x
    gradient = torch.autograd.grad(slope, x, vector.to(slope), retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(x) if gradient is None else gradient


def _log_normal(x: Tensor) -> Tensor:
    """log N(x; 0, I) of each sample, (B,)."""
    flat = x.flatten(1)
    return -(flat.square().sum(dim=1) + flat.shape[1] * math.log(2 * math.pi)) / 2
