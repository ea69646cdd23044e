"""The run's record: metrics.jsonl always, and what `train.trackers` names."""

import json
from pathlib import Path
from typing import Any

from .. import runtime
from .trackers import open_trackers


class MetricsLog:
    """Appends a line per call to RUN/metrics.jsonl; lines past `first_step` (a resume) are dropped.

    `trackers` are told too, and `config` once; None is TensorBoard where it is installed.
    """

    def __init__(
        self, run: Path, first_step: int, trackers: list[str] | None, config: dict[str, Any]
    ) -> None:
        self.path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(run) if row["step"] <= first_step]
        with runtime.write_aside(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
        self._trackers = open_trackers(trackers, run, first_step, config)

    def write(self, row: dict[str, Any]) -> None:
        """Record `row`, numbers by name, among them `step`."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for tracker in self._trackers:
            tracker.write(row)

    def close(self) -> None:
        """Flush what is still in memory; nothing is written afterwards."""
        while self._trackers:
            self._trackers.pop().close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; a last line that a crash cut in half is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
