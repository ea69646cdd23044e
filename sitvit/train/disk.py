"""What a run will write to its disk, against what is free there, before hours are spent.

a checkpoint    4 bytes a parameter for the weights and for each average, 8 a trained one for two moments
at any time     train.keep_checkpoints of them and one while it is written: without these no run begins
at the end      those of train.keep_every, and each snapshot's power-function averages: these are told
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .. import runtime
from ..config import TrainConfig

if TYPE_CHECKING:
    from torch import nn


def checkpoint_bytes(num_parameters: int, num_trained: int, train: TrainConfig) -> int:
    """Of one checkpoint, but for a few kilobytes of text."""
    num_averages = len(train.ema_decays) + len(train.ema_widths)
    return 4 * num_parameters * (1 + num_averages) + 8 * num_trained


def snapshot_bytes(num_parameters: int, train: TrainConfig) -> int:
    """Of all snapshots of the power-function averages."""
    return 4 * num_parameters * len(train.ema_widths) * -(-train.num_steps // train.snapshot_every)


def num_kept(train: TrainConfig) -> int:
    """Checkpoints that lie there for `keep_checkpoints` while one more is written."""
    return min(-(-train.num_steps // train.save_every), train.keep_checkpoints + 1)


def num_for_good(train: TrainConfig) -> int:
    """Checkpoints that `keep_every` keeps beside those of `num_kept`, when the last is written."""
    last, every = train.num_steps, train.keep_every
    if not every:
        return 0
    regular = range(train.save_every, last, train.save_every)
    newest = [last, *regular[::-1][: num_kept(train) - 1]]
    num_all = (last - 1) // math.lcm(train.save_every, every) + (last % every == 0)
    return num_all - sum(step % every == 0 for step in newest)


def check_disk(run: Path, num_there: int, model: nn.Module, train: TrainConfig) -> None:
    """Say where the disk of `run`, which has `num_there` checkpoints, will not hold all that it is to keep.

    Raises:
        ValueError: not even the newest ones fit.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    each = checkpoint_bytes(num_parameters, num_trained, train)
    soon = max(num_kept(train) - num_there, 1) * each
    later = max(num_kept(train) + num_for_good(train) - num_there, 1) * each
    later += snapshot_bytes(num_parameters, train)
    place = nearest_folder(run)
    total, _, free = shutil.disk_usage(place)
    if not total:  # some network file systems do not say
        return
    if free < soon:
        raise ValueError(
            f"the disk of {place} has {as_gb(free)} free, and {run} needs {as_gb(soon)}: a checkpoint "
            f"has {as_gb(each)}, and train.keep_checkpoints = {train.keep_checkpoints} of them lie there "
            "while another is written; free some, or choose another `run`"
        )
    if free < later:
        runtime.say(
            f"the disk of {place} has {as_gb(free)} free, and {run} will need {as_gb(later)} by its "
            "last step, with what train.keep_every and train.ema_widths keep"
        )


def nearest_folder(path: Path) -> Path:
    """`path`, or the folder above it that is there."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def as_gb(size: float) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
