"""AdamW (arXiv 1711.05101) and a learning rate that is a pure function of the step."""

import torch
from torch import Tensor, nn


def learning_rate(step: int, lr: float, num_steps: int, warmup_steps: int = 0, decay_steps: int = 0) -> float:
    """Rate of step `step`, counted from 0, of `num_steps`.

    Linear from lr / warmup_steps up to lr over the first `warmup_steps`, constant, then linear down to
    lr / decay_steps over the last `decay_steps`.
    """
    warmup = (step + 1) / warmup_steps if step < warmup_steps else 1.0
    remaining = num_steps - step
    decay = remaining / decay_steps if remaining < decay_steps else 1.0
    return lr * warmup * decay


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters, in the order of `trainable_names`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that the optimizer holds, in its order."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: `exp_avg.blocks.0....`, `step.blocks.0....`."""
    states = optimizer.state_dict()["state"]
    return {
        f"{key}.{names[index]}": value.detach().cpu().contiguous()
        for index, state in states.items()
        for key, value in state.items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Put the tensors of `optimizer_tensors` back, bit for bit."""
    keys = sorted({name.split(".", 1)[0] for name in tensors})
    states = {index: {key: tensors[f"{key}.{name}"] for key in keys} for index, name in enumerate(names)}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
