"""SiT's sizes, switches and grids, and its ViT-5 form against the equations written out slowly."""

import copy
import math
import pickle

import pytest
import torch

import sitvit
from sitvit.bench.timing import saved_bytes
from sitvit.models.presets import PRESETS, preset

from .test_vit5 import randomized as random_classifier


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("SiT-S/2", 32_963_360),
        ("SiT-XL/2", 675_129_632),
        ("SiT-ViT5-S/2", 32_961_824),
        ("SiT-ViT5-B/2", 130_507_808),
        ("SiT-ViT5-L/2", 458_085_408),
        ("SiT-ViT5-XL/2", 675_106_016),
    ],
)
def test_parameter_counts_are_the_published_ones(name, count):
    with torch.device("meta"):  # counted, not filled: XL takes 2.7 GB
        model = sitvit.SiT(**{**preset(name), "learn_sigma": True})
    assert sum(p.numel() for p in model.parameters()) == count


def randomized(**arguments) -> sitvit.SiT:
    """A small ViT-5 network with every gate, gamma and register non-zero."""
    small = {"hidden_size": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "input_size": (4, 8)}
    model = sitvit.SiT(**{**preset("SiT-ViT5-S/2"), **small, **arguments})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "pos_embed":
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_untrained_sit_predicts_zero_velocity_and_every_dit_zero_noise_and_variance(name):
    """adaLN-Zero: gates and output layer begin at zero, whatever the backbone."""
    model = sitvit.build_model(name, hidden_size=48, depth=2, num_heads=3, input_size=8, num_classes=3)
    times = torch.tensor([0, 999]) if name.startswith("DiT") else torch.rand(2)
    out = model(torch.randn(2, 4, 8, 8), times, torch.tensor([0, 3]))
    assert out.shape[1] == (8 if name.startswith("DiT") else 4)
    assert torch.equal(out, torch.zeros_like(out))


def test_a_new_network_has_the_official_initialisation():
    """Xavier's uniform weights, the patch convolution's flattened; 0.02 for embeddings; all biases zero."""
    model = sitvit.build_model("SiT-ViT5-S/2", depth=1, positions="learned")
    parameters = dict(model.named_parameters())
    assert all((p == 0).all() for name, p in parameters.items() if name.endswith("bias"))
    for name in ("t_embedder.mlp.0.weight", "t_embedder.mlp.2.weight", "reg_token", "pos_embed",
                 "y_embedder.embedding_table.weight"):  # fmt: skip
        assert parameters[name].std().item() == pytest.approx(0.02, rel=0.1), name
    for name in ("x_embedder.proj", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1"):
        weight = parameters[f"{name}.weight"].flatten(1)
        assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.05), name


D, DEPTH, HEADS = 32, 2, 2
SWITCHES = {
    "norm": ({"norm": "layernorm"}, set(), set(), 0),
    "norm_affine": (
        {"norm_affine": True},
        {"final_layer.norm_final.weight"}
        | {f"blocks.{i}.norm{k}.weight" for i in range(DEPTH) for k in (1, 2)},
        set(),
        (2 * DEPTH + 1) * D,
    ),
    "qkv_bias": (
        {"qkv_bias": True}, {f"blocks.{i}.attn.qkv.bias" for i in range(DEPTH)}, set(), DEPTH * 3 * D
    ),
    "qk_norm": (
        {"qk_norm": False},
        set(),
        {f"blocks.{i}.attn.{k}_norm.weight" for i in range(DEPTH) for k in "qk"},
        -DEPTH * 2 * D // HEADS,
    ),
    "rope": ({"rope": False}, set(), set(), 0),
    "no positions": ({"positions": "none"}, set(), {"pos_embed"}, -8 * D),
    "learned positions": ({"positions": "learned"}, set(), set(), 0),
    "num_registers": ({"num_registers": 0}, set(), {"reg_token"}, -4 * D),
    "nine registers": ({"num_registers": 9}, set(), set(), 5 * D),
    "layer_scale": (
        {"layer_scale_init": None},
        set(),
        {f"blocks.{i}.gamma_{k}" for i in range(DEPTH) for k in (1, 2)},
        -DEPTH * 2 * D,
    ),
    "gelu": ({"mlp": "gelu"}, set(), set(), 0),
    "swiglu": ({"mlp": "swiglu"}, set(), set(), None),
}  # fmt: skip


@pytest.mark.parametrize("row", SWITCHES)
def test_a_switch_changes_the_keys_and_parameters_of_its_row_and_no_more(row):
    changed, added, removed, difference = SWITCHES[row]
    whole, other = randomized(), randomized(**changed)
    assert other.state_dict().keys() - whole.state_dict().keys() == added
    assert whole.state_dict().keys() - other.state_dict().keys() == removed
    counts = [sum(p.numel() for p in model.parameters()) for model in (whole, other)]
    if difference is None:  # SwiGLU's width is rounded
        assert abs(counts[1] - counts[0]) <= DEPTH * (3 * D + 2) / 2
    else:
        assert counts[1] - counts[0] == difference


@pytest.mark.parametrize("row", SWITCHES)
def test_a_switch_changes_the_function(row):
    """One that is read and ignored would leave the output as it was."""
    whole, other = randomized(), randomized(**SWITCHES[row][0])
    state = whole.state_dict()
    shared = {
        key: state[key]
        for key, tensor in other.state_dict().items()
        if key in state and tensor.shape == state[key].shape
    }
    if row == "learned positions":  # of the same shape, but the weights' own and not the fixed table
        del shared["pos_embed"]
    other.load_state_dict(shared, strict=False)
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([0, 1])
    assert (whole(x, t, labels) - other(x, t, labels)).abs().max() > 1e-4


def test_learned_positions_are_trained_and_fixed_ones_are_not():
    arguments = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([0, 1])
    for kind, trained in (("learned", True), ("sincos", False)):
        model = randomized(positions=kind)
        model(*arguments).square().mean().backward()
        assert (model.pos_embed.grad is not None) == model.pos_embed.requires_grad == trained
        if trained:
            assert (model.pos_embed.grad != 0).any(dim=2).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["SiT", "DiT", "ViT5"])
def test_a_copy_and_a_pickle_are_the_same_function_with_weights_of_their_own(copied, name):
    model = random_classifier() if name == "ViT5" else randomized(learn_sigma=True)
    if name == "DiT":
        state = model.state_dict()
        model = sitvit.DiT.from_config(model.config)
        model.load_state_dict(state)
    sizes = (3, 32, 48), (3, 48, 32)
    sizes = sizes if name == "ViT5" else ((4, 4, 8), (4, 6, 4))
    rest = () if name == "ViT5" else (torch.tensor([0, 1]), torch.tensor([0, 5]))
    inputs = [torch.randn(2, *size) for size in sizes]  # the second grid's tables are kept in the network
    expected = [model(x, *rest) for x in inputs]
    other = copied(model)
    assert all(torch.equal(other(x, *rest), out) for x, out in zip(inputs, expected, strict=True))
    other(inputs[1], *rest).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    assert torch.equal(model(inputs[0], *rest), expected[0])


@pytest.mark.parametrize("positions", ["sincos", "learned", "none"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mlp", ["gelu_tanh", "gelu", "swiglu"])
def test_any_mix_of_components_runs_on_any_grid(positions, norm, mlp):
    for rope, qk_norm, num_registers in ((True, False, 0), (False, True, 1), (True, True, 9)):
        model = randomized(
            positions=positions, norm=norm, norm_affine=True, mlp=mlp, rope=rope, qk_norm=qk_norm,
            num_registers=num_registers,
        )  # fmt: skip
        for height, width in ((4, 8), (6, 2)):
            x = torch.randn(1, 4, height, width)
            out = model(x, torch.rand(1), torch.tensor([0]))
            assert out.shape == x.shape
            assert out.isfinite().all()


def test_swiglu_is_its_equation():
    model = randomized(mlp="swiglu")
    mlp, x = model.blocks[0].mlp, torch.randn(2, 3, D)
    h = mlp.fc1.out_features // 2
    gate = x @ mlp.fc1.weight[:h].T + mlp.fc1.bias[:h]
    value = x @ mlp.fc1.weight[h:].T + mlp.fc1.bias[h:]
    expected = (gate * gate.sigmoid() * value) @ mlp.fc2.weight.T + mlp.fc2.bias
    torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-5)


def test_another_grid_recomputes_the_fixed_positions_and_rescales_rope():
    """A model of the other size, given the same weights, has the same sin-cos; RoPE is rescaled."""
    model, x = randomized(rope=False), torch.randn(1, 4, 8, 12)
    state = {k: v for k, v in model.state_dict().items() if k != "pos_embed"}
    larger = randomized(rope=False, input_size=(8, 12))
    larger.load_state_dict(state, strict=False)
    arguments = torch.rand(1), torch.tensor([0])
    assert torch.equal(model(x, *arguments), larger(x, *arguments))
    table = randomized().tables((4, 8))[1][:, :32].unflatten(1, (4, 8))
    trained = randomized().rotation.table[:, :8].unflatten(1, (2, 4))
    torch.testing.assert_close(table[:, ::2, ::2], trained, atol=1e-6, rtol=0)


def test_other_grids_in_turn_have_each_their_own_positions():
    model, arguments = randomized(), (torch.rand(1), torch.tensor([1]))
    for grid in [(8, 12), (12, 8), (8, 12), (4, 8)]:
        fresh, x = randomized(), torch.randn(1, 4, *grid)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(model(x, *arguments), fresh(x, *arguments))


def test_learned_positions_of_the_trained_grid_are_untouched_and_a_constant_stays_constant():
    model = randomized(positions="learned")
    assert model.tables((2, 4))[0] is model.pos_embed
    with torch.no_grad():
        model.pos_embed.fill_(0.5)
    torch.testing.assert_close(model.tables((3, 7))[0], torch.full((1, 21, D), 0.5))


@pytest.mark.parametrize(("grid", "new_grid"), [((2, 4), (3, 7)), ((2, 4), (6, 2))])
def test_learned_positions_of_another_grid_are_the_bicubic_ones_row_by_row(grid, new_grid):
    """Keys' kernel with a = -3/4, as PyTorch's, written out; rows and columns are never swapped."""

    def weights(count: int, new: int) -> torch.Tensor:
        matrix = torch.zeros(new, count, dtype=torch.float64)
        for i in range(new):
            where = (i + 0.5) * count / new - 0.5
            for j in range(math.floor(where) - 1, math.floor(where) + 3):
                d, a = abs(where - j), -0.75
                near = (a + 2) * d**3 - (a + 3) * d**2 + 1
                far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
                matrix[i, min(max(j, 0), count - 1)] += near if d <= 1 else far if d < 2 else 0.0
        return matrix

    model = randomized(positions="learned")
    with torch.no_grad():
        model.pos_embed.normal_()
    maps = model.pos_embed.detach().double().view(*grid, D)
    by_rows, by_columns = weights(grid[0], new_grid[0]), weights(grid[1], new_grid[1])
    expected = torch.einsum("ih,jw,hwd->ijd", by_rows, by_columns, maps).reshape(1, -1, D)
    torch.testing.assert_close(model.tables(new_grid)[0].double(), expected, atol=1e-5, rtol=0)


def test_layer_scale_starts_at_the_value_that_was_asked_for():
    model = sitvit.SiT(**{**preset("SiT-ViT5-S/2"), "depth": 2, "layer_scale_init": 1e-3, "num_classes": 5})
    assert all((gamma == 1e-3).all() for block in model.blocks for gamma in (block.gamma_1, block.gamma_2))


@pytest.mark.parametrize("name", ["SiT-S/2", "SiT-ViT5-S/2"])
def test_gradient_checkpointing_keeps_less_for_backward(name):
    model = sitvit.build_model(name, depth=4)
    arguments = torch.randn(1, 4, 32, 32), torch.tensor([0.5]), torch.tensor([1])
    model.gradient_checkpointing = False
    plain = saved_bytes(lambda: model(*arguments), model)
    model.gradient_checkpointing = True
    assert saved_bytes(lambda: model(*arguments), model) < plain / 4


def test_gradient_checkpointing_changes_no_value_and_no_gradient():
    model, x = randomized(), torch.randn(2, 4, 4, 8)
    results = []
    for on in (False, True):
        model.gradient_checkpointing = on
        model.zero_grad()
        out = model(x, torch.tensor([0.2, 0.7]), torch.tensor([0, 5]))
        out.square().mean().backward()
        results.append([out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_diffusers_switches_gradient_checkpointing():
    model = randomized()
    model.enable_gradient_checkpointing()
    assert model.gradient_checkpointing
    model.disable_gradient_checkpointing()
    assert not model.gradient_checkpointing


def test_a_sharded_network_comes_back_equal(tmp_path):
    model = randomized().eval()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = sitvit.SiT.from_pretrained(tmp_path)
    assert all(torch.equal(a, again.state_dict()[key]) for key, a in model.state_dict().items())


@pytest.mark.parametrize("prefix", ["q_norm", "k_norm"])
def test_one_weight_of_the_qk_norm_serves_all_heads(prefix):
    model = randomized()
    assert getattr(model.blocks[0].attn, prefix).weight.shape == (16,)


def test_under_bfloat16_autocast_nearby_times_stay_apart():
    """bf16 would round 0.4990 and 0.5000 to one value."""
    model = randomized()
    times = torch.tensor([0.4990, 0.5000, 0.5010])
    exact = model.t_embedder(times)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = model.t_embedder(times)
    assert torch.equal(exact, under)


def test_a_saved_network_comes_back_equal(tmp_path):
    model = randomized().eval()
    model.save_pretrained(tmp_path)
    again = sitvit.SiT.from_pretrained(tmp_path)
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([0, 5])
    assert torch.equal(model(x, t, labels), again(x, t, labels))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_size": 9}, "nearest legal values are 8 and 10"),
        ({"hidden_size": 30, "num_heads": 4}, "multiple of num_heads"),
        ({"num_registers": 3}, "must be a square"),
        ({"norm": "batchnorm"}, "layernorm, rmsnorm"),
        ({"hidden_size": 24, "num_heads": 4, "rope": True}, "multiple of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_legal_ones(arguments, words):
    with pytest.raises(ValueError, match=words):
        sitvit.SiT(**arguments)


def test_an_unknown_model_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="SiT-ViT5-XL/2"):
        sitvit.build_model("SiT-ViT5-XXL/2")


def test_without_a_null_row_guidance_is_refused():
    model = sitvit.SiT(input_size=4, hidden_size=32, depth=1, num_heads=2, class_dropout_prob=0)
    with pytest.raises(ValueError, match="class_dropout_prob"):
        _ = model.null_label


@pytest.mark.parametrize(
    ("dropout", "wrong", "legal"),
    [
        (0.1, 6, "5 classes, labels 0 to 4, and 5 for no class$"),
        (0.1, -1, "5 classes, labels 0 to 4, and 5 for no class$"),
        (0.0, 5, "5 classes, labels 0 to 4$"),
    ],
)
def test_a_label_out_of_range_is_named_with_the_legal_ones(dropout, wrong, legal):
    model = randomized(class_dropout_prob=dropout)
    with pytest.raises(ValueError, match=f"label {wrong} is out of range: this model has {legal}"):
        model(torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([0, wrong]))


@pytest.mark.parametrize("kind", ["SiT", "ViT5"])
def test_an_input_without_a_batch_or_of_other_channels_is_refused_in_a_sentence(kind):
    model, rest = (randomized(), (torch.rand(2), torch.tensor([0, 1])))
    what, channels = "latent", 4
    if kind == "ViT5":
        model, rest, what, channels = random_classifier(), (), "image", 3
    x = torch.randn(2, channels, 32, 48)
    with pytest.raises(ValueError, match=f"a batch of {what}s has four dimensions"):
        model(x[0], *rest)
    with pytest.raises(ValueError, match=rf"the model takes {channels} channels, got .* \(2, 2, 32, 48\)"):
        model(x[:, :2], *rest)


def test_one_time_and_one_label_are_all_images():
    model, x = randomized(), torch.randn(3, 4, 4, 8)
    expected = model(x, torch.full((3,), 0.3), torch.tensor([2, 2, 2]))
    for t, label in ((torch.tensor(0.3), torch.tensor(2)), (torch.tensor([0.3]), torch.tensor([2]))):
        assert torch.equal(model(x, t, label), expected)


@pytest.mark.parametrize("t", [torch.zeros(3), torch.zeros(2, 1), 0.5, None])
def test_times_of_another_shape_are_refused_with_what_is_needed(t):
    with pytest.raises(ValueError, match="t must be a tensor with one element for each of the 2 images"):
        randomized()(torch.randn(2, 4, 4, 8), t, torch.tensor([0, 1]))


@pytest.mark.parametrize("num_classes", [3, 1500])
def test_the_null_label_follows_the_number_of_classes(num_classes):
    model = sitvit.SiT(input_size=4, hidden_size=32, depth=1, num_heads=2, num_classes=num_classes)
    assert model.null_label == num_classes
    assert model.y_embedder.embedding_table.num_embeddings == num_classes + 1


def test_a_model_cast_to_bfloat16_keeps_its_rotation_exact():
    model = randomized()
    table = model.rotation.table.clone()
    model.to(torch.bfloat16)
    assert model.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16
    assert torch.equal(model.rotation.table, table)


def test_the_rotation_of_another_grid_moves_with_the_model():
    model = randomized()
    grid = (3, 5)
    table = model.rotation(grid)
    model.to("meta")
    assert model.rotation(grid).device.type == "meta"
    model.to_empty(device="cpu")
    assert torch.equal(model.rotation(grid), table)
