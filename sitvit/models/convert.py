"""Networks from elsewhere, and back: official SiT, DiT, ViT-5 and ViT files, and diffusers' DiT folder."""

import contextlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .diffusers_dit import diffusers_dit
from .dit import DiT
from .infer import (
    State,
    assumed,
    classifier_arguments,
    diffusion_arguments,
    has_qk_norm,
    is_classifier,
    is_diffusion_transformer,
)
from .positions import as_pair
from .shapes import checked
from .sit import SiT
from .transformer import DiffusionTransformer
from .vit5 import ViT5
from .weights import (
    ONE_SET,
    choose_weights,
    converted,
    folder_tensors,
    load_strictly,
    read_file,
    recorded_model,
)

CLASSES: dict[str, Any] = {"SiT": SiT, "DiT": DiT, "ViT5": ViT5}
FAMILIES = ("SiT", "DiT")
FILE_NAME = re.compile(r"(SiT|DiT)(?=[-.]|$)")
"""How the name of a file begins that tells its family: SiT-XL-2-256x256.pt, DiT.pt; not sitting_room.pt."""


def load_model(
    path: Path,
    weights: str | None = None,
    family: str | None = None,
    num_heads: int | None = None,
    input_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
) -> tuple[Any, str]:
    """The network saved at `path`, in evaluation mode, and which weights these are, in words.

    `path` is a model folder (ours, diffusers' DiT, or the pipeline around it) or a file. `weights` chooses
    between "ema" and "model" where a file holds both; None takes the average where there is one. `family`
    ("SiT" or "DiT") is needed where neither the file's own record of its training nor its name tells. A name
    does that begins as the published ones do, SiT-XL-2-256x256.pt, or is SiT or DiT alone. `num_heads` and
    `input_size` are needed where shapes do not tell, and `num_classes` where a network was trained without
    class dropout: a file's last label row is taken for "no class" unless it says that all rows are classes.
    Weights are converted to float32.

    Raises:
        ValueError: not there, unsafe, damaged, not a known network, keys, shapes or types that do not
            match, or an argument that contradicts what is recorded.
    """
    if weights not in (None, "ema", "model"):
        raise ValueError(f"weights must be ema or model, got {weights!r}")
    if family not in (None, *FAMILIES):
        raise ValueError(f"family must be SiT or DiT, got {family!r}")
    size = None if input_size is None else as_pair(checked("input_size", "int | tuple[int, int]", input_size))
    if path.is_dir():
        if weights is not None:
            raise ValueError(f"{path} {ONE_SET}")
        model, told = _load_folder(path)
        check_recorded(model, path, family, num_heads, size, num_classes)
        return model, told
    content = read_file(path)
    state, told = choose_weights(content, weights, path)
    known = _family(content, path, family)
    by_name = FILE_NAME.match(path.name)
    try:
        model = _new_network(state, known or (by_name and by_name[1]), num_heads, size, num_classes)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    check_recorded(model, path, family, num_heads, size, num_classes)
    load_strictly(model, state, path)
    told += converted(state)
    if not isinstance(model, ViT5):
        told += assumed(state, model.has_null) + (
            "" if known else f" (a {type(model).__name__} by the file's name)"
        )
    if num_heads is None and not has_qk_norm(state):
        heads, width = model.config["num_heads"], state["blocks.0.attn.proj.weight"].shape[0]
        told += f" ({heads} heads, as the published model of width {width} has; num_heads, on the command "
        told += "line --num-heads, says otherwise)"
    return model.eval(), told


def check_recorded(
    model: Any,
    path: Path,
    family: str | None,
    num_heads: int | None,
    input_size: int | tuple[int, int] | None,
    num_classes: int | None = None,
) -> None:
    """ValueError naming the argument that is not None and not what `path` records of its network."""
    own = model.config
    size = own["img_size"] if isinstance(model, ViT5) else own["input_size"]
    for name, asked, recorded in (
        ("family", family, type(model).__name__),
        ("num_heads", num_heads, own["num_heads"]),
        ("input_size", None if input_size is None else as_pair(input_size), as_pair(size)),
        ("num_classes", num_classes, own["num_classes"]),
    ):
        if asked not in (None, recorded):
            raise ValueError(f"{path} records {name} {recorded}, so {name} {asked} cannot be; leave it out")


def official_state(model: DiffusionTransformer | ViT5) -> State:
    """The state dict under the official key names, as the reference implementations load it."""
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
    if isinstance(model, ViT5) and model.rotation is not None:
        thetas = {"rope": model.thetas[0]}
        if model.num_registers:
            thetas["rope_reg"] = model.thetas[1]
        size = model.head_dim // 4
        for name, theta in thetas.items():
            freqs = (theta ** (-torch.arange(size, dtype=torch.float64) / size)).float()
            state |= {f"blocks.{i}.attn.{name}.freqs": freqs.clone() for i in range(len(model.blocks))}
    return state


def save_official(model: DiffusionTransformer | ViT5, path: Path, suffix: str) -> None:
    """Write `official_state` to `path`: safetensors for that suffix, else a torch pickle of tensors.

    Raises:
        ValueError: the network has settings that key names and shapes cannot tell a reader.
    """
    state = official_state(model)
    untold = _untold(model, state)
    if untold:
        raise ValueError(
            f"the official layout cannot say {', '.join(untold)}, so whoever reads the file would build "
            "another network; save a model folder instead"
        )
    if suffix == ".safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def _untold(model: DiffusionTransformer | ViT5, state: State) -> list[str]:
    """Settings that `state` alone would be read with another value of."""
    own: dict[str, Any] = {k: v for k, v in dict(model.config).items() if not k.startswith("_")}
    if "pos_embed" not in state:
        return [f"positions={own['positions']}"]
    read = _read_back(model, state)
    defaults = {k: p.default for k, p in inspect.signature(type(model).__init__).parameters.items()}

    def meaning(key: str, value: Any) -> Any:
        if key in ("input_size", "img_size"):
            return as_pair(value)
        if key == "layer_scale_init":
            return value is None
        if key == "mlp_ratio":
            return int(own.get("hidden_size", own.get("embed_dim")) * value)  # what the network makes of it
        return value > 0 if key == "class_dropout_prob" else value

    return [
        f"{key}={value}"
        for key, value in own.items()
        if meaning(key, value) != meaning(key, read.get(key, defaults[key]))
    ]


def _read_back(model: DiffusionTransformer | ViT5, state: State) -> dict[str, Any]:
    """What `state` is read as by someone who gives heads and size only where the reading asks for them."""
    read: Any = classifier_arguments if isinstance(model, ViT5) else diffusion_arguments
    heads = model.config["num_heads"]
    size = as_pair(model.config["img_size" if isinstance(model, ViT5) else "input_size"])
    for known in ((None, None), (None, size), (heads, None)):
        with contextlib.suppress(ValueError):
            return read(state, *known)  # type: ignore[no-any-return]
    return read(state, heads, size)  # type: ignore[no-any-return]


@torch.no_grad()
def init_from(model: DiffusionTransformer, classifier: ViT5) -> tuple[list[str], list[str], list[str]]:
    """Copy a ViT-5 classifier's block weights into `model`'s blocks.

    Returns names: taken; the model's that stay as they were; the classifier's that were not used. Blocks
    that one of the two lacks, and all that only one has (adaLN, time, labels, output; norm weights, head),
    are among the last two. ValueError where widths or head counts differ, or for networks of other kinds.
    """
    for what, network, kind in (("model", model, DiffusionTransformer), ("classifier", classifier, ViT5)):
        if not isinstance(network, kind):
            needed = "sitvit.SiT or DiT" if what == "model" else "sitvit.ViT5, such as load_checkpoint gives"
            raise ValueError(f"the {what} of init_from must be a {needed}; got a {type(network).__name__}")
    if model.hidden_size != classifier.config["embed_dim"]:
        raise ValueError(
            f"the classifier is {classifier.config['embed_dim']} wide, the model {model.hidden_size}; "
            "they must be equal"
        )
    if model.config["num_heads"] != classifier.config["num_heads"]:
        raise ValueError(
            f"the classifier has {classifier.config['num_heads']} heads, the model "
            f"{model.config['num_heads']}; they must be equal"
        )
    source = classifier.state_dict()
    taken, left = [], []
    for name, tensor in model.state_dict().items():
        given = source.get(name) if name.startswith(("blocks.", "reg_token")) else None
        if given is not None and given.shape == tensor.shape:
            tensor.copy_(given)
            taken.append(name)
        else:
            left.append(name)
    return taken, left, [name for name in source if name not in taken]


def _new_network(
    state: State,
    family: str | None,
    num_heads: int | None,
    input_size: tuple[int, int] | None,
    num_classes: int | None,
) -> Any:
    if is_classifier(state):
        return ViT5(**classifier_arguments(state, num_heads, input_size))
    if not is_diffusion_transformer(state):
        raise ValueError(f"it is no network known here; its first keys are {', '.join(list(state)[:3])}")
    if family is None:
        raise ValueError(
            "official SiT and DiT files have the same keys, and this one's record and name do not tell; say "
            "which with family SiT or DiT (--family)"
        )
    return CLASSES[family](**diffusion_arguments(state, num_heads, input_size, num_classes))


def _family(content: Any, path: Path, family: str | None) -> str | None:
    """SiT or DiT by the file's record of its training, or as asked for; None where neither says."""
    name = recorded_model(content) or ""
    recorded = next((known for known in FAMILIES if name.startswith(f"{known}-")), None)
    if family and recorded and family != recorded:
        raise ValueError(f"{path} records a {recorded} (args.model {name}), so family {family} cannot be")
    return family or recorded


def _load_folder(folder: Path) -> tuple[Any, str]:
    told = "the weights of the folder"
    if (folder / "model_index.json").is_file() and not (folder / "config.json").is_file():
        folder, told = folder / "transformer", "the weights of the pipeline's transformer/"
        if not folder.is_dir():
            raise ValueError(f"{folder.parent} is a diffusers pipeline, but no DiT's: it has no transformer/")
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    try:
        config = json.loads(config_path.read_text("utf-8"))
    except ValueError:
        raise ValueError(f"{config_path} is not readable JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"{config_path} holds no object")
    name = config.get("_class_name")
    if name in ("DiTTransformer2DModel", "Transformer2DModel"):
        state = folder_tensors(folder)
        told += f"{converted(state)} (time embedded as in the official DiT; diffusers spaces its "
        return diffusers_dit(folder, config, state).eval(), f"{told}frequencies otherwise)"
    if not isinstance(name, str) or name not in CLASSES:
        raise ValueError(f"{config_path} describes {name}; known are {', '.join(CLASSES)}")
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    try:
        model = CLASSES[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_path} does not describe a {name} ({error})") from None
    state = folder_tensors(folder)
    load_strictly(model, state, folder)
    return model.eval(), told + converted(state)
