"""How geometry is shown: a table that compares models, json, and a sentence about a patch grid."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..models.geometry import Geometry, Parts, PatchGrid
from ..models.memory import Memory

NOTE = """\
Multiply-adds: linear layers and attention's two products; softmax, norms, activations, biases left out.
1 multiply-add = 2 FLOPs; training = 3 x forward. Activations are an estimate; sitvit/models/memory.py has
its formula and what comes on top."""


def geometry_table(
    models: Mapping[str, tuple[Geometry, Memory]], batch_size: int, dtype: str, parts: bool
) -> str:
    """A column a model, a row a quantity; `parts` adds what parameters and multiply-adds are made of."""
    geometries = [geometry for geometry, _ in models.values()]
    memories = [memory for _, memory in models.values()]
    rows = [["", *models]]
    rows += [
        ["input, width x height", *(_across(g.size) for g in geometries)],
        ["patch grid, columns x rows", *(_across(g.grid) for g in geometries)],
        ["patches", *(f"{g.patches:,}" for g in geometries)],
        ["tokens, with registers and class token", *(f"{g.tokens:,}" for g in geometries)],
        ["parameters", *(f"{g.parameters.total:,}" for g in geometries)],
        *(_parts([g.parameters for g in geometries], 1, ",.0f") if parts else []),
        ["multiply-adds an image, forward, G", *(f"{g.multiply_adds.total / 1e9:,.2f}" for g in geometries)],
        *(_parts([g.multiply_adds for g in geometries], 1e9, ",.3f") if parts else []),
        ["FLOPs an image, forward, G", *(f"{g.forward_flops / 1e9:,.2f}" for g in geometries)],
        ["FLOPs an image, training, G", *(f"{g.training_flops / 1e9:,.2f}" for g in geometries)],
        [f"memory, GiB: {dtype}, batch {batch_size}", *(f"{m.total / 2**30:,.2f}" for m in memories)],
        *_parts(memories, 2**30, ",.2f"),
    ]
    return f"{_aligned(rows)}\n\n{NOTE}"


def geometry_records(
    models: Mapping[str, tuple[Geometry, Memory]], batch_size: int, dtype: str
) -> list[dict[str, Any]]:
    """The same for a machine: counts and bytes, sizes as (height, width), sums as `total`."""
    return [
        {
            "model": name,
            **dataclasses.asdict(geometry),
            "parameters": _with_total(geometry.parameters),
            "multiply_adds": _with_total(geometry.multiply_adds),
            "forward_flops": geometry.forward_flops,
            "training_flops": geometry.training_flops,
            "memory": {"batch_size": batch_size, "dtype": dtype, **_with_total(memory)},
        }
        for name, (geometry, memory) in models.items()
    ]


def patch_grid_text(grid: PatchGrid) -> str:
    """What both rounding rules make of an image, width first."""
    lines = [
        f"image {_across(grid.image)} (width x height), patch {grid.patch_size}; patches as columns x rows"
    ]
    for rule, (rows, columns), change, (height, width) in (
        ("floor, the rest is cropped", grid.floor, "crops", grid.cropped),
        ("ceil, by padding", grid.ceil, "pads", grid.padded),
    ):
        lines.append(
            f"  {rule:26}  {columns} x {rows} = {columns * rows:,} patches; {change} {width} pixels of the "
            f"width, {height} of the height"
        )
    return "\n".join([*lines, "The networks here refuse a size that the patch does not divide."])


def _across(size: tuple[int, int]) -> str:
    return f"{size[1]} x {size[0]}"


def _with_total(parts: Parts) -> dict[str, int]:
    return {**dataclasses.asdict(parts), "total": parts.total}


def _parts(columns: Sequence[Parts], unit: float, form: str) -> list[list[str]]:
    """An indented row for each part that some column has."""
    rows = []
    for name in dataclasses.asdict(columns[0]):
        values = [getattr(column, name) for column in columns]
        if any(values):
            rows.append(["  " + name.replace("_", " "), *(format(value / unit, form) for value in values)])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for label, *values in rows:
        cells = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *cells]))
    return "\n".join(lines)
