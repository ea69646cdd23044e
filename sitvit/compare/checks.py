"""What would stop a comparison hours after its start, looked for before it: files and names of its cells.

A measurement comes after its training. So its reference, features, weights and sampler are looked for before
the first step, and so are the latents of each arm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..data.latents import LatentCache
from ..data.sources import open_images
from ..eval.features import find_extractor
from ..eval.settings import EvaluationConfig
from ..train.ema import constant_name
from .budget import budget
from .cells import Cell

DEFAULT_AVERAGE = "ema"


def check(cells: Sequence[Cell]) -> None:
    """Look for what those of `cells` that are not done need.

    Raises:
        ValueError: other settings than a cell was begun with; latents, a reference or weights of features
            that are not there; a network that does not fit; weights or a sampler of an unknown name.
        OSError: feature weights that cannot be fetched.
    """
    waiting = [cell for cell in cells if not cell.is_done()]
    data = [cell.run.data for cell in waiting if cell.kind == "train"]
    for folder in _given(part.latents for part in data):
        LatentCache(Path(folder))
    budget(waiting)  # networks fit the latents, and samplers are known
    for cell in waiting:
        if cell.evaluation is not None:
            _check_weights(cell, cell.evaluation.weights)
    measured = [
        cell.evaluation for cell in waiting if cell.kind == "evaluate" and cell.evaluation is not None
    ]
    for name in _given([*(part.images for part in data), *(config.reference for config in measured)]):
        if not name.startswith("hub:") and not Path(name).exists():
            open_images(name)  # an embedded set, or the error that names it
    if measured:
        _check_features(measured[0])  # all share one protocol


def _given(names: Iterable[str | None]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name is not None]


def _check_weights(cell: Cell, wanted: str | None) -> None:
    train = cell.run.train
    if wanted is None or train.ema_widths:  # what a width is called is the checkpoint's own matter
        return
    known = ["model", *map(constant_name, train.ema_decays)]
    if wanted not in known and not (wanted == DEFAULT_AVERAGE and len(train.ema_decays) == 1):
        raise ValueError(f"{cell.name}: weights {wanted!r} will not be there; {cell.arm.name} has {known}")


def _check_features(config: EvaluationConfig) -> None:
    given = {"inception": config.inception_weights, "dinov2": config.dinov2_weights}
    if config.features is not None:
        weights = given.get(config.features)
        find_extractor(config.features, torch.device("cpu"), Path(weights) if weights else None)
