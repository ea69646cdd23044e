"""Which images of which network: what `scripts/sample.py`, `scripts/evaluate.py` and configs/eval/ can say.

The verbs alone see this; everything below takes plain arguments. Nothing heavy is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SAMPLER_PARTS = (
    "method",
    "num_steps",
    "shift",
    "atol",
    "rtol",
    "eta",
    "diffusion",
    "diffusion_norm",
    "last_step",
    "last_step_size",
    "interval",
)
"""What of a preset can be replaced: fields of the samplers' classes."""


@dataclass
class SamplingConfig:
    """A network and all that its images follow from, but for the size of a batch."""

    checkpoint: str | None = None  # null: the newest run
    weights: str | None = None  # ema, model or a full name; null: the average where there is one
    step: int | None = None  # of a run; null: the newest
    autoencoder: str | None = None  # where it lies, if it moved or nothing recorded it
    family: str | None = None  # SiT or DiT, where an official file does not tell
    num_images: int = 100
    labels: list[str] = field(default_factory=lambda: ["balanced"])
    seed: int = 0
    sampler: str | None = None  # a preset; null: heun of a SiT, dit of a DiT
    method: str | None = None
    num_steps: int | None = None
    shift: float | None = None
    atol: float | None = None
    rtol: float | None = None
    eta: float | None = None
    diffusion: str | None = None
    diffusion_norm: float | None = None
    last_step: str | None = None
    last_step_size: float | None = None
    interval: list[float] | None = None
    cfg_scale: float = 1.0
    guidance_interval: list[float] = field(default_factory=lambda: [0.0, 1.0])
    guided_channels: int | None = None  # null: all
    guidance_rescale: float = 0.0
    autoguidance: str | None = None  # a weaker network, to guide away from
    precision: str = "float32"
    image_size: list[int] | None = None  # side, or height and width; null: as trained

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense for any network."""
        problems = []
        if self.step is not None and self.step < 1:
            problems.append(f"step must be at least 1, got {self.step}")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        if not (math.isfinite(self.cfg_scale) and self.cfg_scale >= 1):
            problems.append(f"cfg_scale must be 1 (off) or more, got {self.cfg_scale}")
        for name in ("interval", "guidance_interval"):
            if (pair := getattr(self, name)) is not None and len(pair) != 2:
                problems.append(f"{name} must be two numbers, from t to t, got {pair}")
        if len(self.guidance_interval) == 2:
            low, high = self.guidance_interval
            if not 0 <= low <= high <= 1:
                problems.append(f"the guidance interval needs 0 <= low <= high <= 1, got ({low}, {high})")
        if self.image_size is not None and not 1 <= len(self.image_size) <= 2:
            problems.append(f"image_size must be one side, or height and width, got {self.image_size}")
        return problems

    def sampler_parts(self) -> dict[str, object]:
        """The parts of the sampler that are given."""
        parts = {name: getattr(self, name) for name in SAMPLER_PARTS}
        parts["interval"] = self.interval and tuple(self.interval)
        return {name: value for name, value in parts.items() if value is not None}
