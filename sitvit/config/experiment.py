"""The schema of an experiment: one run of one network. Every key, its default, and what is legal.

A default that is a number is SiT's recipe (arXiv 2401.08740).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ..flow.names import PATH_NAMES, PREDICTIONS, TIME_DISTRIBUTIONS, WEIGHTS
from ..models.presets import preset
from .checks import Rule, below, broken, one_of

TRACKERS = ("tensorboard", "wandb", "trackio")
MAX_WIDTH = 0.28  # of a power-function average; the plain mean has 0.2887


@dataclass
class ModelConfig:
    """`name` is a preset; every other key, where given, overrides the preset's value."""

    name: str = MISSING
    patch_size: int = MISSING
    hidden_size: int = MISSING
    depth: int = MISSING
    num_heads: int = MISSING
    mlp_ratio: float = MISSING
    num_classes: int = MISSING  # as many as the latents have, unless given
    class_dropout_prob: float = 0.1
    norm: str = MISSING
    norm_affine: bool = MISSING
    qkv_bias: bool = MISSING
    qk_norm: bool = MISSING
    rope: bool = MISSING
    positions: str = MISSING
    num_registers: int = MISSING
    layer_scale_init: float | None = MISSING
    mlp: str = MISSING

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        sizes = ("patch_size", "hidden_size", "depth", "num_heads", "num_classes")
        problems = below(self, "model.", dict.fromkeys(sizes, 1))
        rules: list[Rule] = [
            (f"model.{name}", value, value in (MISSING, None) or 0 < value < math.inf, "above 0")
            for name in ("mlp_ratio", "layer_scale_init")
            for value in [getattr(self, name)]
        ]
        dropout = self.class_dropout_prob
        rules.append(("model.class_dropout_prob", dropout, 0 <= dropout < 1, "from 0 to below 1"))
        problems += broken(rules)
        try:
            preset(self.name)
        except ValueError as error:
            problems.append(f"model.name: {error}")
        return problems


@dataclass
class DataConfig:
    """What the network is trained on: `latents`, or `images` that an autoencoder encodes at each step."""

    latents: str | None = None  # a folder made by scripts/encode_latents.py
    images: str | None = None  # as --images of scripts/encode_latents.py
    autoencoder: str | None = None  # as --autoencoder there
    image_size: int | None = None
    flip: bool = False  # mirror half of the images

    def problems(self) -> list[str]:
        """A sentence where both, or only a part of the second, are given."""
        live = {"images": self.images, "autoencoder": self.autoencoder, "image_size": self.image_size}
        given = [f"data.{key}" for key, value in live.items() if value is not None]
        absent = [f"data.{key}" for key, value in live.items() if value is None]
        if self.latents is not None and given:
            return [f"data.latents has its own images and autoencoder; leave out {', '.join(given)}"]
        if self.latents is None and given and absent:
            return [f"training from data.images needs {', '.join(absent)} too"]
        return []


@dataclass
class TrainConfig:
    """How it is trained; steps are optimizer steps. The defaults are SiT's recipe (arXiv 2401.08740)."""

    seed: int = 0
    init_from: str | None = None  # a run, a network or a ViT-5 classifier that a new run starts from
    freeze: list[str] = field(default_factory=list)  # parameters that are not trained, as ["blocks.0.*"]
    num_steps: int = MISSING
    batch_size: int = 256  # over all processes
    path: str = "linear"  # or gvp, vp; ddpm: DiT's discrete diffusion, for a DiT
    prediction: str = "velocity"  # or noise, score, data
    loss_weight: str = "none"  # or velocity, likelihood
    time_distribution: str = "uniform"  # or logit_normal, of time_mean and time_std
    time_mean: float = 0.0
    time_std: float = 1.0
    time_shift: float = 1.0  # above 1: more time in the noise
    time_interval: list[float] | None = None  # [t_min, t_max]; null: as path and prediction allow
    lr: float = 1e-4
    beta_1: float = 0.9
    beta_2: float = 0.999
    weight_decay: float = 0.0
    warmup_steps: int = 0  # linear from zero
    decay: str = "linear"  # to zero over the last decay_steps, or so by cosine; or inverse_sqrt from there on
    decay_steps: int = 0  # 0: the rate stays
    clip_grad_norm: float | None = None
    micro_batch_size: int | None = None  # images that a process takes at once; null: its whole share
    precision: str = "fp32"  # or bf16: autocast, weights and what needs it stay float32
    tf32: bool = True  # on CUDA: float32 matrices are multiplied with 10 bits of mantissa, as SiT's were
    gradient_checkpointing: bool = False  # blocks are computed again in the backward pass: less memory
    compile: str = "none"  # or block (one compilation serves all blocks), whole
    # Averages of the weights: one for each decay, and for each relative width of a power function, whose
    # snapshots scripts/reconstruct_average.py makes averages of any width of.
    ema_decays: list[float] = field(default_factory=lambda: [0.9999])
    ema_widths: list[float] = field(default_factory=list)  # as [0.05, 0.1]
    snapshot_every: int = 10_000
    on_nonfinite: str = "stop"  # or skip the step, or rollback to the last checkpoint and take other images
    max_nonfinite: int = 10  # so often in a run, then stop
    log_every: int = 100
    trackers: list[str] | None = None  # of TRACKERS, beside metrics.jsonl; null: tensorboard where installed
    statistics_every: int = 0  # steps between rows with attention, gates and gammas of each block; 0: none
    preview_every: int = 0  # steps between grids of images in RUN/previews; 0: none
    evaluate_every: int = 0  # steps between evaluations of the first average; 0: none
    evaluate_images: int = 10_000  # made for each
    evaluate_reference: str | None = None  # as --reference of scripts/evaluate.py; null: the training images
    save_every: int = 10_000
    keep_checkpoints: int = 2  # the newest
    keep_every: int | None = None  # and those at a multiple of so many steps

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        counts = ("num_steps", "batch_size", "log_every", "save_every", "snapshot_every", "keep_checkpoints")
        lowest = dict.fromkeys(counts, 1)
        lowest |= dict.fromkeys(("seed", "weight_decay", "warmup_steps", "decay_steps", "max_nonfinite"), 0)
        lowest |= dict.fromkeys(("preview_every", "evaluate_every", "statistics_every"), 0) | {
            "evaluate_images": 2
        }
        return below(self, "train.", lowest) + broken(self._optimizer_rules() + self._objective_rules())

    def _optimizer_rules(self) -> list[Rule]:
        clip, micro = self.clip_grad_norm, self.micro_batch_size
        ramps = self.warmup_steps + (0 if self.decay == "inverse_sqrt" else self.decay_steps)
        rules: list[Rule] = [
            (f"train.{name}", value, 0 <= value < 1, "from 0 to below 1")
            for name, value in (("beta_1", self.beta_1), ("beta_2", self.beta_2))
        ]
        decays, powers, trackers = self.ema_decays, self.ema_widths, self.trackers or []
        return [
            *rules,
            (
                "train.trackers",
                trackers,
                len(set(trackers)) == len(trackers) and set(trackers) <= set(TRACKERS),
                f"different names of {', '.join(TRACKERS)}, or null",
            ),
            (
                "train.keep_every",
                self.keep_every,
                self.keep_every is None or self.keep_every > 0,
                "above 0, or null",
            ),
            *(
                (
                    f"train.{name}",
                    every,
                    self.log_every < 1 or every % self.log_every == 0,
                    f"a multiple of train.log_every = {self.log_every}, whose rows hold its numbers",
                )
                for name in ("evaluate_every", "statistics_every")
                for every in [getattr(self, name)]
            ),
            ("train.seed", self.seed, self.seed < 2**63, "below 2^63"),
            ("train.lr", self.lr, 0 < self.lr < math.inf, "above 0"),
            ("train.clip_grad_norm", clip, clip is None or clip > 0, "above 0, or null"),
            (
                "train.ema_decays",
                decays,
                len(set(decays)) == len(decays) > 0 and all(0 <= decay < 1 for decay in decays),
                "different numbers from 0 to below 1, one at least",
            ),
            (
                "train.ema_widths",
                powers,
                len(set(powers)) == len(powers) and all(0 < width <= MAX_WIDTH for width in powers),
                f"different numbers above 0, at most {MAX_WIDTH}",
            ),
            (
                "train.micro_batch_size",
                micro,
                micro is None or (micro > 0 and self.batch_size % micro == 0),
                f"null or a number that divides train.batch_size = {self.batch_size}",
            ),
            (
                "train.decay_steps",
                self.decay_steps,
                self.decay != "inverse_sqrt" or self.decay_steps > 0,
                "above 0 with train.decay=inverse_sqrt",
            ),
            (
                "train.warmup_steps + train.decay_steps",
                ramps,
                ramps <= self.num_steps,
                f"at most train.num_steps = {self.num_steps}",
            ),
            *one_of(
                self,
                "train.",
                {
                    "decay": ("linear", "cosine", "inverse_sqrt"),
                    "precision": ("fp32", "bf16"),
                    "compile": ("none", "block", "whole"),
                    "on_nonfinite": ("stop", "skip", "rollback"),
                },
            ),
        ]

    def _objective_rules(self) -> list[Rule]:
        interval = self.time_interval
        if self.path == "ddpm":
            fixed = {"prediction": "noise", "loss_weight": "none", "time_distribution": "uniform"}
            fixed_times: dict[str, Any] = {"time_shift": 1.0, "time_interval": None}
            return [
                (
                    f"train.{name}",
                    getattr(self, name),
                    getattr(self, name) == value,
                    f"{value} with path ddpm",
                )
                for name, value in (fixed | fixed_times).items()
            ]
        return [
            ("train.time_std", self.time_std, 0 < self.time_std < math.inf, "above 0"),
            ("train.time_shift", self.time_shift, 0 < self.time_shift < math.inf, "above 0"),
            ("train.time_mean", self.time_mean, math.isfinite(self.time_mean), "a finite number"),
            (
                "train.time_interval",
                interval,
                interval is None or (len(interval) == 2 and 0 <= interval[0] < interval[1] <= 1),
                "two times [t_min, t_max] with 0 <= t_min < t_max <= 1, or null",
            ),
            *one_of(
                self,
                "train.",
                {
                    "path": (*PATH_NAMES, "ddpm"),
                    "prediction": PREDICTIONS,
                    "loss_weight": WEIGHTS,
                    "time_distribution": TIME_DISTRIBUTIONS,
                },
            ),
        ]


@dataclass
class Config:
    """An experiment: one run of one network."""

    run: str = MISSING  # the folder for all that the run makes
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """The resolved values; model keys that are left to the preset are absent."""
        values = dataclasses.asdict(self)
        values["model"] = {k: v for k, v in values["model"].items() if v != MISSING}
        return values

    def model_arguments(self) -> dict[str, Any]:
        """Constructor arguments of the network: the preset's with this file's overrides."""
        overrides = self.to_dict()["model"]
        return {**preset(overrides.pop("name")), **overrides}

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        problems = self.train.problems() + self.model.problems() + self.data.problems()
        is_dit, is_ddpm = self.model.name.startswith("DiT-"), self.train.path == "ddpm"
        if is_dit != is_ddpm and "-" in self.model.name:
            problems.append(
                f"model.name {self.model.name} does not go with train.path {self.train.path}: "
                "a DiT is trained by ddpm, a SiT by the other paths"
            )
        return problems

    def share_problems(self, num_processes: int) -> list[str]:
        """A sentence where `num_processes` cannot share the global batch evenly."""
        size, micro = self.train.batch_size, self.train.micro_batch_size
        unit = num_processes * max(micro or 1, 1)
        if size < 1 or size % unit == 0:
            return []
        lower = size // unit * unit
        parts = "" if micro is None else f" in parts of train.micro_batch_size {micro}"
        nearest = (
            f"nearest that can are {lower} and {lower + unit}" if lower else f"smallest that can is {unit}"
        )
        return [
            f"train.batch_size {size} cannot be split over {num_processes} processes{parts}; the {nearest}"
        ]
