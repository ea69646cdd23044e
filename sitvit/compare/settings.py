"""The schema of a comparison, and the arms that it names. Imports no torch.

    out: runs/compare/demo
    arms:                       a line an arm: its name, its experiment file, then overrides
      - vanilla configs/demo_sit.yaml
      - vit5 configs/demo_sit_vit5.yaml train.lr=1e-3
    seeds: [0, 1, 2]            arms with one seed see the same images, noise, times, labels
    steps: [300, 600, 900]      where the runs are evaluated; they end at the last
    preset: sit-sde             and `evaluation`, overrides of it: the one protocol
    cfg_scales: [1.0, 1.5]      1 is unguided; the others are tried at the last step

Files are named as on the command line, from where the command is started.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from ..config import Config, load_config
from ..eval.settings import EvaluationConfig, preset_path

AGAINST = ("first", "previous", "pairs")
SET_HERE = ("run", "train.seed", "train.num_steps", "train.keep_every")
MEASURED_HERE = ("samples", "checkpoint", "step", "out", "seed", "cfg_scale")
"""Keys of an arm and of `evaluation` that follow from out, seeds, steps and cfg_scales."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: an experiment file with overrides."""

    name: str
    config: Path
    overrides: list[str]


@dataclass(frozen=True)
class Reference:
    """A number that others published: drawn beside ours, never counted in."""

    arm: str
    step: int
    cfg_scale: float
    value: float
    source: str


@dataclass
class ComparisonConfig:
    """What is compared, and how it is measured."""

    out: str = MISSING
    arms: list[str] = MISSING
    against: str = "first"  # each arm against the first; the previous: a ladder; pairs: 2nd - 1st, 4th - 3rd
    seeds: list[int] = field(default_factory=lambda: [0])
    steps: list[int] = MISSING
    overrides: list[str] = field(default_factory=list)  # of every arm; an arm's own go before them
    preset: str | None = None
    evaluation: list[str] = field(default_factory=list)
    cfg_scales: list[float] = field(default_factory=lambda: [1.0])
    grid_images: int = 40
    references: list[str] = field(default_factory=list)  # ARM STEP CFG VALUE SOURCE

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        if MISSING in (self.arms, self.steps):
            return []
        names = [text.split()[0] if text.split() else "" for text in self.arms]
        scales = self.cfg_scales
        rules = [
            ("arms must be two or more", len(names) >= 2),
            ("each arm must be `NAME FILE key=value ...`", all(len(a.split()) >= 2 for a in self.arms)),
            ("arms must have different names of letters, digits, _ . + and -", _are_names(names)),
            (f"against must be one of {', '.join(AGAINST)}", self.against in AGAINST),
            ("pairs need an even number of arms", self.against != "pairs" or len(names) % 2 == 0),
            ("seeds must be different numbers from 0", _rises(sorted(self.seeds), 0)),
            ("steps must rise from 1", _rises(self.steps, 1)),
            ("cfg_scales must begin with 1 (unguided) and rise", scales[:1] == [1] and _rises(scales, 1)),
            ("grid_images must be at least 1", self.grid_images >= 1),
        ]
        told = [sentence for sentence, right in rules if not right]
        for word in [*self.overrides, *(word for text in self.arms for word in text.split()[2:])]:
            told += _set_here(word, SET_HERE, "an arm")
        for word in self.evaluation:
            told += _set_here(word, MEASURED_HERE, "evaluation")
        return told + [p for text in self.references for p in _reference_problems(text, names)]

    def parsed_arms(self) -> list[Arm]:
        """The arms, in order."""
        words = [text.split() for text in self.arms]
        return [Arm(name, Path(file), overrides) for name, file, *overrides in words]

    def pairs(self) -> list[tuple[str, str]]:
        """(against, arm) of each difference."""
        names = [arm.name for arm in self.parsed_arms()]
        if self.against == "pairs":
            return list(zip(names[::2], names[1::2], strict=True))
        before = names[:-1] if self.against == "previous" else [names[0]] * (len(names) - 1)
        return list(zip(before, names[1:], strict=True))

    def cost_against(self, arm: str) -> str:
        """Which arm's cost `arm`'s is held against: the first, or the first of its pair."""
        names = [each.name for each in self.parsed_arms()]
        return names[names.index(arm) // 2 * 2] if self.against == "pairs" else names[0]

    def parsed_references(self) -> list[Reference]:
        """The published numbers."""
        return [_reference(text) for text in self.references]

    def run_config(self, arm: Arm, seed: int) -> Config:
        """The experiment of one run; its checkpoints at the evaluated steps are kept.

        Raises:
            ValueError: an arm's file or an override that does not fit.
        """
        every = math.gcd(*self.steps)
        shape = [f"run={self.out}/{arm.name}/seed_{seed}", f"train.seed={seed}"]
        shape += [f"train.num_steps={self.steps[-1]}"]
        config = load_config(arm.config, [*self.overrides, *arm.overrides, *shape], Config)
        config.train.keep_every = every
        config.train.save_every = math.gcd(every, config.train.save_every)
        return config

    def evaluation_config(self, run: str, step: int, seed: int, cfg_scale: float) -> EvaluationConfig:
        """The measurement of one checkpoint; `seed` makes the samples of both arms start from one noise.

        Raises:
            ValueError: a protocol that does not fit.
        """
        name = f"step_{step}_cfg_{cfg_scale:g}"
        given = [
            f"checkpoint={run}/checkpoints/step_{step:07d}",
            f"out={run}/evaluations/{name}.json",
            f"seed={seed}",
            f"cfg_scale={cfg_scale}",
        ]
        path = preset_path(self.preset) if self.preset else None
        return load_config(path, [*self.evaluation, *given], EvaluationConfig)


def _set_here(word: str, keys: tuple[str, ...], where: str) -> list[str]:
    key = word.split("=")[0].strip()
    if key not in keys:
        return []
    return [
        f"{where} cannot set {key}, which follows from out, seeds, steps and cfg_scales; leave out {word!r}"
    ]


def _are_names(names: list[str]) -> bool:
    return len(set(names)) == len(names) and all(_NAME.fullmatch(name) for name in names)


def _rises(values: list[int] | list[float], least: float) -> bool:
    if not values:
        return False
    return values[0] >= least and all(a < b for a, b in itertools.pairwise(values))


def _reference(text: str) -> Reference:
    arm, step, cfg_scale, value, source = text.split(maxsplit=4)
    return Reference(arm, int(step), float(cfg_scale), float(value), source)


def _reference_problems(text: str, names: list[str]) -> list[str]:
    try:
        if _reference(text).arm in names:
            return []
    except ValueError:
        pass
    return [f"each of references must be `ARM STEP CFG VALUE SOURCE`, got {text!r}"]
