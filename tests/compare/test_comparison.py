"""A tiny comparison end to end: its cells, their pairing, what is refused, and what a kill changes."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from sitvit.compare.cells import NotReady, Taken, cells_of
from sitvit.compare.report import write_comparison
from sitvit.compare.result import collect
from sitvit.compare.settings import ComparisonConfig
from sitvit.compare.work import do, find_cell, work_through
from sitvit.config import load_config
from sitvit.data.stream import TrainingStream
from sitvit.runtime import Stopped

NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
RUN = """
run: unused
model: {{name: SiT-S/2, hidden_size: 32, depth: 2, num_heads: 2}}
data: {{latents: {latents}}}
train: {{num_steps: 4, batch_size: 8, lr: 1e-3, ema_decays: [0.9], log_every: 1}}
"""
COMPARISON = """
out: {out}
arms: [vanilla {base}, vit5 {base} model.name=SiT-ViT5-S/2]
seeds: [0, 1]
steps: [2, 4]
cfg_scales: [1.0, 2.0]
grid_images: 4
evaluation: [num_images=16, "labels=[balanced]", num_steps=2, "metrics=[fid,spread]", resamples=2,
             reference={latents}]
"""


def write(folder: Path, latents: Path, out: str = "out") -> Path:
    base = folder / "base.yaml"
    base.write_text(RUN.format(latents=latents))
    path = folder / f"{out}.yaml"
    path.write_text(COMPARISON.format(out=folder / out, base=base, latents=latents))
    return path


def read(path: Path, *overrides: str) -> ComparisonConfig:
    return load_config(path, list(overrides), ComparisonConfig)


@pytest.fixture(scope="module")
def finished(cache_folder, tmp_path_factory) -> ComparisonConfig:
    comparison = read(write(tmp_path_factory.mktemp("compare"), cache_folder))
    assert work_through(cells_of(comparison)) == []
    return comparison


def numbers(comparison: ComparisonConfig) -> list[object]:
    found = collect(comparison, cells_of(comparison))
    values = [(v["arm"], v["seed"], v["step"], v["cfg_scale"], v["metrics"]) for v in found["values"]]
    return [values, found["differences"], found["losses"]]


def test_every_cell_is_done_once_and_reused(finished):
    cells = cells_of(finished)
    assert all(cell.is_done() for cell in cells)
    before = {cell.name: cell.record_path.stat().st_mtime_ns for cell in cells}
    assert work_through(cells) == []
    assert before == {cell.name: cell.record_path.stat().st_mtime_ns for cell in cells}


def test_both_arms_of_a_seed_see_the_same_images_and_noise(finished, cache):
    first, second = (cell.run for cell in cells_of(finished)[:2])
    assert first.model.name != second.model.name
    one, two = (
        TrainingStream(cache, c.train.seed, c.train.batch_size, False, 0.1, 10).batch(3, range(8))
        for c in (first, second)
    )
    assert np.array_equal(one.ids, two.ids)
    for name in ("x_0", "x_1", "u", "labels"):
        assert torch.equal(getattr(one, name), getattr(two, name))


def test_cells_killed_and_done_in_another_order_give_the_same_numbers(
    finished, cache_folder, tmp_path, monkeypatch
):
    comparison = read(write(tmp_path, cache_folder))
    cells = cells_of(comparison)
    from sitvit.train import trainer

    advance, calls = trainer.Trainer.advance, []

    def killed(self, stop):
        calls.append(1)
        if len(calls) == 4:
            raise Stopped("killed")
        return advance(self, stop)

    monkeypatch.setattr(trainer.Trainer, "advance", killed)
    with pytest.raises(Stopped):
        do(cells[1])
    monkeypatch.setattr(trainer.Trainer, "advance", advance)
    assert not cells[1].is_done()
    trained, others = [c for c in cells if c.kind == "train"], [c for c in cells if c.kind != "train"]
    for cell in [*reversed(trained), *reversed(others)]:
        do(cell)
    assert json.dumps(numbers(comparison)) == json.dumps(numbers(finished))


def test_other_settings_are_refused_by_key(finished, tmp_path):
    path = Path(finished.out).with_suffix(".yaml")
    with pytest.raises(ValueError, match=r"train.lr was 0.001, now 0.002"):
        work_through(cells_of(read(path, 'overrides=["train.lr=2e-3"]')))
    changed = [text.replace("num_images=16", "num_images=17") for text in finished.evaluation]
    with pytest.raises(ValueError, match=r"evaluation.num_images was 16, now 17"):
        work_through(cells_of(read(path, f"evaluation={json.dumps(changed)}")))


def test_a_cell_is_held_by_one_process_alone(finished):
    cell = cells_of(finished)[0]
    with cell.lock(), pytest.raises(Taken, match="another process"):
        do(cell)


def test_an_evaluation_before_its_training_says_what_to_run_first(cache_folder, tmp_path):
    cells = cells_of(read(write(tmp_path, cache_folder)))
    cell = find_cell(cells, "evaluate-vit5-seed_1-step_2-cfg_1")
    with pytest.raises(NotReady, match="run --cell train-vit5-seed_1 first"):
        do(cell)
    with pytest.raises(ValueError, match="no cell 'nothing'"):
        find_cell(cells, "nothing")


def test_mistakes_are_told_before_anything_is_made(cache_folder, tmp_path):
    path = write(tmp_path, cache_folder)
    with pytest.raises(ValueError, match="cfg_scales must begin with 1"):
        read(path, "cfg_scales=[2.0]")
    with pytest.raises(ValueError, match="different names"):
        read(path, 'arms=["a x.yaml", "a y.yaml"]')
    with pytest.raises(ValueError, match="there is no configuration file nowhere.yaml"):
        cells_of(read(path, 'arms=["a nowhere.yaml", "b nowhere.yaml"]'))
    assert not (tmp_path / "out").exists()


def test_every_number_of_the_page_and_the_text_is_in_the_json(finished):
    """A number shown with four digits is a rounded one of result.json, or a word of it."""
    written = write_comparison(finished, cells_of(finished))
    result = json.loads((Path(finished.out) / "result.json").read_text())
    known: set[str] = set()

    def gather(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                gather(key)
                gather(inner)
        elif isinstance(value, list):
            for inner in value:
                gather(inner)
        elif isinstance(value, str):
            known.update(re.findall(NUMBER, value))
        elif value is not None and not isinstance(value, bool):
            known.update({f"{value:.4g}", f"{value:g}", f"{value:,}", str(value), f"{100 * value:g}"})

    gather(result)
    page = (Path(finished.out) / "report.html").read_text()
    assert "http" not in page
    for body in (re.sub(r"(?s)<style>.*?</style>|<[^>]*>", " ", page), written[1].read_text()):
        for number in re.findall(NUMBER, html.unescape(body)):
            assert number in known or number.lstrip("-") in known, (
                number,
                body[body.find(number) - 40 :][:80],
            )
    assert all(path.is_file() for path in written)
    assert "not separable" in page or "lower" in page or "higher" in page
