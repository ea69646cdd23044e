"""The analysis of one or several trained networks, as numbers with their protocol: OUT/analysis.json.

Each network is run on x_t of the same real images at each of some times t. It is told "no class" for all of
them: with the true class the probe would read off what was put in by adaLN. "block" counts from 0;
"embedding" is what enters block 0.
"""

from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..data.latents import Latents
from ..generate.trained import Trained
from .attention import attention_distance, centre_map, register_share, uniform_distance
from .gates import gates
from .inputs import Images, choose_images
from .probe import chance, linear_probe
from .recording import record

FORMAT = 1
RECORD = "analysis.json"
QUANTILES = (0.05, 0.5, 0.95)
MAP_IMAGES, MAP_BLOCKS, MAP_HEADS = 2, 4, 4
"""Of how many images, blocks (evenly spread) and heads (the first) attention maps are kept."""


def analyze(
    networks: dict[str, Trained],
    latents: Latents,
    num_images: int,
    times: list[float],
    seed: int,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """What `about` says, and of each network: probe, attention, maps, norms, gates.

    Attention is that of the first `batch_size` images, maps that of the middle one of `times`.

    Raises:
        ValueError: too few or too many images, or a time outside [0, 1].
    """
    about = describe(networks, latents, num_images, times, seed, batch_size)
    images = choose_images(latents, num_images, seed)
    batches = [slice(*pair) for pair in pairwise([*range(0, num_images, batch_size), num_images])]
    found = []
    with runtime.progress(len(networks) * len(times) * len(batches), 0, "analyze", "batch") as bar:
        for trained in networks.values():
            network: Any = trained.network
            network.to(device)
            found.append(_measure(trained, images, times, batches, device, bar.update))
            network.to("cpu")
    return {**about, "chance": chance(images.labels), "results": dict(zip(networks, found, strict=True))}


def describe(
    networks: dict[str, Trained],
    latents: Latents,
    num_images: int,
    times: list[float],
    seed: int,
    batch_size: int,
) -> dict[str, Any]:
    """All that the numbers follow from; ValueError for a number that makes no sense."""
    if not times or len(set(times)) < len(times) or not all(0 <= t <= 1 for t in times):
        raise ValueError(f"times must be different, from 0 (noise) to 1 (data), got {times}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")
    protocol = {
        "latents": latents.where,
        "latents_fingerprint": latents.fingerprint,
        "num_images": num_images,
        "times": times,
        "seed": seed,
        "batch_size": batch_size,
        "probe": "features: mean of the patch tokens; ridge least squares on the first half of the images, "
        "accuracy on the second; the network is told no class",
        "attention": f"the first {min(batch_size, num_images)} images; distances in patches",
    }
    told = {name: _identity(trained) for name, trained in networks.items()}
    return {"format": FORMAT, "protocol": protocol, "networks": told}


def read_analysis(folder: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """The finished analysis in `folder` if it is the one that `about` describes, None where there is none.

    Raises:
        ValueError: there is another one, which stays as it is.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    found = runtime.read_record(path, [*about, "results"])
    if {key: found[key] for key in about} != about:
        raise ValueError(f"{path} is of other weights or settings; choose another --out, or delete {folder}")
    return found


def _identity(trained: Trained) -> dict[str, Any]:
    network: Any = trained.network
    uniform = uniform_distance(network.grid)
    return {
        **trained.identity(),
        "where": trained.where,
        "step": trained.step,
        "grid": list(network.grid),
        "num_registers": network.num_registers,
        "told_class": _told_class(trained),
        "uniform_attention_distance": uniform,
    }


def _told_class(trained: Trained) -> int:
    """The label that every image is given: "no class", or class 0 where the network knows no such label."""
    network = trained.network
    return network.null_label if network.has_null else 0


def _measure(
    trained: Trained,
    images: Images,
    times: list[float],
    batches: list[slice],
    device: torch.device,
    tick: Callable[[], object],
) -> dict[str, Any]:
    network: Any = trained.network
    result: dict[str, Any] = {"probe": [], "norms": [], "attention": [], "maps": [], "gates": []}
    for t in times:
        look = Look(network.grid, _spread(len(network.blocks)))
        recorded = []
        for rows in batches:
            x_0, x_1 = images.pair(rows)
            x_t = trained.flow_path.interpolate(x_0, x_1, torch.full((len(x_1),), t))
            told = torch.full((len(x_t),), _told_class(trained), device=device)
            recorded.append(record(trained, x_t.to(device), t, told, look if rows.start == 0 else None))
            tick()
        features = torch.cat([part.features for part in recorded], dim=1)
        norms, register_norms = (
            np.concatenate([getattr(part, name).numpy() for part in recorded], axis=1)
            for name in ("norms", "register_norms")
        )
        for place, name in enumerate(["embedding", *range(len(network.blocks))]):
            here = {"t": t, "block": name}
            probe = linear_probe(features[place], images.labels, len(images.latents.class_names))
            result["probe"].append({**here, **asdict(probe)})
            result["norms"].append({**here, **norm_numbers(norms[place], register_norms[place])})
        result["attention"] += [{"t": t, **row} for row in look.rows]
        result["gates"] += [{"t": t, **row} for row in gates(trained, t)]
        if t == times[len(times) // 2]:
            result["maps"] = [{"t": t, **row} for row in look.maps]
    _, shown = images.pair(slice(0, MAP_IMAGES))
    result["map_images"] = [_rounded(image.mean(dim=0)) for image in shown]
    return result


def norm_numbers(norms: np.ndarray, register_norms: np.ndarray) -> dict[str, Any]:
    """Quantiles, maximum and maximum / median of the patches' token norms; the registers' median and maximum.

    High-norm tokens among the patches are what registers are for (arXiv 2309.16588).
    """
    low, median, high = np.quantile(norms, QUANTILES).tolist()
    return {
        "quantile_5": low,
        "median": median,
        "quantile_95": high,
        "max": float(norms.max()),
        "max_over_median": float(norms.max()) / median,
        "register_median": float(np.median(register_norms)) if register_norms.size else None,
        "register_max": float(register_norms.max()) if register_norms.size else None,
    }


class Look:
    """What is kept of the attention that `record` shows: `rows` of numbers, and `maps`."""

    def __init__(self, grid: tuple[int, int], blocks: list[int]) -> None:
        self.grid, self.blocks = grid, blocks
        self.rows: list[dict[str, Any]] = []
        self.maps: list[dict[str, Any]] = []

    def __call__(self, block: int, weights: Tensor) -> None:
        """Take in the weights (B, heads, N + R, N + R) of a block."""
        distances = attention_distance(weights, self.grid).mean(0).tolist()
        shares = register_share(weights, self.grid[0] * self.grid[1]).mean(0).tolist()
        for head, (distance, share) in enumerate(zip(distances, shares, strict=True)):
            self.rows.append({"block": block, "head": head, "distance": distance, "register_share": share})
        if block in self.blocks:
            maps = centre_map(weights[:MAP_IMAGES, :MAP_HEADS], self.grid)
            for image, head in np.ndindex(*maps.shape[:2]):
                row = {"block": block, "image": image, "head": head, "attention": _rounded(maps[image, head])}
                self.maps.append(row)


def _spread(depth: int) -> list[int]:
    """Up to `MAP_BLOCKS` blocks from the first to the last."""
    return sorted({round(place) for place in np.linspace(0, depth - 1, MAP_BLOCKS)})


def _rounded(values: Tensor) -> list[list[float]]:
    """Rows of a picture, four digits each."""
    return [[float(f"{value:.4g}") for value in row] for row in values.tolist()]
