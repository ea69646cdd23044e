"""SiT: the transformer as the velocity network of a stochastic interpolant (arXiv 2401.08740).

Difference from the official code: `learn_sigma` is off by default, since SiT throws that half away.
"""

from torch import Tensor

from .transformer import DiffusionTransformer


class SiT(DiffusionTransformer):
    """Velocity network: `model(x_t, t, labels)` -> dx_t/dt of the shape of `x_t`.

    The arguments are `DiffusionTransformer`'s. With `learn_sigma` (official checkpoints have it) the
    second half of the output channels is computed and dropped.
    """

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """`x_t` (B, C, H, W), `t` (B,) in [0, 1], `labels` (B,) int64 -> velocity (B, C, H, W)."""
        return self.predict(x_t, t, labels)[:, : self.in_channels]


# Saved configurations name the public class, so that moving this file breaks nobody's checkpoint.
SiT.__module__ = "sitvit"
