"""Classifier-free guidance (arXiv 2207.12598): v = v_null + s (v_class - v_null), on every channel."""

from collections.abc import Callable

import torch
from torch import Tensor

from .objective import Velocity

ConditionalVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_cfg_scale(cfg_scale: float) -> None:
    """ValueError unless the scale is 1 (off) or more."""
    if not 1 <= cfg_scale < float("inf"):
        raise ValueError(f"cfg_scale must be 1 (no guidance) or more, got {cfg_scale}")


def classifier_free_guidance(
    network: ConditionalVelocity, labels: Tensor, null_label: int | None, cfg_scale: float
) -> Velocity:
    """Bind `labels` (B,) and guidance into a velocity callable.

    Scale 1 is exactly the conditional velocity and costs one pass. Above it, the conditional and the
    null half go through the network as one batch of 2B. `null_label` may be None at scale 1.
    """
    check_cfg_scale(cfg_scale)
    if cfg_scale == 1:
        return lambda x, t: network(x, t, labels)
    if null_label is None:
        raise ValueError(f"cfg_scale {cfg_scale} needs a null label; use cfg_scale 1")
    both_labels = torch.cat([labels, torch.full_like(labels, null_label)])

    def guided(x: Tensor, t: Tensor) -> Tensor:
        conditional, null = network(torch.cat([x, x]), torch.cat([t, t]), both_labels).chunk(2)
        return null + cfg_scale * (conditional - null)

    return guided
