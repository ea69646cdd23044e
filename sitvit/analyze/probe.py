"""A linear probe: how much of the class a linear function of the features tells.

Least squares on one-hot classes with a ridge, on features scaled to unit variance:

    W = (X^T X + r n I)^-1 X^T Y,        answer = argmax of x^T W

X and Y less their means. Of the ridges r the one with the smallest leave-one-out error is taken, which
needs no second fit: e_i = (y_i - prediction_i) / (1 - h_i), h_i = x_i^T (X^T X + r n I)^-1 x_i + 1 / n
(Hastie, Tibshirani & Friedman, The Elements of Statistical Learning, section 7.10).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class Probe:
    """Accuracy on the test half, its standard error sqrt(p (1 - p) / n), and the ridge that was taken."""

    accuracy: float
    standard_error: float
    ridge: float


def linear_probe(features: Tensor, labels: Tensor, num_classes: int) -> Probe:
    """Fit on the first half of `features` (n, D) and `labels` (n,), measure on the second; n at least 4."""
    half = len(labels) // 2
    classifier = fit(features[:half], labels[:half], num_classes)
    right = (classifier(features[half:]) == labels[half:]).double()
    accuracy = right.mean().item()
    return Probe(accuracy, (accuracy * (1 - accuracy) / len(right)) ** 0.5, classifier.ridge)


def chance(labels: Tensor) -> float:
    """Accuracy on the second half of the first half's commonest class: what telling nothing gives."""
    half = len(labels) // 2
    return (labels[half:] == labels[:half].mode().values).double().mean().item()


@dataclass(frozen=True)
class Classifier:
    """A linear function of the scaled features; the largest of its outputs is the answer."""

    mean: Tensor  # (D,) of the features
    scale: Tensor  # (D,)
    weights: Tensor  # (D, classes)
    shares: Tensor  # (classes,): what it answers at the mean
    ridge: float

    def __call__(self, features: Tensor) -> Tensor:
        """Class of each row of (n, D)."""
        x = (features.double() - self.mean) / self.scale
        return (x @ self.weights + self.shares).argmax(dim=1)


def fit(features: Tensor, labels: Tensor, num_classes: int) -> Classifier:
    """The least-squares classifier of `features` (n, D) with `labels` (n,); float64 inside."""
    x, y = features.double(), F.one_hot(labels, num_classes).double()
    mean, shares = x.mean(dim=0), y.mean(dim=0)
    scale = x.std(dim=0, correction=0)
    scale = scale.clamp(min=max(1e-6 * scale.max().item(), 1e-30))  # of a feature that only rounding moves
    x, y = (x - mean) / scale, y - shares
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    z = x @ vectors
    fits = {ridge: _solve(z, y, values.clamp(min=0), ridge) for ridge in RIDGES}
    ridge = min(fits, key=lambda ridge: fits[ridge][1])
    return Classifier(mean, scale, vectors @ fits[ridge][0], shares, ridge)


def _solve(z: Tensor, y: Tensor, values: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Weights in the eigenvectors' basis and the mean squared leave-one-out error of a ridge."""
    inverse = 1 / (len(z) * (values + ridge))
    weights = inverse[:, None] * (z.T @ y)
    leverage = (z.square() * inverse).sum(dim=1, keepdim=True) + 1 / len(z)
    return weights, ((y - z @ weights) / (1 - leverage)).square().mean().item()
