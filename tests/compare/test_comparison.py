"""A tiny comparison end to end: its cells, their pairing, what is refused, and what a kill changes."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sitvit import runtime
from sitvit.compare import work
from sitvit.compare.cells import NotReady, cells_of
from sitvit.compare.result import collect
from sitvit.compare.settings import ComparisonConfig
from sitvit.compare.work import do, find_cell, work_through
from sitvit.data.stream import TrainingBatch, TrainingStream
from sitvit.eval import evaluate
from sitvit.generate import job, samples
from sitvit.generate.request import job_of
from sitvit.train import trainer

from ..conftest import ROOT
from .conftest import read, write

NOISE = ("x_0", "x_1", "u", "labels")


def numbers(comparison: ComparisonConfig) -> list[object]:
    found = collect(comparison, cells_of(comparison))
    values = [(v["arm"], v["seed"], v["step"], v["cfg_scale"], v["metrics"]) for v in found["values"]]
    return [values, found["differences"], found["losses"]]


class Killed(BaseException):
    """Nothing catches it, as nothing outlives a process."""


def die_at(patch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """The `call`-th call of `owner.name` ends the process, before it does anything."""
    calls, whole = [], getattr(owner, name)

    def dying(*arguments, **named):
        calls.append(name)
        if len(calls) == call:
            raise Killed
        return whole(*arguments, **named)

    patch.setattr(owner, name, dying)


def test_every_cell_is_done_once_and_reused(finished):
    cells = cells_of(finished)
    assert all(cell.is_done() for cell in cells)
    before = {cell.name: cell.record_path.stat().st_mtime_ns for cell in cells}
    assert work_through(cells) == []
    assert before == {cell.name: cell.record_path.stat().st_mtime_ns for cell in cells}


def test_both_arms_of_a_seed_train_on_the_same_images_and_noise(cache_folder, tmp_path, monkeypatch):
    """What the two trainings in fact took from the stream, tensor by tensor; the next seed takes other."""
    taken: list[list[TrainingBatch]] = []
    batch = TrainingStream.batch

    def spied(self, step, positions):
        taken[-1].append(batch(self, step, positions))
        return taken[-1][-1]

    monkeypatch.setattr(TrainingStream, "batch", spied)
    cells = [cell for cell in cells_of(read(write(tmp_path, cache_folder))) if cell.kind == "train"]
    assert [(c.seed, c.run.model.name) for c in cells[:2]] == [(0, "SiT-S/2"), (0, "SiT-ViT5-S/2")]
    for cell in cells[:3]:
        taken.append([])
        do(cell)
    first, second, other = taken
    assert len(first) == len(second) == cells[0].step
    for one, two in zip(first, second, strict=True):
        assert np.array_equal(one.ids, two.ids)
        assert all(torch.equal(getattr(one, name), getattr(two, name)) for name in NOISE)
    assert not np.array_equal(first[0].ids, other[0].ids)
    assert not torch.equal(first[0].x_0, other[0].x_0)


def test_both_arms_of_a_seed_are_measured_on_images_of_the_same_noise_and_class(finished, monkeypatch):
    """What the two samplers in fact start from."""
    drawn: list[torch.Tensor] = []
    noise_of = job.noise_of
    monkeypatch.setattr(job, "noise_of", lambda *given: drawn.append(noise_of(*given)) or drawn[-1])
    cells = cells_of(finished)
    for seed in finished.seeds:
        for arm in ("vanilla", "vit5"):
            measured = find_cell(cells, f"evaluate-{arm}-seed_{seed}-step_4-cfg_2").evaluation
            job_of(measured, measured.sampling_batch_size, torch.device("cpu")).latents(range(4))
    first, second, other, _ = drawn
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_cells_killed_inside_and_done_in_another_order_give_the_same_numbers(
    finished, cache_folder, tmp_path, monkeypatch
):
    """Killed in a training step after a checkpoint, and between an evaluation's features and its numbers."""
    comparison = read(write(tmp_path, cache_folder))
    cells = cells_of(comparison)
    trained, others = [c for c in cells if c.kind == "train"], [c for c in cells if c.kind != "train"]
    with monkeypatch.context() as patch:
        die_at(patch, trainer.Trainer, "advance", 4)
        with pytest.raises(Killed):
            do(trained[1])
    assert len(list((Path(trained[1].run.run) / "checkpoints").iterdir())) == 1, "killed after a checkpoint"
    for cell in reversed(trained):
        assert not cell.is_done()
        do(cell)
    with monkeypatch.context() as patch:
        die_at(patch, evaluate, "write_metrics", 1)
        with pytest.raises(Killed):
            do(others[0])
    with monkeypatch.context() as patch:
        die_at(patch, samples, "write_image", 2)
        with pytest.raises(Killed):
            do(others[-1])
    for cell in reversed(others):
        assert not cell.is_done()
        do(cell)
    assert json.dumps(numbers(comparison)) == json.dumps(numbers(finished))


@pytest.mark.slow
def test_a_command_killed_by_the_system_between_and_inside_cells_continues_to_the_same_numbers(
    finished, cache_folder, tmp_path
):
    """SIGKILL while a training, then an evaluation, then the next cell is at work."""
    path = write(tmp_path, cache_folder)
    comparison = read(path)
    command = [sys.executable, str(ROOT / "scripts/compare.py"), "--config", str(path)]
    for name in (
        "train-vit5-seed_0",
        "evaluate-vanilla-seed_0-step_4-cfg_1",
        "evaluate-vit5-seed_1-step_2-cfg_1",
    ):
        record = find_cell(cells_of(comparison), name).record_path
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not record.is_file():
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert json.dumps(numbers(comparison)) == json.dumps(numbers(finished))


def test_other_settings_are_refused_by_key(finished, tmp_path):
    path = Path(finished.out).with_suffix(".yaml")
    with pytest.raises(ValueError, match=r"train.lr was 0.001, now 0.002"):
        work_through(cells_of(read(path, 'overrides=["train.lr=2e-3"]')))
    changed = [text.replace("num_images=16", "num_images=17") for text in finished.evaluation]
    with pytest.raises(ValueError, match=r"evaluation.num_images was 16, now 17"):
        work_through(cells_of(read(path, f"evaluation={json.dumps(changed)}")))


def test_numbers_against_another_reference_are_refused_and_measured_again_when_deleted(finished):
    """The reference's file was made again between two cells: its name is the same."""
    cell = find_cell(cells_of(finished), "evaluate-vit5-seed_1-step_4-cfg_1")
    path, before = Path(cell.evaluation.out), numbers(finished)
    whole = path.read_bytes()
    found = json.loads(whole)
    try:
        for part, key in (("reference", "fingerprint"), ("features", "sha256")):
            other = {**found["protocol"], part: {**found["protocol"][part], key: "another"}}
            path.write_text(json.dumps({**found, "protocol": other}))
            with pytest.raises(ValueError, match=f"seed_1.*different {part}"):
                numbers(finished)
        path.unlink()
        assert not cell.is_done()
        assert work_through([cell]) == []
        assert numbers(finished) == before
    finally:
        path.write_bytes(whole)


def test_a_cell_that_was_done_before_there_was_a_choice_of_precision_is_done(finished):
    cell = next(cell for cell in cells_of(finished) if cell.kind == "evaluate")
    record = json.loads(cell.record_path.read_text())
    del record["settings"]["evaluation.precision"]
    cell.record_path.write_text(json.dumps(record))
    assert cell.is_done()


@pytest.fixture
def copied(finished, tmp_path) -> ComparisonConfig:
    """The finished comparison, for a test to damage."""
    comparison = dataclasses.replace(finished, out=str(tmp_path / "copied"))
    shutil.copytree(finished.out, comparison.out)
    for record in (tmp_path / "copied" / "cells").glob("*.json"):
        record.write_text(record.read_text().replace(finished.out, comparison.out))
    return comparison


def test_a_result_that_is_gone_is_made_again_and_nothing_else(copied):
    cells = cells_of(copied)
    lost = [find_cell(cells, name) for name in ("evaluate-vit5-seed_1-step_2-cfg_1", "grid-vanilla-cfg_2")]
    Path(lost[0].evaluation.out).unlink()
    shutil.rmtree(lost[1].grid_folder)
    assert [cell.name for cell in cells if not cell.is_done()] == [cell.name for cell in lost]


def test_a_checkpoint_that_a_finished_training_has_no_longer_is_told_as_such(copied):
    cell = find_cell(cells_of(copied), "evaluate-vit5-seed_1-step_2-cfg_1")
    Path(cell.evaluation.out).unlink()
    shutil.rmtree(cell.checkpoint)
    with pytest.raises(NotReady, match=r"is finished and has it no longer: put it back, or delete .*seed_1"):
        do(cell)


def test_a_start_that_left_nothing_binds_nobody_to_its_mistake(cache_folder, tmp_path):
    path = write(tmp_path, cache_folder)
    wrong = cells_of(read(path, f"overrides=[data.latents={tmp_path / 'nowhere'}]"))[0]
    with pytest.raises(ValueError, match="is no latent cache"):
        do(wrong)
    assert not cells_of(read(path))[0].is_done()


def test_a_longer_comparison_shows_images_of_its_own_last_step(copied):
    longer = dataclasses.replace(copied, steps=[2, 4, 6])
    open_cells = [cell for cell in cells_of(longer) if not cell.is_done()]
    assert sorted({(cell.kind, cell.step) for cell in open_cells}) == [
        ("evaluate", 6),
        ("grid", 6),
        ("train", 6),
    ]


def test_what_others_had_when_its_turn_came_is_tried_again_once_they_may_have_ended(finished, monkeypatch):
    first, second, third, own = cells = cells_of(finished)[:4]
    tried = []

    def others_are_at_work(cell):
        tried.append(cell)
        if cell is first and tried.count(first) == 1:
            raise runtime.Taken("by another worker, which ends it meanwhile")
        if cell is second and tried.count(first) == 1:
            raise NotReady("needs the first")
        if cell is third:
            raise runtime.Taken("by another worker, for long")

    monkeypatch.setattr(work, "do", others_are_at_work)
    assert work.work_through(cells) == [third]
    assert tried == [first, second, third, own, first, second, third, third]


def test_a_cell_is_held_by_one_process_alone(finished):
    cell = cells_of(finished)[0]
    with cell.lock(), pytest.raises(runtime.Taken, match="another process"):
        do(cell)


def test_an_evaluation_before_its_training_says_what_to_run_first(cache_folder, tmp_path):
    cells = cells_of(read(write(tmp_path, cache_folder)))
    cell = find_cell(cells, "evaluate-vit5-seed_1-step_2-cfg_1")
    with pytest.raises(NotReady, match="run --cell train-vit5-seed_1 first"):
        do(cell)
    with pytest.raises(ValueError, match="no cell 'nothing'"):
        find_cell(cells, "nothing")


def test_keys_that_the_comparison_sets_itself_are_refused_not_ignored(cache_folder, tmp_path):
    path = write(tmp_path, cache_folder)
    with pytest.raises(ValueError, match=r"arm cannot set train.num_steps.*\n.*cannot set train.seed"):
        read(path, 'arms=["a x.yaml train.seed=9", "b y.yaml"]', 'overrides=["train.num_steps=3"]')
    with pytest.raises(ValueError, match="evaluation cannot set cfg_scale"):
        read(path, 'evaluation=["cfg_scale=1.5"]')


def test_an_override_of_one_arm_goes_before_that_of_all(cache_folder, tmp_path):
    comparison = read(write(tmp_path, cache_folder))
    arms = [f"{comparison.arms[0]} train.lr=3e-3", comparison.arms[1]]
    changed = dataclasses.replace(comparison, arms=arms, overrides=["train.lr=2e-3"])
    rates = [changed.run_config(arm, 0).train.lr for arm in changed.parsed_arms()]
    assert rates == [3e-3, 2e-3]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("reference=nowhere.npz", "nowhere.npz"),
        ("sampler=hoin", "no sampler is called 'hoin'"),
        ("weights=ema_0.5", "weights 'ema_0.5' will not be there"),
        ("features=dinov2", "DINOv2 weights are not there"),
        ("features=fashion", "no features are called 'fashion'"),
    ],
)
def test_a_measurement_that_will_fail_is_told_before_the_first_training(given, told, cache_folder, tmp_path):
    comparison = read(write(tmp_path, cache_folder))
    changed = dataclasses.replace(comparison, evaluation=[*comparison.evaluation, given])
    with pytest.raises(ValueError, match=re.escape(told)):
        work_through(cells_of(changed))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", ["data.latents=nowhere", "data.latents=null data.images=nowhere"])
def test_data_of_the_second_arm_that_are_not_there_are_told_before_the_first_training(
    data, cache_folder, tmp_path
):
    comparison = read(write(tmp_path, cache_folder))
    live = " data.autoencoder=fashion-autoencoder data.image_size=32" if "images" in data else ""
    arms = [comparison.arms[0], f"{comparison.arms[1]} {data}{live}"]
    with pytest.raises(ValueError, match="nowhere"):
        work_through(cells_of(dataclasses.replace(comparison, arms=arms)))
    assert not (tmp_path / "out").exists()


def test_mistakes_are_told_before_anything_is_made(cache_folder, tmp_path):
    path = write(tmp_path, cache_folder)
    with pytest.raises(ValueError, match="cfg_scales must begin with 1"):
        read(path, "cfg_scales=[2.0]")
    with pytest.raises(ValueError, match="different names"):
        read(path, 'arms=["a x.yaml", "a y.yaml"]')
    with pytest.raises(ValueError, match="there is no configuration file nowhere.yaml"):
        cells_of(read(path, 'arms=["a nowhere.yaml", "b nowhere.yaml"]'))
    assert not (tmp_path / "out").exists()
