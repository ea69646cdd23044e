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
from .weights import load_strictly


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
    """Our DiT with the tensors `theirs` of diffusers' folder; ValueError naming what is not a DiT's."""
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
