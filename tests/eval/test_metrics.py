"""Statistics do not depend on batching, and the distance is the textbook's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitvit.eval.metrics import (
    frechet_distance,
    gaussian_frechet_distance,
    inception_score,
    kernel_distance,
)
from sitvit.eval.statistics import FeatureStatistics

from ..conftest import GOLDEN
from ..oracles import gaussian_frechet_by_eigenvalues


def statistics_of(features, batch=None):
    statistics = FeatureStatistics(features.shape[1])
    for start in range(0, len(features), batch or len(features)):
        statistics.update(features[start : start + (batch or len(features))])
    return statistics


def random_features(n, dim, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, dim)) @ rng.normal(size=(dim, dim)) + rng.normal(size=dim)


@settings(max_examples=25)
@given(batch=st.integers(1, 60), split=st.integers(2, 58))
def test_mean_and_covariance_are_numpys_however_they_are_cut(batch, split):
    features = random_features(60, 5) + 1e3  # far from zero, where naive sums lose digits
    merged = statistics_of(features[:split], batch)
    merged.merge(statistics_of(features[split:], batch))
    assert merged.n == 60
    np.testing.assert_allclose(merged.mean, features.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(merged.covariance, np.cov(features.T), rtol=1e-10, atol=1e-10)


def test_two_gaussians_on_a_line_have_the_closed_form():
    """(m1 - m2)^2 + (s1 - s2)^2 in each dimension of diagonal covariances."""
    mean_a, mean_b = np.array([0.0, 1.0]), np.array([3.0, -1.0])
    std_a, std_b = np.array([1.0, 2.0]), np.array([0.5, 5.0])
    found = gaussian_frechet_distance(mean_a, np.diag(std_a**2), mean_b, np.diag(std_b**2))
    assert found == pytest.approx(((mean_a - mean_b) ** 2 + (std_a - std_b) ** 2).sum(), rel=1e-13)


def test_the_distance_equals_the_eigenvalue_formula():
    a, b = (statistics_of(random_features(500, 16, seed)) for seed in (0, 1))
    expected = gaussian_frechet_by_eigenvalues(a.mean, a.covariance, b.mean, b.covariance)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_the_distance_is_symmetric_and_zero_to_itself():
    a, b = (statistics_of(random_features(500, 16, seed)) for seed in (0, 1))
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-12)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-10)


def test_the_distance_does_not_change_under_a_rotation():
    features = random_features(300, 8), random_features(300, 8, 1)
    rotation, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(8, 8)))
    plain = frechet_distance(*(statistics_of(x) for x in features))
    turned = frechet_distance(*(statistics_of(x @ rotation) for x in features))
    assert turned == pytest.approx(plain, rel=1e-10)


def test_fewer_images_than_features_are_exact_too():
    """Rank-deficient covariances, where a matrix square root is off by 1e-4."""
    a = random_features(10, 40)
    shift = np.full(40, 0.5)
    moved = frechet_distance(statistics_of(a), statistics_of(a + shift))
    assert moved == pytest.approx((shift**2).sum(), rel=1e-10)


def test_a_covariance_that_rounding_alone_keeps_from_being_singular_is_taken_as_singular():
    """As many images as features leave one eigenvalue 0, where Cholesky may find 1e-17, whose root counts.

    Against a unit Gaussian tr (S_1)^(1/2) is the sum of the singular values of the centred features.
    """
    for seed in range(20):
        features = random_features(8, 8, seed)
        centred = (features - features.mean(axis=0)) / 7**0.5
        scales = np.linalg.svd(centred, compute_uv=False)[:7]
        expected = np.square(scales - 1).sum() + 1
        found = gaussian_frechet_distance(np.zeros(8), np.cov(features.T), np.zeros(8), np.eye(8))
        assert found == pytest.approx(expected, rel=1e-11)


def test_one_image_has_no_covariance():
    with pytest.raises(ValueError, match="at least 2 images"):
        _ = statistics_of(np.ones((1, 3))).covariance


def test_a_feature_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        statistics_of(np.array([[1.0, np.nan]]))


GOLDEN_METRICS = np.load(GOLDEN / "adm_metrics.npz")
CASES = ("a", "b", "rank_deficient")


def golden_sets(case):
    return GOLDEN_METRICS[f"{case}/ref"], GOLDEN_METRICS[f"{case}/sample"]


@pytest.mark.parametrize("case", ["a", "b"])
def test_the_distance_is_the_adm_suites(case):
    """To 1e-8 at full rank, but for the distance of the means: the suite's is a float32 number.

    The last bits of such a sum of squares are of the BLAS that took it, so it may be a neighbour of ours.
    """
    sets = golden_sets(case)
    delta = np.subtract(*(features.mean(axis=0) for features in sets))
    assert delta.dtype == np.float32
    zero = np.zeros(sets[0].shape[1])
    covariances = [FeatureStatistics.of(features).covariance for features in sets]
    spread = gaussian_frechet_distance(zero, covariances[0], zero, covariances[1])
    of_means = float(GOLDEN_METRICS[f"{case}/fid"]) - spread
    assert of_means == pytest.approx(float(np.float32(of_means)), abs=1e-8)
    assert abs(of_means - delta.astype(float).dot(delta)) <= 2 * np.spacing(np.float32(of_means))


def test_a_rank_deficient_distance_is_the_nuclear_norm_in_extended_precision():
    """40 digits by mpmath, from the features themselves: |C_1 C_2^T|_* of the centred, scaled rows C."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        centred, means = [], []
        for features in golden_sets("rank_deficient"):
            rows = mpmath.matrix(features.tolist())
            n, width = rows.rows, rows.cols
            mean = [mpmath.fsum(rows[:, j]) / n for j in range(width)]
            scale = 1 / mpmath.sqrt(n - 1)
            centred.append(mpmath.matrix(n, width))
            means.append(mean)
            for i in range(n):
                for j in range(width):
                    centred[-1][i, j] = (rows[i, j] - mean[j]) * scale
        overlap = mpmath.fsum(mpmath.svd_r(centred[0] * centred[1].T, compute_uv=False))
        traces = mpmath.fsum(value**2 for part in centred for value in part)
        shift = mpmath.fsum((a - b) ** 2 for a, b in zip(*means, strict=True))
        expected = float(shift + traces - 2 * overlap)
    found = frechet_distance(*(FeatureStatistics.of(x) for x in golden_sets("rank_deficient")))
    assert found == pytest.approx(expected, abs=1e-11)
    assert abs(found - GOLDEN_METRICS["rank_deficient/fid"]) < 1e-5  # what sqrtm makes of it


def test_the_inception_score_is_the_adm_suites():
    """To 1e-9 in its float32; float64 moves it by its rounding."""
    logits, split = GOLDEN_METRICS["is/logits"], int(GOLDEN_METRICS["is/split_size"])
    expected = float(GOLDEN_METRICS["is/score"])
    assert inception_score(logits, split) == pytest.approx(expected, abs=1e-9)
    assert inception_score(logits, split, np.float64) == pytest.approx(expected, rel=2e-7)


def test_the_inception_score_is_one_for_equal_answers_and_the_class_count_for_sure_and_balanced_ones():
    assert inception_score(np.zeros((100, 7)), 50) == pytest.approx(1)
    assert inception_score(1e3 * np.eye(8)[np.arange(80) % 8], 40) == pytest.approx(8)


def test_torch_fidelity_gives_the_same_distance_score_and_kid_of_the_same_features():
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric

    a, b = (random_features(n, 32, seed) for n, seed in ((900, 0), (700, 1)))
    theirs = [fid_features_to_statistics(torch.from_numpy(x)) for x in (a, b)]
    fid = fid_statistics_to_metric(*theirs, False)["frechet_inception_distance"]
    assert frechet_distance(statistics_of(a), statistics_of(b)) == pytest.approx(fid, rel=1e-9)
    isc = isc_features_to_metric(torch.from_numpy(a), splits=9, shuffle=False)["inception_score_mean"]
    assert inception_score(a, 100, np.float64) == pytest.approx(isc, rel=1e-10)
    kid = kid_features_to_metric(
        torch.from_numpy(a), torch.from_numpy(b), kid_subsets=5, kid_subset_size=300, verbose=False,
        kid_kernel="poly", kid_kernel_poly_degree=3, kid_kernel_poly_gamma=None, kid_kernel_poly_coef0=1,
        rng_seed=2020,
    )  # fmt: skip
    mean, spread = kernel_distance(a, b, num_subsets=5, subset_size=300)
    assert mean == pytest.approx(kid["kernel_inception_distance_mean"], rel=1e-10)
    assert spread == pytest.approx(kid["kernel_inception_distance_std"], rel=1e-8)


def test_kid_of_one_distribution_is_zero_within_its_spread_and_small_sets_shrink_the_subsets():
    a, b = np.split(np.random.default_rng(0).normal(size=(400, 8)), 2)
    mean, spread = kernel_distance(a, b, num_subsets=30)
    assert abs(mean) < 0.1
    assert spread < 1e-9  # subsets of all 200 are one subset
    with pytest.raises(ValueError, match="at least 2 features"):
        kernel_distance(a[:1], b)


def test_statistics_of_an_odd_number_over_8_processes_are_those_of_the_whole_shifted_by_1000():
    features = np.random.default_rng(0).normal(size=(50_001, 6))
    whole = FeatureStatistics.of(features)
    merged = FeatureStatistics(6)
    for process in range(8):
        merged.merge(FeatureStatistics.of(features[process::8] + 1000))
    assert merged.n == 50_001
    np.testing.assert_allclose(merged.mean, whole.mean + 1000, rtol=1e-14)
    np.testing.assert_allclose(merged.covariance, whole.covariance, atol=1e-11)


def test_the_distance_does_not_feel_order_partition_or_an_offset_of_1000():
    a, b = random_features(501, 6, 0), random_features(400, 6, 1)
    plain = frechet_distance(statistics_of(a), statistics_of(b))
    order = np.random.default_rng(2).permutation(len(a))
    moved = FeatureStatistics(6)
    for process in range(8):  # 501 is no multiple of 8, and their batches of 7 are ragged
        moved.merge(statistics_of(a[order][process::8] + 1000, batch=7))
    found = frechet_distance(moved, statistics_of(b + 1000, batch=33))
    # Values near 1000 are rounded to 1e-13, in a mean that is squared with a shift of a few
    assert found == pytest.approx(plain, rel=1e-10)
    assert plain > 0.1


def test_statistics_of_another_width_and_empty_parts_are_refused_or_nothing():
    statistics = FeatureStatistics.of(np.ones((3, 2)))
    statistics.merge(FeatureStatistics(2))
    statistics.update(np.ones((0, 2)))
    assert statistics.n == 3
    with pytest.raises(ValueError, match="width 5 and 2"):
        statistics.merge(FeatureStatistics(5))
    with pytest.raises(ValueError, match=r"\(B, 2\)"):
        statistics.update(np.ones((4, 3)))
