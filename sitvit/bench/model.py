"""Networks alone.

    python scripts/bench.py model --size S --batch-size 2 --dtype bf16 --compile

Arms of `model`: diffusers' DiT of the same size (the yardstick), our DiT, our SiT on ViT-5.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..models.presets import SIZES, build_model
from .timing import interleave, open_gates, ratio, saved_bytes

LATENT = 32
CLASSES = 1000


def bench_model(size: str, batch_size: int, dtype: str, rounds: int, compile_blocks: bool) -> list[str]:
    """Lines of a table: time of forward and of forward + backward, and bytes kept for backward."""
    inputs = _inputs(batch_size)
    arms: dict[str, Any] = {
        "diffusers DiT": diffusers_dit(size),
        "DiT": build_model(f"DiT-{size}/2"),
        "SiT-ViT5": build_model(f"SiT-ViT5-{size}/2", learn_sigma=True),
    }
    for name, model in arms.items():
        open_gates(model)
        if compile_blocks and name != "diffusers DiT":
            model.compile_blocks()
    lines = [
        f"size {size}/2, batch {batch_size}, {LATENT} x {LATENT} latents, {dtype}, "
        f"{'compiled by block' if compile_blocks else 'eager'}, {torch.get_num_threads()} threads, "
        f"{rounds} rounds, torch {torch.__version__}"
    ]
    for what, backward in (("forward", False), ("forward + backward", True)):
        calls: dict[str, Callable[[], object]] = {
            name: _call(name, model, inputs, dtype, backward) for name, model in arms.items()
        }
        times = interleave(calls, rounds)
        lines.append(f"{what}:")
        for base, name in (("diffusers DiT", "DiT"), ("DiT", "SiT-ViT5"), ("diffusers DiT", "SiT-ViT5")):
            lines.append(f"  {name} / {base}: {ratio(times[name], times[base])}")
        medians = ", ".join(f"{name} {1e3 * statistics.median(t):.1f} ms" for name, t in times.items())
        lines.append(f"  medians: {medians}")
    kept = {
        name: saved_bytes(_call(name, model, inputs, dtype, False, grad=True), model)
        for name, model in arms.items()
    }
    lines.append("kept for backward: " + ", ".join(f"{n} {b / 2**20:.1f} MiB" for n, b in kept.items()))
    lines.append(f"  SiT-ViT5 / DiT: {kept['SiT-ViT5'] / kept['DiT']:.3f}")
    return lines


def _inputs(batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch_size, 4, LATENT, LATENT, generator=generator)
    t = torch.rand(batch_size, generator=generator)
    labels = torch.randint(CLASSES, (batch_size,), generator=generator)
    return x.to(device), t.to(device), labels.to(device)


def _call(
    name: str,
    model: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    dtype: str,
    backward: bool,
    grad: bool = False,
) -> Callable[[], Tensor]:
    x, t, labels = inputs
    model.to(x.device)

    def call() -> Tensor:
        with (
            torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"),
            torch.set_grad_enabled(backward or grad),
        ):
            if name == "diffusers DiT":
                out = model(x, timestep=t, class_labels=labels).sample
            else:
                out = model(x, t, labels)
        if backward:
            model.zero_grad(set_to_none=True)
            out.float().square().mean().backward()
        return out

    return call


def diffusers_dit(size: str) -> nn.Module:
    """The yardstick: diffusers' DiT of a size at 256 pixels."""
    from ..models.diffusers_dit import new_diffusers_dit

    return new_diffusers_dit(**SIZES[size], input_size=LATENT, patch_size=2, num_classes=CLASSES)
