"""The verbs that measure images and show results."""

from pathlib import Path

from .. import runtime
from .frame import make_parser


def evaluate(arguments: list[str]) -> None:
    """Measure a set of images against a reference."""
    parser = make_parser(
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
    from ..eval.evaluate import evaluate as run_evaluation

    metrics, path = run_evaluation(options.samples, options.reference, options.batch_size, options.out)
    for name, value in metrics.items():
        runtime.say(f"{name} {value:.4f}")
    runtime.say(f"the numbers and their protocol: {path}")


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
