"""The probability-flow ODE dx/dt = v(x, t): to data along rising times, back to noise along falling ones.

A method is its order, its evaluations a step, and the step itself. Ours treat each sample alone, so an
image does not depend on its batch mates. torchdiffeq's methods go by their names; its adaptive ones share
their step over the batch, and its implicit ones their iterations (`COUPLING`).

`heun` is torchdiffeq's heun2, and `rk4` its rk4, Kutta's 3/8 rule (Zeitschrift fuer Math. u. Phys. 46, 1901).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .adaptive import dopri5_per_image
from .evaluations import Evaluations, Solution, batch_of
from .parameterization import Velocity
from .times import check_grid


def euler_step(velocity: Velocity, x: Tensor, t: float, h: float) -> Tensor:
    """x + h v(x, t)."""
    return x + h * velocity(x, batch_of(t, x))


def midpoint_step(velocity: Velocity, x: Tensor, t: float, h: float) -> Tensor:
    """x + h v(x + h/2 v(x, t), t + h/2)."""
    half = x + h / 2 * velocity(x, batch_of(t, x))
    return x + h * velocity(half, batch_of(t + h / 2, x))


def heun_step(velocity: Velocity, x: Tensor, t: float, h: float) -> Tensor:
    """x + h/2 (v(x, t) + v(x + h v(x, t), t + h)), the explicit trapezoidal rule."""
    slope = velocity(x, batch_of(t, x))
    end_slope = velocity(x + h * slope, batch_of(t + h, x))
    return x + h / 2 * (slope + end_slope)


def rk4_step(velocity: Velocity, x: Tensor, t: float, h: float) -> Tensor:
    """x + h/8 (k1 + 3 k2 + 3 k3 + k4), the 3/8 rule."""
    k1 = velocity(x, batch_of(t, x))
    k2 = velocity(x + h / 3 * k1, batch_of(t + h / 3, x))
    k3 = velocity(x + h * (k2 - k1 / 3), batch_of(t + 2 * h / 3, x))
    k4 = velocity(x + h * (k1 - k2 + k3), batch_of(t + h, x))
    return x + h / 8 * (k1 + 3 * (k2 + k3) + k4)


@dataclass(frozen=True)
class Method:
    """A one-step solver: error of order `order` in the step, `num_evaluations` calls a step."""

    step: Callable[[Velocity, Tensor, float, float], Tensor]
    order: int
    num_evaluations: int


METHODS = {
    "euler": Method(euler_step, 1, 1),
    "midpoint": Method(midpoint_step, 2, 2),
    "heun": Method(heun_step, 2, 2),
    "rk4": Method(rk4_step, 4, 4),
}
PER_IMAGE = "dopri5_per_image"
TORCHDIFFEQ_FIXED = ("heun2", "heun3", "explicit_adams", "implicit_adams", "fixed_adams")
TORCHDIFFEQ_ADAPTIVE = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun", "scipy_solver")
ADAPTIVE = (PER_IMAGE, *TORCHDIFFEQ_ADAPTIVE)
"""Methods that choose their steps by tolerances: a number of steps means nothing to them."""
COUPLING = (*TORCHDIFFEQ_ADAPTIVE, "implicit_adams", "fixed_adams")
"""Methods in which an image moves with its batch mates."""
FINEST = 8
"""A relative tolerance under this many roundings of the state cannot be met."""

MAX_STEPS = 10_000
"""Steps after which an adaptive solver gives up: more means that the field is too stiff for it."""


def check_method(name: str) -> None:
    """ValueError unless `name` is a method of ours or of torchdiffeq."""
    known = (*METHODS, *ADAPTIVE, *TORCHDIFFEQ_FIXED)
    if name not in known:
        raise ValueError(f"no ODE method is called {name!r}; known are {', '.join(known)}")


def check_tolerances(atol: float, rtol: float) -> None:
    """ValueError unless both are numbers above 0."""
    for name, value in (("atol", atol), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a number above 0, got {value!r}")


def check_fineness(rtol: float, dtype: torch.dtype) -> None:
    """ValueError where a state of `dtype` is rounded too coarsely for `rtol`."""
    if rtol < (finest := FINEST * torch.finfo(dtype).eps):
        raise ValueError(f"rtol {rtol:g} is finer than the state's rounding; use {finest:.1g} or more")


def integrate(
    velocity: Velocity,
    x: Tensor,
    times: Sequence[float],
    method: str,
    on_step: Callable[[Tensor], object] = lambda x: None,
    atol: float = 1e-6,
    rtol: float = 1e-3,
) -> Solution:
    """Carry `x` (B, ...) along `times`: the state at the last, float32 or better, and the calls that it took.

    Adaptive methods heed only the first and last time, and `atol`, `rtol` (the official code's by default).
    The others heed all times; ours call `velocity` `num_evaluations * (len(times) - 1)` times. Of them only
    torchdiffeq's implicit ones heed the tolerances: they iterate until these are met. `on_step` is called
    after each step, by torchdiffeq's methods once at the end (progress).

    Raises:
        ValueError: an unknown method, a grid or tolerance that makes no sense.
        FloatingPointError: what the network gave, or the state, is not finite, saying at which t; a step
            that underflows.
    """
    check_method(method)
    check_grid(times)
    check_tolerances(atol, rtol)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if method in ADAPTIVE:
        check_fineness(rtol, x.dtype)
    counted = Evaluations(velocity, eager=method in ADAPTIVE)
    if method in METHODS:
        for t, t_next in pairwise(times):
            x = METHODS[method].step(counted, x, t, t_next - t)
            on_step(x)
    elif method == PER_IMAGE:
        x = dopri5_per_image(counted, x, times[0], times[-1], atol, rtol, MAX_STEPS, on_step)
    else:
        x = _torchdiffeq(counted, x, times, method, atol, rtol)
        on_step(x)
    return counted.solution(x, method)


def _torchdiffeq(
    velocity: Evaluations, x: Tensor, times: Sequence[float], method: str, atol: float, rtol: float
) -> Tensor:
    from torchdiffeq import odeint

    adaptive = method in TORCHDIFFEQ_ADAPTIVE
    points = torch.tensor([times[0], times[-1]] if adaptive else list(times), dtype=x.dtype, device=x.device)
    limited = adaptive and method != "scipy_solver"
    try:
        return odeint(
            lambda t, x: velocity(x, t.to(x).expand(len(x))),
            x,
            points,
            method=method,
            atol=atol,
            rtol=rtol,
            options={"max_num_steps": MAX_STEPS} if limited else None,
        )[-1]
    except AssertionError as error:  # how torchdiffeq says that its step is too small or not finite
        raise FloatingPointError(
            f"{method} gave up at t = {velocity.last_time:.6g} with atol {atol:g}, rtol {rtol:g} ({error}); "
            f"loosen the tolerances, or use a fixed-step method ({', '.join(METHODS)})"
        ) from None
