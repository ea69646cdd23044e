"""The scripts as a person calls them: the whole chain, two processes, and what a mistake looks like."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sitvit.data.demo import embedded_fashion
from sitvit.train.checkpoint import find_checkpoint
from sitvit.train.metrics import read_metrics

from .conftest import ROOT, TINY, run_script

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0", "--standalone")


@pytest.fixture
def photos(tmp_path):
    """64 embedded images as a folder of PNG and JPEG files, a class a folder, of another size."""
    source = embedded_fashion()
    for index in range(64):
        label = source.class_names[source.labels[index]].replace("/", "-")
        path = tmp_path / "photos" / label / f"{index}.{'jpg' if index % 2 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(source.read(index)).resize((48, 40)).save(path)
    return tmp_path / "photos"


def succeeds(script, *arguments, **options):
    done = run_script(script, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_ones_own_png_and_jpeg_images_go_through_the_whole_chain(photos, tmp_path):
    succeeds("encode_latents", "--images", photos, "--out", "latents", "--flip", cwd=tmp_path)
    (tmp_path / "c.yaml").write_text(TINY.format(run="runs/mine", name="SiT-S/2", latents="latents"))
    succeeds("train_sit", "--config", "c.yaml", cwd=tmp_path)
    done = succeeds(
        "sample", "--num-images", 12, "--labels", "Bag", "T-shirt-top", "--cfg-scale", 2, "--num-steps", 2,
        "--out", "made", cwd=tmp_path,
    )  # fmt: skip
    assert "made/grid.png" in done.stdout
    done = succeeds("evaluate", "--samples", "made", "--features", "fashion-classifier", cwd=tmp_path)
    assert re.search(r"FD-fashion \d+\.\d{4}", done.stdout)
    assert "few images" in done.stdout
    record = json.loads((tmp_path / "made" / "samples.json").read_text())
    names = [record["class_names"][label] for label in record["image_labels"]]
    assert names == ["Bag", "T-shirt-top"] * 6
    assert len(list((tmp_path / "made" / "images").iterdir())) == 12
    succeeds("sample", "--num-images", 12, "--num-steps", 2, cwd=tmp_path)
    done = succeeds("report", "runs/mine", "--out", "report.html", cwd=tmp_path)
    assert "look at report.html" in done.stdout


@pytest.fixture
def tiny_file(cache_folder, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(TINY.format(run="run", name="SiT-ViT5-S/2", latents=cache_folder))
    return path


def test_two_gloo_processes_train_what_one_trains_and_sample_the_same_bytes(tiny_file, tmp_path):
    succeeds("train_sit", "--config", tiny_file, "run=one", cwd=tmp_path)
    done = succeeds("train_sit", "--config", tiny_file, "run=two", cwd=tmp_path, launcher=TORCHRUN)
    assert "2 process(es)" in done.stdout
    one, two = (find_checkpoint(str(tmp_path / run)) for run in ("one", "two"))
    assert (one.record["num_processes"], two.record["num_processes"]) == (1, 2)
    for name in ("model", "ema_0.9"):
        weights = [load_file(c.folder / name / "diffusion_pytorch_model.safetensors") for c in (one, two)]
        for key in weights[0]:
            # gradients are summed in another order; Adam divides small ones by smaller
            torch.testing.assert_close(weights[0][key], weights[1][key], atol=2e-4, rtol=1e-3)
    rows = [read_metrics(tmp_path / run) for run in ("one", "two")]
    assert [(row["step"], row["lr"]) for row in rows[0]] == [(row["step"], row["lr"]) for row in rows[1]]
    losses = [[row["loss"] for row in each] for each in rows]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    settings = ["--checkpoint", "one", "--num-images", 10, "--batch-size", 4, "--num-steps", 2]
    succeeds("sample", *settings, "--out", "by_one", cwd=tmp_path)
    succeeds("sample", *settings, "--out", "by_two", cwd=tmp_path, launcher=TORCHRUN)
    pictures = [
        {path.name: path.read_bytes() for path in (tmp_path / folder / "images").iterdir()}
        for folder in ("by_one", "by_two")
    ]
    assert len(pictures[0]) == 10
    assert pictures[0] == pictures[1]


def test_a_batch_that_two_processes_cannot_share_is_refused_with_the_numbers(tiny_file, tmp_path):
    done = run_script(
        "train_sit", "--config", tiny_file, "train.batch_size=7", cwd=tmp_path, launcher=TORCHRUN
    )
    assert done.returncode != 0
    assert "batch_size 7 cannot be split over 2 processes" in done.stderr


def test_a_process_that_dies_ends_all_of_them_within_a_minute_in_one_sentence(tiny_file, tmp_path):
    """The two are started without a launcher, which would end the other one itself."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "scripts" / "train_sit.py"), "--config", str(tiny_file)]
    overrides = ["train.num_steps=100000", "train.save_every=20"]
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    main, other = (
        subprocess.Popen(
            [*command, *overrides], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **job, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/step_*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    other.kill()
    died = time.monotonic()
    _, errors = main.communicate(timeout=90)
    other.communicate()
    assert time.monotonic() - died < 60
    assert main.returncode == 2
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert said[0].startswith(
        "error: another process of this job has ended, so this one ends; the same command"
    )
    assert "Traceback" not in errors
    assert find_checkpoint(str(tmp_path / "run")).step >= 20


@pytest.mark.parametrize(
    "kill", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)  # a signal that may be heeded is cheaper to test in tests/train/
def test_a_process_that_is_killed_continues_bit_for_bit(tiny_file, tmp_path, kill):
    overrides = ["train.num_steps=400", "train.save_every=20"]
    succeeds("train_sit", "--config", tiny_file, "run=whole", *overrides, cwd=tmp_path)
    command = [sys.executable, str(ROOT / "scripts" / "train_sit.py"), "--config", str(tiny_file)]
    process = subprocess.Popen([*command, "run=cut", *overrides], cwd=tmp_path, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("cut/checkpoints/step_*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(kill)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (-9 if kill == signal.SIGKILL else 75)
    assert (b"which is saved" in errors) == (kill == signal.SIGTERM)
    assert find_checkpoint(str(tmp_path / "cut")).step < 400
    succeeds("train_sit", "--config", tiny_file, "run=cut", *overrides, cwd=tmp_path)
    whole, cut = (find_checkpoint(str(tmp_path / run)) for run in ("whole", "cut"))
    assert whole.step == cut.step == 400
    for file in whole.record["files"]:
        if file.endswith(".safetensors"):
            assert whole.record["files"][file] == cut.record["files"][file]


def empty_class(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)


def corrupt(tmp_path):
    empty_class(tmp_path)
    Image.new("RGB", (32, 32)).save(tmp_path / "photos" / "cat" / "good.png")
    (tmp_path / "photos" / "cat" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nrubbish")


def loose(tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "photos" / "a.png")


MISTAKES = {
    "missing folder": (None, ["encode_latents", "--images", "photos"], "there is no folder photos"),
    "empty folder": (empty_class, ["encode_latents", "--images", "photos"], "photos has no images"),
    "no classes": (loose, ["encode_latents", "--images", "photos"], "no class folders"),
    "corrupt image": (corrupt, ["encode_latents", "--images", "photos"], "photos/cat/bad.png cannot"),
    "image size": (None, ["encode_latents", "--image-size", "30"], "the nearest are 28 and 32"),
    "no config": (None, ["train_sit", "--config", "x.yaml"], "no configuration file x.yaml"),
    "misspelt key": (
        None, ["train_sit", "--config", ROOT / "configs/demo_sit.yaml", "trian.lr=1"],
        "did you mean train.lr?",
    ),
    "wrong type": (
        None, ["train_sit", "--config", ROOT / "configs/demo_sit.yaml", "train.lr=fast"],
        "train.lr must be of type float",
    ),
    "no latents": (
        None, ["train_sit", "--config", ROOT / "configs/demo_sit.yaml"],
        "runs/demo/latents is no latent cache",
    ),
    "no checkpoint": (None, ["sample", "--checkpoint", "nowhere"], "no checkpoint folder nowhere"),
    "no run at all": (None, ["sample"], "no checkpoint under runs/"),
    "no samples": (None, ["evaluate", "--samples", "nowhere"], "there is no folder nowhere"),
    "no report": (None, ["report", "nowhere"], "no checkpoint folder nowhere"),
    "unknown option": (None, ["sample", "--cfg", "2"], "unrecognized arguments: --cfg 2"),
    "no source": (None, ["fetch_data", "fashion-mnist", "--source", "nowhere"], "nowhere has no"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_a_non_zero_status(tmp_path, mistake):
    prepare, (script, *arguments), words = MISTAKES[mistake]
    if prepare:
        prepare(tmp_path)
    done = run_script(script, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr


def test_a_label_out_of_range_is_refused_in_one_sentence(trained_run, tmp_path):
    done = run_script("sample", "--checkpoint", trained_run, "--labels", "3", "10", cwd=tmp_path)
    assert done.returncode == 2
    assert "label 10 is out of range: this model has 10 classes, labels 0 to 9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_small_networks_are_trained_by_their_scripts(photos, tmp_path):
    common = f"images: {photos}\nheld_out: {photos}/.\nnum_steps: 3\nbatch_size: 4\n"
    (tmp_path / "a.yaml").write_text(common + "out: a\nblock_out_channels: [8, 8, 8]\n")
    done = succeeds("train_autoencoder", "--config", "a.yaml", cwd=tmp_path)
    assert re.search(r"a: \d+\.\d\d dB on 64 held-out images", done.stdout)
    succeeds("encode_latents", "--images", photos, "--autoencoder", "a", "--out", "l", cwd=tmp_path)
    manifest = json.loads((tmp_path / "l" / "manifest.json").read_text())
    moments = np.concatenate(
        [load_file(path)["moments"].numpy() for path in (tmp_path / "l").glob("shard_*")]
    ).astype(np.float64)
    mean, log_variance = np.split(moments, 2, axis=1)
    variance = mean.var(axis=(0, 2, 3)) + np.exp(log_variance).mean(axis=(0, 2, 3))
    # float16 moments, and the spread was measured on the same images in float32
    scale = manifest["autoencoder"]["scaling_factor"]
    assert np.sqrt(variance) * scale == pytest.approx(np.ones(4), abs=0.01)
    (tmp_path / "c.yaml").write_text(common + "out: c\n")
    done = succeeds("train_classifier", "--config", "c.yaml", cwd=tmp_path)
    assert re.search(r"c: \d+\.\d\d % right on 64 held-out images", done.stdout)
    done = run_script("train_classifier", "--config", "c.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "c is there already" in done.stderr
