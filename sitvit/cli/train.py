"""The verbs that train a network from an experiment file."""

from pathlib import Path

from .. import runtime
from .frame import add_config, duration, make_parser


def train_sit(arguments: list[str]) -> None:
    """Train a velocity network."""
    parser = make_parser(
        "Train a SiT velocity network; the same command continues a run that was stopped or killed. "
        "Start it with `accelerate launch` for several GPUs and for bf16."
    )
    add_config(parser)
    parser.add_argument(
        "--max-time",
        type=duration,
        metavar="TIME",
        help="end so long after the start, saved, with status 75; 90m, 23.5h, 300s or HH:MM:SS",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="continue a run although settings that shape its result differ; each is said",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what it would take, and make nothing")
    parser.add_argument("--print-config", action="store_true", help="print every value, and make nothing")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|PATH",
        help="auto (default): from the run's newest whole checkpoint, if it has one; none: only a new run; "
        "PATH: from that checkpoint",
    )
    options = parser.parse_intermixed_args(arguments)
    from ..config import Config, dump_config, load_config

    runtime.check_launcher()
    num_processes = runtime.launched_processes()
    config = load_config(options.config, options.overrides, Config, num_processes)
    if options.print_config or options.dry_run:
        from ..train.plan import plan

        runtime.say(dump_config(config).rstrip())
        if options.dry_run:
            runtime.say(f"\n{plan(config, num_processes).text()}")
        return
    from ..eval.while_training import Evaluation
    from ..generate.preview import Preview
    from ..train.loop import train
    from ..train.speed import Speed
    from ..train.spikes import LossSpikes
    from ..train.statistics import Statistics

    train(
        config,
        hooks=[Speed(), LossSpikes(), Statistics(), Preview(), Evaluation()],
        max_seconds=options.max_time,
        accept_changes=options.accept_changes,
        resume=options.resume,
    )


def reconstruct_average(arguments: list[str]) -> None:
    """Make an average of another length out of a run's snapshots."""
    parser = make_parser(
        "Make the average of any length after training, out of a run's snapshots of two "
        "(train.ema_widths=[0.05,0.1]); the result is sampled as any run."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "--width", type=float, required=True, help="relative width, above 0 and at most 0.28, as 0.075"
    )
    parser.add_argument("--step", type=int, help="the step that has a snapshot; the newest")
    parser.add_argument("--out", type=Path, help="the folder to write; RUN/power_WIDTH_STEP")
    options = parser.parse_args(arguments)
    from ..train.reconstruct import reconstruct

    reconstruct(options.run, options.width, options.step, options.out)


def train_autoencoder(arguments: list[str]) -> None:
    """Train the small autoencoder of the demo."""
    parser = make_parser("Train a small AutoencoderKL from scratch, as the embedded one was.")
    add_config(parser)
    options = parser.parse_intermixed_args(arguments)
    from ..config import AutoencoderConfig, load_config

    config = load_config(options.config, options.overrides, AutoencoderConfig)
    from ..train.autoencoder import train_autoencoder as run_training

    run_training(config)


def train_classifier(arguments: list[str]) -> None:
    """Train the small classifier of the demo."""
    parser = make_parser("Train the classifier in whose features FD-fashion is measured.")
    add_config(parser)
    options = parser.parse_intermixed_args(arguments)
    from ..config import ClassifierConfig, load_config

    config = load_config(options.config, options.overrides, ClassifierConfig)
    from ..eval.classifier import train_classifier as run_training

    run_training(config)
