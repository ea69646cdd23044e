"""Where a run's numbers go beside its record: TensorBoard, Weights & Biases, trackio.

Each has a thread of its own, so training waits for none of them: not for a log-in, not for a network. What
goes wrong there is said in a line, once, and training goes on without it.
"""

import hashlib
import importlib.util
import inspect
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .. import runtime

CLOSE_SECONDS = 20.0
"""How long the end of a run waits for a tracker to take in what it was given."""

Row = dict[str, Any]


class Writer(Protocol):
    """A tracker that is ready."""

    def write(self, row: Row) -> None:
        """Take in a row, numbers by name, among them `step`."""

    def close(self) -> None:
        """Flush."""


class TensorBoard:
    """Events in RUN/tensorboard; those past `first_step` (a resume) are hidden."""

    def __init__(self, run: Path, first_step: int, config: Row) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run / "tensorboard", purge_step=first_step + 1)

    def write(self, row: Row) -> None:
        """A scalar for each number."""
        for name, value in row.items():
            self._writer.add_scalar(f"train/{name}", value, row["step"])

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class Wandb:
    """A run of the project sitvit, or of WANDB_PROJECT; continued under the same id, WANDB_MODE heeded.

    Raises:
        ValueError: there is no key, so that it would ask for one.
    """

    def __init__(self, run: Path, first_step: int, config: Row) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not _has_key(wandb):
            raise ValueError("it has no key: call `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "sitvit"),
            name=run.name,
            id=run_id(run),
            resume="allow",
            mode=mode,
            dir=str(run),
            config=config,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # after a rollback steps come again

    def write(self, row: Row) -> None:
        """A point for each number."""
        self._run.log(row)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class Trackio:
    """A run of the project sitvit in trackio's local store, continued under the same name."""

    def __init__(self, run: Path, first_step: int, config: Row) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project="sitvit", name=f"{run.name}-{run_id(run)}", config=config, resume="allow")

    def write(self, row: Row) -> None:
        """A point for each number."""
        self._trackio.log(row, step=row["step"])

    def close(self) -> None:
        """Write what is left."""
        self._trackio.finish()


TRACKERS: dict[str, Callable[[Path, int, Row], Writer]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Background:
    """The tracker `name` in a thread: `write` and `close` never raise, and `write` never waits."""

    def __init__(self, name: str, run: Path, first_step: int, config: Row) -> None:
        self.name = name
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        arguments = (run, first_step, config)
        self._thread = threading.Thread(target=self._work, args=arguments, daemon=True, name=name)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Hand over a copy of `row`."""
        if self._thread.is_alive():
            self._rows.put(dict(row))

    def close(self) -> None:
        """Wait for what was handed over, for `CLOSE_SECONDS` at most."""
        self._rows.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            runtime.say(f"{self.name} did not answer for {CLOSE_SECONDS:g} s and is left behind")

    def _work(self, run: Path, first_step: int, config: Row) -> None:
        try:
            writer = TRACKERS[self.name](run, first_step, config)
            while (row := self._rows.get()) is not None:
                writer.write(row)
            writer.close()
        except ModuleNotFoundError as error:
            runtime.say(f"{self.name} is off: {error.name} is not installed; training goes on")
        except (Exception, SystemExit) as error:  # whatever it is, training is worth more
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            runtime.say(f"{self.name} is off: {reason}; training goes on, see {run / 'metrics.jsonl'}")


def open_trackers(names: list[str] | None, run: Path, first_step: int, config: Row) -> list[Background]:
    """The trackers called `names`; None is TensorBoard where it is installed."""
    if names is None:
        names = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    return [Background(name, run, first_step, config) for name in names]


def _has_key(wandb: Any) -> bool:
    """Whether wandb would log in without asking; its older versions have another way to tell."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False))
    return bool(wandb.api.api_key)


def run_id(run: Path) -> str:
    """Eight letters that stay with a run's folder."""
    return hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:8]
