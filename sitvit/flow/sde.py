"""The reverse-time SDE that has the ODE's marginals (SiT, Eq. 9; arXiv 2303.08797):

    dX = (v(X, t) + w(t)/2 s(X, t)) dt + sqrt(w(t)) dW

Any w >= 0 will do. The official code calls w/2 "diffusion", and so does this file: D(t) = w(t)/2, times a
norm n in one of the forms

    constant                n
    SBDM                    n sigma speed / alpha     (the diffusion that the path itself has turned round)
    sigma                   n sigma
    linear                  n (1 - t)
    decreasing              (n cos(pi t) + 1)^2 / 4
    increasing-decreasing   n sin(pi t)^2

Drift and score come from one network call: s = -e / sigma with the noise e that the velocity implies, so
the drift is v - (D / sigma) e. Near t = 1 the noise of step and score would have to cancel exactly, so the
SDE stops at 1 - h and one last step of size h, without noise, ends the way:

    Mean x + h (v + D s)       Euler x + h v       Tweedie E[x_1 | x_t] = (x + sigma^2 s) / alpha
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .evaluations import Evaluations, NoiseSource, Solution, batch_of
from .parameterization import Velocity, data_from_velocity, noise_from_velocity
from .paths import FLOOR, Path, per_sample
from .times import check_grid


def _per_sigma(diffusion: Tensor, path: Path, t: Tensor) -> Tensor:
    return diffusion / path.sigma(t).clamp(min=FLOOR)


DIFFUSIONS: dict[str, Callable[[Path, Tensor, float], Tensor]] = {
    "constant": lambda path, t, n: _per_sigma(torch.full_like(t, n), path, t),
    "SBDM": lambda path, t, n: n * path.speed(t) / path.alpha(t).clamp(min=FLOOR),
    "sigma": lambda path, t, n: torch.full_like(t, n),
    "linear": lambda path, t, n: _per_sigma(n * (1 - t), path, t),
    "decreasing": lambda path, t, n: _per_sigma((n * torch.cos(math.pi * t) + 1) ** 2 / 4, path, t),
    "increasing-decreasing": lambda path, t, n: _per_sigma(n * torch.sin(math.pi * t) ** 2, path, t),
}
"""D(t) / sigma(t) by form, a function of path, times and norm: what multiplies the noise in the drift."""

SDE_METHODS = {"euler-maruyama": 1, "stochastic-heun": 2}
"""Stochastic methods, and their network calls a step."""

LAST_STEPS = ("none", "Mean", "Tweedie", "Euler")


class Diffusion:
    """D(t) of one form, norm and path.

    Raises:
        ValueError: an unknown form, or a norm below 0. (Norm 0 of the forms that scale with it is the ODE.)
    """

    def __init__(self, path: Path, form: str, norm: float = 1.0) -> None:
        self.check(form, norm)
        self.path, self.form, self.norm = path, form, norm

    @staticmethod
    def check(form: str, norm: float) -> None:
        """ValueError for an unknown form or a norm below 0."""
        if form not in DIFFUSIONS:
            raise ValueError(f"no diffusion is called {form!r}; known are {', '.join(DIFFUSIONS)}")
        if not 0 <= norm < math.inf:
            raise ValueError(f"the diffusion's norm must be 0 or more, got {norm}")

    def __call__(self, t: Tensor) -> Tensor:
        """D at times of any shape."""
        return self.per_sigma(t) * self.path.sigma(t)

    def drift(self, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """v + D s at x (B, ...), t (B,), of the velocity there."""
        noise = noise_from_velocity(self.path, velocity, x, t)
        return velocity - self.per_sigma(per_sample(t, x)) * noise

    def per_sigma(self, t: Tensor) -> Tensor:
        """D / sigma at times of any shape: what multiplies the noise in the drift."""
        return DIFFUSIONS[self.form](self.path, t, self.norm)


def integrate_sde(
    velocity: Velocity,
    x: Tensor,
    times: Sequence[float],
    diffusion: Diffusion,
    method: str,
    last_step: str,
    noise: NoiseSource,
    on_step: Callable[[Tensor], object] = lambda x: None,
) -> Solution:
    """Carry `x` (B, ...) along rising `times` by the SDE, then to t = 1 by `last_step`; float32 or better.

    The network is called once a step by Euler-Maruyama, twice by stochastic Heun, and once for a last step.

    Raises:
        ValueError: unknown names, a grid that does not rise, or that leaves a last step nothing to do.
        FloatingPointError: what the network gave, or the state, is not finite, saying at which t.
    """
    check_sde(method, last_step)
    check_grid(times)
    if times[0] > times[-1]:
        raise ValueError("the SDE runs from noise to data: its times must increase")
    if last_step != "none" and times[-1] >= 1:
        raise ValueError(f"the last step {last_step} needs a grid that ends before t = 1")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    counted = Evaluations(velocity, eager=False)
    step = _heun_step if method == "stochastic-heun" else _euler_maruyama_step
    for index, (t, t_next) in enumerate(pairwise(times)):
        h = t_next - t
        kick = (2 * diffusion(batch_of(t, x)) * h).sqrt()
        x = step(counted, diffusion, x, t, h, per_sample(kick, x) * noise(index).to(x))
        on_step(x)
    if last_step != "none":
        x = _last_step(counted, diffusion, x, times[-1], last_step)
        on_step(x)
    return counted.solution(x, method)


def check_sde(method: str, last_step: str) -> None:
    """ValueError unless both names are known."""
    if method not in SDE_METHODS:
        raise ValueError(f"no SDE method is called {method!r}; known are {', '.join(SDE_METHODS)}")
    if last_step not in LAST_STEPS:
        raise ValueError(f"no last step is called {last_step!r}; known are {', '.join(LAST_STEPS)}")


def _euler_maruyama_step(
    velocity: Velocity, diffusion: Diffusion, x: Tensor, t: float, h: float, kick: Tensor
) -> Tensor:
    times = batch_of(t, x)
    return x + h * diffusion.drift(velocity(x, times), x, times) + kick


def _heun_step(
    velocity: Velocity, diffusion: Diffusion, x: Tensor, t: float, h: float, kick: Tensor
) -> Tensor:
    """The kick first, then Heun's step of the drift from there."""
    x = x + kick
    times, times_next = batch_of(t, x), batch_of(t + h, x)
    drift = diffusion.drift(velocity(x, times), x, times)
    ahead = x + h * drift
    return x + h / 2 * (drift + diffusion.drift(velocity(ahead, times_next), ahead, times_next))


def _last_step(velocity: Velocity, diffusion: Diffusion, x: Tensor, t: float, kind: str) -> Tensor:
    times = batch_of(t, x)
    slope = velocity(x, times)
    if kind == "Tweedie":
        return data_from_velocity(diffusion.path, slope, x, times)
    return x + (1 - t) * (diffusion.drift(slope, x, times) if kind == "Mean" else slope)
