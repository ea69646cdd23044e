"""The verb that measures speed: `bench.py WHAT`, each with options of its own."""

from pathlib import Path

from .frame import check_positive, make_parser


def bench(arguments: list[str]) -> None:
    """Measure speed as ratios."""
    parser = make_parser("Measure speed as ratios between arms that take turns in one process.")
    parser.add_argument("what", choices=list(BENCHES), help="what to measure; WHAT --help lists its options")
    if not arguments or arguments[0] not in BENCHES:
        parser.parse_args(arguments)  # says what is wrong, or helps
    BENCHES[arguments[0]](arguments[1:])


def _model(arguments: list[str]) -> None:
    parser = make_parser("Networks alone: ours against diffusers' DiT, SiT on ViT-5 against vanilla.")
    parser.add_argument("--size", default="S", choices=["S", "B", "L", "XL"], help="S")
    parser.add_argument("--batch-size", type=int, default=2, help="2")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"], help="fp32, or bf16 autocast")
    parser.add_argument("--rounds", type=int, default=11, help="11")
    parser.add_argument("--compile", action="store_true", help="compile our networks by block")
    options = parser.parse_args(arguments)
    check_positive(options.batch_size, "--batch-size")
    check_positive(options.rounds, "--rounds")
    from ..bench.model import bench_model

    for line in bench_model(options.size, options.batch_size, options.dtype, options.rounds, options.compile):
        print(line)


def _data(arguments: list[str]) -> None:
    parser = make_parser(
        "Reading latents: random batches from the cache against one .npy file per item; how long encoding "
        "waits for images."
    )
    parser.add_argument("--num-items", type=int, default=20_000, help="20000 (needs 0.7 GB of disk)")
    parser.add_argument("--batch-size", type=int, default=256, help="256")
    parser.add_argument("--rounds", type=int, default=31, help="31")
    options = parser.parse_args(arguments)
    for name in ("num_items", "batch_size", "rounds"):
        check_positive(getattr(options, name), f"--{name.replace('_', '-')}")
    from ..bench.data import bench_data

    for line in bench_data(options.num_items, options.batch_size, options.rounds):
        print(line)


def _sample(arguments: list[str]) -> None:
    parser = make_parser("Samplers around a network: shared calls, guidance, the sampler's own cost.")
    parser.add_argument("--model", default="SiT-S/2", help="SiT-S/2")
    parser.add_argument("--batch-size", type=int, default=1, help="1")
    parser.add_argument("--num-steps", type=int, default=10, help="10; the ratios hardly depend on it")
    parser.add_argument("--rounds", type=int, default=11, help="11")
    options = parser.parse_args(arguments)
    for name in ("batch_size", "num_steps", "rounds"):
        check_positive(getattr(options, name), f"--{name.replace('_', '-')}")
    from ..bench.sample import bench_sample

    for line in bench_sample(options.model, options.batch_size, options.num_steps, options.rounds):
        print(line)


def _train(arguments: list[str]) -> None:
    parser = make_parser("Whole training steps, and AdamW + EMA alone, against a loop like the official one.")
    parser.add_argument("--size", default="S", choices=["S", "B", "L", "XL"], help="S")
    parser.add_argument("--batch-size", type=int, default=2, help="2")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"], help="fp32, or bf16 autocast")
    parser.add_argument("--rounds", type=int, default=11, help="11")
    parser.add_argument("--compile", default="none", choices=["none", "block", "whole"], help="ours; none")
    parser.add_argument(
        "--reference-dir", type=Path, help="a checkout of SiT, whose models.py is run as the yardstick"
    )
    options = parser.parse_args(arguments)
    check_positive(options.batch_size, "--batch-size")
    check_positive(options.rounds, "--rounds")
    from ..bench.train import bench_train

    for line in bench_train(
        options.size,
        options.batch_size,
        options.dtype,
        options.rounds,
        options.compile,
        options.reference_dir,
    ):
        print(line)


def _eval(arguments: list[str]) -> None:
    parser = make_parser("The mathematics of evaluation: time against scipy's matrix root, and memory.")
    parser.add_argument("--features", type=int, default=2048, help="2048")
    parser.add_argument("--samples", type=int, default=50_000, help="50000")
    parser.add_argument("--reference", type=int, default=10_000, help="10000")
    parser.add_argument("--rounds", type=int, default=3, help="3")
    options = parser.parse_args(arguments)
    for name in ("features", "samples", "reference", "rounds"):
        check_positive(getattr(options, name), f"--{name}")
    from ..bench.eval import bench_eval

    for line in bench_eval(options.features, options.samples, options.reference, options.rounds):
        print(line, flush=True)


BENCHES = {"train": _train, "model": _model, "data": _data, "sample": _sample, "eval": _eval}
