"""The ViT-5 classifier equals the released code; the ViT of 2020 has its published size."""

import json

import pytest
import torch

import sitvit
from sitvit.bench.timing import saved_bytes
from sitvit.models.infer import HEADS
from sitvit.models.presets import CLASSIFIERS

from ..conftest import GOLDEN
from .golden import Golden, assert_equal


@pytest.fixture(params=["vit5_model_0", "vit5_model_1"])
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture
def model(golden) -> sitvit.ViT5:
    model = sitvit.ViT5(**golden.config)
    model.load_state_dict(golden.under("state/"), strict=True)
    return model.eval()


def test_logits_equal_the_released_classifiers(golden, model):
    assert_equal(model(golden["in/x"]), golden["out/logits"])


def test_a_block_equals_the_released_classifiers(golden, model):
    out = model.blocks[0](golden["in/tokens"], model.rotation.table)
    assert_equal(out, golden["out/block0"])


def test_other_rope_frequencies_are_refused(golden):
    state = golden.under("state/")
    state["blocks.0.attn.rope.freqs"] = state["blocks.0.attn.rope.freqs"] * 2
    with pytest.raises(ValueError, match=r"blocks.0.attn.rope.freqs holds other frequencies"):
        sitvit.ViT5(**golden.config).load_state_dict(state)


COUNTS = {
    "ViT5-S/16": 22_039_144,
    "ViT5-B/16": 86_543_080,
    "ViT5-L/16": 304_258_024,
    "ViT5-XL/16": 448_505_128,
    "ViT-B/16": 86_567_656,
    "ViT-L/16": 304_326_632,
    "ViT-H/14": 632_045_800,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    with torch.device("meta"):
        model = sitvit.ViT5(**CLASSIFIERS[name])
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


PUBLISHED = {  # depth, width, heads: ViT-5's code, and table 1 of arXiv 2010.11929
    "ViT5-S/16": (12, 384, 6),
    "ViT5-B/16": (12, 768, 12),
    "ViT5-L/16": (24, 1024, 16),
    "ViT5-XL/16": (28, 1152, 16),
    "ViT-B/16": (12, 768, 12),
    "ViT-L/16": (24, 1024, 16),
    "ViT-H/14": (32, 1280, 16),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_are_the_published_ones_which_no_count_of_parameters_shows(name):
    own = CLASSIFIERS[name]
    assert (own["depth"], own["embed_dim"], own["num_heads"]) == PUBLISHED[name]
    assert HEADS[own["embed_dim"]] == own["num_heads"]  # so a file of this width is read


@pytest.mark.parametrize("name", ["small", "base", "large", "xlarge"])
def test_key_names_and_shapes_are_those_of_the_released_files(name):
    released = json.loads((GOLDEN / "vit5_presets.json").read_text())[f"vit5_{name}"]
    size = {"small": "S", "base": "B", "large": "L", "xlarge": "XL"}[name]
    with torch.device("meta"):
        state = sitvit.ViT5(**{**CLASSIFIERS[f"ViT5-{size}/16"], "rope": False}).state_dict()
    first_block = {k: list(v.shape) for k, v in state.items() if not k.startswith("blocks.") or ".0." in k}
    expected = {k: v for k, v in released["keys"].items() if ".freqs" not in k}
    assert {k: first_block[k] for k in expected} == expected


def randomized(**arguments) -> sitvit.ViT5:
    small = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    model = sitvit.ViT5(**{**small, "num_classes": 5, **arguments}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("place", ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.attn.q_norm", "norm"])
def test_every_norm_has_the_epsilon_that_was_asked_for(place):
    assert randomized(norm_eps=0.1).get_submodule(place).eps == 0.1


@pytest.mark.parametrize("changed", [{"norm_eps": 0.1}, {"rope_theta": 9.0}, {"register_rope_theta": 9.0}])
def test_a_constant_of_the_classifier_changes_the_function(changed):
    whole, other, images = randomized(), randomized(**changed), torch.randn(2, 3, 32, 48)
    other.load_state_dict(whole.state_dict())
    assert (whole(images) - other(images)).abs().max() > 1e-4


def test_a_new_classifier_has_the_released_initialisation():
    model = sitvit.build_model("ViT5-S/16", depth=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        elif parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.15), name


def test_features_of_a_block_are_what_the_next_block_receives():
    model, images = randomized(), torch.randn(2, 3, 32, 48)
    first, last = model.features(images, [0, -1])
    assert first.shape == (2, 1 + 24 + 4, 32)
    for block in model.blocks[1:]:
        first = block(first, model.rotation.table)
    assert torch.equal(first, last)
    torch.testing.assert_close(model.head(model.norm(last)[:, 0]), model(images))
    with pytest.raises(ValueError, match="no block 3: the model has blocks 0 to 2"):
        model.features(images, [3])


def test_gradient_checkpointing_keeps_less_for_backward_and_changes_no_gradient():
    model, images = randomized(img_size=64, depth=6), torch.randn(2, 3, 64, 64)
    kept, gradients = [], []
    for on in (False, True):
        (model.enable_gradient_checkpointing if on else model.disable_gradient_checkpointing)()
        kept.append(saved_bytes(lambda: model(images), model))
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert kept[1] < kept[0] / 4
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_mean_pooling_reads_the_patches_alone():
    model, images = randomized(pool="mean"), torch.randn(2, 3, 32, 48)
    tokens = model.norm(model.features(images, [-1])[0])
    torch.testing.assert_close(model(images), model.head(tokens[:, 1:25].mean(dim=1)))


def test_an_image_of_the_trained_size_is_read_as_before_and_another_size_by_rescaled_positions():
    """RoPE at twice the grid is arange(n) / n * trained_n: the even positions are the trained ones."""
    model = randomized()
    other = model.rotation((8, 12))
    patches = other[:, 1 : 1 + 96].unflatten(1, (8, 12))
    trained = model.rotation.table[:, 1 : 1 + 24].unflatten(1, (4, 6))
    torch.testing.assert_close(patches[:, ::2, ::2], trained, atol=1e-6, rtol=0)
    assert model(torch.randn(1, 3, 64, 96)).shape == (1, 5)
    with pytest.raises(ValueError, match="image height 30 is not a multiple of patch_size 8"):
        model(torch.randn(1, 3, 30, 48))


def test_height_and_width_are_not_swapped():
    """Rolling an image by a patch along its width rolls the patch tokens of a position-free network."""
    model = randomized(rope=False, num_registers=0)
    with torch.no_grad():
        model.pos_embed.zero_()
        images = torch.randn(1, 3, 32, 48)
        tokens = model.features(images, [-1])[0][:, 1:].unflatten(1, (4, 6))
        rolled = model.features(images.roll(8, dims=3), [-1])[0][:, 1:].unflatten(1, (4, 6))
    torch.testing.assert_close(rolled, tokens.roll(1, dims=2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("arguments", [{}, CLASSIFIERS["ViT-B/16"]], ids=["ViT-5", "ViT of 2020"])
def test_a_saved_classifier_comes_back_equal(tmp_path, arguments):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = sitvit.ViT5(**{**arguments, **small}).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(sitvit.ViT5.from_pretrained(tmp_path)(images), model(images))
