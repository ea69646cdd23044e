"""DiT: the same transformer as the noise network of a discrete diffusion (arXiv 2212.09748)."""

from torch import Tensor

from .transformer import DiffusionTransformer


class DiT(DiffusionTransformer):
    """Noise network: `model(x_t, t, labels)` -> noise, and with `learn_sigma` the variance's channels.

    The arguments are `DiffusionTransformer`'s; the presets `DiT-*` set `learn_sigma`, as published.
    """

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """`x_t` (B, C, H, W), `t` (B,) in 0 .. 999, `labels` (B,) int64 -> (B, C or 2C, H, W)."""
        return self.predict(x_t, t, labels)


DiT.__module__ = "sitvit"
