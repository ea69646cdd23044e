"""What all verbs share: the parser, and how an error becomes one sentence.

A user's mistake ends in one sentence on stderr and exit status 2; an interruption in 130; training that was
stopped and saved in 75. A traceback means a fault of ours. SITVIT_TRACEBACK=1 shows one for every error.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .. import __version__, runtime

Verb = Callable[[list[str]], None]


def main(verb: Verb) -> None:
    """Run a verb on the command line's arguments, and turn what went wrong into one sentence."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        verb(sys.argv[1:])
    except runtime.Stopped as stop:
        _fail(str(stop), runtime.Stopped.STATUS)
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "interrupted; the same command continues", 130)
    except Exception as error:  # the outermost frame: what has no sentence is raised again
        sentence = explain(error)
        if sentence is None or os.environ.get("SITVIT_TRACEBACK"):
            raise
        _fail(f"error: {sentence}", 2)


def explain(error: Exception) -> str | None:
    """One sentence about an error that is the user's or the machine's, else None."""
    if isinstance(error, (ValueError, OSError, FloatingPointError)):
        return str(error) or type(error).__name__
    if type(error).__name__ == "SafetensorError":  # what the disk said, by way of safetensors
        return f"a safetensors file could not be written or read: {error}"
    lost = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")
    if type(error).__name__ == "DistBackendError" or any(words in str(error) for words in lost):
        return (
            "another process of this job has ended, so this one ends; the same command continues from the "
            "last checkpoint. What that process said is above, or it was killed (memory?)"
        )
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "the memory is not enough; try a smaller batch size"
    return None


def _fail(sentence: str, status: int) -> NoReturn:
    rank = "" if runtime.is_main_process() else f"[process {os.environ['RANK']}] "
    print(f"{rank}{sentence}", file=sys.stderr, flush=True)
    sys.exit(status)


def _terminate(*_: object) -> None:
    raise KeyboardInterrupt("terminated; the same command continues")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"error: {message}; --help lists the options", 2)


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose errors are one sentence, with --version."""
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sitvit {__version__}")
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add --config FILE and key=value; `parse_intermixed_args` takes these before and after options."""
    parser.add_argument("--config", type=Path, required=True, help="an experiment file of configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a value, as train.lr=1e-4"
    )


def duration(text: str) -> float:
    """Seconds of "90m", "23.5h", "300s" or "HH:MM:SS"; argparse's error where it is neither."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        if unit:
            seconds = float(text[:-1]) * unit
        else:
            hours, minutes, rest = (int(part) for part in text.split(":"))
            seconds = 3600 * hours + 60 * minutes + rest
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90m, 23.5h, 300s or HH:MM:SS")
    return seconds


def check_positive(value: int, option: str) -> None:
    """ValueError naming `option` unless `value` is at least 1."""
    if value < 1:
        raise ValueError(f"{option} must be at least 1, got {value}")
