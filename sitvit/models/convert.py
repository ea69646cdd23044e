"""Weights from elsewhere: official SiT and DiT files, ViT-5 and ViT files, diffusers' DiT folder.

Nothing that is read can run code: safetensors, or a pickle of plain tensors and containers
(`weights_only=True`, plus argparse.Namespace, which the official files carry). Loading is strict.
"""

import argparse
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .dit import DiT
from .infer import (
    State,
    classifier_arguments,
    diffusion_arguments,
    is_classifier,
    is_diffusion_transformer,
)
from .positions import as_pair
from .sit import SiT
from .transformer import DiffusionTransformer
from .vit5 import ViT5

WEIGHTS = "diffusion_pytorch_model.safetensors"
RAW_KEYS = ("model", "state_dict", "module")
EMA_KEYS = ("ema", "model_ema", "state_dict_ema")
WRAPPERS = ("module.", "_orig_mod.")
CLASSES: dict[str, Any] = {"SiT": SiT, "DiT": DiT, "ViT5": ViT5}
OPTIONS = {
    "final_layer.linear": "learn_sigma",
    "pos_embed": "input_size or patch_size",
    "y_embedder": "num_classes",
    "x_embedder": "in_channels, patch_size or hidden_size",
    "reg_token": "num_registers",
}
"""Which constructor argument a tensor's shape follows from, for messages."""


def load_model(
    path: Path,
    weights: str | None = None,
    family: str | None = None,
    num_heads: int | None = None,
    input_size: tuple[int, int] | None = None,
) -> tuple[Any, str]:
    """The network saved at `path`, in evaluation mode, and which weights these are, in words.

    `path` is a model folder (ours or diffusers' DiT) or a file. `weights` chooses between "ema" and
    "model" where a file holds both; None takes the average where there is one. `family` ("SiT" or "DiT")
    is needed where neither keys nor the
    file's name tell; `num_heads` and `input_size` where shapes do not.

    Raises:
        ValueError: not there, unsafe, damaged, not a known network, or keys and shapes that do not match.
    """
    if weights not in (None, "ema", "model"):
        raise ValueError(f"weights must be ema or model, got {weights!r}")
    if path.is_dir():
        model = _load_folder(path)
        told = "the weights of the folder"
        if (path / "config.json").read_text("utf-8").find("Transformer2DModel") > 0:
            told += " (time embedded as in the official DiT; diffusers spaces its frequencies otherwise)"
        return model, told
    state, which = choose_weights(read_file(path), weights, path)
    try:
        model = _new_network(state, path, family, num_heads, input_size)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    load_strictly(model, state, path)
    return model.eval(), which


def read_file(path: Path) -> Any:
    """The content of a weights file; ValueError naming it where that is unsafe or damaged."""
    if not path.is_file():
        raise ValueError(f"there is no file or model folder {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        names = re.findall(r"GLOBAL (\S+)", str(error))
        held = f"it holds {names[0]}" if names else "its content is no plain pickle of tensors"
        raise ValueError(
            f"{path} was not loaded, since that could run code: {held}. Nothing of it was run. Where you "
            "trust it, open it there and save its tensors alone, best as safetensors"
        ) from None
    except Exception as error:  # rubbish makes an unpickler fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is damaged or not a weights file ({reason})") from None


def choose_weights(content: Any, weights: str | None, path: Path) -> tuple[State, str]:
    """The state dict in a file's content, prefixes of wrappers removed, and which one it is."""
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
    held = {
        kind: next((key for key in keys if isinstance(content.get(key), dict)), None)
        for kind, keys in (("model", RAW_KEYS), ("ema", EMA_KEYS))
    }
    if held["model"] or held["ema"]:
        key = held[weights] if weights else held["ema"] or held["model"]
        if key is None:
            there = [name for name in held.values() if name]
            raise ValueError(f"{path} has no {weights} weights; it has {', '.join(there)}")
        content, which = content[key], f"{key!r} of {path.name}"
    else:
        which = f"the only weights of {path.name}"
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)}
    state = {unwrapped(key): tensor for key, tensor in tensors.items()}
    if not state:
        raise ValueError(f"{path} holds no tensors")
    if len(state) < len(tensors):
        raise ValueError(f"{path} holds some tensors twice, with and without a wrapper's prefix")
    return state, which


def unwrapped(key: str) -> str:
    """A key without the prefixes of DDP and torch.compile, in any nesting."""
    while key.startswith(WRAPPERS):
        key = key.removeprefix(WRAPPERS[0]).removeprefix(WRAPPERS[1])
    return key.replace("._orig_mod.", ".")  # blocks that were compiled one by one


def load_strictly(model: nn.Module, state: State, path: Path) -> None:
    """Load `state` into `model`; ValueError listing missing, unexpected and misshapen tensors."""
    own = model.state_dict()
    problems = [f"{key} is missing" for key in own if key not in state]
    # ViT-5 files hold constants that our ViT5 checks and drops by itself.
    constants = (".attn.rope.freqs", ".attn.rope_reg.freqs") if isinstance(model, ViT5) else ()
    problems += [f"{key} is unexpected" for key in state if key not in own and not key.endswith(constants)]
    for key in own.keys() & state.keys():
        if own[key].shape != state[key].shape:
            option = next((o for start, o in OPTIONS.items() if key.startswith(start)), "the sizes")
            problems.append(
                f"{key} is {tuple(state[key].shape)} in the file and {tuple(own[key].shape)} in the model "
                f"({option})"
            )
    if problems:
        more = f", and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(
            f"{path} does not fit a {type(model).__name__}: {'; '.join(sorted(problems)[:8])}{more}"
        )
    model.load_state_dict(state, strict=True)


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
    heads = own["num_heads"]
    if isinstance(model, ViT5):
        read = classifier_arguments(state, heads, as_pair(own["img_size"]))
    else:
        read = diffusion_arguments(state, heads, as_pair(own["input_size"]))
    defaults = {k: p.default for k, p in inspect.signature(type(model).__init__).parameters.items()}

    def meaning(key: str, value: Any) -> Any:
        if key in ("input_size", "img_size"):
            return as_pair(value)
        if key == "layer_scale_init":
            return value is None
        return value > 0 if key == "class_dropout_prob" else value

    return [
        f"{key}={value}"
        for key, value in own.items()
        if meaning(key, value) != meaning(key, read.get(key, defaults[key]))
    ]


@torch.no_grad()
def init_from(model: DiffusionTransformer, classifier: ViT5) -> tuple[list[str], list[str], list[str]]:
    """Copy a ViT-5 classifier's block weights into `model`'s blocks.

    Returns names: taken; the model's that stay as they were; the classifier's that were not used. Blocks
    that one of the two lacks, and all that only one has (adaLN, time, labels, output; norm weights, head),
    are among the last two. ValueError where widths or head counts differ.
    """
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


def new_diffusers_dit(
    hidden_size: int, depth: int, num_heads: int, input_size: int, patch_size: int, num_classes: int
) -> nn.Module:
    """diffusers' DiT of that size with random weights: the yardstick of the benchmarks."""
    from diffusers import DiTTransformer2DModel

    model: Any = DiTTransformer2DModel(
        num_attention_heads=num_heads,
        attention_head_dim=hidden_size // num_heads,
        in_channels=4,
        out_channels=8,
        num_layers=depth,
        sample_size=input_size,
        patch_size=patch_size,
        num_embeds_ada_norm=num_classes,
        norm_eps=1e-6,
    )
    return model.eval()  # its label dropout would draw in training mode


def _new_network(
    state: State,
    path: Path,
    family: str | None,
    num_heads: int | None,
    input_size: tuple[int, int] | None,
) -> Any:
    if is_classifier(state):
        return ViT5(**classifier_arguments(state, num_heads, input_size))
    if not is_diffusion_transformer(state):
        raise ValueError(f"it is no network known here; its first keys are {', '.join(list(state)[:3])}")
    known = ("SiT", "DiT")
    family = family or next((name for name in known if path.name.lower().startswith(name.lower())), None)
    if family not in known:
        raise ValueError("official SiT and DiT files have the same keys; say which with family SiT or DiT")
    return CLASSES[family](**diffusion_arguments(state, num_heads, input_size))


def _load_folder(folder: Path) -> Any:
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
        return _diffusers_dit(folder, config)
    if name not in CLASSES:
        raise ValueError(f"{config_path} describes {name}; known are {', '.join(CLASSES)}")
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    try:
        model = CLASSES[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{config_path} does not describe a {name} ({error})") from None
    load_strictly(model, _folder_tensors(folder), folder)
    return model.eval()


def _folder_tensors(folder: Path) -> State:
    """The tensors of the index, of the standard file, or of the only file: nothing that lies beside."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    elif (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1 and not index.is_file():
        raise ValueError(f"{folder} has {len(files)} safetensors files and no {WEIGHTS}")
    state: State = {}
    for file in files:
        state |= read_file(file)
    return state


def _diffusers_dit(folder: Path, config: dict[str, Any]) -> DiT:
    """DiT from diffusers' key names. (diffusers spaces the timestep frequencies by half - 1, DiT by half.)"""
    theirs = _folder_tensors(folder)
    state = {
        key.replace("pos_embed.proj", "x_embedder.proj"): tensor
        for key, tensor in theirs.items()
        if key.startswith("pos_embed.proj")
    }
    names = {
        "attn1.to_out.0": "attn.proj",
        "ff.net.0.proj": "mlp.fc1",
        "ff.net.2": "mlp.fc2",
        "norm1.linear": "adaLN_modulation.1",
    }
    lacking = [k for k in ("num_layers", "num_attention_heads", "sample_size") if k not in config]
    if lacking:
        raise ValueError(f"{folder / 'config.json'} lacks {', '.join(lacking)}")
    depth = config["num_layers"]
    embedders = [key.split(".norm1.emb.") for key in theirs if ".norm1.emb." in key]
    for block, name in embedders:
        first_one = theirs.get(f"transformer_blocks.0.norm1.emb.{name}")
        if first_one is None or not torch.equal(theirs[f"{block}.norm1.emb.{name}"], first_one):
            raise ValueError(
                f"{folder}: {block} embeds time or label otherwise than the first block; a DiT has one "
                "embedding for all"
            )
    first = "transformer_blocks.0.norm1.emb."
    try:
        for kind in ("weight", "bias"):
            for ours, name in (("adaLN_modulation.1", "proj_out_1"), ("linear", "proj_out_2")):
                state[f"final_layer.{ours}.{kind}"] = theirs[f"{name}.{kind}"]
            for number, layer in ((0, "linear_1"), (2, "linear_2")):
                state[f"t_embedder.mlp.{number}.{kind}"] = theirs[f"{first}timestep_embedder.{layer}.{kind}"]
            for i in range(depth):
                at = f"transformer_blocks.{i}."
                qkv = [theirs[f"{at}attn1.to_{part}.{kind}"] for part in "qkv"]
                state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(qkv)
                for name, ours in names.items():
                    state[f"blocks.{i}.{ours}.{kind}"] = theirs[f"{at}{name}.{kind}"]
        state["y_embedder.embedding_table.weight"] = theirs[f"{first}class_embedder.embedding_table.weight"]
    except KeyError as error:
        raise ValueError(f"{folder} lacks the tensor {error.args[0]} of a diffusers DiT") from None
    heads, size = config["num_attention_heads"], config["sample_size"]
    arguments = diffusion_arguments(state, heads, (size, size))
    model = DiT(**{**arguments, "positions": "sincos"})
    load_strictly(model, {**state, "pos_embed": model.state_dict()["pos_embed"]}, folder)
    return model.eval()  # type: ignore[no-any-return]
