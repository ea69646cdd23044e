"""torch.compile of the network, checked: on the first batch it gives what eager mode gives.

A fresh network's output is zero whatever is in it, so both are compared on weights with noise added; the
weights are put back bit for bit. Compared are each sample's loss and the norm of the gradient, in the
network's own precision.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .preparation import Network
from .sharding import cut, whole

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Of losses and gradient norm, relative: rounding in another order, and bf16's 8 bits of mantissa."""


def compile_network(model: Network, how: str) -> None:
    """Compile in place, so that names and wrappers stay: "block" (once for all blocks), "whole", "none"."""
    if how == "block":
        model.compile_blocks()
    elif how == "whole":
        model.compile()


def compile_checked(model: Network, how: str, losses: Callable[[], Tensor], precision: str) -> None:
    """`compile_network`, then compare; `losses()` runs the network and gives (B,).

    Raises:
        ValueError: what is compiled differs from eager mode by more than rounding.
    """
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(cut(0.02 * noise.to(parameter.device, parameter.dtype), parameter))
    eager = _figures(model, losses)
    compile_network(model, how)
    compiled = _figures(model, losses)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    error = ((compiled - eager).abs() / eager.abs()).max().item()
    if not error <= TOLERANCE[precision]:
        raise ValueError(
            f"the compiled network differs from eager mode by {error:.1e} on the first batch, more than "
            f"rounding ({TOLERANCE[precision]:.0e}); train with train.compile=none"
        )


def _figures(model: nn.Module, losses: Callable[[], Tensor]) -> Tensor:
    """Losses (B,), and the norm of their mean's gradient: (B + 1,) float32."""
    values = losses()
    values.mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = whole({"": torch.stack([gradient.float().norm() for gradient in gradients]).norm()})[""]
    for parameter in model.parameters():
        parameter.grad = None
    return torch.cat([values.detach().float(), norm.to(values)[None]])
