"""Intervals of paired differences: known quantiles, known answers, and the nominal rate of false alarms."""

import math

import numpy as np
import pytest

from sitvit.compare.statistics import bootstrap_interval, paired_difference, student_quantile


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062047), (2, 4.3026527), (4, 2.7764451), (30, 2.0422725), (math.inf, 1.9599640)],
)
def test_quantiles_are_those_of_the_tables(freedom, expected):
    assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-7)  # the expected ones' digits


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_a_true_zero_effect_is_called_separable_at_the_nominal_rate(num_seeds):
    """2,000 experiments: 5 % +- 3 standard errors of 0.5 %; seed effects common to both arms cancel."""
    draw = np.random.default_rng(0)
    alarms = 0
    for _ in range(2000):
        common = draw.normal(0, 10, num_seeds)
        first, second = (dict(enumerate(common + draw.standard_normal(num_seeds))) for _ in range(2))
        alarms += paired_difference(first, second).verdict != "not separable"
    assert 0.035 < alarms / 2000 < 0.065


def test_the_percentile_bootstrap_of_three_seeds_would_not_keep_the_rate():
    draw = np.random.default_rng(0)
    intervals = [bootstrap_interval(draw.standard_normal(3), np.zeros(3)) for _ in range(500)]
    assert np.mean([low > 0 or high < 0 for low, high in intervals]) > 0.15


def test_one_seed_has_the_interval_of_its_samples_alone():
    found = paired_difference({0: 5.0}, {0: 4.0}, {0: 0.25})
    assert (found.low, found.high) == pytest.approx((-1 - 1.96 * 0.25, -1 + 1.96 * 0.25), abs=1e-3)
    assert found.verdict == "lower"


@pytest.mark.parametrize(("num_seeds", "least"), [(1, 0.035), (3, 0.003), (5, 0.003)])
def test_where_seeds_differ_by_samples_alone_a_true_zero_effect_keeps_the_rate(num_seeds, least):
    """Of one seed at the nominal rate; of more, both spreads have to be exceeded: rarer, not never."""
    draw = np.random.default_rng(1)
    alarms = 0
    for _ in range(2000):
        first, second = (dict(enumerate(10 + draw.normal(0, 0.5, num_seeds))) for _ in range(2))
        spread = dict.fromkeys(range(num_seeds), 0.5 * math.sqrt(2))
        alarms += paired_difference(first, second, spread).verdict != "not separable"
    assert least < alarms / 2000 < 0.065  # 3 standard errors of 0.5 % above 5 %


def test_more_seeds_never_widen_the_interval_of_what_they_agree_on():
    spread = dict.fromkeys(range(5), 0.3)
    widths = [
        found.high - found.low
        for n in (1, 2, 3, 5)
        if (found := paired_difference(dict.fromkeys(range(n), 5.0), dict.fromkeys(range(n), 4.0), spread))
    ]
    assert widths == sorted(widths, reverse=True)


def test_one_seed_without_a_spread_is_no_conclusion():
    assert paired_difference({0: 5.0}, {0: 4.0}).verdict == "unknown"


def test_seeds_that_agree_by_luck_keep_the_spread_of_their_samples():
    same = paired_difference({0: 5.0, 1: 5.0}, {0: 4.9, 1: 4.9}, {0: 0.3, 1: 0.3})
    assert same.verdict == "not separable"


def test_a_large_effect_is_seen_with_its_sign():
    found = paired_difference({0: 5.0, 1: 6.0, 2: 7.0}, {0: 8.0, 1: 9.1, 2: 9.9})
    assert (found.verdict, found.num_seeds) == ("higher", 3)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
