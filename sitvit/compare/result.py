"""All that a comparison found, as one JSON: the report says nothing that is not in it.

comparison, arms, protocol, provenance    what was compared, how it was measured, by what it was made
values, curves                            each measured distance, each run's loss
differences, losses, ladder               what is concluded from them, pair by pair (`statistics`)
references                                published by others: shown, never counted in
missing                                   what is not finished
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import runtime
from ..config import flat
from ..train.metrics import read_metrics
from .cells import Cell
from .cost import costs
from .losses import by_step, window_means
from .settings import ComparisonConfig
from .statistics import CONFIDENCE, Difference, paired_difference

FORMAT = 2
DISTANCES = ("FID", "FD-fashion", "FD-DINOv2")
MEASURED_BY = ("reference", "features")
"""Parts of the protocol by which all must have been measured: their files' hashes are in them."""
JUDGED = ("lower", "higher", "not separable")

Values = list[dict[str, Any]]


def collect(comparison: ComparisonConfig, cells: Sequence[Cell]) -> dict[str, Any]:
    """What the finished cells found.

    Raises:
        ValueError: no evaluation is finished; or two were measured against different references.
    """
    finished = [cell for cell in cells if cell.is_done()]
    measured = [cell for cell in finished if cell.kind == "evaluate"]
    if not measured:
        raise ValueError(f"{comparison.out} has no finished evaluation to report on")
    rows = {c.name: read_metrics(Path(c.run.run)) for c in cells if c.kind == "train"}
    cost = costs(comparison, cells, rows)
    found = {cell.name: runtime.read_json(_file(cell)) for cell in measured}
    _check_measured_alike(measured, found)
    values = [_value(cell, found[cell.name], cost[cell.arm.name]) for cell in measured]
    metric = _distance_name(values[0]["metrics"])
    arms = [{**arm, **cost[arm["name"]]} for arm in _arms(comparison, cells, values, metric)]
    curves = _curves(cells, rows)
    entries = differences(comparison, values, {arm["name"]: arm["best_cfg_scale"] for arm in arms}, metric)
    judged = sum(entry["verdict"] in JUDGED for entry in entries)
    return {
        "format": FORMAT,
        "metric": metric,
        "confidence": CONFIDENCE,
        "comparison": asdict(comparison),
        "arms": arms,
        "protocol": _protocol(list(found.values())),
        "provenance": _provenance(finished, list(found.values())),
        "analyses": _analyses(comparison, cells),
        "values": values,
        "curves": curves,
        "differences": entries,
        "num_judged": judged,
        "expected_false_alarms": round(judged * (1 - CONFIDENCE), 2),
        "losses": _losses(comparison, curves),
        "ladder": ladder(comparison, values, metric) if comparison.against == "previous" else None,
        "references": [asdict(reference) for reference in comparison.parsed_references()],
        "num_cells": len(cells),
        "num_missing": len(cells) - len(finished),
        "missing": [cell.name for cell in cells if cell not in finished],
    }


def _file(cell: Cell) -> Path:
    assert cell.evaluation is not None
    assert cell.evaluation.out is not None
    return Path(cell.evaluation.out)


def _check_measured_alike(cells: Sequence[Cell], found: dict[str, Any]) -> None:
    """A cell knows its reference by name alone, and what lies there can change between two of them."""
    first = cells[0]
    for part in MEASURED_BY:
        for cell in cells[1:]:
            if found[cell.name]["protocol"][part] != found[first.name]["protocol"][part]:
                raise ValueError(
                    f"{_file(cell)} and {_file(first)} were measured by different {part}, so they cannot be "
                    "compared; delete those that are out of date, and the same command measures them again"
                )


def _value(cell: Cell, found: dict[str, Any], cost: dict[str, Any]) -> dict[str, Any]:
    return {
        "arm": cell.arm.name,
        "seed": cell.seed,
        "step": cell.step,
        "cfg_scale": cell.cfg_scale,
        "training_flop": float(cell.step) * cost["batch_size"] * cost["training_flops"],
        "metrics": found["metrics"],
        "weights_sha256": found["protocol"]["samples"]["weights_sha256"],
    }


def _arms(
    comparison: ComparisonConfig, cells: Sequence[Cell], values: Values, metric: str
) -> list[dict[str, Any]]:
    runs = {cell.arm.name: cell.run for cell in cells if cell.kind == "train"}
    return [
        {
            "name": arm.name,
            "file": str(arm.config),
            "model": runs[arm.name].model.name,
            "overrides": arm.overrides,
            "config": runs[arm.name].to_dict(),
            "best_cfg_scale": best_scale(values, arm.name, comparison.steps[-1], metric),
        }
        for arm in comparison.parsed_arms()
    ]


def _distance_name(metrics: dict[str, float]) -> str:
    known = [name for name in metrics if f"{name}_std" in metrics or name in DISTANCES]
    return (known or list(metrics))[0]


def _of(values: Values, arm: str, step: int, scale: float | None, name: str) -> dict[int, float]:
    """Value by seed."""
    return {
        value["seed"]: value["metrics"][name]
        for value in values
        if (value["arm"], value["step"], value["cfg_scale"]) == (arm, step, scale)
        and name in value["metrics"]
    }


def best_scale(values: Values, arm: str, step: int, metric: str) -> float | None:
    """The guidance with the least mean; chosen on the same images that it is reported on."""
    scales = {v["cfg_scale"] for v in values if v["arm"] == arm and v["step"] == step and v["cfg_scale"] > 1}
    means = {scale: _mean(list(_of(values, arm, step, scale, metric).values())) for scale in scales}
    return min(means, key=lambda scale: means[scale]) if means else None


def differences(
    comparison: ComparisonConfig, values: Values, best: dict[str, float | None], metric: str
) -> list[dict[str, Any]]:
    """Unguided at each step, then each arm at its best guidance at the last."""
    entries, last = [], comparison.steps[-1]
    for first, second in comparison.pairs():
        points: list[tuple[int, float | None, float | None]] = [(step, 1.0, 1.0) for step in comparison.steps]
        if best[first] and best[second]:
            points.append((last, best[first], best[second]))
        for step, one, two in points:
            difference = _pair(values, (first, step, one), (second, step, two), metric)
            if difference is not None:
                scales = {"first_cfg_scale": one, "second_cfg_scale": two}
                entries.append({"first": first, "second": second, "step": step, **scales, **told(difference)})
    return entries


def _pair(
    values: Values,
    first: tuple[str, int, float | None],
    second: tuple[str, int, float | None],
    metric: str,
    seeds: Sequence[int] | None = None,
) -> Difference | None:
    """second - first, each an arm, a step and a guidance, over all seeds or these."""
    sides = [[_of(values, *side, name) for name in (metric, f"{metric}_std")] for side in (first, second)]
    (one, one_sigma), (two, two_sigma) = sides
    if seeds is not None:
        one = {seed: one[seed] for seed in seeds}
    sigma = {s: math.hypot(one_sigma[s], two_sigma[s]) for s in one_sigma.keys() & two_sigma.keys()}
    return paired_difference(one, two, sigma)


def told(difference: Difference) -> dict[str, Any]:
    """A difference with its verdict."""
    return {**asdict(difference), "verdict": difference.verdict}


def _curves(cells: Sequence[Cell], rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean loss by window of each run that has begun."""
    curves = []
    for cell in cells:
        if cell.kind == "train" and rows[cell.name]:
            steps, losses = window_means(rows[cell.name], cell.step)
            curves.append({"arm": cell.arm.name, "seed": cell.seed, "steps": steps, "losses": losses})
    return curves


def _losses(comparison: ComparisonConfig, curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Paired differences of the loss: one batch and one noise in both arms of a seed."""
    entries: list[dict[str, Any]] = []
    for first, second in comparison.pairs():
        one, two = (by_step([curve for curve in curves if curve["arm"] == arm]) for arm in (first, second))
        for step in sorted(one.keys() & two.keys()):
            found = paired_difference(one[step], two[step])
            if found is not None:
                entries.append({"first": first, "second": second, "step": step, **told(found)})
    return entries


def ladder(comparison: ComparisonConfig, values: Values, metric: str) -> dict[str, Any] | None:
    """The last step and the seeds that every arm has: first value, each rung's difference, last value.

    On the same seeds throughout, so that the rungs add up. None where there is no such step.
    """
    names = [arm.name for arm in comparison.parsed_arms()]
    for step in reversed(comparison.steps):
        found = {name: _of(values, name, step, 1.0, metric) for name in names}
        seeds = sorted(set.intersection(*(set(of_arm) for of_arm in found.values())))
        if seeds:
            break
    else:
        return None
    means = {name: _mean([found[name][seed] for seed in seeds]) for name in names}
    rungs = []
    for first, second in [*comparison.pairs(), (names[0], names[-1])]:
        difference = _pair(values, (first, step, 1.0), (second, step, 1.0), metric, seeds)
        assert difference is not None
        rungs.append({"first": first, "second": second, **told(difference)})
    return {"step": step, "seeds": seeds, "means": means, "rungs": rungs[:-1], "whole": rungs[-1]}


def _protocol(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all evaluations have in common, by dotted key."""
    flattened = [flat(record["protocol"]) for record in found]
    return {
        key: value
        for key, value in flattened[0].items()
        if all(other.get(key) == value for other in flattened)
    }


def _provenance(finished: Sequence[Cell], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The commands that worked on it, and the versions of what measured, each once."""
    commands = [runtime.read_json(cell.record_path)["command"] for cell in finished]
    versions = dict.fromkeys(tuple(record["versions"].items()) for record in found)
    return {"commands": list(dict.fromkeys(commands)), "versions": [dict(pairs) for pairs in versions]}


def _analyses(comparison: ComparisonConfig, cells: Sequence[Cell]) -> list[str]:
    """Folders with figures of scripts/analyze.py: the comparison's own, and those of its runs."""
    runs = [Path(cell.run.run) for cell in cells if cell.kind == "train"]
    return [
        str(at / "analysis") for at in (Path(comparison.out), *runs) if any((at / "analysis").glob("*.png"))
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
