"""The verbs, as `scripts/` call them: parse, check, hand over. Heavy imports wait until they are needed.

A user's mistake ends in one sentence on stderr and exit status 2; an interruption in 130. A traceback
means a fault of ours. SITVIT_TRACEBACK=1 shows one for every error.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from . import __version__, runtime

Verb = Callable[[list[str]], None]


def encode_latents(arguments: list[str]) -> None:
    """Encode images to a cache of autoencoder moments."""
    parser = _parser(
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
    _positive(options.batch_size, "--batch-size")
    from .data.images import open_images, source_name

    source = open_images(options.images)
    for notice in source.notices:
        runtime.say(notice)
    counts = [int((source.labels == label).sum()) for label in range(len(source.class_names))]
    shown = [f"{i} {name} ({counts[i]})" for i, name in enumerate(source.class_names)]
    more = f", ... {len(shown) - 20} more" if len(shown) > 20 else ""
    runtime.say(f"{len(source)} images; label, class, count: {', '.join(shown[:20])}{more}")
    from .data.autoencoder import Autoencoder
    from .data.encode import encode

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


def train_sit(arguments: list[str]) -> None:
    """Train a velocity network."""
    parser = _parser(
        "Train a SiT velocity network; the same command continues a run that was stopped or killed. "
        "Start it with `accelerate launch` for several GPUs and for bf16."
    )
    _add_config(parser)
    options = parser.parse_args(arguments)
    from .config import Config, load_config

    config = load_config(options.config, options.overrides, Config)
    from .train.loop import train

    train(config)


def sample(arguments: list[str]) -> None:
    """Generate images from a checkpoint."""
    parser = _parser(
        "Generate images. Image i follows from checkpoint, settings, seed and i alone; the same command "
        "continues an interrupted job."
    )
    parser.add_argument("--checkpoint", help="a run or a checkpoint folder (default: the newest under runs/)")
    parser.add_argument("--weights", default="ema", help="ema (default), model, or a full name")
    parser.add_argument("--num-images", type=int, default=100, help="number of images (100)")
    parser.add_argument(
        "--labels",
        nargs="+",
        default=["balanced"],
        help="balanced (default), random, or class names and labels used in turn",
    )
    parser.add_argument("--seed", type=int, default=0, help="0")
    parser.add_argument("--cfg-scale", type=float, default=1.0, help="guidance; 1 is off (1)")
    parser.add_argument("--method", default="heun", help="ODE method: heun (default) or euler")
    parser.add_argument("--num-steps", type=int, default=50, help="steps of the method (50)")
    parser.add_argument("--batch-size", type=int, default=50, help="images at once (50)")
    parser.add_argument("--out", type=Path, help="folder (default: named by the settings, in the run)")
    parser.add_argument("--autoencoder", help="where the autoencoder lies now, if it moved")
    options = parser.parse_args(arguments)
    from .generate.generation import generate, resolve_labels
    from .generate.samples import Samples
    from .report.figures import grid_figure, save_figure
    from .train.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(options.checkpoint)
    out = generate(
        checkpoint,
        options.weights,
        options.out,
        options.num_images,
        resolve_labels(options.labels, checkpoint.class_names),
        options.seed,
        options.cfg_scale,
        options.method,
        options.num_steps,
        options.batch_size,
        options.autoencoder,
    )
    if runtime.is_main_process():
        grid = out / "grid.png"
        save_figure(grid, lambda: grid_figure(Samples(out), out.name))
        runtime.say(f"look at {grid}")


def evaluate(arguments: list[str]) -> None:
    """Measure a set of images against a reference."""
    parser = _parser(
        "FD-fashion (not FID) of a set of images against a reference, and the share of images that "
        "show the class that was asked for."
    )
    parser.add_argument(
        "--samples",
        required=True,
        help="a folder made by sample.py or encode_latents.py, or images",
    )
    parser.add_argument("--reference", help="images (default: those that the run was trained on)")
    parser.add_argument("--batch-size", type=int, default=250, help="images at once (250)")
    parser.add_argument("--out", type=Path, help="json file (default: beside the samples)")
    options = parser.parse_args(arguments)
    from .eval.evaluate import evaluate as run_evaluation

    metrics, path = run_evaluation(options.samples, options.reference, options.batch_size, options.out)
    for name, value in metrics.items():
        runtime.say(f"{name} {value:.4f}")
    runtime.say(f"the numbers and their protocol: {path}")


def report(arguments: list[str]) -> None:
    """Write a page about runs."""
    parser = _parser("Write a self-contained HTML page about runs: results, pictures, what was run.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders that have samples")
    parser.add_argument("--out", type=Path, default=Path("runs/report.html"), help="runs/report.html")
    parser.add_argument(
        "--figures",
        metavar="PREFIX",
        help="also write PREFIXRUN.png and PREFIXloss.png, each with json",
    )
    options = parser.parse_args(arguments)
    from .report.html import write_report

    for path in write_report(list(dict.fromkeys(options.runs)), options.out, options.figures):
        runtime.say(f"look at {path}")


def import_checkpoint(arguments: list[str]) -> None:
    """Turn weights from elsewhere into a model folder, or ours into an official file."""
    parser = _parser(
        "Read a run, a checkpoint, a model folder, an official SiT, DiT, ViT-5 or ViT file, or diffusers' "
        "DiT folder, and write it as a model folder, or with --official as a file of the official layout."
    )
    parser.add_argument("source", help="what to read")
    parser.add_argument("out", type=Path, help="folder to write, or a .pt, .pth or .safetensors file")
    parser.add_argument(
        "--weights", choices=["ema", "model"], help="which (default: the average where there is one)"
    )
    parser.add_argument("--family", choices=["SiT", "DiT"], help="where the file's name does not tell")
    parser.add_argument("--num-heads", type=int, help="for a width that is not a published one")
    parser.add_argument(
        "--input-size", type=int, nargs=2, metavar=("H", "W"), help="of a grid that is not square"
    )
    parser.add_argument("--official", action="store_true", help="write one file under the official key names")
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise ValueError(f"{options.out} is there already; choose another name, or delete it")
    if options.official != (options.out.suffix in (".pt", ".pth", ".safetensors")):
        raise ValueError("--official writes a .pt, .pth or .safetensors file; without it a folder is written")
    from .models.convert import save_official
    from .train.checkpoint import load_checkpoint

    size = None if options.input_size is None else tuple(options.input_size)
    model = load_checkpoint(options.source, options.weights, options.family, options.num_heads, size)
    with runtime.write_aside(options.out) as temporary:
        if options.official:
            save_official(model, temporary, options.out.suffix)
        else:
            model.save_pretrained(temporary)
    count = sum(parameter.numel() for parameter in model.parameters())
    runtime.say(f"{options.out}: {type(model).__name__}, {count:,} parameters")


def fetch_data(arguments: list[str]) -> None:
    """Fetch a public data set."""
    parser = _parser("Fetch a data set and check its hashes.")
    parser.add_argument("name", choices=["fashion-mnist"], help="all 70,000 images (30 MB)")
    parser.add_argument("--out", type=Path, default=Path("data/fashion-mnist"), help="folder to fill")
    parser.add_argument("--source", type=Path, help="a folder that has the four files already")
    options = parser.parse_args(arguments)
    from .data.demo import fetch_fashion

    for news in fetch_fashion(options.out, options.source):
        runtime.say(news)


def train_autoencoder(arguments: list[str]) -> None:
    """Train the small autoencoder of the demo."""
    parser = _parser("Train a small AutoencoderKL from scratch, as the embedded one was.")
    _add_config(parser)
    options = parser.parse_args(arguments)
    from .config import AutoencoderConfig, load_config

    config = load_config(options.config, options.overrides, AutoencoderConfig)
    from .train.autoencoder import train_autoencoder as run_training

    run_training(config)


def train_classifier(arguments: list[str]) -> None:
    """Train the small classifier of the demo."""
    parser = _parser("Train the classifier in whose features FD-fashion is measured.")
    _add_config(parser)
    options = parser.parse_args(arguments)
    from .config import ClassifierConfig, load_config

    config = load_config(options.config, options.overrides, ClassifierConfig)
    from .eval.classifier import train_classifier as run_training

    run_training(config)


def bench(arguments: list[str]) -> None:
    """Measure speed as ratios."""
    parser = _parser("Measure speed as ratios between arms that take turns in one process.")
    parser.add_argument("what", choices=["model"], help="networks alone")
    parser.add_argument("--size", default="S", choices=["S", "B", "L", "XL"], help="S")
    parser.add_argument("--batch-size", type=int, default=2, help="2")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"], help="fp32, or bf16 autocast")
    parser.add_argument("--rounds", type=int, default=11, help="11")
    parser.add_argument("--compile", action="store_true", help="compile our networks by block")
    options = parser.parse_args(arguments)
    _positive(options.batch_size, "--batch-size")
    _positive(options.rounds, "--rounds")
    from .bench import bench_model

    for line in bench_model(options.size, options.batch_size, options.dtype, options.rounds, options.compile):
        print(line)


def geometry(arguments: list[str]) -> None:
    """Tokens, parameters, FLOPs and memory of models."""
    parser = _parser(
        "Compare models: tokens, parameters, multiply-adds and FLOPs, memory of a training step. "
        "Or, with --image and --patch, the patch grid over an image of any size."
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL or key=value",
        help="names, such as SiT-XL/2, SiT-ViT5-XL/2, DiT-B/4, ViT5-B/16, ViT-L/14; and constructor "
        "arguments for all of them, such as depth=12 or input_size=32,64 (height, width)",
    )
    parser.add_argument("--image-size", help="side in pixels, or WIDTHxHEIGHT (default: the model's)")
    parser.add_argument("--downsampling", type=int, default=8, help="image pixels per latent pixel (8)")
    parser.add_argument("--batch-size", type=int, default=32, help="images a device (32)")
    parser.add_argument("--dtype", default="float32", help="float32 (default), or bf16 for autocast")
    parser.add_argument("--parts", action="store_true", help="also by part of the network")
    parser.add_argument("--json", action="store_true", help="counts and bytes for a machine")
    parser.add_argument("--image", metavar="WIDTHxHEIGHT", help="pixels; ask for the patch grid over it")
    parser.add_argument("--patch", type=int, help="the patch's side for --image, in pixels")
    options = parser.parse_intermixed_args(arguments)
    names = [text for text in options.models if "=" not in text]
    overrides = dict(text.split("=", 1) for text in options.models if "=" in text)
    grid_asked = options.image is not None and options.patch is not None and not options.models
    if not grid_asked and (not names or options.image is not None or options.patch is not None):
        raise ValueError(
            "name models, such as SiT-XL/2, or ask for a grid alone: --image 1280x720 --patch 14"
        )
    _positive(options.downsampling, "--downsampling")
    _positive(options.batch_size, "--batch-size")
    from .models.geometry import geometry as geometry_of
    from .models.geometry import patch_grid
    from .models.memory import memory
    from .models.shapes import preset_shape
    from .report.geometry import geometry_records, geometry_table, patch_grid_text

    if grid_asked:
        grid = patch_grid(_pixels(options.image, "--image"), options.patch)
        runtime.say(json.dumps(dataclasses.asdict(grid)) if options.json else patch_grid_text(grid))
        return
    image_size = None if options.image_size is None else _pixels(options.image_size, "--image-size")
    models = {}
    for name in names:
        shape = preset_shape(name, overrides, image_size, options.downsampling)
        models[name] = geometry_of(shape), memory(shape, options.batch_size, options.dtype)
    if options.json:
        runtime.say(json.dumps(geometry_records(models, options.batch_size, options.dtype), indent=1))
    else:
        runtime.say(geometry_table(models, options.batch_size, options.dtype, options.parts))


def main(verb: Verb) -> None:
    """Run a verb on the command line's arguments, and turn what went wrong into one sentence."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        verb(sys.argv[1:])
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "interrupted; the same command continues", 130)
    except Exception as error:  # the outermost frame: what has no sentence is raised again
        sentence = explain(error)
        if sentence is None or os.environ.get("SITVIT_TRACEBACK"):
            raise
        _fail(f"error: {sentence}", 2)


def explain(error: Exception) -> str | None:
    """One sentence about an error that is the user's or the machine's, else None."""
    if isinstance(error, (ValueError, OSError, FloatingPointError)):
        return str(error) or type(error).__name__
    if type(error).__name__ == "SafetensorError":  # what the disk said, by way of safetensors
        return f"a safetensors file could not be written or read: {error}"
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "the memory is not enough; try a smaller batch size"
    return None


def _fail(sentence: str, status: int) -> NoReturn:
    rank = "" if runtime.is_main_process() else f"[process {os.environ['RANK']}] "
    print(f"{rank}{sentence}", file=sys.stderr, flush=True)
    sys.exit(status)


def _terminate(*_: object) -> None:
    raise KeyboardInterrupt("terminated; the same command continues")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"error: {message}; --help lists the options", 2)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sitvit {__version__}")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="an experiment file of configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a value, as train.lr=1e-4"
    )


def _positive(value: int, option: str) -> None:
    if value < 1:
        raise ValueError(f"{option} must be at least 1, got {value}")


def _pixels(text: str, option: str) -> tuple[int, int]:
    """(height, width) of "256" or, width first as people write it, "1280x720"."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"{option} must be a side in pixels or WIDTHxHEIGHT, such as 1280x720, got {text!r}")
    return int(sides[-1]), int(sides[0])
