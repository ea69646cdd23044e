"""Many evaluations of one checkpoint, and the check of an evaluator against published numbers."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import runtime
from ..generate.trained import open_trained
from .evaluate import evaluate
from .settings import EvaluationConfig, sweep_points

PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "256": {"FID": (3.9426, 0.005), "sFID": (6.1404, 0.01), "IS": (215.84, 0.3)},
    "128": {
        "FID": (2.97329, 0.001),
        "sFID": (5.0946, 0.003),
        "IS": (141.477, 0.02),
        "precision": (0.78042, 0.001),
        "recall": (0.5906, 0.001),
    },
}
"""ADM's sample batches: 256, admnet_guided_upsampled_imagenet256.npz; 128, admnet_guided_imagenet128.npz.

For each metric the published value and what is allowed."""


def sweep(config: EvaluationConfig, swept: dict[str, list[str]], out: Path) -> list[dict[str, Any]]:
    """Evaluate every combination of `swept` values; each tried point is recorded in `out`/sweep.json.

    A point that was measured before is not measured again, so a killed sweep goes on. Where seeds are swept,
    the file has the spread over them too (`over_seeds`).

    Raises:
        ValueError: before any point is measured: a key or value that cannot be swept, no checkpoint to
            sample, or points in `out` that this sweep would leave out of the record.
    """
    if config.checkpoint is None:
        raise ValueError("a sweep samples a checkpoint: --checkpoint")
    points = sweep_points(config, swept)
    for weights in swept.get("weights", []):
        open_trained(config.checkpoint, weights, config.step, config.autoencoder, config.family)
    values = [{key: getattr(point, key) for key in swept} for point in points]
    names = ["-".join(f"{key}_{_word(value)}" for key, value in each.items()) for each in values]
    tried = _tried_before(out / "sweep.json", names)
    for number, (point, each, name) in enumerate(zip(points, values, names, strict=True)):
        runtime.say(f"point {number + 1} of {len(points)}: {name}")
        kept = point.keep_samples and str(Path(point.keep_samples) / name)
        metrics, path = evaluate(replace(point, out=str(out / f"{name}.json"), keep_samples=kept))
        tried[name] = {**each, "metrics": metrics, "file": path.name}
        rows = [tried[known] for known in names if known in tried]
        if runtime.is_main_process():
            record = {"tried": rows, "points": len(points), "over_seeds": over_seeds(rows)}
            runtime.write_json(out / "sweep.json", record)
    return rows


def _tried_before(path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What an earlier start of the sweep recorded, by name; ValueError where that is of other points."""
    if not path.exists():
        return {}
    rows = runtime.read_record(path, ["tried"])["tried"]
    tried = {row["file"].removesuffix(".json"): row for row in rows}
    others = [name for name in tried if name not in names]
    if others:
        raise ValueError(
            f"{path} records {', '.join(others[:3])}{' and more' if len(others) > 3 else ''}, which this "
            "sweep leaves out: name those values too (no point is measured twice), or choose another --out"
        )
    return tried


def over_seeds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each point of a sweep that has several seeds: its mean and standard deviation (n - 1) over them.

    One entry for all other settings equal, with the number of seeds, `mean` and `std` of each metric.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        others = {key: value for key, value in row.items() if key not in ("seed", "metrics", "file")}
        groups.setdefault(json.dumps(others), []).append(row["metrics"])
    return [
        {
            **json.loads(others),
            "seeds": len(found),
            "mean": {name: statistics.mean(each[name] for each in found) for name in found[0]},
            "std": {name: statistics.stdev(each[name] for each in found) for name in found[0]},
        }
        for others, found in groups.items()
        if len(found) > 1
    ]


def _word(value: Any) -> str:
    return "to".join(f"{part:g}" for part in value) if isinstance(value, list) else f"{value}"


def check_against_published(which: str, metrics: dict[str, float]) -> list[str]:
    """A line for each published number; ValueError with the lines where one is missed."""
    lines, missed = [], []
    for name, (value, allowed) in PUBLISHED[which].items():
        ok = abs(metrics[name] - value) <= allowed
        lines.append(
            f"{name} {metrics[name]:.4f}, published {value} +- {allowed}: {'ok' if ok else 'MISSED'}"
        )
        missed += [] if ok else [name]
    if missed:
        raise ValueError(f"this evaluator misses {', '.join(missed)}:\n  " + "\n  ".join(lines))
    return lines
