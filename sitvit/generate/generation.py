"""Images from a checkpoint: image i is a pure function of (weights, settings, seed, i).

The noise of image i comes from a counter-based generator at (seed, i), its label from a rule on i. The
unit of work is the batch of indices kB .. (k + 1) B - 1, always computed whole: matrix kernels round
differently for other shapes, so with one batch size the bits do not depend on the number of processes,
on where a killed job went on, or on how many images were asked for. (They do depend, by rounding, on the
kind of device and on a CPU's thread count, which torchrun sets to 1.)
"""

import difflib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..data.autoencoder import Autoencoder, pixels_to_images
from ..data.stream import LABELS, SAMPLING, generator
from ..flow.guidance import Guidance
from ..flow.parameterization import as_velocity
from ..flow.paths import find_path
from ..flow.samplers import Sampler
from ..models.sit import SiT
from ..train.checkpoint import Checkpoint
from . import samples
from .samples import SampleSettings

LABEL_RULES = ("balanced", "random")
UINT8_RULE = "clamp(127.5 x + 128, 0, 255), truncated"


def generate(
    checkpoint: Checkpoint,
    weights: str,
    out: Path | None,
    num_images: int,
    labels: str | list[int],
    seed: int,
    sampler: Sampler,
    guidance: Guidance,
    batch_size: int,
    autoencoder_name: str | None,
) -> Path:
    """Write `num_images` images of `checkpoint` to `out`, or finish what was begun there.

    `labels` is "balanced" (classes in turn), "random", or labels used in turn. Without `out` the folder
    lies in the run and is named after the settings. Returns the folder.

    Raises:
        ValueError: settings that do not fit the checkpoint, each before the first image.
        FloatingPointError: the network's output is not finite, naming the images.
    """
    check_numbers(num_images, seed, batch_size)
    weights = checkpoint.weights_name(weights)
    network = checkpoint.load_network(weights)
    check_labels(labels, network.num_classes)
    state = runtime.processes()
    autoencoder = Autoencoder(autoencoder_name or checkpoint.autoencoder.name, state.device)
    autoencoder.match(checkpoint.autoencoder)
    guidance.check_channels(network.in_channels)
    null_label = None if guidance.is_off else network.null_label
    path, prediction = find_path(checkpoint.record["path"]), checkpoint.record["prediction"]
    settings = SampleSettings(
        weights=weights,
        weights_sha256=checkpoint.weights_sha256(weights),
        autoencoder=_without_name(asdict(checkpoint.autoencoder)),
        class_names=checkpoint.class_names,
        image_size=checkpoint.record["image_size"],
        seed=seed,
        num_images=num_images,
        labels=labels,
        path=path.name,
        prediction=prediction,
        sampler=sampler.settings(),
        cfg_scale=guidance.cfg_scale,
        guidance_interval=list(guidance.interval),
        guided_channels=guidance.channels,
        guidance_rescale=guidance.rescale,
        batch_size=min(batch_size, num_images),
        precision="float32",
        uint8_rule=UINT8_RULE,
    )
    out = out or default_folder(checkpoint, settings)
    if state.is_main_process:
        samples.begin(out, settings)
        (out / "images").mkdir(exist_ok=True)
    state.wait_for_everyone()
    if (out / samples.RECORD).is_file() and not samples.lacking(out, num_images):
        samples.Samples(out)  # says so if foreign ones were added
        runtime.say(f"{out}: all {num_images} images are there already")
        return out

    if sampler.couples_the_batch:
        runtime.say(
            f"{sampler.method} shares its step over a batch: an image moves, within its tolerance, with its "
            "batch mates; dopri5_per_image and fixed steps do not"
        )
    network.to(state.device)
    evaluations: list[int] = []
    num_classes = len(checkpoint.class_names)
    start = time.monotonic()

    def batch_of_images(indices: range, on_step: Callable[[], object]) -> np.ndarray:
        batch_labels = labels_of(labels, indices, num_classes, seed).to(state.device)
        guided = guidance.bind(network, batch_labels, null_label)
        velocity = as_velocity(guided, path, prediction)
        noise = partial(noise_of, seed, indices, network)
        solution = sampler.sample(
            velocity,
            path,
            prediction,
            noise(0).to(state.device),
            lambda step: noise(step + 1).to(state.device),
            lambda _: on_step(),
        )
        evaluations.append(solution.num_evaluations)
        pixels = autoencoder.decode(solution.state)
        if not torch.isfinite(pixels).all():
            raise FloatingPointError("the decoded images are not finite")
        return pixels_to_images(pixels).cpu().numpy()

    _write_missing(
        out, settings, sampler.num_ticks, state.process_index, state.num_processes, batch_of_images
    )
    state.wait_for_everyone()
    if state.is_main_process:
        record = {
            **runtime.read_json(out / "settings.json"),
            "image_labels": labels_of(labels, range(num_images), num_classes, seed).tolist(),
            "checkpoint": str(checkpoint.folder),
            "step": checkpoint.step,
            "trained_on": checkpoint.record["images"],
            "trained_on_fingerprint": checkpoint.record["images_fingerprint"],
            "num_evaluations": sampler.num_evaluations or [min(evaluations), max(evaluations)],
            "device": state.device.type,
            "num_processes": state.num_processes,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "command": runtime.command_line(),
            "seconds": round(time.monotonic() - start, 1),
            "peak_memory_mib": runtime.peak_memory_mib(),
        }
        runtime.write_json(out / samples.RECORD, record)
        calls = record["num_evaluations"]
        runtime.say(
            f"{out}: {num_images} images of {weights} at step {checkpoint.step}, {sampler.method}, network "
            f"evaluations (NFE) {calls if isinstance(calls, int) else ' to '.join(map(str, calls))}"
        )
    state.wait_for_everyone()
    return out


@torch.no_grad()
def _write_missing(
    out: Path,
    settings: SampleSettings,
    num_ticks: int | None,
    process_index: int,
    num_processes: int,
    batch_of_images: Callable[[range, Callable[[], object]], np.ndarray],
) -> None:
    """Compute each batch of this process of which an image is not there yet."""
    size, total = settings.batch_size, settings.num_images
    starts = range(process_index * size, total, num_processes * size)
    batches = [range(first, first + size) for first in starts]
    missing = {
        batch: [
            index
            for index in batch
            if index < total and not samples.is_whole(samples.image_path(out, index), settings.image_size)
        ]
        for batch in batches
    }
    todo = sum(map(len, missing.values()))
    mine = sum(min(batch.stop, total) - batch.start for batch in batches)
    if todo < mine:
        runtime.say(f"continuing {out}: {mine - todo} of {mine} images are there already")
    # A method that chooses its steps has a bar of batches.
    num_ticks, unit = (1, " batches") if num_ticks is None else (num_ticks, " steps")
    in_batch = unit == " steps"
    total = num_ticks * sum(bool(indices) for indices in missing.values())
    with (
        runtime.StopRequest() as stop,
        runtime.progress(total, 0, f"sampling {todo} images", unit) as bar,
    ):
        for batch, indices in missing.items():
            if not indices:
                continue
            try:
                images = batch_of_images(batch, bar.update if in_batch else lambda: None)
            except FloatingPointError as error:
                raise FloatingPointError(f"images {batch.start} to {batch.stop - 1}: {error}") from None
            for index in indices:
                samples.write_image(samples.image_path(out, index), images[index - batch.start])
            if not in_batch:
                bar.update()
            if stop.requested:
                raise KeyboardInterrupt("stopped; the same command continues with the next images")


def check_numbers(num_images: int, seed: int, batch_size: int) -> None:
    """ValueError naming the first number that makes no sense for any checkpoint."""
    for name, value in (("num_images", num_images), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be from 0 to 2^63 - 1, got {seed}")


def resolve_labels(words: list[str], class_names: list[str]) -> str | list[int]:
    """What a person typed: "balanced", "random", or class names and labels; a name goes first.

    Raises:
        ValueError: neither a class name nor a number, with the nearest names.
    """
    if len(words) == 1 and words[0] in LABEL_RULES:
        return words[0]
    labels = []
    for word in words:
        if word in class_names:
            labels.append(class_names.index(word))
            if word.isdecimal() and labels[-1] != int(word):
                runtime.say(f"{word} is the name of class {labels[-1]}: that class is meant")
        elif word.removeprefix("-").isdecimal():
            labels.append(int(word))
        else:
            near = difflib.get_close_matches(word, class_names, n=3, cutoff=0.4) or class_names[:5]
            raise ValueError(f"there is no class {word!r}; did you mean {' or '.join(near)}?")
    return labels


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


def labels_of(rule: str | list[int], indices: range, num_classes: int, seed: int) -> Tensor:
    """Labels (B,) int64 of the images `indices`: a function of rule, seed and index alone."""
    if isinstance(rule, list):
        return torch.tensor([rule[index % len(rule)] for index in indices])
    if rule == "balanced":
        return torch.tensor([index % num_classes for index in indices])
    draws = [generator(seed, LABELS, 0, i).integers(num_classes) for i in indices]
    return torch.tensor([int(draw) for draw in draws])


def noise_of(seed: int, indices: range, network: SiT, draw: int = 0) -> Tensor:
    """Noise (B, C, H, W) float32 of the images `indices`; image i's is its own whatever the batch.

    Draw 0 is x_0; draw k + 1 belongs to step k of an SDE.
    """
    shape = (network.in_channels, network.height, network.width)
    draws = [
        generator(seed, SAMPLING, draw, index).standard_normal(shape, dtype=np.float32) for index in indices
    ]
    return torch.from_numpy(np.stack(draws))


def default_folder(checkpoint: Checkpoint, settings: SampleSettings) -> Path:
    """RUN/samples/NAME, where NAME tells the settings that people vary."""
    rule = settings.labels if isinstance(settings.labels, str) else "chosen"
    guidance = f"cfg{settings.cfg_scale:g}"
    if settings.guided_channels is not None:
        guidance += f"-ch{settings.guided_channels}"
    if settings.guidance_interval != [0, 1]:
        guidance += "-t{:g}to{:g}".format(*settings.guidance_interval)
    name = (
        f"step_{checkpoint.step:07d}-{settings.weights}-{settings.sampler['name']}"
        f"-{guidance}-seed{settings.seed}-n{settings.num_images}-{rule}"
    )
    parent = checkpoint.folder.parent
    return (parent.parent if parent.name == "checkpoints" else checkpoint.folder) / "samples" / name


def _without_name(identity: dict[str, object]) -> dict[str, object]:
    """One autoencoder may lie in two folders."""
    return {key: value for key, value in identity.items() if key != "name"}
