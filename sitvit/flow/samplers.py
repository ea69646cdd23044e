"""Samplers: all that turns a velocity and noise into data, with the published protocols by name.

    heun      50 steps of Heun: what sitvit takes unless told otherwise
    sit-sde   SiT's headline: Euler-Maruyama, 250 network steps, diffusion sigma, a last step Mean of 0.04
    sit-ode   the official code's ODE: dopri5 through torchdiffeq, atol 1e-6, rtol 1e-3
    sit-heun  the paper's ODE of 250 evaluations: Heun, 125 steps
    dit       DiT's: ancestral sampling over 250 of the 1000 timesteps
    dit-ddim  DDIM over 250 of them, without noise on the way

The official code counts grid points: N points are N - 1 steps, and an SDE's last step is one of the N.
`num_steps` counts network steps. So N points of the SDE with a last step are `num_steps = N` (N - 1 along
the grid and the last one), and N points of anything else are N - 1: `from_grid_points`.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .adaptive import BLOCK_SIZE
from .ddpm_samplers import DDPM_METHODS, Ddim, Ddpm
from .evaluations import NoiseSource, Solution
from .intervals import Interval, check_interval, ode_interval
from .ode import (
    ADAPTIVE,
    COUPLING,
    METHODS,
    PER_IMAGE,
    check_fineness,
    check_method,
    check_tolerances,
    integrate,
)
from .parameterization import Velocity
from .paths import Path
from .sampler import Sampler, no_progress
from .sde import SDE_METHODS
from .sde_sampler import Sde
from .times import grid


class OdeSampler(Sampler):
    """Both ODE samplers: there and back along one grid."""

    @abstractmethod
    def _tolerances(self) -> dict[str, float]: ...

    def sample(  # the noise of the start is all the noise there is
        self,
        velocity: Velocity,
        path: Path,
        prediction: str,
        x_0: Tensor,
        noise: NoiseSource,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Solution:
        """As `Sampler.sample`."""
        times = self.times(path, prediction)
        return integrate(velocity, x_0, times, self.method, on_step, **self._tolerances())

    def encode(
        self,
        velocity: Velocity,
        path: Path,
        prediction: str,
        x_1: Tensor,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Solution:
        """As `Sampler.encode`."""
        times = self.times(path, prediction)[::-1]
        return integrate(velocity, x_1, times, self.method, on_step, **self._tolerances())


@dataclass(frozen=True)
class FixedOde(OdeSampler):
    """An ODE method of fixed steps; ValueError for settings that make no sense.

    `shift` above 1 puts more of the grid into the noise (`times.grid`).
    """

    method: str = "heun"
    num_steps: int = 50
    shift: float = 1.0
    interval: Interval | None = None

    def __post_init__(self) -> None:
        check_method(self.method)
        if self.method in ADAPTIVE:
            raise ValueError(f"{self.method} chooses its own steps and is no fixed method; use AdaptiveOde")
        grid(self.num_steps, self.interval or (0, 1), self.shift)

    @property
    def name(self) -> str:
        """Such as heun50."""
        return f"{self.method}{self.num_steps}"

    @property
    def couples_the_batch(self) -> bool:  # type: ignore[override]
        """True of torchdiffeq's implicit methods, which iterate until the whole batch has converged."""
        return self.method in COUPLING

    @property
    def num_evaluations(self) -> int | None:
        """Network calls; torchdiffeq's multi-step methods need a few more to start and say None."""
        return self.num_steps * METHODS[self.method].num_evaluations if self.method in METHODS else None

    @property
    def num_ticks(self) -> int | None:
        """The steps; torchdiffeq's methods do not tell of theirs."""
        return self.num_steps if self.method in METHODS else None

    def times(self, path: Path, prediction: str) -> list[float]:
        """The grid of `num_steps + 1` times."""
        return grid(self.num_steps, self.interval or ode_interval(path, prediction), self.shift)

    def _tolerances(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class AdaptiveOde(OdeSampler):
    """An ODE method that chooses its steps by an error of `atol + rtol |x|`; ValueError for nonsense."""

    method: str = "dopri5"
    atol: float = 1e-6
    rtol: float = 1e-3
    interval: Interval | None = None

    def __post_init__(self) -> None:
        check_method(self.method)
        if self.method not in ADAPTIVE:
            raise ValueError(f"{self.method} has no tolerances; use FixedOde")
        check_tolerances(self.atol, self.rtol)
        check_interval(self.interval or (0, 1))

    @property
    def couples_the_batch(self) -> bool:  # type: ignore[override]
        """True of torchdiffeq's methods, whose step is the whole batch's."""
        return self.method in COUPLING

    @property
    def block_size(self) -> int | None:  # type: ignore[override]
        """Of the method with a step for each image: see `adaptive`."""
        return BLOCK_SIZE if self.method == PER_IMAGE else None

    @property
    def name(self) -> str:
        """Such as dopri5-rtol0.001."""
        return f"{self.method}-rtol{self.rtol:g}"

    @property
    def num_evaluations(self) -> None:
        """The method chooses."""
        return

    @property
    def num_ticks(self) -> None:
        """The method chooses."""
        return

    def times(self, path: Path, prediction: str) -> list[float]:
        """The two ends."""
        return list(self.interval or ode_interval(path, prediction))

    def doubt(self, path: Path, prediction: str) -> None:
        """As `Sampler.doubt`: tolerances that float32, in which images are sampled, cannot meet."""
        check_fineness(self.rtol, torch.float32)

    def _tolerances(self) -> dict[str, float]:
        return {"atol": self.atol, "rtol": self.rtol}


SAMPLERS: dict[str, Any] = {
    "heun": FixedOde(),
    "sit-sde": Sde(),
    "sit-ode": AdaptiveOde(),
    "sit-heun": FixedOde(num_steps=125),
    "dit": Ddpm(),
    "dit-ddim": Ddim(),
}
"""Presets; `find_sampler` varies their parts."""


def find_sampler(name: str, parts: Mapping[str, Any] = {}) -> Sampler:
    """The preset `name` with some `parts` (fields of its class) replaced.

    A `method` of another kind takes that kind's defaults for the rest, so that "heun" with the method
    "euler-maruyama" is `Sde()`.

    Raises:
        ValueError: an unknown name, or a part that this sampler has not.
    """
    if name not in SAMPLERS:
        raise ValueError(f"no sampler is called {name!r}; known are {', '.join(SAMPLERS)}")
    base = SAMPLERS[name]
    method = parts.get("method", base.method)
    check_any_method(method)
    kinds: dict[str, Any] = {
        **dict.fromkeys(SDE_METHODS, Sde),
        **dict.fromkeys(ADAPTIVE, AdaptiveOde),
        **DDPM_METHODS,
    }
    kind = kinds.get(method, FixedOde)
    if parts.get("last_step") == "none" and "last_step_size" not in parts:
        parts = {**parts, "last_step_size": 0.0}  # the only size that goes with it
    fields = [field.name for field in dataclasses.fields(kind)]
    for part in parts:
        if part not in fields:
            why = "it chooses its own steps" if method in ADAPTIVE and part in ("num_steps", "shift") else ""
            raise ValueError(
                f"{method} has no {part}{': ' if why else ''}{why}; what it takes is {', '.join(fields)}"
            )
    same_kind = isinstance(base, kind)
    return dataclasses.replace(base, **parts) if same_kind else kind(**parts)


def check_any_method(name: str) -> None:
    """ValueError unless `name` is a method of an ODE, an SDE or DiT's diffusion."""
    if name not in (*SDE_METHODS, *DDPM_METHODS):
        try:
            check_method(name)
        except ValueError as error:
            raise ValueError(
                f"{error}; for SDEs {', '.join(SDE_METHODS)}; for a DiT {', '.join(DDPM_METHODS)}"
            ) from None


def from_grid_points(sampler: FixedOde | Sde, num_points: int) -> FixedOde | Sde:
    """`sampler` on the official code's grid of `num_points` points, of which an SDE's last step is one.

    Raises:
        ValueError: a sampler without a grid.
    """
    if not isinstance(sampler, (FixedOde, Sde)):
        raise ValueError(f"{sampler.name} has no grid whose points could be counted")
    with_last = isinstance(sampler, Sde) and sampler.last_step != "none"
    return dataclasses.replace(sampler, num_steps=num_points - (0 if with_last else 1))
