"""Geometry in closed form equals the published figures and the real networks."""

import dataclasses
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sitvit
from sitvit.models.descriptions import preset_shape
from sitvit.models.geometry import geometry, patch_grid
from sitvit.models.presets import CLASSIFIERS, PRESETS, preset
from sitvit.models.shapes import SiTShape, ViTShape

SMALL = {"hidden_size": 48, "depth": 3, "num_heads": 4, "num_classes": 7, "input_size": (8, 12)}
TINY = {"embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 7, "img_size": (32, 48)}
SWITCHES = [
    {},
    {"learn_sigma": True},
    {"class_dropout_prob": 0.0},
    {"mlp_ratio": 2.5},
    {"patch_size": 4, "in_channels": 3},
    {"qkv_bias": False},
    {"qk_norm": True},
    {"rope": True},
    {"num_registers": 9},
    {"layer_scale_init": 1e-4},
    {"norm": "rmsnorm"},
    {"norm_affine": True},
    {"norm_affine": True, "norm": "rmsnorm"},
    {"positions": "learned"},
    {"positions": "none"},
    {"mlp": "gelu"},
    {"mlp": "swiglu"},
]


def parameters(name, **overrides):
    return geometry(preset_shape(name, overrides)).parameters.total


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("SiT-S/2", 32_963_360),
        ("SiT-B/2", 130_512_416),
        ("SiT-L/2", 458_102_816),
        ("SiT-XL/2", 675_129_632),
        ("DiT-XL/2", 675_129_632),
        ("SiT-ViT5-S/2", 32_961_824),
        ("SiT-ViT5-B/2", 130_507_808),
        ("SiT-ViT5-L/2", 458_085_408),
        ("SiT-ViT5-XL/2", 675_106_016),
    ],
)
def test_velocity_networks_have_the_published_parameters(name, count):
    assert parameters(name, learn_sigma=True) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("ViT5-S/16", 22_039_144),
        ("ViT5-B/16", 86_543_080),
        ("ViT5-L/16", 304_258_024),
        ("ViT5-XL/16", 448_505_128),
        ("ViT-B/16", 86_567_656),
        ("ViT-L/16", 304_326_632),
        ("ViT-H/14", 632_045_800),
    ],
)
def test_classifiers_have_the_published_parameters(name, count):
    assert parameters(name) == count


@pytest.mark.parametrize(
    ("name", "pixels", "multiply_adds", "tolerance"),
    [
        ("DiT-XL/2", 256, 118.6e9, 0.1e9),
        ("SiT-XL/2", 256, 118.6e9, 0.1e9),
        ("DiT-XL/2", 512, 525e9, 0.5e9),  # DiT's README, as is 119 at 256 px
    ],
)
def test_published_gflops_are_these_multiply_adds(name, pixels, multiply_adds, tolerance):
    model = geometry(preset_shape(name, image_size=(pixels, pixels)))
    assert model.multiply_adds.total == pytest.approx(multiply_adds, abs=tolerance)
    assert model.forward_flops == 2 * model.multiply_adds.total
    assert model.training_flops == 3 * model.forward_flops


def test_token_counts_of_known_models():
    base = geometry(preset_shape("ViT-B/16"))
    large = geometry(preset_shape("ViT-L/14", image_size=(336, 336)))
    registers = geometry(preset_shape("SiT-ViT5-XL/2", image_size=(256, 512)))
    assert (base.patches, base.tokens) == (196, 197)
    assert (large.grid, large.patches) == ((24, 24), 576)
    assert (registers.grid, registers.patches, registers.tokens) == ((16, 32), 512, 516)


@pytest.mark.parametrize(("family", "network"), [(SiTShape, sitvit.SiT), (ViTShape, sitvit.ViT5)])
def test_arguments_have_the_names_and_defaults_of_the_constructor(family, network):
    parameters = list(inspect.signature(network.__init__).parameters.items())[1:]
    defaults = {name: parameter.default for name, parameter in parameters}
    assert {field.name: field.default for field in dataclasses.fields(family)} == defaults


@pytest.mark.parametrize("backbone", ["SiT-S/2", "SiT-ViT5-S/2"])
@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_parameters_are_those_of_the_real_network(backbone, switch):
    model = sitvit.SiT(**{**preset(backbone), **SMALL, **switch})
    counted = geometry(preset_shape(backbone, {**SMALL, **switch}))
    assert counted.parameters.total == sum(p.numel() for p in model.parameters())
    assert counted.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("backbone", ["ViT5-S/16", "ViT-B/16"])
@pytest.mark.parametrize(
    "switch",
    [
        {},
        {"num_classes": 0},
        {"mlp": "swiglu"},
        {"mlp": "gelu_tanh"},
        {"pool": "mean"},
        {"class_position": True},
        {"norm_layer": "layernorm"},
        {"num_registers": 9},
        {"layer_scale_init": None},
        {"qk_norm": False, "rope": False},
        {"norm_eps": 1e-5, "rope_theta": 100.0, "register_rope_theta": 10.0},
    ],
    ids=str,
)
def test_parameters_and_multiply_adds_are_those_of_the_real_classifier(backbone, switch):
    arguments = {**TINY, **switch}
    model = sitvit.build_model(backbone, **arguments)
    counted = geometry(preset_shape(backbone, arguments))
    assert counted.parameters.total == sum(p.numel() for p in model.parameters())
    found = linear_multiply_adds(model, lambda: model(torch.randn(1, 3, 32, 48)))
    assert found == counted.multiply_adds.total - counted.multiply_adds.attention_products


def test_switches_change_the_parameters_by_their_closed_forms():
    """With width D = 48, depth 3, 24 patches, MLP width 192; these switches of the network are newer."""
    plain = parameters("SiT-S/2", **SMALL)
    for switch, difference in (
        ({"norm_affine": True}, (2 * 3 + 1) * 2 * 48),
        ({"norm_affine": True, "norm": "rmsnorm"}, (2 * 3 + 1) * 48),
        ({"positions": "learned"}, 0),
        ({"positions": "none"}, -24 * 48),
        ({"mlp": "gelu"}, 0),
        # h = round((2 D H + H) / (3 D + 2)) = 128: 3 D h + 2 h + D against 2 D H + H + D
        ({"mlp": "swiglu"}, 3 * ((3 * 48 * 128 + 2 * 128) - (2 * 48 * 192 + 192))),
    ):
        assert parameters("SiT-S/2", **SMALL, **switch) - plain == difference, switch
    learned = geometry(preset_shape("SiT-S/2", {**SMALL, "positions": "learned"}))
    assert learned.trainable_parameters == learned.parameters.total


def linear_multiply_adds(model, run):
    """Multiply-adds of every linear layer and convolution that `run` goes through."""
    counts = []

    def count(module, inputs, output):
        weight = module.weight
        positions = output.numel() // weight.shape[0]
        counts.append(positions * weight.numel())

    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            module.register_forward_hook(count)
    run()
    return sum(counts)


@pytest.mark.parametrize("backbone", ["SiT-S/2", "SiT-ViT5-S/2"])
def test_multiply_adds_are_those_that_a_real_forward_pass_does(backbone):
    model = sitvit.SiT(**{**preset(backbone), **SMALL})
    labels = torch.zeros(1, dtype=torch.long)
    counted = linear_multiply_adds(model, lambda: model(torch.randn(1, 4, 8, 12), torch.rand(1), labels))
    parts = geometry(preset_shape(backbone, SMALL)).multiply_adds
    assert counted == parts.total - parts.attention_products
    tokens = 24 + (4 if "ViT5" in backbone else 0)
    assert parts.attention_products == 3 * 2 * 4 * tokens * tokens * 12  # depth, products, heads, N, N, d


names = st.sampled_from([*PRESETS, *CLASSIFIERS])


@given(names, st.integers(1, 40))
def test_twice_the_depth_has_twice_the_blocks(name, depth):
    once, twice = (geometry(preset_shape(name, {"depth": n})) for n in (depth, 2 * depth))
    for part in ("attention", "mlp", "adaln", "norms_and_scales"):
        assert getattr(twice.parameters, part) == 2 * getattr(once.parameters, part)
    for part in ("patch_embedding", "positions", "extra_tokens", "conditioning", "final_layer"):
        assert getattr(twice.parameters, part) == getattr(once.parameters, part)
    for part in ("attention_linear", "attention_products", "mlp", "adaln"):
        assert getattr(twice.multiply_adds, part) == 2 * getattr(once.multiply_adds, part)


@given(st.sampled_from([n for n in PRESETS if "ViT5" not in n]), st.integers(1, 6), st.integers(1, 6))
def test_linear_layers_grow_with_the_tokens_and_attention_with_their_square(name, rows, columns):
    image = (64 * rows, 64 * columns)
    small = geometry(preset_shape(name, image_size=image)).multiply_adds
    wide = geometry(preset_shape(name, image_size=(image[0], 2 * image[1]))).multiply_adds
    for part, factor in (("attention_linear", 2), ("mlp", 2), ("attention_products", 4), ("adaln", 1)):
        assert getattr(wide, part) == factor * getattr(small, part)


@settings(max_examples=50)
@given(st.integers(1, 64).map(lambda n: 16 * n), st.floats(0.5, 8))
def test_swiglu_has_the_parameters_of_the_plain_mlp_to_half_a_row(width, mlp_ratio):
    sizes = {"hidden_size": width, "num_heads": 4, "depth": 1, "mlp_ratio": mlp_ratio}
    difference = parameters("SiT-S/2", **sizes, mlp="swiglu") - parameters("SiT-S/2", **sizes)
    assert abs(difference) <= (3 * width + 2) / 2


@pytest.mark.parametrize(
    ("image", "floor", "cropped", "ceil", "padded"),
    [
        ((720, 1280), (51, 91), (6, 6), (52, 92), (8, 8)),
        ((1080, 1920), (77, 137), (2, 2), (78, 138), (12, 12)),
    ],
)
def test_a_patch_that_does_not_divide_crops_by_floor_and_pads_by_ceil(image, floor, cropped, ceil, padded):
    grid = patch_grid(image, 14)
    assert (grid.floor, grid.cropped, grid.ceil, grid.padded) == (floor, cropped, ceil, padded)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 50))
def test_floor_and_ceil_take_the_whole_image_apart(height, width, patch_size):
    if patch_size > min(height, width):
        with pytest.raises(ValueError, match="shorter side"):
            patch_grid((height, width), patch_size)
        return
    grid = patch_grid((height, width), patch_size)
    for axis, pixels in enumerate((height, width)):
        assert grid.floor[axis] * patch_size + grid.cropped[axis] == pixels
        assert grid.ceil[axis] * patch_size - grid.padded[axis] == pixels
        assert 0 <= grid.cropped[axis] < patch_size
        assert 0 <= grid.padded[axis] < patch_size


def test_every_preset_has_a_geometry():
    for name in PRESETS:
        assert isinstance(preset_shape(name), SiTShape)
    for name in CLASSIFIERS:
        assert isinstance(preset_shape(name), ViTShape)
