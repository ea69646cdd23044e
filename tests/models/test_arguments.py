"""Constructor arguments of a wrong type are one sentence, with the argument's name and value."""

import json
import re

import numpy as np
import pytest
import torch

import sitvit

SIT = {"input_size": 8, "hidden_size": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
VIT5 = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
SIZES = ["8", 8.0, (8,), (8, 8, 8), (8, 8.0), None, True]
COUNTS = [2.5, "6", True, None, torch.tensor(2), [2]]


def wrong_arguments():
    for network, own in ((sitvit.SiT, SIT), (sitvit.DiT, SIT), (sitvit.ViT5, VIT5)):
        size, width = list(own)[:2]
        for value in SIZES:
            yield network, own, size, value
        for key in (width, "depth", "num_heads", "num_classes", "patch_size", "in_channels", "num_registers"):
            for value in COUNTS:
                yield network, own, key, value
        for key in ("rope", "qk_norm", "qkv_bias"):
            for value in (1, "true", None):
                yield network, own, key, value
        for key in ("mlp_ratio", "layer_scale_init"):
            for value in ("4", True, [4.0]):
                yield network, own, key, value
        yield network, own, "mlp", 3


@pytest.mark.parametrize(("network", "own", "key", "value"), wrong_arguments())
def test_an_argument_of_a_wrong_type_is_named_with_its_value(network, own, key, value):
    with pytest.raises(ValueError, match=f"^{key} must be of type .*, got {re.escape(repr(value))}$"):
        network(**{**own, key: value})


@pytest.mark.parametrize(
    ("network", "own", "wrong", "words"),
    [
        (sitvit.SiT, SIT, {"layer_scale_init": float("nan")}, "layer_scale_init must be above 0 and finite"),
        (sitvit.DiT, SIT, {"layer_scale_init": -1e-4}, "layer_scale_init must be above 0 and finite"),
        (sitvit.ViT5, VIT5, {"layer_scale_init": float("inf")}, "layer_scale_init must be above 0"),
        (sitvit.ViT5, VIT5, {"rope_theta": 0}, "rope_theta must be above 0 and finite, got 0"),
        (sitvit.ViT5, VIT5, {"num_classes": -1}, "num_classes must be at least 0, got -1"),
        (sitvit.ViT5, VIT5, {"depth": 0}, "depth must be at least 1, got 0"),
        (sitvit.SiT, SIT, {"class_dropout_prob": float("nan")}, "class_dropout_prob must be from 0"),
        (sitvit.SiT, SIT, {"mlp_ratio": 0.01}, "mlp_ratio must give the MLP a hidden width"),
    ],
)
def test_a_value_out_of_range_is_named(network, own, wrong, words):
    with pytest.raises(ValueError, match=words):
        network(**{**own, **wrong})


@pytest.mark.parametrize(("network", "own"), [(sitvit.SiT, SIT), (sitvit.DiT, SIT), (sitvit.ViT5, VIT5)])
def test_numpys_numbers_and_lists_are_fine_and_can_be_saved(tmp_path, network, own):
    size = next(iter(own))
    numpys = {key: np.int64(value) for key, value in own.items()} | {"mlp_ratio": np.float32(2)}
    model = network(**{**numpys, size: [np.int32(own[size]), np.int32(own[size])]})
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert {key: saved[key] for key in own if key != size} == {k: v for k, v in own.items() if k != size}
    assert saved[size] == [own[size]] * 2
    again = network.from_pretrained(tmp_path)
    assert again.state_dict().keys() == model.state_dict().keys()
