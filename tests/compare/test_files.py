"""The comparisons that ship: each is legal, and its header states its cost as geometry has it."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sitvit import cli
from sitvit.compare.settings import ComparisonConfig
from sitvit.config import Config, load_config
from sitvit.train.plan import plan

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "configs/compare").glob("*.yaml"))
DRY_RUN = re.compile(r"cells: (\S+) H100-hours.*\((\S+) FLOP of training, (\S+) of evaluation\), (\S+) GB")
EMBEDDED = {
    "num_latents": 10_000,
    "class_names": [str(label) for label in range(10)],
    "latent_size": 8,
    "autoencoder": {"name": "the embedded one", "latent_channels": 4},
}  # what the plan of a demo's run reads of runs/demo/latents


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A fresh one, where nothing was run: only the demo's latents are there, by their manifest."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "runs/demo/latents").mkdir(parents=True)
    (tmp_path / "runs/demo/latents/manifest.json").write_text(json.dumps(EMBEDDED))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_headers_state_what_paper_command_expected_result_and_the_cost_that_the_dry_run_says(
    path, checkout, capsys
):
    text = path.read_text()
    assert all(f"# {word}:" in text for word in ("What", "Paper", "Command", "Cost", "Expected"))
    assert f"--config configs/compare/{path.name}" in text
    cli.compare(["--config", f"configs/compare/{path.name}", "--dry-run"])
    found = DRY_RUN.search(capsys.readouterr().out)
    assert found is not None
    hours, training, evaluating, disk = (float(number.replace(",", "")) for number in found.groups())
    cost = next(line for line in text.splitlines() if line.startswith("# Cost:"))
    if path.stem.startswith("demo"):  # hours of a CPU are no matter of geometry
        stated = re.search(r" (\S+) FLOP, (\S+) GB$", cost)
        assert stated is not None
        assert float(stated[1]) == pytest.approx(training + evaluating, rel=1e-2)  # three digits
        assert float(stated[2]) == disk
    else:
        assert f" {hours:,.0f} H100-hours at 25% of bf16 peak; {disk:,.0f} GB" in cost
    assert [found.name for found in (checkout / "runs").iterdir()] == ["demo"], "a dry run made something"


@pytest.mark.parametrize("name", ["demo", "demo_ladder"])
def test_headers_of_what_was_run_expect_what_it_gave(name):
    """Of the last unguided difference: ViT-5's, and LayerScale's of the ladder."""
    text = (ROOT / f"configs/compare/{name}.yaml").read_text()
    header = re.sub(r"\n# +", " ", text.split("\nout:")[0])
    result = json.loads((ROOT / f"samples/compare_{name}/result.json").read_text())
    entries = [d for d in result["differences"] if d["second_cfg_scale"] == 1]
    digits = 2 if name == "demo" else 1
    mean, low, high = (f"{entries[-1][key]:+.{digits}f}" for key in ("mean", "low", "high"))
    assert f"{mean} ({low} to {high})" in header
    separable = {d["second"] for d in entries if d["verdict"] != "not separable"}
    assert separable == ({"vit5"} if name == "demo" else {"layer_scale"})


@pytest.mark.parametrize(
    ("name", "whole"), [("ladder", "sit_vit5_b"), ("demo_ladder", "demo_sit_vit5")], ids=str
)
def test_a_ladder_adds_one_part_a_rung_and_ends_at_vit5(name, whole, checkout):
    comparison = load_config(Path(f"configs/compare/{name}.yaml"), [], ComparisonConfig)
    runs = [comparison.run_config(arm, 0) for arm in comparison.parsed_arms()]
    rungs = [run.model_arguments() for run in runs]
    for below, above in itertools.pairwise(rungs):
        assert len([key for key in above if below[key] != above[key]]) == 1
    end = load_config(Path(f"configs/{whole}.yaml"), comparison.overrides, Config)
    assert rungs[-1] == end.model_arguments()
    assert plan(runs[-1], 1).geometry == plan(end, 1).geometry
    assert comparison.pairs() == list(itertools.pairwise(arm.name for arm in comparison.parsed_arms()))


def test_the_slurm_script_is_the_command_of_each_task(checkout):
    """With a python of its own first in PATH, as on a node: what a task would run, and that it is bash."""
    script = ROOT / "configs/slurm/compare.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    (checkout / "bin").mkdir()
    (checkout / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (checkout / "bin/python").chmod(0o755)
    (checkout / "scripts").symlink_to(ROOT / "scripts")
    environment = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", script, "--config", "configs/compare/demo_ladder.yaml", "--cell", "3", "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("train-qk_norm-seed_0: ")
    assert "#SBATCH --requeue" in script.read_text()
