"""The linear probe against closed forms: the error of two Gaussians, chance, and refitting by hand."""

import math

import pytest
import torch

from sitvit.analyze.probe import RIDGES, chance, fit, linear_probe


def test_two_gaussian_classes_are_told_apart_as_often_as_theory_says():
    """N(+-m, 1) along one of 8 directions: the best rule, a linear one, is right in Phi(m) of the cases."""
    n, m = 40_000, 1.0
    labels = torch.arange(n) % 2
    features = torch.randn(n, 8)
    features[:, 0] += m * (2 * labels - 1)
    found = linear_probe(features, labels, 2)
    exact = 0.5 * (1 + math.erf(m / math.sqrt(2)))
    assert abs(found.accuracy - exact) < 4 * found.standard_error
    assert found.standard_error == pytest.approx(math.sqrt(exact * (1 - exact) / (n / 2)), rel=0.02)


def test_features_that_tell_nothing_come_to_chance():
    labels = torch.randint(5, (4000,))
    found = linear_probe(torch.randn(4000, 16), labels, 5)
    assert abs(found.accuracy - chance(labels)) < 4 * found.standard_error
    assert chance(labels) == pytest.approx(0.2, abs=0.04)


def test_constant_features_answer_the_commonest_class():
    labels = torch.tensor([0, 1, 1, 2] * 20)
    assert linear_probe(torch.ones(80, 3), labels, 3).accuracy == chance(labels) == 0.5


def test_the_answer_does_not_depend_on_the_scale_and_offset_of_a_feature():
    features, labels = torch.randn(200, 6), torch.randint(3, (200,))
    features[:, 0] += labels
    moved = features * torch.tensor([1e-3, 1.0, 5.0, 100.0, 1.0, 1.0]) + torch.arange(6.0)
    assert linear_probe(moved, labels, 3) == linear_probe(features, labels, 3)


def test_the_ridge_is_the_one_that_leaving_one_out_and_fitting_again_chooses():
    """By hand: standardised features, a free offset, n + 1 fits for each ridge."""
    features, labels = torch.randn(24, 10).double(), torch.randint(2, (24,))
    features[:, 0] += 0.7 * labels
    x = (features - features.mean(0)) / features.std(0, correction=0)
    y = torch.nn.functional.one_hot(labels, 2).double()
    errors = {}
    for ridge in RIDGES:
        wrong = 0.0
        for left in range(24):
            kept = torch.arange(24) != left
            centre, mean = x[kept].mean(0), y[kept].mean(0)
            z = x[kept] - centre
            weights = torch.linalg.solve(
                z.T @ z + 24 * ridge * torch.eye(10).double(), z.T @ (y[kept] - mean)
            )
            wrong += ((x[left] - centre) @ weights + mean - y[left]).square().mean().item() / 24
        errors[ridge] = wrong
    from sitvit.analyze.probe import _solve

    values, vectors = torch.linalg.eigh(x.T @ x / 24)
    for ridge, error in errors.items():
        assert _solve(x @ vectors, y - y.mean(0), values, ridge)[1] == pytest.approx(error, rel=1e-9)
    assert fit(features, labels, 2).ridge == min(errors, key=errors.__getitem__)
