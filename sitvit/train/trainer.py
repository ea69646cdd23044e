"""A run while it trains: its parts, one step, one save. What happens when is `loop`'s."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from .. import runtime
from ..config import Config, TrainConfig, dump_config
from ..data.latents import Latents
from ..data.live import LiveLatents, UnreadableImage
from ..data.stream import TrainingBatch, TrainingStream
from .checkpoint import WEIGHTS, Checkpoint, latest_checkpoint, prune_checkpoints, save_checkpoint
from .compilation import compile_checked
from .ema import averages
from .finetune import freeze, start_from
from .metrics import MetricsLog
from .optim import (
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    trainable_names,
)
from .preparation import Network, objective_and_times
from .reconstruct import delete_later_snapshots
from .sharding import cut_as, is_sharded, shard, whole
from .step import Figures, LateReading, nonfinite_samples, sample_losses, training_step

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
        self, config: Config, cache: Latents, model: Network, previous: Checkpoint | None, handle: Accelerator
    ) -> None:
        self.config, self.settings = config, config.train
        self.cache, self.model, self.handle = cache, model, handle
        self.run = Path(config.run)
        self.positions = _share(self.settings, handle.num_processes, handle.process_index)
        self.objective, self.times = objective_and_times(self.settings)
        self.stream = self._make_stream()
        self._make_network(fresh=previous is None)
        self.told_to_stop = False
        self._log: MetricsLog | None = None
        self._start = time.monotonic()
        self.step_seconds = 0.0  # of this process's life: forward, backward, AdamW, averages
        self._seconds_before: float = 0.0 if previous is None else previous.record["seconds"]
        self._restore(previous)
        if self.settings.compile != "none":
            self._compile()

    def _compile(self) -> None:
        """Compile after accelerate wrapped, and compare with eager mode on the first part of the batch."""
        settings, size = self.settings, self.settings.micro_batch_size or len(self.positions)
        batch = self.stream.batch(self.step + self.shift, self.positions).to(self.handle.device)
        first = batch.parts(size)[0]

        def losses() -> Tensor:
            return sample_losses(self.model, first, self.objective, self.times)

        compile_checked(self.model, settings.compile, losses, settings.precision)

    def _make_network(self, fresh: bool) -> None:
        """Network, averages and optimizer, as a run begins with them, where accelerate wants them."""
        settings, model = self.settings, self.model
        if settings.init_from is not None and fresh:
            start_from(model, Path(settings.init_from), self.cache.class_names)
        freeze(model, settings.freeze)
        model.gradient_checkpointing = settings.gradient_checkpointing
        self.names = trainable_names(model)
        betas = (settings.beta_1, settings.beta_2)
        model.to(self.handle.device)
        if runtime.shards_weights():
            shard(model)
        self.optimizer = make_optimizer(model, settings.lr, betas, settings.weight_decay)
        self.averages = averages(model, settings.ema_decays, settings.ema_widths)
        # Autocast, and DDP's copies where the weights are not cut.
        self.wrapped = self.handle.prepare_model(model, evaluation_mode=is_sharded(model))
        self.wrapped.train()

    def _make_stream(self) -> TrainingStream:
        settings, model, cache = self.settings, self.model, self.cache
        return TrainingStream(
            cache,
            settings.seed,
            settings.batch_size,
            self.config.data.flip,
            self.config.model.class_dropout_prob,
            len(cache.class_names) if not model.has_null else model.null_label,
        )

    def _restore(self, previous: Checkpoint | None) -> None:
        """Take the state of `previous`, bit for bit, or that of a run's beginning."""
        record: dict[str, Any] = {}
        if previous is not None:
            record = previous.record
            self.model.load_state_dict(cut_as(self.model, previous.tensors(f"model/{WEIGHTS}")))
            load_optimizer_tensors(self.optimizer, self.names, previous.tensors("optimizer.safetensors"))
            for name, average in self.averages.items():
                if name not in previous.networks:
                    runtime.say(f"{previous.folder} has no {name}: it begins with the weights as they are")
                    average.load({key: value.float() for key, value in self.model.state_dict().items()})
                    continue
                average.load(cut_as(self.model, previous.tensors(f"{name}/{WEIGHTS}")))
        self.step: int = record.get("step", 0)
        self._saved_step = self.step
        self.shift: int = record.get("stream_shift", 0)
        self.num_nonfinite: int = record.get("num_nonfinite", 0)
        self.window: list[float] = record.get("losses_since_log", [])
        self._figures = LateReading()
        self._recent: dict[int, Any] = {}  # ids, draws of time and losses of the last two steps
        self._grad_norm = math.nan
        if self.handle.is_main_process:
            self.close()
            delete_later_snapshots(self.run, self.step)
            self._log = MetricsLog(self.run, self.step, self.settings.trackers, self.config.to_dict())

    @property
    def seconds(self) -> float:
        """Of training, this process's life and those before it."""
        return self._seconds_before + time.monotonic() - self._start

    def advance(self, stop: bool = False) -> Row | None:
        """Do one step; the row to log, where this step is one that logs.

        `stop` says whether this process was asked to stop: `told_to_stop` is set on all of them, together, a
        step later.

        Raises:
            ValueError: a loss or gradient was not finite; the weights are those before that step.
            UnreadableImage: this step's images cannot be read, on all processes together; nothing was done.
        """
        settings = self.settings
        batch = self._batch()
        begin = time.monotonic()
        figures, losses = training_step(
            self.handle,
            self.wrapped,
            self.optimizer,
            batch,
            self.objective,
            self.times,
            self.rate(self.step),
            settings.clip_grad_norm,
            settings.micro_batch_size,
            stop,
        )
        self.step += 1
        self._recent = {
            self.step - 1: self._recent.get(self.step - 1),
            self.step: (batch.ids, batch.u, losses),
        }
        weights = self.model.state_dict()
        for average in self.averages.values():
            average.update(weights, self.step)
        before = self._figures.push(figures)
        self.step_seconds += time.monotonic() - begin
        if before is not None and not self._note(self.step - 1, before):
            return None
        if self.step % settings.log_every or not self.read() or not self.window:
            return None
        return self._row()

    def _batch(self) -> TrainingBatch:
        """This process's slice of the step; UnreadableImage on all of them where one cannot read its own."""
        error: UnreadableImage | None = None
        try:
            batch = self.stream.batch(self.step + self.shift, self.positions)
        except UnreadableImage as unreadable:
            error = unreadable
        # A cache was checked before the first step; of images, all processes ask each other before each.
        if isinstance(self.cache, LiveLatents) and self.handle.num_processes > 1:
            bad = torch.tensor(float(error is not None), device=self.handle.device)
            if self.handle.reduce(bad, "sum").item() and error is None:
                error = UnreadableImage("another process came to an image that cannot be read, and names it")
        if error is not None:
            raise error
        return batch

    def rate(self, step: int) -> float:
        """The learning rate of step `step`, from 0."""
        s = self.settings
        return learning_rate(step, s.lr, s.num_steps, s.warmup_steps, s.decay_steps, s.decay)

    def read(self) -> bool:
        """Look at the last step's figures now; False where that took the run back to a checkpoint."""
        figures = self._figures.flush()
        return figures is None or self._note(self.step, figures)

    def _note(self, step: int, figures: Figures) -> bool:
        """Take in what step `step`, from 1, said; False where that took the run back to a checkpoint."""
        self.told_to_stop = self.told_to_stop or figures.stop > 0
        if figures.finite:
            self.window.append(figures.loss)
            self._grad_norm = figures.grad_norm
            return True
        return self._after_nonfinite(step, figures)

    def _after_nonfinite(self, step: int, figures: Figures) -> bool:
        """Go on as `train.on_nonfinite` says, or ValueError; step `step` left the weights as they were."""
        settings, position = self.settings, step - 1 + self.shift
        count = self.num_nonfinite + 1
        ids, u, losses = self._recent[step]
        which = nonfinite_samples(self.handle, ids, self.times.quantile(u), losses)
        what = f"loss {figures.loss}, gradient norm {figures.grad_norm} at step {step}: {which}"
        saved = runtime.found_by_main(lambda: latest_checkpoint(self.run))
        last = f"the last checkpoint is {saved.folder}" if saved else "nothing was saved yet"
        if settings.on_nonfinite == "stop":
            raise ValueError(f"training stopped: {what}. The weights are those before it; {last}")
        if count > settings.max_nonfinite:
            raise ValueError(f"training stopped: {what}; that is more than train.max_nonfinite times; {last}")
        if settings.on_nonfinite == "rollback" and saved is None:
            raise ValueError(f"training stopped: {what}; there is no checkpoint to go back to")
        if settings.on_nonfinite == "skip":
            self.num_nonfinite = count
            runtime.say(f"{what}: skipped, {count} of at most {settings.max_nonfinite}")
            return True
        assert saved is not None
        self._restore(saved)
        self.num_nonfinite = count
        self.shift = position + 1 - self.step  # the next step takes the images after the bad ones
        runtime.say(f"{what}: back to step {self.step}, {count} of at most {settings.max_nonfinite}")
        return False

    def _row(self) -> Row:
        """Means since the row before, and this step's figures."""
        loss = sum(self.window) / len(self.window)
        self.window.clear()
        return {
            "step": self.step,
            "loss": loss,
            "grad_norm": self._grad_norm,
            "lr": self.rate(self.step - 1),
            "seconds": round(self.seconds, 3),
        }

    def log(self, row: Row) -> None:
        """Write `row` to the run's record, once per job."""
        if self._log:
            self._log.write(row)

    def save(self) -> None:
        """Write the checkpoint of this step, and delete the oldest; all processes call it together."""
        self._write()
        self.handle.wait_for_everyone()

    def rescue(self) -> None:
        """Write the checkpoint of this step where it is not there, since the run is about to end by an error.

        Done by the main process alone, as the others may be gone; cut weights cannot be had then.
        """
        alone = self.handle.is_main_process and not is_sharded(self.model)
        if not alone or self.step == self._saved_step:
            return
        figures = self._figures.flush()
        if figures is not None and not (figures.finite and self._note(self.step, figures)):
            return
        try:
            self._write()
            runtime.say(f"step {self.step} is saved before the run ends by an error")
        except OSError as error:
            runtime.say(f"step {self.step} could not be saved: {error}")

    def _write(self) -> None:
        networks = {"model": self.whole_weights()} | self._averages("ema_", "power_")
        moments = optimizer_tensors(self.optimizer, self.names)
        if self.handle.is_main_process:
            save_checkpoint(
                self.run / "checkpoints",
                self.step,
                self.model,
                networks,
                moments,
                dump_config(self.config),
                self._details(),
            )
            prune_checkpoints(self.run, self.settings.keep_checkpoints, self.settings.keep_every)
        self._saved_step = self.step

    def save_done(self) -> None:
        """Save the steps that no checkpoint holds yet; all processes call it together."""
        if self.step != self._saved_step and self.read():
            self.save()

    def save_snapshot(self) -> None:
        """Write the power-function averages of this step, of which `reconstruct` makes others."""
        if not self.settings.ema_widths:
            return
        networks = self._averages("power_")
        if self.handle.is_main_process:
            save_checkpoint(
                self.run / "snapshots",
                self.step,
                self.model,
                networks,
                None,
                dump_config(self.config),
                self._details(),
            )

    def _averages(self, *prefixes: str) -> dict[str, dict[str, Tensor]]:
        return {name: whole(a.state) for name, a in self.averages.items() if name.startswith(prefixes)}

    def whole_weights(self, name: str = "model") -> dict[str, Tensor]:
        """The weights, or the average `name`, in full; all processes call it together."""
        return whole(self.model.state_dict() if name == "model" else self.averages[name].state)

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
            "stream_shift": self.shift,
            "num_nonfinite": self.num_nonfinite,
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


def _share(settings: TrainConfig, num_processes: int, process_index: int) -> range:
    """The positions of the global batch that a process trains on."""
    batch_size, micro = settings.batch_size, settings.micro_batch_size
    if batch_size % (num_processes * (micro or 1)):
        parts = "" if micro is None else f" in parts of train.micro_batch_size {micro}"
        raise ValueError(
            f"train.batch_size {batch_size} cannot be split over {num_processes} processes{parts}; "
            f"use a multiple of {num_processes * (micro or 1)}"
        )
    size = batch_size // num_processes
    return range(process_index * size, (process_index + 1) * size)
