"""docs/reproduction.md: its commands are understood, and its numbers are those of the geometry."""

import dataclasses
import itertools
import math
import re
import shlex
from pathlib import Path

import pytest

from sitvit import cli
from sitvit.compare.budget import budget
from sitvit.compare.cells import cells_of
from sitvit.compare.settings import ComparisonConfig
from sitvit.compare.work import find_cell, work_through
from sitvit.config import load_config
from sitvit.models.geometry import PEAKS, geometry
from sitvit.models.presets import preset
from sitvit.models.shapes import SiTShape

from .compare.test_comparison import write

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/reproduction.md").read_text()
FOUND = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [shlex.split(line) for block in FOUND for line in block.replace("\\\n", " ").strip().splitlines()]
COMPARISON = "configs/compare/imagenet_xl.yaml"
CANARIES = {"": [56.0, 33.4, 18.8, 17.1], "ViT5-": [47.7, 29.1, 17.0, 14.6]}  # at 400,000 steps, digitised


@pytest.fixture
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def training_flops(name: str) -> int:
    return geometry(SiTShape(input_size=32, in_channels=4, num_classes=1000, **preset(name))).training_flops


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_is_understood_up_to_the_files_that_it_needs(command, at_root, capsys):
    (place,) = [i for i, word in enumerate(command) if word.startswith("scripts/")]
    launcher, script, arguments = command[:place], Path(command[place]), command[place + 1 :]
    for option, value in itertools.pairwise(launcher):
        assert option != "--config_file" or Path(value).is_file()
    if "--config" in arguments:
        if "--cell" in arguments:
            at = arguments.index("--cell")
            name = arguments[at + 1]
            cli.compare([*arguments[:at], *arguments[at + 2 :], "--list"])
            assert re.search(rf"^ *\d+ \S+ +{name}$", capsys.readouterr().out, re.MULTILINE)
        else:
            cli.compare([*arguments, "--list"])
    else:
        with pytest.raises(ValueError, match=r"there is no (folder|checkpoint folder) |is no latent cache"):
            getattr(cli, script.stem)(arguments)


def test_hours_flops_days_and_disk_are_those_of_the_geometry(at_root):
    vanilla, vit5 = training_flops("SiT-XL/2"), training_flops("SiT-ViT5-XL/2")
    assert f"({vanilla / 1e9:.1f} GFLOP each)" in TEXT
    assert f"({vit5 / 1e9:.1f} GFLOP each, {100 * (vit5 / vanilla - 1):.1f} % more)" in TEXT
    cells = cells_of(load_config(Path(COMPARISON), [], ComparisonConfig))
    whole, seen = budget(cells), 7_000_000 * 256
    rows = {
        "vanilla": vanilla * seen,
        "ViT-5": vit5 * seen,
        "all evaluations": whole.evaluation_flop,
        "together": whole.training_flop + whole.evaluation_flop,
        "of that the first": (vanilla + vit5) * 400_000 * 256,
    }
    for name, flop in rows.items():
        told = re.search(rf"^\| {name}.* \| (\S+) \| (\S+) \| (\S+) \|$", TEXT, re.MULTILINE)
        hours = [f"{flop / (0.25 * PEAKS[gpu]) / 3600:,.0f}" for gpu in ("H100", "A100")]
        assert told.groups() == (f"{flop:.2e}".replace("e+", "e"), *hours)
    days = [rows["together"] / (0.25 * PEAKS[gpu]) / 86400 / 8 for gpu in ("H100", "A100")]
    assert f"Eight H100s need {days[0]:.1f} days, eight A100s {days[1]:.1f}." in TEXT
    evaluations = sum(cell.kind == "evaluate" for cell in cells)
    assert f"({evaluations} of 50,000 images)" in TEXT
    kept = round(whole.disk_bytes / 10.8e9)
    assert f"{whole.disk_bytes / 1e9:,.0f} GB of checkpoints ({kept} of 10.8 GB" in TEXT
    latents = 1_281_167 * 2 * 8 * 32 * 32 * 2  # both mirror images, mean and log-variance, float16
    assert f"{latents / 1e9:.0f} GB of latents" in TEXT
    fast = budget(cells_of(load_config(Path("configs/compare/imagenet_fast.yaml"), [], ComparisonConfig)))
    assert f"in {fast.gpu_hours:,.0f} H100-hours" in TEXT


@pytest.mark.parametrize(("family", "column"), [("", 0), ("ViT5-", 2)])
def test_estimates_are_the_digitised_values_at_equal_training_flops(family, column):
    values = CANARIES[family]
    most = training_flops(f"SiT-{family}XL/2")
    steps = [400_000 * training_flops(f"SiT-{family}{size}/2") / most for size in ("S", "B", "L", "XL")]
    if not family:
        assert all(f"{step:,.0f}" in TEXT for step in steps[:3])
    for step, above in ((50_000, 2.0), (100_000, 1.5), (200_000, 1.5)):
        k = next(i for i in range(3) if steps[i] <= step <= steps[i + 1])
        slope = math.log(values[k + 1] / values[k]) / math.log(steps[k + 1] / steps[k])
        estimate = values[k] * (step / steps[k]) ** slope
        told = cells_of_row(f"{step:,}")[column : column + 2]
        assert told == [f"{estimate:.1f}", f"{0.75 * estimate:.0f} to {above * estimate:.0f}"]
    assert cells_of_row("400,000")[column] == f"{values[-1]}"


@pytest.mark.parametrize("steps", ["400,000", "800,000", "7,000,000", "7,000,000, cfg 1.5"])
def test_the_bands_of_published_values_are_three_per_cent_below_to_six_above(steps):
    row = cells_of_row(steps)
    digits = 2 if "cfg" in steps else 1
    for value, band in ((row[0], row[1]), (row[2], row[3])):
        if value != "-":
            assert band == f"{0.97 * float(value):.{digits}f} to {1.06 * float(value):.{digits}f}"


def test_the_canaries_are_the_references_that_the_comparison_draws(at_root):
    """What is drawn as published in the report is what the document says."""
    comparison = load_config(Path(COMPARISON), [], ComparisonConfig)
    for told in comparison.parsed_references():
        steps = f"{told.step:,}" + (f", cfg {told.cfg_scale:g}" if told.cfg_scale != 1 else "")
        assert float(cells_of_row(steps)[0 if told.arm == "vanilla" else 2]) == told.value


def test_what_it_quotes_of_troubleshooting_is_there():
    troubleshooting = (ROOT / "docs/troubleshooting.md").read_text()
    section = TEXT.split("## When a canary is off")[1].split("##")[0]
    quoted = re.findall(r'"([^"]+)"', section.replace("\n   ", " "))
    assert len(quoted) >= 4
    for words in quoted:
        assert words in troubleshooting, words


@pytest.mark.slow
def test_a_comparison_goes_on_to_more_steps_and_keeps_what_was_measured(cache_folder, tmp_path):
    """Step 5 of the way: the trainings of step 4 go on, its evaluations are not done again."""
    path = write(tmp_path, cache_folder)
    whole = load_config(path, ["seeds=[0]", "cfg_scales=[1.0]"], ComparisonConfig)
    begun = dataclasses.replace(whole, steps=[2])
    assert work_through([cell for cell in cells_of(begun) if cell.kind != "grid"]) == []
    names = ["evaluate-vanilla-seed_0-step_2-cfg_1", "evaluate-vit5-seed_0-step_2-cfg_1"]
    early = [find_cell(cells_of(whole), name) for name in names]
    assert all(cell.is_done() for cell in early)
    before = [Path(cell.evaluation.out).read_bytes() for cell in early]
    assert not find_cell(cells_of(whole), "train-vit5-seed_0").is_done()
    assert work_through(cells_of(whole)) == []
    assert before == [Path(cell.evaluation.out).read_bytes() for cell in early]
    assert all(cell.is_done() for cell in cells_of(whole))


def cells_of_row(steps: str) -> list[str]:
    """Cells of the canaries' table behind the steps."""
    (row,) = re.findall(rf"^\| {re.escape(steps)} \| (.*) \|$", TEXT, re.MULTILINE)
    return row.split(" | ")
