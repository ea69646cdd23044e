"""Training, top to bottom. The same command starts a run, continues it, or says that it is done."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import runtime
from ..config import Config, TrainConfig, dump_config, load_config
from ..data.latents import LatentCache, Latents
from ..data.live import LiveLatents
from ..data.stream import TrainingStream
from ..flow.intervals import training_interval
from ..flow.objective import Objective
from ..flow.paths import find_path
from ..flow.times import TimeDistribution
from ..models.convert import init_from, load_model
from ..models.sit import SiT
from ..models.vit5 import ViT5
from .checkpoint import (
    WEIGHTS,
    Checkpoint,
    latest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    step_folders,
)
from .ema import Ema
from .metrics import MetricsLog
from .optim import (
    learning_rate,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    trainable_names,
)
from .step import NonFiniteLoss, training_step

VERIFIED_BYTES = 1 << 30
"""Latents up to this size are read once and compared with their checksums before the first step."""

MAY_CHANGE = {
    "data.latents",  # the folder may move; its content is compared by fingerprint
    "data.images",
    "data.autoencoder",
    "train.num_steps",
    "train.decay_steps",
    "train.log_every",
    "train.save_every",
    "train.keep_checkpoints",
}
"""Keys that a run may be continued with another value of; the rest would make it another run."""


def train(config: Config) -> None:
    """Run or continue the experiment `config` until `train.num_steps`.

    Raises:
        ValueError: a configuration, cache or earlier run that does not fit, before anything is made; a
            loss that is not finite, with the last checkpoint intact.
    """
    settings = config.train
    run = Path(config.run)

    # What is there already.
    cache = open_latents(config)
    model = build_network(config, cache)
    previous = latest_checkpoint(run, verify=True)
    if previous is None and run.exists() and any(run.iterdir()):
        check_own_leftovers(run)
    if previous is not None:
        check_continuation(config, cache, previous)
        if previous.step >= settings.num_steps:
            runtime.say(f"{run}: all {previous.step} steps are done; for more, raise train.num_steps")
            return

    # Processes.
    handle = runtime.accelerator()
    num_processes, process_index = handle.num_processes, handle.process_index
    if settings.batch_size % num_processes:
        raise ValueError(
            f"train.batch_size {settings.batch_size} cannot be split over {num_processes} processes; "
            f"use a multiple of {num_processes}"
        )
    local_size = settings.batch_size // num_processes
    positions = range(process_index * local_size, (process_index + 1) * local_size)

    # Model, average, optimizer.
    if settings.init_from is not None and previous is None:
        start_from_classifier(model, Path(settings.init_from))
    names = trainable_names(model)
    optimizer = make_optimizer(model, settings.lr, (settings.beta_1, settings.beta_2), settings.weight_decay)
    ema_name = f"ema_{settings.ema_decay}"
    if previous is not None:
        model.load_state_dict(previous.tensors(f"model/{WEIGHTS}"))
        load_optimizer_tensors(optimizer, names, previous.tensors("optimizer.safetensors"))
    model.to(handle.device)
    ema = Ema(model, settings.ema_decay)
    if previous is not None:
        ema.load(previous.tensors(f"{ema_name}/{WEIGHTS}"))
    wrapped, prepared_optimizer = handle.prepare(model, optimizer)
    wrapped.train()

    # Objective, stream, log.
    objective = Objective(find_path(settings.path), settings.prediction, settings.loss_weight)
    times = time_distribution(settings, objective)
    stream = TrainingStream(
        cache,
        settings.seed,
        settings.batch_size,
        config.data.flip,
        config.model.class_dropout_prob,
        len(cache.class_names) if not model.has_null else model.null_label,
    )
    first_step = 0 if previous is None else previous.step
    window: list[float] = [] if previous is None else previous.record["losses_since_log"]
    seconds_before = 0.0 if previous is None else previous.record["seconds"]
    log = MetricsLog(run, first_step) if handle.is_main_process else None
    num_parameters = sum(p.numel() for p in model.parameters())
    runtime.say(
        f"{run}: {config.model.name}, {num_parameters:,} parameters, {len(cache):,} latents of "
        f"{len(cache.class_names)} classes, steps {first_step} to {settings.num_steps}, batch "
        f"{settings.batch_size} on {num_processes} process(es), {handle.device.type}"
    )
    start = time.monotonic()

    def save(step: int) -> None:
        if handle.is_main_process:
            save_checkpoint(
                run / "checkpoints",
                step,
                model,
                {ema_name: ema.state},
                optimizer_tensors(optimizer, names),
                dump_config(config),
                {
                    "class_names": cache.class_names,
                    "image_size": cache.image_size,
                    "autoencoder": asdict(cache.autoencoder),
                    "latents_fingerprint": cache.fingerprint,
                    "images": cache.images,
                    "images_fingerprint": cache.images_fingerprint,
                    "path": settings.path,
                    "prediction": settings.prediction,
                    "num_parameters": num_parameters,
                    "losses_since_log": window,
                    "seconds": seconds_before + time.monotonic() - start,
                    "peak_memory_mib": runtime.peak_memory_mib(),
                    "command": runtime.command_line(),
                    "num_processes": num_processes,
                },
            )
            prune_checkpoints(run, settings.keep_checkpoints)
        handle.wait_for_everyone()

    # Steps.
    with (
        runtime.StopRequest() as stop,
        runtime.progress(settings.num_steps, first_step, "training", " steps") as bar,
    ):
        for step in range(first_step, settings.num_steps):
            lr = learning_rate(
                step, settings.lr, settings.num_steps, settings.warmup_steps, settings.decay_steps
            )
            batch = stream.batch(step, positions)
            try:
                loss, grad_norm = training_step(
                    handle,
                    wrapped,
                    prepared_optimizer,
                    batch,
                    objective,
                    times,
                    lr,
                    settings.clip_grad_norm,
                )
            except NonFiniteLoss as error:
                saved = latest_checkpoint(run)
                raise ValueError(
                    f"training stopped at step {step + 1}: {error}; images {batch.ids.tolist()}. "
                    + (f"The last checkpoint is {saved.folder}" if saved else "Nothing was saved yet")
                ) from None
            ema.update(model)
            window.append(loss)
            bar.update()
            done = step + 1
            if done % settings.log_every == 0:
                row: dict[str, Any] = {
                    "step": done,
                    "loss": sum(window) / len(window),
                    "grad_norm": grad_norm,
                    "lr": lr,
                    "seconds": round(seconds_before + time.monotonic() - start, 3),
                }
                window.clear()
                bar.set_postfix_str(f"loss {row['loss']:.4f}", refresh=False)
                if log:
                    log.write(row)
            stopping = _any_process(handle, stop.requested)
            if done % settings.save_every == 0 or done == settings.num_steps or stopping:
                save(done)
            if stopping and done < settings.num_steps:
                raise KeyboardInterrupt(
                    f"stopped after step {done}, which is saved; the same command continues"
                )
    if log:
        log.close()
    runtime.say(f"{run}: done, {settings.num_steps} steps; the last checkpoint is in {run}/checkpoints")


def open_latents(config: Config) -> Latents:
    """The latents that `config` names: a cache, or images with an autoencoder on this process's device."""
    data = config.data
    if data.latents is None:
        assert data.images is not None
        assert data.autoencoder is not None
        assert data.image_size is not None
        device = runtime.processes().device
        return LiveLatents(data.images, data.autoencoder, data.image_size, device)
    cache = LatentCache(Path(data.latents))
    if cache.num_bytes <= VERIFIED_BYTES:
        cache.verify()
    return cache


def build_network(config: Config, cache: Latents) -> SiT:
    """The network of `config` with its seeded first weights; latent shape and classes from `cache`."""
    arguments = config.model_arguments()
    num_classes = arguments.setdefault("num_classes", len(cache.class_names))
    if num_classes < len(cache.class_names):
        raise ValueError(
            f"model.num_classes is {num_classes}, but {cache.where} has {len(cache.class_names)} "
            "classes; leave it out to take that"
        )
    if num_classes > len(cache.class_names):
        runtime.say(
            f"model.num_classes is {num_classes}, but {cache.where} has only "
            f"{len(cache.class_names)} classes: the rest stay untrained"
        )
    unit = cache.autoencoder.downsampling * arguments["patch_size"]
    if cache.image_size % unit:
        lower = cache.image_size // unit * unit
        raise ValueError(
            f"image size {cache.image_size} does not fit {config.model.name}: it needs a multiple of {unit} "
            f"(autoencoder {cache.autoencoder.downsampling} x patch {arguments['patch_size']}); the nearest "
            f"are {max(lower, unit)} and {lower + unit}"
        )
    channels, height, width = cache.latent_shape
    with torch.random.fork_rng():
        torch.manual_seed(config.train.seed)
        return SiT(input_size=(height, width), in_channels=channels, **arguments)


def time_distribution(settings: TrainConfig, objective: Objective) -> TimeDistribution:
    """How training times are drawn; from where path, prediction and weight allow, unless it is given."""
    interval = training_interval(objective.path, objective.prediction, objective.weight)
    if settings.time_interval is not None:
        interval = (settings.time_interval[0], settings.time_interval[1])
    return TimeDistribution(
        settings.time_distribution, settings.time_mean, settings.time_std, settings.time_shift, interval
    )


def start_from_classifier(model: SiT, path: Path) -> None:
    """Take the blocks of the ViT-5 classifier at `path`, and say what was and was not taken."""
    classifier, which = load_model(path)
    if not isinstance(classifier, ViT5):
        raise ValueError(f"train.init_from takes a ViT-5 classifier; {path} is a {type(classifier).__name__}")
    taken, left, unused = init_from(model, classifier)
    blocks = {name.split(".")[1] for name in taken if name.startswith("blocks.")}
    fresh = sorted({name.split(".")[0] for name in left if not name.startswith("blocks.")})
    in_blocks = sorted({name.split(".", 2)[2] for name in left if name.startswith("blocks.")})
    runtime.say(
        f"from {which}: {len(taken)} tensors in {len(blocks)} of {len(model.blocks)} blocks; left as they "
        f"were: {', '.join(fresh)}, and in blocks {', '.join(in_blocks) or 'nothing'}; not used of the "
        f"classifier: {', '.join(sorted({name.split('.')[0] for name in unused})) or 'nothing'}"
    )


def check_continuation(config: Config, cache: Latents, previous: Checkpoint) -> None:
    """ValueError naming each setting in which `config` is not the run that `previous` belongs to."""
    saved = load_config(previous.folder / "config.yaml", [], Config)
    old, new = _flat(saved.to_dict()), _flat(config.to_dict())
    changed = [
        f"{key} was {old.get(key)}, now {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if key not in MAY_CHANGE | {"run"} and old.get(key) != new.get(key)
    ]
    if previous.record["latents_fingerprint"] != cache.fingerprint:
        changed.append(f"the latents in {cache.where} are not those that the run was trained on")
    if previous.class_names != cache.class_names:
        changed.append(f"the classes were {previous.class_names}, now {cache.class_names}")
    if changed:
        raise ValueError(
            f"{config.run} cannot be continued from step {previous.step} with other settings: "
            f"{'; '.join(changed)}. Choose another `run`, or the old values"
        )


def check_own_leftovers(run: Path) -> None:
    """ValueError where `run` has checkpoints that none can be read of, or files that no run of ours made.

    What a start that was killed before its first save left behind is fine.
    """
    if step_folders(run):
        raise ValueError(
            f"{run} has checkpoints, but none is whole, so it cannot be continued; nothing was changed. "
            "Choose another `run`, or move that one away to start it again"
        )
    ours = {"metrics.jsonl", "tensorboard", "checkpoints"}
    foreign = sorted(path.name for path in run.iterdir() if path.name not in ours)
    if foreign:
        raise ValueError(f"{run} is not a run: it has {', '.join(foreign[:3])}; choose another `run`")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _any_process(handle: Any, flag: bool) -> bool:
    """Whether `flag` holds on any process: all of them leave the loop at the same step."""
    if handle.num_processes == 1:
        return flag
    return bool(handle.gather(torch.tensor([flag], device=handle.device)).any())
