"""What an arm costs: by geometry (parameters, FLOPs, memory), and as measured (seconds a step, GPU memory).

    change of a cost = cost of the arm / cost of the one that it is held against - 1

Seconds a step are the median over a run's logged intervals, so that a pause or a save in the middle of it
counts little; their change is taken within each seed. Other work on the machine still slows what runs
beside it: step times compare where the machine was quiet, or busy alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from .. import runtime
from ..train.plan import plan
from .cells import Cell
from .settings import ComparisonConfig

BY_GEOMETRY = ("parameters", "forward_flops", "training_flops", "memory_bytes")


def costs(comparison: ComparisonConfig, cells: Sequence[Cell], rows: dict[str, Any]) -> dict[str, Any]:
    """By arm; `rows` are the logged ones of each training cell by its name."""
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.kind == "train":
            runs.setdefault(cell.arm.name, []).append(cell)
    found = {arm: _cost(of_arm, rows) for arm, of_arm in runs.items()}
    against = {arm: comparison.cost_against(arm) for arm in found}
    return {
        arm: {**found[arm], "against": of, "changes": _changes(found[arm], found[of])}
        for arm, of in against.items()
    }


def _cost(runs: Sequence[Cell], rows: dict[str, Any]) -> dict[str, Any]:
    planned = plan(runs[0].run, 1)
    times = {run.seed: seconds_a_step(rows[run.name]) for run in runs}
    seconds = {seed: time for seed, time in times.items() if time is not None}
    records = [runtime.read_json(run.record_path) for run in runs if run.record_path.is_file()]
    measured = [record["gpu_memory_bytes"] for record in records if record.get("gpu_memory_bytes")]
    return {
        "parameters": planned.geometry.parameters.total,
        "forward_flops": planned.geometry.forward_flops,
        "training_flops": planned.geometry.training_flops,
        "batch_size": runs[0].run.train.batch_size,
        "memory_bytes": planned.memory.total,
        "gpu_memory_bytes": max(measured, default=None),
        "seconds_a_step_of_seed": seconds,
        "seconds_a_step": sum(seconds.values()) / len(seconds) if seconds else None,
    }


def _changes(arm: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {name: arm[name] / other[name] - 1 for name in BY_GEOMETRY}
    one, two = other["seconds_a_step_of_seed"], arm["seconds_a_step_of_seed"]
    ratios = [two[seed] / one[seed] - 1 for seed in sorted(one.keys() & two.keys())]
    changes["seconds_a_step"] = None
    if ratios:
        mean = sum(ratios) / len(ratios)
        changes["seconds_a_step"] = {"mean": mean, "lowest": min(ratios), "highest": max(ratios)}
    return changes


def seconds_a_step(rows: Sequence[dict[str, Any]]) -> float | None:
    """Median over the logged intervals; None where there is none."""
    intervals = [
        (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
        for before, after in pairwise(rows)
        if after["step"] > before["step"]
    ]
    return median(intervals) if intervals else None
