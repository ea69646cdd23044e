"""SiT and DiT equal the official code with every gate non-zero; DiT equals diffusers' too."""

import pytest
import torch
from diffusers import DiTTransformer2DModel

import sitvit
from sitvit.flow.guidance import Guidance

from .golden import Golden, assert_equal

FILES = {"sit_model_0": "SiT", "sit_model_1": "SiT", "dit_model_0": "DiT", "dit_model_1": "DiT"}


def loaded(golden: Golden, name: str):
    model = getattr(sitvit, name)(**golden.config)
    model.load_state_dict(golden.under("state/"), strict=True)
    return model


@pytest.fixture(params=FILES)
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture
def model(request, golden):
    return loaded(golden, FILES[request.node.callspec.params["golden"]])


def test_forward_equals_the_official_code(golden, model):
    assert_equal(model(golden["in/x"], golden["in/t"], golden["in/y"]), golden["out/forward"])


def test_gradients_equal_the_official_code(golden, model):
    model(golden["in/x"], golden["in/t"], golden["in/y"]).square().mean().backward()
    parameters = dict(model.named_parameters())
    expected = golden.under("out/grad/")
    assert expected
    for name, gradient in expected.items():
        assert_equal(parameters[name].grad, gradient)


@pytest.mark.parametrize("scale", [1.5, 4.0])
def test_guidance_of_three_channels_is_the_official_one(golden, model, scale):
    half = len(golden["in/cfg_x"]) // 2
    guided = Guidance(scale, channels=3).bind(model, golden["in/cfg_y"][:half], model.null_label)
    out = guided(golden["in/cfg_x"][:half], golden["in/cfg_t"][:half])
    assert_equal(out, golden[f"out/forward_with_cfg_{scale}"][:half])


def test_the_fixed_position_table_is_the_official_one(golden, model):
    fresh = type(model)(**golden.config)
    torch.testing.assert_close(fresh.pos_embed, golden["state/pos_embed"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("file", ["dit_model_0", "dit_model_1"])
def test_diffusers_transformer_with_copied_weights_gives_our_dits_output(file):
    """An independent implementation, with its own key names."""
    golden = Golden(file)
    model, config = loaded(golden, "DiT"), golden.config
    theirs = DiTTransformer2DModel(
        num_attention_heads=config["num_heads"],
        attention_head_dim=config["hidden_size"] // config["num_heads"],
        in_channels=config["in_channels"],
        out_channels=model.out_channels,
        num_layers=config["depth"],
        sample_size=config["input_size"],
        patch_size=config["patch_size"],
        num_embeds_ada_norm=config["num_classes"],
        norm_eps=1e-6,
    ).eval()
    for block in theirs.transformer_blocks:  # diffusers spaces the frequencies by half - 1, DiT by half
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    ours = model.state_dict()
    copied = {
        "pos_embed.proj.weight": ours["x_embedder.proj.weight"],
        "pos_embed.proj.bias": ours["x_embedder.proj.bias"],
        "proj_out_1.weight": ours["final_layer.adaLN_modulation.1.weight"],
        "proj_out_1.bias": ours["final_layer.adaLN_modulation.1.bias"],
        "proj_out_2.weight": ours["final_layer.linear.weight"],
        "proj_out_2.bias": ours["final_layer.linear.bias"],
    }
    for i in range(config["depth"]):
        at, to = f"blocks.{i}", f"transformer_blocks.{i}"
        copied[f"{to}.norm1.emb.class_embedder.embedding_table.weight"] = ours[
            "y_embedder.embedding_table.weight"
        ]
        for kind in ("weight", "bias"):
            for part, name in enumerate(("to_q", "to_k", "to_v")):
                copied[f"{to}.attn1.{name}.{kind}"] = ours[f"{at}.attn.qkv.{kind}"].chunk(3)[part]
            copied[f"{to}.attn1.to_out.0.{kind}"] = ours[f"{at}.attn.proj.{kind}"]
            copied[f"{to}.ff.net.0.proj.{kind}"] = ours[f"{at}.mlp.fc1.{kind}"]
            copied[f"{to}.ff.net.2.{kind}"] = ours[f"{at}.mlp.fc2.{kind}"]
            copied[f"{to}.norm1.linear.{kind}"] = ours[f"{at}.adaLN_modulation.1.{kind}"]
            for layer, number in (("linear_1", 0), ("linear_2", 2)):
                name = f"{to}.norm1.emb.timestep_embedder.{layer}.{kind}"
                copied[name] = ours[f"t_embedder.mlp.{number}.{kind}"]
    missing, unexpected = theirs.load_state_dict(copied, strict=False)
    assert not unexpected
    assert missing in ([], ["pos_embed.pos_embed"])  # the fixed table, computed there
    out = theirs(golden["in/x"], timestep=golden["in/t"], class_labels=golden["in/y"]).sample
    assert_equal(model(golden["in/x"], golden["in/t"], golden["in/y"]), out)
