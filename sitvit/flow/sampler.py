"""What all samplers have: how one carries noise to data, what it costs, and what it calls itself."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .evaluations import NoiseSource, Solution
from .parameterization import Velocity
from .paths import Path


def no_progress(x: Tensor) -> None:
    """Nobody watches."""


class Sampler(ABC):
    """What all samplers have."""

    method: str
    takes_noise = False  # whether it asks for DiT's noise prediction in place of a velocity
    couples_the_batch = False  # whether an image moves, within a tolerance, with its batch mates
    block_size: int | None = None  # images to sample at once, always, where a batch's size tips decisions

    @property
    @abstractmethod
    def name(self) -> str:
        """Short: the method and what people vary first."""

    def settings(self) -> dict[str, Any]:
        """All that the way depends on, as JSON has it."""
        assert dataclasses.is_dataclass(self)
        fields = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}
        return {"name": self.name, **fields}

    @property
    @abstractmethod
    def num_evaluations(self) -> int | None:
        """Network calls, or None where the method chooses them."""

    @property
    @abstractmethod
    def num_ticks(self) -> int | None:
        """How often `on_step` is called, or None where the method chooses."""

    @abstractmethod
    def times(self, path: Path, prediction: str) -> list[float]:
        """The grid that the network is called on; of an adaptive method its ends."""

    @abstractmethod
    def sample(
        self,
        velocity: Velocity,
        path: Path,
        prediction: str,
        x_0: Tensor,
        noise: NoiseSource,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Solution:
        """Carry noise `x_0` (B, ...) to data.

        `velocity` is a velocity already; `prediction` is what the network behind it predicts, which decides
        where sampling may begin and end. `noise(i)` is asked for at step i, by a method that draws.
        `on_step(x)` is called after each step with the state.
        """

    def doubt(self, path: Path, prediction: str) -> str | None:
        """What makes these settings doubtful on any network, for people; None where nothing does.

        Raises:
            ValueError: settings with which nothing but noise would come out.
        """
        return None

    def encode(
        self,
        velocity: Velocity,
        path: Path,
        prediction: str,
        x_1: Tensor,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Solution:
        """Carry data `x_1` (B, ...) back to its noise along the ODE; ValueError where there is none."""
        raise ValueError(f"{self.method} draws noise on its way and cannot be run back; use an ODE method")
