"""A comparison of two tiny networks, two seeds, and what it leaves when it is finished."""

from pathlib import Path

import pytest

from sitvit.compare.cells import cells_of
from sitvit.compare.settings import ComparisonConfig
from sitvit.compare.work import work_through
from sitvit.config import load_config

RUN = """
run: unused
model: {{name: SiT-S/2, hidden_size: 32, depth: 2, num_heads: 2}}
data: {{latents: {latents}}}
train: {{num_steps: 4, batch_size: 8, lr: 1e-3, ema_decays: [0.9], log_every: 1}}
"""
COMPARISON = """
out: {out}
arms: [vanilla {base}, vit5 {base} model.name=SiT-ViT5-S/2]
seeds: [0, 1]
steps: [2, 4]
cfg_scales: [1.0, 2.0]
grid_images: 4
evaluation: [num_images=16, "labels=[balanced]", num_steps=2, "metrics=[fid,spread]", resamples=2,
             reference={latents}]
"""


def write(folder: Path, latents: Path, out: str = "out") -> Path:
    base = folder / "base.yaml"
    base.write_text(RUN.format(latents=latents))
    path = folder / f"{out}.yaml"
    path.write_text(COMPARISON.format(out=folder / out, base=base, latents=latents))
    return path


def read(path: Path, *overrides: str) -> ComparisonConfig:
    return load_config(path, list(overrides), ComparisonConfig)


@pytest.fixture(scope="session")
def finished(cache_folder, tmp_path_factory) -> ComparisonConfig:
    comparison = read(write(tmp_path_factory.mktemp("compare"), cache_folder))
    assert work_through(cells_of(comparison)) == []
    return comparison
