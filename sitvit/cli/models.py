"""The verbs about networks alone: weights from elsewhere, counts, speed."""

import dataclasses
import json
from pathlib import Path

from .. import runtime
from .frame import check_positive, make_parser


def import_checkpoint(arguments: list[str]) -> None:
    """Turn weights from elsewhere into a model folder, or ours into an official file."""
    parser = make_parser(
        "Read a run, a checkpoint, a model folder, an official SiT, DiT, ViT-5 or ViT file, or diffusers' "
        "folder of a DiT or of its pipeline, and write it as a model folder, or with --official as a file of "
        "the official layout."
    )
    parser.add_argument("source", help="what to read")
    parser.add_argument("out", type=Path, help="folder to write, or a .pt, .pth or .safetensors file")
    parser.add_argument(
        "--weights",
        help="ema, model, or a run's by name, such as ema_0.999 (default: the average where there is one)",
    )
    parser.add_argument("--family", choices=["SiT", "DiT"], help="where the file does not tell")
    parser.add_argument("--num-heads", type=int, help="for a width that is not a published one")
    parser.add_argument(
        "--input-size", type=int, nargs=2, metavar=("H", "W"), help="of a grid that is not square"
    )
    parser.add_argument(
        "--num-classes",
        type=int,
        help="of a file whose label rows are all classes (default: the last is none)",
    )
    parser.add_argument("--official", action="store_true", help="write one file under the official key names")
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise ValueError(f"{options.out} is there already; choose another name, or delete it")
    if options.official != (options.out.suffix in (".pt", ".pth", ".safetensors")):
        raise ValueError("--official writes a .pt, .pth or .safetensors file; without it a folder is written")
    from ..models.convert import save_official
    from ..train.checkpoint import load_checkpoint

    size = None if options.input_size is None else tuple(options.input_size)
    model = load_checkpoint(
        options.source, options.weights, options.family, options.num_heads, size, options.num_classes
    )
    with runtime.write_aside(options.out) as temporary:
        if options.official:
            save_official(model, temporary, options.out.suffix)
        else:
            model.save_pretrained(temporary)
    count = sum(parameter.numel() for parameter in model.parameters())
    runtime.say(f"{options.out}: {type(model).__name__}, {count:,} parameters")


def geometry(arguments: list[str]) -> None:
    """Tokens, parameters, FLOPs and memory of models."""
    parser = make_parser(
        "Compare models, or count one that has no name: tokens, parameters, multiply-adds and FLOPs, memory "
        "of a training step. Or, with --image and --patch, the patch grid over an image of any size."
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL or key=value",
        help="names, such as SiT-XL/2, SiT-ViT5-XL/2, DiT-B/4, ViT5-B/16, ViT-L/14; and constructor "
        "arguments for all of them, such as depth=12 or input_size=32,64 (height, width). Without a name, "
        "all of input_size, patch_size, hidden_size, depth, num_heads for a SiT, or of img_size, patch_size, "
        "embed_dim, depth, num_heads for a classifier",
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
    if not grid_asked and (not options.models or options.image is not None or options.patch is not None):
        raise ValueError(
            "name models, such as SiT-XL/2, or describe one by key=value, or ask for a grid alone: --image "
            "1280x720 --patch 14"
        )
    check_positive(options.downsampling, "--downsampling")
    check_positive(options.batch_size, "--batch-size")
    from ..models.descriptions import described_shape, preset_shape
    from ..models.geometry import geometry as geometry_of
    from ..models.geometry import patch_grid
    from ..models.memory import memory
    from ..report.geometry import geometry_records, geometry_table, patch_grid_text

    if grid_asked:
        grid = patch_grid(_pixels(options.image, "--image"), options.patch)
        runtime.say(json.dumps(dataclasses.asdict(grid)) if options.json else patch_grid_text(grid))
        return
    image_size = None if options.image_size is None else _pixels(options.image_size, "--image-size")
    if names:
        shapes = {name: preset_shape(name, overrides, image_size, options.downsampling) for name in names}
    else:
        shapes = dict([described_shape(overrides, image_size, options.downsampling)])
    models = {
        name: (geometry_of(shape), memory(shape, options.batch_size, options.dtype))
        for name, shape in shapes.items()
    }
    if options.json:
        runtime.say(json.dumps(geometry_records(models, options.batch_size, options.dtype), indent=1))
    else:
        runtime.say(geometry_table(models, options.batch_size, options.dtype, options.parts))


def _pixels(text: str, option: str) -> tuple[int, int]:
    """(height, width) of "256" or, width first as people write it, "1280x720"."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"{option} must be a side in pixels or WIDTHxHEIGHT, such as 1280x720, got {text!r}")
    return int(sides[-1]), int(sides[0])
