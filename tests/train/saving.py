"""Saves checkpoints until something stops it: the process that the tests of saving kill and starve.

Every tensor of step s is filled with s, so that a checkpoint tells whether it is whole and of one step.
"""

import os
from pathlib import Path

import torch

from sitvit.models.presets import preset
from sitvit.models.sit import SiT
from sitvit.train.checkpoint import WEIGHTS, Checkpoint, prune_checkpoints, save_checkpoint

DETAILS = {"class_names": ["a", "b"], "autoencoder": {}}


def network() -> SiT:
    """A network of 0.25 million values: 1 MB a set of weights, 4 MB a checkpoint."""
    return SiT(**{**preset("SiT-S/2"), "hidden_size": 96, "depth": 1, "num_heads": 2}, input_size=8)


def save_steps(run: Path, model: SiT, first: int, last: int, told: int | None = None) -> None:
    """Save steps `first` to `last`, the newest two kept; each is written to the pipe `told` once done."""
    for step in range(first, last + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        moments = {f"exp_avg.{name}": tensor for name, tensor in state.items()}
        networks = {"model": state, "ema_0.9": state}
        save_checkpoint(run / "checkpoints", step, model, networks, moments, "", DETAILS)
        prune_checkpoints(run, keep=2)
        if told is not None:
            os.write(told, step.to_bytes(8, "little"))


def is_of_one_step(checkpoint: Checkpoint) -> bool:
    """Whether every value that was saved is the step."""
    files = [f"model/{WEIGHTS}", f"ema_0.9/{WEIGHTS}", "optimizer.safetensors"]
    tensors = [tensor for file in files for tensor in checkpoint.tensors(file).values()]
    return all(bool((tensor == checkpoint.step).all()) for tensor in tensors)
