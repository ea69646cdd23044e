"""The run's record: metrics.jsonl always, TensorBoard events where tensorboard is installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from .. import runtime


class MetricsLog:
    """Appends a line per call to RUN/metrics.jsonl; lines past `first_step` (a resume) are dropped."""

    def __init__(self, run: Path, first_step: int) -> None:
        self.path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(run) if row["step"] <= first_step]
        with runtime.write_aside(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
        self._tensorboard = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(run / "tensorboard", purge_step=first_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Record `row`, numbers by name, among them `step`."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._tensorboard:
            for name, value in row.items():
                self._tensorboard.add_scalar(f"train/{name}", value, row["step"])

    def close(self) -> None:
        """Flush what is still in memory."""
        if self._tensorboard:
            self._tensorboard.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; a last line that a crash cut in half is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
