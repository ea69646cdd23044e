"""Training loss by arm and seed, in windows of steps that all arms share, and its paired differences.

    loss of window w = mean of the logged losses with  (w - 1) L / W < step <= w L / W

L is the last step, W at most `NUM_WINDOWS`: so a run of millions of steps and one of a hundred give curves of
one size, and the step-to-step noise, which both arms of a seed share, is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NUM_WINDOWS = 30


def window_means(rows: Sequence[dict[str, Any]], last_step: int) -> tuple[list[int], list[float]]:
    """Last step and mean loss of each window of a run's logged rows, but of those without a row."""
    width = -(-last_step // NUM_WINDOWS)
    windows: dict[int, list[float]] = {}
    for row in rows:
        end = min(-(-row["step"] // width) * width, last_step)
        if end <= rows[-1]["step"]:  # the window in which a run stands is no mean yet
            windows.setdefault(end, []).append(row["loss"])
    return list(windows), [float(np.mean(losses)) for losses in windows.values()]


def by_step(curves: Sequence[dict[str, Any]]) -> dict[int, dict[int, float]]:
    """Loss by step and seed, from the curves of one arm."""
    turned: dict[int, dict[int, float]] = {}
    for curve in curves:
        for step, loss in zip(curve["steps"], curve["losses"], strict=True):
            turned.setdefault(step, {})[curve["seed"]] = loss
    return turned
