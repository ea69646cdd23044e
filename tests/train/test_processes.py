"""Two processes: a killed run continues bit for bit, and cut weights (FSDP2) change nothing but rounding."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from sitvit import runtime
from sitvit.data.stream import TrainingStream
from sitvit.train.checkpoint import find_checkpoint, step_folders
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics

from ..conftest import ROOT
from .trainings import run_one

RECIPE = ["train.micro_batch_size=2", "train.clip_grad_norm=0.5", "train.ema_widths=[0.1]"]
BF16 = [*RECIPE, "train.precision=bf16"]
LONGER = [*RECIPE, "train.num_steps=8"]
WATCHED = ["train.statistics_every=6", "train.preview_every=6"]
JOBS = [
    [
        {"run": "whole", "overrides": RECIPE},
        {"run": "sharded", "overrides": RECIPE, "sharded": True},
        {"run": "whole_bf16", "overrides": BF16},
        {"run": "sharded_bf16", "overrides": [*BF16, *WATCHED], "sharded": True},
        {"run": "sharded_cut", "overrides": RECIPE, "sharded": True, "break_at": 4},
        {"run": "elastic", "overrides": RECIPE},
        {"run": "told", "overrides": [*RECIPE, "train.save_every=1000000"], "signal_at": 2},
        {"run": "cut", "overrides": RECIPE, "kill_at": 5},
    ],
    [
        {"run": "cut", "overrides": RECIPE, "hidden": True},
        {"run": "sharded_cut", "overrides": RECIPE, "sharded": True},
        {"run": "elastic", "overrides": [*RECIPE, "train.num_steps=10"]},
        {"run": "told", "overrides": RECIPE},
        {"run": "poisoned", "overrides": RECIPE, "poison": 5},
        {"run": "sharded", "overrides": LONGER},
        {"run": "whole", "overrides": LONGER, "sharded": True},
    ],
]


@pytest.fixture(scope="module")
def runs(cache_folder, tmp_path_factory):
    """A folder with the runs of `JOBS`, the second of which continues what the first left."""
    folder = tmp_path_factory.mktemp("processes")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    for number, job in enumerate(JOBS):
        told = ["-m", "tests.train.trainings", str(cache_folder), json.dumps(job)]
        done = subprocess.run(
            [*launch, *told], cwd=folder, env=environment, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
        (folder / f"{number}.log").write_text(done.stdout)
        killed = any("kill_at" in each for each in job)
        assert (done.returncode != 0) == killed, done.stdout + done.stderr
        assert ("Signal 9" in done.stderr) == killed, done.stdout + done.stderr
        if number == 0:  # by one process, in between
            with contextlib.redirect_stdout((folder / "between.log").open("w")):
                run_one(str(cache_folder), str(folder / "elastic"), LONGER)
    return folder


def state(run, step=6):
    """Every tensor that was saved with `step`, by file and name."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder)}:{k}": v for file in files for k, v in load_file(file).items()}


def losses(run):
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in read_metrics(run)]


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(("whole", "cut"), [("whole", "cut"), ("sharded", "sharded_cut")])
def test_a_run_whose_processes_are_killed_continues_bit_for_bit(runs, whole, cut):
    """kill -9 after step 5 (sharded: an exception after step 4), step 3 saved: all tensors and losses."""
    assert_same_bits(state(runs / whole), state(runs / cut))
    assert losses(runs / whole)[:3] == losses(runs / cut)


@pytest.mark.parametrize(("whole", "sharded"), [("whole", "sharded"), ("whole_bf16", "sharded_bf16")])
def test_a_sharded_run_loses_what_the_run_with_whole_weights_loses(runs, whole, sharded):
    """Gradients of two processes are one sum of two terms either way; norms are summed in another order."""
    for a, b in zip(losses(runs / whole), losses(runs / sharded), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    a, b = state(runs / whole), state(runs / sharded)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype == torch.float32
        torch.testing.assert_close(a[name], b[name], atol=2e-5, rtol=1e-3)  # Adam divides small by smaller


def test_a_checkpoint_of_a_sharded_run_is_continued_unsharded_and_by_one_process_and_back(
    runs, tiny_config, tmp_path
):
    rows = [losses(runs / run) for run in ("whole", "sharded")]
    assert [row[0] for row in rows[0]] == [2, 4, 6, 8]
    for a, b in zip(*rows, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    shutil.copytree(runs / "whole", tmp_path / "alone")
    train(tiny_config("alone", *RECIPE, "train.num_steps=10"))
    assert find_checkpoint(str(tmp_path / "alone")).step == 10


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "asks for FSDP 1; only FSDP2 is supported: set fsdp_version: 2"),
        ({"FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "to offload weights .* not supported"),
    ],
)
def test_a_launcher_that_asks_for_another_sharding_is_told_before_anything_is_imported(
    monkeypatch, variables, words
):
    for name in ("FSDP_VERSION", "FSDP_OFFLOAD_PARAMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", runtime.SHARDING: "true", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        runtime.check_launcher()


def test_the_checkpoint_is_chosen_by_the_main_process_for_all(runs):
    """`cut` was continued while the other process saw no checkpoint at all, as on a slow shared disk."""
    told = (runs / "1.log").read_text()
    assert re.search(r"(?m)^cut: .* steps 3 to 6, .* 2 process", told)


def test_both_processes_end_together_and_name_the_sample_that_was_not_finite(runs, cache):
    batch = TrainingStream(cache, 0, 8, True, 0.1, 10).batch(2, range(8))
    for rank in (0, 1):  # position 5 of 8 is the second process's
        told = (runs / f"poisoned.{rank}.error").read_text()
        which = f"at step 3: image {batch.ids[5]} at t = {batch.u[5]:.4g} on process 1. The weights are"
        assert which in told
    assert not step_folders(runs / "poisoned")


def test_a_signal_to_one_process_ends_all_with_one_saved_step_and_the_run_continues_bit_for_bit(runs):
    """Sent after step 2, told to the others with step 3, read after step 4."""
    for rank in (0, 1):
        assert (runs / f"told.{rank}.error").read_text().startswith("stopped after step 4, which is saved")
    assert re.search(r"(?m)^told: .* steps 4 to 6", (runs / "1.log").read_text())
    assert_same_bits(state(runs / "cut"), state(runs / "told"))
    assert losses(runs / "cut") == losses(runs / "told")


def test_a_run_by_two_processes_then_one_then_two_again_is_the_run_of_one(runs, cache_folder, tmp_path):
    """Up to float rounding, since two processes sum gradients in another order; both changes are said."""
    for steps in (6, 8, 10):
        run_one(str(cache_folder), str(tmp_path / "alone"), [*RECIPE, f"train.num_steps={steps}"])
    alone, elastic = losses(tmp_path / "alone"), losses(runs / "elastic")
    assert [row[0] for row in elastic] == [2, 4, 6, 8, 10]
    for a, b in zip(alone, elastic, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    told = (
        "saved by {} process(es), continued by {}: the same images and noise at each step, losses equal up to"
    )
    assert told.format(2, 1) in (runs / "between.log").read_text()
    assert told.format(1, 2) in (runs / "1.log").read_text()


def test_a_sharded_run_is_previewed_and_its_blocks_are_looked_at(runs):
    assert (runs / "sharded_bf16" / "previews" / "step_0000006.png").is_file()
    assert "logit_max_01" in read_metrics(runs / "sharded_bf16")[-1]
