"""Running averages of the weights, float32: ema <- b ema + (1 - b) weights after each step.

constant decay   b the same always: the last 1 / (1 - b) steps count most
power function   b = (1 - 1/t)^(gamma + 1) after step t, from 1: the weights of step s have counted with
                 (s^(gamma+1) - (s-1)^(gamma+1)) / t^(gamma+1) ever since, the integral over step s of the
                 profile (gamma + 1) s^gamma / t^(gamma+1): what it covers grows with the run (EDM2,
                 arXiv 2312.02696, section 3.1). `reconstruct` makes other lengths of two of them.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..config import MAX_WIDTH


class Ema:
    """Averages every tensor of a module's state by name, in float32 whatever the module's precision.

    Made from the plain module, before any wrapping or compilation: a copy of a wrapper would run the
    raw weights. `decay(t)` is b after step t, counted from 1.
    """

    def __init__(self, module: nn.Module, decay: Callable[[int], float]) -> None:
        self.decay = decay
        self.state = {name: tensor.detach().float().clone() for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def update(self, weights: dict[str, Tensor], step: int) -> None:
        """Move towards `weights`, a module's state; called after optimizer step `step`, from 1."""
        current = [weights[name].float() for name in self.state]
        torch._foreach_lerp_(list(self.state.values()), current, 1 - self.decay(step))

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from saved averages; every name must be there."""
        assert state.keys() == self.state.keys()
        for name, tensor in state.items():
            self.state[name].copy_(tensor)


def averages(module: nn.Module, decays: Sequence[float], widths: Sequence[float]) -> dict[str, Ema]:
    """An average `ema_DECAY` for each decay and `power_WIDTH` for each relative width, by name."""
    constant = {constant_name(decay): Ema(module, constant_decay(decay)) for decay in decays}
    return constant | {power_name(width): Ema(module, power_decay(exponent(width))) for width in widths}


def constant_name(decay: float) -> str:
    """What the average of constant decay `decay` is called in checkpoints."""
    return f"ema_{decay}"


def power_name(width: float) -> str:
    """What the power-function average of relative width `width` is called in checkpoints."""
    return f"power_{width}"


def constant_decay(decay: float) -> Callable[[int], float]:
    """b after step t: the same always."""
    return lambda step: decay


def power_decay(gamma: float) -> Callable[[int], float]:
    """b after step t of the power function `gamma`."""
    return lambda step: (1 - 1 / step) ** (gamma + 1)


def exponent(width: float) -> float:
    """gamma of the profile whose standard deviation is `width` times the length of the run.

        width = sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3))            (ibid.)

    It falls as gamma grows. ValueError outside (0, 0.28].
    """
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(
            f"the relative width of an average must be above 0 and at most {MAX_WIDTH}, got {width}"
        )
    low, high = 0.0, 2 / width  # the width is below 1 / gamma
    for _ in range(100):
        middle = (low + high) / 2
        if math.sqrt(middle + 1) / ((middle + 2) * math.sqrt(middle + 3)) > width:
            low = middle
        else:
            high = middle
    return (low + high) / 2
