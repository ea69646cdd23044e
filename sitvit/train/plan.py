"""What a run will take, told before it begins: parameters, FLOPs, memory, images, hours, disk.

    FLOP of the run = num_steps x batch_size x training FLOP an image        (`models.geometry`)
    GPU-hours       = FLOP of the run / (UTILISATION x PEAK_FLOPS) / 3600

Imports no torch, so `scripts/train_sit.py --dry-run` answers at once.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from .. import runtime
from ..config import Config
from ..models.geometry import PEAKS, Geometry, geometry
from ..models.memory import Memory, memory
from ..models.shapes import SiTShape
from .disk import as_gb, checkpoint_bytes, nearest_folder, num_for_good, num_kept, snapshot_bytes

PEAK_FLOPS = PEAKS["H100"]
"""FLOP/s that the estimate counts with."""

UTILISATION = 0.25
"""Share of the peak that the estimate assumes: about what the fastest published SiT training reaches."""

PRECISIONS = {"fp32": "float32", "bf16": "bf16"}
"""Names of `models.memory` by those of the experiment file."""

IMAGENET_IMAGES = 1_281_167
ASSUMED = "not there yet; assumed: ImageNet at 256 x 256 in the latents of an SD autoencoder"


@dataclass(frozen=True)
class Latents:
    """What a plan needs to know of the training data."""

    num_images: int
    num_classes: int
    channels: int
    size: tuple[int, int]
    told: str


@dataclass(frozen=True)
class Plan:
    """A run before it begins."""

    config: Config
    latents: Latents
    shape: SiTShape
    num_processes: int
    is_sharded: bool = False

    @property
    def geometry(self) -> Geometry:
        """Tokens, parameters and FLOPs of the network."""
        return geometry(self.shape)

    @property
    def images_seen(self) -> int:
        """Training images, each as often as it is seen."""
        return self.config.train.num_steps * self.config.train.batch_size

    @property
    def training_flop(self) -> float:
        """FLOP of the whole run, forward and backward."""
        return float(self.images_seen) * self.geometry.training_flops

    @property
    def gpu_hours(self) -> float:
        """Hours of one H100 at `UTILISATION`."""
        return self.training_flop / (UTILISATION * PEAK_FLOPS) / 3600

    @property
    def memory(self) -> Memory:
        """Bytes on each device; what is frozen counts as trained."""
        train = self.config.train
        held = memory(
            self.shape,
            self.at_once,
            PRECISIONS[train.precision],
            len(train.ema_decays) + len(train.ema_widths),
            train.gradient_checkpointing,
        )
        if not self.is_sharded:
            return held
        states = {name: getattr(held, name) for name in ("weights", "gradients", "ema", "adamw")}
        return replace(held, **{name: -(-size // self.num_processes) for name, size in states.items()})

    @property
    def at_once(self) -> int:
        """Images that a device takes at once."""
        return self.config.train.micro_batch_size or self.config.train.batch_size // self.num_processes

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: weights and each average in float32, two moments of what is trained."""
        sizes = self.geometry
        return checkpoint_bytes(sizes.parameters.total, sizes.trainable_parameters, self.config.train)

    @property
    def snapshot_bytes(self) -> int:
        """Of all snapshots of the power-function averages."""
        return snapshot_bytes(self.geometry.parameters.total, self.config.train)

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints on the disk at the end, and one more while it is written."""
        return num_kept(self.config.train) + num_for_good(self.config.train)

    def text(self) -> str:
        """The plan, a line a fact."""
        train, sizes, latents = self.config.train, self.geometry, self.latents
        local = train.batch_size // self.num_processes
        place = nearest_folder(Path(self.config.run))
        free = shutil.disk_usage(place).free
        flops, disk = sizes.training_flops, self.checkpoint_bytes
        rows = [
            ("latents", f"{self.config.data.latents or self.config.data.images}: {latents.told}"),
            ("", f"{latents.num_images:,} images, {latents.num_classes:,} classes, {_size(latents)}"),
            ("network", f"{self.config.model.name}, {sizes.tokens:,} tokens"),
            ("parameters", f"{sizes.parameters.total:,}, trained {self._trained()}"),
            ("FLOPs an image", f"forward {sizes.forward_flops / 1e9:,.1f} G, training {flops / 1e9:,.1f} G"),
            ("batch", f"{train.batch_size} = {self.num_processes} process(es) x {local} images"),
            ("steps", f"{train.num_steps:,}, {self.images_seen / latents.num_images:,.1f} epochs"),
            ("images seen", f"{self.images_seen:,}"),
            ("memory a device", f"{self.memory.total / 2**30:,.1f} GiB (sitvit/models/memory.py)"),
            (
                "training",
                f"{self.training_flop:.3g} FLOP, {_hours(self.gpu_hours)} H100-hours at {_assumption()}",
            ),
            ("a checkpoint", as_gb(disk)),
            ("checkpoints", f"{self.num_checkpoints} x that: {as_gb(self.num_checkpoints * disk)}"),
            ("free there", f"{as_gb(free)} on the disk of {place}"),
        ]
        if self.snapshot_bytes:
            rows.insert(-1, ("snapshots", f"{as_gb(self.snapshot_bytes)} (train.ema_widths)"))
        return "\n".join(f"{name:17}{text}" for name, text in rows)

    def _trained(self) -> str:
        """How many parameters; which of them `train.freeze` names is not known without the network."""
        most = f"{self.geometry.trainable_parameters:,}"
        return (
            f"at most {most} (all but train.freeze, which saves memory and disk)"
            if self.config.train.freeze
            else most
        )


def plan(config: Config, num_processes: int) -> Plan:
    """What `config` will take on `num_processes` devices.

    Raises:
        ValueError: a network whose sizes do not fit together or do not fit the latents.
    """
    latents = _latents(config)
    arguments = {"num_classes": latents.num_classes, **config.model_arguments()}
    shape = SiTShape(input_size=latents.size, in_channels=latents.channels, **arguments)
    return Plan(config, latents, shape, num_processes, runtime.shards_weights())


def _latents(config: Config) -> Latents:
    """Of the cache, where it is there; else as assumed."""
    folder = config.data.latents
    if folder is not None and (Path(folder) / "manifest.json").is_file():
        keys = ["num_latents", "class_names", "latent_size", "autoencoder"]
        record = runtime.read_record(Path(folder) / "manifest.json", keys)
        side, channels = record["latent_size"], record["autoencoder"]["latent_channels"]
        name = record["autoencoder"]["name"]
        return Latents(
            record["num_latents"], len(record["class_names"]), channels, (side, side), f"made by {name}"
        )
    side = 32 if config.data.image_size is None else config.data.image_size // 8
    return Latents(IMAGENET_IMAGES, 1000, 4, (side, side), ASSUMED)


def _size(latents: Latents) -> str:
    return " x ".join(map(str, (latents.channels, *latents.size)))


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 1 else f"{hours:.1g}"


def _assumption() -> str:
    return f"{UTILISATION:.0%} of {PEAK_FLOPS / 1e12:,.0f} TFLOP/s"
