"""How fast a run is: images a second, memory, and the share of a GPU's peak where that is known (MFU)."""

import time
from typing import Any

import torch

from .. import runtime
from ..models.geometry import PEAKS, geometry
from ..models.shapes import SiTShape
from .trainer import Row, Trainer


class Speed:
    """A hook that adds to each row, all since the row before:

    images_per_second   of all processes
    memory_gib          the most that this process has held
    mfu                 training FLOP/s over the peak of the GPUs, where that is known
    outside_step        share of the time that went to data, logs, saving, previews and evaluations; a GPU
                        works on meanwhile, so there it is the most that it may have stood still for them
    """

    def __init__(self) -> None:
        self._before: tuple[int, float, float] | None = None

    def __call__(self, trainer: Trainer, row: Row | None) -> None:
        """Measure from the first step on, so that start-up and compilation are not counted."""
        now = (trainer.step, time.monotonic(), trainer.step_seconds)
        if self._before is None:
            self._before = now
        elif row is not None and now[0] > self._before[0]:
            steps, seconds = now[0] - self._before[0], now[1] - self._before[1]
            rate = steps * trainer.settings.batch_size / seconds
            row["images_per_second"] = round(rate, 1)
            row["outside_step"] = round(1 - (now[2] - self._before[2]) / seconds, 4)
            row["memory_gib"] = round(_memory_gib(trainer.handle.device), 2)
            mfu = _mfu(trainer, rate)
            if mfu is not None:
                row["mfu"] = round(mfu, 4)
            self._before = now


def progress_text(row: Row) -> str:
    """What a progress bar says of a logged step, beside its own rate and time left."""
    text = f"loss {row['loss']:.4f}, lr {row['lr']:.1e}, grad {row['grad_norm']:.2g}"
    if "images_per_second" in row:
        text += f", {row['images_per_second']:.0f} img/s, {row['memory_gib']:.1f} GiB"
    return text + (f", MFU {row['mfu']:.0%}" if "mfu" in row else "")


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return runtime.peak_memory_mib() / 1024


def _mfu(trainer: Trainer, rate: float) -> float | None:
    """Training FLOP/s over the peak of all GPUs; None where the peak or the precision is another."""
    device = trainer.handle.device
    if device.type != "cuda" or trainer.settings.precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    if peak is None:
        return None
    config: Any = trainer.model.config
    flops = geometry(SiTShape.of(config)).training_flops
    return rate * flops / (peak * trainer.handle.num_processes)
