"""The verbs that train a network from an experiment file."""

from .frame import add_config, make_parser


def train_sit(arguments: list[str]) -> None:
    """Train a velocity network."""
    parser = make_parser(
        "Train a SiT velocity network; the same command continues a run that was stopped or killed. "
        "Start it with `accelerate launch` for several GPUs and for bf16."
    )
    add_config(parser)
    options = parser.parse_args(arguments)
    from ..config import Config, load_config

    config = load_config(options.config, options.overrides, Config)
    from ..train.loop import train

    train(config)


def train_autoencoder(arguments: list[str]) -> None:
    """Train the small autoencoder of the demo."""
    parser = make_parser("Train a small AutoencoderKL from scratch, as the embedded one was.")
    add_config(parser)
    options = parser.parse_args(arguments)
    from ..config import AutoencoderConfig, load_config

    config = load_config(options.config, options.overrides, AutoencoderConfig)
    from ..train.autoencoder import train_autoencoder as run_training

    run_training(config)


def train_classifier(arguments: list[str]) -> None:
    """Train the small classifier of the demo."""
    parser = make_parser("Train the classifier in whose features FD-fashion is measured.")
    add_config(parser)
    options = parser.parse_args(arguments)
    from ..config import ClassifierConfig, load_config

    config = load_config(options.config, options.overrides, ClassifierConfig)
    from ..eval.classifier import train_classifier as run_training

    run_training(config)
