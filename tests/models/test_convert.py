"""Weights from elsewhere load safely and strictly, or are refused with the reason."""

import argparse
import json
import os
import pickle
import re

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import sitvit
from sitvit import cli, load_checkpoint
from sitvit.models.convert import init_from, official_state, save_official
from sitvit.models.weights import load_strictly, read_file, unwrapped
from sitvit.train.checkpoint import Checkpoint, find_checkpoint

from ..conftest import run_script
from .golden import Golden, assert_equal
from .test_sit import randomized
from .test_vit5 import randomized as random_classifier

SIT = Golden("sit_model_0")  # learn_sigma, 4 heads at width 48
DIT = Golden("dit_model_0")
VIT5 = Golden("vit5_model_0")


def forward(golden, model):
    return model(golden["in/x"], golden["in/t"], golden["in/y"])


def save(tmp_path, content, name="SiT.pt"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def load(path, **options):
    return load_checkpoint(path, **{"num_heads": 4, **options})


@pytest.mark.parametrize("golden", [SIT, DIT], ids=["SiT", "DiT"])
def test_an_official_file_gives_the_official_outputs_with_nothing_asked_again(tmp_path, golden):
    """learn_sigma, patch, grid and class count are read off the file."""
    family = "DiT" if golden is DIT else "SiT"
    path = save(tmp_path, golden.under("state/"), f"{family}-XL-2-256x256.pt")
    model = load(path)
    assert type(model) is getattr(sitvit, family)
    assert not model.training
    assert_equal(forward(golden, model), golden["out/forward"])


def test_a_vit5_file_gives_the_released_logits(tmp_path):
    path = save(tmp_path, {"model": VIT5.under("state/")}, "vit5.pth")
    assert_equal(load_checkpoint(path)(VIT5["in/x"]), VIT5["out/logits"])


def test_a_file_of_the_vit_of_2020_gives_torchvisions_logits(tmp_path):
    """An independent implementation, with its own key names; every bias and position is non-zero."""
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32}
    theirs = VisionTransformer(**sizes, mlp_dim=128, num_classes=5).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    names = {
        "class_token": "cls_token",
        "conv_proj.": "patch_embed.proj.",
        "encoder.pos_embedding": "pos_embed",
        "encoder.ln.": "norm.",
        "encoder.layers.encoder_layer_": "blocks.",
        "heads.head.": "head.",
        "ln_": "norm",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj.": "attn.proj.",
        "mlp.0.": "mlp.fc1.",
        "mlp.3.": "mlp.fc2.",
    }
    state = theirs.state_dict()
    for name, ours in names.items():
        state = {key.replace(name, ours): tensor for key, tensor in state.items()}
    model = load_checkpoint(save(tmp_path, state, "vit.pth"), num_heads=2)
    images = torch.randn(2, 3, 32, 32)
    assert_equal(model(images), theirs(images))


@pytest.mark.parametrize("name", ["SiT.pt", "SiT-XL-2-256x256.pt", "DiT-S-4.safetensors"])
def test_a_published_name_tells_the_family_and_that_is_said(tmp_path, name, capsys):
    state = SIT.under("state/")
    path = tmp_path / name
    save_file(state, path) if name.endswith(".safetensors") else torch.save(state, path)
    assert type(load(path)).__name__ == name[:3]
    assert f"(a {name[:3]} by the file's name)" in capsys.readouterr().out
    load(path, family=name[:3])
    assert "by the file's name" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["sitting_room.pt", "SiTuation.pt", "ditto.pt", "my-SiT-XL-2.pt", "sit"])
def test_a_name_that_only_sounds_like_a_familys_tells_nothing(tmp_path, name):
    path = save(tmp_path, SIT.under("state/"), name)
    with pytest.raises(ValueError, match="say which with family SiT or DiT"):
        load(path)


@pytest.mark.parametrize("family", [None, "SiT", "DiT"])
def test_official_keys_do_not_tell_sit_from_dit_so_it_is_asked(tmp_path, family):
    path = save(tmp_path, SIT.under("state/"), "weights.pt")
    if family is None:
        with pytest.raises(ValueError, match="say which with family SiT or DiT"):
            load(path)
    else:
        assert type(load(path, family=family)).__name__ == family


def test_ema_and_raw_weights_are_chosen_and_said(tmp_path, capsys):
    raw = SIT.under("state/")
    ema = {key: 0.5 * value for key, value in raw.items()}
    ema["pos_embed"] = raw["pos_embed"]
    both = {"model": raw, "ema": ema, "opt": {"lr": 1}, "args": argparse.Namespace(model="SiT-XL/2")}
    path = save(tmp_path, both)
    assert torch.equal(load(path).state_dict()["x_embedder.proj.bias"], ema["x_embedder.proj.bias"])
    assert "'ema' of SiT.pt" in capsys.readouterr().out
    other = load(path, weights="model").state_dict()["x_embedder.proj.bias"]
    assert torch.equal(other, raw["x_embedder.proj.bias"])
    with pytest.raises(ValueError, match="has no ema weights; it has model"):
        load(save(tmp_path, {"model": raw}), weights="ema")
    load(save(tmp_path, {"model": raw}))
    assert "'model' of SiT.pt" in capsys.readouterr().out


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_one_set_of_weights_is_not_passed_off_as_the_one_that_was_asked_for(tmp_path, weights):
    file = save(tmp_path, SIT.under("state/"))
    randomized().save_pretrained(tmp_path / "folder")
    for path in (file, tmp_path / "folder"):
        with pytest.raises(ValueError, match=f"{path} holds one set of weights .*; leave weights"):
            load(path, weights=weights)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_prefixes_of_wrappers_change_nothing(tmp_path, prefix, suffix):
    state = {prefix + key: value for key, value in SIT.under("state/").items()}
    path = tmp_path / f"SiT{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    assert_equal(forward(SIT, load(path)), SIT["out/forward"])
    assert unwrapped(prefix + "a.module.b") == "a.module.b"


def without(key):
    return {k: v for k, v in SIT.under("state/").items() if k != key}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (without("blocks.1.mlp.fc1.weight"), "blocks.1.mlp.fc1.weight is missing"),
        ({**SIT.under("state/"), "extra.weight": torch.zeros(1)}, "extra.weight is unexpected"),
        (
            {**SIT.under("state/"), "blocks.1.mlp.fc1.bias": torch.zeros(7)},
            r"blocks.1.mlp.fc1.bias is \(7,\) in the file and \(192,\) in the model",
        ),
        ({**SIT.under("state/"), "blocks.99999.x": torch.zeros(1)}, r"has blocks.99999. but no blocks.\d\."),
        (
            {**SIT.under("state/"), "x_embedder.proj.weight": torch.ones(3)},
            r"x_embedder.proj.weight has the shape \(3,\); 4 dimensions",
        ),
        ({**SIT.under("state/"), "blocks.0.mlp.fc1.weight": torch.ones(())}, r"has the shape \(\)"),
        ({k: v for k, v in SIT.under("state/").items() if "blocks" not in k}, "there is no block in it"),
        ({}, "holds no tensors"),
        ({"a": torch.zeros(1)}, "no network known here; its first keys are a"),
        ([1, 2], "holds a list"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_keys(tmp_path, state, words):
    with pytest.raises(ValueError, match=words) as caught:
        load(save(tmp_path, state))
    assert "SiT.pt" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"learn_sigma": False}, "learn_sigma"),
        ({"input_size": 16}, "input_size"),
        ({"num_classes": 33}, "num_classes"),
    ],
)
def test_a_mismatch_names_both_shapes_and_the_option_to_change(tmp_path, changed, words):
    model = sitvit.SiT(**{**SIT.config, **changed})
    with pytest.raises(ValueError, match=words):
        load_strictly(model, SIT.under("state/"), tmp_path / "SiT.pt")


def test_a_plain_file_is_refused_for_a_vit5_backbone_in_a_plain_sentence(tmp_path):
    model = randomized(input_size=8)
    with pytest.raises(ValueError, match=r"does not fit a SiT: .*is missing"):
        load_strictly(model, SIT.under("state/"), tmp_path / "SiT.pt")


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    marker = tmp_path / "marker"
    for name, content in (("SiT.pt", {"model": Hostile(marker)}), ("DiT.pt", Hostile(marker))):
        with pytest.raises(ValueError, match=re.escape(name)) as caught:
            load(save(tmp_path, content, name))
        assert "could run code" in str(caught.value)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": Hostile(marker)}))
    with pytest.raises(ValueError, match="plain.pt"):
        load(tmp_path / "plain.pt")
    assert not marker.exists()


def test_a_file_with_a_configuration_object_says_what_it_holds(tmp_path):
    content = {"model": SIT.under("state/"), "config": OmegaConf.create([1, 2])}
    with pytest.raises(ValueError, match=r"it holds omegaconf\S+"):
        load(save(tmp_path, content))


@pytest.mark.parametrize("name", ["SiT.pt", "SiT.safetensors"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=re.escape(name)):
        load(tmp_path / name)
    with pytest.raises(ValueError, match="no file or model folder"):
        load(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("name", ["SiT.pt", "SiT.safetensors"])
def test_a_pointer_of_git_lfs_is_told_from_weights(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS.*git lfs pull"):
        load(tmp_path / name)


def test_safetensors_by_another_name_are_read_as_what_they_are(tmp_path):
    state = SIT.under("state/")
    save_file(state, tmp_path / "SiT.pt")
    assert read_file(tmp_path / "SiT.pt").keys() == state.keys()


def test_heads_that_cannot_be_read_off_are_asked_for(tmp_path):
    with pytest.raises(ValueError, match="heads at width 48 cannot be read off; give num_heads"):
        load_checkpoint(save(tmp_path, SIT.under("state/")))


def test_a_rectangular_grid_is_read_off_fixed_positions_and_asked_for_with_learned_ones(tmp_path):
    model = sitvit.SiT(**{**SIT.config, "input_size": (4, 8)})
    again = load(save(tmp_path, model.state_dict()))  # its fixed table tells the grid
    assert (again.height, again.width) == (4, 8)
    square = sitvit.SiT(**{**SIT.config, "input_size": (4, 16)})
    again = load(save(tmp_path, square.state_dict()))
    assert (again.height, again.width) == (4, 16)
    learned = sitvit.SiT(**{**SIT.config, "input_size": (4, 8), "positions": "learned"})
    path = save(tmp_path, learned.state_dict())
    with pytest.raises(ValueError, match="8 positions are no square grid; give input_size"):
        load(path)
    again = load(path, input_size=(4, 8))
    assert (again.height, again.width) == (4, 8)


def test_a_mix_of_backbones_is_not_guessed(tmp_path):
    path = save(tmp_path, randomized(layer_scale_init=None, input_size=8).state_dict())
    with pytest.raises(ValueError, match=r"mix of vanilla and ViT-5 \(QK-norm, no qkv bias\)"):
        load(path)


@pytest.mark.parametrize("mlp", ["gelu_tanh", "swiglu"])
def test_sit_on_vit5_round_trips_through_a_bare_file(tmp_path, mlp):
    model = randomized(input_size=8, mlp=mlp).eval()
    again = load_checkpoint(save(tmp_path, model.state_dict()))
    x, t, labels = torch.randn(2, 4, 8, 8), torch.rand(2), torch.tensor([0, 5])
    assert torch.equal(model(x, t, labels), again(x, t, labels))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_export_to_the_official_layout_round_trips_bit_for_bit(tmp_path, suffix):
    for golden, name in ((SIT, "SiT"), (DIT, "DiT"), (VIT5, "ViT5")):
        model = getattr(sitvit, name)(**golden.config)
        model.load_state_dict(golden.under("state/"))
        save_official(model, tmp_path / f"{name}{suffix}", suffix)
        again = load(tmp_path / f"{name}{suffix}")
        found = official_state(again)
        assert found.keys() == golden.under("state/").keys()
        for key, expected in golden.under("state/").items():
            assert torch.equal(found[key], expected) or "freqs" in key
            assert (found[key] - expected).abs().max() < 1e-6


def their_dit():
    from diffusers import DiTTransformer2DModel

    theirs = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_eps=1e-6,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        # There one embedder a block; DiT has one for all, so equal ones are what a DiT can be.
        shared = theirs.transformer_blocks[0].norm1.emb.state_dict()
        for block in theirs.transformer_blocks:
            block.norm1.emb.load_state_dict(shared)
    return theirs


def test_a_diffusers_dit_folder_gives_our_dit(tmp_path):
    theirs = their_dit()
    theirs.save_pretrained(tmp_path / "dit")
    ours = load_checkpoint(tmp_path / "dit")
    assert isinstance(ours, sitvit.DiT)
    x, t, labels = torch.randn(3, 4, 8, 8), torch.tensor([0, 0, 0]), torch.tensor([1, 9, 10])
    assert_equal(ours(x, t, labels), theirs(x, timestep=t, class_labels=labels).sample)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_layers", 1, "does not have: transformer_blocks.1.attn1"),
        ("num_layers", "2", "num_layers must be of type int, got '2'"),
        ("sample_size", None, "sample_size must be of type int, got None"),
        ("sample_size", 9, "size"),
        ("activation_fn", "gelu", "activation_fn is 'gelu'; a DiT has 'gelu-approximate'"),
        ("norm_eps", 0.1, "norm_eps is 0.1"),
        ("norm_elementwise_affine", True, "norm_elementwise_affine is True; a DiT has False"),
        ("norm_type", "ada_norm", "norm_type is 'ada_norm'"),
        ("patch_size", 4, "patch_size is 4, but the tensors have 2"),
        ("attention_head_dim", 8, "attention_head_dim is 8, but the tensors have 16"),
        ("num_attention_heads", 4, "attention_head_dim is 16, but the tensors have 8"),
        ("num_attention_heads", 5, "multiple of num_heads|attention_head_dim"),
        ("num_embeds_ada_norm", 7, "num_embeds_ada_norm is 7, but the tensors have 10"),
    ],
)
def test_a_diffusers_config_that_is_not_the_tensors_dit_is_refused_by_field(tmp_path, field, value, words):
    their_dit().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ValueError, match=words) as caught:
        load_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("key", ["transformer_blocks.1.norm3.weight", "junk", "pos_embed.proj.extra"])
def test_a_tensor_that_diffusers_dit_does_not_have_is_refused_by_key(tmp_path, key):
    their_dit().save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(path), key: torch.ones(32)}, path)
    with pytest.raises(ValueError, match=f"a DiT of num_layers 2 does not have: {key}$"):
        load_checkpoint(tmp_path)


def test_the_spacing_of_the_frequencies_is_all_that_sets_diffusers_dit_apart_at_later_times(tmp_path, capsys):
    theirs = their_dit()
    theirs.save_pretrained(tmp_path / "dit")
    ours = load_checkpoint(tmp_path / "dit")
    assert "diffusers spaces its frequencies otherwise" in capsys.readouterr().out
    x, t, labels = torch.randn(3, 4, 8, 8), torch.tensor([999] * 3), torch.tensor([1, 9, 10])
    found = ours(x, t, labels)
    assert (found - theirs(x, timestep=t, class_labels=labels).sample).abs().max() > 1e-3
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    assert_equal(found, theirs(x, timestep=t, class_labels=labels).sample)


def test_the_folder_of_a_dit_pipeline_gives_its_transformer(tmp_path, capsys):
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline

    autoencoder = AutoencoderKL(block_out_channels=(32,), latent_channels=4)
    theirs = their_dit()
    DiTPipeline(theirs, autoencoder, DDIMScheduler()).save_pretrained(tmp_path / "pipeline")
    theirs.save_pretrained(tmp_path / "dit")
    ours = load_checkpoint(tmp_path / "pipeline")
    assert "the pipeline's transformer/" in capsys.readouterr().out
    state = load_checkpoint(tmp_path / "dit").state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in ours.state_dict().items())
    (tmp_path / "pipeline" / "transformer").rename(tmp_path / "pipeline" / "unet")
    with pytest.raises(ValueError, match=r"pipeline is a diffusers pipeline, .* it has no transformer/"):
        load_checkpoint(tmp_path / "pipeline")


def training_file(tmp_path, model_name, kind=argparse.Namespace, name="0050000.pt"):
    arguments = kind(model=model_name, image_size=256)
    state = SIT.under("state/")
    return save(tmp_path, {"model": state, "ema": state, "opt": {}, "args": arguments}, name)


@pytest.mark.parametrize("kind", [argparse.Namespace, dict])
@pytest.mark.parametrize("family", ["SiT", "DiT"])
def test_a_training_file_says_its_family_by_itself(tmp_path, family, kind):
    path = training_file(tmp_path, f"{family}-XL/2", kind)
    assert type(load(path)) is getattr(sitvit, family)
    assert type(load(path, family=family)) is getattr(sitvit, family)
    other = "DiT" if family == "SiT" else "SiT"
    with pytest.raises(ValueError, match=f"records a {family} .*, so family {other} cannot be"):
        load(path, family=other)
    misnamed = training_file(tmp_path, f"{family}-XL/2", kind, f"{other}.pt")
    assert type(load(misnamed)) is getattr(sitvit, family)


@pytest.mark.parametrize("name", ["UNet-XL/2", "SiTish", 7, None])
def test_a_training_file_of_another_record_asks_for_the_family(tmp_path, name):
    with pytest.raises(ValueError, match="say which with family SiT or DiT"):
        load(training_file(tmp_path, name))


def test_heads_taken_from_the_published_width_are_said(tmp_path, capsys):
    model = sitvit.SiT(input_size=4, hidden_size=384, depth=1, num_heads=6, num_classes=3)
    path = save(tmp_path, model.state_dict())
    load_checkpoint(path)
    said = "(6 heads, as the published model of width 384 has; num_heads, on the command line --num-heads,"
    assert capsys.readouterr().out.count(said) == 1
    assert load_checkpoint(path, num_heads=12).config["num_heads"] == 12
    assert " heads" not in capsys.readouterr().out
    load_checkpoint(save(tmp_path, randomized().state_dict()))  # QK-norm's weight tells
    assert " heads" not in capsys.readouterr().out


CONTRADICTIONS = [
    ("family", "DiT", "SiT", "records family SiT, so family DiT cannot be"),
    ("num_heads", 4, 2, "records num_heads 2, so num_heads 4 cannot be"),
    ("input_size", (8, 4), (4, 8), r"records input_size \(4, 8\), so input_size \(8, 4\) cannot be"),
]


@pytest.mark.parametrize(("argument", "wrong", "right", "words"), CONTRADICTIONS)
def test_a_folder_refuses_what_contradicts_its_record_and_accepts_what_equals_it(
    tmp_path, argument, wrong, right, words
):
    randomized().save_pretrained(tmp_path / "m")
    load_checkpoint(tmp_path / "m", **{argument: right})
    with pytest.raises(ValueError, match=f"m {words}"):
        load_checkpoint(tmp_path / "m", **{argument: wrong})


@pytest.mark.parametrize(
    ("argument", "wrong", "right"), [("family", "DiT", "SiT"), ("num_heads", 4, 2), ("input_size", 4, 8)]
)
def test_a_run_refuses_what_contradicts_its_record(trained_run, argument, wrong, right):
    load_checkpoint(trained_run, **{argument: right})
    with pytest.raises(ValueError, match=f"step_0000006 records {argument} .*, so {argument} .* cannot be"):
        load_checkpoint(trained_run, **{argument: wrong})


def test_a_file_refuses_what_contradicts_its_shapes(tmp_path):
    path = save(tmp_path, randomized().state_dict())  # QK-norm, and fixed positions of (4, 8)
    load_checkpoint(path, num_heads=2, input_size=(4, 8))
    with pytest.raises(ValueError, match=r"SiT.pt records num_heads 2, so num_heads 4 cannot be"):
        load_checkpoint(path, num_heads=4)
    with pytest.raises(ValueError, match=r"SiT.pt records input_size \(4, 8\)"):
        load_checkpoint(path, input_size=(8, 4))
    classifier = save(tmp_path, random_classifier(img_size=32).state_dict(), "vit5.pth")
    with pytest.raises(ValueError, match="records family ViT5, so family SiT cannot be"):
        load_checkpoint(classifier, family="SiT")
    learned = save(tmp_path, randomized(positions="learned").state_dict())
    with pytest.raises(ValueError, match="input_size width 9 is not a multiple of patch_size 2"):
        load_checkpoint(learned, input_size=(4, 9))
    with pytest.raises(ValueError, match=r"input_size must be of type .*, got \(4,\)"):
        load_checkpoint(learned, input_size=(4,))
    with pytest.raises(ValueError, match="family must be SiT or DiT, got 'sit'"):
        load_checkpoint(learned, family="sit")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_of_a_type_that_networks_do_not_have_are_refused_by_key(tmp_path, dtype, suffix):
    state = SIT.under("state/")
    state["blocks.1.mlp.fc1.bias"] = torch.ones(192).to(dtype)
    path = tmp_path / f"SiT{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    with pytest.raises(ValueError, match=rf"SiT{suffix}.*blocks.1.mlp.fc1.bias \({dtype}\)"):
        load(path)


def test_entries_that_are_no_tensors_are_refused_by_key(tmp_path):
    state = {**SIT.under("state/"), "epoch": 3, "x_embedder.proj.bias": [0.0] * 48}
    for content in (state, {"model": state}):
        with pytest.raises(ValueError, match=r"SiT.pt: .*x_embedder.proj.bias \(list\)") as caught:
            load(save(tmp_path, content))
        assert "epoch (int)" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_converted_and_that_is_said(tmp_path, dtype, capsys):
    state = {key: tensor.to(dtype) for key, tensor in SIT.under("state/").items()}
    model = load(save(tmp_path, state))
    assert f", {str(dtype)[6:]} converted to float32" in capsys.readouterr().out
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key].float())
    model.to(dtype).save_pretrained(tmp_path / "m")
    load_checkpoint(tmp_path / "m")
    assert f", {str(dtype)[6:]} converted to float32" in capsys.readouterr().out
    load(save(tmp_path, SIT.under("state/")))
    assert "converted" not in capsys.readouterr().out


def test_a_model_folder_and_a_run_load_alike(tmp_path, trained_run, capsys):
    network = load_checkpoint(trained_run)
    assert "ema_0.9" in capsys.readouterr().out
    network.save_pretrained(tmp_path / "m", max_shard_size="60KB")
    again = load_checkpoint(tmp_path / "m")
    x, t, labels = torch.randn(2, 4, 8, 8), torch.rand(2), torch.tensor([0, 10])
    assert torch.equal(network(x, t, labels), again(x, t, labels))
    raw = load_checkpoint(trained_run, weights="model")
    assert not torch.equal(network(x, t, labels), raw(x, t, labels))


def test_a_run_with_several_averages_asks_which_and_the_script_takes_the_name(tmp_path, trained_run):
    one = find_checkpoint(str(trained_run))
    files = one.record["files"] | {"ema_0.99/diffusion_pytorch_model.safetensors": {}}
    several = Checkpoint(one.folder, {**one.record, "files": files})
    with pytest.raises(ValueError, match="several averages; say which weights: ema_0.9, ema_0.99, model$"):
        several.weights_name("ema")
    cli.import_checkpoint([str(trained_run), str(tmp_path / "m"), "--weights", "ema_0.9"])
    expected, found = load_checkpoint(trained_run, "ema_0.9"), load_checkpoint(tmp_path / "m")
    assert all(torch.equal(t, found.state_dict()[key]) for key, t in expected.state_dict().items())


def test_blocks_start_from_a_classifier_and_the_rest_is_left(tmp_path):
    classifier = random_classifier(img_size=32)
    model = randomized(depth=4)
    taken, left, unused = init_from(model, classifier)
    assert set(taken) | set(unused) == set(classifier.state_dict())
    assert {"head.weight", "blocks.0.norm1.weight"} <= set(unused)
    assert set(taken) | set(left) == set(model.state_dict())
    assert not set(taken) & set(left)
    for name in taken:
        assert torch.equal(model.state_dict()[name], classifier.state_dict()[name])
    assert {"blocks.0.attn.qkv.weight", "blocks.2.gamma_1", "reg_token"} <= set(taken)
    assert {"blocks.3.attn.qkv.weight", "blocks.0.adaLN_modulation.1.weight", "pos_embed"} <= set(left)
    with pytest.raises(ValueError, match="the classifier is 32 wide, the model 64"):
        init_from(randomized(hidden_size=64), classifier)
    with pytest.raises(ValueError, match="the classifier has 2 heads, the model 4"):
        init_from(randomized(num_heads=4), classifier)


def test_blocks_start_from_nothing_but_a_classifier():
    model, classifier = randomized(), random_classifier(img_size=32)
    before = model.state_dict()["blocks.0.attn.qkv.weight"].clone()
    for wrong in (randomized(), classifier.state_dict(), None):
        with pytest.raises(ValueError, match=f"must be a sitvit.ViT5.*; got a {type(wrong).__name__}"):
            init_from(model, wrong)
    with pytest.raises(ValueError, match="the model of init_from must be a sitvit.SiT or DiT; got a ViT5"):
        init_from(classifier, model)
    assert torch.equal(model.state_dict()["blocks.0.attn.qkv.weight"], before)


def test_the_script_imports_and_exports(tmp_path):
    save(tmp_path, SIT.under("state/"), "official.pt")
    done = run_script(
        "import_checkpoint", "official.pt", "folder", "--family", "SiT", "--num-heads", 4, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "the only weights of official.pt" in done.stdout
    done = run_script("import_checkpoint", "folder", "back.pt", "--official", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert all(torch.equal(back[key], value) for key, value in SIT.under("state/").items())
    done = run_script("import_checkpoint", "folder", "back.pt", "--official", cwd=tmp_path)
    assert done.returncode == 2
    assert "back.pt is there already" in done.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"norm": "layernorm"}, "norm=layernorm"),
        ({"rope": False}, "rope=False"),
        ({"mlp": "gelu"}, "mlp=gelu"),
        ({"class_dropout_prob": 0}, "num_classes=5"),
    ],
)
def test_an_export_that_a_reader_would_misunderstand_is_refused(tmp_path, changed, words):
    model = randomized(input_size=8, **changed)
    with pytest.raises(ValueError, match=f"cannot say .*{words}"):
        save_official(model, tmp_path / "SiT.pt", ".pt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="cannot say pool=mean"):
        save_official(random_classifier(img_size=32, pool="mean"), tmp_path / "vit5.pt", ".pt")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden_size": 384, "num_heads": 12}, "num_heads=12"),  # the published width has 6
        ({"input_size": (4, 16), "positions": "learned"}, r"input_size=\(4, 16\)"),  # 16 positions: 4 x 4
    ],
)
def test_an_export_that_would_be_read_as_a_published_shape_is_refused(tmp_path, changed, words):
    model = sitvit.SiT(**{**SIT.config, "depth": 1, **changed})
    with pytest.raises(ValueError, match=f"cannot say {words}"):
        save_official(model, tmp_path / "SiT.pt", ".pt")
    assert not list(tmp_path.iterdir())


def test_an_export_whose_reader_asks_for_heads_and_size_is_written(tmp_path):
    learned = sitvit.SiT(**{**SIT.config, "input_size": (4, 8), "positions": "learned"})
    save_official(learned, tmp_path / "SiT.pt", ".pt")
    again = load(tmp_path / "SiT.pt", input_size=(4, 8)).state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in learned.state_dict().items())
    classifier = random_classifier(img_size=(16, 40))  # 10 positions are no 3 x 3 and a class position
    with pytest.raises(ValueError, match=r"cannot say img_size=\(16, 40\), class_position=False"):
        save_official(classifier, tmp_path / "vit5.pth", ".pth")


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    state = SIT.under("state/")
    twice = {**state, "module.x_embedder.proj.bias": torch.zeros(48)}
    with pytest.raises(ValueError, match="twice"):
        load(save(tmp_path, twice))


def test_prefixes_of_blocks_that_were_compiled_one_by_one_change_nothing(tmp_path):
    state = {
        key.replace("blocks.1.", "blocks.1._orig_mod."): value for key, value in SIT.under("state/").items()
    }
    assert_equal(forward(SIT, load(save(tmp_path, state))), SIT["out/forward"])


def test_files_beside_a_models_weights_are_not_read(tmp_path):
    model = randomized().eval()
    model.save_pretrained(tmp_path)
    save_file({k: v * 0 for k, v in official_state(model).items()}, tmp_path / "old.safetensors")
    again = load_checkpoint(tmp_path)
    assert torch.equal(again.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("key", ["final_layer.linear.weight", "y_embedder.embedding_table.weight"])
def test_a_missing_tensor_that_the_sizes_follow_from_is_named(tmp_path, key):
    with pytest.raises(ValueError, match=f"SiT.pt: {key} is missing"):
        load(save(tmp_path, without(key)))


def test_a_grid_first_seen_in_inference_mode_can_be_trained_on():
    model, x = randomized(), torch.randn(1, 4, 6, 8)
    with torch.inference_mode():
        model(x, torch.rand(1), torch.tensor([0]))
    model(x, torch.rand(1), torch.tensor([0])).square().mean().backward()


@pytest.mark.parametrize("key", ["pos_embed", "blocks.0.attn.qkv.bias", "x_embedder.proj.weight"])
def test_a_file_that_lacks_a_tensor_is_not_taken_for_another_network(tmp_path, key):
    path = save(tmp_path, {k: v for k, v in SIT.under("state/").items() if k != key})
    with pytest.raises(ValueError, match=f"{re.escape(key)} is missing"):
        load(path, input_size=SIT.config["input_size"])


def test_what_a_bare_file_cannot_tell_is_said(tmp_path, capsys):
    load(save(tmp_path, SIT.under("state/")))
    said = capsys.readouterr().out
    assert "layernorm, no RoPE" in said
    assert "label rows is the null label" in said


def test_a_width_that_is_no_round_multiple_is_read_back_whole(tmp_path):
    """52 x (213 / 52) is 212.99... in floating point."""
    model = sitvit.SiT(hidden_size=52, num_heads=4, depth=1, mlp_ratio=4.1, num_classes=3, input_size=4)
    save_official(model, tmp_path / "SiT.pt", ".pt")
    assert load(tmp_path / "SiT.pt").state_dict().keys() == model.state_dict().keys()


def test_label_rows_that_are_all_classes_are_read_so_where_the_number_of_classes_says_it(tmp_path, capsys):
    model = sitvit.SiT(**{**SIT.config, "class_dropout_prob": 0.0, "num_classes": 7})
    path = save(tmp_path, model.state_dict())
    assert load(path).num_classes == load(path, num_classes=6).num_classes == 6  # and a null label
    capsys.readouterr()
    again = load(path, num_classes=7)
    assert (again.num_classes, again.has_null) == (7, False)
    assert "null label" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"7 label rows: num_classes is 6, or 7 where none .*, not 8"):
        load(path, num_classes=8)
    again.save_pretrained(tmp_path / "m")
    load(tmp_path / "m", num_classes=7)
    with pytest.raises(ValueError, match="records num_classes 7, so num_classes 6 cannot be"):
        load(tmp_path / "m", num_classes=6)


@pytest.mark.parametrize("text", ["{}", "[1]", "nope", '{"weight_map": {}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    randomized().save_pretrained(tmp_path, max_shard_size="20KB")
    index = next(tmp_path.glob("*.index.json"))
    index.write_text(text)
    with pytest.raises(ValueError, match=rf"{index.name} is damaged"):
        load(tmp_path)


def test_frequencies_that_are_not_those_of_the_network_are_refused_with_the_file(tmp_path):
    state = VIT5.under("state/")
    key = next(k for k in state if k.endswith("rope.freqs"))
    for frequencies in (state[key] * 2, state[key][:0]):
        path = save(tmp_path, {**state, key: frequencies}, "vit5.pth")
        with pytest.raises(ValueError, match=rf"vit5\.pth: {re.escape(key)} holds other frequencies"):
            load_checkpoint(path)
