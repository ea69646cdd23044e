"""The verb that makes images."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .. import runtime
from .frame import make_parser

if TYPE_CHECKING:
    from ..generate.job import Job

SAMPLER_PARTS = {
    "method": (
        str,
        "euler, heun, rk4, dopri5, dopri5_per_image, ...; euler-maruyama, stochastic-heun; ddpm, ddim",
    ),
    "num_steps": (int, "network steps of a method that does not choose them"),
    "shift": (float, "above 1: more of the steps in the noise"),
    "atol": (float, "of an adaptive method"),
    "rtol": (float, "of an adaptive method"),
    "eta": (float, "of ddim: 0 (no noise) to 1"),
    "diffusion": (str, "of an SDE: constant, SBDM, sigma, linear, decreasing, increasing-decreasing"),
    "diffusion_norm": (float, "its factor"),
    "last_step": (str, "of an SDE: none, Mean, Tweedie, Euler"),
    "last_step_size": (float, "its size in t; 0 with none"),
}
"""What of a preset can be replaced on the command line: type and help."""


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
    _add_source(parser)
    parser.add_argument("--num-images", type=int, help="number of images (100)")
    parser.add_argument(
        "--labels",
        nargs="+",
        default=["balanced"],
        help="balanced (default), random, or class names and labels used in turn",
    )
    parser.add_argument("--seed", type=int, help="image i is image i of this seed (0)")
    parser.add_argument(
        "--seeds", type=_seeds, metavar="FIRST-LAST", help="one image of each seed, as 0-63: its first"
    )
    _add_sampler(parser)
    _add_guidance(parser)
    parser.add_argument("--batch-size", type=int, help="images at once (50)")
    parser.add_argument(
        "--precision",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="what the network computes in (float32)",
    )
    parser.add_argument(
        "--image-size", type=int, nargs="+", metavar="N", help="another size: side, or height and width"
    )
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
    options = parser.parse_args(arguments)
    if options.reverse:
        _check_reverse(options)
    if options.seeds and (options.seed is not None or options.num_images is not None):
        raise ValueError("--seeds says which seeds and how many images; leave out --seed and --num-images")
    if options.image_size and len(options.image_size) > 2:
        raise ValueError("--image-size takes one side, or height and width")
    from ..flow.guidance import Guidance
    from ..flow.samplers import find_sampler

    parts = {part: getattr(options, part) for part in SAMPLER_PARTS}
    parts["interval"] = options.interval and tuple(options.interval)
    chosen = {part: value for part, value in parts.items() if value is not None}
    if options.sampler is not None:
        find_sampler(options.sampler, chosen)  # a misspelt name is said before anything is loaded
    guidance = Guidance(
        options.cfg_scale,
        tuple(options.guidance_interval),
        None if options.guided_channels == "all" else int(options.guided_channels),
        options.guidance_rescale,
    )
    from ..generate.draws import resolve_labels
    from ..generate.generation import write
    from ..generate.job import Job
    from ..generate.samples import Samples, write_npz
    from ..generate.trained import open_trained
    from ..generate.trajectory import write_trajectory
    from ..report.figures import grid_figure, save_figure

    trained = open_trained(
        options.checkpoint, options.weights, options.step, options.autoencoder, options.family
    )
    if options.checkpoint is None:
        runtime.say(f"the newest checkpoint: {trained.where}, {trained.weights}")
    count = 1 if options.reverse else 100
    first, count = options.seeds or (
        options.seed or 0,
        count if options.num_images is None else options.num_images,
    )
    size = options.image_size
    job = Job(
        trained,
        count,
        resolve_labels(options.labels, trained.class_names),
        first,
        find_sampler(options.sampler or trained.default_sampler, chosen),
        guidance,
        50 if options.batch_size is None else options.batch_size,
        device=runtime.processes().device,
        seed_per_image=options.seeds is not None,
        weak=options.autoguidance and open_trained(options.autoguidance, autoencoder=options.autoencoder),
        precision=options.precision,
        image_size=size and (size[0], size[-1]),
    )
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


def _check_reverse(options: argparse.Namespace) -> None:
    """ValueError where no single class is said, or an option is given that only samples have."""
    if len(options.labels) != 1 or options.labels[0] in ("balanced", "random"):
        raise ValueError("--reverse needs the image's class: --labels NAME")
    for name in ("num_images", "seed", "seeds", "batch_size", "npz", "trajectory"):
        if getattr(options, name) not in (None, False):
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
    _add_source(parser)
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise ValueError(f"{options.out} is there already; choose another name, or delete it")
    from ..generate.export import export_pipeline as export
    from ..generate.trained import open_trained

    trained = open_trained(options.source, options.weights, options.step, options.autoencoder, options.family)
    export(trained, options.out)
    runtime.say(f"{options.out}: {trained.weights} of {trained.where}")


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", help="ema, model or a full name (default: the average)")
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    parser.add_argument("--autoencoder", help="where it lies, if it moved or nothing recorded it")
    parser.add_argument("--family", choices=["SiT", "DiT"], help="where an official file does not tell")


def _add_sampler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sampler",
        help="heun (a SiT's default, 50 steps), or a published protocol: sit-sde, sit-ode, sit-heun, dit (a "
        "DiT's default), dit-ddim; options below replace parts of it",
    )
    for part, (kind, text) in SAMPLER_PARTS.items():
        parser.add_argument(f"--{part.replace('_', '-')}", type=kind, help=text)
    parser.add_argument(
        "--interval", type=float, nargs=2, metavar=("T_MIN", "T_MAX"), help="sample from t to t (as it can)"
    )


def _add_guidance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cfg-scale", type=float, default=1.0, help="guidance; 1 is off (1)")
    parser.add_argument(
        "--guidance-interval",
        type=float,
        nargs=2,
        default=(0.0, 1.0),
        metavar=("LOW", "HIGH"),
        help="guide for t in it (0 1)",
    )
    parser.add_argument(
        "--guided-channels", default="all", choices=["all", "3"], help="all (default), or 3 as published"
    )
    parser.add_argument(
        "--autoguidance",
        metavar="CHECKPOINT",
        help="guide away from this weaker network",
    )
    parser.add_argument("--guidance-rescale", type=float, default=0.0, help="0 (default, off) to 1")
