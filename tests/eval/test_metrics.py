"""Statistics do not depend on batching, and the distance is the textbook's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitvit.eval.metrics import frechet_distance, gaussian_frechet_distance
from sitvit.eval.statistics import FeatureStatistics

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


def test_one_image_has_no_covariance():
    with pytest.raises(ValueError, match="at least 2 images"):
        _ = statistics_of(np.ones((1, 3))).covariance


def test_a_feature_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        statistics_of(np.array([[1.0, np.nan]]))
