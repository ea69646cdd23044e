"""The comparisons that ship: each is legal, and its header states its cost as geometry has it."""

import os
from pathlib import Path

import pytest

from sitvit.compare.budget import budget
from sitvit.compare.cells import cells_of
from sitvit.compare.settings import ComparisonConfig
from sitvit.config import load_config

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "configs/compare").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_headers_state_what_paper_command_and_the_cost_of_the_geometry(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    assert all(f"# {word}:" in text for word in ("What", "Paper", "Command", "Cost"))
    assert f"--config configs/compare/{path.name}" in text
    comparison = load_config(path, [], ComparisonConfig)
    found = budget(cells_of(comparison))
    if path.stem != "demo":  # whose cost is of a CPU
        assert f"{found.gpu_hours:,.0f} H100-hours" in text
    assert f"{found.disk_bytes / 1e9:,.0f} GB" in text
    assert os.path.commonpath([comparison.out, "runs"]) == "runs"
