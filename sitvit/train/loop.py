"""Training, top to bottom. The same command starts a run, continues it, or says that it is done."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from .. import runtime
from ..config import Config
from ..data.latents import Latents
from ..data.live import UnreadableImage
from .checkpoint import Checkpoint, step_folders
from .continuation import LOCK, check_continuation, check_own_leftovers, checkpoint_to_continue
from .disk import check_disk
from .preparation import build_network, open_latents
from .speed import progress_text
from .trainer import Hook, Trainer


def train(
    config: Config,
    hooks: Sequence[Hook] = (),
    max_seconds: float | None = None,
    accept_changes: bool = False,
    resume: str = "auto",
) -> None:
    """Run or continue the experiment `config` until `train.num_steps`; `hooks` look on after each step.

    Args:
        max_seconds: end so long after the call, as at a signal.
        accept_changes: continue a run with other settings too, saying which.
        resume: where a run goes on: "auto", "none" or a checkpoint (`checkpoint_to_continue`).

    Raises:
        ValueError: a configuration, cache or earlier run that does not fit, before anything is made; a
            loss that is not finite, with the last checkpoint intact.
        runtime.Taken: another job trains in the same folder.
        runtime.Stopped: a signal, or the time is up; all processes have ended a step, which is saved.
    """
    deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
    with ExitStack() as held:
        trainer = open_run(config, held, resume, accept_changes)
        if trainer is not None:
            _go_on(trainer, config, hooks, deadline)


def _go_on(trainer: Trainer, config: Config, hooks: Sequence[Hook], deadline: float) -> None:
    last, begin = config.train.num_steps, time.monotonic()
    with (
        runtime.StopRequest() as stop,
        runtime.progress(last, trainer.step, "training", " steps") as bar,
        closing(trainer),
    ):
        while trainer.step < last:
            try:
                row = trainer.advance(stop.requested or time.monotonic() >= deadline)
            except UnreadableImage:
                trainer.save_done()
                raise
            bar.update(trainer.step - bar.n)
            try:
                for hook in hooks:
                    hook(trainer, row)
            except Exception:  # as an evaluation whose images are gone: it ends the run, and costs no step
                if row is not None:
                    trainer.log(row)
                trainer.rescue()
                raise
            if row is not None:
                bar.set_postfix_str(progress_text(row), refresh=False)
                trainer.log(row)
            finished = trainer.step == last
            snapshot_due = trainer.step % config.train.snapshot_every == 0 or finished
            save_due = trainer.step % config.train.save_every == 0 or finished or trainer.told_to_stop
            if (snapshot_due or save_due) and trainer.read():  # looked at first: nothing unseen is saved
                if snapshot_due:
                    trainer.save_snapshot()
                if save_due:
                    trainer.save()
                if save_due and trainer.told_to_stop and not finished:
                    raise runtime.Stopped(
                        f"stopped after step {trainer.step}, which is saved; the same command continues"
                    )
    outside = 1 - trainer.step_seconds / (time.monotonic() - begin)
    runtime.say(
        f"{config.run}: done, {last} steps; the last checkpoint is in {config.run}/checkpoints; "
        f"{outside:.1%} of the time went to data, logs, saving, previews and evaluations"
    )


def open_run(
    config: Config, held: ExitStack, resume: str = "auto", accept_changes: bool = False
) -> Trainer | None:
    """The run of `config`, new or where a checkpoint left it, its folder `held`; None where it is done."""
    run, last = Path(config.run), config.train.num_steps
    cache = open_latents(config)
    model = build_network(config, cache)

    there = step_folders(run)
    previous = runtime.found_by_main(lambda: _previous(config, cache, resume, accept_changes))
    if previous is not None and previous.step >= last:
        runtime.say(f"{run}: all {previous.step} steps are done; for more, raise train.num_steps")
        return None
    runtime.found_by_main(lambda: check_disk(run, len(step_folders(run)), model, config.train))
    runtime.found_by_main(lambda: _hold(run, there, held))
    handle = runtime.accelerator(config.train.precision, config.train.tf32)
    trainer = Trainer(config, cache, model, previous, handle)
    if previous is not None and previous.record["num_processes"] != handle.num_processes:
        before = previous.record["num_processes"]
        runtime.say(
            f"saved by {before} process(es), continued by {handle.num_processes}: the same images "
            "and noise at each step, losses equal up to float rounding"
        )
    runtime.say(
        f"{run}: {config.model.name}, {trainer.num_parameters:,} parameters, {len(cache):,} latents of "
        f"{len(cache.class_names)} classes, steps {trainer.step} to {last}, batch {config.train.batch_size} "
        f"on {handle.num_processes} process(es), {handle.device.type}"
    )
    return trainer


def _hold(run: Path, there: list[Path], held: ExitStack) -> None:
    """Keep other jobs from `run`; Taken where one trains in it, or did since `there` were its checkpoints."""
    held.enter_context(runtime.held(run / LOCK, str(run)))
    if step_folders(run) != there:
        raise runtime.Taken(f"another process trained {run} just now; the same command goes on from there")


def _previous(config: Config, cache: Latents, resume: str, accept_changes: bool) -> Checkpoint | None:
    """The checkpoint that `config` goes on from, once it fits; None for a new run."""
    run = Path(config.run)
    if run.exists() and not run.is_dir():
        raise ValueError(f"`run` has to be a folder, and {run} is a file; choose another `run`")
    previous = checkpoint_to_continue(run, resume)
    if previous is None and run.exists() and any(run.iterdir()):
        check_own_leftovers(run)
    if previous is not None:
        check_continuation(config, cache, previous, accept_changes)
    return previous
