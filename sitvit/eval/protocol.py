"""A number carries its protocol: metrics are written with all that they follow from, or not at all."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__, runtime

FORMAT = 2


@dataclass(frozen=True)
class Protocol:
    """What the numbers are of, against what, and in which features. Every field is needed."""

    samples: dict[str, Any]  # how the images were made: the samples' own record, or where they lie
    num_samples: int
    reference: dict[str, Any]  # name, fingerprint, crop
    num_reference: int | None  # None: a statistics file that does not tell
    features: dict[str, Any]  # network, sha256 of its weights, width, precision
    measures: dict[str, Any]  # how each metric is computed


def write_metrics(path: Path, metrics: dict[str, float], protocol: Protocol, seconds: float) -> None:
    """Write `metrics` (name -> value) with their `protocol` to `path`."""
    content = {
        "format": FORMAT,
        "metrics": metrics,
        "protocol": asdict(protocol),
        "versions": {
            "sitvit": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "command": runtime.command_line(),
        "seconds": round(seconds, 1),
        "peak_memory_mib": runtime.peak_memory_mib(),
    }
    runtime.write_json(path, content)


def read_metrics(path: Path, protocol: Protocol) -> dict[str, float] | None:
    """The numbers that `path` holds for the same `protocol`, else None.

    Raises:
        ValueError: `path` holds numbers of another protocol, which stay as they are.
    """
    if not path.exists():
        return None
    found = runtime.read_record(path, [])
    if found.get("format") != FORMAT or found.get("protocol") != asdict(protocol):
        raise ValueError(
            f"{path} holds the numbers of another measurement; choose another --out, or delete that file"
        )
    return found["metrics"]
