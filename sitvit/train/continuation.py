"""Whether what lies in a run's folder can be continued by an experiment file."""

from pathlib import Path

from .. import runtime
from ..config import Config, flat, load_config
from ..data.latents import Latents
from .checkpoint import Checkpoint, find_checkpoint, latest_checkpoint, open_checkpoint, step_folders

LOCK = "run.lock"
"""The file by which a job holds its run's folder."""

MAY_CHANGE = {
    "data.latents",  # the folder may move; its content is compared by fingerprint
    "data.images",
    "data.autoencoder",
    "train.num_steps",
    "train.decay_steps",
    "train.micro_batch_size",
    "train.tf32",
    "train.gradient_checkpointing",
    "train.compile",
    "train.snapshot_every",
    "train.on_nonfinite",
    "train.max_nonfinite",
    "train.log_every",
    "train.trackers",
    "train.statistics_every",
    "train.preview_every",
    "train.evaluate_every",
    "train.evaluate_images",
    "train.evaluate_reference",
    "train.save_every",
    "train.keep_checkpoints",
    "train.keep_every",
}
"""Keys that a run may be continued with another value of: the experiment stays the same, up to rounding."""


def checkpoint_to_continue(run: Path, resume: str) -> Checkpoint | None:
    """Where `run` goes on: "auto" its newest whole checkpoint, "none" nowhere, else the checkpoint named.

    Raises:
        ValueError: to go on from there would leave or overwrite checkpoints that `run` has.
    """
    if resume == "auto":
        return latest_checkpoint(run, verify=True)
    there = step_folders(run)
    if resume == "none":
        if there:
            raise ValueError(
                f"{run} has checkpoints up to {there[0].name}; for a new run choose another `run`"
            )
        return None
    chosen = open_checkpoint(find_checkpoint(resume).folder, verify=True)
    if there and there[0].resolve() != chosen.folder.resolve():
        raise ValueError(
            f"{run} has {there[0].name}, which going on from {chosen.folder} would mix with other steps; "
            "choose another `run` for that"
        )
    return chosen


def check_continuation(
    config: Config, cache: Latents, previous: Checkpoint, accept_changes: bool = False
) -> None:
    """Say each setting in which `config` is not the run that `previous` belongs to.

    Raises:
        ValueError: one of them would make it another experiment and `accept_changes` is off, or the saved
            weights do not fit the network.
    """
    saved = load_config(previous.folder / "config.yaml", [], Config)
    old, new = flat(saved.to_dict()), flat(config.to_dict())
    changed = {
        key: f"{key} was {old.get(key)}, now {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if key != "run" and old.get(key) != new.get(key)
    }
    if previous.record["latents_fingerprint"] != cache.fingerprint:
        changed["latents"] = f"the latents in {cache.where} are not those that the run was trained on"
    if previous.class_names != cache.class_names:
        changed["classes"] = f"the classes were {previous.class_names}, now {cache.class_names}"
    grave = {key: text for key, text in changed.items() if key not in MAY_CHANGE}
    unfit = [text for key, text in grave.items() if key.startswith("model.") and key not in _NO_SHAPE]
    if (grave and not accept_changes) or unfit:
        advice = "" if unfit else ", or accept it with --accept-changes"
        raise ValueError(
            f"{config.run} cannot be continued from step {previous.step} with other settings: "
            f"{'; '.join(unfit or grave.values())}. Choose another `run`, or the old values{advice}"
        )
    for text in changed.values():
        runtime.say(f"continued with another setting: {text}")


_NO_SHAPE = {"model.class_dropout_prob"}
"""The key of the model that changes no weight's shape while it stays above zero."""


def check_own_leftovers(run: Path) -> None:
    """ValueError where `run` has checkpoints that none can be read of, or files that no run of ours made.

    What a start that was killed before its first save left behind is fine.
    """
    if step_folders(run):
        raise ValueError(
            f"{run} has checkpoints, but none is whole, so it cannot be continued; nothing was changed. "
            "Choose another `run`, or move that one away to start it again"
        )
    ours = {"metrics.jsonl", "tensorboard", "checkpoints", "snapshots", "previews", "evaluations", "wandb"}
    ours.add(LOCK)
    foreign = sorted(path.name for path in run.iterdir() if path.name not in ours)
    if foreign:
        raise ValueError(f"{run} is not a run: it has {', '.join(foreign[:3])}; choose another `run`")
