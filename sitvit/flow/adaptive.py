"""Dormand and Prince's method of order 5 with a step and an error control of each image's own.

Steps by J. R. Dormand and P. J. Prince, J. Comput. Appl. Math. 6 (1980), tableau RK5(4)7M; the first step
and the control as in Hairer, Norsett, Wanner, Solving Ordinary Differential Equations I, II.4, but for this:
steps are powers of two. An error's estimate is a difference in which most digits cancel, and a step that
followed it smoothly would turn the rounding of another batch size into another grid, which moves the result
by up to the tolerance. A power of two is the same for all estimates but those next to a threshold.

Images that have arrived wait: the network is called on the whole batch, so that its shape never changes. As
kernels of one shape round a row alike, an image has the same bits whatever its mates are in a batch of one
size. In a batch of another size it moves by rounding, but for the few with an estimate next to a threshold,
which move within the tolerance. So a job of images solves for `BLOCK_SIZE` of them at a time, always. Solvers
that share a step over the batch move all of them in any case.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .evaluations import Evaluations
from .paths import per_sample

STAGES = (0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
WEIGHTS = (
    (),
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
"""The last row is also the result: the seventh slope is the next step's first."""
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""The result of order 5 minus that of order 4."""
BLOCK_SIZE = 8
"""Images at once: enough to keep a device busy, and few that wait for the slowest."""
SAFETY, SLOWEST, FASTEST = 0.9, 1 / 8, 8.0


def dopri5_per_image(
    velocity: Evaluations,
    x: Tensor,
    t_start: float,
    t_end: float,
    atol: float,
    rtol: float,
    max_steps: int,
    on_step: Callable[[Tensor], object],
) -> Tensor:
    """Carry `x` (B, ...) from `t_start` to `t_end` with the error of a step within atol + rtol |x| (rms).

    Raises:
        FloatingPointError: a step that underflows, or more than `max_steps`, naming image and time.
    """
    dtype = x.dtype
    t = torch.full((len(x),), t_start, dtype=dtype, device=x.device)
    end = torch.full_like(t, t_end)
    slope = velocity(x, t)
    h = _power_of_two(_first_step(velocity, x, t, slope, end, atol, rtol))
    smallest = 16 * torch.finfo(dtype).eps
    for _ in range(max_steps):
        last = (end - t).abs() <= h.abs() * (1 + 1e-6)  # no sliver of a step remains
        step = torch.where(last, end - t, h)
        new, error, new_slope = _step(velocity, x, t, step, slope)
        ratio = _rms(error, atol + rtol * torch.maximum(x.abs(), new.abs())).nan_to_num(nan=torch.inf)
        accepted = ratio <= 1
        t = torch.where(accepted, torch.where(last, end, t + step), t)
        keep = per_sample(accepted, x)
        x, slope = torch.where(keep, new, x), torch.where(keep, new_slope, slope)
        # After a step that is not accepted, 1/2 or less.
        h = h * _power_of_two(SAFETY * _power(ratio.clamp(1e-10, 1e10), -0.2)).clamp(SLOWEST, FASTEST)
        on_step(x)
        waiting = t != end
        if not waiting.any():
            return x
        h = torch.where(waiting, h, 0.0)
        stuck = waiting & ~(h.abs() >= smallest)  # and where it is not a number
        if stuck.any():
            _give_up("its step underflows", stuck, t, atol, rtol)
    _give_up(f"{max_steps} steps are not enough", t != end, t, atol, rtol)
    return x


def _step(
    velocity: Evaluations, x: Tensor, t: Tensor, h: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of order 5, its error's estimate, and the slope there."""
    slopes = [slope]
    wide_h = per_sample(h, x)
    point = x
    for stage, weights in zip(STAGES[1:], WEIGHTS[1:], strict=True):
        point = x + wide_h * _combine(weights, slopes)
        slopes.append(velocity(point, t + stage * h))
    return point, wide_h * _combine(ERROR, slopes), slopes[-1]


def _combine(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    total = weights[0] * slopes[0]
    for weight, slope in zip(weights[1:], slopes[1:], strict=True):
        if weight:
            total = total + weight * slope
    return total


def _first_step(
    velocity: Evaluations, x: Tensor, t: Tensor, slope: Tensor, end: Tensor, atol: float, rtol: float
) -> Tensor:
    """A signed step (B,) from the sizes of x, its slope and its curvature."""
    scale = atol + rtol * x.abs()
    size, speed = _rms(x, scale), _rms(slope, scale)
    room = end - t
    guess = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed)
    guess = torch.minimum(guess, room.abs()) * room.sign()
    ahead = velocity(x + per_sample(guess, x) * slope, t + guess)
    curvature = _rms(ahead - slope, scale) / guess.abs()
    greatest = torch.maximum(speed, curvature)
    flat = torch.clamp(guess.abs() * 1e-3, min=1e-6)
    other = torch.where(greatest <= 1e-15, flat, _power(0.01 / greatest, 0.2))
    return torch.minimum(torch.minimum(100 * guess.abs(), other), room.abs()) * room.sign()


def _power(x: Tensor, exponent: float) -> Tensor:
    """x ** exponent, whose bits do not depend on the batch's size (on a CPU those of `pow` do)."""
    return torch.exp(exponent * torch.log(x))


def _power_of_two(x: Tensor) -> Tensor:
    """The greatest power of two up to |x|, with the sign of x; what is not finite stays so."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa 2^exponent, |mantissa| in [1/2, 1)
    power = torch.ldexp(mantissa.sign() / 2, exponent)
    return torch.where(torch.isfinite(x), power, x)


def _rms(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).square().flatten(1).mean(dim=1).sqrt()


def _give_up(why: str, images: Tensor, t: Tensor, atol: float, rtol: float) -> None:
    index = int(images.nonzero()[0])
    raise FloatingPointError(
        f"dopri5_per_image gave up at t = {float(t[index]):.6g} on sample {index} of the batch with atol "
        f"{atol:g}, rtol {rtol:g}: {why}; loosen the tolerances, or use a fixed-step method"
    )
