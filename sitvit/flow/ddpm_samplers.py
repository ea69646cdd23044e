"""DiT's discrete diffusion (`ddpm`) among the samplers, which count time in t from 0 (noise) to 1 (data).

DiT's timestep i = 0 .. 999 runs from the data to the noise. It stands for the cell of t that it is the
middle of,

    t = 1 - (i + 1/2) / 1000,        i = round(1000 (1 - t) - 1/2)

so that an interval of guidance means the same for a DiT and a SiT. Only the two functions below convert.
As a path the chain is vp's: its beta runs from 0.1 to 20 per unit of time.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .ddpm import Diffusion, NoiseNetwork, ddim_encode, ddim_sample, ddpm_sample, respaced
from .evaluations import Evaluations, NoiseSource, Solution
from .guidance import ConditionalVelocity
from .parameterization import Velocity
from .paths import Path
from .respacing import NUM_TIMESTEPS
from .sampler import Sampler, no_progress


def time_of(timesteps: Tensor) -> Tensor:
    """t, float32, of whole-number timesteps of any shape."""
    return 1 - (timesteps.float() + 0.5) / NUM_TIMESTEPS


def timestep_of(t: Tensor) -> Tensor:
    """The whole-number timestep, int64, whose cell `t` lies in."""
    return ((1 - t.double()) * NUM_TIMESTEPS - 0.5).round().long().clamp(0, NUM_TIMESTEPS - 1)


def over_time(network: ConditionalVelocity) -> ConditionalVelocity:
    """A DiT, `network(x, timesteps, labels)`, as a function of t: what guidance and the samplers call."""
    return lambda x, t, labels: network(x, timestep_of(t), labels)


class DdpmSampler(Sampler):
    """Both samplers of DiT's diffusion. `velocity` is a noise network of (x, t) here: `over_time`, guided."""

    num_steps: int
    takes_noise = True

    @property
    def name(self) -> str:
        """Such as ddpm250."""
        return f"{self.method}{self.num_steps}"

    @property
    def num_evaluations(self) -> int:
        """Network calls, one a step."""
        return self.num_steps

    @property
    def num_ticks(self) -> int:
        """The steps."""
        return self.num_steps

    def times(self, path: Path, prediction: str) -> list[float]:
        """t of the timesteps that are kept, from the noise on, and 1; path and prediction are the chain's."""
        return [*time_of(respaced(self.num_steps).timesteps.flip(0)).tolist(), 1.0]

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
        chain = respaced(self.num_steps)
        return _run(velocity, x_0, self.name, lambda net, x: self._steps(chain, net, x, noise, on_step))

    @abstractmethod
    def _steps(
        self,
        diffusion: Diffusion,
        network: NoiseNetwork,
        x: Tensor,
        noise: NoiseSource,
        on_step: Callable[[Tensor], object],
    ) -> Tensor: ...


@dataclass(frozen=True)
class Ddpm(DdpmSampler):
    """Ancestral sampling with the learned variance, over `num_steps` of the 1000 timesteps."""

    method: str = "ddpm"
    num_steps: int = 250

    def __post_init__(self) -> None:
        _check_steps(self.num_steps)

    def _steps(
        self,
        diffusion: Diffusion,
        network: NoiseNetwork,
        x: Tensor,
        noise: NoiseSource,
        on_step: Callable[[Tensor], object],
    ) -> Tensor:
        return ddpm_sample(diffusion, network, x, noise, on_step)


@dataclass(frozen=True)
class Ddim(DdpmSampler):
    """DDIM over `num_steps` timesteps; `eta` from 0 (no noise, can be run back) to 1 (as DDPM)."""

    method: str = "ddim"
    num_steps: int = 250
    eta: float = 0.0

    def __post_init__(self) -> None:
        _check_steps(self.num_steps)
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be from 0 (no noise) to 1 (as DDPM), got {self.eta}")

    def _steps(
        self,
        diffusion: Diffusion,
        network: NoiseNetwork,
        x: Tensor,
        noise: NoiseSource,
        on_step: Callable[[Tensor], object],
    ) -> Tensor:
        return ddim_sample(diffusion, network, x, noise, self.eta, on_step)

    def encode(
        self,
        velocity: Velocity,
        path: Path,
        prediction: str,
        x_1: Tensor,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Solution:
        """As `Sampler.encode`, to order 1."""
        if self.eta > 0:
            raise ValueError(f"ddim with eta {self.eta} draws noise and cannot be run back; use eta 0")
        chain = respaced(self.num_steps)
        return _run(velocity, x_1, self.name, lambda net, x: ddim_encode(chain, net, x, on_step))


DDPM_METHODS: dict[str, type[DdpmSampler]] = {"ddpm": Ddpm, "ddim": Ddim}
"""The samplers of a DiT by method."""


def _check_steps(num_steps: int) -> None:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or not 1 <= num_steps <= NUM_TIMESTEPS:
        raise ValueError(
            f"num_steps of a DiT's sampler must be a whole number from 1 to {NUM_TIMESTEPS}, got {num_steps}"
        )


def _name_time(t: float) -> str:
    return f"t = {t:.6g} (timestep {int(timestep_of(torch.tensor(t)))})"


def _run(
    network: Velocity, x: Tensor, name: str, steps: Callable[[NoiseNetwork, Tensor], Tensor]
) -> Solution:
    # A variance may follow the noise, so the shapes differ.
    counted = Evaluations(network, eager=False, same_shape=False, name_time=_name_time)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    try:
        x = steps(lambda x, timesteps: counted(x, time_of(timesteps)), x)
    except FloatingPointError:
        counted.raise_if_bad()  # which says at which t
        raise
    return counted.solution(x, name)
