"""A run while it trains: its parts, one step, one save. What happens when is `loop`'s."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .. import runtime
from ..config import Config, dump_config
from ..data.latents import Latents
from ..data.stream import TrainingStream
from ..flow.objective import Objective
from ..flow.paths import find_path
from ..models.sit import SiT
from .checkpoint import WEIGHTS, Checkpoint, latest_checkpoint, prune_checkpoints, save_checkpoint
from .ema import Ema
from .metrics import MetricsLog
from .optim import (
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    trainable_names,
)
from .preparation import start_from_classifier, time_distribution
from .step import NonFiniteLoss, training_step

Row = dict[str, Any]
"""What is logged of some steps, numbers by name."""

Hook = Callable[["Trainer", Row | None], None]
"""Called after each step: `hook(trainer, row)`, where `row` is what this step logs, or None.

It may add numbers to `row`, look at everything and say things. It changes no part of the trainer: training
with and without it is bit-equal.
"""


class Trainer:
    """A run between two steps: `step` optimizer steps are done.

    Args:
        config: the experiment.
        cache: its latents.
        model: its network with first weights; `previous`, a checkpoint to continue from, replaces them.
        handle: accelerate's.

    Raises:
        ValueError: a global batch that the processes cannot share, before anything is made.
    """

    def __init__(
        self, config: Config, cache: Latents, model: SiT, previous: Checkpoint | None, handle: Accelerator
    ) -> None:
        self.config, self.settings = config, config.train
        self.cache, self.model, self.handle = cache, model, handle
        self.run = Path(config.run)
        self.positions = _share(self.settings.batch_size, handle.num_processes, handle.process_index)
        self._make_network(previous)
        self._make_objective()
        record: dict[str, Any] = {} if previous is None else previous.record
        self.step: int = record.get("step", 0)
        self.window: list[float] = record.get("losses_since_log", [])
        self._seconds_before: float = record.get("seconds", 0.0)
        self._start = time.monotonic()
        self._log = MetricsLog(self.run, self.step) if handle.is_main_process else None

    def _make_network(self, previous: Checkpoint | None) -> None:
        """Weights, averages and moments: fresh ones, or those of `previous`."""
        settings, model = self.settings, self.model
        if settings.init_from is not None and previous is None:
            start_from_classifier(model, Path(settings.init_from))
        self.names = trainable_names(model)
        betas = (settings.beta_1, settings.beta_2)
        self.optimizer = make_optimizer(model, settings.lr, betas, settings.weight_decay)
        if previous is not None:
            model.load_state_dict(previous.tensors(f"model/{WEIGHTS}"))
            load_optimizer_tensors(self.optimizer, self.names, previous.tensors("optimizer.safetensors"))
        model.to(self.handle.device)
        self.averages = {f"ema_{decay}": Ema(model, decay) for decay in settings.ema_decays}
        if previous is not None:
            for name, average in self.averages.items():
                average.load(previous.tensors(f"{name}/{WEIGHTS}"))
        self.wrapped, self.wrapped_optimizer = self.handle.prepare(model, self.optimizer)
        self.wrapped.train()

    def _make_objective(self) -> None:
        settings, model, cache = self.settings, self.model, self.cache
        self.objective = Objective(find_path(settings.path), settings.prediction, settings.loss_weight)
        self.times = time_distribution(settings, self.objective)
        self.stream = TrainingStream(
            cache,
            settings.seed,
            settings.batch_size,
            self.config.data.flip,
            self.config.model.class_dropout_prob,
            len(cache.class_names) if not model.has_null else model.null_label,
        )

    @property
    def seconds(self) -> float:
        """Of training, this process's life and those before it."""
        return self._seconds_before + time.monotonic() - self._start

    def advance(self) -> Row | None:
        """Do one step; the row to log, where this step is one that logs.

        Raises:
            ValueError: the loss or the gradient is not finite; the weights are those before the step.
        """
        settings = self.settings
        lr = learning_rate(
            self.step, settings.lr, settings.num_steps, settings.warmup_steps, settings.decay_steps
        )
        batch = self.stream.batch(self.step, self.positions)
        try:
            loss, grad_norm = training_step(
                self.handle,
                self.wrapped,
                self.wrapped_optimizer,
                batch,
                self.objective,
                self.times,
                lr,
                settings.clip_grad_norm,
            )
        except NonFiniteLoss as error:
            saved = latest_checkpoint(self.run)
            raise ValueError(
                f"training stopped at step {self.step + 1}: {error}; images {batch.ids.tolist()}. "
                + (f"The last checkpoint is {saved.folder}" if saved else "Nothing was saved yet")
            ) from None
        for average in self.averages.values():
            average.update(self.model)
        self.window.append(loss)
        self.step += 1
        if self.step % settings.log_every:
            return None
        mean = sum(self.window) / len(self.window)
        self.window.clear()
        return {
            "step": self.step,
            "loss": mean,
            "grad_norm": grad_norm,
            "lr": lr,
            "seconds": round(self.seconds, 3),
        }

    def log(self, row: Row) -> None:
        """Write `row` to the run's record, once per job."""
        if self._log:
            self._log.write(row)

    def save(self) -> None:
        """Write the checkpoint of this step, and delete the oldest; all processes call it together."""
        if self.handle.is_main_process:
            save_checkpoint(
                self.run / "checkpoints",
                self.step,
                self.model,
                {name: average.state for name, average in self.averages.items()},
                optimizer_tensors(self.optimizer, self.names),
                dump_config(self.config),
                self._details(),
            )
            prune_checkpoints(self.run, self.settings.keep_checkpoints)
        self.handle.wait_for_everyone()

    def _details(self) -> dict[str, Any]:
        """What the checkpoint's record says beside step, versions and files."""
        cache, settings = self.cache, self.settings
        return {
            "class_names": cache.class_names,
            "image_size": cache.image_size,
            "autoencoder": asdict(cache.autoencoder),
            "latents_fingerprint": cache.fingerprint,
            "images": cache.images,
            "images_fingerprint": cache.images_fingerprint,
            "path": settings.path,
            "prediction": settings.prediction,
            "num_parameters": self.num_parameters,
            "losses_since_log": self.window,
            "seconds": self.seconds,
            "peak_memory_mib": runtime.peak_memory_mib(),
            "command": runtime.command_line(),
            "num_processes": self.handle.num_processes,
        }

    @property
    def num_parameters(self) -> int:
        """Of the network, frozen tables among them."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def close(self) -> None:
        """Flush what the record still holds in memory."""
        if self._log:
            self._log.close()


def _share(batch_size: int, num_processes: int, process_index: int) -> range:
    """The positions of the global batch that a process trains on."""
    if batch_size % num_processes:
        raise ValueError(
            f"train.batch_size {batch_size} cannot be split over {num_processes} processes; "
            f"use a multiple of {num_processes}"
        )
    size = batch_size // num_processes
    return range(process_index * size, (process_index + 1) * size)
