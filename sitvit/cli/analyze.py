"""The verb that looks inside a trained network."""

from pathlib import Path

from .. import runtime
from .frame import make_parser


def analyze(arguments: list[str]) -> None:
    """Probe, attention, token norms and gates of checkpoints, as numbers and figures."""
    parser = make_parser(
        "Look inside trained networks: linear probe of the class by block and t, attention distance and "
        "maps, token norms, gates and LayerScale. Several networks see the same images and share the "
        "figures. Writes OUT/analysis.json and PNG figures."
    )
    parser.add_argument(
        "checkpoints", nargs="+", help="each a run, a checkpoint, a model folder or an official file"
    )
    parser.add_argument("--weights", help="ema, model or a full name (default: the average)")
    parser.add_argument("--step", type=int, help="which checkpoint of a run (default: the newest)")
    parser.add_argument("--family", choices=["SiT", "DiT"], help="where an official file does not tell")
    parser.add_argument("--data", type=Path, help="latent cache to look at (default: what it was trained on)")
    parser.add_argument(
        "--num-images", type=int, help="half fit the probe, half test it (2000, or 20 a class if more)"
    )
    parser.add_argument(
        "--times", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9], metavar="T",
        help="from 0, noise, to 1, data (0.1 0.3 0.5 0.7 0.9)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of images and noise (0)")
    parser.add_argument("--batch-size", type=int, default=50, help="images at once (50)")
    parser.add_argument(
        "--out", type=Path, help="folder (default: RUN/analysis, with --step RUN/analysis/step_N)"
    )
    options = parser.parse_args(arguments)
    if len(options.checkpoints) > 1 and options.out is None:
        raise ValueError("several networks have no common folder: say where to write with --out FOLDER")
    if runtime.launched_processes() > 1:
        raise ValueError("analyze.py is the work of one process; start it with python alone")
    from ..analyze import analysis
    from ..analyze.inputs import open_networks
    from ..report.analysis import write_figures

    networks, latents = open_networks(
        options.checkpoints, options.weights, options.step, options.data, options.family
    )
    first = next(iter(networks.values()))
    step = [f"step_{options.step:07d}"] if options.step is not None else []
    out = options.out or first.home.joinpath("analysis", *step)
    count = options.num_images
    if count is None:
        count = min(len(latents), max(2000, 20 * len(latents.class_names)))
    settings = networks, latents, count, options.times, options.seed, options.batch_size
    found = analysis.read_analysis(out, analysis.describe(*settings))
    if found is None:
        out.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before the work
        found = analysis.analyze(*settings, runtime.processes().device)
        runtime.write_json(out / analysis.RECORD, {**found, "command": runtime.command_line()})
    for path in [out / analysis.RECORD, *write_figures(found, out)]:
        runtime.say(f"look at {path}")
