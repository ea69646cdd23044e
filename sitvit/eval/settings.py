"""What an evaluation is of, as `scripts/evaluate.py` and the files of `configs/eval/` say it.

The verb alone sees this; everything below takes plain arguments. Nothing heavy is imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..generate.settings import SamplingConfig

METRICS = ("fid", "sfid", "is", "pr", "kid", "spread", "infinity")
"""fid: the Frechet distance of the features; pr: precision and recall; spread, infinity: uncertainty.py."""

PRESETS = Path("configs/eval")
SWEPT = ("weights", "cfg_scale", "guidance_interval", "seed")
"""What a sweep can vary."""


@dataclass
class EvaluationConfig(SamplingConfig):
    """Samples or a checkpoint, a reference, and how they are compared."""

    samples: str | None = None  # a folder, zip or npz of images, a latent cache; or `checkpoint`
    reference: str | None = None  # an npz of statistics, or images; null: those that the run was trained on
    features: str | None = None  # fashion-classifier, inception, dinov2; null: what fits the images
    inception_weights: str | None = None
    dinov2_weights: str | None = None
    metrics: list[str] | None = None  # of METRICS; null: what the features are usually measured by
    distances: str = "float32"  # of precision and recall: or adm, float16 as in ADM's suite
    neighbours: int = 3
    split_size: int = 5_000  # images in a split of the Inception Score
    kid_subsets: int = 100
    kid_subset_size: int = 1_000
    resamples: int = 10  # of the bootstrap spread
    batch_size: int = 64  # images through the feature network at once
    out: str | None = None  # json; null: beside the samples
    # Only of a checkpoint, beside the keys of `SamplingConfig`.
    num_images: int = 50_000
    labels: list[str] = field(default_factory=lambda: ["random"])
    sampling_batch_size: int = 50
    keep_samples: str | None = None  # a folder for the images; null: they are measured and not kept

    def problems(self) -> list[str]:
        """A sentence for each value that has the right type and makes no sense."""
        if (self.samples is None) == (self.checkpoint is None):
            what = "either samples or checkpoint" + ("" if self.samples is None else ", not both")
            return [f"name what is to be measured: {what}"]
        lowest = {"neighbours": 1, "split_size": 1, "kid_subsets": 1, "kid_subset_size": 2, "resamples": 2}
        lowest |= {"batch_size": 1, "num_images": 2, "sampling_batch_size": 1}
        problems = super().problems() + [
            f"{name} must be at least {least}, got {getattr(self, name)}"
            for name, least in lowest.items()
            if getattr(self, name) < least
        ]
        for metric in self.metrics or []:
            if metric not in METRICS:
                problems.append(f"metrics must be of {', '.join(METRICS)}, got {metric}")
        if self.metrics == []:
            problems.append(f"metrics must name at least one of {', '.join(METRICS)}")
        if self.distances not in ("float32", "adm"):
            problems.append(f"distances must be float32 or adm, got {self.distances}")
        return problems


def preset_path(name: str) -> Path:
    """The file of a preset: a path, or the name of one in configs/eval.

    Raises:
        ValueError: there is none, with the names that there are.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    for folder in (PRESETS, Path(__file__).resolve().parents[2] / PRESETS):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / PRESETS).glob("*.yaml"))
    raise ValueError(f"there is no preset {name!r}; known are {', '.join(known)}, or name a .yaml file")


def sweep_points(config: EvaluationConfig, swept: dict[str, list[str]]) -> list[EvaluationConfig]:
    """Every combination of the `swept` values: {"cfg_scale": ["1", "1.5"], "guidance_interval": ["0:1"]}.

    Raises:
        ValueError: a key that a sweep cannot vary, or a value that is none of its kind.
    """
    points = [config]
    for key, texts in swept.items():
        if key not in SWEPT:
            raise ValueError(f"a sweep varies {', '.join(SWEPT)}, not {key!r}")
        values = [_parse(key, text) for text in texts]
        if len({str(value) for value in values}) < len(values):
            raise ValueError(f"the sweep names a {key} twice")
        changes: list[dict[str, Any]] = [{key: value} for value in values]
        points = [dataclasses.replace(point, **change) for point in points for change in changes]
    for point in points:
        if problems := point.problems():
            raise ValueError(f"the sweep: {problems[0]}")
    return points


def _parse(key: str, text: str) -> str | float | int | list[float]:
    try:
        if key == "guidance_interval":
            low, high = map(float, text.split(":"))
            return [low, high]
        return text if key == "weights" else int(text) if key == "seed" else float(text)
    except ValueError:
        form = {"guidance_interval": "LOW:HIGH, as 0.1:0.8", "seed": "a whole number"}.get(key, "a number")
        raise ValueError(f"{key} of a sweep must be {form}, got {text!r}") from None
