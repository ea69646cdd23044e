"""Small real things that many tests need: 64 embedded images, an autoencoder, a cache, a config."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from sitvit.config import Config, load_config
from sitvit.data.autoencoder import Autoencoder
from sitvit.data.demo import FashionMnist, embedded_fashion
from sitvit.data.encode import encode
from sitvit.data.latents import LatentCache

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"


class FirstImages:
    """The first `count` images of a source."""

    def __init__(self, source: FashionMnist, count: int) -> None:
        self.source, self.count = source, count
        self.class_names, self.labels = source.class_names, source.labels[:count]
        self.notices: list[str] = []

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return self.source.name(index)

    def read(self, index: int) -> np.ndarray:
        return self.source.read(index)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()} first {self.count}"


@pytest.fixture(scope="session")
def images() -> FirstImages:
    return FirstImages(embedded_fashion(), 64)


@pytest.fixture(scope="session")
def autoencoder() -> Autoencoder:
    return Autoencoder("fashion-autoencoder", "cpu")


@pytest.fixture(scope="session")
def cache_folder(images, autoencoder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("latents") / "cache"
    encode(images, "fashion-mnist", autoencoder, 32, folder, batch_size=16, flip=True)
    return folder


@pytest.fixture(scope="session")
def cache(cache_folder) -> LatentCache:
    return LatentCache(cache_folder)


TINY = """
run: {run}
model: {{name: {name}, hidden_size: 32, depth: 2, num_heads: 2}}
data: {{latents: {latents}, flip: true}}
train: {{num_steps: 6, batch_size: 8, lr: 1e-3, warmup_steps: 2, decay_steps: 2, ema_decays: [0.9],
         log_every: 2, save_every: 3}}
"""


@pytest.fixture
def tiny_config(cache_folder, tmp_path) -> Callable[..., Config]:
    """config(run_name, *overrides, name=preset): a network of two blocks, trained for six steps."""

    def make(run: str, *overrides: str, name: str = "SiT-ViT5-S/2") -> Config:
        path = tmp_path / f"{run}.yaml"
        path.write_text(TINY.format(run=tmp_path / run, name=name, latents=cache_folder))
        return load_config(path, list(overrides), Config)

    return make


@pytest.fixture(scope="session")
def trained_run(cache_folder, tmp_path_factory) -> Path:
    """A finished run of the tiny network, and its checkpoints."""
    from sitvit.train.loop import train

    folder = tmp_path_factory.mktemp("trained")
    path = folder / "config.yaml"
    path.write_text(TINY.format(run=folder / "run", name="SiT-ViT5-S/2", latents=cache_folder))
    train(load_config(path, ["train.lr=1e-2"], Config))
    return folder / "run"


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def run_script(
    script: str, *arguments: object, cwd: Path, launcher: tuple[str, ...] = (), timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME.py as a person would; returns what it printed and its exit status."""
    command = [sys.executable, *launcher, str(ROOT / "scripts" / f"{script}.py"), *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"  # as torchrun sets it: matrix kernels round by thread count
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
