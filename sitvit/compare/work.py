"""Working through the cells: one, or all that are free; killed and started again, it goes on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from .. import runtime
from .cells import Cell, NotReady
from .checks import check


def find_cell(cells: Sequence[Cell], name: str) -> Cell:
    """The cell `name`, or of that number in the list; ValueError where there is none."""
    for number, cell in enumerate(cells):
        if name in (cell.name, str(number)):
            return cell
    raise ValueError(f"there is no cell {name!r}; --list names the {len(cells)} there are")


def work_through(cells: Sequence[Cell]) -> list[Cell]:
    """Do all cells that nobody else does; returns those that are left to others.

    Raises:
        ValueError: what `check` finds, before anything is done.
    """
    check(cells)
    left, before = list(cells), len(cells) + 1
    while len(left) < before:  # others may have ended theirs meanwhile, and ours that need them are ready
        reasons, before = [], len(left)
        for cell in left.copy():
            try:
                do(cell)
                left.remove(cell)
            except (runtime.Taken, NotReady) as error:
                reasons.append(error)
    for reason in reasons:
        runtime.say(f"left: {reason}")
    return left


def do(cell: Cell) -> None:
    """Do one cell, or go on with it, unless it is done.

    Raises:
        runtime.Taken: another process holds it.
        NotReady: its checkpoint is not there yet.
        ValueError: it was begun with other settings; or what its verb says.
    """
    with cell.lock():
        if cell.is_done():
            return
        if cell.kind != "train" and not (cell.checkpoint / "checkpoint.json").is_file():
            raise NotReady(f"{cell.name} needs {cell.checkpoint}; {_how_to_get_it(cell)}")
        runtime.say(f"== {cell.name}")
        cell.note(done=False)
        start = time.monotonic()
        runtime.forget_gpu_memory()
        {"train": _train, "evaluate": _evaluate, "grid": _grid}[cell.kind](cell)
        seconds = round(time.monotonic() - start, 1)
        cell.note(done=True, seconds=seconds, gpu_memory_bytes=runtime.peak_gpu_memory())


def _how_to_get_it(cell: Cell) -> str:
    training = dataclasses.replace(cell, kind="train", evaluation=None)
    if training.is_done():
        return (
            f"its training is finished and has it no longer: put it back, or delete {training.run.run} and "
            f"{training.record_path} to train again"
        )
    return f"run --cell {training.name} first"


def _train(cell: Cell) -> None:
    from ..train.loop import train

    train(cell.run)


def _evaluate(cell: Cell) -> None:
    from ..eval.evaluate import evaluate

    assert cell.evaluation is not None
    evaluate(cell.evaluation)


def _grid(cell: Cell) -> None:
    from ..generate.generation import write
    from ..generate.request import job_of

    config = cell.evaluation
    assert config is not None
    write(job_of(config, config.sampling_batch_size, runtime.processes().device), cell.grid_folder)
