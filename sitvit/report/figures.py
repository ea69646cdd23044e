"""Pictures: sample grids with the class of each row, of one network or of several, and loss curves."""

from collections.abc import Callable, Sequence
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
PAIR_COLUMNS = 12  # images in a row of a grid of several networks, over all of them
MAX_PAIR_CELL = 96  # pixels of an image there

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#8c6d31")
"""Told apart by colour-blind eyes too (Okabe and Ito's, and two more)."""


def grid_figure(samples: Samples, title: str) -> "Figure":
    """A row per class (the first `MAX_ROWS` that occur) of its first `PER_CLASS` images."""
    from matplotlib.figure import Figure

    classes = sorted(set(samples.labels.tolist()))[:MAX_ROWS]
    chosen = [np.flatnonzero(samples.labels == label)[:PER_CLASS] for label in classes]
    num_columns = max(map(len, chosen))
    rows, columns = samples.read(int(chosen[0][0])).shape[:2]
    scale = max(1, MAX_CELL // (2 * columns)) if columns <= MAX_CELL else 1
    sheet = _sheet(samples, chosen, rows, columns)
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


def pair_grid(made: Sequence[tuple[str, Samples]], title: str) -> "Figure":
    """The same images of each arm side by side, a row a class: image i of one is image i of the other.

    Raises:
        ValueError: the arms' samples are not of the same seed and labels.
    """
    from matplotlib.figure import Figure

    first = made[0][1]
    for name, samples in made:
        if (samples.record["seed"], samples.labels.tolist()) != (first.record["seed"], first.labels.tolist()):
            raise ValueError(f"the images of {name} and {made[0][0]} are not of the same seed and labels")
    classes = sorted(set(first.labels.tolist()))[:MAX_ROWS]
    each = max(1, PAIR_COLUMNS // len(made))
    chosen = [np.flatnonzero(first.labels == label)[:each] for label in classes]
    each = max(map(len, chosen))
    height, width = first.read(0).shape[:2]
    shown = min(MAX_PAIR_CELL, 2 * width)  # pixels of an image in the figure
    across, down, dpi = each * shown / 100, len(classes) * shown * height / width / 100, 100
    gap, left, top = 0.15, 1.3, 0.6
    size = (left + len(made) * (across + gap), top + down + 0.05)
    figure = Figure(figsize=size, dpi=dpi)
    for number, (name, samples) in enumerate(made):
        sheet = _sheet(samples, chosen, height, width)
        corner = (left + number * (across + gap)) / size[0]
        axes = figure.add_axes((corner, 0.05 / size[1], across / size[0], down / size[1]))
        axes.imshow(sheet, interpolation="nearest" if shown >= width else "antialiased")
        axes.set_title(name, fontsize=10, pad=4, color=COLOURS[number % len(COLOURS)])
        axes.set_xticks([])
        labels = [first.class_names[label] for label in classes] if number == 0 else []
        axes.set_yticks([(row + 0.5) * height - 0.5 for row in range(len(labels))], labels, fontsize=9)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.suptitle(title, fontsize=10, y=1 - 0.1 / size[1], va="top")
    return figure


def _sheet(samples: Samples, chosen: Sequence[Any], height: int, width: int) -> Any:
    """A row of images for each list of indices, in one array (H, W, 3); white where a row is short."""
    sheet = np.full((len(chosen) * height, max(map(len, chosen)) * width, 3), 255, dtype=np.uint8)
    for row, indices in enumerate(chosen):
        for column, index in enumerate(indices):
            at = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            sheet[at] = samples.read(int(index))
    return sheet


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


def save_figure(path: Path, make: Callable[[], "Figure"]) -> None:
    """Write the figure to the PNG `path`, whole or not at all."""
    with runtime.write_aside(path) as temporary:
        make().savefig(temporary, format="png", metadata={"Software": None})
