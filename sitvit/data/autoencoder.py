"""Pixels to latents and back: a diffusers `AutoencoderKL` or `AutoencoderTiny`, or the pixels themselves.

    images   uint8 (B, H, W, 3)              on disk
    pixels   float (B, 3, H, W) in [-1, 1]   what the autoencoder sees
    moments  float (B, 2C, h, w)             mean and log-variance of the posterior: what is cached
             float (B, C, h, w)              the mean alone, where there is no posterior: a point mass
    latents  float (B, C, h, w)              what the network sees:
             ((mean + std * noise - shift) * scale - channel_mean) / channel_std

Scale, shift, channels and the factor H / h come from the autoencoder's configuration; a cache may add the
mean and spread of each channel. They are applied here and nowhere else.
"""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .demo import ASSETS

EMBEDDED_AUTOENCODERS = {"fashion-autoencoder": ASSETS / "fashion-autoencoder"}
"""Autoencoders that ship with the package: name -> folder."""

PIXELS = "pixels"
"""The name that stands for no autoencoder: the latents are the pixels."""

KINDS = ("AutoencoderKL", "AutoencoderTiny")


@dataclass(frozen=True)
class AutoencoderIdentity:
    """Which autoencoder made a set of latents: enough to find it again and to refuse another."""

    name: str
    sha256: str
    scaling_factor: float
    shift_factor: float
    latent_channels: int
    downsampling: int
    channel_mean: list[float] | None = None
    channel_std: list[float] | None = None

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

    def scale(self, z: Tensor) -> Tensor:
        """The autoencoder's own latents (B, C, h, w) -> those of the network."""
        latents = (z - self.shift_factor) * self.scaling_factor
        if self.channel_mean is None or self.channel_std is None:
            return latents
        return (latents - _per_channel(self.channel_mean, z)) / _per_channel(self.channel_std, z)

    def unscale(self, latents: Tensor) -> Tensor:
        """The inverse of `scale`."""
        if self.channel_mean is not None and self.channel_std is not None:
            std, mean = _per_channel(self.channel_std, latents), _per_channel(self.channel_mean, latents)
            latents = latents * std + mean
        return latents / self.scaling_factor + self.shift_factor


def _per_channel(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, 1, 1)


class Autoencoder:
    """An autoencoder in evaluation mode and float32, with its scale and shift.

    Args:
        name: an embedded name, a folder, a hub name (OWNER/NAME, or OWNER/NAME/SUBFOLDER), or `pixels`.
        device: where it computes.

    Raises:
        ValueError: nothing loadable under that name.
    """

    def __init__(self, name: str, device: torch.device | str) -> None:
        network = Pixels() if name == PIXELS else _load(str(EMBEDDED_AUTOENCODERS.get(name, name)))
        self.network: Any = network.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self.identity = _identity(str(Path(name).resolve()) if Path(name).is_dir() else name, self.network)

    @classmethod
    def around(
        cls, network: Any, name: str, channel_mean: list[float] | None, channel_std: list[float] | None
    ) -> "Autoencoder":
        """One that is loaded already (None: pixels), turned to float32; its weights are not hashed."""
        made = cls.__new__(cls)
        made.network = Pixels() if network is None else network.float()
        made.device = torch.device("cpu") if network is None else network.device
        identity = _identity(PIXELS if network is None else name, made.network, hashed=False)
        made.identity = replace(identity, channel_mean=channel_mean, channel_std=channel_std)
        return made

    def match(self, expected: AutoencoderIdentity) -> None:
        """Decode latents of `expected`, with its channels' mean and spread; ValueError if it is another."""
        identity = replace(
            self.identity, channel_mean=expected.channel_mean, channel_std=expected.channel_std
        )
        identity.check(expected)
        self.identity = identity

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
        """Pixels (B, 3, H, W) in [-1, 1] -> moments (B, 2C, h, w), or (B, C, h, w) without a posterior."""
        out = self.network.encode(pixels.to(self.device))
        return out.latent_dist.parameters if hasattr(out, "latent_dist") else out.latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) -> pixels (B, 3, H, W), about in [-1, 1]."""
        return self.network.decode(self.identity.unscale(latents.to(self.device).float())).sample


class Pixels(nn.Module):
    """No autoencoder: encode and decode are the identity."""

    def encode(self, pixels: Tensor) -> Any:
        """Pixels as they are, as diffusers' autoencoders without a posterior return latents."""
        return SimpleNamespace(latents=pixels)

    def decode(self, latents: Tensor) -> Any:
        """Latents as they are, as diffusers' autoencoders return pixels."""
        return SimpleNamespace(sample=latents)


def _identity(name: str, network: Any, hashed: bool = True) -> AutoencoderIdentity:
    if isinstance(network, Pixels):
        return AutoencoderIdentity(name, PIXELS, 1.0, 0.0, latent_channels=3, downsampling=1)
    config: Any = network.config
    tiny = type(network).__name__ == "AutoencoderTiny"
    widths = config.encoder_block_out_channels if tiny else config.block_out_channels
    scale, mean = float(config.scaling_factor), getattr(config, "latents_mean", None)
    # Where diffusers' configurations name a mean and spread, they stand for ((z - mean) * scale) / std.
    statistics: dict[str, Any] = {} if mean is None else {
        "channel_mean": [float(value) * scale for value in mean],
        "channel_std": [float(value) for value in config.latents_std],
    }  # fmt: skip
    return AutoencoderIdentity(
        name=name,
        sha256=sha256_of_weights(network) if hashed else "",
        scaling_factor=scale,
        shift_factor=float(getattr(config, "shift_factor", None) or 0.0),
        latent_channels=int(config.latent_channels),
        downsampling=2 ** (len(widths) - 1),
        **statistics,
    )


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
    """A draw of the posterior, scaled: moments (B, 2C or C, h, w) and noise (B, C, h, w) -> latents."""
    moments = moments.float()
    if moments.shape[1] == identity.latent_channels:  # a point mass
        return identity.scale(moments)
    mean, log_variance = moments.chunk(2, dim=1)
    std = torch.exp(0.5 * log_variance.clamp(-30, 20))  # diffusers clamps alike
    return identity.scale(mean + std * noise)


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


def _load(name: str) -> nn.Module:
    """A folder, or OWNER/NAME[/SUBFOLDER] of the hub, by the class that its configuration names."""
    import diffusers

    config = Path(name, "config.json")
    if Path(name).is_dir() and not config.is_file():
        raise ValueError(f"{name} is not an autoencoder folder: it has no config.json")
    parts = name.split("/")
    place = {} if Path(name).is_dir() or len(parts) < 3 else {"subfolder": "/".join(parts[2:])}
    where = "/".join(parts[:2]) if place else name
    try:
        offline = {"local_files_only": not Path(name).is_dir() and _is_cached(where, place)}
        if not Path(name).is_dir() and not offline["local_files_only"]:
            _reach(where)
        kind = diffusers.AutoencoderKL.load_config(where, **place, **offline).get("_class_name")
        if kind in KINDS:
            cls = getattr(diffusers, kind)
            return cls.from_pretrained(where, use_safetensors=True, **place, **offline)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"cannot load the autoencoder {name} ({reason}). {_how_to_get(name)}; embedded: "
            f"{', '.join(EMBEDDED_AUTOENCODERS)}; {PIXELS}: none"
        ) from None
    raise ValueError(f"{config} describes {kind}; needed is one of {', '.join(KINDS)}")


def _is_cached(repository: str, place: dict[str, str]) -> bool:
    """Whether the hub's cache on this machine has both files, so that no network is asked."""
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "diffusion_pytorch_model.safetensors")
    paths = ["/".join([*place.values(), name]) for name in names]
    return all(isinstance(try_to_load_from_cache(repository, path), str) for path in paths)


def _reach(repository: str) -> None:
    """Ask the hub once, as what loads tries again for half a minute; ValueError with the reason."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(repository, timeout=10)
    except Exception as error:  # of whatever carries the request, which differs between versions
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"no such folder here, and the hub answers: {reason[0]}") from None


def _how_to_get(name: str) -> str:
    files = "config.json and diffusion_pytorch_model.safetensors"
    if Path(name).exists() or name.count("/") not in (1, 2):
        return f"Give a folder that holds {files}, or a hub name"
    return (
        f"Where there is a network, fetch {files} of https://huggingface.co/{name}, put them into a folder "
        "here, and give that folder"
    )
