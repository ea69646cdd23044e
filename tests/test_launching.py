"""Many processes: launchers' files, the SLURM script with a stand-in for SLURM, copies that work alone."""

import os
import subprocess
import sys
import time

import pytest

from sitvit import cli, runtime

from .conftest import ROOT

LAUNCHERS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_accelerate_reads_each_launcher_file_and_leaves_the_precision_to_the_experiment(path):
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(str(path))
    gpus = {"one_gpu": (1, 1), "eight_gpus": (1, 8), "multi_node": (2, 16), "fsdp2": (1, 8)}
    assert (read.num_machines, read.num_processes) == gpus[path.stem]
    assert read.mixed_precision == "no"
    assert path.read_text("utf-8").startswith("# ")


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_copies_that_would_each_work_alone_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "8")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=f"8 copies .*{name}.* each would do the whole"):
        runtime.check_launcher()
    monkeypatch.setenv("WORLD_SIZE", "64")  # a task a machine, eight processes each
    runtime.check_launcher()


@pytest.mark.parametrize("verb", [cli.sample, cli.evaluate])
def test_copies_that_would_each_make_or_measure_all_images_are_refused(monkeypatch, verb):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="8 copies of this command"):
        verb(["--checkpoint", "nothing"])


def test_a_launcher_that_starts_one_of_several_processes_is_noticed(tmp_path):
    """`accelerate launch --cpu --num_processes 2` runs one process and says nothing."""
    told = (
        "accelerate.commands.launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no "
        f"--dynamo_backend no {ROOT}/scripts/train_sit.py --config {ROOT}/configs/demo_sit.yaml --dry-run"
    )
    hidden = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [sys.executable, "-m", *told.split()],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "asked for several processes and started one" in done.stderr


@pytest.mark.parametrize(
    ("left", "status", "requeued"), [(601, 1, True), (601, 0, False), (7200, 1, False), (300, 1, False)],
)  # fmt: skip
def test_a_slurm_job_is_queued_again_when_its_time_was_up_and_only_then(tmp_path, left, status, requeued):
    programs = {
        "srun": f'echo "$@" > {tmp_path}/srun; sleep 2; exit {status}',
        "scontrol": f'if [ "$1" = show ]; then echo node1; else echo "$@" > {tmp_path}/requeue; fi',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_END_TIME": str(int(time.time()) + left),
        "SLURM_NNODES": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]",
    }  # fmt: skip
    script = ROOT / "configs" / "slurm" / "train.sbatch"
    done = subprocess.run(["bash", str(script), "--config", "x.yaml"], env=environment, check=False)
    assert done.returncode == status
    started = "--config x.yaml --max-time" in (tmp_path / "srun").read_text()
    assert started == (left > 600)  # ten minutes are for saving
    assert (tmp_path / "requeue").exists() == requeued
