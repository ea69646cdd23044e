"""ViT-5 and SiT on ViT-5 equal the equations written out slowly, in value and in every gradient.

No published tensor holds gradients of either, so the slow code is what proves the written-out derivatives in
the whole network. Every gate, gamma, norm weight, register and position is non-zero.
"""

import pytest
import torch

from .slow import slow_sit, slow_vit5
from .test_sit import randomized
from .test_vit5 import randomized as random_classifier


def sit(**arguments):
    model = randomized(norm_affine=True, positions="learned", **arguments)
    inputs = torch.randn(2, 4, 4, 8), torch.tensor([0.1, 0.8]), torch.tensor([3, 5])
    return model, slow_sit, inputs


def vit5():
    return random_classifier(img_size=(16, 24), depth=2), slow_vit5, (torch.randn(2, 3, 16, 24),)


CASES = pytest.mark.parametrize("case", [sit, vit5], ids=["SiT on ViT-5", "ViT-5"])
ROUNDING = pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # Tables of cosines and sines are float32 in any network, and off by 6e-8; sums over tokens and batch in
    # float32 by up to 2e-5 of a gradient's largest value.
    [(torch.float64, 1e-6), (torch.float32, 2e-5)],
)


def value_and_gradients(function, weights, x, *rest):
    """The value, and by `x` and each of `weights` the gradient of a sum with a factor for every output."""
    x = x.requires_grad_()
    value = function(x, *rest)
    factors = torch.linspace(-1, 1, value.numel(), dtype=x.dtype).view_as(value)
    found = torch.autograd.grad((value * factors).sum(), [x, *weights.values()])
    return {"value": value.detach(), "input": found[0], **dict(zip(weights, found[1:], strict=True))}


@CASES
@ROUNDING
def test_value_and_all_gradients_equal_the_equations_written_out_slowly(case, dtype, tolerance):
    model, slow, (x, *rest) = case()
    model.to(dtype)
    state = {name: tensor.detach().double().requires_grad_() for name, tensor in model.state_dict().items()}
    assert all((tensor != 0).all() for tensor in state.values())
    expected = value_and_gradients(lambda *given: slow(state, model.config, *given), state, x.double(), *rest)
    ours = dict(model.named_parameters())
    assert ours.keys() == state.keys()
    found = value_and_gradients(model, ours, x.to(dtype), *rest)
    for name, wanted in expected.items():
        assert wanted.abs().max() > 1e-3, name
        assert (found[name] - wanted).abs().max() <= tolerance * wanted.abs().max(), name


def test_fixed_positions_and_norms_without_weight_are_the_slow_ones_too():
    model = randomized()
    inputs = torch.randn(2, 4, 4, 8), torch.tensor([0.1, 0.8]), torch.tensor([3, 5])
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    expected = slow_sit(state, model.config, inputs[0].double(), *inputs[1:])
    assert expected.std() > 0.1
    # float32 against float64 through two blocks
    torch.testing.assert_close(model(*inputs).double(), expected, atol=2e-5, rtol=1e-4)
