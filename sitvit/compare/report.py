"""The report of a comparison: result.json, and from it alone a page, a Markdown text and a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import runtime
from ..generate.samples import RECORD, Samples
from ..report.figures import difference_figure, grid_figure, save_figure, value_figure
from ..report.html import STYLE, image, table, text
from .cells import Cell
from .result import collect
from .settings import ComparisonConfig
from .work import grid_folder

PHONE = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
WIDE = ".wide { overflow-x: auto }"

Table = tuple[str, list[str], list[list[str]]]


def write_comparison(comparison: ComparisonConfig, cells: Sequence[Cell]) -> list[Path]:
    """Write OUT/report.html, report.md, result.json, values.csv and figures/; returns what was written.

    Raises:
        ValueError: no evaluation is finished.
    """
    result, out = collect(comparison, cells), Path(comparison.out)
    runtime.write_json(out / "result.json", result)
    pictures = _pictures(result, cells, out / "figures")
    tables = tables_of(result)
    page = out / "report.html", out / "report.md", out / "values.csv"
    for path, content in zip(
        page, (html_page(result, tables, pictures), markdown(result, tables), values_csv(result)), strict=True
    ):
        with runtime.write_aside(path) as temporary:
            temporary.write_text(content, "utf-8")
    return [*page, out / "result.json", *pictures]


def _pictures(result: dict[str, Any], cells: Sequence[Cell], folder: Path) -> list[Path]:
    made = [folder / "distance.png", folder / "difference.png"]
    save_figure(made[0], lambda: value_figure(result))
    save_figure(made[1], lambda: difference_figure(result["differences"], result["metric"]))
    if result["losses"]:
        made.append(folder / "loss_difference.png")
        save_figure(made[-1], lambda: difference_figure(result["losses"], "training loss"))
    for cell in cells:
        where = grid_folder(cell)
        if cell.kind == "grid" and (where / RECORD).is_file():
            made.append(folder / f"{cell.name}.png")
            title = f"{cell.arm.name}, step {cell.step}, cfg {cell.cfg_scale:g}, seed {cell.seed}"
            save_figure(made[-1], partial(grid_figure, Samples(where), title))
    return made


def tables_of(result: dict[str, Any]) -> list[Table]:
    """Title, head and rows of each table."""
    metric = result["metric"]
    percent = f"{100 * result['confidence']:g} %"
    differences = [
        [f"{d['second']} - {d['first']}", str(d["step"]), _scales(d), shown(d["mean"]),
         _interval(d["low"], d["high"]), _interval(d["bootstrap_low"], d["bootstrap_high"]),
         str(d["num_seeds"]), d["verdict"]]
        for d in result["differences"]
    ]  # fmt: skip
    values = [
        [v["arm"], str(v["seed"]), str(v["step"]), f"{v['cfg_scale']:g}",
         *(shown(number) for number in v["metrics"].values())]
        for v in result["values"]
    ]  # fmt: skip
    costs = [
        [arm["name"], arm["model"], " ".join(arm["overrides"]) or "-", f"{arm['parameters']:,}",
         f"{arm['forward_flops']:,}", f"{arm['memory_bytes']:,}", shown(arm["seconds_a_step"])]
        for arm in result["arms"]
    ]  # fmt: skip
    return [
        (
            f"Paired differences in {metric} (lower is better)",
            ["difference", "step", "cfg", "mean", percent, "bootstrap", "seeds", "verdict"],
            differences,
        ),
        (
            "Cost",
            ["arm", "network", "overrides", "parameters", "FLOPs an image", "bytes in training", "s a step"],
            costs,
        ),
        ("Every value", ["arm", "seed", "step", "cfg", *result["values"][0]["metrics"]], values),
        (
            "Published, by others",
            ["arm", "step", "cfg", "value", "source"],
            [
                [r["arm"], str(r["step"]), f"{r['cfg_scale']:g}", shown(r["value"]), r["source"]]
                for r in result["references"]
            ],
        ),
    ]


def conclusions(result: dict[str, Any]) -> list[str]:
    """What can be said, and what cannot."""
    told = []
    for d in result["differences"]:
        what = f"{d['second']} against {d['first']} at step {d['step']}, cfg {_scales(d)}"
        says = {
            "not separable": "not separable: the interval holds zero",
            "unknown": "one seed and no spread: nothing can be concluded",
        }.get(d["verdict"], f"{d['verdict']} {result['metric']}")
        told.append(f"{what}: {says}.")
    told.append("The guidance of each arm was chosen on the images that it is reported on.")
    told += [f"Not finished: {name}." for name in result["missing"]]
    return told


def html_page(result: dict[str, Any], tables: list[Table], pictures: list[Path]) -> str:
    """One page without outside links."""
    first = result["values"][0]
    protocol = f"{first['num_samples']} images against {first['num_reference']}, {first['features']}"
    body = [f"<h1>{text(' against '.join(arm['name'] for arm in result['arms']))}</h1>"]
    body += ["<ul>", *(f"<li>{text(line)}" for line in conclusions(result)), "</ul>"]
    for title, head, rows in tables:
        if rows:
            body.append(f"<h2>{text(title)}</h2><div class='wide'>{table(head, rows, 1)}</div>")
    body += [image(path) for path in pictures]
    body += [f"<h2>Protocol</h2><p class='note'>{text(protocol)}</p>"]
    body += [f"<p><code>{text(str(result['comparison']))}</code></p>"]
    body += [
        f"<h2>Provenance</h2><p class='note'>{text(str(first['versions']))} {text(first['command'])}</p>"
    ]
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'>{PHONE}<title>sitvit comparison</title>"
        f"<style>{STYLE}{WIDE}</style>" + "\n".join(body) + "</html>\n"
    )


def markdown(result: dict[str, Any], tables: list[Table]) -> str:
    """The same as text."""
    parts = ["\n".join(f"- {line}" for line in conclusions(result))]
    for title, head, rows in tables:
        if rows:
            lines = [head, ["---"] * len(head), *rows]
            parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def values_csv(result: dict[str, Any]) -> str:
    """Every measured value, unrounded."""
    names = list(result["values"][0]["metrics"])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["arm", "seed", "step", "cfg_scale", *names])
    for v in result["values"]:
        writer.writerow([v["arm"], v["seed"], v["step"], v["cfg_scale"], *(v["metrics"][n] for n in names)])
    return buffer.getvalue()


def shown(value: float | None) -> str:
    """A number of the JSON with four digits."""
    return "-" if value is None else f"{value:.4g}"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None else f"{shown(low)} to {shown(high)}"


def _scales(d: dict[str, Any]) -> str:
    one, two = d["first_cfg_scale"], d["second_cfg_scale"]
    return f"{two:g}" if one == two else f"{two:g} and {one:g}"
