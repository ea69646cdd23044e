"""Averages: the power function is what its profile says, and any length is made of two after training."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from sitvit import runtime
from sitvit.train.checkpoint import WEIGHTS, find_checkpoint, load_checkpoint
from sitvit.train.ema import Ema, averages, constant_decay, exponent, power_decay
from sitvit.train.loop import train
from sitvit.train.reconstruct import coefficients, inner_product, reconstruct, snapshots

WIDTHS = "train.ema_widths=[0.05,0.1]"


@pytest.mark.parametrize(("width", "gamma"), [(0.05, 16.97), (0.10, 6.94)])
def test_the_exponents_of_the_published_widths(width, gamma):
    """EDM2 (arXiv 2312.02696, section 3.1) gives these two."""
    assert exponent(width) == pytest.approx(gamma, abs=0.005)


@pytest.mark.parametrize("width", [0.01, 0.075, 0.28])
def test_an_exponent_has_the_width_that_was_asked_for(width):
    """The standard deviation of the density (g + 1) x^g on [0, 1], from its moments."""
    g = exponent(width)
    mean, square = (g + 1) / (g + 2), (g + 1) / (g + 3)
    assert math.sqrt(square - mean**2) == pytest.approx(width, rel=1e-9)


def test_a_step_counts_with_the_profiles_integral_over_it():
    gamma, steps = exponent(0.1), 50
    module = torch.nn.Linear(1, steps, bias=False)
    ema = Ema(module, power_decay(gamma))
    for step in range(1, steps + 1):  # the weights of step s are the s-th unit vector
        ema.update({"weight": torch.eye(steps)[step - 1][:, None]}, step)
    s = np.arange(1, steps + 1)
    expected = (s ** (gamma + 1) - (s - 1.0) ** (gamma + 1)) / steps ** (gamma + 1)
    assert ema.state["weight"][:, 0].numpy() == pytest.approx(expected, abs=1e-6)


def test_inner_products_are_those_of_numerical_integration():
    (a, s), (b, t) = (6.94, 300), (16.97, 700)
    x = (np.arange(700_000) + 0.5) / 1000
    p = np.where(x <= s, (a + 1) * x**a / s ** (a + 1), 0)
    q = (b + 1) * (x / t) ** b / t
    assert inner_product((a, s), (b, t)) == pytest.approx((p * q).sum() / 1000, rel=1e-5)
    assert inner_product((a, s), (b, t)) == inner_product((b, t), (a, s))


@pytest.mark.parametrize("width", [0.06, 0.08, 0.15])
def test_a_reconstructed_average_is_the_one_that_was_kept_all_along(width):
    """On a smooth trajectory with noise; 20 snapshots of two widths, as EDM2 stores them."""
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 1, bias=False)
    kept = averages(module, [], [0.05, 0.1, width])
    target, steps, every = torch.randn(1, 64), 2000, 100
    stored, known = [], []
    for step in range(1, steps + 1):
        weights = {"weight": target * (1 - math.exp(-step / 500)) + 0.1 * torch.randn(1, 64)}
        for average in kept.values():
            average.update(weights, step)
        if step % every == 0:
            for source in (0.05, 0.1):
                stored.append(kept[f"power_{source}"].state["weight"].double().clone())
                known.append((exponent(source), step))
    x, error = coefficients(known, (exponent(width), steps))
    made = sum(weight * average for weight, average in zip(x.tolist(), stored, strict=True))
    direct = kept[f"power_{width}"].state["weight"].double()
    distance = (made - direct).norm() / direct.norm()
    nearest = min((stored[-i] - direct).norm() / direct.norm() for i in (1, 2))
    assert error < 0.02
    assert distance < 2e-3
    assert distance < 0.2 * nearest


def test_a_run_with_several_averages_is_exact_to_continue_and_its_snapshots_make_another(
    tiny_config, tmp_path, capsys
):
    settings = (WIDTHS, "train.ema_decays=[0.9,0.99]", "train.snapshot_every=2", "train.num_steps=12")
    train(tiny_config("whole", *settings))
    with pytest.raises(runtime.Stopped, match="stopped after step 2"):
        train(tiny_config("cut", *settings), max_seconds=1e-9)
    train(tiny_config("cut", *settings))
    whole, cut = (find_checkpoint(str(tmp_path / run)) for run in ("whole", "cut"))
    assert whole.networks == ["ema_0.9", "ema_0.99", "model", "power_0.05", "power_0.1"] == cut.networks
    for name in [*(f"{n}/{WEIGHTS}" for n in whole.networks), "optimizer.safetensors"]:
        a, b = whole.tensors(name), cut.tensors(name)
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert [snapshot.step for snapshot in snapshots(tmp_path / "cut")] == [2, 4, 6, 8, 10, 12]

    made = reconstruct(tmp_path / "whole", 0.075, None, None)
    assert "12 snapshots" in capsys.readouterr().out
    folder = tmp_path / "whole" / "power_0.075_12"
    assert made == folder / "checkpoints" / "step_0000012"
    record = json.loads((made / "checkpoint.json").read_text())
    assert record["class_names"] == whole.class_names
    network = load_checkpoint(folder)
    between = [whole.tensors(f"power_{w}/{WEIGHTS}")["pos_embed"] for w in (0.05, 0.1)]
    assert torch.allclose(network.pos_embed, between[0], atol=1e-6)  # it never moves: the sum is one
    assert reconstruct(tmp_path / "whole", 0.05, 6, tmp_path / "same").is_dir()
    assert "6 snapshots" in capsys.readouterr().out  # those after the step are no part of it
    same = find_checkpoint(str(tmp_path / "same")).tensors(f"power_0.05/{WEIGHTS}")
    kept = snapshots(tmp_path / "whole")[2].tensors(f"power_0.05/{WEIGHTS}")
    assert all(torch.allclose(same[key], kept[key], atol=1e-6) for key in same)
    with pytest.raises(ValueError, match="is there already"):
        reconstruct(tmp_path / "whole", 0.075, None, None)
    with pytest.raises(ValueError, match="has no snapshot of step 7; it has 2, 4"):
        reconstruct(tmp_path / "whole", 0.075, 7, None)
    with pytest.raises(ValueError, match="above 0 and at most"):
        reconstruct(tmp_path / "whole", 0.5, None, None)


def test_a_run_without_snapshots_says_what_to_train_with(trained_run):
    with pytest.raises(ValueError, match=r"has no snapshots: train with train.ema_widths"):
        reconstruct(trained_run, 0.1, None, None)


def test_an_average_moves_where_half_precision_would_not():
    module = torch.nn.Linear(4, 4).bfloat16()
    ema = Ema(module, constant_decay(0.9999))
    start = ema.state["weight"].clone()
    for step in range(200):
        ema.update({name: tensor + 1 for name, tensor in module.state_dict().items()}, step + 1)
    expected = (1 - 0.9999**200) * (module.weight.detach() + 1 - module.weight.detach()).float()
    assert torch.allclose(ema.state["weight"] - start, expected, rtol=1e-2)


def test_an_average_follows_each_tensor_by_its_name():
    module = torch.nn.Linear(3, 3)
    ema = Ema(module, constant_decay(0.5))
    weights = {name: tensor + 1 for name, tensor in reversed(module.state_dict().items())}
    ema.update(weights, 1)
    assert all(torch.allclose(ema.state[name], tensor - 0.5) for name, tensor in weights.items())


def test_the_last_step_has_a_snapshot_and_those_past_a_resumed_step_are_removed(tiny_config, tmp_path):
    settings = (WIDTHS, "train.snapshot_every=2", "train.num_steps=5", "train.save_every=3")
    train(tiny_config("run", *settings))
    assert [snapshot.step for snapshot in snapshots(tmp_path / "run")] == [2, 4, 5]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_0000005")
    seen = []
    hook = lambda trainer, row: seen.append([s.step for s in snapshots(tmp_path / "run")])  # noqa: E731
    train(tiny_config("run", *settings), hooks=[hook])
    assert seen[0] == [2]
    assert [snapshot.step for snapshot in snapshots(tmp_path / "run")] == [2, 4, 5]
