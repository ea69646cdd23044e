"""The SDE among the samplers (`sde`), and a look at its settings before anything is sampled (`stiffness`)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .evaluations import NoiseSource, Solution
from .intervals import Interval, sde_interval
from .parameterization import Velocity
from .paths import Path
from .sampler import Sampler, no_progress
from .sde import SDE_METHODS, Diffusion, check_sde, integrate_sde
from .stiffness import RUINED, TOLERANCE, worst_spread
from .times import check_steps, grid

MORE_STEPS = (10, 25, 50, 100, 250, 500, 1000)
"""Round numbers of steps that an SDE with too few of them is tried with."""


@dataclass(frozen=True)
class Sde(Sampler):
    """An SDE method of fixed steps, the last step counted; ValueError for settings that make no sense.

    A last step of `last_step_size` follows the grid; `last_step` "none" goes with size 0.
    """

    method: str = "euler-maruyama"
    num_steps: int = 250
    diffusion: str = "sigma"
    diffusion_norm: float = 1.0
    last_step: str = "Mean"
    last_step_size: float = 0.04
    shift: float = 1.0
    interval: Interval | None = None

    def __post_init__(self) -> None:
        check_sde(self.method, self.last_step)
        Diffusion.check(self.diffusion, self.diffusion_norm)
        check_steps(self.num_steps)
        if (self.last_step == "none") != (self.last_step_size == 0):
            raise ValueError(
                f"last_step {self.last_step} and last_step_size {self.last_step_size} do not go together: "
                "none has size 0, the others one above 0"
            )
        if not 0 <= self.last_step_size < 1:
            raise ValueError(f"last_step_size must be from 0 to below 1, got {self.last_step_size}")
        if self._grid_steps < 1:
            raise ValueError(
                f"{self.method} with a last step needs num_steps of 2 or more, or last_step none"
            )
        if self.interval is not None and self.last_step_size > 0:
            raise ValueError("a last step ends at t = 1: with an interval of your own set last_step to none")
        grid(self._grid_steps, self.interval or (0, 1), self.shift)

    @property
    def _grid_steps(self) -> int:
        return self.num_steps - (self.last_step != "none")

    @property
    def name(self) -> str:
        """Such as euler-maruyama250-sigma."""
        return f"{self.method}{self.num_steps}-{self.diffusion}"

    @property
    def num_evaluations(self) -> int:
        """Network calls."""
        return self._grid_steps * SDE_METHODS[self.method] + (self.last_step != "none")

    @property
    def num_ticks(self) -> int:
        """The steps."""
        return self.num_steps

    def times(self, path: Path, prediction: str) -> list[float]:
        """The grid before the last step."""
        allowed = sde_interval(path, prediction, self.diffusion, self.last_step_size)
        return grid(self._grid_steps, self.interval or allowed, self.shift)

    def sample(
        self,
        velocity: Velocity,
        path: Path,
        prediction: str,
        x_0: Tensor,
        noise: NoiseSource,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Solution:
        """As `Sampler.sample`."""
        diffusion = Diffusion(path, self.diffusion, self.diffusion_norm)
        times = self.times(path, prediction)
        return integrate_sde(velocity, x_0, times, diffusion, self.method, self.last_step, noise, on_step)

    def doubt(self, path: Path, prediction: str) -> str | None:
        """As `Sampler.doubt`: steps too few for the diffusion (`stiffness`)."""
        wanted, found = self._worst(path, prediction)
        if abs(found - wanted) <= TOLERANCE:
            return None
        told = (
            f"{self.method} with diffusion {self.diffusion} (norm {self.diffusion_norm:g}), num_steps "
            f"{self.num_steps} and last_step {self.last_step} on the {path.name} path is too coarse: data of "
            f"spread {wanted:.2g} would come out with {found:.2g} (latents have about 1). "
            f"{self._remedy(path, prediction)}"
        )
        if found > RUINED:
            raise ValueError(told)
        return told

    def _worst(self, path: Path, prediction: str) -> tuple[float, float]:
        diffusion = Diffusion(path, self.diffusion, self.diffusion_norm)
        return worst_spread(self.times(path, prediction), diffusion, self.method, self.last_step)

    def _remedy(self, path: Path, prediction: str) -> str:
        """The first of more steps, another last step and the published settings with which it is fine."""
        changes: list[dict[str, Any]] = [{"num_steps": n} for n in MORE_STEPS if n > self.num_steps]
        if self.last_step != "none":
            changes += [{"last_step": "Euler", **change} for change in [{}, *changes]]
        for change in changes:
            wanted, found = dataclasses.replace(self, **change)._worst(path, prediction)
            if abs(found - wanted) <= TOLERANCE:
                return f"{' and '.join(f'{key} {value}' for key, value in change.items())} would do"
        return "more steps alone do not help: use the settings of sit-sde, or a smaller diffusion_norm"
