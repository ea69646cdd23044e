"""Arms take turns in one process, so that the machine's mood hits all; a figure is a ratio of times.

A round runs each arm once, another one first each time. A ratio is the median of the rounds' ratios, its
spread their quartiles.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def interleave(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; two rounds before are not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    _keep_freed_pages()
    names = list(calls)
    for number in range(rounds + 2):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            _synchronize()
            start = time.perf_counter()
            calls[name]()
            _synchronize()
            if number >= 2:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(arm: list[float], base: list[float]) -> str:
    """Median and quartiles of the ratios round by round."""
    each = sorted(a / b for a, b in zip(arm, base, strict=True))
    low, high = each[len(each) // 4], each[(3 * len(each)) // 4]
    return f"{statistics.median(each):.3f} (quartiles {low:.3f} to {high:.3f})"


def open_gates(model: nn.Module) -> None:
    """Give zero-initialised layers values: kernels on zeros and denormals are timed otherwise."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def saved_bytes(call: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    held: list[Any] = []  # a freed storage's address could come back

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        held.append(call())
    return sum(kept.values())


def _keep_freed_pages() -> None:
    """Have glibc keep what is freed, as CUDA's allocator does; elsewhere nothing.

    Else an arm pays for the pages that it or another one gave back, up to 8 % of a step, as chance has it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never give back
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own mapping


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
