"""`--resume auto|none|PATH`: where a run goes on, and that nothing finished is in danger."""

import pytest

from sitvit.train.checkpoint import latest_checkpoint, step_folders
from sitvit.train.loop import train


def test_none_starts_a_new_run_and_never_over_an_old_one(tiny_config, tmp_path):
    train(tiny_config("run"), resume="none")
    with pytest.raises(ValueError, match="run has checkpoints up to step_0000006"):
        train(tiny_config("run"), resume="none")
    assert latest_checkpoint(tmp_path / "run", verify=True).step == 6


def test_a_named_checkpoint_is_continued_in_a_run_of_its_own(tiny_config, tmp_path):
    train(tiny_config("run"))
    third = tmp_path / "run" / "checkpoints" / "step_0000003"
    with pytest.raises(ValueError, match="step_0000006, which going on from .*step_0000003 would mix"):
        train(tiny_config("run"), resume=str(third))
    train(tiny_config("branch"), resume=str(third))
    assert [path.name for path in step_folders(tmp_path / "branch")] == ["step_0000006"]
    ours, theirs = (latest_checkpoint(tmp_path / name) for name in ("run", "branch"))
    assert ours.weights_sha256("model") == theirs.weights_sha256("model")
    with pytest.raises(ValueError, match="no checkpoint folder|neither a run"):
        train(tiny_config("other"), resume=str(tmp_path / "nowhere"))
