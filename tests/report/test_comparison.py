"""The figures of a comparison show the numbers they are given, at their places."""

from types import SimpleNamespace

import numpy as np
import pytest

from sitvit.report.comparison import difference_figure, distance_figure, waterfall_figure
from sitvit.report.figures import pair_grid

RUNG = {"low": -1.0, "high": 3.0, "verdict": "not separable"}
RESULT = {
    "metric": "FID",
    "arms": [
        {"name": "vanilla", "batch_size": 4, "training_flops": 100},
        {"name": "vit5", "batch_size": 4, "training_flops": 102},
    ],
    "values": [
        {"arm": arm, "step": step, "cfg_scale": 1, "training_flop": step * 4.0, "metrics": {"FID": value}}
        for arm, step, value in [
            ("vanilla", 10, 9.0),
            ("vanilla", 10, 7.0),
            ("vanilla", 20, 6.0),
            ("vit5", 10, 5.0),
        ]
    ],
    "references": [
        {"arm": "vit5", "step": 20, "cfg_scale": 1.0, "value": 1.84, "source": "someone"},
        {"arm": "vanilla", "step": 20, "cfg_scale": 1.5, "value": 2.06, "source": "someone"},
    ],
    "ladder": {
        "step": 20,
        "seeds": [0, 1],
        "means": {"a": 20.0, "b": 21.0, "c": 17.0},
        "rungs": [
            {"first": "a", "second": "b", "mean": 1.0, **RUNG},
            {"first": "b", "second": "c", "mean": -4.0, "low": -5.0, "high": -3.0, "verdict": "lower"},
        ],
    },
}


def test_a_waterfall_has_a_bar_from_each_level_to_the_next():
    (axes,) = waterfall_figure(RESULT).axes
    bars = {round(bar.get_y() + bar.get_height() / 2): bar for bar in axes.patches if bar.get_width()}
    spans = {row: (bar.get_x(), bar.get_x() + bar.get_width()) for row, bar in bars.items()}
    assert spans == {0: (0, 20.0), 3: (0, 17.0), 1: (20.0, 21.0), 2: (21.0, 17.0)}
    assert bars[1].get_facecolor() != bars[2].get_facecolor(), "what is not separable looks like what is"
    low, high = axes.get_xlim()
    assert low < 16
    assert high > 23, "an interval's end is outside"


def test_published_values_are_stars_marked_as_such_and_hollow_where_guided():
    (axes,) = distance_figure(RESULT, "step").axes
    stars = [line for line in axes.get_lines() if line.get_marker() == "*" and len(line.get_xdata())]
    found = {(float(s.get_xdata()[0]), float(s.get_ydata()[0])): s.get_markerfacecolor() for s in stars}
    assert set(found) == {(20.0, 1.84), (20.0, 2.06)}
    assert found[20.0, 2.06] == "none" != found[20.0, 1.84]
    labels = axes.get_legend_handles_labels()[1]
    assert {"published, unguided", "published, cfg 1.5"} <= set(labels)


def test_the_band_runs_from_the_lowest_to_the_highest_seed_around_their_mean():
    (axes,) = distance_figure(RESULT, "step").axes
    band = axes.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band[np.isclose(band[:, 0], 10)]} == {(10.0, 7.0), (10.0, 9.0)}
    line = next(line for line in axes.get_lines() if line.get_label() == "vanilla")
    assert np.array_equal(line.get_xydata(), [[10, 8], [20, 6]])


def test_published_values_stand_at_the_compute_of_their_arm():
    (axes,) = distance_figure(RESULT, "training_flop").axes
    stars = [line for line in axes.get_lines() if line.get_marker() == "*" and len(line.get_xdata())]
    assert sorted(float(star.get_xdata()[0]) for star in stars) == [20 * 4 * 100, 20 * 4 * 102]


def test_each_pair_has_a_panel_and_no_panel_is_empty():
    entries = [
        {
            "first": f"a{i}",
            "second": f"b{i}",
            "step": step,
            "mean": 1.0,
            "low": 0.5,
            "high": 1.5,
            "verdict": "higher",
        }
        for i in range(5)
        for step in (10, 20)
    ]
    panels = [axes for axes in difference_figure(entries, "FID").axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"b{i} - a{i}" for i in range(5)]


def test_images_of_other_seeds_are_not_shown_as_pairs():
    one, two = (SimpleNamespace(record={"seed": seed}, labels=np.arange(3)) for seed in (0, 1))
    with pytest.raises(ValueError, match="the images of b and a are not of the same seed"):
        pair_grid([("a", one), ("b", two)], "title")
