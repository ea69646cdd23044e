"""What goes on inside a network, block by block, while it runs once on x_t.

After each block, and before the first ("embedding"), the tokens (B, N + R, D) are N patches and R registers.
A block's attention is computed a second time here, since the fused kernel keeps none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..generate.trained import Trained
from .attention import attention_weights

Look = Callable[[int, Tensor], object]


@dataclass(frozen=True)
class Recorded:
    """Of each place, the embedding and then each block: float32, on the CPU.

    features (places, B, D): the mean of the patch tokens; norms (places, B, N) of the patch tokens,
    register_norms (places, B, R): Euclidean.
    """

    features: Tensor
    norms: Tensor
    register_norms: Tensor


@torch.no_grad()
def record(trained: Trained, x_t: Tensor, t: float, labels: Tensor, look: Look | None = None) -> Recorded:
    """Run the network on `x_t` (B, C, H, W) at time `t` with `labels` (B,).

    `look(block, attention)` is shown the weights (B, heads, N + R, N + R) of each block, one after another.
    """
    network: Any = trained.network
    num_patches = network.grid[0] * network.grid[1]
    tokens: list[Recorded] = []

    def keep(x: Tensor) -> None:
        norms = x.float().norm(dim=-1).cpu()
        mean = x[:, :num_patches].float().mean(dim=1).cpu()
        tokens.append(Recorded(mean, norms[:, :num_patches], norms[:, num_patches:]))

    handles = [network.blocks[0].register_forward_pre_hook(lambda _, inputs: keep(inputs[0]))]
    for number, block in enumerate(network.blocks):
        handles.append(block.register_forward_hook(lambda *call: keep(call[2])))
        if look is not None:
            handles.append(block.attn.register_forward_pre_hook(_show(look, number)))
    try:
        times = torch.full((len(x_t),), t, device=x_t.device)
        trained.over_time()(x_t, times, labels)
    finally:
        for handle in handles:
            handle.remove()
    return Recorded(
        torch.stack([place.features for place in tokens]),
        torch.stack([place.norms for place in tokens]),
        torch.stack([place.register_norms for place in tokens]),
    )


def _show(look: Look, number: int) -> Callable[[Any, tuple[Any, ...]], None]:
    def show(attention: Any, inputs: tuple[Any, ...]) -> None:
        look(number, attention_weights(attention, *inputs))

    return show
