"""AdamW (arXiv 1711.05101) and a learning rate that is a pure function of the step."""

import math

import torch
from torch import Tensor, nn

from .sharding import cut, whole


def learning_rate(
    step: int,
    lr: float,
    num_steps: int,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    decay: str = "linear",
) -> float:
    """Rate of step `step`, counted from 0, of `num_steps`.

    Linear from lr / warmup_steps up to lr over the first `warmup_steps`, then constant, and

        linear        down to lr / decay_steps over the last `decay_steps`
        cosine        the same with lr (1 + cos(pi x)) / 2, x from 0 to 1 over the last `decay_steps`
        inverse_sqrt  lr sqrt(decay_steps / step) once `decay_steps` are done, whatever `num_steps` is
                      (arXiv 2312.02696, which has it with decay_steps 70000)
    """
    warmup = (step + 1) / warmup_steps if step < warmup_steps else 1.0
    if decay_steps == 0:
        return lr * warmup
    if decay == "inverse_sqrt":
        return lr * warmup * math.sqrt(decay_steps / max(step, decay_steps))
    remaining = min((num_steps - step) / decay_steps, 1.0)
    return lr * warmup * (remaining if decay == "linear" else (1 - math.cos(math.pi * remaining)) / 2)


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters, in the order of `trainable_names`.

    Matrices of linear and convolution layers decay; biases, norms, gammas and embeddings (labels, positions,
    registers) do not.
    """
    parameters = dict(model.named_parameters())
    decayed, others = _groups(model)
    groups = [
        {"params": [parameters[name] for name in decayed], "weight_decay": weight_decay},
        {"params": [parameters[name] for name in others], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, fused=True)


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that the optimizer holds, in its order."""
    decayed, others = _groups(model)
    return decayed + others


def _groups(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the trainable parameters that decay, and of the others."""
    matrices = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    }
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in names if name in matrices], [name for name in names if name not in matrices]


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: `exp_avg.blocks.0....`, `step.blocks.0....`.

    Of a sharded network they are gathered: all processes call it together.
    """
    states = optimizer.state_dict()["state"]
    cut_or_not = {
        f"{key}.{names[index]}": value.detach()
        for index, state in states.items()
        for key, value in state.items()
    }
    return {name: value.cpu().contiguous() for name, value in whole(cut_or_not).items()}


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Put the tensors of `optimizer_tensors` back, bit for bit."""
    keys = sorted({name.split(".", 1)[0] for name in tensors})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        index: {key: cut(tensors[f"{key}.{name}"], like=parameters[index]) for key in keys}
        for index, name in enumerate(names)
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
