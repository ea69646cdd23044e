"""Fine-tuning: label rows by name, another grid, frozen parameters."""

import pytest
import torch

from sitvit.models.presets import preset
from sitvit.models.sit import SiT
from sitvit.train.checkpoint import find_checkpoint
from sitvit.train.finetune import LABELS, freeze, start_from
from sitvit.train.loop import train

SMALL = {**preset("SiT-ViT5-S/2"), "hidden_size": 32, "depth": 2, "num_heads": 2}


def test_label_rows_go_to_their_class_by_name_and_the_rest_stay_fresh(trained_run, capsys):
    source = find_checkpoint(str(trained_run))
    average = source.load_network("ema_0.9").state_dict()
    names = ["Bag", "a new one", source.class_names[0]]
    model = SiT(**SMALL, input_size=8, num_classes=3)
    fresh = model.state_dict()[LABELS].clone()
    start_from(model, trained_run, names)
    rows, given = model.state_dict()[LABELS], average[LABELS]
    assert torch.equal(rows[0], given[source.class_names.index("Bag")])
    assert torch.equal(rows[1], fresh[1])
    assert torch.equal(rows[2], given[0])
    assert torch.equal(rows[3], given[10])  # null to null
    others = [name for name in average if name != LABELS]
    assert all(torch.equal(model.state_dict()[name], average[name]) for name in others)
    assert "2 of 3 classes have their label rows, by name" in capsys.readouterr().out


def test_of_several_averages_the_one_that_is_named_is_taken_with_its_classes(tiny_config, tmp_path, capsys):
    train(tiny_config("run", "train.ema_decays=[0.9,0.5]"))
    source, model = find_checkpoint(str(tmp_path / "run")), SiT(**SMALL, input_size=8, num_classes=1)
    with pytest.raises(ValueError, match=r"name one: .*step_0000006/ema_0\.5, .*step_0000006/ema_0\.9"):
        start_from(model, tmp_path / "run", ["Bag"])
    for name in ("model", "ema_0.5"):
        start_from(model, source.folder / name, ["Bag"])
        rows, given = (each.state_dict()[LABELS] for each in (model, source.load_network(name)))
        assert torch.equal(rows[0], given[source.class_names.index("Bag")])
        assert f"{source.folder / name}: 1 of 1 classes" in capsys.readouterr().out


@pytest.mark.parametrize("positions", ["sincos", "learned"])
def test_another_grid_runs_the_same_weights_as_the_source_does_there(tmp_path, positions):
    source = SiT(**SMALL, positions=positions, input_size=8, num_classes=3)
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    source.save_pretrained(tmp_path / "source")
    model = SiT(**SMALL, positions=positions, input_size=16, num_classes=3)
    start_from(model, tmp_path / "source", ["a", "b", "c"])
    x, t, labels = torch.randn(2, 4, 16, 16), torch.rand(2), torch.tensor([0, 3])
    if positions == "sincos":  # the source rescales RoPE's coordinates, the new grid has its own
        source.rotation = model.rotation
    else:
        source.rotation = model.rotation = None
    torch.testing.assert_close(model(x, t, labels), source(x, t, labels), atol=1e-5, rtol=1e-5)


def test_another_architecture_and_unnamed_classes_are_refused_by_name(tmp_path):
    SiT(**SMALL, input_size=8, num_classes=3).save_pretrained(tmp_path / "source")
    deeper = SiT(**{**SMALL, "depth": 3}, input_size=8, num_classes=3)
    with pytest.raises(ValueError, match=r"another architecture: blocks\.2\..* missing"):
        start_from(deeper, tmp_path / "source", ["a", "b", "c"])
    with pytest.raises(ValueError, match="3 classes without names, the model 2"):
        start_from(SiT(**SMALL, input_size=8, num_classes=2), tmp_path / "source", ["a", "b"])


def test_what_is_frozen_stays_and_the_rest_trains(tiny_config, tmp_path, trained_run):
    train(tiny_config("run", f"train.init_from={trained_run}", "train.freeze=[blocks.0.*,x_embedder.*]"))
    before = find_checkpoint(str(trained_run)).load_network("ema_0.9").state_dict()
    after = find_checkpoint(str(tmp_path / "run")).load_network("model").state_dict()
    frozen = {name for name in before if name.startswith(("blocks.0.", "x_embedder.", "pos_embed"))}
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(before["blocks.1.attn.qkv.weight"], after["blocks.1.attn.qkv.weight"])


def test_a_pattern_that_matches_nothing_and_freezing_all_are_refused():
    model = SiT(**SMALL, input_size=8, num_classes=3)
    with pytest.raises(ValueError, match=r"'block\.0\.\*' matches no parameter; there are"):
        freeze(model, ["block.0.*"])
    with pytest.raises(ValueError, match="leaves nothing to train"):
        freeze(model, ["*"])
