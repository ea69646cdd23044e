"""What training minimises: || v(x_t, t) - dx_t/dt ||^2 (SiT, Eq. 6), a value per sample."""

from collections.abc import Callable

from torch import Tensor

from .paths import Linear

Velocity = Callable[[Tensor, Tensor], Tensor]


def velocity_loss(velocity: Velocity, path: Linear, x_0: Tensor, x_1: Tensor, t: Tensor) -> Tensor:
    """Mean squared error of the velocity over each sample's elements, float32, shape (B,).

    `x_0` noise and `x_1` data of shape (B, ...), `t` (B,) in [0, 1].
    """
    prediction = velocity(path.interpolate(x_0, x_1, t), t)
    error = prediction.float() - path.velocity(x_0, x_1, t).float()
    return error.square().flatten(1).mean(dim=1)
