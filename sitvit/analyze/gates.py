"""How strongly each block speaks: adaLN's gate, LayerScale's gamma, and their product.

    x += gate(t, label) * gamma * f(x)

Means of |.| over channels, gates over all classes too; they follow from t and the label alone, so no image
is needed. Without LayerScale gamma is 1 and the product is the gate.
"""

from typing import Any

import torch
from torch import Tensor

from ..flow.ddpm_samplers import timestep_of
from ..generate.trained import Trained

BRANCHES = ("attention", "mlp")


@torch.no_grad()
def gates(trained: Trained, t: float) -> list[dict[str, Any]]:
    """Of each block and branch at time `t`: "gate", "gamma" (None without LayerScale), "product"."""
    network: Any = trained.network
    times = torch.full((network.num_classes,), t, device=network.device)
    labels = torch.arange(network.num_classes, device=network.device)
    c = network.t_embedder(timestep_of(times) if trained.is_discrete else times) + network.y_embedder(labels)
    rows = []
    for number, block in enumerate(network.blocks):
        parts = block.adaLN_modulation(c).float().chunk(6, dim=1)
        both = zip(BRANCHES, (parts[2], parts[5]), (block.gamma_1, block.gamma_2), strict=True)
        rows += [{"block": number, "branch": branch, **_sizes(gate, gamma)} for branch, gate, gamma in both]
    return rows


def _sizes(gate: Tensor, gamma: Tensor | None) -> dict[str, float | None]:
    product = gate if gamma is None else gate * gamma.float()
    return {
        "gate": gate.abs().mean().item(),
        "gamma": None if gamma is None else gamma.float().abs().mean().item(),
        "product": product.abs().mean().item(),
    }
