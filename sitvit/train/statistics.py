"""What each block of a network does, in three numbers that tell of trouble before the loss does.

    logit_max_07     max over heads, queries, keys of |q k^T| / sqrt(d), after norm and rotation: where it
                     grows without bound, attention collapses onto single tokens (arXiv 2302.05442)
    gate_07          mean |gate| of adaLN over samples, channels and both branches
    gamma_07         mean |gamma| of LayerScale over channels and both branches, where there is one

of block 7, on the first `SAMPLES` of the main process's batch of that step, in float32, with the weights
after it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .step import sample_losses
from .trainer import Row, Trainer

SAMPLES = 8


class Statistics:
    """A hook that adds `block_statistics` to the row of every `train.statistics_every`-th step, 0: never."""

    def __call__(self, trainer: Trainer, row: Row | None) -> None:
        """Measure, where this step is one that measures, on a copy of the network."""
        every = trainer.settings.statistics_every
        if not every or row is None or trainer.step % every:
            return
        weights = trainer.whole_weights()
        if not trainer.handle.is_main_process:
            return
        positions = trainer.positions[:SAMPLES]
        batch = trainer.stream.batch(trainer.step - 1 + trainer.shift, positions).to(trainer.handle.device)
        network = _copy(trainer, weights)
        row.update(
            block_statistics(network, lambda: sample_losses(network, batch, trainer.objective, trainer.times))
        )


def _copy(trainer: Trainer, weights: dict[str, Tensor]) -> Any:
    """The network without its compiled code, its wrappers and autocast."""
    with torch.random.fork_rng():
        network: Any = type(trainer.model).from_config(trainer.model.config)
    network.load_state_dict(weights)
    return network.to(trainer.handle.device).eval()


@torch.no_grad()
def block_statistics(network: Any, run: Callable[[], object]) -> dict[str, float]:
    """The numbers of each block of `network`, a SiT or DiT, while `run()` runs it once."""
    found: dict[str, Tensor] = {}
    handles = []
    for number, block in enumerate(network.blocks):
        handles += [
            block.attn.register_forward_pre_hook(_note_logits(found, f"logit_max_{number:02d}")),
            block.adaLN_modulation.register_forward_hook(_note_gates(found, f"gate_{number:02d}")),
        ]
        if block.gamma_1 is not None:
            gammas = torch.cat([block.gamma_1, block.gamma_2])
            found[f"gamma_{number:02d}"] = gammas.float().abs().mean()
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: value.item() for name, value in sorted(found.items())}


def _note_logits(found: dict[str, Tensor], name: str) -> Callable[[Any, tuple[Any, ...]], None]:
    def note(attention: Any, inputs: tuple[Any, ...]) -> None:
        q, k, _ = attention.heads(*inputs)
        logits = q.float() @ k.float().transpose(-2, -1) / q.shape[-1] ** 0.5  # (B, heads, N, N)
        found[name] = logits.abs().max()

    return note


def _note_gates(found: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def note(module: nn.Module, inputs: Any, modulation: Tensor) -> None:
        parts = modulation.float().chunk(6, dim=1)
        found[name] = torch.cat([parts[2], parts[5]]).abs().mean()

    return note
