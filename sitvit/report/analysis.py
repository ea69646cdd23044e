"""The figures of an analysis, drawn from its numbers alone (`sitvit.analyze`), a colour a network."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110
PLACE = "block (-1: embedding)"


def write_figures(analysis: dict[str, Any], out: Path) -> list[Path]:
    """Write the PNG figures into the folder `out`; returns their paths, in the order to read them."""
    figures: dict[str, Callable[[dict[str, Any]], Figure]] = {
        "probe": probe_figure,
        "attention_distance": distance_figure,
        "token_norms": norm_figure,
        "gates": gate_figure,
    }
    for number, name in enumerate(analysis["results"], start=1):
        last = f"_{number}" if len(analysis["results"]) > 1 else ""
        figures[f"attention_maps{last}"] = partial(map_figure, name=name)
    written = []
    for name, draw in figures.items():
        save_figure(out / f"{name}.png", partial(draw, analysis))
        written.append(out / f"{name}.png")
    return written


def probe_figure(analysis: dict[str, Any]) -> "Figure":
    """Accuracy of a linear probe against block, with its standard error; a panel a time."""
    figure, panels = _panels(analysis, rows=1, title="Linear probe of the class, by block")
    for t, axes in panels[0]:
        for number, (name, found) in enumerate(analysis["results"].items()):
            rows = [row for row in found["probe"] if row["t"] == t]
            accuracy, error = (_column(rows, key) for key in ("accuracy", "standard_error"))
            axes.errorbar(
                _places(rows), 100 * accuracy, 100 * error, fmt=".-", color=f"C{number}", label=name
            )
        axes.axhline(100 * analysis["chance"], color="black", linestyle=":", label="chance")
    panels[0][0][1].set_ylabel("right, % (bars: standard error)")
    return _finish(figure, panels, PLACE)


def distance_figure(analysis: dict[str, Any]) -> "Figure":
    """Mean attention distance against block: heads as dots, their mean as a line; and what registers take."""
    figure, panels = _panels(
        analysis, rows=2, title="Attention distance and attention to registers, by block"
    )
    for row, key in enumerate(("distance", "register_share")):
        for t, axes in panels[row]:
            for number, (name, found) in enumerate(analysis["results"].items()):
                heads = [entry for entry in found["attention"] if entry["t"] == t]
                places, values = _column(heads, "block"), _column(heads, key)
                axes.plot(places, values, ".", color=f"C{number}", alpha=0.35)
                blocks = np.unique(places)
                means = [values[places == block].mean() for block in blocks]
                axes.plot(blocks, means, color=f"C{number}", label=name)
    for told in {entry["uniform_attention_distance"] for entry in analysis["networks"].values()}:
        for _, axes in panels[0]:
            axes.axhline(told, color="black", linestyle=":", label="uniform attention")
            axes.set_ylim(bottom=0)
    panels[0][0][1].set_ylabel("distance, patches")
    panels[1][0][1].set_ylabel("share that registers take")
    return _finish(figure, panels, "block")


def norm_figure(analysis: dict[str, Any]) -> "Figure":
    """Norms of the patch tokens against block (median, 5 to 95 %, largest; registers dotted), and a ratio."""
    figure, panels = _panels(analysis, rows=2, title="Token norms, by block")
    for (t, above), (_, below) in zip(*panels, strict=True):
        for number, (name, found) in enumerate(analysis["results"].items()):
            rows, color = [row for row in found["norms"] if row["t"] == t], f"C{number}"
            places = _places(rows)
            low, median, high, largest = (
                _column(rows, key) for key in ("quantile_5", "median", "quantile_95", "max")
            )
            above.plot(places, median, color=color, label=f"{name}: patches, median")
            above.fill_between(places, low, high, color=color, alpha=0.2)
            above.plot(places, largest, "--", color=color, label=f"{name}: patches, largest")
            if rows[0]["register_median"] is not None:
                above.plot(
                    places, _column(rows, "register_median"), ":", color=color, label=f"{name}: registers"
                )
            below.plot(places, _column(rows, "max_over_median"), ".-", color=color)
        above.set_yscale("log")
        below.axhline(1, color="black", linestyle=":")
    panels[0][0][1].set_ylabel("norm")
    panels[1][0][1].set_ylabel("largest / median patch")
    return _finish(figure, panels, PLACE)


def gate_figure(analysis: dict[str, Any]) -> "Figure":
    """Mean |gate|, |gamma| and |gate gamma| against block: the middle time as a line, all times as a band."""
    from matplotlib.figure import Figure

    times = analysis["protocol"]["times"]
    middle = times[len(times) // 2]
    figure = Figure(figsize=(11, 4), dpi=DPI, layout="constrained")
    figure.suptitle(
        f"Gates of adaLN and LayerScale, by block; line: t = {middle:g}, band: all t", fontsize=11
    )
    titles = {
        "gate": "|gate|",
        "gamma": "|gamma| of LayerScale",
        "product": "|gate x gamma|: what a block adds",
    }
    for column, (key, title) in enumerate(titles.items(), start=1):
        axes = figure.add_subplot(1, 3, column)
        for number, (name, found) in enumerate(analysis["results"].items()):
            for branch, style in (("attention", "-"), ("mlp", "--")):
                rows = [row for row in found["gates"] if row["branch"] == branch and row[key] is not None]
                if not rows:
                    continue
                values = np.array([_column([row for row in rows if row["t"] == t], key) for t in times])
                blocks, at = np.arange(values.shape[1]), times.index(middle)
                axes.plot(blocks, values[at], style, color=f"C{number}", label=f"{name}: {branch}")
                axes.fill_between(blocks, values.min(0), values.max(0), color=f"C{number}", alpha=0.15)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("block")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(_integers())
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    return figure


def map_figure(analysis: dict[str, Any], name: str) -> "Figure":
    """What the centre patch (+) looks at: a row a block, a column a head, after the image's latent."""
    from matplotlib.figure import Figure

    found = analysis["results"][name]
    maps = {(row["image"], row["block"], row["head"]): np.array(row["attention"]) for row in found["maps"]}
    images, blocks, heads = (sorted({key[i] for key in maps}) for i in range(3))
    columns = [(image, head) for image in images for head in [None, *heads]]
    size = 1.2 * len(columns) + 0.3, 1.2 * len(blocks) + 0.6
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    t = found["maps"][0]["t"]
    title = f"{name}, t = {t:g}: attention of the centre patch (+); dark 0, bright the largest"
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(len(blocks), len(columns), squeeze=False)
    for (row, column), axes in np.ndenumerate(grid):
        image, head = columns[column]
        axes.set_xticks([])
        axes.set_yticks([])
        if head is None:
            axes.imshow(found["map_images"][image], cmap="gray")
        else:
            values = maps[image, blocks[row], head]
            axes.imshow(values, vmin=0)
            axes.plot(values.shape[1] // 2, values.shape[0] // 2, "+", color="red")
        if row == 0:
            axes.set_title(f"latent {image}" if head is None else f"head {head}", fontsize=8)
        if column == 0:
            axes.set_ylabel(f"block {blocks[row]}", fontsize=8)
    return figure


Panels = list[list[tuple[float, "Axes"]]]


def _panels(analysis: dict[str, Any], rows: int, title: str) -> tuple["Figure", Panels]:
    """A figure with a column a time, and (time, axes) of each row; a row has one scale."""
    from matplotlib.figure import Figure

    times = analysis["protocol"]["times"]
    figure = Figure(figsize=(max(5.0, 2.4 * len(times) + 1), 2.6 * rows + 1), dpi=DPI, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(rows, len(times), sharex=True, sharey="row", squeeze=False)
    for t, top in zip(times, axes[0], strict=True):
        top.set_title(f"t = {t:g}", fontsize=10)
    return figure, [list(zip(times, line, strict=True)) for line in axes]


def _finish(figure: "Figure", panels: Panels, place: str) -> "Figure":
    for row in panels:
        for _, axes in row:
            axes.grid(alpha=0.3)
    for _, axes in panels[-1]:
        axes.set_xlabel(place)
        axes.xaxis.set_major_locator(_integers())
    handles, labels = panels[0][0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=8)
    return figure


def _integers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def _places(rows: list[dict[str, Any]]) -> np.ndarray:
    """Where rows stand: at their block; what enters block 0 at -1."""
    return np.array([-1 if row["block"] == "embedding" else row["block"] for row in rows])


def _column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows])
