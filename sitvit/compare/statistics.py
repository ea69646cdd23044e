"""Is a difference more than chance? Paired over seeds, with the spread of the samples.

With d_s = value of the arm - value of the other one, both of seed s, n seeds, and sigma_s the standard
deviation that resampling the images gives d_s:

    spread over seeds      e = t(n - 1) sqrt(sum (d_s - mean)^2 / (n - 1) / n)          (Student)
    spread of the samples  f = z sqrt(mean sigma_s^2 / n)                               (normal)
    interval               mean +- max(e, f); of one seed mean +- f

The spread over seeds holds that of the samples, since each seed draws its own, so e alone keeps the rate; f
keeps few seeds that agree by luck from looking exact. A difference whose interval holds zero is not
separable.

The percentile bootstrap (seeds drawn with replacement, each with its samples' noise) stands beside it. It is
not what decides: with three seeds and no true difference it excludes zero far more often than 5 % of the
time (tests/compare/test_statistics.py measures it).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2_000


@dataclass(frozen=True)
class Difference:
    """A mean difference; without an interval where nothing says how far it can be trusted."""

    mean: float
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    num_seeds: int

    @property
    def verdict(self) -> str:
        """ "lower", "higher", "not separable" or, without any spread, "unknown"."""
        if self.low is None or self.high is None:
            return "unknown"
        return "lower" if self.high < 0 else "higher" if self.low > 0 else "not separable"


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float], sigma: Mapping[int, float] | None = None
) -> Difference | None:
    """second - first over the seeds that both have; `sigma` by seed: the spread of the samples.

    None where they share no seed.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    differences = np.array([second[seed] - first[seed] for seed in seeds])
    spreads = np.array([(sigma or {}).get(seed, 0.0) for seed in seeds])
    mean, count = float(differences.mean()), len(seeds)
    of_samples = float(np.mean(spreads**2))
    if count == 1 and of_samples == 0:
        return Difference(mean, None, None, None, None, 1)
    half = student_quantile((1 + CONFIDENCE) / 2, math.inf) * math.sqrt(of_samples / count)
    if count > 1:
        of_seeds = float(differences.var(ddof=1))
        half = max(half, student_quantile((1 + CONFIDENCE) / 2, count - 1) * math.sqrt(of_seeds / count))
    low, high = bootstrap_interval(differences, spreads)
    return Difference(mean, mean - half, mean + half, low, high, count)


def bootstrap_interval(differences: np.ndarray, spreads: np.ndarray) -> tuple[float, float]:
    """Percentile interval of the mean: seeds with replacement, normal noise of the samples on each."""
    draw = np.random.default_rng(0)
    rows = draw.integers(len(differences), size=(RESAMPLES, len(differences)))
    means = (differences[rows] + spreads[rows] * draw.standard_normal(rows.shape)).mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@functools.cache
def student_quantile(probability: float, freedom: float) -> float:
    """Quantile above the median of Student's t; infinite `freedom` is the normal distribution.

    From the density's integral, summed over cells, with x = tan(a), so that the heavy tail is finite.
    """
    width = math.pi / 2 / 200_000
    angles = (np.arange(200_000) + 0.5) * width
    x = np.tan(angles)
    log_density = -x * x / 2 if math.isinf(freedom) else -(freedom + 1) / 2 * np.log1p(x * x / freedom)
    mass = np.cumsum(np.exp(log_density - 2 * np.log(np.cos(angles))))
    ends = angles + width / 2  # where the mass of a cell is complete
    return math.tan(np.interp(2 * probability - 1, mass / mass[-1], ends))
