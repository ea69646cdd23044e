"""The verbs that measure images and show results."""

import argparse
import json
from pathlib import Path
from typing import Any

from .. import runtime
from ..eval.settings import EvaluationConfig, preset_path
from .frame import make_parser
from .sampling import add_sampling, option, typed_sampling

OPTIONS: dict[str, tuple[type, str]] = {
    "samples": (str, "a folder, zip or npz of images, or a latent cache"),
    "checkpoint": (str, "or a run or checkpoint, whose images are made on the fly"),
    "reference": (str, "an npz of statistics, or images (default: those that the run was trained on)"),
    "features": (str, "fashion-classifier, inception, dinov2 (default: what fits the images)"),
    "inception_weights": (str, "its published weights file (default: downloaded once, hash-checked)"),
    "dinov2_weights": (str, "the released file of dinov2_vitl14"),
    "distances": (str, "of precision and recall: float32 (default), or adm for ADM's float16"),
    "batch_size": (int, "images through the feature network at once (64)"),
    "out": (str, "json file (default: beside the samples); the folder of a sweep"),
    "sampling_batch_size": (int, "images made at once (50)"),
    "keep_samples": (str, "a folder for a checkpoint's images, which are not kept otherwise"),
}
ADM_FILES = {
    "256": "--samples admnet_guided_upsampled_imagenet256.npz --reference VIRTUAL_imagenet256_labeled.npz",
    "128": "--samples admnet_guided_imagenet128.npz --reference VIRTUAL_imagenet128_labeled.npz",
}
"""What the published numbers of a self-check are of."""
OF_A_CHECKPOINT = ("sampling_batch_size", "keep_samples")
UNREAD = {
    "self_check": ("make_reference", "sweep", "preset", "metrics", "features", "distances"),
    "make_reference": ("sweep", "samples", "checkpoint", "metrics", "distances", "out"),
}
"""What would be left aside beside an option, so it is refused."""


def evaluate(arguments: list[str]) -> None:
    """Measure a set of images, or a checkpoint, against a reference."""
    parser = make_parser(
        "Measure images, or a checkpoint's as they are made, against a reference: a Frechet distance (FID in "
        "Inception features), sFID, Inception Score, precision and recall, KID. The same command continues."
    )
    parser.add_argument("--preset", help="sit-sde, sit-ode, dit, fid10k-quick, or a file of such settings")
    for name, (kind, text) in OPTIONS.items():
        parser.add_argument(option(name), type=kind, help=text)
    parser.add_argument(
        "--metrics",
        nargs="+",
        help="of fid, sfid, is, pr, kid, spread, infinity (default: the features' usual ones)",
    )
    parser.add_argument(
        "--make-reference",
        type=Path,
        metavar="NPZ",
        help="write the statistics of --reference to a file, cropped to --image-size (default: as they lie)",
    )
    parser.add_argument(
        "--sweep",
        nargs="+",
        metavar="KEY=V1,V2",
        help="weights, cfg_scale, guidance_interval (LOW:HIGH) or seed; every combination is measured",
    )
    parser.add_argument(
        "--self-check", choices=["256", "128"], help="compare with ADM's published numbers of its own batch"
    )
    add_sampling(parser, EvaluationConfig)
    options = parser.parse_args(arguments)
    runtime.check_launcher()
    config = _settings(options)
    if options.make_reference:
        from ..eval.evaluate import make_reference

        size = config.image_size[0] if config.image_size else None
        made = make_reference(config, config.reference or "", options.make_reference, size)
        runtime.say(f"measure against it with --reference {made}")
    elif options.sweep:
        _sweep(config, options.sweep)
    else:
        _evaluate_once(config, options.self_check)


def _settings(options: argparse.Namespace) -> EvaluationConfig:
    """The preset's settings, with what was typed in their place."""
    from ..config import load_config

    _check_unread(options)
    sampling = typed_sampling(options)
    given = {name: getattr(options, name) for name in (*OPTIONS, "metrics")}
    typed = {name: value for name, value in given.items() if value is not None} | sampling
    if options.self_check:
        if not options.samples or not options.reference:
            raise ValueError(f"--self-check measures ADM's own files: {ADM_FILES[options.self_check]}")
        typed["features"] = "inception"  # and float32 distances, of which the published recall is
    if options.make_reference:
        if not options.reference:
            raise ValueError("--make-reference needs the images: --reference IMAGES")
        if len(sampling.pop("image_size", [0])) > 1:
            raise ValueError("--make-reference crops to a square: --image-size takes one side")
        typed["samples"] = options.reference
    idle = [name for name in (*sampling, *OF_A_CHECKPOINT) if name in typed]
    if "samples" in typed and idle:
        raise ValueError(
            f"{', '.join(map(option, idle))}: of images that are made from a --checkpoint, not of "
            f"{typed['samples']}; leave out what does not belong"
        )
    overrides = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in typed.items()
    ]
    path = preset_path(options.preset) if options.preset else None
    config = load_config(path, overrides, EvaluationConfig)
    if path is not None and config.samples is not None:
        runtime.say(
            f"--preset {options.preset}: only how images are measured is taken of it; how those of "
            f"{config.samples} were made is up to them"
        )
    return config


def _check_unread(options: argparse.Namespace) -> None:
    """ValueError where an option is given that another one leaves aside."""
    for name, others in UNREAD.items():
        given = [option(other) for other in others if getattr(options, other) is not None]
        if getattr(options, name) is not None and given:
            raise ValueError(f"{option(name)} takes nothing from {', '.join(given)}; leave out what is idle")


def _evaluate_once(config: EvaluationConfig, self_check: str | None) -> None:
    from ..eval.evaluate import evaluate as run_evaluation

    metrics, path = run_evaluation(config)
    for name, value in metrics.items():
        runtime.say(f"{name} {value:.4f}")
    runtime.say(f"the numbers and their protocol: {path}")
    if self_check:
        from ..eval.sweep import check_against_published

        for line in check_against_published(self_check, metrics):
            runtime.say(line)


def _sweep(config: EvaluationConfig, texts: list[str]) -> None:
    from ..eval.sweep import over_seeds, sweep

    swept = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--sweep takes KEY=V1,V2, got {text!r}")
        if key in swept:
            raise ValueError(f"--sweep names {key} twice; give all its values at once: {key}=V1,V2")
        swept[key] = values.split(",")
    out = Path(config.out or "runs/evaluations/sweep")
    rows = sweep(config, swept, out)
    for row in rows:
        numbers = " ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items())
        runtime.say(f"{_point(row, swept)}: {numbers}")
    for row in over_seeds(rows):
        spread = " ".join(
            f"{name} {mean:.4f} +- {row['std'][name]:.4f}" for name, mean in row["mean"].items()
        )
        runtime.say(
            f"{_point(row, swept)} {row['seeds']} seeds, mean +- standard deviation: {spread}".lstrip()
        )
    runtime.say(f"every tried point: {out / 'sweep.json'}")


def _point(row: dict[str, Any], swept: dict[str, list[str]]) -> str:
    return " ".join(f"{key}={row[key]}" for key in swept if key in row)


def report(arguments: list[str]) -> None:
    """Write a page about runs."""
    parser = make_parser("Write a self-contained HTML page about runs: results, pictures, what was run.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders that have samples")
    parser.add_argument("--out", type=Path, default=Path("runs/report.html"), help="runs/report.html")
    parser.add_argument(
        "--figures",
        metavar="PREFIX",
        help="also write PREFIXRUN.png and PREFIXloss.png, each with json",
    )
    options = parser.parse_args(arguments)
    from ..report.html import write_report

    for path in write_report(list(dict.fromkeys(options.runs)), options.out, options.figures):
        runtime.say(f"look at {path}")
