"""What training minimises (SiT, Eqs. 6 and 8): a weighted squared error, one value per sample.

The residual is that of what the network predicts, and the score's is sigma times as large, so that it is
the noise's: r = v_hat - v, e_hat - e, sigma s_hat + e, d_hat - d. Its weight:

    weight       velocity            noise, score           data
    none         1                   1                      1
    velocity     1                   (speed / alpha)^2      (speed / sigma)^2         error of the velocity
    likelihood   alpha/(sigma speed) speed / (alpha sigma)  speed alpha / sigma^3     SBDM's bound on -log p

with speed = d_alpha sigma - alpha d_sigma, and alpha, sigma in denominators at least `FLOOR`. "data" with
weight "velocity" is the x-prediction of recent pixel-space work (arXiv 2511.13720), which holds 1 - t at 0.05
or more: end the times at 0.95. Difference from the official code: there a weight beside a velocity prediction
is read and ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .ddpm import respaced
from .names import WEIGHTS
from .parameterization import Velocity, check_prediction
from .paths import FLOOR, Path, per_sample
from .respacing import NUM_TIMESTEPS


def _floored(value: Tensor) -> Tensor:
    return value.clamp(min=FLOOR)


_WEIGHT_FUNCTIONS: dict[tuple[str, str], Callable[[Path, Tensor], Tensor]] = {
    ("velocity", "likelihood"): lambda p, t: p.alpha(t) / (_floored(p.sigma(t)) * p.speed(t)),
    ("noise", "velocity"): lambda p, t: (p.speed(t) / _floored(p.alpha(t))) ** 2,
    ("noise", "likelihood"): lambda p, t: p.speed(t) / (_floored(p.alpha(t)) * _floored(p.sigma(t))),
    ("data", "velocity"): lambda p, t: (p.speed(t) / _floored(p.sigma(t))) ** 2,
    ("data", "likelihood"): lambda p, t: p.speed(t) * p.alpha(t) / _floored(p.sigma(t)) ** 3,
}


@dataclass(frozen=True)
class Objective:
    """A path, what the network predicts, and how its squared error is weighted.

    Raises:
        ValueError: an unknown prediction or weight, with the known ones.
    """

    path: Path
    prediction: str = "velocity"
    weight: str = "none"

    def __post_init__(self) -> None:
        check_prediction(self.prediction)
        if self.weight not in WEIGHTS:
            raise ValueError(f"no loss weight is called {self.weight!r}; known are {', '.join(WEIGHTS)}")

    def loss(self, network: Velocity, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        """Weighted squared error, a mean over each sample's elements: (B,), float32 or better.

        `network(x_t, t)` predicts `prediction`; noise `x_0` and data `x_1` (B, ...); `t` (B,) in [0, 1].
        """
        precision = torch.promote_types(x_1.dtype, torch.float32)
        x_0, x_1, t = x_0.to(precision), x_1.to(precision), t.to(precision)
        prediction = network(self.path.interpolate(x_0, x_1, t), t).to(precision)
        if prediction.shape != x_1.shape:
            raise ValueError(
                f"the network predicts {tuple(prediction.shape)} for data {tuple(x_1.shape)}; they must agree"
            )
        residual = self._residual(prediction, x_0, x_1, t)
        return self.weights(t) * residual.square().flatten(1).mean(dim=1)

    def weights(self, t: Tensor) -> Tensor:
        """The weight at each of `t` (B,)."""
        kind = "noise" if self.prediction == "score" else self.prediction
        function = _WEIGHT_FUNCTIONS.get((kind, self.weight))
        return torch.ones_like(t) if function is None else function(self.path, t)

    def _residual(self, prediction: Tensor, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "velocity":
            return prediction - self.path.velocity(x_0, x_1, t)
        if self.prediction == "data":
            return prediction - x_1
        if self.prediction == "noise":
            return prediction - x_0
        return self.path.sigma(per_sample(t, x_1)) * prediction + x_0


class DiffusionObjective:
    """DiT's: `ddpm`'s hybrid loss at the whole-number timestep floor(1000 t), for t as in `Objective` drawn.

    Timesteps run the other way, 0 next to the data, which a uniform t does not see.
    """

    def __init__(self) -> None:
        self.diffusion = respaced()

    def loss(self, network: Velocity, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
        """As `Objective.loss`; `network(x_t, timesteps)` gives noise, and with learn_sigma the variance."""
        precision = torch.promote_types(x_1.dtype, torch.float32)
        index = (t.to(precision) * NUM_TIMESTEPS).long().clamp(max=NUM_TIMESTEPS - 1)
        return self.diffusion.hybrid_loss(network, x_0.to(precision), x_1.to(precision), index).total
