"""What the bench of evaluation tells, and when."""

import pytest

from sitvit.bench import eval as bench
from sitvit.cli import bench as verb


def test_each_figure_is_printed_before_the_next_is_measured(monkeypatch, capsys):
    def power_cut(*sizes):
        raise ValueError("the power is gone")

    monkeypatch.setattr(bench, "_frechet", power_cut)
    with pytest.raises(ValueError, match="power"):
        verb(["eval", "--features", "8", "--samples", "20", "--reference", "12"])
    assert "precision and recall, 12 x 20: " in capsys.readouterr().out
