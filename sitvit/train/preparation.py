"""What a run is made of, from its experiment file: latents, network, objective, times."""

from pathlib import Path

import torch

from .. import runtime
from ..config import Config, TrainConfig
from ..data.latents import LatentCache, Latents
from ..data.live import LiveLatents
from ..flow.intervals import training_interval
from ..flow.objective import DiffusionObjective, Objective
from ..flow.paths import find_path
from ..flow.times import TimeDistribution
from ..models.dit import DiT
from ..models.sit import SiT
from .step import Loss

Network = SiT | DiT

VERIFIED_BYTES = 1 << 30
"""Latents up to this size are read once and compared with their checksums before the first step."""


def open_latents(config: Config) -> Latents:
    """The latents that `config` names: a cache, or images with an autoencoder on this process's device."""
    data = config.data
    if data.latents is None:
        assert data.images is not None
        assert data.autoencoder is not None
        assert data.image_size is not None
        device = runtime.processes().device
        return LiveLatents(data.images, data.autoencoder, data.image_size, device)
    cache = LatentCache(Path(data.latents))
    if cache.num_bytes <= VERIFIED_BYTES:
        cache.verify()
    return cache


def build_network(config: Config, cache: Latents) -> Network:
    """The network of `config` with its seeded first weights; latent shape and classes from `cache`."""
    arguments = config.model_arguments()
    num_classes = arguments.setdefault("num_classes", len(cache.class_names))
    if num_classes < len(cache.class_names):
        raise ValueError(
            f"model.num_classes is {num_classes}, but {cache.where} has {len(cache.class_names)} "
            "classes; leave it out to take that"
        )
    if num_classes > len(cache.class_names):
        runtime.say(
            f"model.num_classes is {num_classes}, but {cache.where} has only "
            f"{len(cache.class_names)} classes: the rest stay untrained"
        )
    unit = cache.autoencoder.downsampling * arguments["patch_size"]
    if cache.image_size % unit:
        lower = cache.image_size // unit * unit
        raise ValueError(
            f"image size {cache.image_size} does not fit {config.model.name}: it needs a multiple of {unit} "
            f"(autoencoder {cache.autoencoder.downsampling} x patch {arguments['patch_size']}); the nearest "
            f"are {max(lower, unit)} and {lower + unit}"
        )
    channels, height, width = cache.latent_shape
    with torch.random.fork_rng():
        torch.manual_seed(config.train.seed)
        family = DiT if config.model.name.startswith("DiT-") else SiT
        return family(input_size=(height, width), in_channels=channels, **arguments)


def objective_and_times(settings: TrainConfig) -> tuple[Loss, TimeDistribution]:
    """What is minimised, and how training times are drawn: from where it allows, unless that is given."""
    if settings.path == "ddpm":
        return DiffusionObjective(), TimeDistribution()
    objective = Objective(find_path(settings.path), settings.prediction, settings.loss_weight)
    interval = training_interval(objective.path, objective.prediction, objective.weight)
    if settings.time_interval is not None:
        interval = (settings.time_interval[0], settings.time_interval[1])
    return objective, TimeDistribution(
        settings.time_distribution, settings.time_mean, settings.time_std, settings.time_shift, interval
    )
