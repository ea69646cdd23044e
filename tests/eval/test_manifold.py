"""Precision and recall: the ADM suite's, brute force's, and what they must say of simple cases."""

import numpy as np
import pytest

from sitvit.eval import manifold
from sitvit.eval.manifold import nearest_radii, precision_recall

from ..conftest import GOLDEN

VALUES = np.load(GOLDEN / "adm_metrics.npz")


def brute_force(reference, samples, k=3):
    """By float64 distances of all pairs, and a loop."""

    def squared(a, b):
        return np.array(
            [[np.square(x - y).sum() for y in b.astype(np.float64)] for x in a.astype(np.float64)]
        )

    def inside(points, centres):
        radii = np.sort(squared(centres, centres), axis=1)[:, k]
        return (squared(points, centres) <= radii).any(axis=1).mean()

    return inside(samples, reference), inside(reference, samples)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(manifold, "ROWS", 37)
    monkeypatch.setattr(manifold, "COLUMNS", 50)


@pytest.mark.parametrize("case", ["a", "b", "rank_deficient"])
def test_adm_distances_give_the_adm_suites_numbers(case):
    reference, samples = VALUES[f"{case}/ref"], VALUES[f"{case}/sample"]
    precision, recall = precision_recall(reference, samples, "adm")
    # A float16 rounding may flip the samples that lie on a radius: here at most one of each set.
    assert precision == pytest.approx(float(VALUES[f"{case}/precision"]), abs=1.01 / len(samples))
    assert recall == pytest.approx(float(VALUES[f"{case}/recall"]), abs=1.01 / len(reference))
    # 11 bits: two units in the last place of the sums that make a radius
    largest = np.square(reference).sum(axis=1).max()
    expected = VALUES[f"{case}/radii_ref"][:, 0]
    assert np.abs(nearest_radii(reference, "adm") - expected).max() <= 2 * np.spacing(np.float16(largest))


@pytest.mark.parametrize("case", ["a", "b", "rank_deficient"])
def test_float32_distances_are_brute_forces_in_blocks_too(case, small_blocks):
    reference, samples = VALUES[f"{case}/ref"], VALUES[f"{case}/sample"]
    assert precision_recall(reference, samples) == brute_force(reference, samples)


def test_float32_distances_do_not_feel_an_offset_of_1000_or_the_order():
    draw = np.random.default_rng(0)
    reference, samples = draw.normal(size=(200, 8)), draw.normal(size=(150, 8)) * 1.2
    plain = precision_recall(reference, samples)
    assert precision_recall(reference + 1000, samples + 1000) == plain
    assert precision_recall(draw.permutation(reference), draw.permutation(samples)) == plain


def test_a_point_on_the_radius_of_a_ball_is_in_it():
    """0, 1, 2, 3 have balls of radius 3, 2, 2, 3 on the line, and -3 lies on the first one's edge."""
    line = np.array([[0.0], [1], [2], [3]])
    far = np.array([[-3.0], [103], [-100], [200], [-200]])
    assert precision_recall(far, line) == (1, 1 / 5)
    assert precision_recall(line + 0.5, far + 0.5) == (1 / 5, 1)


def test_adm_distances_are_rounded_to_float16_at_each_step():
    """45^2 = 2025, 47^2 = 2209 -> 2208, 45 * 47 = 2115 -> 2116, by the rule of ties to even mantissas.

    From 45: (2025 - 4232 -> -2208) + 2208 = 0; from 47: (2208 - 4232 = -2024) + 2025 = 1. It is 4.
    """
    pair = np.array([[45.0], [47.0]])
    assert nearest_radii(pair, "adm", 1).tolist() == [0, 1]
    assert nearest_radii(pair, "float32", 1).tolist() == [4, 4]


def test_a_collapsed_generator_is_precise_and_recalls_nothing():
    draw = np.random.default_rng(0)
    reference = draw.normal(size=(500, 8))
    collapsed = reference[0] + 1e-3 * draw.normal(size=(400, 8))
    precision, recall = precision_recall(reference, collapsed)
    assert precision == 1
    assert recall < 0.01


def test_two_draws_of_one_distribution_recall_and_are_precise_alike():
    draw = np.random.default_rng(1)
    precision, recall = precision_recall(draw.normal(size=(800, 4)), draw.normal(size=(800, 4)))
    assert precision == pytest.approx(recall, abs=0.05)
    assert precision > 0.85


def test_a_float16_overflow_is_done_in_float32():
    draw = np.random.default_rng(0)
    reference, samples = draw.normal(size=(60, 8)) * 200, draw.normal(size=(50, 8)) * 200
    found = precision_recall(reference, samples, "adm")
    assert found == precision_recall(reference, samples, "float32")


def test_too_few_images_and_unknown_distances_are_refused():
    features = np.zeros((3, 2))
    with pytest.raises(ValueError, match="the reference has 3"):
        precision_recall(features, np.zeros((9, 2)))
    with pytest.raises(ValueError, match="the samples have 3"):
        precision_recall(np.zeros((9, 2)), features)
    with pytest.raises(ValueError, match="float32 or adm"):
        precision_recall(features, features, "float64")
