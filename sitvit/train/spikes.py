"""Notice of loss spikes: a logged loss far above those before it.

    spike:  loss > m + 8 s,   m = median of the last 50 logged losses,
                              s = 1.4826 median |loss - m|, at least 0.01 m

Median and median absolute deviation (s is the standard deviation of normal losses) are not moved by a few
spikes among the 50. A falling loss lies below its median, so that nothing has to be known of its slope.
"""

from collections import deque
from collections.abc import Collection
from statistics import median

from .. import runtime
from .metrics import read_metrics
from .trainer import Row, Trainer

WINDOW, LEAST = 50, 10
"""Losses that are looked back on, and how many there must be."""

FACTOR, FLOOR = 8.0, 0.01


class LossSpikes:
    """A hook that says when a logged loss is a spike; its row gets `loss_spike`, loss over threshold."""

    def __init__(self) -> None:
        self._losses: deque[float] | None = None

    def __call__(self, trainer: Trainer, row: Row | None) -> None:
        """Compare, and remember; a continued run begins with what its record holds."""
        if row is None or not trainer.handle.is_main_process:
            return
        if self._losses is None:
            earlier = [old["loss"] for old in read_metrics(trainer.run) if old["step"] < row["step"]]
            self._losses = deque(earlier, maxlen=WINDOW)
        limit = threshold(self._losses)
        if limit is not None and row["loss"] > limit:
            row["loss_spike"] = round(row["loss"] / limit, 4)
            runtime.say(
                f"loss spike at step {row['step']}: {row['loss']:.4g}, above {limit:.4g} (median "
                f"{median(self._losses):.4g} of the last {len(self._losses)} logged); gradient norm "
                f"{row['grad_norm']:.3g}"
            )
        self._losses.append(row["loss"])


def threshold(losses: Collection[float]) -> float | None:
    """The loss above which the next one is a spike; None where there are too few before it."""
    if len(losses) < LEAST:
        return None
    middle = median(losses)
    spread = 1.4826 * median(abs(loss - middle) for loss in losses)
    return middle + FACTOR * max(spread, FLOOR * abs(middle))
