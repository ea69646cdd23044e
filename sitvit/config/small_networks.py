"""The schemas of the two small networks that ship with sitvit: the demo's autoencoder and classifier."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from .checks import below


@dataclass
class AutoencoderConfig:
    """A small `AutoencoderKL`; each block but the last halves height and width."""

    images: str = MISSING  # as --images of scripts/encode_latents.py
    held_out: str = MISSING  # images that it is not trained on, for the reported PSNR
    out: str = MISSING  # the folder to write
    image_size: int = 32
    block_out_channels: list[int] = field(default_factory=lambda: [16, 32, 32])
    norm_num_groups: int = 8
    latent_channels: int = 4
    kl_weight: float = 1e-4
    seed: int = 0
    num_steps: int = MISSING
    batch_size: int = 64
    lr: float = 2e-3

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        names = ("image_size", "norm_num_groups", "latent_channels", "num_steps", "batch_size")
        problems = below(self, "", {**dict.fromkeys(names, 1), "seed": 0, "kl_weight": 0, "lr": 0})
        problems += _held_out(self)
        factor = 2 ** max(len(self.block_out_channels) - 1, 0)
        if self.image_size % factor:
            problems.append(f"image_size must be a multiple of {factor}, got {self.image_size}")
        if not self.block_out_channels or any(
            width < 1 or width % self.norm_num_groups for width in self.block_out_channels
        ):
            problems.append(
                f"block_out_channels must be multiples of norm_num_groups {self.norm_num_groups}, "
                f"got {self.block_out_channels}"
            )
        return problems


@dataclass
class ClassifierConfig:
    """A small convolutional classifier, whose features FD-fashion compares."""

    images: str = MISSING
    held_out: str = MISSING  # images that it is not trained on, for the reported accuracy
    out: str = MISSING  # the folder to write
    widths: list[int] = field(default_factory=lambda: [16, 32, 64])
    seed: int = 0
    num_steps: int = MISSING
    batch_size: int = 128
    lr: float = 3e-3

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        problems = below(self, "", {"num_steps": 1, "batch_size": 1, "seed": 0, "lr": 0})
        if not 1 <= len(self.widths) <= 5 or min(self.widths) < 1:
            problems.append(f"widths must be one to five numbers from 1, got {self.widths}")
        return problems + _held_out(self)


def _held_out(config: AutoencoderConfig | ClassifierConfig) -> list[str]:
    same = config.images == config.held_out
    return ["held_out must be other images than images are"] if same else []
