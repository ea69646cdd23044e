"""Experiment files: a typed schema, the file (and what it is based on), then `key=value` overrides.

    base: other.yaml        optional, relative to this file; its values come first
    run: runs/NAME          where everything that the run makes goes
    model: {name: SiT-XL/2, ...any constructor argument of the network}
    data: {latents: FOLDER, ...}, or {images: FOLDER, autoencoder: NAME, image_size: 256}
    train: {...}

The two small networks that ship with sitvit have schemas of their own, read by the same rules.
"""

from .experiment import MAX_WIDTH, Config, DataConfig, ModelConfig, TrainConfig
from .reading import dump_config, flat, load_config
from .small_networks import AutoencoderConfig, ClassifierConfig

__all__ = [
    "MAX_WIDTH",
    "AutoencoderConfig",
    "ClassifierConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "TrainConfig",
    "dump_config",
    "flat",
    "load_config",
]
