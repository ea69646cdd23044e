"""The verbs that bring images in."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .. import runtime
from .frame import check_positive, make_parser

if TYPE_CHECKING:
    from ..data.sources import ImageSource


def encode_latents(arguments: list[str]) -> None:
    """Encode images to a cache of autoencoder moments."""
    options = _encoding_options(arguments)
    if options.verify:
        _verify(options)
        return
    if options.import_from:
        _import(options)
        return
    from ..data.sources import open_images, source_name

    source = open_images(options.images)
    _describe(source)
    if options.check:
        _check(source)
        return
    from ..data.autoencoder import Autoencoder
    from ..data.encode import encode

    state = runtime.processes()
    name = Path(options.images.replace(":", "-")).resolve().name.removesuffix(".gz")
    encode(
        source,
        source_name(options.images),
        Autoencoder(options.autoencoder, state.device),
        options.image_size,
        options.out or Path("runs/latents") / f"{name}-{options.image_size}",
        options.batch_size,
        options.flip,
        state.process_index,
        state.num_processes,
        state.wait_for_everyone,
        options.on_error,
        options.normalize_channels,
    )


def _encoding_options(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(
        "Encode images to a cache of autoencoder moments, once. The same command continues an interrupted "
        "job."
    )
    parser.add_argument(
        "--images",
        default="fashion-mnist",
        help="a folder with a folder of images per class, a zip or tar of one, an npz file of arrays, a "
        "folder that datasets saved, hub:NAME, an IDX file, or fashion-mnist (default)",
    )
    parser.add_argument(
        "--autoencoder",
        default="fashion-autoencoder",
        help="a diffusers AutoencoderKL or AutoencoderTiny: a folder, a hub name such as "
        "stabilityai/sd-vae-ft-ema (with a third part: its subfolder), the embedded fashion-autoencoder "
        "(default; for small gray images), or pixels for none",
    )
    parser.add_argument("--image-size", type=int, default=32, help="square side in pixels (32)")
    parser.add_argument("--out", type=Path, help="cache folder (default runs/latents/NAME-SIZE)")
    parser.add_argument("--batch-size", type=int, default=50, help="images at once (50)")
    parser.add_argument("--flip", action="store_true", help="keep the mirrored images' moments too")
    parser.add_argument(
        "--normalize-channels",
        action="store_true",
        help="measure each channel's mean and spread, and train on latents without them",
    )
    parser.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="what an image that cannot be read does: end the job (default), or be left out and recorded",
    )
    parser.add_argument("--check", action="store_true", help="only decode every image, and list the bad ones")
    parser.add_argument(
        "--verify", action="store_true", help="only compare the cache --out with its checksums"
    )
    parser.add_argument(
        "--import",
        dest="import_from",
        metavar="FOLDER",
        type=Path,
        help="bring in a latent cache of REPA, EDM2, LightningDiT or fast-DiT that --autoencoder made",
    )
    options = parser.parse_args(arguments)
    check_positive(options.batch_size, "--batch-size")
    check_positive(options.image_size, "--image-size")
    _check_used(parser, options)
    if (options.verify or options.import_from) and not options.out:
        raise ValueError("name the cache folder: --out")
    return options


USED = {
    "verify": ("out",),
    "import_from": ("autoencoder", "out", "normalize_channels"),
    "check": ("images",),
}
"""What does something else than encode, and the options that it reads."""


def _check_used(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """ValueError naming an option that would not be read."""
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    for mode in [name for name in USED if name in given]:
        unused = [flags[name] for name in given if name not in (mode, *USED[mode])]
        if unused:
            raise ValueError(f"{flags[mode]} does not go with {', '.join(unused)}")


def _describe(source: "ImageSource") -> None:
    """Print what was passed over, and the label map."""
    for notice in source.notices:
        runtime.say(notice)
    import numpy as np

    counts = np.bincount(source.labels, minlength=len(source.class_names))
    shown = [f"{i} {name} ({counts[i]})" for i, name in enumerate(source.class_names)]
    more = f", ... {len(shown) - 20} more" if len(shown) > 20 else ""
    runtime.say(f"{len(source)} images; label, class, count: {', '.join(shown[:20])}{more}")


def _check(source: "ImageSource") -> None:
    """Decode everything; ValueError after listing what is bad."""
    from ..data.encode import problems

    bad = problems(source)
    for problem in bad:
        runtime.say(problem)
    if bad:
        raise ValueError(f"{len(bad)} faults in {len(source)} images; they are listed above")
    runtime.say(f"all {len(source)} images can be read")


def _verify(options: argparse.Namespace) -> None:
    from ..data.latents import LatentCache

    cache = LatentCache(options.out)
    cache.verify()
    runtime.say(f"{options.out}: {len(cache)} latents, {cache.num_bytes / 1e6:,.1f} MB, all as written")


def _import(options: argparse.Namespace) -> None:
    from ..data.autoencoder import Autoencoder
    from ..data.importers import import_latents

    state = runtime.processes()
    if state.num_processes > 1:
        raise ValueError(f"an import runs as one process, not {state.num_processes}; start it with python")
    autoencoder = Autoencoder(options.autoencoder, state.device)
    import_latents(options.import_from, autoencoder, options.out, options.normalize_channels)


def fetch_data(arguments: list[str]) -> None:
    """Fetch a public data set."""
    parser = make_parser("Fetch a data set and check its hashes.")
    parser.add_argument("name", choices=["fashion-mnist"], help="all 70,000 images (30 MB)")
    parser.add_argument("--out", type=Path, default=Path("data/fashion-mnist"), help="folder to fill")
    parser.add_argument("--source", type=Path, help="a folder that has the four files already")
    options = parser.parse_args(arguments)
    from ..data.demo import fetch_fashion

    for news in fetch_fashion(options.out, options.source):
        runtime.say(news)
