"""A new run that starts from other weights: a velocity network's, or the blocks of a ViT-5 classifier.

label rows         mapped by class name; classes that the source lacks keep their fresh row; null to null
another grid       fixed positions and rotations are the new grid's own, learned ones interpolated
everything else    has to be there in the same shape
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import runtime
from ..models.convert import init_from, load_model
from ..models.positions import resample_table
from ..models.vit5 import ViT5
from .checkpoint import RECORD, find_checkpoint, open_checkpoint

LABELS = "y_embedder.embedding_table.weight"
POSITIONS = "pos_embed"


def start_from(model: Any, path: Path, class_names: Sequence[str]) -> None:
    """Put the weights at `path` into `model`, whose classes are `class_names`, and say what was taken.

    `path` is a run or checkpoint (its average is taken), one of a checkpoint's networks, a model folder or
    file, or a ViT-5 classifier.

    Raises:
        ValueError: nothing loadable there, or another architecture, naming what does not fit.
    """
    names: Sequence[str] | None = None
    if (path / "checkpoints").is_dir() or (path / RECORD).is_file():
        checkpoint = find_checkpoint(str(path))
        averages = [name for name in checkpoint.networks if name != "model"]
        if len(averages) > 1:
            named = ", ".join(str(checkpoint.folder / name) for name in averages)
            raise ValueError(f"train.init_from: {path} has several averages; name one: {named}")
        which = checkpoint.weights_name("ema")
        source, names = checkpoint.load_network(which), checkpoint.class_names
        which = f"{checkpoint.folder} ({which})"
    elif (path.parent / RECORD).is_file():  # a network of a checkpoint, which has its classes
        checkpoint = open_checkpoint(path.parent)
        source, which = checkpoint.load_network(checkpoint.weights_name(path.name)), str(path)
        names = checkpoint.class_names
    else:
        source, told = load_model(path)
        which = f"{path} ({told})"
    if isinstance(source, ViT5):
        _start_from_classifier(model, source, which)
    else:
        _start_from_network(model, source, which, class_names, names)


@torch.no_grad()
def _start_from_network(
    model: Any, source: Any, which: str, class_names: Sequence[str], names: Sequence[str] | None
) -> None:
    given, own = source.state_dict(), model.state_dict()
    unfit = [
        f"{name} {tuple(given[name].shape) if name in given else 'missing'} for {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name not in (LABELS, POSITIONS) and (name not in given or given[name].shape != tensor.shape)
    ]
    unfit += [f"{name} is not in the model" for name in given if name not in own]
    if unfit or model.positions_kind != source.positions_kind:
        raise ValueError(f"{which} is another architecture: {'; '.join(unfit[:4]) or 'other positions'}")
    told = _label_rows(own[LABELS], given[LABELS], model, source, class_names, names)
    if model.positions_kind == "learned":
        given[POSITIONS] = resample_table(given[POSITIONS], source.grid, model.grid)
    elif POSITIONS in own:  # fixed: the grid's own
        given[POSITIONS] = own[POSITIONS]
    model.load_state_dict({**given, LABELS: own[LABELS]})
    if model.grid != source.grid:
        told += f"; grid {source.grid} becomes {model.grid}"
    runtime.say(f"starting from {which}: {told}")


def _label_rows(
    rows: Tensor,
    given: Tensor,
    model: Any,
    source: Any,
    class_names: Sequence[str],
    names: Sequence[str] | None,
) -> str:
    """Fill `rows` from `given` by class name, by number where the source has no names; what was done."""
    if names is None:
        if source.num_classes != model.num_classes:
            raise ValueError(
                f"the weights have {source.num_classes} classes without names, the model "
                f"{model.num_classes}, so their labels cannot be mapped"
            )
        pairs = [(label, label) for label in range(model.num_classes)]
    else:
        labels = {name: label for label, name in enumerate(names)}
        pairs = [(new, labels[name]) for new, name in enumerate(class_names) if name in labels]
    how = "by number" if names is None else "by name"
    for new, old in pairs:
        rows[new] = given[old]
    if model.has_null and source.has_null:
        rows[model.null_label] = given[source.null_label]
    return f"{len(pairs)} of {model.num_classes} classes have their label rows, {how}; the rest are fresh"


def _start_from_classifier(model: Any, classifier: ViT5, which: str) -> None:
    """Take the classifier's blocks, and say what was and was not taken."""
    taken, left, unused = init_from(model, classifier)
    blocks = {name.split(".")[1] for name in taken if name.startswith("blocks.")}
    fresh = sorted({name.split(".")[0] for name in left if not name.startswith("blocks.")})
    in_blocks = sorted({name.split(".", 2)[2] for name in left if name.startswith("blocks.")})
    runtime.say(
        f"from {which}: {len(taken)} tensors in {len(blocks)} of {len(model.blocks)} blocks; left as they "
        f"were: {', '.join(fresh)}, and in blocks {', '.join(in_blocks) or 'nothing'}; not used of the "
        f"classifier: {', '.join(sorted({name.split('.')[0] for name in unused})) or 'nothing'}"
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep the parameters that match one of `patterns` ("blocks.0.*", "x_embedder.*") as they are.

    Raises:
        ValueError: a pattern that matches no parameter, or nothing left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            some = ", ".join(list(parameters)[:4])
            raise ValueError(f"train.freeze: {pattern!r} matches no parameter; there are {some}, ...")
        for name in matched:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError("train.freeze leaves nothing to train")
