"""Images from a checkpoint into a folder: exactly those asked for, by any number of processes, continued."""

import platform
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..flow.guidance import Guidance
from ..flow.sampler import Sampler
from ..train.checkpoint import Checkpoint
from . import samples
from .draws import check_numbers
from .job import Job
from .samples import SampleSettings
from .trained import of_checkpoint


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
    """Write `num_images` images of `checkpoint` to `out`, or finish what was begun there; see `Job`, `write`.

    Raises:
        ValueError: settings that do not fit the checkpoint, each before the first image.
        FloatingPointError: the network's output is not finite, naming the images.
    """
    check_numbers(num_images, seed, batch_size)
    trained = of_checkpoint(checkpoint, weights, autoencoder_name)
    device = runtime.processes().device
    return write(Job(trained, num_images, labels, seed, sampler, guidance, batch_size, device), out)


def write(job: Job, out: Path | None) -> Path:
    """Write the images of `job` to `out`, by default a folder named after the settings; returns it.

    Raises:
        ValueError: `out` holds other things, or samples of other settings.
    """
    state = runtime.processes()
    settings = job.settings()
    out = out or default_folder(job, settings)
    if state.is_main_process:
        samples.begin(out, settings)
        (out / "images").mkdir(exist_ok=True)
    state.wait_for_everyone()
    is_finished = (out / samples.RECORD).is_file() and samples.are_there(out, job.num_images)
    state.wait_for_everyone()  # all have looked before one writes
    if is_finished:
        samples.Samples(out)  # says so if foreign ones were added
        runtime.say(f"{out}: all {job.num_images} images are there already")
        return out

    if job.sampler.couples_the_batch:
        runtime.say(
            f"{job.sampler.method} shares its step over a batch: an image moves, within its tolerance, with "
            "its batch mates; fixed steps and dopri5_per_image keep it"
        )
    start = time.monotonic()
    _write_missing(out, job, state.process_index, state.num_processes)
    state.wait_for_everyone()
    counted = runtime.gathered(job.evaluations)  # of the batches that this start made
    if state.is_main_process:
        trained = job.trained
        record = {
            **runtime.read_json(out / "settings.json"),
            "image_labels": job.labels_of(range(job.num_images)).tolist(),
            **job.sources(),
            "trained_on": trained.trained_on and trained.trained_on[0],
            "trained_on_fingerprint": trained.trained_on and trained.trained_on[1],
            "num_evaluations": job.sampler.num_evaluations or _range(counted),
            "device": state.device.type,
            "num_processes": state.num_processes,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "command": runtime.command_line(),
            "seconds": round(time.monotonic() - start, 1),
            "peak_memory_mib": runtime.peak_memory_mib(),
        }
        runtime.write_json(out / samples.RECORD, record)
        runtime.say(
            f"{out}: {job.num_images} images of {_what(job)}, {job.sampler.method}, network "
            f"evaluations (NFE) {_told(record['num_evaluations'])}"
        )
    state.wait_for_everyone()
    return out


def _range(counted: list[int]) -> list[int] | None:
    """The least and the most; None where an earlier start made all, of which nobody knows."""
    return [min(counted), max(counted)] if counted else None


def _told(calls: int | list[int] | None) -> str:
    if calls is None:
        return "not known, since an earlier start made them"
    return str(calls) if isinstance(calls, int) else " to ".join(map(str, dict.fromkeys(calls)))


def _what(job: Job) -> str:
    trained = job.trained
    return trained.weights if trained.step is None else f"{trained.weights} at step {trained.step}"


def _write_missing(out: Path, job: Job, process_index: int, num_processes: int) -> None:
    """Compute each batch of this process of which an image is not there yet."""
    total = job.num_images
    batches = job.batches_of(process_index, num_processes)
    size = job.image_size
    missing = {
        batch: [
            index
            for index in batch
            if index < total and not samples.is_whole(samples.image_path(out, index), size)
        ]
        for batch in batches
    }
    todo = sum(map(len, missing.values()))
    mine = sum(min(batch.stop, total) - batch.start for batch in batches)
    if todo < mine:
        runtime.say(f"continuing {out}: {mine - todo} of {mine} images are there already")
    # A method that chooses its steps has a bar of batches.
    num_ticks, unit = (1, " batches") if job.sampler.num_ticks is None else (job.sampler.num_ticks, " steps")
    in_batch = unit == " steps"
    ticks = num_ticks * sum(bool(indices) for indices in missing.values())
    with (
        runtime.StopRequest() as stop,
        runtime.progress(ticks, 0, f"sampling {todo} images", unit) as bar,
    ):

        def tick(x: Tensor) -> None:
            if in_batch:
                bar.update()

        for batch, indices in missing.items():
            if not indices:
                continue
            images: np.ndarray = job.batch(batch, tick, stop.check)
            for index in indices:
                samples.write_image(samples.image_path(out, index), images[index - batch.start])
            if not in_batch:
                bar.update()
            stop.check()


def default_folder(job: Job, settings: SampleSettings) -> Path:
    """HOME/samples/NAME, where NAME tells the settings that people vary."""
    rule = settings.labels if isinstance(settings.labels, str) else "chosen"
    guidance = f"cfg{settings.cfg_scale:g}"
    if settings.autoguidance is not None:
        guidance += f"-auto{settings.autoguidance['weights_sha256'][:8]}"
    if settings.guided_channels is not None:
        guidance += f"-ch{settings.guided_channels}"
    if settings.guidance_interval != [0, 1]:
        guidance += "-t{:g}to{:g}".format(*settings.guidance_interval)
    weights = "model" if job.trained.step is None else f"step_{job.trained.step:07d}-{settings.weights}"
    seeds = f"seed{settings.seed}" + (
        f"to{settings.seed + settings.num_images - 1}" if settings.seed_per_image else ""
    )
    name = f"{weights}-{settings.sampler['name']}-{guidance}-{seeds}-n{settings.num_images}-{rule}"
    if job.image_size != job.trained.image_size():
        name += "-{}x{}".format(*job.image_size)
    if settings.precision != "float32":
        name += f"-{settings.precision}"
    return job.trained.home / "samples" / name
