"""Averages of any length after training, out of snapshots of two (EDM2, arXiv 2312.02696, section 3.2).

A power-function average of exponent a at step s is the weights' trajectory under the profile

    p_(a,s)(tau) = (a + 1) tau^a / s^(a + 1),   0 <= tau <= s

and the wanted one, exponent g at step t, has p_(g,t). The combination sum_i x_i p_(a_i,s_i) nearest to that
in least squares follows from the inner products

    <p_(a,s), p_(b,t)> = (a + 1) (b + 1) / (a + b + 1) (s / t)^b / t          for s <= t

and the same combination of the snapshots is the average. Difference from EDM2: the x_i sum to one, as weights
that never moved must come out as they are; without that a few snapshots give them a scale of 1.003.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from .. import runtime
from .checkpoint import WEIGHTS, Checkpoint, open_checkpoint, save_checkpoint
from .ema import exponent, power_name

Profile = tuple[float, int]
"""(exponent, step)"""


def inner_product(first: Profile, second: Profile) -> float:
    """<p, q> of two profiles, over all time."""
    (a, s), (b, t) = sorted((first, second), key=lambda profile: profile[1])
    return (a + 1) * (b + 1) / (a + b + 1) * (s / t) ** b / t


def coefficients(known: Sequence[Profile], wanted: Profile) -> tuple[np.ndarray, float]:
    """(len(known),) float64, of sum one, of the profiles nearest to `wanted`, and the error relative to it.

    The error is the norm of the difference of the profiles over that of the wanted one.
    """
    products = np.array([[inner_product(p, q) for q in known] for p in known])
    target = np.array([inner_product(p, wanted) for p in known])
    # The last one takes what the others leave of the sum; differences of unit norm keep the system solvable.
    others = np.vstack([np.eye(len(known) - 1), -np.ones(len(known) - 1)])
    last = np.eye(len(known))[-1]
    reduced = others.T @ products @ others  # empty where one snapshot is all there is
    scale = 1 / np.sqrt(np.diag(reduced))
    right = scale * (others.T @ (target - products @ last))
    z = np.linalg.pinv(reduced * scale * scale[:, None], rcond=1e-13, hermitian=True) @ right
    x = last + others @ (scale * z)
    norm = inner_product(wanted, wanted)
    left = norm - 2 * x @ target + x @ products @ x
    return x, float(np.sqrt(max(left, 0) / norm))


def snapshots(run: Path) -> list[Checkpoint]:
    """The whole snapshots of a run, by step."""
    return sorted((open_checkpoint(folder) for folder in _folders(run)), key=lambda found: found.step)


def delete_later_snapshots(run: Path, step: int) -> None:
    """Remove what a run that is continued from `step` will write again."""
    for folder in _folders(run):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)


def reconstruct(run: Path, width: float, step: int | None, out: Path | None) -> Path:
    """Write a checkpoint with the average of relative width `width` at `step` (None: the newest snapshot's).

    `out` (None: RUN/power_WIDTH_STEP) becomes a folder like a run's, sampled and evaluated as any; it
    cannot be continued.

    Raises:
        ValueError: no snapshots, a step without one, a width out of range, or `out` is there already.
    """
    gamma = exponent(width)
    found = snapshots(run)
    if not found:
        raise ValueError(f"{run} has no snapshots: train with train.ema_widths=[0.05,0.1]")
    steps = [snapshot.step for snapshot in found]
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise ValueError(f"{run} has no snapshot of step {wanted}; it has {', '.join(map(str, steps))}")
    out = run / f"{power_name(width)}_{wanted}" if out is None else out
    if out.exists():
        raise ValueError(f"{out} is there already; choose another --out")
    found = [snapshot for snapshot in found if snapshot.step <= wanted]
    sources = [(snapshot, name) for snapshot in found for name in snapshot.networks]
    known = [(exponent(float(name.removeprefix("power_"))), snapshot.step) for snapshot, name in sources]
    x, error = coefficients(known, (gamma, wanted))
    runtime.say(f"{len(known)} snapshots; the wanted profile is met to {error:.1e} of its norm")
    return _write(out, found[-1], power_name(width), combine(sources, x), error)


def combine(sources: Sequence[tuple[Checkpoint, str]], x: np.ndarray) -> dict[str, Tensor]:
    """The weighted sum of the named weights in checkpoints, float32, summed in float64."""
    total: dict[str, Tensor] = {}
    for (snapshot, name), weight in zip(sources, x.tolist(), strict=True):
        for key, tensor in snapshot.tensors(f"{name}/{WEIGHTS}").items():
            part = weight * tensor.double()
            total[key] = total[key] + part if key in total else part
    return {key: tensor.float() for key, tensor in total.items()}


def _write(out: Path, like: Checkpoint, name: str, state: dict[str, Tensor], error: float) -> Path:
    made = {key: value for key, value in like.record.items() if key not in ("format", "versions", "files")}
    step = made.pop("step")
    network = like.load_network(like.networks[0])
    return save_checkpoint(
        out / "checkpoints",
        step,
        network,
        {name: state},
        None,
        (like.folder / "config.yaml").read_text("utf-8"),
        made | {"command": runtime.command_line(), "profile_error": error},
    )


def _folders(run: Path) -> list[Path]:
    found = (run / "snapshots").glob("step_*")
    return [path for path in found if re.fullmatch(r"step_\d+", path.name)]
