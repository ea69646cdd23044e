"""The options that say which images: one declaration, for the verb that makes and the one that measures."""

import argparse
import dataclasses
from typing import Any

from ..generate.settings import SamplingConfig

SAMPLING: dict[str, dict[str, Any]] = {
    "weights": {"help": "ema, model or a full name"},
    "step": {"type": int, "help": "which checkpoint of a run (default: the newest)"},
    "autoencoder": {"help": "where it lies, if it moved or nothing recorded it"},
    "family": {"choices": ["SiT", "DiT"], "help": "where an official file does not tell"},
    "num_images": {"type": int, "help": "number of images"},
    "labels": {"nargs": "+", "help": "balanced, random, or class names and labels used in turn"},
    "seed": {"type": int, "help": "image i is image i of this seed"},
    "sampler": {
        "help": "heun (a SiT's default, 50 steps), or a published protocol: sit-sde, sit-ode, sit-heun, dit "
        "(a DiT's default), dit-ddim; the next options replace parts of it"
    },
    "method": {
        "help": "euler, heun, rk4, dopri5, dopri5_per_image, ...; euler-maruyama, stochastic-heun; ddpm, ddim"
    },
    "num_steps": {"type": int, "help": "network steps of a method that does not choose them"},
    "shift": {"type": float, "help": "above 1: more of the steps in the noise"},
    "atol": {"type": float, "help": "of an adaptive method"},
    "rtol": {"type": float, "help": "of an adaptive method"},
    "eta": {"type": float, "help": "of ddim: 0 (no noise) to 1"},
    "diffusion": {
        "help": "of an SDE: constant, SBDM, sigma, linear, decreasing, increasing-decreasing",
    },
    "diffusion_norm": {"type": float, "help": "its factor"},
    "last_step": {"help": "of an SDE: none, Mean, Tweedie, Euler"},
    "last_step_size": {"type": float, "help": "its size in t; 0 with none"},
    "interval": {
        "type": float,
        "nargs": 2,
        "metavar": ("T_MIN", "T_MAX"),
        "help": "sample from t to t (as it can)",
    },
    "cfg_scale": {"type": float, "help": "guidance; 1 is off"},
    "guidance_interval": {
        "type": float,
        "nargs": 2,
        "metavar": ("LOW", "HIGH"),
        "help": "guide for t in it",
    },
    "guided_channels": {"choices": ["all", "3"], "help": "all (default), or 3 as published"},
    "guidance_rescale": {"type": float, "help": "0 (off) to 1"},
    "autoguidance": {"metavar": "CHECKPOINT", "help": "guide away from this weaker network"},
    "precision": {
        "choices": ["float32", "bfloat16", "float16"],
        "help": "what the network computes in",
    },
    "image_size": {
        "type": int,
        "nargs": "+",
        "metavar": "N",
        "help": "another size: side, or height and width",
    },
}
"""Field of `SamplingConfig` -> what argparse is told of it; the default is told by the schema."""


def add_sampling(parser: argparse.ArgumentParser, schema: type[SamplingConfig]) -> None:
    """Add the options; each is absent from the namespace unless it was typed."""
    group = parser.add_argument_group("which images")
    defaults = dataclasses.asdict(schema())
    for name, about in SAMPLING.items():
        default = defaults[name]
        words = " ".join(map(str, default)) if isinstance(default, list) else default
        told = about["help"] + ("" if default is None else f" ({words})")
        group.add_argument(option(name), default=argparse.SUPPRESS, **{**about, "help": told})


def typed_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What was typed of them, as `SamplingConfig` has it."""
    typed = {name: getattr(options, name) for name in SAMPLING if hasattr(options, name)}
    if "guided_channels" in typed:
        typed["guided_channels"] = None if typed["guided_channels"] == "all" else 3
    return typed


def option(name: str) -> str:
    """As it is typed."""
    return f"--{name.replace('_', '-')}"
