"""Reads an experiment file into its schema: what it is based on, the file itself, then `key=value` overrides.

All that is wrong is reported in one message. Only this package knows OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from .experiment import Config

STAND_INS = {
    "run": "run",
    "out": "out",
    "images": "images",
    "held_out": "held_out",
    "model.name": "SiT-S/2",
    "num_steps": 1 << 40,
    "train.num_steps": 1 << 40,
}
"""Legal values for what is missing, with which the rest is checked all the same."""


class _Checked(Protocol):
    """A dataclass whose values are checked together once their types are right."""

    def problems(self) -> list[str]: ...


Schema = TypeVar("Schema", bound=_Checked)


def load_config(
    path: Path | None, overrides: list[str], schema: type[Schema], num_processes: int = 1
) -> Schema:
    """Read the file `path` (None: the defaults), apply `overrides` ("train.lr=1e-3"), check every value.

    Raises:
        ValueError: one message that lists all unknown keys, wrong types, missing and illegal values, and a
            batch that `num_processes` cannot share.
    """
    values = OmegaConf.structured(schema)
    types: dict[str, str] = _known_types(schema)
    problems: list[str] = []
    entries = [*(_file_entries(path) if path else []), *_override_entries(overrides, types, problems)]
    for source, key, value in entries:
        problem = _set(values, types, key, value)
        if problem:
            problems.append(f"{source}: {problem}")
    missing = _missing(values, types, {key for _, key, _ in entries})
    problems += [f"{key} is missing; set it in the file or as {key}=..." for key in missing]
    for key in types:  # so that what is missing does not hide what is illegal
        if key in STAND_INS and _unset(values, key):
            OmegaConf.update(values, key, STAND_INS[key])
    config = _build(schema, OmegaConf.to_container(values))
    problems += config.problems()
    if isinstance(config, Config):
        problems += config.share_problems(num_processes)
    if problems:
        where = f"{path}: " if path else ""
        raise ValueError(where + "\n  ".join(["the configuration is not usable:", *problems]))
    return config


def _missing(values: Any, types: dict[str, str], given: set[str]) -> list[str]:
    """Keys that the file has to set and does not; the preset supplies what it leaves out of the model."""
    missing = [key for key in types if _unset(values, key) and key not in given]
    missing = [key for key in missing if key == "model.name" or not key.startswith("model.")]
    plain: Any = OmegaConf.to_container(values)  # unlike `values`, it takes "${x}" for text
    latents, images = (f"data.{key}" in types and plain["data"][key] is None for key in ("latents", "images"))
    if latents and images:
        missing.append("data.latents")  # or data.images, whose other keys are asked for then
    return missing


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def dump_config(config: Config) -> str:
    """YAML from which `load_config` makes the same configuration again."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(config.to_dict())))


def _escaped(value: Any) -> Any:
    """`value` with "${" of its texts written so that a file's reader takes it for text."""
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def _build(schema: Any, values: Any) -> Any:
    """The dataclass `schema` with `values`, and its parts alike."""
    parts = {key: kind for key, kind in get_type_hints(schema).items() if dataclasses.is_dataclass(kind)}
    return schema(**{key: _build(parts[key], v) if key in parts else v for key, v in values.items()})


def _unset(values: Any, key: str) -> bool:
    part, _, name = key.rpartition(".")
    return OmegaConf.is_missing(values[part] if part else values, name)


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
        return _unknown(types, key)
    wanted = types[key]
    if wanted == "str" and not isinstance(value, str):
        return f"{key} must be text, got {value!r}; put text in quotes"
    if wanted.startswith("str") and isinstance(value, str) and not value.strip():
        return f"{key} must not be empty"  # an empty folder name would be the current folder
    # OmegaConf turns 2.0 into 2, True into 1 and 2 into True; a person who types these means something else.
    nothing = value is None and wanted.endswith("None")
    fits = not (
        (wanted.startswith("int") and not (_is_int(value) or nothing))
        or (wanted.startswith("float") and isinstance(value, bool))
        or (wanted.startswith("bool") and not (isinstance(value, bool) or nothing))
    )
    try:
        if fits:
            OmegaConf.update(values, key, value)
            return None
    except OmegaConfBaseException:
        pass
    advice = '; write it as ["one", "two"]' if wanted.startswith("list[str]") else ""
    return f"{key} must be of type {wanted.replace(' | None', ' or null')}, got {value!r}{advice}"


def _unknown(types: dict[str, str], key: str) -> str:
    """What a key that is not there may have been meant to be."""
    below = [known for known in types if known.startswith(key + ".")]
    if below:
        return f"{key} needs keys below it, such as {below[0]}"
    name, names = key.rpartition(".")[2], {known: known.rpartition(".")[2] for known in types}
    near = (
        [known for known in types if names[known] == name]
        or difflib.get_close_matches(key, types, n=1, cutoff=0.75)
        or [known for known in types if names[known].startswith(f"{name}_")]
    )
    if near:
        return f"there is no key {key!r}; did you mean {near[0]}?"
    part = key.partition(".")[0]
    in_part = [known for known in types if known.startswith(part + ".")] or list(types)
    return f"there is no key {key!r}; known are {', '.join(in_part)}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
