"""The fixed tables of positions and rotations are there wherever and however a model was made."""

import pytest
import torch

import sitvit
from sitvit.models import positions

from .test_sit import randomized
from .test_vit5 import randomized as random_classifier

SIZES = {"hidden_size": 32, "depth": 1, "num_heads": 2, "num_classes": 5, "input_size": (4, 8), "rope": True}


def network(kind):
    if kind == "ViT5":
        return random_classifier(img_size=(32, 48)), (torch.randn(2, 3, 32, 48),)
    model = randomized() if kind == "SiT" else sitvit.DiT(**SIZES, num_registers=4, learn_sigma=True)
    with torch.no_grad():
        for parameter in model.final_layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model, (torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([0, 5]))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("kind", ["SiT", "DiT", "ViT5"])
def test_a_model_made_empty_and_filled_is_the_model(kind, assign):
    """On the meta device first, as tools for large models do; the tables are in no file."""
    model, inputs = network(kind)
    with torch.device("meta"):
        empty = type(model)(**{k: v for k, v in model.config.items() if not k.startswith("_")})
    empty = empty if assign else empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(empty(*inputs), model(*inputs))


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("kind", ["SiT", "DiT", "ViT5"])
def test_a_saved_model_comes_back_with_its_tables(tmp_path, kind, low_cpu_mem_usage):
    model, inputs = network(kind)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(again(*inputs), model(*inputs))


@pytest.mark.parametrize("kind", ["SiT", "ViT5"])
def test_the_rotation_of_another_grid_is_computed_once(kind, monkeypatch):
    model, inputs = network(kind)
    larger = (torch.cat([inputs[0], inputs[0]], dim=2), *inputs[1:])
    calls = []
    whole = positions.rotation_table
    monkeypatch.setattr(positions, "rotation_table", lambda angles: calls.append(1) or whole(angles))
    first = model(*larger)
    assert torch.equal(model(*larger), first)
    model(*inputs)
    model(*larger)
    assert len(calls) == 1


def test_a_table_kept_in_inference_mode_serves_training():
    model, (x, t, labels) = network("SiT")
    with torch.inference_mode():
        model(torch.cat([x, x], dim=2), t, labels)
    model(torch.cat([x, x], dim=2), t, labels).sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad.abs().max() > 0
