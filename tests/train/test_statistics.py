"""The statistics of a block are those of what it computes, and measuring them changes nothing."""

import pytest
import torch
from torch.nn import functional as F

from sitvit.models import layers
from sitvit.models.presets import preset
from sitvit.models.sit import SiT
from sitvit.train.checkpoint import latest_checkpoint
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics
from sitvit.train.statistics import Statistics, block_statistics

INPUTS = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.rand(3), torch.arange(3)


def network(name="SiT-ViT5-S/2"):
    sizes = {"hidden_size": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = SiT(input_size=8, **{**preset(name), **sizes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ["SiT-S/2", "SiT-ViT5-S/2"])
def test_the_logit_maximum_is_of_the_queries_and_keys_that_attention_takes(monkeypatch, name):
    model, seen = network(name), []

    def attention(q, k, v):
        seen.append((q @ k.transpose(-2, -1)).abs().max().item() / q.shape[-1] ** 0.5)
        return original(q, k, v)

    original = F.scaled_dot_product_attention
    monkeypatch.setattr(layers.F, "scaled_dot_product_attention", attention)
    found = block_statistics(model, lambda: model(*INPUTS))
    assert [found["logit_max_00"], found["logit_max_01"]] == pytest.approx(seen, rel=1e-5)


def test_gates_and_gammas_are_the_mean_magnitudes_of_what_was_set():
    model = network()
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.gamma_1.fill_(-1.0)
            block.gamma_2.fill_(3.0 + number)
            last = block.adaLN_modulation[-1]
            last.weight.zero_()
            shifts_scales_gates = [9.0, 9.0, 0.5, 9.0, 9.0, -1.5]
            last.bias.copy_(torch.tensor(shifts_scales_gates).repeat_interleave(32))
    found = block_statistics(model, lambda: model(*INPUTS))
    assert [found["gamma_00"], found["gamma_01"]] == [2.0, 2.5]
    assert [found["gate_00"], found["gate_01"]] == [1.0, 1.0]


def test_a_network_without_layer_scale_has_no_gammas():
    model = network("SiT-S/2")
    found = block_statistics(model, lambda: model(*INPUTS))
    assert sorted(found) == ["gate_00", "gate_01", "logit_max_00", "logit_max_01"]


def test_a_run_whose_blocks_are_watched_is_the_run_without_to_the_bit(tiny_config, tmp_path):
    train(tiny_config("plain"))
    train(tiny_config("watched", "train.statistics_every=4"), hooks=[Statistics()])
    plain, watched = (latest_checkpoint(tmp_path / name) for name in ("plain", "watched"))
    for name in plain.networks:
        assert plain.weights_sha256(name) == watched.weights_sha256(name)
    rows = read_metrics(tmp_path / "watched")
    assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(tmp_path / "plain")]
    assert [row["step"] for row in rows if row.get("gamma_01", 0) > 0 < row["logit_max_01"]] == [4]
