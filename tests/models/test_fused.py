"""The fused functions equal the plain code in value and in every gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sitvit
from sitvit.bench.timing import open_gates, saved_bytes
from sitvit.models import fused, layers
from sitvit.models.layers import RMSNorm, modulate
from sitvit.models.positions import (
    grid_coordinates,
    rotate,
    rotation_angles,
    rotation_table,
)

from .test_sit import randomized

TABLE = rotation_table(rotation_angles(8, *grid_coordinates(2, 3), 10000.0))  # 6 tokens, d = 8


def inputs(dtype):
    x, shift, scale = torch.randn(2, 6, 16), torch.randn(2, 16), torch.randn(2, 16)
    return [tensor.to(dtype).requires_grad_() for tensor in (x, shift, scale)]


def heads(dtype):
    tensors = torch.randn(2, 6, 3, 2, 8), torch.randn(8), torch.randn(8)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def test_the_written_out_derivatives_pass_gradcheck_in_float64():
    assert torch.autograd.gradcheck(
        lambda x, shift, factor: fused.rms_modulate(x, shift, factor, 1e-6), inputs(torch.float64)
    )
    assert torch.autograd.gradcheck(
        lambda qkv, *weights: fused.norm_rotate_heads(qkv, *weights, TABLE.double(), 1e-6),
        heads(torch.float64),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fused_values_are_the_plain_ones(dtype):
    x, shift, scale = inputs(dtype)
    qkv, *weights = heads(dtype)
    # The plain code rounds to the input's type between norm and the rest, the fused one at the end.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    plain = modulate(RMSNorm(16, affine=False)(x), shift, scale)
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(fused.rms_modulate(x, shift, 1 + scale, 1e-6), plain, **close)
    table = TABLE.to(torch.promote_types(dtype, torch.float32))
    *turned, v = fused.norm_rotate_heads(qkv, *weights, table, 1e-6)
    assert torch.equal(v, qkv[:, :, 2])
    for part, weight in enumerate(weights):
        norm = RMSNorm(8).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(weight)
        torch.testing.assert_close(turned[part], rotate(norm(qkv[:, :, part]), table), **close)


@pytest.mark.parametrize("layout", ["contiguous", "expanded", "transposed", "at an odd offset"])
def test_gradients_of_the_heads_of_any_layout_are_taken_and_left_as_they_are(layout):
    tensors = heads(torch.float32)
    outputs = fused.norm_rotate_heads(*tensors, TABLE, 1e-6)
    grad = {
        "contiguous": lambda: torch.randn(2, 6, 2, 8),
        "expanded": lambda: torch.ones(()).expand(2, 6, 2, 8),
        "transposed": lambda: torch.randn(8, 2, 6, 2).permute(1, 2, 3, 0),
        "at an odd offset": lambda: torch.randn(1 + 2 * 6 * 2 * 8)[1:].view(2, 6, 2, 8),
    }[layout]()
    before = grad.clone()
    found = torch.autograd.grad(outputs, tensors, [grad] * 3, retain_graph=True)
    expected = torch.autograd.grad(outputs, tensors, [grad.contiguous().clone() for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(grad, before)


def test_the_gradient_of_a_modulated_norm_is_left_as_it_is():
    tensors, grad = inputs(torch.float32), torch.randn(2, 6, 16)
    before = grad.clone()
    torch.autograd.grad(fused.rms_modulate(*tensors, 1e-6), tensors, grad)
    assert torch.equal(grad, before)


def test_heads_of_any_layout_are_the_same():
    qkv, *weights = heads(torch.float32)
    turned = qkv.detach().transpose(1, 4).contiguous().transpose(1, 4)
    assert turned.stride(-1) != 1
    found = fused.norm_rotate_heads(turned, *weights, TABLE, 1e-6)
    for a, b in zip(found, fused.norm_rotate_heads(qkv, *weights, TABLE, 1e-6), strict=True):
        assert torch.equal(a, b)


def test_a_network_trains_with_any_attention_kernel():
    model = randomized()
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([3, 5])

    def gradients(kernel):
        model.zero_grad()
        with sdpa_kernel(kernel):
            model(x, t, labels).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    pairs = zip(gradients(SDPBackend.MATH), gradients(SDPBackend.FLASH_ATTENTION), strict=True)
    for math, flash in pairs:
        torch.testing.assert_close(math, flash, atol=1e-5, rtol=1e-4)


def test_without_gradients_the_values_are_the_same_and_the_input_is_left_as_it_is():
    model = randomized()
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([3, 5])
    before = x.clone()
    with torch.no_grad():
        found = model(x, t, labels)
    # Modulation in place is one addcmul, with the same bits.
    assert torch.equal(found, model(x, t, labels))
    assert torch.equal(x, before)


def test_plain_code_within_plain_code_ends_with_the_outer_block():
    with fused.plain():
        with fused.plain():
            pass
        assert fused.is_plain()
    assert not fused.is_plain()


def test_a_network_is_the_same_with_and_without_fusion():
    model = randomized()
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([3, 5])

    def value_and_gradients():
        model.zero_grad()
        out = model(x, t, labels)
        out.square().mean().backward()
        return [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    quick = value_and_gradients()
    with fused.plain():
        slow = value_and_gradients()
    assert any(not torch.equal(a, b) for a, b in zip(quick, slow, strict=True))  # two codes did run
    for a, b in zip(quick, slow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_an_input_made_again_for_backward_gives_the_same_bits(monkeypatch):
    model = randomized()
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([3, 5])
    made = []
    remake = fused._RmsModulate.remake
    monkeypatch.setattr(fused._RmsModulate, "remake", lambda node: made.append(node) or remake(node))

    def gradients(passes=1):
        model.zero_grad()
        loss = model(x, t, labels).square().mean()
        for number in range(passes):
            loss.backward(retain_graph=number + 1 < passes)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    found, twice = gradients(), gradients(passes=2)
    assert len(made) == 3 * 2 * len(model.blocks)
    monkeypatch.setattr(layers, "linear_after_norm", lambda linear, x: linear(x))
    for once, both, expected in zip(found, twice, gradients(), strict=True):
        assert torch.equal(once, expected)
        torch.testing.assert_close(both, 2 * expected)


def test_in_bf16_a_linear_after_the_norm_sees_the_input_it_had():
    """The normalised values are kept rounded there, so the input cannot be made again."""
    x, shift, factor = (tensor.detach().requires_grad_() for tensor in inputs(torch.bfloat16))
    linear = nn.Linear(16, 4, dtype=torch.bfloat16)

    def gradient(read):
        out = read(linear, fused.rms_modulate(x, shift, factor, 1e-6))
        return torch.autograd.grad(out.float().square().sum(), linear.weight)[0]

    assert torch.equal(gradient(fused.linear_after_norm), gradient(lambda linear, x: linear(x)))


def test_a_change_between_two_passes_is_refused_although_the_first_was_of_the_weights_alone():
    x, shift, scale = inputs(torch.float32)
    factor, linear = scale.detach() + 1, nn.Linear(16, 4)
    loss = fused.linear_after_norm(linear, fused.rms_modulate(x, shift, factor, 1e-6)).square().sum()
    torch.autograd.grad(loss, linear.weight, retain_graph=True)
    factor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


class Adapted(nn.Module):
    """A Linear with a low-rank part beside it, which reads the input in another way."""

    def __init__(self, linear, reading):
        super().__init__()
        self.linear, self.reading = linear, reading
        self.down = nn.Parameter(torch.randn(4, linear.in_features))
        self.up = nn.Linear(4, linear.out_features)

    def forward(self, x):
        if self.reading == "changed in place":
            x.mul_(1.5)
        if self.reading == "turned over":
            low = F.conv1d(x.transpose(1, 2), self.down.unsqueeze(-1)).transpose(1, 2)
        else:
            low = x @ self.down.T
        return self.linear(x) + self.up(low)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("reading", ["read twice", "turned over", "changed in place"])
def test_whatever_stands_in_for_a_linear_has_the_gradients_of_the_plain_code(reading, checkpointing):
    model = randomized()
    for block in model.blocks:
        block.attn.qkv = Adapted(block.attn.qkv, reading)
        block.mlp.fc1 = Adapted(block.mlp.fc1, reading)
    model.gradient_checkpointing = checkpointing
    x, t, labels = torch.randn(2, 4, 4, 8), torch.rand(2), torch.tensor([3, 5])

    def gradients():
        model.zero_grad()
        model(x, t, labels).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    found = gradients()
    with fused.plain():
        expected = gradients()
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_sit_on_vit5_keeps_no_more_for_backward_than_vanilla():
    inputs = torch.randn(1, 4, 32, 32), torch.tensor([0.5]), torch.tensor([1])
    kept = {}
    for name in ("SiT-S/2", "SiT-ViT5-S/2"):
        model = sitvit.build_model(name, depth=2)
        open_gates(model)
        kept[name] = saved_bytes(lambda model=model: model(*inputs), model)
    assert kept["SiT-ViT5-S/2"] < 0.95 * kept["SiT-S/2"]  # two in nineteen less, four tokens in 256 more


def test_the_plain_code_has_forward_mode_derivatives():
    model = randomized()
    t, labels = torch.rand(1), torch.tensor([3])
    x, direction = torch.randn(2, 1, 4, 4, 8)
    # Flash attention on a CPU has no forward mode either.
    with fused.plain(), sdpa_kernel(SDPBackend.MATH):
        _, found = torch.func.jvp(lambda x: model(x, t, labels), (x,), (direction,))
        step = 1e-2
        expected = (model(x + step * direction, t, labels) - model(x - step * direction, t, labels)) / (
            2 * step
        )
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-2)  # differences of order step^2


def test_a_second_derivative_is_an_error_in_the_fused_code_and_right_in_the_plain_one():
    """Silence would be a gradient penalty that teaches nothing."""
    model, t, labels = randomized().double(), torch.rand(1), torch.tensor([3])
    x, direction = torch.randn(2, 1, 4, 4, 8, dtype=torch.float64)
    x.requires_grad_()

    def gradient_penalty(x):
        (slope,) = torch.autograd.grad(model(x, t, labels).square().sum(), x, create_graph=True)
        return slope.square().sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient_penalty(x)
    with fused.plain(), sdpa_kernel(SDPBackend.MATH):
        (found,) = torch.autograd.grad(gradient_penalty(x), x)
        step = 1e-5
        ahead, behind = (gradient_penalty(x + sign * step * direction) for sign in (1, -1))
    expected = (ahead - behind) / (2 * step)  # right to order step^2
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-6, atol=0)
