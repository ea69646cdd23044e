"""The figures of a comparison, drawn from its result.json alone (`sitvit.compare.result`).

A colour an arm, the same in every figure. A line is the mean over seeds, a band runs from the lowest to the
highest seed. Stars are published by others.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import COLOURS, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]

MAX_INSIDE = 5  # lines of a legend that covers the axes
MAX_WHISKERS = 10  # points of a curve that get one each beside the band
VERDICTS = {"lower": "#0072b2", "higher": "#d55e00", "not separable": "#999999", "unknown": "#cccccc"}


def write_figures(result: Result, folder: Path) -> list[tuple[Path, str]]:
    """Write the figures that `result` has numbers for; returns each path with what the figure shows."""
    metric = result["metric"]
    scales = {value["cfg_scale"] for value in result["values"]}
    seeds = "mean over seeds, band from the lowest to the highest"
    figures: list[tuple[str, Callable[[], Figure], bool, str]] = [
        (
            "distance",
            lambda: distance_figure(result, "step"),
            True,
            f"{metric} against optimizer step, unguided: {seeds}",
        ),
        (
            "compute",
            lambda: distance_figure(result, "training_flop"),
            True,
            f"{metric} against training FLOPs, unguided: what each arm reaches for what it costs",
        ),
        (
            "difference",
            lambda: difference_figure(result["differences"], metric),
            bool(result["differences"]),
            f"Paired difference in {metric}, unguided, with its interval; below zero the arm is better",
        ),
        (
            "waterfall",
            lambda: waterfall_figure(result),
            result["ladder"] is not None,
            f"The ladder: what each part adds to {metric}, with its interval",
        ),
        (
            "guidance",
            lambda: guidance_figure(result),
            len(scales) > 1,
            f"{metric} against guidance scale at the last step; a ring is the arm's best",
        ),
        ("loss", lambda: loss_figure(result), bool(result["curves"]), f"Training loss: {seeds}"),
        (
            "loss_difference",
            lambda: difference_figure(result["losses"], "training loss"),
            bool(result["losses"]),
            "Paired difference in training loss, with its interval: one batch and one noise on both sides",
        ),
    ]
    made = []
    for name, draw, wanted, told in figures:
        path = folder / f"{name}.png"
        if wanted:
            save_figure(path, draw)
            made.append((path, told))
        else:
            path.unlink(missing_ok=True)  # of an earlier report
    return made


def distance_figure(result: Result, across: str) -> "Figure":
    """Unguided distance of each arm against "step" or "training_flop", and the published values."""
    figure, axes = _axes("optimizer step" if across == "step" else "training FLOPs")
    for colour, arm in _coloured(result):
        values = [v for v in result["values"] if (v["arm"], v["cfg_scale"]) == (arm["name"], 1)]
        _band(axes, [(v[across], v["metrics"][result["metric"]]) for v in values], colour, arm["name"])
        for told in result["references"]:
            if told["arm"] == arm["name"]:
                cost = float(told["step"]) * arm["batch_size"] * arm["training_flops"]
                at = told["step"] if across == "step" else cost
                _star(axes, at, told, colour)
    axes.set_ylabel(f"{result['metric']} (lower is better)")
    low, high = axes.dataLim.intervalx
    if across == "training_flop" and high > 10 * low:
        axes.set_xscale("log")
        _short_numbers(axes)
    _log_where_wide(axes)
    return _finish(figure, axes)


def guidance_figure(result: Result) -> "Figure":
    """Distance against guidance scale at the last step; a ring is each arm's best."""
    figure, axes = _axes("guidance scale (1: unguided)")
    last = result["comparison"]["steps"][-1]
    for colour, arm in _coloured(result):
        values = [v for v in result["values"] if (v["arm"], v["step"]) == (arm["name"], last)]
        points = [(v["cfg_scale"], v["metrics"][result["metric"]]) for v in values]
        _band(axes, points, colour, arm["name"])
        best = [value for scale, value in points if scale == arm["best_cfg_scale"]]
        if best:
            at, value = arm["best_cfg_scale"], float(np.mean(best))
            axes.plot(at, value, "o", markersize=12, markerfacecolor="none", markeredgecolor=colour)
    axes.set_ylabel(f"{result['metric']} at step {last:,}")
    return _finish(figure, axes)


def loss_figure(result: Result) -> "Figure":
    """Training loss against step of each arm, in windows."""
    figure, axes = _axes("optimizer step")
    for colour, arm in _coloured(result):
        curves = [curve for curve in result["curves"] if curve["arm"] == arm["name"]]
        points = [p for c in curves for p in zip(c["steps"], c["losses"], strict=True)]
        _band(axes, points, colour, arm["name"], marker="")
    axes.set_ylabel("velocity loss (mean squared error)")
    _log_where_wide(axes)
    return _finish(figure, axes)


def difference_figure(entries: list[dict[str, Any]], what: str) -> "Figure":
    """A panel a pair: unguided difference against step with its interval; full points exclude zero."""
    from matplotlib.figure import Figure

    entries = [entry for entry in entries if entry.get("first_cfg_scale", 1) == 1]
    pairs = list(dict.fromkeys((entry["first"], entry["second"]) for entry in entries))
    columns = 2 if len(pairs) == 4 else min(len(pairs), 3)
    rows = -(-len(pairs) // columns)
    figure = Figure(
        figsize=(7, 3.4) if columns == 1 else (3.2 * columns, 2.8 * rows), dpi=110, layout="constrained"
    )
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for (first, second), axes in zip(pairs, panels, strict=False):
        points = [entry for entry in entries if (entry["first"], entry["second"]) == (first, second)]
        _difference(axes, points)
        axes.set_title(f"{second} - {first}", fontsize=9)
    for axes in panels[len(pairs) :]:
        axes.set_visible(False)
    figure.supxlabel("optimizer step (full points: the interval excludes zero)", fontsize=9)
    figure.supylabel(f"difference in {what}", fontsize=9)
    return figure


def waterfall_figure(result: Result) -> "Figure":
    """From the first arm's value to the last one's, a bar a part, whiskers its interval."""
    ladder = result["ladder"]
    names, means = list(ladder["means"]), list(ladder["means"].values())
    figure, axes = _axes(
        f"{result['metric']} at step {ladder['step']:,}, unguided, {len(ladder['seeds'])} seed(s)"
    )
    figure.set_figheight(1.4 + 0.45 * len(names))
    axes.barh([0, len(names)], [means[0], means[-1]], color="#444444", height=0.6)
    for row, (rung, level) in enumerate(zip(ladder["rungs"], means[:-1], strict=True), 1):
        _rung(axes, row, level, rung)
    axes.set_yticks(range(len(names) + 1), [names[0], *(f"+ {n}" for n in names[1:]), "all together"])
    axes.invert_yaxis()
    ends = [abs(rung[end] or 0.0) for rung in ladder["rungs"] for end in ("low", "mean", "high")]
    reach = 1.3 * max(ends)
    axes.set_xlim(max(0.0, min(means) - reach), max(means) + reach)
    for verdict in dict.fromkeys(rung["verdict"] for rung in ladder["rungs"]):
        better = {"lower": " (better)", "higher": " (worse)"}.get(verdict, "")
        axes.barh(0, 0, color=VERDICTS[verdict], label=verdict + better)
    return _finish(figure, axes)


def _rung(axes: "Axes", row: int, level: float, rung: dict[str, Any]) -> None:
    end = level + rung["mean"]
    axes.barh(row, rung["mean"], left=level, color=VERDICTS[rung["verdict"]], height=0.6)
    if rung["low"] is not None:
        whiskers = [[rung["mean"] - rung["low"]], [rung["high"] - rung["mean"]]]
        axes.errorbar(end, row, xerr=whiskers, color="black", capsize=3, linewidth=1)
    axes.plot([level, level], [row - 1.3, row + 0.3], color="#444444", linewidth=0.8)
    right = max(level, level + (rung["high"] if rung["high"] is not None else rung["mean"]))
    axes.annotate(
        f"{rung['mean']:+.3g}", (right, row), (4, 0), textcoords="offset points", va="center", fontsize=8
    )


def _coloured(result: Result) -> list[tuple[str, dict[str, Any]]]:
    return [(COLOURS[number % len(COLOURS)], arm) for number, arm in enumerate(result["arms"])]


def _axes(xlabel: str) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    _short_numbers(axes)
    return figure, axes


def _short_numbers(axes: "Axes") -> None:
    """Steps and FLOPs as 400 k, 7 M, 1.2 Z."""
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter())


def _finish(figure: "Figure", axes: "Axes") -> "Figure":
    axes.grid(alpha=0.3, which="both")
    axes.set_axisbelow(True)
    if len(axes.get_legend_handles_labels()[1]) > MAX_INSIDE:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    else:
        axes.legend(fontsize=8)
    return figure


def _band(
    axes: "Axes", points: Sequence[tuple[float, float]], colour: str, label: str, marker: str = "."
) -> None:
    """Mean line and lowest-to-highest band of all values at one x."""
    if not points:
        return
    places = sorted({x for x, _ in points})
    values = [[value for at, value in points if at == x] for x in places]
    if marker:
        axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.4)
    axes.plot(places, [np.mean(v) for v in values], marker=marker, color=colour, label=label)
    axes.fill_between(
        places, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2, linewidth=0
    )


def _star(axes: "Axes", at: float, told: dict[str, Any], colour: str) -> None:
    """A published value, full where it is unguided; the legend names each kind once, without a colour."""
    kind = "published, unguided" if told["cfg_scale"] == 1 else f"published, cfg {told['cfg_scale']:g}"
    full = told["cfg_scale"] == 1
    if kind not in axes.get_legend_handles_labels()[1]:
        grey = "#888888"
        axes.plot([], [], "*", color=grey, markerfacecolor=grey if full else "none", label=kind)
    axes.plot(at, told["value"], "*", markersize=11, color=colour, markerfacecolor=colour if full else "none")


def _difference(axes: "Axes", points: list[dict[str, Any]]) -> None:
    steps, means = ([point[key] for point in points] for key in ("step", "mean"))
    known = [point for point in points if point["low"] is not None]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot(steps, means, "-", color="#444444", linewidth=1)
    lows, highs = ([point[end] for point in known] for end in ("low", "high"))
    axes.fill_between([p["step"] for p in known], lows, highs, color="#444444", alpha=0.15, linewidth=0)
    if len(known) <= MAX_WHISKERS:
        axes.vlines([p["step"] for p in known], lows, highs, color="#444444", linewidth=1)
    for point in points:
        colour = VERDICTS[point["verdict"]]
        face = colour if point["verdict"] in ("lower", "higher") else "white"
        axes.plot(
            point["step"], point["mean"], "o", markersize=4, markerfacecolor=face, markeredgecolor=colour
        )
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    _short_numbers(axes)


def _log_where_wide(axes: "Axes") -> None:
    """A logarithmic axis where the values span a factor of three or more."""
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low >= 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="both", labelsize=8)
