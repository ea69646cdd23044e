"""From what a person asked for to a job: from options, or from the record of images that were made."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from .. import runtime
from ..flow.guidance import Guidance
from ..flow.samplers import find_sampler
from .draws import resolve_labels
from .job import Job
from .samples import SampleSettings
from .settings import SamplingConfig
from .trained import Trained, open_trained

SOURCES = ("checkpoint", "step")
"""What a record says beside its settings: where the network lay."""


def job_of(
    config: SamplingConfig,
    batch_size: int,
    device: Any,
    trained: Trained | None = None,
    seed_per_image: bool = False,
) -> Job:
    """The job of images that `config` asks for; `trained` takes the checkpoint's place.

    Raises:
        ValueError: no such network, or settings that do not fit it.
    """
    if config.sampler is not None:
        find_sampler(config.sampler, config.sampler_parts())  # a misspelt name is said before anything loads
    trained = trained or open_trained(
        config.checkpoint, config.weights, config.step, config.autoencoder, config.family
    )
    weak = config.autoguidance
    size = (config.image_size[0], config.image_size[-1]) if config.image_size else None
    low, high = config.guidance_interval
    return Job(
        trained,
        config.num_images,
        resolve_labels(config.labels, trained.class_names),
        config.seed,
        find_sampler(config.sampler or trained.default_sampler, config.sampler_parts()),
        Guidance(config.cfg_scale, (low, high), config.guided_channels, config.guidance_rescale),
        batch_size,
        device,
        seed_per_image,
        weak=open_trained(weak, autoencoder=config.autoencoder) if weak else None,
        precision=config.precision,
        image_size=size,
    )


def job_of_record(path: Path, moved: SamplingConfig, device: Any) -> Job:
    """The job whose images the file `path` records: samples.json, or an evaluation's metrics of a checkpoint.

    `moved` says where the networks and the autoencoder lie now, where that is another place. On another kind
    of device the images differ by rounding.

    Raises:
        ValueError: no such record, or networks that are not those of the record, naming what differs.
    """
    content = runtime.read_record(path, [])
    record = content.get("protocol", {}).get("samples", content)
    missing = [key for key in (*SampleSettings.__dataclass_fields__, *SOURCES) if key not in record]
    if missing:
        raise ValueError(
            f"{path} does not say {missing[0]}: it is no record of images that were made, as samples.json "
            "is, or of an earlier version"
        )
    trained = _recorded_network(record, moved)
    weak = moved.autoguidance or record.get("autoguidance_checkpoint")
    size = record["image_size"]
    parts = {
        key: tuple(v) if isinstance(v, list) else v for key, v in record["sampler"].items() if key != "name"
    }
    job = Job(
        trained,
        record["num_images"],
        record["labels"],
        record["seed"],
        find_sampler(trained.default_sampler, parts),
        Guidance(
            record["cfg_scale"],
            tuple(record["guidance_interval"]),
            record["guided_channels"],
            record["guidance_rescale"],
        ),
        record["batch_size"],
        device,
        record["seed_per_image"],
        weak=open_trained(weak, autoencoder=moved.autoencoder) if weak else None,
        precision=record["precision"],
        image_size=(size, size) if isinstance(size, int) else tuple(size),
    )
    _check_same(path, job, record)
    return job


def _recorded_network(record: dict[str, Any], moved: SamplingConfig) -> Trained:
    where = moved.checkpoint or record["checkpoint"]
    of_a_run = record["step"] is not None
    step = record["step"] if of_a_run and (Path(where) / "checkpoints").is_dir() else None
    weights = moved.weights or (record["weights"] if of_a_run else None)
    return open_trained(where, weights, step, moved.autoencoder, moved.family)


def _check_same(path: Path, job: Job, record: dict[str, Any]) -> None:
    found = json.loads(json.dumps(dataclasses.asdict(job.settings())))
    for key in found.keys() - {"weights"}:  # whose name is where they lie; the hash tells
        if found[key] != record[key]:
            raise ValueError(
                f"{path} is of images with {key} = {record[key]}, but {job.trained.where} and this version "
                f"give {found[key]}"
            )
