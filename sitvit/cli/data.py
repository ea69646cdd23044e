"""The verbs that bring images in."""

from pathlib import Path

from .. import runtime
from .frame import check_positive, make_parser


def encode_latents(arguments: list[str]) -> None:
    """Encode images to a cache of autoencoder moments."""
    parser = make_parser(
        "Encode a folder of images (one folder per class) or the embedded images to latents, once. "
        "The same command continues an interrupted job."
    )
    parser.add_argument(
        "--images",
        default="fashion-mnist",
        help="a folder with a folder of images per class, an IDX file, or fashion-mnist (default)",
    )
    parser.add_argument(
        "--autoencoder",
        default="fashion-autoencoder",
        help="a diffusers AutoencoderKL: a folder, a hub name such as stabilityai/sd-vae-ft-ema, or the "
        "embedded fashion-autoencoder (default; for small gray images)",
    )
    parser.add_argument("--image-size", type=int, default=32, help="square side in pixels (32)")
    parser.add_argument("--out", type=Path, help="cache folder (default runs/latents/NAME-SIZE)")
    parser.add_argument("--batch-size", type=int, default=50, help="images at once (50)")
    parser.add_argument("--flip", action="store_true", help="keep the mirrored images' moments too")
    options = parser.parse_args(arguments)
    check_positive(options.batch_size, "--batch-size")
    from ..data.images import open_images, source_name

    source = open_images(options.images)
    for notice in source.notices:
        runtime.say(notice)
    counts = [int((source.labels == label).sum()) for label in range(len(source.class_names))]
    shown = [f"{i} {name} ({counts[i]})" for i, name in enumerate(source.class_names)]
    more = f", ... {len(shown) - 20} more" if len(shown) > 20 else ""
    runtime.say(f"{len(source)} images; label, class, count: {', '.join(shown[:20])}{more}")
    from ..data.autoencoder import Autoencoder
    from ..data.encode import encode

    state = runtime.processes()
    name = Path(options.images).resolve().name.removesuffix(".gz")
    out = options.out or Path("runs/latents") / f"{name}-{options.image_size}"
    encode(
        source,
        source_name(options.images),
        Autoencoder(options.autoencoder, state.device),
        options.image_size,
        out,
        options.batch_size,
        options.flip,
        state.process_index,
        state.num_processes,
        state.wait_for_everyone,
    )


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
