"""DiT equals the official code, and diffusers' transformer with copied weights."""

import pytest
from diffusers import DiTTransformer2DModel

import sitvit
from sitvit.flow.guidance import classifier_free_guidance

from .golden import Golden, assert_equal


@pytest.fixture(params=["dit_model_0", "dit_model_1"])
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture
def model(golden) -> sitvit.DiT:
    model = sitvit.DiT(**golden.config)
    model.load_state_dict(golden.under("state/"), strict=True)
    return model


def test_forward_equals_the_official_dit(golden, model):
    out = model(golden["in/x"], golden["in/t"], golden["in/y"])
    assert_equal(out, golden["out/forward"])


def test_gradients_equal_the_official_dit(golden, model):
    model(golden["in/x"], golden["in/t"], golden["in/y"]).square().mean().backward()
    parameters = dict(model.named_parameters())
    for name, expected in golden.under("out/grad/").items():
        assert_equal(parameters[name].grad, expected)


@pytest.mark.parametrize("scale", [1.5, 4.0])
def test_guidance_equals_the_official_one_on_the_channels_that_it_guides(golden, model, scale):
    half = len(golden["in/cfg_x"]) // 2
    guided = classifier_free_guidance(model, golden["in/cfg_y"][:half], model.null_label, scale)
    out = guided(golden["in/cfg_x"][:half], golden["in/cfg_t"][:half])
    expected = golden[f"out/forward_with_cfg_{scale}"][:half]
    assert_equal(out[:, :3], expected[:, :3])


def test_diffusers_transformer_with_copied_weights_gives_the_same_output(golden, model):
    """An independent implementation, with its own key names."""
    config = golden.config
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
