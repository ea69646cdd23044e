"""The cells of a comparison: what is to be done, by name, each an ordinary run, evaluation or set of samples.

    train-ARM-seed_S                    scripts/train_sit.py
    evaluate-ARM-seed_S-step_N-cfg_W    scripts/evaluate.py
    grid-ARM-cfg_W                      scripts/sample.py: the images shown, of the first seed's last step

OUT/cells/NAME.json says what a cell was begun with and whether it is done; OUT/cells/NAME.lock is held by
the process that works on it, and falls when that ends, however it ends. A cell that left nothing, since its
settings were mistaken, binds nobody to them; an evaluation or a grid whose result is gone is done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import runtime
from ..config import Config, flat
from ..eval.settings import EvaluationConfig
from ..generate.samples import RECORD
from .settings import Arm, ComparisonConfig

KINDS = ("train", "evaluate", "grid")
NOT_THE_RESULT = ("run", "train.log_every", "train.save_every", "train.keep_checkpoints", "train.keep_every")


class NotReady(ValueError):
    """The cell needs another one first."""


@dataclass(frozen=True)
class Cell:
    """One thing to do."""

    kind: str
    arm: Arm
    seed: int
    step: int
    cfg_scale: float
    out: Path
    run: Config
    evaluation: EvaluationConfig | None

    @property
    def name(self) -> str:
        """Unique in the comparison."""
        seed = f"{self.arm.name}-seed_{self.seed}"
        if self.kind == "train":
            return f"train-{seed}"
        if self.kind == "grid":
            return f"grid-{self.arm.name}-cfg_{self.cfg_scale:g}"
        return f"evaluate-{seed}-step_{self.step}-cfg_{self.cfg_scale:g}"

    @property
    def record_path(self) -> Path:
        """Where it is written down."""
        return self.out / "cells" / f"{self.name}.json"

    @property
    def checkpoint(self) -> Path:
        """What an evaluation measures, and training leaves."""
        return Path(self.run.run) / "checkpoints" / f"step_{self.step:07d}"

    @property
    def grid_folder(self) -> Path:
        """Where the shown images of a grid lie."""
        return Path(self.run.run) / "samples" / f"step_{self.step}_cfg_{self.cfg_scale:g}"

    @property
    def settings(self) -> dict[str, Any]:
        """All that its result follows from, by dotted key."""
        settings = flat(self.run.to_dict())
        if self.kind != "train":
            settings = {key: value for key, value in settings.items() if key not in NOT_THE_RESULT}
            if self.run.train.decay_steps == 0:  # a checkpoint on the way does not know where the run ends
                settings.pop("train.num_steps")
        if self.evaluation is not None:
            settings |= {f"evaluation.{k}": v for k, v in dataclasses.asdict(self.evaluation).items()}
        return settings

    def is_done(self) -> bool:
        """Whether its result is there, with these settings.

        Raises:
            ValueError: it was made, or a training begun, with others, naming each.
        """
        if not self.record_path.is_file():
            return False
        found = runtime.read_record(self.record_path, ["settings", "done"])
        if not self._has_left(found["done"]):
            return False
        old, new = {**self._before(), **found["settings"]}, self.settings
        changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
        goes_on = False  # to a later step
        if self.kind == "train":
            goes_on = self.run.train.decay_steps == 0 and "train.num_steps" in changed
            changed -= set(NOT_THE_RESULT[1:]) | ({"train.num_steps"} if goes_on else set())
        elif self.kind == "grid" and "evaluation.checkpoint" in changed:
            goes_on = True
            changed -= {"evaluation.checkpoint", "evaluation.out"}
        if changed:
            told = [f"{key} was {old.get(key)}, now {new.get(key)}" for key in sorted(changed)]
            raise ValueError(
                f"{self.name} was begun with other settings: {'; '.join(told)}. Choose another `out`, or the "
                "old values"
            )
        return found["done"] and not goes_on

    def _has_left(self, done: bool) -> bool:
        """Whether there is what binds the cell to its settings: a result, of a training any checkpoint."""
        if self.kind == "train":  # a finished one's checkpoints may have been removed: it is not done again
            return done or any((Path(self.run.run) / "checkpoints").glob("step_*"))
        if self.kind == "grid":
            return done and (self.grid_folder / RECORD).is_file()
        assert self.evaluation is not None
        assert self.evaluation.out is not None
        return done and Path(self.evaluation.out).is_file()

    def _before(self) -> dict[str, Any]:
        """What a record that does not name it was made with: before there was the choice."""
        return {} if self.evaluation is None else {"evaluation.precision": "float32"}

    def note(self, done: bool, seconds: float | None = None, gpu_memory_bytes: int | None = None) -> None:
        """Write down that it is begun, or done, and what that took (of its last start)."""
        if runtime.is_main_process():
            about = {
                "command": runtime.command_line(),
                "seconds": seconds,
                "gpu_memory_bytes": gpu_memory_bytes,
            }
            record = {"settings": self.settings, "done": done, **about}
            runtime.write_json(self.record_path, record)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the cell; runtime.Taken where another process does. One process of a job speaks for all."""
        if not runtime.is_main_process():
            yield
            return
        with runtime.held(self.record_path.with_suffix(".lock"), self.name):
            yield


def cells_of(comparison: ComparisonConfig) -> list[Cell]:
    """Every cell, seed by seed, so that whole pairs are there early.

    Raises:
        ValueError: an arm or the protocol does not fit.
    """
    out, last, cells = Path(comparison.out), comparison.steps[-1], []
    arms = comparison.parsed_arms()
    for seed in comparison.seeds:
        runs = {arm.name: comparison.run_config(arm, seed) for arm in arms}
        cells += [Cell("train", arm, seed, last, 1.0, out, runs[arm.name], None) for arm in arms]
        for step in comparison.steps:
            for scale in comparison.cfg_scales if step == last else [1.0]:
                for arm in arms:
                    run = runs[arm.name]
                    evaluation = comparison.evaluation_config(run.run, step, seed, scale)
                    cells.append(Cell("evaluate", arm, seed, step, scale, out, run, evaluation))
    first = comparison.seeds[0]
    for scale in comparison.cfg_scales:
        for arm in arms:
            run = comparison.run_config(arm, first)
            shown = comparison.evaluation_config(run.run, last, first, scale)
            shown = dataclasses.replace(shown, num_images=comparison.grid_images, labels=["balanced"])
            cells.append(Cell("grid", arm, first, last, scale, out, run, shown))
    return cells
