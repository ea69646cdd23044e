"""Whole training steps: forward, backward, clipping, AdamW, EMA.

    python scripts/bench.py train --size S --batch-size 2 --dtype bf16 --compile block

The yardstick is a loop made as the official one is: diffusers' DiT of the same size, AdamW with its default
settings (no fused kernel), an average updated parameter by parameter, the loss read at every step. With
--reference-dir the network of an official SiT checkout (its models.py) takes diffusers' place.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.stream import TrainingBatch, TrainingStream
from ..flow.objective import Objective
from ..flow.paths import find_path
from ..flow.times import TimeDistribution
from ..models.geometry import PEAKS, geometry
from ..models.presets import build_model, preset
from ..models.shapes import SiTShape
from ..runtime import accelerator
from ..train.compilation import compile_network
from ..train.ema import averages
from ..train.optim import make_optimizer
from ..train.step import LateReading, training_step
from .data import synthetic_cache
from .model import CLASSES, LATENT, diffusers_dit
from .timing import interleave, open_gates, ratio

LR, DECAY = 1e-4, 0.9999
NUM_DRAWS = 20
"""Batches of the data stream that are timed."""


def bench_train(
    size: str, batch_size: int, dtype: str, rounds: int, compile_how: str, reference: Path | None
) -> list[str]:
    """Lines of a table: time of a step of each arm over the official loop's, and of AdamW plus EMA alone."""
    official = diffusers_dit(size) if reference is None else _official(reference, size)
    handle = accelerator(dtype, tf32=True)
    batch = _batch(batch_size).to(handle.device)
    networks: dict[str, nn.Module] = {
        "SiT": build_model(f"SiT-{size}/2"),
        "SiT-ViT5": build_model(f"SiT-ViT5-{size}/2"),
    }
    steps = {"official loop": _official_step(official, batch, dtype, handle.device, reference is None)}
    updates: dict[str, Callable[[], object]] = {}
    for name, model in networks.items():
        steps[name], updates[name] = _our_step(handle, model, batch, compile_how)
    lines = [
        f"size {size}/2, batch {batch_size}, {LATENT} x {LATENT} latents, {dtype}, compile {compile_how}, "
        f"{torch.get_num_threads()} threads, {rounds} rounds, {handle.device}, torch {torch.__version__}; "
        f"yardstick: {'diffusers DiT' if reference is None else reference}"
    ]
    times = interleave(steps, rounds)
    lines += [
        f"  step, {name} / official loop: {ratio(times[name], times['official loop'])}" for name in networks
    ]
    medians = {name: statistics.median(each) for name, each in times.items()}
    lines.append("  medians: " + ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in medians.items()))
    pair = interleave({"official": _official_update(networks["SiT"]), "ours": updates["SiT"]}, rounds)
    lines.append(f"  AdamW + EMA, ours / default pair (same SiT): {ratio(pair['ours'], pair['official'])}")
    return lines + _device_lines(size, batch_size, medians, handle.device)


def _batch(batch_size: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(0)
    shape = (batch_size, 4, LATENT, LATENT)
    return TrainingBatch(
        ids=torch.arange(batch_size).numpy(),
        x_0=torch.randn(shape, generator=generator),
        x_1=torch.randn(shape, generator=generator),
        u=torch.rand(batch_size, generator=generator),
        labels=torch.randint(CLASSES, (batch_size,), generator=generator),
    )


def _our_step(
    handle: Any, model: nn.Module, batch: TrainingBatch, compile_how: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step as the trainer does it, and its AdamW and EMA alone, on the gradients of a first step."""
    open_gates(model)
    model.to(handle.device)
    network: Any = model
    optimizer = make_optimizer(model, LR, (0.9, 0.999), 0.0)
    means = averages(model, [DECAY], [])
    wrapped, _ = handle.prepare(model, optimizer)
    compile_network(network, compile_how)
    objective, times, late = Objective(find_path("linear")), TimeDistribution(), LateReading()
    count = [0]

    def update_average() -> None:
        count[0] += 1
        weights = model.state_dict()
        for average in means.values():
            average.update(weights, count[0])

    def step() -> None:
        figures, _ = training_step(handle, wrapped, optimizer, batch, objective, times, LR, 1.0)
        update_average()
        late.push(figures)

    def update() -> None:
        _fill_gradients(model)
        optimizer.step()
        update_average()

    return step, update


def _official_step(
    model: nn.Module, batch: TrainingBatch, dtype: str, device: torch.device, is_diffusers: bool
) -> Callable[[], object]:
    open_gates(model)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)
    mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    t = batch.u.view(-1, 1, 1, 1)

    def step() -> float:
        x_t = t * batch.x_1 + (1 - t) * batch.x_0
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
            out = (
                model(x_t, timestep=batch.u, class_labels=batch.labels).sample
                if is_diffusers
                else model(x_t, batch.u, batch.labels)
            )
        loss = (out[:, :4].float() - (batch.x_1 - batch.x_0)).square().flatten(1).mean(1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _update_one_by_one(mean, model)
        return loss.item()

    return step


def _official_update(model: nn.Module) -> Callable[[], object]:
    """AdamW as it comes, and the average parameter by parameter, on the network of our arm."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0)
    mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update() -> None:
        _fill_gradients(model)
        optimizer.step()
        _update_one_by_one(mean, model)

    return update


@torch.no_grad()
def _update_one_by_one(mean: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        mean[name].mul_(DECAY).add_(parameter.data, alpha=1 - DECAY)


def _fill_gradients(model: nn.Module) -> None:
    """Gradients once, so that updates alone can be timed; later calls cost nothing."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 1e-3)


def _official(folder: Path, size: str) -> nn.Module:
    """SiT of the checkout `folder`, by its models.py (needs timm); ValueError where that cannot be run."""
    path = folder / "models.py"
    specification = importlib.util.spec_from_file_location("official_sit", path) if path.is_file() else None
    if specification is None or specification.loader is None:
        raise ValueError(f"{folder} is no checkout of SiT: it has no models.py")
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except ImportError as error:
        raise ValueError(f"{path} cannot be run: {error}; install what it needs") from None
    if not hasattr(module, "SiT_models"):
        raise ValueError(f"{folder} is no checkout of SiT: its models.py has no SiT_models")
    return module.SiT_models[f"SiT-{size}/2"](input_size=LATENT, num_classes=CLASSES).eval()


def seconds_of_data(batch_size: int, device: torch.device) -> float:
    """Until a training batch, noise and times drawn too, has come from the cache to the device: the median.

    A GPU may still be at the step before, so it waits for this long at most.
    """
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        cache = synthetic_cache(Path(folder), max(2000, batch_size))
        stream = TrainingStream(cache, 0, batch_size, False, 0.1, CLASSES)
        for step in range(NUM_DRAWS):
            start = time.perf_counter()
            float(stream.batch(step, range(batch_size)).to(device).u[0])  # reading a value waits for it
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _device_lines(size: str, batch_size: int, medians: dict[str, float], device: torch.device) -> list[str]:
    """Images a second, data-stall share and, on CUDA, the share of the device's bf16 peak and the memory."""
    lines, waiting = [], seconds_of_data(batch_size, device)
    for name in ("SiT", "SiT-ViT5"):
        rate = batch_size / medians[name]
        stall = waiting / (waiting + medians[name])
        line = f"  {name}: {rate:.2f} images/s, at most {stall:.2%} of the time waiting for data"
        if device.type == "cuda":
            flops = geometry(SiTShape(**preset(f"{name}-{size}/2"), input_size=LATENT)).training_flops * rate
            kind = torch.cuda.get_device_name(device)
            peak = next((peak for part, peak in PEAKS.items() if part in kind), None)
            line += f", {flops / 1e12:.0f} TFLOP/s" + (f", MFU {flops / peak:.1%} of {kind}" if peak else "")
        lines.append(line)
    if device.type == "cuda":
        lines.append(f"  peak memory, all arms: {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")
    return lines
