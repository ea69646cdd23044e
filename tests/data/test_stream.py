"""The stream is a pure function of (seed, step, position)."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sitvit.bench.data import anonymous_memory, synthetic_cache
from sitvit.config import TrainConfig
from sitvit.data.autoencoder import latents_of_moments
from sitvit.data.stream import SAMPLING, TRAINING, Slices, TrainingStream, generator
from sitvit.train.trainer import _share

START = "fork" if sys.platform == "linux" else "spawn"
"""How workers start where nothing turns on it: a fork takes no seconds."""


def stream(cache, **changes):
    arguments = {
        "seed": 0, "batch_size": 8, "flip": True, "class_dropout_prob": 0.1, "null_label": 10
    }  # fmt: skip
    return TrainingStream(cache, **{**arguments, **changes})


def tensors(batch):
    return [torch.from_numpy(batch.ids), batch.x_0, batch.x_1, batch.u, batch.labels]


@settings(max_examples=20, deadline=None)
@given(step=st.integers(0, 10**9), parts=st.sampled_from([1, 2, 4, 8]))
def test_any_split_over_processes_sees_the_same_bits(cache, step, parts):
    whole = tensors(stream(cache).batch(step, range(8)))
    size = 8 // parts
    slices = [tensors(stream(cache).batch(step, range(i, i + size))) for i in range(0, 8, size)]
    for expected, *found in zip(whole, *slices, strict=True):
        assert torch.equal(torch.cat(found), expected)


def test_a_step_does_not_depend_on_the_steps_before(cache):
    ran = stream(cache)
    for step in range(20):
        last = ran.batch(step, range(8))
    fresh = stream(cache).batch(19, range(8))
    assert all(torch.equal(a, b) for a, b in zip(tensors(last), tensors(fresh), strict=True))


def test_every_image_comes_once_an_epoch_in_a_new_order(cache):
    """64 images in batches of 24: batches straddle epochs and nothing is lost."""
    ran = stream(cache, batch_size=24)
    ids = np.concatenate([ran.batch(step, range(24)).ids for step in range(8)])
    epochs = ids.reshape(3, 64)
    assert (np.sort(epochs, axis=1) == np.arange(64)).all()
    assert not (epochs[0] == epochs[1]).all()


def test_a_batch_larger_than_the_data_wraps(cache):
    ids = stream(cache, batch_size=150).batch(0, range(150)).ids
    assert np.bincount(ids, minlength=64).min() >= 2


def test_noise_and_times_differ_between_positions_steps_and_seeds(cache):
    batches = [stream(cache, seed=seed).batch(step, range(8)) for seed, step in [(0, 0), (0, 1), (1, 0)]]
    times = torch.cat([batch.u for batch in batches])
    noises = torch.cat([batch.x_0 for batch in batches]).flatten(1)
    assert len(times.unique()) == 24
    assert len(noises.unique(dim=0)) == 24


def test_training_and_sampling_draws_of_one_seed_are_different():
    a, b = (generator(0, purpose, 0, 0).standard_normal(4) for purpose in (TRAINING, SAMPLING))
    assert not (a == b).any()


def test_the_draws_have_the_distributions_that_they_should(cache):
    ran = stream(cache, batch_size=2000)
    batch = ran.batch(0, range(2000))
    # five standard errors of 2,000 draws
    assert batch.u.mean() == pytest.approx(0.5, abs=5 * 0.2887 / 2000**0.5)
    assert batch.u.std() == pytest.approx(0.2887, abs=0.01)
    dropped = (batch.labels == 10).float().mean()
    assert dropped == pytest.approx(0.1, abs=5 * 0.3 / 2000**0.5)
    assert batch.x_0.mean() == pytest.approx(0, abs=5 / batch.x_0.numel() ** 0.5)
    assert batch.x_0.std() == pytest.approx(1, abs=5 / (2 * batch.x_0.numel()) ** 0.5)
    kept = batch.labels != 10
    assert np.array_equal(batch.labels[kept].numpy(), cache.labels[batch.ids][kept.numpy()])


def test_the_data_side_is_a_draw_of_the_images_posterior(cache):
    batch = stream(cache, flip=False).batch(3, range(8))
    moments = cache.moments(batch.ids, np.zeros(8, dtype=bool))
    mean = latents_of_moments(moments, torch.zeros(1), cache.autoencoder)
    one_sigma = latents_of_moments(moments, torch.ones(1), cache.autoencoder) - mean
    standard = (batch.x_1 - mean) / one_sigma
    assert standard.std() == pytest.approx(1, abs=0.1)
    assert not torch.equal(standard, batch.x_0)


def test_without_dropout_every_label_is_kept(cache):
    batch = stream(cache, class_dropout_prob=0.0).batch(0, range(8))
    assert np.array_equal(batch.labels.numpy(), cache.labels[batch.ids])


def test_flips_take_the_mirrored_moments_of_half_of_the_images(cache):
    ran = stream(cache, batch_size=400, class_dropout_prob=0.0)
    with_flip = ran.batch(0, range(400))
    without = stream(cache, batch_size=400, flip=False).batch(0, range(400))
    same = (with_flip.x_1 == without.x_1).flatten(1).all(dim=1)
    assert same.float().mean() == pytest.approx(0.5, abs=5 * 0.5 / 400**0.5)
    assert torch.equal(with_flip.x_0, without.x_0)


def test_flipping_without_mirrored_moments_is_refused(cache, monkeypatch):
    monkeypatch.setattr(cache, "has_flip", False)
    with pytest.raises(ValueError, match="encoded without --flip"):
        stream(cache)


EPOCHS, ITEMS, BATCH = 3, 37, 8
STEPS = -(-EPOCHS * ITEMS // BATCH)


@pytest.fixture(scope="module")
def thirty_seven(tmp_path_factory):
    return synthetic_cache(tmp_path_factory.mktemp("stream") / "c", ITEMS)


@pytest.fixture(scope="module")
def table(thirty_seven):
    """All that the first three epochs of 37 items in batches of 8 consist of."""
    ran = stream(thirty_seven, batch_size=BATCH, flip=False)
    return [tensors(ran.batch(step, range(BATCH))) for step in range(STEPS)]


def equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_first_three_epochs_hold_each_image_three_times_in_three_orders(table):
    ids = torch.cat([row[0] for row in table])[: EPOCHS * ITEMS].reshape(EPOCHS, ITEMS)
    assert torch.equal(ids.sort(dim=1).values, torch.arange(ITEMS).expand(EPOCHS, -1))
    assert len(ids.unique(dim=0)) == EPOCHS


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("num_processes", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)]
)  # four processes have two positions each, which cannot be cut in four
def test_the_table_is_the_same_for_any_processes_workers_and_accumulation(
    thirty_seven, table, num_processes, accumulation, num_workers
):
    """Each process reads its share of every step, in workers of its own, and cuts it as training does."""
    micro = BATCH // num_processes // accumulation
    settings = TrainConfig(num_steps=STEPS, batch_size=BATCH, micro_batch_size=micro)
    start = {"multiprocessing_context": START} if num_workers else {}
    columns = []
    for process in range(num_processes):
        share = _share(settings, num_processes, process)
        steps = Slices(stream(thirty_seven, batch_size=BATCH, flip=False), share, STEPS)
        batches = list(DataLoader(steps, batch_size=None, num_workers=num_workers, **start))
        assert {len(batch.parts(micro)) for batch in batches} == {accumulation}
        columns.append([[tensors(part) for part in batch.parts(micro)] for batch in batches])
    for step, expected in enumerate(table):
        parts = [part for column in columns for part in column[step]]
        assert equal([torch.cat(tensor) for tensor in zip(*parts, strict=True)], expected)


@settings(max_examples=10, deadline=None)
@given(killed_at=st.integers(0, STEPS - 1))
def test_the_table_is_the_same_after_a_kill_at_any_step(thirty_seven, table, killed_at):
    fresh = stream(thirty_seven, batch_size=BATCH, flip=False)
    assert all(equal(tensors(fresh.batch(s, range(BATCH))), table[s]) for s in range(killed_at, STEPS))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_table_is_the_same_with_and_without_spawned_workers(thirty_seven, table, num_workers):
    ran = Slices(stream(thirty_seven, batch_size=BATCH, flip=False), range(BATCH), STEPS)
    start = {"multiprocessing_context": "spawn"} if num_workers else {}
    loader = DataLoader(ran, batch_size=None, num_workers=num_workers, **start)
    assert all(equal(tensors(found), row) for found, row in zip(loader, table, strict=True))


@pytest.mark.parametrize("num_items", [1, 5])
def test_fewer_images_than_the_batch_train_on_each_equally_often(tmp_path, num_items):
    ran = stream(synthetic_cache(tmp_path / "c", num_items), batch_size=8, flip=False)
    ids = np.concatenate([ran.batch(step, range(8)).ids for step in range(5)])
    assert np.bincount(ids).tolist() == [40 // num_items] * num_items


def test_a_data_loader_reads_whole_batches_of_a_cache(thirty_seven):
    loader = DataLoader(thirty_seven, batch_size=10)
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [10, 10, 10, 7]
    everything = thirty_seven.moments(np.arange(37), np.zeros(37, bool))
    assert torch.equal(torch.cat([moments for moments, _ in batches]), everything)
    assert torch.equal(thirty_seven[5][0], everything[5])


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux alone")
@pytest.mark.parametrize("whole_steps", [True, False])
def test_a_worker_without_shared_memory_says_so_and_outside_of_workers_none_is_needed(
    thirty_seven, monkeypatch, whole_steps
):
    """Batches of 8: 131 kB of moments, or 262 kB of noise and latents with times and labels."""
    steps = Slices(stream(thirty_seven, batch_size=8, flip=False), range(8), 5)
    data, batch_size = (steps, None) if whole_steps else (thirty_seven, 8)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=250_000))
    assert len(list(DataLoader(data, batch_size=batch_size))) == 5
    monkeypatch.setattr("sitvit.data.latents.get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(OSError, match=r"shared memory is not enough: /dev/shm has 0.2 MB .*num_workers=0"):
        list(DataLoader(data, batch_size=batch_size))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=600_000))
    assert len(list(DataLoader(data, batch_size=batch_size))) == 5


READER = """
import sys
from pathlib import Path
from torch.utils.data import DataLoader
from sitvit.data.latents import LatentCache
if __name__ == "__main__":
    cache = LatentCache(Path(sys.argv[1]))
    print(len(list(DataLoader(cache, batch_size=100, num_workers=0))), flush=True)
    list(DataLoader(cache, batch_size=100, num_workers=2, multiprocessing_context="spawn"))
"""


@pytest.mark.slow
def test_two_spawned_workers_in_four_megabytes_of_shared_memory_end_within_a_minute_in_the_sentence(tmp_path):
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    synthetic_cache(tmp_path / "c", 500)
    (tmp_path / "reader.py").write_text(READER)
    command = [*mounted, sys.executable, tmp_path / "reader.py", tmp_path / "c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "5\n")
    assert "OSError: the shared memory is not enough" in done.stderr


def test_memory_stays_flat_over_an_epoch(tmp_path):
    """3,000 items are 49 MB; what is read stays in the page cache and not in the process."""
    cache = synthetic_cache(tmp_path / "c", 3000)
    ran = stream(cache, batch_size=100, flip=False)
    ran.batch(0, range(100))
    before = anonymous_memory()
    if before is None:
        pytest.skip("this system does not tell")
    for step in range(30):
        ran.batch(step, range(100))
    assert anonymous_memory() - before < 10e6
