"""The verb that makes images."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import runtime
from ..generate.settings import SamplingConfig
from .frame import make_parser
from .sampling import SAMPLING, add_sampling, option, typed_sampling

if TYPE_CHECKING:
    from ..generate.job import Job

SOURCE = ("weights", "step", "autoencoder", "family")
"""The options that say which network."""


def sample(arguments: list[str]) -> None:
    """Generate images from a checkpoint."""
    parser = make_parser(
        "Generate images. Image i follows from checkpoint, settings, seed and i alone; the same command "
        "continues an interrupted job."
    )
    parser.add_argument(
        "--checkpoint",
        help="a run, a checkpoint, a model or pipeline folder, or an official file (default: the newest run "
        "under runs/)",
    )
    add_sampling(parser, SamplingConfig)
    parser.add_argument(
        "--seeds", type=_seeds, metavar="FIRST-LAST", help="one image of each seed, as 0-63: its first"
    )
    parser.add_argument("--batch-size", type=int, help="images at once (50)")
    parser.add_argument("--out", type=Path, help="folder (default: named by the settings, in the run)")
    parser.add_argument("--npz", action="store_true", help="also write arr_0 (N, H, W, 3), for the ADM suite")
    parser.add_argument(
        "--trajectory",
        action="store_true",
        help="also the way of the first images from noise, as trajectory.png and trajectory.gif",
    )
    parser.add_argument(
        "--reverse",
        type=Path,
        metavar="IMAGE",
        help="in place of samples: this image of the class --labels to its noise and back (an ODE or "
        "dit-ddim; guidance is applied on both ways)",
    )
    parser.add_argument(
        "--from",
        type=Path,
        metavar="JSON",
        dest="record",
        help="the images that a samples.json, or the numbers of a checkpoint, are of; with --checkpoint, "
        "--autoguidance, --autoencoder where these lie elsewhere now",
    )
    options = parser.parse_args(arguments)
    runtime.check_launcher()
    config = _config(options)
    from ..generate.generation import write
    from ..generate.request import job_of, job_of_record
    from ..generate.samples import Samples, write_npz
    from ..generate.trajectory import write_trajectory
    from ..report.figures import grid_figure, save_figure

    device = runtime.processes().device
    if options.record:
        job = job_of_record(options.record, config, device)
    else:
        batch_size = 50 if options.batch_size is None else options.batch_size
        job = job_of(config, batch_size, device, seed_per_image=options.seeds is not None)
        if config.checkpoint is None:
            runtime.say(f"the newest checkpoint: {job.trained.where}, {job.trained.weights}")
    if options.reverse:
        if runtime.is_main_process():
            _reverse(job, options.reverse, options.out)
        return
    out = write(job, options.out)
    if runtime.is_main_process():
        grid = out / "grid.png"
        save_figure(grid, lambda: grid_figure(Samples(out), out.name))
        runtime.say(f"look at {grid}")
        if options.npz:
            runtime.say(f"for the ADM suite: {write_npz(Samples(out))}")
        if options.trajectory:
            runtime.say(f"from noise to image: {' and '.join(map(str, write_trajectory(job, out)))}")


def _config(options: argparse.Namespace) -> SamplingConfig:
    """What was asked for; ValueError where it does not go together."""
    typed = typed_sampling(options)
    if options.record:
        _check_record(options, typed)
    if options.reverse:
        _check_reverse(options, typed)
        typed["num_images"] = 1
    if options.seeds:
        if "seed" in typed or "num_images" in typed:
            raise ValueError(
                "--seeds says which seeds and how many images; leave out --seed and --num-images"
            )
        typed["seed"], typed["num_images"] = options.seeds
    config = SamplingConfig(checkpoint=options.checkpoint, **typed)
    if problems := config.problems():
        raise ValueError(problems[0])
    return config


def _check_record(options: argparse.Namespace, typed: dict[str, Any]) -> None:
    """ValueError where an option is given that the record says."""
    told = [name for name in ("seeds", "batch_size", "reverse") if getattr(options, name) is not None]
    told += typed.keys() - {"weights", "autoencoder", "family", "autoguidance"}
    if told:
        raise ValueError(
            f"--from says all that the images follow from; leave out {', '.join(map(option, told))}"
        )


def _check_reverse(options: argparse.Namespace, typed: dict[str, Any]) -> None:
    """ValueError where no single class is said, or an option is given that only samples have."""
    labels = typed.get("labels", [])
    if len(labels) != 1 or labels[0] in ("balanced", "random"):
        raise ValueError("--reverse needs the image's class: --labels NAME")
    for name in ("num_images", "seed", "seeds", "batch_size", "npz", "trajectory"):
        if getattr(options, name, None) not in (None, False):
            raise ValueError(f"--reverse makes no samples; leave out --{name.replace('_', '-')}")


def _reverse(job: "Job", image: Path, out: Path | None) -> None:
    from ..generate.reverse import write_reversed

    path, found = write_reversed(job, image, out)
    runtime.say(
        f"rmse after noise and back: {found.latent_error:.2g} in latents, {found.pixel_error:.2g} of 255 in "
        f"pixels; the autoencoder's own {found.autoencoder_error:.2g} of 255"
    )
    runtime.say(f"original | autoencoder | noise and back: {path}")


def _seeds(text: str) -> tuple[int, int]:
    """The first seed and how many of "0-63"; argparse's error where it is none."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds, such as 0-63")
    return int(first), int(last) - int(first) + 1


def export_pipeline(arguments: list[str]) -> None:
    """Write a run as a folder that sitvit.SiTPipeline loads."""
    parser = make_parser(
        "Write a network with its autoencoder and class names as a diffusers pipeline: "
        "sitvit.SiTPipeline.from_pretrained(OUT) loads it, offline."
    )
    parser.add_argument("source", help="a run, a checkpoint, a model folder or an official file")
    parser.add_argument("out", type=Path, help="the folder to write")
    for name in SOURCE:
        parser.add_argument(option(name), **SAMPLING[name])
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise ValueError(f"{options.out} is there already; choose another name, or delete it")
    from ..generate.export import export_pipeline as export
    from ..generate.trained import open_trained

    trained = open_trained(options.source, options.weights, options.step, options.autoencoder, options.family)
    export(trained, options.out)
    runtime.say(f"{options.out}: {trained.weights} of {trained.where}")
