"""Experiment files: a typed schema, the file (and what it is based on), then `key=value` overrides.

    base: other.yaml        optional, relative to this file; its values come first
    run: runs/NAME          where everything that the run makes goes
    model: {name: SiT-XL/2, ...any constructor argument of the network}
    data: {latents: FOLDER, ...}, or {images: FOLDER, autoencoder: NAME, image_size: 256}
    train: {...}

The two small networks that ship with sitvit have schemas of their own (`AutoencoderConfig`,
`ClassifierConfig`), read by the same rules. All that is wrong is reported in one message. Only this
module knows OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from .flow.names import PATH_NAMES, PREDICTIONS, TIME_DISTRIBUTIONS, WEIGHTS
from .models.presets import preset


@dataclass
class ModelConfig:
    """`name` is a preset; every other key, where given, overrides the preset's value."""

    name: str = MISSING
    patch_size: int = MISSING
    hidden_size: int = MISSING
    depth: int = MISSING
    num_heads: int = MISSING
    mlp_ratio: float = MISSING
    num_classes: int = MISSING  # as many as the latents have, unless given
    class_dropout_prob: float = 0.1
    norm: str = MISSING
    norm_affine: bool = MISSING
    qkv_bias: bool = MISSING
    qk_norm: bool = MISSING
    rope: bool = MISSING
    positions: str = MISSING
    num_registers: int = MISSING
    layer_scale_init: float | None = MISSING
    mlp: str = MISSING


@dataclass
class DataConfig:
    """What the network is trained on: `latents`, or `images` that an autoencoder encodes at each step."""

    latents: str | None = None  # a folder made by scripts/encode_latents.py
    images: str | None = None  # as --images of scripts/encode_latents.py
    autoencoder: str | None = None  # as --autoencoder there
    image_size: int | None = None
    flip: bool = False  # mirror half of the images

    def problems(self) -> list[str]:
        """A sentence where both, or only a part of the second, are given."""
        live = {"images": self.images, "autoencoder": self.autoencoder, "image_size": self.image_size}
        given = [f"data.{key}" for key, value in live.items() if value is not None]
        absent = [f"data.{key}" for key, value in live.items() if value is None]
        if self.latents is not None and given:
            return [f"data.latents has its own images and autoencoder; leave out {', '.join(given)}"]
        if self.latents is None and given and absent:
            return [f"training from data.images needs {', '.join(absent)} too"]
        return []


@dataclass
class TrainConfig:
    """How it is trained; steps are optimizer steps. The defaults are SiT's recipe (arXiv 2401.08740)."""

    seed: int = 0
    init_from: str | None = None  # a ViT-5 classifier (folder or file) whose blocks a new run starts from
    num_steps: int = MISSING
    batch_size: int = 256  # over all processes
    path: str = "linear"  # or gvp, vp
    prediction: str = "velocity"  # or noise, score, data
    loss_weight: str = "none"  # or velocity, likelihood
    time_distribution: str = "uniform"  # or logit_normal, of time_mean and time_std
    time_mean: float = 0.0
    time_std: float = 1.0
    time_shift: float = 1.0  # above 1: more time in the noise
    time_interval: list[float] | None = None  # [t_min, t_max]; null: as path and prediction allow
    lr: float = 1e-4
    beta_1: float = 0.9
    beta_2: float = 0.999
    weight_decay: float = 0.0
    warmup_steps: int = 0  # linear from zero
    decay_steps: int = 0  # linear to zero over the last steps of the run
    clip_grad_norm: float | None = None
    ema_decay: float = 0.9999
    log_every: int = 100
    save_every: int = 10_000
    keep_checkpoints: int = 2


@dataclass
class Config:
    """An experiment: one run of one network."""

    run: str = MISSING  # the folder for all that the run makes
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def to_dict(self) -> dict[str, Any]:
        """The resolved values; model keys that are left to the preset are absent."""
        values = dataclasses.asdict(self)
        values["model"] = {k: v for k, v in values["model"].items() if v != MISSING}
        return values

    def model_arguments(self) -> dict[str, Any]:
        """Constructor arguments of the network: the preset's with this file's overrides."""
        overrides = self.to_dict()["model"]
        return {**preset(overrides.pop("name")), **overrides}

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        model, train = self.model, self.train
        lowest = dict.fromkeys(("num_steps", "batch_size", "log_every", "save_every"), 1)
        lowest |= dict.fromkeys(("seed", "weight_decay", "warmup_steps", "decay_steps"), 0)
        problems = _below(train, "train.", lowest | {"keep_checkpoints": 1})
        sizes = ("patch_size", "hidden_size", "depth", "num_heads", "num_classes")
        problems += _below(model, "model.", dict.fromkeys(sizes, 1))
        problems += self.data.problems()
        dropout, clip = model.class_dropout_prob, train.clip_grad_norm
        model_numbers = {"model.mlp_ratio": model.mlp_ratio, "model.layer_scale_init": model.layer_scale_init}
        ramps = train.warmup_steps + train.decay_steps
        rules: list[tuple[str, Any, bool, str]] = [
            (f"train.{name}", value, 0 <= value < 1, "from 0 to below 1")
            for name in ("beta_1", "beta_2", "ema_decay")
            for value in [getattr(train, name)]
        ]
        rules += [
            (key, value, value in (MISSING, None) or 0 < value < math.inf, "above 0")
            for key, value in model_numbers.items()
        ]
        rules += [
            ("train.seed", train.seed, train.seed < 2**63, "below 2^63"),
            ("train.lr", train.lr, 0 < train.lr < float("inf"), "above 0"),
            ("train.time_std", train.time_std, 0 < train.time_std < math.inf, "above 0"),
            ("train.time_shift", train.time_shift, 0 < train.time_shift < math.inf, "above 0"),
            ("train.time_mean", train.time_mean, math.isfinite(train.time_mean), "a finite number"),
            (
                "train.time_interval",
                train.time_interval,
                _is_interval(train.time_interval),
                "two times [t_min, t_max] with 0 <= t_min < t_max <= 1, or null",
            ),
            ("train.clip_grad_norm", clip, clip is None or clip > 0, "above 0, or null"),
            ("model.class_dropout_prob", dropout, 0 <= dropout < 1, "from 0 to below 1"),
            (
                "train.warmup_steps + train.decay_steps",
                ramps,
                ramps <= train.num_steps,
                f"at most train.num_steps = {train.num_steps}",
            ),
        ]
        rules += [
            (f"train.{name}", value, value in known, f"one of {', '.join(known)}")
            for name, known in (
                ("path", PATH_NAMES),
                ("prediction", PREDICTIONS),
                ("loss_weight", WEIGHTS),
                ("time_distribution", TIME_DISTRIBUTIONS),
            )
            for value in [getattr(train, name)]
        ]
        problems += [f"{key} must be {rule}, got {value}" for key, value, ok, rule in rules if not ok]
        try:
            preset(model.name)
            if not model.name.startswith("SiT-"):
                problems.append(f"model.name: {model.name} has no velocity to train; choose a SiT")
        except ValueError as error:
            problems.append(f"model.name: {error}")
        return problems


@dataclass
class AutoencoderConfig:
    """A small `AutoencoderKL`; each block but the last halves height and width."""

    images: str = MISSING  # as --images of scripts/encode_latents.py
    held_out: str = MISSING  # images that it is not trained on, for the reported PSNR
    out: str = MISSING  # the folder to write
    image_size: int = 32
    block_out_channels: list[int] = field(default_factory=lambda: [16, 32, 32])
    norm_num_groups: int = 8
    latent_channels: int = 4
    kl_weight: float = 1e-4
    seed: int = 0
    num_steps: int = MISSING
    batch_size: int = 64
    lr: float = 2e-3

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        names = ("image_size", "norm_num_groups", "latent_channels", "num_steps", "batch_size")
        problems = _below(self, "", {**dict.fromkeys(names, 1), "seed": 0, "kl_weight": 0, "lr": 0})
        problems += _held_out(self)
        factor = 2 ** max(len(self.block_out_channels) - 1, 0)
        if self.image_size % factor:
            problems.append(f"image_size must be a multiple of {factor}, got {self.image_size}")
        if not self.block_out_channels or any(
            width < 1 or width % self.norm_num_groups for width in self.block_out_channels
        ):
            problems.append(
                f"block_out_channels must be multiples of norm_num_groups {self.norm_num_groups}, "
                f"got {self.block_out_channels}"
            )
        return problems


@dataclass
class ClassifierConfig:
    """A small convolutional classifier, whose features FD-fashion compares."""

    images: str = MISSING
    held_out: str = MISSING  # images that it is not trained on, for the reported accuracy
    out: str = MISSING  # the folder to write
    widths: list[int] = field(default_factory=lambda: [16, 32, 64])
    seed: int = 0
    num_steps: int = MISSING
    batch_size: int = 128
    lr: float = 3e-3

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        problems = _below(self, "", {"num_steps": 1, "batch_size": 1, "seed": 0, "lr": 0})
        if not 1 <= len(self.widths) <= 5 or min(self.widths) < 1:
            problems.append(f"widths must be one to five numbers from 1, got {self.widths}")
        return problems + _held_out(self)


Schema = TypeVar("Schema", Config, AutoencoderConfig, ClassifierConfig)


def load_config(path: Path, overrides: list[str], schema: type[Schema]) -> Schema:
    """Read the file `path`, apply `overrides` ("train.lr=1e-3") and check every value.

    Raises:
        ValueError: one message that lists all unknown keys, wrong types, missing and illegal values.
    """
    values = OmegaConf.structured(schema)
    types: dict[str, str] = _known_types(schema)
    problems: list[str] = []
    entries = [*_file_entries(path), *_override_entries(overrides, types, problems)]
    for source, key, value in entries:
        problem = _set(values, types, key, value)
        if problem:
            problems.append(f"{source}: {problem}")
    missing = [key for key in types if _unset(values, key)]
    # The preset supplies what the file leaves out of the model.
    missing = [key for key in missing if key == "model.name" or not key.startswith("model.")]
    if schema is Config and values.data.latents is None and values.data.images is None:
        missing.append("data.latents")  # or data.images, whose other keys are asked for then
    problems += [f"{key} is missing; set it in the file or as {key}=..." for key in missing]
    if not problems:
        config = _build(schema, OmegaConf.to_container(values))
        problems = config.problems()
    if problems:
        raise ValueError(f"{path}: " + "\n  ".join(["the configuration is not usable:", *problems]))
    return config


def dump_config(config: Config) -> str:
    """YAML from which `load_config` makes the same configuration again."""
    return OmegaConf.to_yaml(OmegaConf.create(config.to_dict()))


def _build(schema: Any, values: Any) -> Any:
    """The dataclass `schema` with `values`, and its parts alike."""
    parts = {key: kind for key, kind in get_type_hints(schema).items() if dataclasses.is_dataclass(kind)}
    return schema(**{key: _build(parts[key], v) if key in parts else v for key, v in values.items()})


def _unset(values: Any, key: str) -> bool:
    part, _, name = key.rpartition(".")
    return OmegaConf.is_missing(values[part] if part else values, name)


def _held_out(config: AutoencoderConfig | ClassifierConfig) -> list[str]:
    same = config.images == config.held_out
    return ["held_out must be other images than images are"] if same else []


def _below(part: Any, prefix: str, lowest: Mapping[str, float]) -> list[str]:
    return [
        f"{prefix}{name} must be at least {least}, got {value}"
        for name, least in lowest.items()
        for value in [getattr(part, name)]
        if value != MISSING and not least <= value < math.inf  # not a number is below everything
    ]


def _file_entries(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[str, str, Any]]:
    """(file, dotted key, value) of each leaf in `path`, those of its `base` first.

    `above` are the files that `path` is the base of.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a configuration file, such as configs/demo_sit.yaml")
    if not path.is_file():
        asked = f", which {above[-1]} is based on" if above else ""
        raise ValueError(f"there is no configuration file {path}{asked}")
    if path.resolve() in above:
        raise ValueError(f"{path} is based on itself")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} is empty or not a mapping of keys to values")
    base = content.pop("base", None)
    entries = [] if base is None else _file_entries(path.parent / str(base), (*above, path.resolve()))
    return entries + [(str(path), key, value) for key, value in _leaves(content, "")]


def _leaves(content: dict[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        leaves += _leaves(value, name + ".") if isinstance(value, dict) else [(name, value)]
    return leaves


def _override_entries(
    overrides: list[str], types: dict[str, str], problems: list[str]
) -> list[tuple[str, str, Any]]:
    entries = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            problems.append(f"{text!r} is not of the form key=value")
        elif types.get(key) == "str" or (types.get(key) == "str | None" and value != "null"):
            # "001" and "no" stay text
            entries.append((text, key, value))
        else:
            entries.append((text, key, _parse(value)))
    return entries


def _parse(value: str) -> Any:
    """A value as OmegaConf reads it from YAML, where 1e-4 is a number."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index,call-overload]
    except (YAMLError, OmegaConfBaseException):
        return value


def _known_types(schema: type, prefix: str = "") -> dict[str, str]:
    """Dotted key -> annotation of each leaf of a dataclass."""
    types: dict[str, str] = {}
    hints = get_type_hints(schema)
    for item in dataclasses.fields(schema):
        name = prefix + item.name
        part = hints[item.name]
        is_part = dataclasses.is_dataclass(part)
        types |= _known_types(part, name + ".") if is_part else {name: str(item.type)}
    return types


def _set(values: Any, types: dict[str, str], key: str, value: Any) -> str | None:
    """Put `value` at the dotted `key`; a sentence where it does not fit."""
    if key not in types:
        below = [known for known in types if known.startswith(key + ".")]
        if below:
            return f"{key} needs keys below it, such as {below[0]}"
        same_name = [known for known in types if known.rpartition(".")[2] == key]
        near = same_name or difflib.get_close_matches(key, types, n=1, cutoff=0.75)
        if near:
            return f"there is no key {key!r}; did you mean {near[0]}?"
        part = key.partition(".")[0]
        in_part = [known for known in types if known.startswith(part + ".")] or list(types)
        return f"there is no key {key!r}; known are {', '.join(in_part)}"
    wanted = types[key]
    if wanted == "str" and not isinstance(value, str):
        return f"{key} must be text, got {value!r}; put text in quotes"
    # OmegaConf turns 2.0 into 2 and True into 1; a person who types these means something else.
    nothing = value is None and wanted.endswith("None")
    fits = not (wanted.startswith("int") and not (_is_int(value) or nothing)) and not (
        wanted.startswith("float") and isinstance(value, bool)
    )
    try:
        if fits:
            OmegaConf.update(values, key, value)
            return None
    except OmegaConfBaseException:
        pass
    return f"{key} must be of type {wanted.replace(' | None', ' or null')}, got {value!r}"


def _is_interval(value: list[float] | None) -> bool:
    return value is None or (len(value) == 2 and 0 <= value[0] < value[1] <= 1)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
