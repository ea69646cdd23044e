"""All that a comparison found, as one JSON: the report says nothing that is not in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import runtime
from ..train.metrics import read_metrics
from ..train.plan import plan
from .cells import Cell
from .settings import ComparisonConfig
from .statistics import CONFIDENCE, Difference, paired_difference

FORMAT = 1
DISTANCES = ("FID", "FD-fashion", "FD-DINOv2")


def collect(comparison: ComparisonConfig, cells: Sequence[Cell]) -> dict[str, Any]:
    """What the finished cells found; ValueError where no evaluation is finished."""
    values = [_value(cell) for cell in cells if cell.kind == "evaluate" and cell.is_done()]
    if not values:
        raise ValueError(f"{comparison.out} has no finished evaluation to report on")
    metric = _distance_name(values[0]["metrics"])
    best = {
        arm.name: _best_scale(values, arm.name, comparison.steps[-1], metric)
        for arm in comparison.parsed_arms()
    }
    differences = [
        entry
        for first, second in comparison.pairs()
        for entry in _pair(values, first, second, comparison.steps, best, metric)
    ]
    return {
        "format": FORMAT,
        "metric": metric,
        "confidence": CONFIDENCE,
        "comparison": asdict(comparison),
        "arms": [_arm(comparison, cells, arm.name, best[arm.name]) for arm in comparison.parsed_arms()],
        "values": values,
        "differences": differences,
        "losses": _losses(comparison, cells),
        "references": [asdict(reference) for reference in comparison.parsed_references()],
        "missing": [cell.name for cell in cells if not cell.is_done()],
        "cells": {
            cell.name: runtime.read_json(cell.record_path)["seconds"] for cell in cells if cell.is_done()
        },
    }


def _value(cell: Cell) -> dict[str, Any]:
    assert cell.evaluation is not None
    assert cell.evaluation.out is not None
    found = runtime.read_json(Path(cell.evaluation.out))
    return {
        "arm": cell.arm.name,
        "seed": cell.seed,
        "step": cell.step,
        "cfg_scale": cell.cfg_scale,
        "metrics": found["metrics"],
        "num_samples": found["protocol"]["num_samples"],
        "num_reference": found["protocol"]["num_reference"],
        "features": found["protocol"]["features"],
        "versions": found["versions"],
        "command": found["command"],
    }


def _distance_name(metrics: dict[str, float]) -> str:
    known = [name for name in metrics if f"{name}_std" in metrics or name in DISTANCES]
    return (known or list(metrics))[0]


def _of(
    values: list[dict[str, Any]], arm: str, step: int, scale: float | None, name: str
) -> dict[int, float]:
    """Value by seed."""
    return {
        value["seed"]: value["metrics"][name]
        for value in values
        if (value["arm"], value["step"], value["cfg_scale"]) == (arm, step, scale)
        and name in value["metrics"]
    }


def _best_scale(values: list[dict[str, Any]], arm: str, step: int, metric: str) -> float | None:
    """The guidance with the least mean; chosen on the same images that it is reported on."""
    scales = {v["cfg_scale"] for v in values if v["arm"] == arm and v["step"] == step and v["cfg_scale"] > 1}
    means = {scale: _mean(list(_of(values, arm, step, scale, metric).values())) for scale in scales}
    return min(means, key=lambda scale: means[scale]) if means else None


def _pair(
    values: list[dict[str, Any]],
    first: str,
    second: str,
    steps: list[int],
    best: dict[str, float | None],
    metric: str,
) -> list[dict[str, Any]]:
    points: list[tuple[int, float | None, float | None]] = [(step, 1.0, 1.0) for step in steps]
    if best[first] and best[second]:
        points.append((steps[-1], best[first], best[second]))
    entries = []
    for step, first_scale, second_scale in points:
        sides = [
            [_of(values, arm, step, scale, name) for name in (metric, f"{metric}_std")]
            for arm, scale in ((first, first_scale), (second, second_scale))
        ]
        (one, one_sigma), (two, two_sigma) = sides
        sigma = {s: math.hypot(one_sigma[s], two_sigma[s]) for s in one_sigma.keys() & two_sigma.keys()}
        found = paired_difference(one, two, sigma)
        if found is not None:
            entries.append(
                {
                    "first": first,
                    "second": second,
                    "step": step,
                    "first_cfg_scale": first_scale,
                    "second_cfg_scale": second_scale,
                    **told(found),
                }
            )
    return entries


def told(difference: Difference) -> dict[str, Any]:
    """A difference with its verdict."""
    return {**asdict(difference), "verdict": difference.verdict}


def _arm(
    comparison: ComparisonConfig, cells: Sequence[Cell], name: str, best: float | None
) -> dict[str, Any]:
    """What it is and what it costs: by geometry, and as measured."""
    runs = [cell for cell in cells if cell.kind == "train" and cell.arm.name == name]
    planned = plan(runs[0].run, 1)
    sizes = planned.geometry
    rows = {cell.seed: read_metrics_of(cell) for cell in runs}
    times = [found[-1]["seconds"] / found[-1]["step"] for found in rows.values() if found]
    return {
        "name": name,
        "model": runs[0].run.model.name,
        "overrides": runs[0].arm.overrides,
        "config": runs[0].run.to_dict(),
        "best_cfg_scale": best,
        "parameters": sizes.parameters.total,
        "forward_flops": sizes.forward_flops,
        "training_flops": sizes.training_flops,
        "batch_size": runs[0].run.train.batch_size,
        "memory_bytes": planned.memory.total,
        "seconds_a_step": _mean(times) if times else None,
    }


def read_metrics_of(cell: Cell) -> list[dict[str, Any]]:
    """The logged rows of a run."""
    return read_metrics(Path(cell.run.run))


def _losses(comparison: ComparisonConfig, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Logged training loss by arm and step over seeds, and its paired difference: one noise, one batch."""
    curves: dict[str, dict[int, dict[int, float]]] = {}
    for cell in cells:
        if cell.kind == "train":
            for row in read_metrics_of(cell):
                curves.setdefault(cell.arm.name, {}).setdefault(row["step"], {})[cell.seed] = row["loss"]
    entries: list[dict[str, Any]] = []
    for first, second in comparison.pairs():
        one, two = curves.get(first, {}), curves.get(second, {})
        for step in sorted(one.keys() & two.keys()):
            found = paired_difference(one[step], two[step])
            if found is not None:
                entries.append(
                    {
                        "first": first,
                        "second": second,
                        "step": step,
                        "first_losses": one[step],
                        "second_losses": two[step],
                        **told(found),
                    }
                )
    return entries


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
