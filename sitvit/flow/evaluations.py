"""Calls of a network on the way of a solver: how many there were, and when their output went wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .parameterization import Velocity

NoiseSource = Callable[[int], Tensor]
"""`noise(i)` is the standard normal noise of step i, of the state's shape: each image's own."""


def batch_of(t: float, x: Tensor) -> Tensor:
    """The time `t` for each sample of `x`, (B,); float32 or better, since bfloat16 turns 0.999 into 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.full((len(x),), t, dtype=dtype, device=x.device)


@dataclass(frozen=True)
class Solution:
    """Where a solver arrived, (B, ...), and how often it called the network (NFE)."""

    state: Tensor
    num_evaluations: int


class Evaluations:
    """A velocity that counts its calls and notes at which time each sample was first not finite.

    With `same_shape` the output must have the state's shape. With `eager` it raises at once, which waits for
    a GPU at each call; without, `solution` does at the end. `name_time` says a time for people.
    """

    def __init__(
        self,
        velocity: Velocity,
        eager: bool,
        same_shape: bool = True,
        name_time: Callable[[float], str] = lambda t: f"t = {t:.6g}",
    ) -> None:
        self.velocity, self.eager, self.same_shape, self.name_time = velocity, eager, same_shape, name_time
        self.count = 0
        self._times: Tensor | None = None
        self._first_bad: Tensor | None = None

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.count += 1
        # The state keeps its precision: a network under autocast gives bfloat16.
        out = self.velocity(x, t).to(x.dtype)
        if self.same_shape and out.shape != x.shape:
            raise ValueError(f"the velocity of a state {tuple(x.shape)} has the shape {tuple(out.shape)}")
        bad = ~torch.isfinite(out).flatten(1).all(dim=1)
        if self._first_bad is None:
            self._first_bad = torch.full_like(t, torch.nan)
        self._first_bad = torch.where(bad & self._first_bad.isnan(), t, self._first_bad)
        self._times = t
        if self.eager and bad.any():
            self.raise_if_bad()
        return out

    @property
    def last_time(self) -> float:
        """The latest time at which the network was asked."""
        return float("nan") if self._times is None else float(self._times.max())

    def raise_if_bad(self) -> None:
        """FloatingPointError naming the first sample whose velocity was not finite, and the time."""
        if self._first_bad is None:
            return
        bad = (~self._first_bad.isnan()).nonzero().flatten().tolist()
        if bad:
            raise FloatingPointError(
                f"the network's output is not finite at {self.name_time(float(self._first_bad[bad[0]]))} "
                f"(sample {bad[0]} of the batch, {len(bad)} in all)"
            )

    def solution(self, x: Tensor, method: str) -> Solution:
        """The end of a way; FloatingPointError where it is not finite."""
        self.raise_if_bad()
        if not torch.isfinite(x).all():
            raise FloatingPointError(f"the sample is not finite after {method}; try more steps")
        return Solution(x, self.count)
