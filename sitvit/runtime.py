"""What the machine gives: processes, signals, memory, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import __version__

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState
    from tqdm import tqdm

Found = TypeVar("Found")


@contextlib.contextmanager
def write_aside(target: Path) -> Iterator[Path]:
    """A temporary path beside `target`, for a file or a folder, renamed to it when the block ends.

    Where the block raises, the temporary is removed and an earlier `target` is untouched. The bytes
    are on the disk before the rename, so a power cut leaves the old or the new and never a half.

    Raises:
        OSError: the disk is full or cannot be written, naming `target`.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            if path.is_file():
                path.chmod(0o666 & ~_umask())  # safetensors writes files that only the owner may read
            _flush(path)
        os.replace(temporary, target)
        _flush(target.parent)
    except Exception as error:
        # What the disk said, with the file that it was about; other errors have their own sentence.
        from_disk = isinstance(error, OSError) and error.errno is not None
        if from_disk or type(error).__name__ == "SafetensorError":
            raise OSError(f"cannot write {target}: {error}") from error
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # what stopped the block is told, not this
                temporary.unlink()


class Taken(ValueError):
    """Another process holds what this one would work on."""


@contextlib.contextmanager
def held(lock: Path, what: str) -> Iterator[None]:
    """Hold `what` to the end of the block by the file `lock`, which then says by whom.

    It falls with the process, however that ends; the file stays. Where there are no locks, as on Windows and
    some network file systems, nothing is held.

    Raises:
        Taken: another process, on any machine that sees the file, holds it.
        ValueError: `lock` is something else than a file that can be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        opened = open(lock, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"cannot write {lock}, which holds {what}: {error.strerror or error}") from None
    with opened as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Taken(f"{what} is being worked on by another process, {file.read().strip()}") from None
        except (ImportError, OSError):
            pass
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}\n")
        file.flush()
        if hasattr(os, "register_at_fork"):  # a data loader's worker may outlive a killed process by seconds
            os.register_at_fork(after_in_child=file.close)
        yield


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, whole or not at all."""
    with write_aside(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Parse a JSON file; ValueError naming it where it is missing or damaged."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable JSON ({error})") from None


def read_record(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """`read_json` of an object that has `keys`; ValueError naming the file and the first that it lacks."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    for key in keys:
        if key not in record:
            raise ValueError(f"{path} is damaged, or of another program: it has no {key!r}")
    return record


def _umask() -> int:
    mask = os.umask(0)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Stopped(Exception):
    """Work was ended on request, by a signal or at its time limit, and saved: the same command continues.

    A process ends with the status `STATUS` then (sysexits' "temporary failure: try again").
    """

    STATUS = 75


class StopRequest:
    """Turns SIGINT, SIGTERM and SIGUSR1 into a flag that a loop asks for, so that it can end a step cleanly.

    A second signal acts as it would have without this. Inside another request (an evaluation within training)
    the outer one alone is told: its loop ends when the inner work is done.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.getsignal(number) for number in self.SIGNALS}
        if any(isinstance(getattr(old, "__self__", None), StopRequest) for old in self._previous.values()):
            self._previous = {}
        for number in self._previous:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def check(self) -> None:
        """KeyboardInterrupt where a stop was asked for: for work that may be left at any point."""
        if self.requested:
            raise KeyboardInterrupt("stopped; the same command continues with what is not there yet")

    def _note(self, *_: object) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def processes() -> PartialState:
    """This process among those of the job (`process_index`, `num_processes`, `device`)."""
    from accelerate import PartialState

    state = PartialState(cpu=_on_cpu())
    check_process_count(state.num_processes)
    return state


def found_by_main(find: Callable[[], Found]) -> Found:
    """What `find()` returns or raises on the main process, for all of them; all call it together.

    So that a file system that shows them different files cannot make them do different things.
    """
    from accelerate.utils import broadcast_object_list

    state = processes()
    told: list[Any] = [None, None]
    if state.is_main_process:
        try:
            told = [find(), None]
        except (ValueError, OSError) as error:
            told = [None, error]
    found, reason = broadcast_object_list(told)
    if reason is not None:
        raise reason
    return found  # type: ignore[no-any-return]


def gathered(values: list[Found]) -> list[Found]:
    """The lists of all processes, one after the other; all call it together."""
    from accelerate.utils import gather_object

    return gather_object(values)  # type: ignore[no-any-return]


def accelerator(precision: str = "fp32", tf32: bool = False) -> Accelerator:
    """accelerate's handle for training; the process count is the launcher's, `precision` "fp32" or "bf16".

    `tf32` lets CUDA multiply float32 matrices with 10 bits of mantissa.

    Raises:
        ValueError: the launcher asks for another precision than "no" or this one.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    wanted = "no" if precision == "fp32" else precision
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", wanted):
        raise ValueError(
            f"the launcher asks for mixed precision {launched}, the configuration for {precision}: set "
            "train.precision (fp32 or bf16), and leave --mixed_precision away"
        )
    AcceleratorState._reset_state()  # of an earlier run in this process, perhaps of another precision
    with _without_variable(SHARDING):  # accelerate joins the processes; `train.sharding` cuts the weights
        handle = Accelerator(cpu=_on_cpu(), mixed_precision=wanted)
    check_process_count(handle.num_processes)
    if handle.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
    return handle


SHARDING = "ACCELERATE_USE_FSDP"
"""What accelerate's launcher sets where it is asked for sharded weights."""


def shards_weights() -> bool:
    """Whether the launcher asks for weights that are cut over several processes."""
    return os.environ.get(SHARDING, "").lower() == "true" and launched_processes() > 1


@contextlib.contextmanager
def _without_variable(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def check_process_count(num_processes: int) -> None:
    """ValueError where the launcher started more processes than accelerate joined together."""
    launched = launched_processes()
    if launched != num_processes:
        raise ValueError(
            f"{launched} processes were launched, but accelerate joined {num_processes}: each would do "
            "the whole work alone"
        )


def check_launcher() -> None:
    """ValueError where several copies of this command were started that would not work together.

    Known before anything heavy is imported: `srun` and `mpirun` start a copy a task without joining them, and
    `accelerate launch --cpu --num_processes 2` starts one.
    """
    launched, environment = launched_processes(), os.environ
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(environment.get(name, 1)) > launched:
            raise ValueError(
                f"{environment[name]} copies of this command were started ({name}), but WORLD_SIZE is "
                f"{launched}: each would do the whole work. Start it with accelerate launch or torchrun, one "
                "task a machine (configs/slurm/train.sbatch)"
            )
    if shards_weights() and environment.get("FSDP_VERSION") != "2":
        raise ValueError(
            f"the launcher asks for FSDP {environment.get('FSDP_VERSION', '1')}; only FSDP2 is supported: "
            "set fsdp_version: 2, as configs/accelerate/fsdp2.yaml does"
        )
    if shards_weights() and environment.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        raise ValueError("the launcher asks to offload weights (fsdp_offload_params), which is not supported")
    wanted_more = "MASTER_PORT" in environment and "ACCELERATE_MIXED_PRECISION" in environment
    if wanted_more and "WORLD_SIZE" not in environment:
        raise ValueError(
            "accelerate launch was asked for several processes and started one; on a machine without a GPU "
            "use torchrun --nproc_per_node 2 and the script"
        )


def launched_processes() -> int:
    """How many processes the launcher says that the job has; known before anything heavy is imported."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _on_cpu() -> bool:
    """Whether the launcher asked for the CPU, or there is nothing else.

    accelerate joins processes on a CPU only where it is told so.
    """
    import torch

    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")
    return asked or not (torch.cuda.is_available() or torch.backends.mps.is_available())


def is_main_process() -> bool:
    """Whether this process speaks for the job; known before anything heavy is imported."""
    return int(os.environ.get("RANK", 0)) == 0


def say(message: str) -> None:
    """Print a line of news once per job."""
    if is_main_process():
        print(message, flush=True)


def peak_memory_mib() -> int:
    """The most memory that this process has held, in MiB."""
    import resource  # Unix only, so not a condition for importing this module

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20 if sys.platform == "darwin" else 1 << 10)


def forget_gpu_memory() -> None:
    """Count `peak_gpu_memory` from here on."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gpu_memory() -> int | None:
    """The most bytes that this process's tensors have held on its GPU; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def versions() -> dict[str, str]:
    """What made a file: versions of Python, sitvit and the packages that its bits depend on."""
    packages = ("torch", "accelerate", "diffusers", "safetensors", "numpy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "sitvit": __version__, **found}


def command_line() -> str:
    """The command that started this process, as one would type it."""
    return shlex.join(["python", *sys.argv])


def progress(total: int, initial: int, what: str, unit: str) -> tqdm:
    """A progress bar with rate and time left, on the main process; sparse where nobody watches."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        initial=initial,
        desc=what,
        unit=unit,
        disable=not is_main_process(),
        mininterval=0.2 if sys.stderr.isatty() else 15,
        dynamic_ncols=True,
    )
