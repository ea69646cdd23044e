"""The verb that makes images."""

from pathlib import Path

from .. import runtime
from .frame import make_parser


def sample(arguments: list[str]) -> None:
    """Generate images from a checkpoint."""
    parser = make_parser(
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
    from ..generate.generation import generate, resolve_labels
    from ..generate.samples import Samples
    from ..report.figures import grid_figure, save_figure
    from ..train.checkpoint import find_checkpoint

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
