"""Training, top to bottom. The same command starts a run, continues it, or says that it is done."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import runtime
from ..config import Config
from .checkpoint import latest_checkpoint
from .continuation import check_continuation, check_own_leftovers
from .preparation import build_network, open_latents
from .trainer import Hook, Trainer


def train(config: Config, hooks: Sequence[Hook] = ()) -> None:
    """Run or continue the experiment `config` until `train.num_steps`; `hooks` look on after each step.

    Raises:
        ValueError: a configuration, cache or earlier run that does not fit, before anything is made; a
            loss that is not finite, with the last checkpoint intact.
        KeyboardInterrupt: a signal; the step was ended and saved.
    """
    trainer = open_run(config)
    if trainer is None:
        return
    last = config.train.num_steps
    with (
        runtime.StopRequest() as stop,
        runtime.progress(last, trainer.step, "training", " steps") as bar,
    ):
        while trainer.step < last:
            row = trainer.advance()
            bar.update()
            for hook in hooks:
                hook(trainer, row)
            if row is not None:
                bar.set_postfix_str(f"loss {row['loss']:.4f}", refresh=False)
                trainer.log(row)
            stopping = _any_process(trainer.handle, stop.requested)
            if trainer.step % config.train.save_every == 0 or trainer.step == last or stopping:
                trainer.save()
            if stopping and trainer.step < last:
                raise KeyboardInterrupt(
                    f"stopped after step {trainer.step}, which is saved; the same command continues"
                )
    trainer.close()
    runtime.say(f"{config.run}: done, {last} steps; the last checkpoint is in {config.run}/checkpoints")


def open_run(config: Config) -> Trainer | None:
    """The run of `config`, new or where its newest whole checkpoint left it; None where it is done."""
    run, last = Path(config.run), config.train.num_steps
    cache = open_latents(config)
    model = build_network(config, cache)
    previous = latest_checkpoint(run, verify=True)
    if previous is None and run.exists() and any(run.iterdir()):
        check_own_leftovers(run)
    if previous is not None:
        check_continuation(config, cache, previous)
        if previous.step >= last:
            runtime.say(f"{run}: all {previous.step} steps are done; for more, raise train.num_steps")
            return None
    handle = runtime.accelerator()
    trainer = Trainer(config, cache, model, previous, handle)
    runtime.say(
        f"{run}: {config.model.name}, {trainer.num_parameters:,} parameters, {len(cache):,} latents of "
        f"{len(cache.class_names)} classes, steps {trainer.step} to {last}, batch {config.train.batch_size} "
        f"on {handle.num_processes} process(es), {handle.device.type}"
    )
    return trainer


def _any_process(handle: Any, flag: bool) -> bool:
    """Whether `flag` holds on any process: all of them leave the loop at the same step."""
    if handle.num_processes == 1:
        return flag
    return bool(handle.gather(torch.tensor([flag], device=handle.device)).any())
