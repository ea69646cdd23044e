"""Times: how they are drawn in training, and the grids along which samplers go.

Training times are a quantile function of a uniform draw u, so that the draw can come from a stream that
knows nothing of its distribution:

    uniform       t = u
    logit_normal  t = sigmoid(mean + std Phi^-1(u))                      (arXiv 2403.03206, Eq. 19)
    shift s       t <- t / (t + s (1 - t)): s > 1 spends more time in noise, as a resolution of s^2 times
                  as many pixels asks for                               (arXiv 2403.03206, Eq. 23)

and last t <- t_min + (t_max - t_min) t. Grids shift in the same way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .intervals import Interval, check_interval
from .names import TIME_DISTRIBUTIONS


@dataclass(frozen=True)
class TimeDistribution:
    """How training times are drawn from `interval`.

    Raises:
        ValueError: an unknown name, a spread or shift that is not above 0, an interval outside [0, 1].
    """

    name: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    interval: Interval = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.name not in TIME_DISTRIBUTIONS:
            known = ", ".join(TIME_DISTRIBUTIONS)
            raise ValueError(f"no distribution of times is called {self.name!r}; known are {known}")
        for name, value in (("spread (std)", self.std), ("shift", self.shift)):
            if not 0 < value < math.inf:
                raise ValueError(f"the {name} of times must be above 0, got {value}")
        if not math.isfinite(self.mean):
            raise ValueError(f"the mean of times must be a finite number, got {self.mean}")
        check_interval(self.interval)

    def quantile(self, u: Tensor) -> Tensor:
        """Times (B,) in `interval` of uniform draws `u` (B,) in [0, 1); increasing in u."""
        t = u if self.name == "uniform" else torch.sigmoid(self.mean + self.std * torch.special.ndtri(u))
        if self.shift != 1:
            t = t / (t + self.shift * (1 - t))
        t_min, t_max = self.interval
        return t if self.interval == (0, 1) else t_min + (t_max - t_min) * t


def grid(num_steps: int, interval: Interval = (0.0, 1.0), shift: float = 1.0) -> list[float]:
    """`num_steps + 1` increasing times from end to end of `interval`, even, or shifted towards the noise.

    Raises:
        ValueError: below one step, a step count that is no whole number, a shift not above 0.
    """
    check_steps(num_steps)
    check_interval(interval)
    if not 0 < shift < math.inf:
        raise ValueError(f"the shift of a time grid must be above 0, got {shift}")
    t_min, t_max = interval
    evenly = [i / num_steps for i in range(num_steps)]
    shifted = evenly if shift == 1 else [u / (u + shift * (1 - u)) for u in evenly]
    return [t_min + (t_max - t_min) * u for u in shifted] + [t_max]


def check_steps(num_steps: int) -> None:
    """ValueError unless a whole number from 1."""
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps must be a whole number, at least 1, got {num_steps}")


def check_grid(times: Sequence[float]) -> None:
    """ValueError unless two or more times within [0, 1], all increasing, or all decreasing (the way back)."""
    if len(times) < 2 or not all(0 <= t <= 1 for t in times):
        raise ValueError(f"a time grid needs two or more times from 0 to 1, got {list(times)[:5]}")
    steps = [b - a for a, b in pairwise(times)]
    if not (all(step > 0 for step in steps) or all(step < 0 for step in steps)):
        raise ValueError("the times of a grid must all increase, or all decrease")
