"""What a comparison concludes from its numbers: ladders that add up, loss in windows, cost as measured."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sitvit.compare.cells import cells_of
from sitvit.compare.cost import seconds_a_step
from sitvit.compare.losses import NUM_WINDOWS, by_step, window_means
from sitvit.compare.report import write_comparison
from sitvit.compare.result import best_scale, collect, differences, ladder
from sitvit.compare.settings import ComparisonConfig

ARMS = ("a", "b", "c", "d")


def comparison(against: str) -> ComparisonConfig:
    arms = [f"{name} configs/demo_sit.yaml" for name in ARMS]
    return ComparisonConfig(out="nowhere", arms=arms, against=against, seeds=[0, 1, 2], steps=[10, 20])


def value(arm: str, seed: int, step: int, distance: float) -> dict:
    metrics = {"FID": distance, "FID_std": 0.1}
    return {"arm": arm, "seed": seed, "step": step, "cfg_scale": 1.0, "metrics": metrics}


def test_the_rungs_of_a_ladder_add_up_on_the_seeds_that_every_arm_has():
    """The last arm lacks a seed: the rungs before it are told without that seed too."""
    draw = np.random.default_rng(0)
    values = [value(arm, seed, 20, draw.normal(20, 3)) for arm in ARMS for seed in (0, 1, 2)]
    values = [v for v in values if (v["arm"], v["seed"]) != ("d", 2)]
    found = ladder(comparison("previous"), values, "FID")
    assert found["seeds"] == [0, 1]
    assert [(rung["first"], rung["second"]) for rung in found["rungs"]] == [
        ("a", "b"),
        ("b", "c"),
        ("c", "d"),
    ]
    total = sum(rung["mean"] for rung in found["rungs"])
    assert total == pytest.approx(found["whole"]["mean"], abs=1e-12)  # float64 sums of values of 20
    assert found["means"]["a"] + total == pytest.approx(found["means"]["d"], abs=1e-12)


def test_a_ladder_stands_on_the_last_step_that_every_arm_has_reached():
    values = [value(arm, 0, 10, 30.0) for arm in ARMS] + [value("a", 0, 20, 20.0)]
    assert ladder(comparison("previous"), values, "FID")["step"] == 10
    assert ladder(comparison("previous"), values[-1:], "FID") is None


def test_each_arm_stands_at_its_own_best_guidance_with_the_spread_of_both_sides():
    """One seed; the best guidance is 2 of a and 3 of b; sigma 0.3 and 0.4 make 0.5 of their difference."""
    distances = {"a": {1: 20.0, 2: 10.0, 3: 12.0}, "b": {1: 21.0, 2: 9.0, 3: 8.0}}
    sigma = {"a": 0.3, "b": 0.4}
    values = [
        {**value(arm, 0, 20, distance), "cfg_scale": float(scale)}
        for arm in distances
        for scale, distance in distances[arm].items()
    ]
    for each in values:
        each["metrics"]["FID_std"] = sigma[each["arm"]]
    best = {arm: best_scale(values, arm, 20, "FID") for arm in distances}
    assert best == {"a": 2.0, "b": 3.0}
    two = ComparisonConfig(out="nowhere", arms=comparison("first").arms[:2], seeds=[0], steps=[10, 20])
    unguided, guided = differences(two, values, best, "FID")
    assert (unguided["mean"], unguided["first_cfg_scale"], unguided["second_cfg_scale"]) == (1.0, 1.0, 1.0)
    assert (guided["mean"], guided["first_cfg_scale"], guided["second_cfg_scale"]) == (-2.0, 2.0, 3.0)
    for found in (unguided, guided):
        assert found["high"] - found["mean"] == pytest.approx(1.959964 * 0.5, rel=1e-5)  # the normal quantile


@pytest.mark.parametrize(
    ("against", "expected"), [("first", "aaaa"), ("previous", "aaaa"), ("pairs", "aacc")]
)
def test_cost_is_held_against_the_first_arm_or_that_of_the_pair(against, expected):
    assert [comparison(against).cost_against(arm) for arm in ARMS] == list(expected)


def test_runs_that_log_at_other_steps_have_curves_at_the_same_ones():
    """A loss that falls linearly has, as the mean of a window, its value at the window's middle."""
    curves = []
    for every in (10, 50):
        rows = [{"step": step, "loss": 1 - step / 30_000} for step in range(every, 30_001, every)]
        curves.append(window_means(rows, 30_000))
    assert curves[0][0] == curves[1][0] == list(range(1000, 30_001, 1000))
    assert len(curves[0][0]) == NUM_WINDOWS
    for every, (steps, losses) in zip((10, 50), curves, strict=True):
        assert losses == pytest.approx([1 - (step - 500 + every / 2) / 30_000 for step in steps])


def test_the_window_in_which_a_run_stands_is_no_mean_yet():
    rows = [{"step": step, "loss": 1.0} for step in range(10, 951, 10)]
    assert window_means(rows, 30_000) == ([], [])
    assert window_means(rows, 900)[0] == list(range(30, 901, 30))


def test_losses_are_paired_by_seed():
    curves = [
        {"seed": 3, "steps": [10, 20], "losses": [1.0, 0.5]},
        {"seed": 4, "steps": [10], "losses": [2.0]},
    ]
    assert by_step(curves) == {10: {3: 1.0, 4: 2.0}, 20: {3: 0.5}}


def test_a_pause_of_a_run_does_not_change_its_time_of_a_step():
    rows = [{"step": step, "seconds": 0.2 * step + (3600 if step > 50 else 0)} for step in range(10, 101, 10)]
    assert seconds_a_step(rows) == pytest.approx(0.2)
    assert seconds_a_step(rows[:1]) is None


def test_step_times_and_their_change_are_those_of_the_logs(finished):
    result = collect(finished, cells_of(finished))
    vanilla, vit5 = result["arms"]
    for seed, time in vit5["seconds_a_step_of_seed"].items():
        assert time > 0
        ratio = time / vanilla["seconds_a_step_of_seed"][seed] - 1
        measured = vit5["changes"]["seconds_a_step"]
        assert measured["lowest"] <= ratio <= measured["highest"]
    assert vanilla["changes"]["seconds_a_step"] == {"mean": 0.0, "lowest": 0.0, "highest": 0.0}


def test_figures_of_an_analysis_beside_the_comparison_are_in_its_page(finished):
    picture = Path(finished.out) / "analysis" / "attention_distance.png"
    picture.parent.mkdir()
    Image.new("RGB", (8, 8)).save(picture)
    networks = {arm: {"weights": "ema", "step": 4} for arm in ("vanilla", "vit5")}
    picture.with_name("analysis.json").write_text(
        json.dumps({"networks": networks, "command": "python scripts/analyze.py"})
    )
    try:
        page = write_comparison(finished, cells_of(finished))[0].read_text()
    finally:
        shutil.rmtree(picture.parent)
    assert "Inside the networks" in page
    assert "attention distance" in page
    assert "vit5: ema at step 4" in page
    assert "Inside the networks" not in write_comparison(finished, cells_of(finished))[0].read_text()
