"""Pictures: sample grids with the class of each row, and loss curves."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import runtime
from ..generate.samples import Samples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ROWS = 20
PER_CLASS = 10
MAX_CELL = 128  # pixels of an image in a grid
SMOOTHING = 5  # logged values in a running mean


def grid_figure(samples: Samples, title: str) -> "Figure":
    """A row per class (the first `MAX_ROWS` that occur) of its first `PER_CLASS` images."""
    from matplotlib.figure import Figure

    classes = sorted(set(samples.labels.tolist()))[:MAX_ROWS]
    chosen = [np.flatnonzero(samples.labels == label)[:PER_CLASS] for label in classes]
    num_columns = max(map(len, chosen))
    rows, columns = samples.read(int(chosen[0][0])).shape[:2]
    scale = max(1, MAX_CELL // (2 * columns)) if columns <= MAX_CELL else 1
    sheet = np.full((len(classes) * rows, num_columns * columns, 3), 255, dtype=np.uint8)
    for row, indices in enumerate(chosen):
        for column, index in enumerate(indices):
            top, left = row * rows, column * columns
            sheet[top : top + rows, left : left + columns] = samples.read(int(index))
    label_width, title_height, dpi = 1.4, 0.45, 100
    across, down = num_columns * columns * scale / dpi, len(classes) * rows * scale / dpi  # inches
    width, height = label_width + across + 0.1, title_height + down + 0.1
    figure = Figure(figsize=(width, height), dpi=dpi)
    axes = figure.add_axes((label_width / width, 0.1 / height, across / width, down / height))
    axes.imshow(sheet, interpolation="nearest")
    axes.set_xticks([])
    names = [samples.class_names[label] for label in classes]
    axes.set_yticks([(row + 0.5) * rows - 0.5 for row in range(len(classes))], names, fontsize=10)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.suptitle(title, fontsize=10, y=1 - 0.1 / height, va="top")
    return figure


def loss_figure(curves: dict[str, list[dict[str, float]]]) -> "Figure":
    """Training loss against step of each run: the logged means faint, their running mean strong."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for name, rows in curves.items():
        steps = np.array([row["step"] for row in rows])
        losses = np.array([row["loss"] for row in rows])
        (line,) = axes.plot(steps, losses, alpha=0.25, linewidth=0.8)
        width = min(SMOOTHING, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        # Each mean stands at its window's last step: nothing in it lies ahead.
        axes.plot(steps[width - 1 :], smooth, color=line.get_color(), label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("velocity loss (mean squared error)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def value_figure(result: dict[str, Any]) -> "Figure":
    """Distance against step of each arm, unguided: seeds faint, their mean strong; published: stars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for number, arm in enumerate(result["arms"]):
        values = [v for v in result["values"] if v["arm"] == arm["name"] and v["cfg_scale"] == 1]
        points = [(v["step"], v["metrics"][result["metric"]]) for v in values]
        steps = sorted({step for step, _ in points})
        means = [np.mean([value for at, value in points if at == step]) for step in steps]
        axes.plot(*np.array(points).T, "o", color=f"C{number}", alpha=0.35)
        axes.plot(steps, means, "-", color=f"C{number}", label=arm["name"])
        for told in result["references"]:
            if told["arm"] == arm["name"] and told["cfg_scale"] == 1:
                axes.plot(
                    told["step"], told["value"], "*", color=f"C{number}", label=f"published: {arm['name']}"
                )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"{result['metric']}, unguided")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def difference_figure(entries: list[dict[str, Any]], what: str) -> "Figure":
    """Paired difference against step of each pair, with its interval; above zero the first is ahead."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    unguided = [entry for entry in entries if entry.get("first_cfg_scale", 1) == 1]
    for number, pair in enumerate(dict.fromkeys((entry["first"], entry["second"]) for entry in unguided)):
        rows = [entry for entry in unguided if (entry["first"], entry["second"]) == pair]
        steps = [row["step"] for row in rows]
        axes.plot(
            steps, [row["mean"] for row in rows], ".-", color=f"C{number}", label=f"{pair[1]} - {pair[0]}"
        )
        known = [row for row in rows if row["low"] is not None]
        lows, highs = ([row[end] for row in known] for end in ("low", "high"))
        axes.fill_between([row["step"] for row in known], lows, highs, color=f"C{number}", alpha=0.2)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"difference in {what}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def save_figure(path: Path, make: Callable[[], "Figure"]) -> None:
    """Write the figure to the PNG `path`, whole or not at all."""
    with runtime.write_aside(path) as temporary:
        make().savefig(temporary, format="png", metadata={"Software": None})
