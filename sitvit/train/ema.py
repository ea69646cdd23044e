"""Exponential moving average of the weights: ema <- decay * ema + (1 - decay) * weights, float32."""

import torch
from torch import Tensor, nn


class Ema:
    """Averages every tensor of a module's state by name, in float32 whatever the module's precision.

    Made from the plain module, before any wrapping or compilation: a copy of a wrapper would run the
    raw weights.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.state = {name: tensor.detach().float().clone() for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move towards the module's current weights; called after each optimizer step."""
        current = module.state_dict()
        averages = list(self.state.values())
        weights = [current[name].float() for name in self.state]
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from saved averages; every name must be there."""
        assert state.keys() == self.state.keys()
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
