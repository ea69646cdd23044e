"""Trainings one after the other in a process of a job: what the tests of several processes launch.

Told by a JSON list of objects: `run` and `overrides` of the experiment; `sharded` cuts the weights; `kill_at`
ends every process by SIGKILL once so many steps are done, and `break_at` this training alone by an exception;
`poison` makes the noise of one position of step 3 infinite, and what ends a run is written to RUN.RANK.error;
`signal_at` sends SIGTERM to the last process alone once so many steps are done;
`hidden` shows the folders of checkpoints to the main process alone.
"""

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sitvit import runtime
from sitvit.config import Config, load_config
from sitvit.data.stream import TrainingBatch, TrainingStream
from sitvit.generate.preview import Preview
from sitvit.train import checkpoint, continuation
from sitvit.train.loop import train
from sitvit.train.statistics import Statistics
from sitvit.train.trainer import Row, Trainer

from ..conftest import TINY


def poisoned(bad: int) -> Callable[..., TrainingBatch]:
    """`TrainingStream.batch` with an infinity in position `bad` of step 3."""
    original = TrainingStream.batch

    def batch(self: TrainingStream, step: int, positions: range) -> TrainingBatch:
        made = original(self, step, positions)
        if step == 2 and bad in positions:
            made.x_0[bad - positions[0]] = math.inf
        return made

    return batch


class Broken(Exception):
    """No handler of ours knows it."""


def run_one(
    latents: str,
    run: str,
    overrides: tuple[str, ...] = (),
    sharded: bool = False,
    kill_at: int | None = None,
    break_at: int | None = None,
    poison: int | None = None,
    signal_at: int | None = None,
    hidden: bool = False,
) -> None:
    """One training in this process."""

    def end(trainer: Trainer, row: Row | None) -> None:
        if trainer.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.step == signal_at and not runtime.is_main_process():
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.step == break_at:
            raise Broken

    file = Path(f"{run}.{os.environ.get('RANK', 0)}.yaml")
    file.write_text(TINY.format(run=run, name="SiT-ViT5-S/2", latents=latents))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Broken):
        patch.setenv(runtime.SHARDING, str(sharded).lower())
        if hidden and not runtime.is_main_process():
            for module in (checkpoint, continuation):
                patch.setattr(module, "step_folders", lambda run: [])
        if poison is not None:
            patch.setattr(TrainingStream, "batch", poisoned(poison))
        try:
            train(load_config(file, list(overrides), Config), hooks=[Statistics(), Preview(), end])
        except (ValueError, runtime.Stopped) as error:
            file.with_suffix(".error").write_text(str(error))


if __name__ == "__main__":
    for told in json.loads(sys.argv[2]):
        run_one(sys.argv[1], **told)
