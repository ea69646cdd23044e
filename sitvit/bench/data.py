"""Reading latents for training: batches of random items from the cache against one `.npy` file per item; and
how busy encoding keeps the autoencoder.

    python scripts/bench.py data --num-items 20000 --batch-size 256

Both hold the same float16 moments of 8 x 32 x 32 (SD-VAE at 256 pixels), 16 kB an item, and both lie in the
page cache, so the ratio is the cost of getting at them and not the disk's.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from ..data import shards
from ..data.autoencoder import Autoencoder, AutoencoderIdentity
from ..data.encode import encode
from ..data.latents import FORMAT, LatentCache, shard_ranges
from ..data.sources import ImageFolder
from ..data.stream import TrainingStream
from ..generate.samples import write_image
from .timing import interleave, ratio

CHANNELS, SIZE, CLASSES = 4, 32, 10


def bench_data(num_items: int, batch_size: int, rounds: int) -> list[str]:
    """Lines of a table: time of a random batch, items a second, and memory over an epoch."""
    with tempfile.TemporaryDirectory() as folder:
        cache = synthetic_cache(Path(folder) / "cache", num_items)
        files = _as_files(cache, Path(folder) / "files")
        draw = np.random.default_rng(0)
        no_flips = np.zeros(batch_size, dtype=bool)

        def from_cache() -> torch.Tensor:
            return cache.moments(draw.integers(num_items, size=batch_size), no_flips)

        def from_files() -> torch.Tensor:
            ids = draw.integers(num_items, size=batch_size)
            return torch.from_numpy(np.stack([np.load(files[i]) for i in ids]))

        for read in (from_cache, from_files):  # bring everything into the page cache
            for _ in range(2 * num_items // batch_size):
                read()
        times = interleave({"cache": from_cache, "files": from_files}, rounds)
        lines = [
            f"{num_items:,} items of {2 * CHANNELS} x {SIZE} x {SIZE} float16, batch {batch_size}, "
            f"{rounds} rounds",
            f"cache / one .npy an item: {ratio(times['cache'], times['files'])}",
        ]
        for name, seconds in times.items():
            lines.append(f"  {name}: {batch_size / statistics.median(seconds):,.0f} items/s on one core")
        lines += [_stream_rate(cache, batch_size), _memory_over_an_epoch(cache, batch_size)]
        return [*lines, encoding_share(Path(folder), 40)]


def synthetic_cache(out: Path, num_items: int) -> LatentCache:
    """A finished cache of random moments."""
    identity = AutoencoderIdentity("synthetic", "0", 1.0, 0.0, CHANNELS, 8)
    ranges = shard_ranges(num_items)
    settings = {
        "format": FORMAT,
        "images": "synthetic",
        "images_fingerprint": "",
        "num_images": num_items,
        "class_names": [str(label) for label in range(CLASSES)],
        "image_size": 8 * SIZE,
        "crop": "none",
        "flip": False,
        "autoencoder": asdict(identity),
        "latent_size": SIZE,
        "normalize_channels": False,
    }
    shards.begin(out, settings)
    generator = torch.Generator().manual_seed(0)
    for number, places in enumerate(ranges):
        moments = torch.randn(len(places), 2 * CHANNELS, SIZE, SIZE, generator=generator)
        index = np.array(places, dtype=np.int64)
        shards.write_shard(out, number, moments, None, index % CLASSES, index)
    shards.finish(out, settings, ranges, time.monotonic(), {"skipped": []})
    return LatentCache(out)


def anonymous_memory() -> int | None:
    """Bytes that this process holds apart from mapped files; None where the system does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) << 10 if found else None


def _as_files(cache: LatentCache, folder: Path) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{i}.npy" for i in range(len(cache))]
    for i, path in enumerate(paths):
        np.save(path, cache[i][0].numpy())
    return paths


def _stream_rate(cache: LatentCache, batch_size: int) -> str:
    stream = TrainingStream(cache, 0, batch_size, False, 0.1, CLASSES)
    start = time.perf_counter()
    for step in range(20):
        stream.batch(step, range(batch_size))
    rate = 20 * batch_size / (time.perf_counter() - start)
    return f"  whole training batches, noise and times drawn too: {rate:,.0f} items/s"


def encoding_share(folder: Path, count: int) -> str:
    """How busy reading keeps the autoencoder: `count` PNGs of 500 x 375, encoded at 256 pixels.

    A PNG takes longer to read than a JPEG, and the embedded autoencoder is far smaller than SD's: photographs
    wait for a smaller share.
    """
    generator = np.random.default_rng(2)
    (folder / "photos" / "0").mkdir(parents=True)
    for i in range(count):
        coarse = generator.integers(0, 256, (75, 100, 3), dtype=np.uint8)
        write_image(folder / "photos" / "0" / f"{i}.png", np.kron(coarse, np.ones((5, 5, 1), np.uint8)))
    source, device = ImageFolder(folder / "photos"), "cuda" if torch.cuda.is_available() else "cpu"
    autoencoder = Autoencoder("fashion-autoencoder", device)
    encode(source, "photos", autoencoder, 256, folder / "encoded", batch_size=10, flip=False)
    waiting = LatentCache(folder / "encoded").manifest["waiting_for_images"]
    return f"encoding {count} PNGs at 256 pixels on {device}: {waiting:.0%} of the time waiting for images"


def _memory_over_an_epoch(cache: LatentCache, batch_size: int) -> str:
    order = np.random.default_rng(1).permutation(len(cache))
    before = anonymous_memory()
    for start in range(0, len(cache), batch_size):
        cache.__getitems__(order[start : start + batch_size].tolist())
    after = anonymous_memory()
    if before is None or after is None:
        return "memory over an epoch: this system does not tell"
    return f"memory over an epoch, mapped files apart: {(after - before) / 2**20:+.1f} MiB"
