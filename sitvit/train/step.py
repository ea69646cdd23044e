"""One optimizer step: loss, gradients, AdamW, on whatever processes there are."""

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..data.stream import TrainingBatch
from ..flow.objective import Objective
from ..flow.times import TimeDistribution


class NonFiniteLoss(ValueError):
    """The loss or the gradient is not a finite number; the weights are those before the step."""


def training_step(
    handle: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch,
    objective: Objective,
    times: TimeDistribution,
    lr: float,
    clip_grad_norm: float | None,
) -> tuple[float, float]:
    """Update the weights on this process's slice of the global batch.

    Returns the loss, a mean over the global batch, and the norm of its gradient before clipping.

    Raises:
        NonFiniteLoss: on every process together, before the weights are touched.
    """
    x_0, x_1, u, labels = (
        tensor.to(handle.device) for tensor in (batch.x_0, batch.x_1, batch.u, batch.labels)
    )
    with handle.autocast():
        losses = objective.loss(lambda x, t: model(x, t, labels), x_0, x_1, times.quantile(u))  # (B,)
    loss = losses.mean()
    handle.backward(loss)
    limit = math.inf if clip_grad_norm is None else clip_grad_norm
    norm = handle.clip_grad_norm_(model.parameters(), limit)
    assert isinstance(norm, Tensor)
    # Slices are of equal size, so the mean of their means is the mean over the global batch.
    mean_loss, grad_norm = handle.gather(loss.detach()).mean().item(), norm.item()
    if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLoss(f"loss {mean_loss}, gradient norm {grad_norm}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean_loss, grad_norm
