"""Pixels to latents and back, through a diffusers `AutoencoderKL`.

    images   uint8 (B, H, W, 3)              on disk
    pixels   float (B, 3, H, W) in [-1, 1]   what the autoencoder sees
    moments  float (B, 2C, h, w)             mean and log-variance of the posterior: what is cached
    latents  float (B, C, h, w)              (mean + std * noise - shift) * scale: what the network sees

Scale, shift, channels and the factor H / h come from the autoencoder's configuration and are applied
here and nowhere else.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..runtime import read_record
from .demo import ASSETS

EMBEDDED_AUTOENCODERS = {"fashion-autoencoder": ASSETS / "fashion-autoencoder"}
"""Autoencoders that ship with the package: name -> folder."""


@dataclass(frozen=True)
class AutoencoderIdentity:
    """Which autoencoder made a set of latents: enough to find it again and to refuse another."""

    name: str
    sha256: str
    scaling_factor: float
    shift_factor: float
    latent_channels: int
    downsampling: int

    def check(self, expected: "AutoencoderIdentity") -> None:
        """ValueError naming each value in which `self` is not the `expected` autoencoder."""
        found, wanted = asdict(self), asdict(expected)
        for values in (found, wanted):
            del values["name"]  # one autoencoder may lie in two folders
        wrong = [f"{key} {found[key]}, expected {wanted[key]}" for key in found if found[key] != wanted[key]]
        if wrong:
            raise ValueError(
                f"autoencoder {self.name} is not the one that made the latents: {'; '.join(wrong)}"
            )


class Autoencoder:
    """An `AutoencoderKL` in evaluation mode and float32, with its scale and shift.

    Args:
        name: an embedded name, a folder, or a hub name.
        device: where it computes.

    Raises:
        ValueError: nothing loadable under that name, or one without moments.
    """

    def __init__(self, name: str, device: torch.device | str) -> None:
        folder = EMBEDDED_AUTOENCODERS.get(name, name)
        self.network: Any = _load(str(folder)).to(device).eval().requires_grad_(False)
        config: Any = self.network.config
        self.device = torch.device(device)
        self.identity = AutoencoderIdentity(
            name=str(Path(name).resolve()) if Path(name).is_dir() else name,
            sha256=sha256_of_weights(self.network),
            scaling_factor=float(config.scaling_factor),
            shift_factor=float(getattr(config, "shift_factor", None) or 0.0),
            latent_channels=int(config.latent_channels),
            downsampling=2 ** (len(config.block_out_channels) - 1),
        )

    def latent_size(self, image_size: int) -> int:
        """Latent height of images of `image_size` pixels; ValueError where it is not whole."""
        factor = self.identity.downsampling
        if image_size < factor or image_size % factor:
            lower = max(image_size // factor, 1) * factor
            raise ValueError(
                f"image size {image_size} does not fit autoencoder {self.identity.name}, which needs "
                f"a multiple of {factor}; the nearest are {lower} and {lower + factor}"
            )
        return image_size // factor

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) in [-1, 1] -> moments (B, 2C, h, w)."""
        return self.network.encode(pixels.to(self.device)).latent_dist.parameters

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) -> pixels (B, 3, H, W), about in [-1, 1]."""
        z = latents.to(self.device).float() / self.identity.scaling_factor
        return self.network.decode(z + self.identity.shift_factor).sample


def new_autoencoder(
    image_size: int,
    block_out_channels: list[int],
    latent_channels: int,
    norm_num_groups: int,
    seed: int,
) -> Any:
    """An `AutoencoderKL` with seeded random weights, one ResNet block a level."""
    from diffusers import AutoencoderKL

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * len(block_out_channels),
            up_block_types=("UpDecoderBlock2D",) * len(block_out_channels),
            block_out_channels=tuple(block_out_channels),
            latent_channels=latent_channels,
            norm_num_groups=norm_num_groups,
            sample_size=image_size,
        )


def latents_of_moments(moments: Tensor, noise: Tensor, identity: AutoencoderIdentity) -> Tensor:
    """A draw of the posterior, scaled: moments (B, 2C, h, w) and noise (B, C, h, w) -> latents."""
    mean, log_variance = moments.float().chunk(2, dim=1)
    std = torch.exp(0.5 * log_variance.clamp(-30, 20))  # diffusers clamps alike
    return (mean + std * noise - identity.shift_factor) * identity.scaling_factor


def images_to_pixels(images: Tensor) -> Tensor:
    """uint8 (B, H, W, 3) -> float (B, 3, H, W) in [-1, 1]."""
    return rearrange(images, "b h w c -> b c h w").float() / 127.5 - 1


def pixels_to_images(pixels: Tensor) -> Tensor:
    """Float (B, 3, H, W) -> uint8 (B, H, W, 3): clamp(127.5 x + 128, 0, 255), truncated, as SiT."""
    images = (127.5 * pixels + 128).clamp(0, 255).to(torch.uint8)
    return rearrange(images, "b c h w -> b h w c")


def sha256_of_weights(module: nn.Module) -> str:
    """Hash of the names, types, shapes and values of a module's state, wherever it lies."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _load(folder: str) -> nn.Module:
    from diffusers import AutoencoderKL

    config = Path(folder, "config.json")
    if Path(folder).is_dir():
        if not config.is_file():
            raise ValueError(f"{folder} is not an autoencoder folder: it has no config.json")
        kind = read_record(config, ["_class_name"])["_class_name"]
        if kind != "AutoencoderKL":
            raise ValueError(f"{config} describes {kind}; an AutoencoderKL is needed")
    try:
        return AutoencoderKL.from_pretrained(folder, use_safetensors=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"cannot load the autoencoder {folder} ({reason}); give a folder that holds its config.json "
            "and safetensors, or a hub name that this machine can reach; embedded: "
            f"{', '.join(EMBEDDED_AUTOENCODERS)}"
        ) from None
