"""From what a person asked for to a job."""

from typing import Any

from ..flow.guidance import Guidance
from ..flow.samplers import find_sampler
from .draws import resolve_labels
from .job import Job
from .settings import SamplingConfig
from .trained import Trained, open_trained


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
