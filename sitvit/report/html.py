"""One self-contained page about some runs: results, pictures, and what was run at what cost."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import runtime
from ..config import Config, load_config
from ..data.latents import LatentCache
from ..eval.features import FashionFeatures
from ..generate.samples import RECORD, Samples
from ..train.checkpoint import Checkpoint, find_checkpoint
from ..train.metrics import read_metrics
from .figures import grid_figure, loss_figure, save_figure
from .page import analysis, image, note, page, table, text

HOW_TO_READ = f"""\
{FashionFeatures.distance_name} is a Frechet distance in the features of a small classifier of Fashion-MNIST:
lower is better; it is not FID and compares only with itself, at one number of images. Class agreement is the
share of images that this classifier takes for the class that was asked for. Each row is one run and seed."""


@dataclass(frozen=True)
class Run:
    """All that a run left behind."""

    folder: Path
    checkpoint: Checkpoint
    config: dict[str, Any]
    losses: list[dict[str, float]]
    samples: list[Samples]

    @property
    def model(self) -> str:
        """The preset, and the size where it is another."""
        model = self.config["model"]
        sizes = [
            f"{model[key]} {word}"
            for key, word in (("hidden_size", "wide"), ("depth", "deep"))
            if key in model
        ]
        return ", ".join([model["name"], *sizes])

    @property
    def name(self) -> str:
        """Model and folder."""
        return f"{self.model} ({self.folder.name})"


def open_run(folder: Path) -> Run:
    """Read a run; ValueError where it has no checkpoint or no finished samples."""
    checkpoint = find_checkpoint(str(folder))
    config = load_config(checkpoint.folder / "config.yaml", [], Config).to_dict()
    records = sorted((folder / "samples").glob(f"*/{RECORD}"))
    samples = [Samples(record.parent) for record in records]
    # Samples of an earlier state of the run are another story.
    samples = [made for made in samples if made.record["step"] == checkpoint.step]
    if not samples:
        raise ValueError(
            f"{folder} has no finished samples of step {checkpoint.step} in {folder}/samples; "
            "run scripts/sample.py"
        )
    return Run(folder, checkpoint, config, read_metrics(folder), samples)


def write_report(folders: list[Path], out: Path, figures_prefix: str | None) -> list[Path]:
    """Write the page on the runs in `folders` to `out`, and its pictures beside it.

    With `figures_prefix` ("samples/demo_") each run's best-guided grid is also written to PREFIXRUN.png
    with the json that reproduces it, and the loss curves to PREFIXloss.png. Returns what was written.

    Raises:
        ValueError: a folder that is no run, or has no samples yet.
    """
    runs = [open_run(folder) for folder in folders]
    pictures = out.parent / f"{out.stem}_files"
    curves = {run.name: run.losses for run in runs if run.losses}
    written = []
    if curves:
        save_figure(pictures / "loss.png", lambda: loss_figure(curves))
        written.append(pictures / "loss.png")
    made_of: list[str] = []
    for run in runs:
        for made in run.samples:
            path, title = pictures / f"{run.folder.name}-{made.folder.name}.png", grid_title(run, made)
            save_figure(path, partial(grid_figure, made, title))
            made_of += [f"<h3>{text(run.name)}</h3>", image(path, f"Images of {title}"), _how(made)]
            written.append(path)
    if figures_prefix:
        written += _export(runs, curves, figures_prefix)
    loss = [image(pictures / "loss.png", "Training loss against step of each run")] if curves else []
    sections = [
        ("Results", _results(runs)),
        ("Training loss", loss),
        ("Images", made_of),
        ("Inside the networks", [part for run in runs for part in analysis(run.folder)]),
        ("What was run", [_stages(runs)]),
    ]
    with runtime.write_aside(out) as temporary:
        temporary.write_text(page("What the runs made", [], sections), "utf-8")
    return [out, *written]


def grid_title(run: Run, made: Samples) -> str:
    """Model, step, sampler, guidance and seed in one line."""
    record = made.record
    return (
        f"{run.model}, {record['weights']} at step {record['step']}, "
        f"{record['sampler']['name']}, cfg {record['cfg_scale']:g}, seed {record['seed']}"
    )


def _export(runs: list[Run], curves: dict[str, Any], prefix: str) -> list[Path]:
    written = []
    for run in runs:
        made = max(run.samples, key=lambda made: made.record["cfg_scale"])
        picture = Path(f"{prefix}{run.folder.name}.png")
        save_figure(picture, partial(grid_figure, made, grid_title(run, made)))
        record = {key: value for key, value in made.record.items() if key != "image_labels"}
        runtime.write_json(picture.with_suffix(".json"), {**record, "config": run.config})
        written.append(picture)
    if curves:
        picture = Path(f"{prefix}loss.png")
        save_figure(picture, lambda: loss_figure(curves))
        commands = {run.name: run.checkpoint.record["command"] for run in runs}
        runtime.write_json(picture.with_suffix(".json"), {"commands": commands, "losses": curves})
        written.append(picture)
    return written


def measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics files beside a set of samples or latents."""
    return [runtime.read_json(path) for path in sorted(folder.glob("metrics_*.json"))]


def _results(runs: list[Run]) -> list[str]:
    rows = []
    for run in runs:
        last = f"{run.losses[-1]['loss']:.4f}" if run.losses else "-"
        parameters = f"{run.checkpoint.record['num_parameters']:,}"
        for made in run.samples:
            for metrics in measured(made.folder):
                rows.append(
                    [run.name, parameters, str(run.checkpoint.step), last,
                     f"{made.record['cfg_scale']:g}", *_numbers(metrics)]
                )  # fmt: skip
    for folder in sorted({run.config["data"]["latents"] or "" for run in runs} - {""}):
        for metrics in measured(Path(folder)):
            rows.append(
                [
                    "the autoencoder's reconstructions (floor)",
                    "-",
                    "-",
                    "-",
                    "-",
                    *_numbers(metrics),
                ]
            )
    if not rows:
        return [note("Nothing was evaluated yet: run scripts/evaluate.py --samples FOLDER.")]
    head = [
        "model",
        "parameters",
        "steps",
        "last loss",
        "cfg",
        "images",
        "distance",
        "class agreement",
    ]
    return [table("Results", head, rows, num_text_columns=1), note(HOW_TO_READ)]


def _numbers(metrics: dict[str, Any]) -> list[str]:
    values = metrics["metrics"]
    agreement = values.get("class_agreement")
    return [
        f"{metrics['protocol']['num_samples']:,}",
        next((f"{value:.3f} {name}" for name, value in values.items() if name.startswith("F")), "-"),
        "-" if agreement is None else f"{100 * agreement:.1f} %",
    ]


def _how(made: Samples) -> str:
    return f"<p class='note'><code>{text(made.record['command'])}</code></p>"


def _stages(runs: list[Run]) -> str:
    stages: list[tuple[str, dict[str, Any]]] = []
    for folder in sorted({run.config["data"]["latents"] or "" for run in runs} - {""}):
        if (Path(folder) / "manifest.json").is_file():
            stages.append(("encode", LatentCache(Path(folder)).manifest))
        stages += [("evaluate", metrics) for metrics in measured(Path(folder))]
    for run in runs:
        stages.append(("train", run.checkpoint.record))
        for made in run.samples:
            stages.append(("sample", made.record))
            stages += [("evaluate", metrics) for metrics in measured(made.folder)]
    rows = [
        [stage, record["command"], f"{record['seconds']:.0f}", f"{record['peak_memory_mib']:,}"]
        for stage, record in stages
    ]
    return table("What was run", ["stage", "command", "seconds", "peak MiB"], rows, num_text_columns=2)
