"""Samplers around a network.

    python scripts/bench.py sample --model SiT-S/2 --num-steps 10

Drift and score of our SDE share one network call; the arm `two calls` asks the network for each, as the
official code does, and must give the same bits. Guidance is paid for inside its interval alone, and not at
all at scale 1. A sampler's own cost is the time of a run outside of the network.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..flow.evaluations import batch_of
from ..flow.guidance import Guidance
from ..flow.parameterization import Velocity, noise_from_velocity
from ..flow.paths import Linear, per_sample
from ..flow.samplers import FixedOde, Sampler, Sde
from ..flow.sde import Diffusion
from ..models.presets import build_model
from .timing import interleave, open_gates, ratio

LATENT = 32
CLASSES = 1000
UNGUIDED = Guidance()


def bench_sample(name: str, batch_size: int, num_steps: int, rounds: int) -> list[str]:
    """Lines of a table: ratios of whole sampling runs of `num_steps` steps, and the samplers' own cost."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network: Any = build_model(name).eval()
    open_gates(network)
    network.to(device)
    x_0 = torch.randn(batch_size, 4, LATENT, LATENT, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.arange(batch_size, device=device) % CLASSES
    counted = Counted(network)

    def run(sampler: Sampler, guidance: Guidance = UNGUIDED) -> Tensor:
        velocity = guidance.bind(counted, labels, network.null_label)
        return sampler.sample(velocity, Linear(), "velocity", x_0, _noise(x_0)).state

    heun = FixedOde(num_steps=num_steps)
    plain, stochastic = (
        Sde(method=method, num_steps=num_steps) for method in ("euler-maruyama", "stochastic-heun")
    )
    lines = [
        f"{name}, batch {batch_size}, {LATENT} x {LATENT} latents, float32 eager, {num_steps} steps, "
        f"{torch.get_num_threads()} threads, {rounds} rounds, torch {torch.__version__}"
    ]
    with torch.no_grad():
        for sde in (plain, stochastic):
            lines += _shared_call(run, sde, labels, x_0, counted, rounds)
        lines += _guidance_cost(run, heun, counted, x_0, rounds)
        lines.append("time outside of the network, of the time inside:")
        for sampler in (FixedOde("euler", num_steps), heun, plain, stochastic):
            lines.append(f"  {sampler.name}: {_overhead(run, sampler, counted, rounds)}")
    return lines


class Counted:
    """A network that counts its calls, the samples in them, and the seconds spent there."""

    def __init__(self, network: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.network = network
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.calls = self.samples = 0
        self.seconds = 0.0

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        start = time.perf_counter()
        out = self.network(x, t, labels)
        if out.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.calls, self.samples = self.calls + 1, self.samples + len(x)
        return out


def two_calls(velocity: Velocity, x: Tensor, sampler: Sde, noise: Callable[[int], Tensor]) -> Tensor:
    """The way of `sampler` with the network asked once for the drift's velocity and once for its score."""
    path = Linear()
    diffusion = Diffusion(path, sampler.diffusion, sampler.diffusion_norm)

    def drift(x: Tensor, t: Tensor) -> Tensor:
        toward = velocity(x, t)
        noise_hat = noise_from_velocity(path, velocity(x, t), x, t)
        return toward - diffusion.per_sigma(per_sample(t, x)) * noise_hat

    times = sampler.times(path, "velocity")
    for index, (t, t_next) in enumerate(pairwise(times)):
        h = t_next - t
        now, then = batch_of(t, x), batch_of(t + h, x)
        kick = per_sample((2 * diffusion(now) * h).sqrt(), x) * noise(index)
        if sampler.method == "stochastic-heun":
            x = x + kick
            first = drift(x, now)
            x = x + h / 2 * (first + drift(x + h * first, then))
        else:
            x = x + h * drift(x, now) + kick
    return x + (1 - times[-1]) * drift(x, batch_of(times[-1], x))


def _noise(x: Tensor) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(x.shape, generator=torch.Generator().manual_seed(step + 1)).to(x)


def _shared_call(
    run: Callable[..., Tensor],
    sampler: Sde,
    labels: Tensor,
    x_0: Tensor,
    counted: Counted,
    rounds: int,
) -> list[str]:
    def twice() -> Tensor:
        return two_calls(lambda x, t: counted(x, t, labels), x_0, sampler, _noise(x_0))

    calls = {}
    for arm, call in (("shared", lambda: run(sampler)), ("two calls", twice)):
        counted.reset()
        calls[arm] = (call(), counted.calls)
    same = torch.equal(calls["shared"][0], calls["two calls"][0])
    times = interleave({"shared": lambda: run(sampler), "two calls": twice}, rounds)
    return [
        f"{sampler.name}, one call for drift and score / two: {ratio(times['shared'], times['two calls'])}",
        f"  {calls['shared'][1]} calls / {calls['two calls'][1]}; the same bits: {'yes' if same else 'NO'}",
    ]


def _guidance_cost(
    run: Callable[..., Tensor], heun: FixedOde, counted: Counted, x_0: Tensor, rounds: int
) -> list[str]:
    arms = {
        "cfg_scale 1": Guidance(1.0),
        "cfg_scale 1.5": Guidance(1.5),
        "cfg_scale 1.5 in [0.3, 0.8]": Guidance(1.5, (0.3, 0.8)),
    }
    passes = {}
    for arm, guidance in arms.items():
        counted.reset()
        run(heun, guidance)
        passes[arm] = counted.samples / len(x_0)
    times = interleave({arm: partial(run, heun, guidance) for arm, guidance in arms.items()}, rounds)
    off, full, part = arms
    return [
        f"{heun.name}, {part} / {full}: {ratio(times[part], times[full])}",
        f"{heun.name}, {off} / {full}: {ratio(times[off], times[full])}",
        "  passes an image: " + ", ".join(f"{arm} {count:g}" for arm, count in passes.items()),
    ]


def _overhead(run: Callable[..., Tensor], sampler: Sampler, counted: Counted, rounds: int) -> str:
    each = []
    for _ in range(rounds):
        counted.reset()
        start = time.perf_counter()
        run(sampler)
        each.append((time.perf_counter() - start) / counted.seconds - 1)
    return f"{statistics.median(each):.2%}"
