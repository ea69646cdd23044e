"""What is told before a run begins: exact, at once, and what each experiment file's header says."""

import re
import subprocess
import sys

import pytest

from sitvit import cli
from sitvit.config import Config, dump_config, load_config
from sitvit.models.sit import SiT
from sitvit.train.checkpoint import find_checkpoint
from sitvit.train.plan import PEAK_FLOPS, UTILISATION, plan

from ..conftest import ROOT, run_script

EXPERIMENTS = sorted((ROOT / "configs").glob("*_[sblx]*.yaml"))
IMAGENET = [path for path in EXPERIMENTS if "demo" not in path.name]


def header(path):
    """The comment before the first key, by its labels."""
    lines = [line[2:] for line in path.read_text("utf-8").splitlines() if line.startswith("# ")]
    parts = re.split(r"^(What|Paper|Command|Cost|Expected):", "\n".join(lines), flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return int(found[1].replace(",", ""))


def test_there_is_an_experiment_for_each_backbone_and_size():
    names = {f"{backbone}_{size}" for backbone in ("sit", "sit_vit5") for size in ("s", "b", "l", "xl")}
    assert names | {"dit_xl", "sit_vit5_xl_fast"} <= {path.stem for path in IMAGENET}


@pytest.mark.parametrize("path", IMAGENET, ids=lambda path: path.stem)
def test_an_experiments_header_says_what_its_geometry_says(path):
    told, config = header(path), load_config(path, [], Config)
    assert list(told) == ["What", "Paper", "Command", "Cost", "Expected"]
    assert f"accelerate launch scripts/train_sit.py --config configs/{path.name}" in told["Command"]
    planned = plan(config, 8)
    assert number(r"([\d,]+) parameters", told["What"]) == planned.geometry.parameters.total
    assert number(r"([\d,]+) H100-hours", told["Cost"]) == round(planned.gpu_hours)
    assert number(r"reaches (\d+) %", told["Cost"]) == 100 * UTILISATION
    assert number(r"peak of (\d+) TFLOP/s", told["Cost"]) * 1e12 == PEAK_FLOPS
    assert number(r"\(([\d,]+) steps", told["Cost"]) == config.train.num_steps
    assert number(r"steps of ([\d,]+) images", told["Cost"]) == config.train.batch_size
    assert config.run == f"runs/{path.stem}"


@pytest.mark.parametrize("path", IMAGENET, ids=lambda path: path.stem)
def test_no_number_of_a_base_is_written_again_in_what_is_based_on_it(path):
    lines = [line for line in path.read_text("utf-8").splitlines() if line and line[0] != "#"]
    assert lines[0].startswith("base: ")
    base = (path.parent / lines[0].removeprefix("base: ")).read_text("utf-8")
    settings = [line.strip() for line in lines[1:] if re.search(r": \S", line)]
    assert not [line for line in settings if re.search(rf"^ *{re.escape(line)}$", base, re.MULTILINE)]


def test_the_two_backbones_of_a_size_differ_in_nothing_but_the_network():
    for size in ("s", "b", "l", "xl"):
        pair = [
            load_config(ROOT / "configs" / f"{name}_{size}.yaml", [], Config) for name in ("sit", "sit_vit5")
        ]
        assert pair[0].train == pair[1].train
        assert pair[0].data == pair[1].data


def test_a_plan_of_hand_computed_numbers(tmp_path):
    """SiT-XL/2: 712 GFLOP an image; 7M steps of 256 are 1,398.7 epochs; the disk holds 2 + 17 + 1."""
    planned = plan(load_config(ROOT / "configs" / "sit_xl.yaml", [], Config), 8)
    assert planned.geometry.training_flops == pytest.approx(712e9, rel=0.002)
    assert planned.images_seen == 1_792_000_000
    assert planned.num_checkpoints == 2 + 17 + 1
    assert planned.gpu_hours == pytest.approx(1.792e9 * 712e9 / (0.25 * 989e12 * 3600), rel=0.002)
    assert "1,398.7 epochs" in planned.text()
    assert "256 = 8 process(es) x 32 images" in planned.text()


def test_the_plan_of_a_run_is_what_the_run_is(trained_run):
    checkpoint = find_checkpoint(str(trained_run))
    planned = plan(load_config(checkpoint.folder / "config.yaml", [], Config), 1)
    network = checkpoint.load_network("model")
    assert isinstance(network, SiT)
    assert planned.geometry.parameters.total == sum(p.numel() for p in network.parameters())
    assert (planned.latents.num_images, planned.latents.num_classes) == (64, 10)
    weights = sum(path.stat().st_size for path in checkpoint.folder.rglob("*.safetensors"))
    assert planned.checkpoint_bytes == pytest.approx(weights, rel=0.1)  # the rest are the files' headers
    assert re.search(r"a checkpoint +\d+\.\d MB", planned.text())  # a small network has no 0.0 GB


def test_a_dry_run_of_any_experiment_takes_under_two_seconds_makes_nothing_and_imports_no_heavy_package(
    tmp_path,
):
    program = f"""
import sys, time
from sitvit import cli
for file in {[str(path) for path in EXPERIMENTS]}:
    begin = time.process_time()  # of the first: the imports, too
    cli.train_sit(["--config", file, "--dry-run", "run=out"])
    assert time.process_time() - begin < 2, file
cli.train_sit(["--config", file, "--print-config", "run=out"])
heavy = {{"torch", "diffusers", "accelerate", "matplotlib", "numpy", "PIL"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "1,456 H100-hours" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_printed_configuration_is_an_experiment_file_of_the_same_run(tmp_path):
    path = ROOT / "configs" / "sit_vit5_xl_fast.yaml"
    printed = run_script("train_sit", "--config", path, "--print-config", "run=001", cwd=tmp_path)
    (tmp_path / "again.yaml").write_text(printed.stdout)
    again = load_config(tmp_path / "again.yaml", [], Config)
    assert dump_config(again) == dump_config(load_config(path, ["run=001"], Config))
    assert again.run == "001"


def test_overrides_stand_before_and_after_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = str(ROOT / "configs" / "sit_s.yaml")
    cli.train_sit(["run=one", "--config", file, "train.seed=1", "--print-config", "train.lr=3e-4"])
    told = capsys.readouterr().out
    assert all(line in told for line in ("run: one", "seed: 1", "lr: 0.0003"))


def test_a_batch_that_the_processes_cannot_share_is_told_with_all_other_mistakes(tmp_path, monkeypatch):
    path = ROOT / "configs" / "sit_s.yaml"
    with pytest.raises(ValueError, match="cannot be split over 7 processes") as caught:
        load_config(path, ["train.lr=-1", "train.num_step=3", "train.seed=x"], Config, num_processes=7)
    for words in (
        "the nearest that can are 252 and 259",
        "train.lr must be above 0",
        "train.num_steps?",
        "int",
    ):
        assert words in str(caught.value)


def test_a_batch_that_splits_over_processes_but_not_into_their_parts_is_told():
    path, overrides = ROOT / "configs" / "sit_s.yaml", ["train.micro_batch_size=64"]
    assert load_config(path, overrides, Config, num_processes=4).train.micro_batch_size == 64
    with pytest.raises(
        ValueError, match=r"over 8 processes in parts of .* 64; the smallest that can is 512$"
    ):
        load_config(path, overrides, Config, num_processes=8)


def test_the_memory_of_a_plan_follows_averages_checkpointing_and_sharding(monkeypatch):
    def held(*overrides):
        return plan(load_config(ROOT / "configs" / "sit_vit5_xl.yaml", list(overrides), Config), 8)

    plain, lean = held().memory, held("train.gradient_checkpointing=true").memory
    assert plain == held("train.micro_batch_size=32").memory  # 256 images over 8 processes
    assert lean.activations < 0.15 * plain.activations  # 28 inputs of 4 D bytes, and one block
    assert held("train.ema_decays=[0.99,0.999]", "train.ema_widths=[0.1]").memory.ema == 3 * plain.ema
    assert "trained at most 674,792,656 (all but train.freeze" in held("train.freeze=[blocks.*]").text()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    cut = held().memory
    assert (8 * cut.weights, 8 * cut.ema) == (plain.weights, plain.ema)
    assert 0 <= 8 * (cut.gradients + cut.adamw) - plain.gradients - plain.adamw <= 14
    assert cut.activations == plain.activations
