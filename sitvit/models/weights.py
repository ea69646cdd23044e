"""Weights files: read safely, the right set chosen, and what does not fit refused by key.

Nothing that is read can run code: safetensors, or a pickle of plain tensors and containers
(`weights_only=True`, plus argparse.Namespace, which the official files carry). Loading is strict.
"""

import argparse
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .infer import State
from .vit5 import ViT5

WEIGHTS = "diffusion_pytorch_model.safetensors"
RAW_KEYS = ("model", "state_dict", "module")
EMA_KEYS = ("ema", "model_ema", "state_dict_ema")
WRAPPERS = ("module.", "_orig_mod.")
LFS_POINTER = b"version https://git-lfs"
ONE_SET = "holds one set of weights and does not say whether it is an average; leave weights (--weights) out"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPTIONS = {
    "final_layer.linear": "learn_sigma",
    "pos_embed": "input_size or patch_size",
    "y_embedder": "num_classes",
    "x_embedder": "in_channels, patch_size or hidden_size",
    "reg_token": "num_registers",
}
"""Which constructor argument a tensor's shape follows from, for messages."""


def read_file(path: Path) -> Any:
    """The content of a weights file; ValueError naming it where that is unsafe or damaged."""
    if not path.is_file():
        raise ValueError(f"there is no file or model folder {path}")
    with open(path, "rb") as file:
        start = file.read(64)
    if start.startswith(LFS_POINTER):
        raise ValueError(
            f"{path} is a pointer of Git LFS and no weights: fetch the file itself (git lfs pull)"
        )
    try:
        if path.suffix == ".safetensors" or start[8:9] == b"{":  # its header of JSON, whatever its name
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
    elif weights is not None:
        raise ValueError(f"{path} {ONE_SET}")
    else:
        which = f"the only weights of {path.name}"
    state = {unwrapped(str(key)): tensor for key, tensor in content.items()}
    check_tensors(state, path)
    if len(state) < len(content):
        raise ValueError(f"{path} holds some tensors twice, with and without a wrapper's prefix")
    return state, which


def check_tensors(state: dict[str, Any], path: Path) -> None:
    """ValueError naming the entries that are no tensors of floating point numbers."""
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no tensors")
    wrong = [
        f"{key} ({value.dtype if isinstance(value, Tensor) else type(value).__name__})"
        for key, value in state.items()
        if not isinstance(value, Tensor) or value.dtype not in FLOATS
    ]
    wrong += [
        f"{key} (without values)"
        for key, value in state.items()
        if isinstance(value, Tensor) and (value.is_sparse or value.is_meta)
    ]
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"{path}: weights are dense tensors of float32, float16, bfloat16 or float64, but it holds "
            f"{', '.join(wrong[:8])}{more}"
        )


def converted(state: State) -> str:
    """What is said of weights that are not float32, which the networks are; else nothing."""
    others = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in state.values()} - {"float32"})
    return f", {' and '.join(others)} converted to float32" if others else ""


def recorded_model(content: Any) -> str | None:
    """The model's name in the arguments that official training files carry (`args.model`)."""
    arguments = content.get("args") if isinstance(content, dict) else None
    if isinstance(arguments, argparse.Namespace):
        arguments = vars(arguments)
    name = arguments.get("model") if isinstance(arguments, dict) else None
    return name if isinstance(name, str) else None


def unwrapped(key: str) -> str:
    """A key without the prefixes of DDP and torch.compile, in any nesting."""
    while key.startswith(WRAPPERS):
        key = key.removeprefix(WRAPPERS[0]).removeprefix(WRAPPERS[1])
    return key.replace("._orig_mod.", ".")  # blocks that were compiled one by one


def folder_tensors(folder: Path) -> State:
    """The tensors of the index, of the standard file, or of the only file: nothing that lies beside."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        files = [folder / name for name in _indexed(index)]
    elif (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1 and not index.is_file():
        raise ValueError(f"{folder} has {len(files)} safetensors files and no {WEIGHTS}")
    state: State = {}
    for file in files:
        state |= read_file(file)
    check_tensors(state, folder)
    return state


def _indexed(index: Path) -> list[str]:
    """The names of the shards that `index` lists."""
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} is damaged: it lists no files under weight_map")
    return names


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
    try:
        model.load_state_dict(state, strict=True)
    except ValueError as error:  # ViT-5's frequencies
        raise ValueError(f"{path}: {error}") from None
