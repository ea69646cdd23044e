"""diffusers' DiT (`DiTTransformer2DModel`): its weights under our names, and one with random weights.

Two differences from the official DiT. A diffusers DiT embeds time and label in each block; one that was
converted has the same embedding in all, and only that is taken. And with `half` frequencies it spaces them as
10000^(-k / (half - 1)), the official code and we as 10000^(-k / half).
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .dit import DiT
from .infer import State, diffusion_arguments
from .shapes import checked
from .weights import load_strictly

EMBEDDING = "transformer_blocks.0.norm1.emb."
TABLE = "pos_embed.pos_embed"
LAYERS = {
    "attn1.to_out.0": "attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
    "norm1.linear": "adaLN_modulation.1",
}
"""diffusers' names of a block's layers, and ours."""
BUILT = {
    "activation_fn": ("gelu-approximate",),
    "attention_bias": (True,),
    "norm_elementwise_affine": (False,),
    "norm_type": ("ada_norm_zero",),
    "norm_eps": (1e-6, 1e-5),
}
"""What a DiT is: the values of config.json. 1e-5 is diffusers' default, which it writes when it saves a
converted official DiT again; that was trained with 1e-6, and so it is read."""


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


def diffusers_dit(folder: Path, config: dict[str, Any], theirs: State) -> DiT:
    """Our DiT with the tensors `theirs` of diffusers' folder.

    Raises:
        ValueError: a field of `config` or a tensor is missing, of a wrong type, or not a DiT's, by name.
    """
    depth, heads, size = _sizes(folder, config)
    _check_one_embedding(folder, theirs)
    left = dict(theirs)
    try:
        state = _renamed(left, depth)
    except KeyError as error:
        raise ValueError(f"{folder} lacks the tensor {error.args[0]} of a diffusers DiT") from None
    table = left.pop(TABLE, None)
    if left:
        more = f", and {len(left) - 8} more" if len(left) > 8 else ""
        raise ValueError(
            f"{folder} holds tensors that a DiT of num_layers {depth} does not have: "
            f"{', '.join(sorted(left)[:8])}{more}"
        )
    try:
        arguments = diffusion_arguments(state, heads, (size, size), with_table=False)
        _check_sizes(config, arguments)
        model = DiT(**arguments)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    fixed = model.state_dict()["pos_embed"]
    if table is not None and (
        table.shape != fixed.shape or not torch.allclose(table.float(), fixed, atol=1e-2)
    ):
        raise ValueError(f"{folder}: {TABLE} is not the fixed table of a DiT with sample_size {size}")
    load_strictly(model, {**state, "pos_embed": fixed}, folder)
    return model.eval()  # type: ignore[no-any-return]


def _sizes(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Depth, heads and latent size of a config.json that describes a DiT."""
    path = folder / "config.json"
    names = ("num_layers", "num_attention_heads", "sample_size")
    lacking = [name for name in names if name not in config]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}")
    for name, legal in BUILT.items():
        if name in config and config[name] not in legal:
            raise ValueError(f"{path}: {name} is {config[name]!r}; a DiT has {legal[0]!r}")
    try:
        sizes = tuple(checked(name, "int", config[name]) for name in names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, value in zip(names, sizes, strict=True):
        if value < 1:
            raise ValueError(f"{path}: {name} must be at least 1, got {value}")
    return sizes


def _check_one_embedding(folder: Path, theirs: State) -> None:
    for block, name in [key.split(".norm1.emb.", 1) for key in theirs if ".norm1.emb." in key]:
        first_one = theirs.get(EMBEDDING + name)
        if first_one is None or not torch.equal(theirs[f"{block}.norm1.emb.{name}"], first_one):
            raise ValueError(
                f"{folder}: {block} embeds time or label otherwise than the first block; a DiT has one "
                "embedding for all"
            )


def _renamed(left: State, depth: int) -> State:
    """The tensors of `left` under our names, taken out of it; KeyError with the name of one that lacks."""
    state: State = {}
    for kind in ("weight", "bias"):
        state[f"x_embedder.proj.{kind}"] = left.pop(f"pos_embed.proj.{kind}")
        for ours, name in (("adaLN_modulation.1", "proj_out_1"), ("linear", "proj_out_2")):
            state[f"final_layer.{ours}.{kind}"] = left.pop(f"{name}.{kind}")
        for number, layer in ((0, "linear_1"), (2, "linear_2")):
            state[f"t_embedder.mlp.{number}.{kind}"] = left[f"{EMBEDDING}timestep_embedder.{layer}.{kind}"]
        for i in range(depth):
            at = f"transformer_blocks.{i}."
            qkv = [left.pop(f"{at}attn1.to_{part}.{kind}") for part in "qkv"]
            state[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(qkv)
            for name, ours in LAYERS.items():
                state[f"blocks.{i}.{ours}.{kind}"] = left.pop(f"{at}{name}.{kind}")
    table = "class_embedder.embedding_table.weight"
    state["y_embedder.embedding_table.weight"] = left[EMBEDDING + table]
    layers = [f"timestep_embedder.linear_{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")]
    for i in range(depth):
        for name in (table, *layers):  # all blocks' are equal
            left.pop(f"transformer_blocks.{i}.norm1.emb.{name}", None)
    return state


def _check_sizes(config: dict[str, Any], arguments: dict[str, Any]) -> None:
    """ValueError where config.json says another size than the tensors have."""
    channels = arguments["in_channels"]
    for name, found in (
        ("patch_size", arguments["patch_size"]),
        ("in_channels", channels),
        ("out_channels", channels * (2 if arguments["learn_sigma"] else 1)),
        ("attention_head_dim", arguments["hidden_size"] // arguments["num_heads"]),
        ("num_embeds_ada_norm", arguments["num_classes"]),
    ):
        if config.get(name, found) not in (found, None):
            raise ValueError(f"config.json: {name} is {config[name]!r}, but the tensors have {found}")
