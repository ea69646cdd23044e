"""What a comparison will take: GPU-hours and disk, from the networks' geometry. See `train.plan`.

    training     steps x batch x training FLOP an image
    evaluation   images x network calls (twice, guided) x forward FLOP an image

An adaptive method chooses its calls; its images are counted at `ADAPTIVE_CALLS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..train.plan import PEAK_FLOPS, UTILISATION, plan
from .cells import Cell

ADAPTIVE_CALLS = 250


@dataclass(frozen=True)
class Budget:
    """FLOP of training and of evaluating, bytes left on the disk."""

    training_flop: float
    evaluation_flop: float
    disk_bytes: int

    @property
    def gpu_hours(self) -> float:
        """Hours of one H100 at the utilisation of `train.plan`."""
        return (self.training_flop + self.evaluation_flop) / (UTILISATION * PEAK_FLOPS) / 3600

    def text(self) -> str:
        """One line."""
        return (
            f"{self.gpu_hours:,.1f} H100-hours at {UTILISATION:.0%} of bf16 peak ({self.training_flop:.3g} "
            f"FLOP of training, {self.evaluation_flop:.3g} of evaluation), {self.disk_bytes / 1e9:,.1f} GB"
        )


def budget(cells: Sequence[Cell]) -> Budget:
    """What `cells` take, from nothing."""
    training = evaluating = 0.0
    disk = 0
    for cell in cells:
        planned = plan(cell.run, 1)
        if cell.kind == "train":
            training += planned.training_flop
            disk += planned.num_checkpoints * planned.checkpoint_bytes
        elif cell.evaluation is not None:
            calls = _calls(cell) * (1 if cell.cfg_scale == 1 else 2)
            evaluating += cell.evaluation.num_images * calls * planned.geometry.forward_flops
    return Budget(training, evaluating, disk)


def _calls(cell: Cell) -> int:
    from ..flow.samplers import find_sampler

    assert cell.evaluation is not None
    name = cell.evaluation.sampler or ("dit" if cell.run.train.path == "ddpm" else "heun")
    sampler = find_sampler(name, cell.evaluation.sampler_parts())
    return sampler.num_evaluations or ADAPTIVE_CALLS
