"""Which networks are looked at, and the images that they all see.

Images come in an order that follows from the seed alone; image i has its own noise, the same at all times and
for all networks, so that networks are compared on the same x_t. Nothing is mirrored.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..config import Config, load_config
from ..data.autoencoder import latents_of_moments
from ..data.latents import LatentCache, Latents
from ..data.stream import ANALYSIS, generator
from ..generate.trained import Trained, open_trained
from ..train.preparation import open_latents

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Images:
    """The images `ids` of `latents`, in that order."""

    latents: Latents
    ids: np.ndarray
    seed: int

    @property
    def labels(self) -> Tensor:
        """Class of each, (n,) int64."""
        return torch.from_numpy(self.latents.labels[self.ids])

    def pair(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Noise x_0 and latents x_1 of some, (B, C, H, W) each."""
        ids, shape = self.ids[rows], (2, *self.latents.latent_shape)
        draws = [generator(self.seed, ANALYSIS, 1, i).standard_normal(shape, dtype=np.float32) for i in ids]
        posterior_noise, x_0 = torch.from_numpy(np.stack(draws, axis=1))
        moments = self.latents.moments(ids, np.zeros(len(ids), dtype=bool)).cpu()
        return x_0, latents_of_moments(moments, posterior_noise, self.latents.autoencoder)


def choose_images(latents: Latents, num_images: int, seed: int) -> Images:
    """`num_images` of `latents`, all different, in an order that follows from `seed`.

    Raises:
        ValueError: fewer than 4, or more than there are.
    """
    if not 4 <= num_images <= len(latents):
        raise ValueError(
            f"num_images must be from 4 to the {len(latents)} of {latents.where}, got {num_images}"
        )
    draws = generator(seed, ANALYSIS, 0, 0).bit_generator.random_raw(len(latents))
    return Images(latents, np.argsort(draws, kind="stable")[:num_images], seed)


def open_networks(
    places: list[str], weights: str | None, step: int | None, data: Path | None, family: str | None
) -> tuple[dict[str, Trained], Latents]:
    """The networks at `places` by name, and the latents that they are looked at with.

    Those are the ones that they were trained on, or the cache `data`; `weights`, `step` and `family` are
    those of `open_trained`.

    Raises:
        ValueError: nothing loadable at a place, one place twice, latents that are gone, differ between the
            networks, or do not fit one.
    """
    given = LatentCache(data) if data is not None else None
    identity = None if given is None else given.autoencoder
    found = [open_trained(place, weights, step, family=family, latents_of=identity) for place in places]
    latents = given or _common_latents(found)
    for trained in found:
        _check_fit(trained, latents)
    names = names_of([[*Path(trained.where).parts, trained.weights] for trained in found])
    return dict(zip(names, found, strict=True)), latents


def names_of(places: list[list[str]]) -> list[str]:
    """What tells places apart: the parts of their paths that are not all places', joined by "/".

    Raises:
        ValueError: the same place twice.
    """
    if len(places) == 1:
        run = [part for part in places[0][:-1] if part != "checkpoints" and not part.startswith("step_")]
        return ["/".join(run[-1:])]
    shortest = min(map(len, places))
    same = [len({place[i] for place in places}) == 1 for i in range(shortest)]
    start = same.index(False) if False in same else shortest
    tail = [len({place[-1 - i] for place in places}) == 1 for i in range(shortest - start)]
    end = tail.index(False) if False in tail else len(tail)
    names = [
        "/".join(part for part in place[start : len(place) - end] if part != "checkpoints")
        for place in places
    ]
    if len(set(names)) < len(names):
        raise ValueError(f"{'/'.join(places[0][:-1])} is named twice")
    return names


def _common_latents(found: list[Trained]) -> Latents:
    opened = [_latents_of(trained) for trained in found]
    for trained, latents in zip(found, opened, strict=True):
        if latents.fingerprint != opened[0].fingerprint:
            raise ValueError(
                f"{found[0].where} and {trained.where} were trained on different latents; name one cache "
                "for both with --data"
            )
    return opened[0]


def _latents_of(trained: Trained) -> Latents:
    path = Path(trained.where) / CONFIG
    if not path.is_file():
        raise ValueError(f"{trained.where} does not say what it was trained on; give latents with --data")
    config = load_config(path, [], Config)
    cache = config.data.latents
    if cache is not None and not (Path(cache) / "manifest.json").is_file():
        raise ValueError(
            f"{trained.where} was trained on the latents {cache}, which are not there (any more); give them "
            "with --data"
        )
    return open_latents(config)


def _check_fit(trained: Trained, latents: Latents) -> None:
    network = trained.network
    latents.autoencoder.check(trained.autoencoder)
    shape = network.in_channels, network.height, network.width
    if latents.latent_shape != shape:
        raise ValueError(
            f"{latents.where} holds latents {latents.latent_shape}, but {trained.where} takes {shape}"
        )
    if len(latents.class_names) > network.num_classes:
        raise ValueError(
            f"{latents.where} has {len(latents.class_names)} classes, but {trained.where} knows "
            f"{network.num_classes}"
        )
