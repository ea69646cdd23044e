"""The spread and the bias of a distance, on Gaussians whose distance is known."""

import numpy as np
import pytest

from sitvit.eval.metrics import Gaussian, distance_of_gaussians
from sitvit.eval.statistics import FeatureStatistics
from sitvit.eval.uncertainty import bootstrap_spread, infinite_distance

WIDTH = 24
STANDARD = Gaussian.of(np.zeros(WIDTH), np.eye(WIDTH))


def draws(n, seed, shift=0.1):
    return np.random.default_rng(seed).normal(size=(n, WIDTH)) + shift


def distance(features):
    statistics = FeatureStatistics.of(features)
    return distance_of_gaussians(Gaussian.of(statistics.mean, statistics.covariance), STANDARD)


def test_extrapolation_removes_most_of_the_bias_of_few_images():
    true = WIDTH * 0.1**2
    plain = [distance(draws(600, seed)) - true for seed in range(8)]
    extrapolated = [infinite_distance(draws(600, seed), STANDARD) - true for seed in range(8)]
    assert np.mean(plain) > 0.15  # about D (D + 1) / 4N of covariance and D / N of mean
    assert abs(np.mean(extrapolated)) < 0.2 * np.mean(plain)


def test_the_bootstrap_spread_is_that_of_fresh_samples_within_a_factor_of_two():
    fresh = np.std([distance(draws(500, seed)) for seed in range(40)], ddof=1)
    assert 0.5 < bootstrap_spread(draws(500, 99), STANDARD, num_resamples=40) / fresh < 2


def test_a_spread_of_one_resample_and_an_extrapolation_from_a_handful_are_refused():
    with pytest.raises(ValueError, match="at least 2 resamples"):
        bootstrap_spread(draws(10, 0), STANDARD, num_resamples=1)
    with pytest.raises(ValueError, match="at least 4 images, got 3"):
        infinite_distance(draws(3, 0), STANDARD)
