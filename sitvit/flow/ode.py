"""The probability-flow ODE dx/dt = v(x, t), integrated on a fixed grid from noise to data.

A method is its order, its evaluations per step, and the step itself. Fixed steps treat each sample
alone, so an image does not depend on its batch mates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .objective import Velocity


def euler_step(velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    """x + dt v(x, t)."""
    return x + dt * velocity(x, _batch_of(t, x))


def heun_step(velocity: Velocity, x: Tensor, t: float, dt: float) -> Tensor:
    """x + dt/2 (v(x, t) + v(x + dt v(x, t), t + dt)), the explicit trapezoidal rule."""
    slope = velocity(x, _batch_of(t, x))
    end_slope = velocity(x + dt * slope, _batch_of(t + dt, x))
    return x + dt / 2 * (slope + end_slope)


@dataclass(frozen=True)
class Method:
    """A one-step solver: error of order `order` in the step, `num_evaluations` calls a step."""

    step: Callable[[Velocity, Tensor, float, float], Tensor]
    order: int
    num_evaluations: int


METHODS = {"euler": Method(euler_step, 1, 1), "heun": Method(heun_step, 2, 2)}


def check_method(name: str) -> None:
    """ValueError unless `name` is in `METHODS`."""
    if name not in METHODS:
        raise ValueError(f"no ODE method is called {name!r}; known are {', '.join(METHODS)}")


def uniform_times(num_steps: int) -> list[float]:
    """The grid 0, 1/N, ..., 1 of `num_steps + 1` points; ValueError below one step."""
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    return [i / num_steps for i in range(num_steps + 1)]


def integrate(
    velocity: Velocity,
    x: Tensor,
    times: Sequence[float],
    method: str,
    on_step: Callable[[], object],
) -> Tensor:
    """Carry `x` (B, ...) along `times` and return the state at the last; float32 or better.

    `on_step` is called after each step (progress). `velocity` is called
    `METHODS[method].num_evaluations * (len(times) - 1)` times.

    Raises:
        ValueError: an unknown method.
        FloatingPointError: the result is not finite. (Looked at once, at the end: each look waits for a GPU.)
    """
    check_method(method)
    for t, t_next in pairwise(times):
        x = METHODS[method].step(velocity, x, t, t_next - t)
        on_step()
    if not torch.isfinite(x).all():
        raise FloatingPointError(f"the sample is not finite after {method} up to t = {times[-1]}")
    return x


def _batch_of(t: float, x: Tensor) -> Tensor:
    # Times stay in float32 whatever the state's precision: bfloat16 turns 0.999 into 1.
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.full((len(x),), t, dtype=dtype, device=x.device)
