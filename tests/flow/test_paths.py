"""Paths and conversions against golden values, autograd and each other."""

import itertools

import pytest
import torch

from sitvit.flow.parameterization import CONVERSIONS, PREDICTIONS, as_velocity
from sitvit.flow.paths import PATHS, find_path

from ..oracles import GaussianData
from .golden import TRANSPORT, assert_same

NAMES = {"Linear": "linear", "GVP": "gvp", "VP": "vp"}
X_0, X_1 = TRANSPORT["in/noise_x0"], TRANSPORT["in/data_x1"]
T = TRANSPORT["in/t"]


@pytest.mark.parametrize("official", NAMES)
@pytest.mark.parametrize("name", ["alpha", "sigma", "d_alpha", "d_sigma"])
def test_coefficients_equal_the_official_ones(official, name):
    assert_same(getattr(PATHS[NAMES[official]], name)(T), TRANSPORT[f"path/{official}/{name}"])


@pytest.mark.parametrize("official", NAMES)
def test_a_point_and_its_velocity_equal_the_official_ones(official):
    path = PATHS[NAMES[official]]
    assert_same(path.interpolate(X_0, X_1, T), TRANSPORT[f"path/{official}/x_t"])
    assert_same(path.velocity(X_0, X_1, T), TRANSPORT[f"path/{official}/velocity_target"])


@pytest.mark.parametrize("official", NAMES)
@pytest.mark.parametrize("names", ["noise_from_velocity", "score_from_velocity", "velocity_from_score"])
def test_conversions_equal_the_official_ones(official, names):
    """The reference converted the toy network's output, read as what each conversion starts from."""
    path = PATHS[NAMES[official]]
    x_t = TRANSPORT[f"path/{official}/x_t"]
    wanted, given_ = names.split("_from_")
    found = CONVERSIONS[given_, wanted](path, TRANSPORT.network(x_t, T), x_t, T)
    assert_same(found, TRANSPORT[f"path/{official}/{names}"])


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
def test_derivatives_are_those_that_autograd_finds(path):
    at = torch.linspace(0, 0.999, 100, dtype=torch.float64)
    for value, derivative in ((path.alpha, path.d_alpha), (path.sigma, path.d_sigma)):
        _, expected = torch.func.jvp(value, (at,), (torch.ones_like(at),))
        torch.testing.assert_close(derivative(at), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
def test_the_velocity_is_the_derivative_of_the_path(path):
    _, derivative = torch.func.jvp(lambda t: path.interpolate(X_0, X_1, t), (T,), (torch.ones_like(T),))
    torch.testing.assert_close(path.velocity(X_0, X_1, T), derivative, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
def test_the_path_ends_exactly_at_the_data_and_begins_in_noise(path, dtype):
    x_0, x_1 = torch.randn(2, 4, 3, dtype=dtype)
    assert torch.equal(path.interpolate(x_0, x_1, torch.ones(4, dtype=dtype)), x_1)
    start = path.interpolate(x_0, x_1, torch.zeros(4, dtype=dtype))
    if path.name == "vp":  # the one path that starts with some data
        assert (start - x_0).abs().max() < 0.007 * (1 + x_1.abs().max())
    else:
        assert torch.equal(start, x_0)


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
@pytest.mark.parametrize("there", list(itertools.permutations(PREDICTIONS, 2)), ids="-".join)
def test_each_conversion_gives_what_the_path_was_made_of(path, there):
    """Inside the path a point's velocity, noise, score and data determine each other."""
    source, wanted = there
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    x_0, x_1 = torch.randn(2, 50, 3, dtype=torch.float64)
    x_t = path.interpolate(x_0, x_1, t)
    true = {"velocity": path.velocity(x_0, x_1, t), "noise": x_0, "data": x_1}
    true["score"] = -x_0 / path.sigma(t)[:, None]
    found = CONVERSIONS[source, wanted](path, true[source], x_t, t)
    torch.testing.assert_close(found, true[wanted], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
@pytest.mark.parametrize("there", list(itertools.permutations(PREDICTIONS, 2)), ids="-".join)
def test_each_conversion_goes_round(path, there):
    source, wanted = there
    t = torch.linspace(0.01, 0.99, 20, dtype=torch.float64)
    value, x = torch.randn(2, 20, 3, dtype=torch.float64)
    back = CONVERSIONS[wanted, source](path, CONVERSIONS[source, wanted](path, value, x, t), x, t)
    torch.testing.assert_close(back, value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
@pytest.mark.parametrize("there", CONVERSIONS, ids="-".join)
def test_each_conversion_is_finite_up_to_the_ends(path, there, dtype):
    t = torch.tensor([0, 1e-6, 0.5, 1 - 1e-6, 1], dtype=dtype)
    value, x = torch.randn(2, 5, 3, dtype=dtype)
    assert CONVERSIONS[there](path, value, x, t).isfinite().all()


@pytest.mark.parametrize("name", ["linear", "gvp"])
def test_at_the_ends_denominators_count_as_a_thousandth(name):
    x, value = torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.5])
    ends = torch.tensor([0.0, 1.0])
    data = CONVERSIONS["noise", "data"](PATHS[name], value, x, ends)
    noise = CONVERSIONS["data", "noise"](PATHS[name], value, x, ends)
    assert data[0].item() == pytest.approx(1.5 / 1e-3)  # (x - e) / alpha, alpha = 0
    assert noise[1].item() == pytest.approx(1.5 / 1e-3)  # (x - d) / sigma, sigma = 0
    assert PATHS["vp"].d_sigma(ends)[1].item() == pytest.approx(-0.05 / 1e-3)


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
def test_the_velocity_determines_noise_and_data_at_both_ends(path):
    """Of Gaussian data: at t = 0 E[data] is its mean, at t = 1 the point; the noise the other way round."""
    data = GaussianData(path=path)
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    end = 1 - 1e-6 if path.name == "vp" else 1  # the vp path's velocity is infinite at 1 itself
    for t in (0, end):  # by the floor, 1e-3 of sigma is missing there
        at = torch.full((9,), float(t), dtype=torch.float64)
        velocity = data.velocity(x, at)
        for kind in ("noise", "data"):
            found = CONVERSIONS["velocity", kind](path, velocity, x, at)
            torch.testing.assert_close(found, data.predict(kind, x, at), rtol=1e-6, atol=0.015)


@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_best_networks_all_have_the_same_velocity(path, prediction):
    data = GaussianData(path=path)
    x, t = torch.randn(9, dtype=torch.float64), torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    velocity = as_velocity(lambda x, t: data.predict(prediction, x, t), path, prediction)(x, t)
    torch.testing.assert_close(velocity, data.velocity(x, t), rtol=1e-9, atol=1e-9)


def test_unknown_names_are_answered_with_the_known():
    with pytest.raises(ValueError, match="linear, gvp, vp"):
        find_path("cosine")
    with pytest.raises(ValueError, match="velocity, noise, score, data"):
        as_velocity(lambda x, t: x, PATHS["linear"], "epsilon")
