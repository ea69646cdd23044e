"""The mathematics of evaluation: its time against scipy's matrix root, and its memory.

    python scripts/bench.py eval --features 2048 --samples 50000

Features are random. Extraction is timed on Inception's graph with random weights, one batch on the CPU.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import numpy as np
import torch

from ..eval.inception import InceptionFeatures, inception_graph
from ..eval.manifold import COLUMNS, ROWS, precision_recall
from ..eval.metrics import gaussian_frechet_distance
from ..eval.statistics import FeatureStatistics
from .timing import interleave, ratio


def bench_eval(width: int, num_samples: int, num_reference: int, rounds: int) -> Iterator[str]:
    """Lines, each as soon as it is known: precision and recall, Frechet distance, statistics.

    Precision and recall go first, so that the peak of the process is theirs.
    """
    yield f"{width} features, {torch.get_num_threads()} threads, numpy {np.__version__}"
    yield _manifold(width, num_samples, num_reference)
    yield _frechet(width, rounds)
    yield _statistics()


def _frechet(width: int, rounds: int) -> str:
    from scipy.linalg import sqrtm

    draw = np.random.default_rng(0)
    means, covariances = [], []
    for _ in range(2):
        features = draw.normal(size=(2 * width, width)) * np.geomspace(1, 1e-3, width)
        statistics = FeatureStatistics.of(features)
        means.append(statistics.mean)
        covariances.append(statistics.covariance)

    def by_root() -> float:
        root = np.trace(sqrtm(covariances[0] @ covariances[1]).real)
        shift = np.square(means[0] - means[1]).sum()
        return float(shift + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * root)

    def ours() -> float:
        return gaussian_frechet_distance(means[0], covariances[0], means[1], covariances[1])

    times = interleave({"ours": ours, "sqrtm": by_root}, rounds)
    seconds = ", ".join(f"{name} {np.median(each):.1f} s" for name, each in times.items())
    return f"Frechet distance, ours / scipy sqrtm: {ratio(times['ours'], times['sqrtm'])}; {seconds}"


def _statistics() -> str:
    extractor = InceptionFeatures(torch.device("cpu"), network=inception_graph())
    images = torch.randint(0, 256, (16, 256, 256, 3), dtype=torch.uint8)
    extractor(images)
    start = time.perf_counter()
    found = extractor(images)
    extraction = (time.perf_counter() - start) / len(images)
    assert found.spatial is not None
    cost = 0.0
    for features in (found.pool, found.spatial):
        block = features.repeat(-(-1000 // len(images)), 1)  # as evaluation takes them in
        statistics = FeatureStatistics(features.shape[1])
        start = time.perf_counter()
        statistics.update(block)
        cost += (time.perf_counter() - start) / len(block)
    return (
        f"statistics / extraction: {cost / extraction:.4f} ({1e3 * cost:.2f} and {1e3 * extraction:.0f} ms "
        "an image, of pool and spatial features)"
    )


def _manifold(width: int, num_samples: int, num_reference: int) -> str:
    draw = np.random.default_rng(0)
    reference = draw.standard_normal((num_reference, width), dtype=np.float32)
    samples = draw.standard_normal((num_samples, width), dtype=np.float32)
    start = time.perf_counter()
    precision_recall(reference, samples)
    seconds = time.perf_counter() - start
    pairs = num_samples**2 + num_reference**2 + num_samples * num_reference
    rate = 2 * width * pairs / seconds / _product_rate(width)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"precision and recall, {num_reference:,} x {num_samples:,}: {seconds:.0f} s, {100 * rate:.0f} % of "
        f"a bare matrix product's rate; peak of the process {peak:.2f} GiB"
    )


def _product_rate(width: int) -> float:
    """Operations a second of float32 products in blocks as those of precision and recall."""
    rows, columns = torch.randn(ROWS, width), torch.randn(COLUMNS, width)
    (seconds,) = interleave({"product": lambda: rows @ columns.T}, 3).values()
    return 2 * ROWS * COLUMNS * width / float(np.median(seconds))
