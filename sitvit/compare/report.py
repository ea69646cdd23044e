"""The report of a comparison: OUT/result.json, and from it alone a page, a Markdown text, tables and figures.

report.html          all of it in one file      figures/*.png        what the page shows
report.md            the same as text           values.csv           every measured value, unrounded
result.json          every number               differences.csv      every paired difference, unrounded
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import runtime
from ..generate.samples import RECORD, Samples
from ..report.comparison import write_figures
from ..report.figures import pair_grid, save_figure
from ..report.page import analysis, bullets, facts, image, note, page, table, text
from .cells import Cell
from .result import collect
from .settings import ComparisonConfig
from .tables import Result, headline, not_concluded, protocol, tables

Figures = list[tuple[Path, str]]
"""Each picture and what it shows."""

MAX_TITLE = 2  # arms that a title sets against each other
VALUE_COLUMNS = ("arm", "seed", "step", "cfg_scale", "training_flop")
DIFFERENCE_COLUMNS = (
    "first", "second", "step", "first_cfg_scale", "second_cfg_scale", "mean", "low", "high", "bootstrap_low",
    "bootstrap_high", "num_seeds", "verdict",
)  # fmt: skip
INTERVALS = """\
Each difference is within a seed, then averaged. Its interval is Student's over seeds, at least as wide as the
spread of the samples; where it holds zero, the arms are not separable. The bootstrap stands beside it and
decides nothing: with few seeds it is too narrow."""

STEP_TIME = """\
Parameters, FLOPs (a multiply-add is two, training three times the forward pass) and bytes in training follow
from the network's geometry. Seconds a step are measured, as a median over each run; other work on the machine
moves them."""


def write_comparison(comparison: ComparisonConfig, cells: Sequence[Cell]) -> list[Path]:
    """Write the files named above; returns them.

    Raises:
        ValueError: no evaluation is finished.
    """
    out = Path(comparison.out)
    runtime.write_json(out / "result.json", collect(comparison, cells))
    result = runtime.read_json(out / "result.json")
    figures, grids = write_figures(result, out / "figures"), _grids(cells, out / "figures")
    written = [out / "report.html", out / "report.md", out / "values.csv", out / "differences.csv"]
    contents = [html_page(result, figures, grids), markdown(result, figures + grids), values_csv(result)]
    for path, content in zip(written, [*contents, differences_csv(result)], strict=True):
        with runtime.write_aside(path) as temporary:
            temporary.write_text(content, "utf-8")
    return [*written, out / "result.json", *(path for path, _ in figures + grids)]


def _grids(cells: Sequence[Cell], folder: Path) -> Figures:
    """A picture a guidance scale: what each arm that has its samples makes of the same noise."""
    made: dict[float, list[tuple[Cell, Samples]]] = {}
    for cell in cells:
        where = cell.grid_folder
        if cell.kind == "grid" and (where / RECORD).is_file():
            made.setdefault(cell.cfg_scale, []).append((cell, Samples(where)))
    pictures = []
    for scale, found in made.items():
        first = found[0][0]
        path = folder / f"grid-cfg_{scale:g}.png"
        how = f"step {first.step}, {'unguided' if scale == 1 else f'cfg {scale:g}'}, seed {first.seed}"
        sides = [(cell.arm.name, samples) for cell, samples in found]
        save_figure(path, partial(pair_grid, sides, f"The same noise and classes, {how}"))
        names = ", ".join(name for name, _ in sides)
        pictures.append((path, f"Images of {names} from the same noise and classes, {how}"))
    return pictures


def html_page(result: Result, figures: Figures, grids: Figures) -> str:
    """One page without outside links, from `result` and the pictures."""
    by_name = {path.stem: image(path, told, told) for path, told in figures}
    made = {
        key: table(name, head, rows, n) if rows else ""
        for key, (name, head, rows, n) in tables(result).items()
    }
    versions = "; ".join(" ".join(pair) for v in result["provenance"]["versions"] for pair in v.items())
    show: Callable[..., list[str]] = lambda *names: [by_name[name] for name in names if name in by_name]  # noqa: E731
    sections = [
        ("Differences", [*show("difference"), note(INTERVALS), made["differences"]]),
        ("The ladder", [*show("waterfall"), made["ladder"]] if result["ladder"] else []),
        (result["metric"], show("distance", "compute", "guidance")),
        ("Loss", show("loss", "loss_difference")),
        ("Images", [image(path, told, told) for path, told in grids]),
        (
            "Inside the networks",
            [part for at in result["analyses"] for part in analysis(Path(at).parent)],
        ),
        ("Cost", [note(STEP_TIME), made["cost"]]),
        ("Not concluded", [bullets(not_concluded(result))]),
        ("Published", [made["references"]]),
        ("Every value", [made["values"]]),
        ("Protocol", [made["arms"], facts(*protocol(result))]),
        ("Provenance", [*map(_code, result["provenance"]["commands"]), _code(versions)]),
    ]
    return page(title(result), [bullets(headline(result))], sections)


def title(result: Result) -> str:
    """The arms by name, of a ladder its ends."""
    names = [arm["name"] for arm in result["arms"]]
    if result["comparison"]["against"] == "previous":
        return f"{names[0]} to {names[-1]}, one part after another"
    if len(names) > MAX_TITLE:
        return f"{names[0]} and {', '.join(names[1:])}"
    return " against ".join(names)


def markdown(result: Result, figures: Figures) -> str:
    """The same as text, its pictures beside it."""
    parts = [f"# {title(result)}", _list(headline(result)), "## Not concluded", _list(not_concluded(result))]
    for name, head, rows, _ in tables(result).values():
        if rows:
            lines = [head, ["---"] * len(head), *rows]
            body = "\n".join(
                "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
            )
            parts.append(f"## {name}\n\n{body}")
    parts.append("## Protocol\n\n" + _list([f"{key}: {value}" for key, value in protocol(result)[1]]))
    parts += [f"![{told}](figures/{path.name})" for path, told in figures]
    return "\n\n".join(parts) + "\n"


def values_csv(result: Result) -> str:
    """Every measured value, unrounded."""
    names = list(result["values"][0]["metrics"])
    rows = [[*(v[key] for key in VALUE_COLUMNS), *(v["metrics"][n] for n in names)] for v in result["values"]]
    return _csv([*VALUE_COLUMNS, *names], rows)


def differences_csv(result: Result) -> str:
    """Every paired difference (second - first), unrounded."""
    return _csv(DIFFERENCE_COLUMNS, [[d[key] for key in DIFFERENCE_COLUMNS] for d in result["differences"]])


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([head, *rows])
    return buffer.getvalue()


def _code(line: str) -> str:
    return f"<p><code>{text(line)}</code></p>"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
