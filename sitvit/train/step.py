"""One optimizer step: losses, gradients, AdamW, on whatever processes there are; no device is waited for.

    loss = mean over the global batch of `sample_losses`        a pure function of (network, batch, objective)
    g = d loss / d weights;  g <- g min(1, limit / |g|)
    weights <- AdamW(weights, g, lr), unless loss or |g| is not finite: then nothing changes

Whether it is finite is decided on the device, by all processes together; `LateReading` tells the host a step
later, while the device works on.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .. import runtime
from ..data.stream import TrainingBatch
from ..flow.times import TimeDistribution
from .sharding import whole


class Loss(Protocol):
    """What training minimises: `flow`'s objectives."""

    def loss(
        self, network: Callable[[Tensor, Tensor], Tensor], x_0: Tensor, x_1: Tensor, t: Tensor
    ) -> Tensor:
        """One value per sample, (B,)."""
        ...


class Figures(NamedTuple):
    """What a step says of itself."""

    loss: float  # mean over the global batch
    grad_norm: float  # of that mean's gradient, before clipping
    stop: float  # above 0 where a process was asked to stop

    @property
    def finite(self) -> bool:
        """Whether the step changed the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass
class LateReading:
    """The host's look at each step's figures, one step late: no device idles while it is waited for."""

    _waiting: tuple[Tensor, torch.cuda.Event | None] | None = None

    def push(self, figures: Tensor) -> Figures | None:
        """Hand in the figures (3,) of a step; those of the step before, where there was one."""
        before = self.flush()
        event = None
        host = figures.to("cpu", non_blocking=True)
        if figures.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._waiting = (host, event)
        return before

    def flush(self) -> Figures | None:
        """Wait for the figures of the last step, where they were not read yet."""
        if self._waiting is None:
            return None
        host, event = self._waiting
        self._waiting = None
        if event is not None:
            event.synchronize()
        return Figures(*host.tolist())


def sample_losses(
    network: nn.Module, batch: TrainingBatch, objective: Loss, times: TimeDistribution
) -> Tensor:
    """Loss of each sample (B,), float32; `batch` is on the network's device."""
    return objective.loss(
        lambda x, t: network(x, t, batch.labels), batch.x_0, batch.x_1, times.quantile(batch.u)
    )


def nonfinite_samples(
    handle: Accelerator, ids: np.ndarray, times: Tensor, losses: Tensor, most: int = 4
) -> str:
    """The samples whose loss is not finite: image, time and process of the first `most`, and how many more.

    `ids`, `times` and `losses` (B,) are of this process's slice; all processes call it together.
    """
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    mine = [f"image {ids[i]} at t = {times[i]:.4g} on process {handle.process_index}" for i in bad]
    found = runtime.gathered(mine)
    if not found:
        return "each sample's loss is finite, the gradient is not"
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def training_step(
    handle: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch,
    objective: Loss,
    times: TimeDistribution,
    lr: float,
    clip_grad_norm: float | None = None,
    micro_batch_size: int | None = None,
    stop: bool = False,
) -> tuple[Tensor, Tensor]:
    """Update the weights on this process's slice of the global batch.

    Returns the step's figures (3,), the same on all processes, and the losses (B,) of this one's samples.
    Slices are of equal size, and so are their parts of `micro_batch_size`, which are run one after the other.
    `model` is accelerate's, `optimizer` the plain one; `stop` says whether this process was asked to stop.
    """
    micros = batch.to(handle.device).parts(micro_batch_size or len(batch.ids))
    losses = []
    for number, micro in enumerate(micros):
        last = number == len(micros) - 1  # gradients are summed over processes once, with the last part
        with contextlib.nullcontext() if last else handle.no_sync(model):
            part = sample_losses(model, micro, objective, times)
            handle.backward(part.mean() / len(micros))
        losses.append(part.detach())
    limit = math.inf if clip_grad_norm is None else clip_grad_norm
    norm = handle.clip_grad_norm_(model.parameters(), limit)
    assert isinstance(norm, Tensor)
    norm = whole({"": norm})[""]
    loss = torch.stack([part.mean() for part in losses]).mean()
    figures = torch.stack([loss, norm.to(loss), loss.new_full((), float(stop))])
    figures = handle.reduce(figures, "mean")
    # Fused AdamW reads this on the device, and leaves weights, moments and its step count as they are.
    optimizer.found_inf = (~figures[:2].isfinite().all()).float()  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return figures, torch.cat(losses)
