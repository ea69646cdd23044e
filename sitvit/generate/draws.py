"""What belongs to one image alone: its label, its noise, and every later draw of its sampler.

An image is known by (seed, index). Image i of a job of one seed s is (s, i); where each image has a seed of
its own (`--seeds 5-9`), image i is (5 + i, 0), the first of that seed. Draws come from a counter-based
generator at that pair, so they are the same bits whatever the batch.
"""

import difflib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..data.stream import LABELS, SAMPLING, generator

LABEL_RULES = ("balanced", "random")
Key = tuple[int, int]


def keys_of(seed: int, indices: range, seed_per_image: bool = False) -> list[Key]:
    """(seed, index) of the images `indices` of a job."""
    return [(seed + index, 0) if seed_per_image else (seed, index) for index in indices]


def noise_of(keys: Sequence[Key], shape: tuple[int, ...], draw: int = 0) -> Tensor:
    """Noise (B, *shape) float32. Draw 0 is x_0; draw k + 1 belongs to step k of a sampler that draws."""
    draws = [
        generator(seed, SAMPLING, draw, index).standard_normal(shape, dtype=np.float32)
        for seed, index in keys
    ]
    return torch.from_numpy(np.stack(draws))


def labels_of(rule: str | list[int], indices: range, keys: Sequence[Key], num_classes: int) -> Tensor:
    """Labels (B,) int64: in turn by index, or by "random" from the image's own draws."""
    if isinstance(rule, list):
        return torch.tensor([rule[index % len(rule)] for index in indices])
    if rule == "balanced":
        return torch.tensor([index % num_classes for index in indices])
    draws = [generator(seed, LABELS, 0, index).integers(num_classes) for seed, index in keys]
    return torch.tensor([int(draw) for draw in draws])


def check_numbers(num_images: int, seed: int, batch_size: int) -> None:
    """ValueError naming the first number that makes no sense for any checkpoint."""
    for name, value in (("num_images", num_images), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")


def check_labels(labels: str | list[int], num_classes: int) -> None:
    """ValueError naming an unknown rule, or the first label that the model does not have."""
    if isinstance(labels, str):
        if labels not in LABEL_RULES:
            raise ValueError(f"labels must be {', '.join(LABEL_RULES)} or a list, got {labels!r}")
        return
    if not labels:
        raise ValueError("no labels were given")
    for label in labels:
        if not 0 <= label < num_classes:
            raise ValueError(
                f"label {label} is out of range: this model has {num_classes} classes, labels 0 to "
                f"{num_classes - 1}"
            )


def resolve_labels(words: list[str], class_names: list[str]) -> str | list[int]:
    """What a person typed: "balanced", "random", or class names and labels; a name goes first.

    Each of the names in "tench, Tinca tinca" will do.

    Raises:
        ValueError: neither a class name nor a number, with the nearest names.
    """
    if len(words) == 1 and words[0] in LABEL_RULES:
        return words[0]
    known = {
        part.strip(): label for label, name in reversed([*enumerate(class_names)]) for part in name.split(",")
    }
    known |= {name: label for label, name in reversed([*enumerate(class_names)])}
    labels = []
    for word in words:
        if word in known:
            labels.append(known[word])
            if word.isdecimal() and labels[-1] != int(word):
                runtime.say(f"{word} is the name of class {labels[-1]}: that class is meant")
        elif word.removeprefix("-").isdecimal():
            labels.append(int(word))
        elif word in LABEL_RULES:
            raise ValueError(f"{word} is a rule for all images; it stands alone, or leave it out")
        else:
            near = difflib.get_close_matches(word, known, n=3, cutoff=0.4) or class_names[:5]
            raise ValueError(f"there is no class {word!r}; did you mean {' or '.join(near)}?")
    return labels
