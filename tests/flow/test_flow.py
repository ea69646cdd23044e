"""Path, objective, solvers and guidance against closed forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdiffeq import odeint

from sitvit.flow.guidance import classifier_free_guidance
from sitvit.flow.objective import velocity_loss
from sitvit.flow.ode import METHODS, integrate, uniform_times
from sitvit.flow.paths import Linear

from ..oracles import GaussianData

DATA = GaussianData()


def solve(velocity, x, num_steps, method):
    return integrate(velocity, x, uniform_times(num_steps), method, lambda: None)


@given(t=st.floats(0, 1))
def test_the_velocity_is_the_derivative_of_the_path(t):
    x_0, x_1 = torch.randn(2, 1, 3, dtype=torch.float64)
    at = torch.tensor([t], dtype=torch.float64)
    _, derivative = torch.func.jvp(
        lambda time: Linear().interpolate(x_0, x_1, time), (at,), (torch.ones_like(at),)
    )
    torch.testing.assert_close(Linear().velocity(x_0, x_1, at), derivative)


def test_the_path_runs_from_noise_to_data():
    x_0, x_1 = torch.randn(2, 4, 3)
    assert torch.equal(Linear().interpolate(x_0, x_1, torch.zeros(4)), x_0)
    assert torch.equal(Linear().interpolate(x_0, x_1, torch.ones(4)), x_1)


def test_the_loss_of_the_true_velocity_is_zero_and_of_zero_is_the_targets_square():
    x_0, x_1, t = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.rand(2)
    true = velocity_loss(lambda x, t: x_1 - x_0, Linear(), x_0, x_1, t)
    assert torch.equal(true, torch.zeros(2))
    none = velocity_loss(lambda x, t: torch.zeros_like(x), Linear(), x_0, x_1, t)
    torch.testing.assert_close(none, (x_1 - x_0).square().mean(dim=(1, 2)))


@pytest.mark.parametrize("name", METHODS)
def test_each_solver_reaches_the_exact_flow_map_at_its_stated_order(name):
    x_0 = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1)
    steps = [32, 64, 128, 256]
    errors = [(solve(DATA.velocity, x_0, n, name) - DATA.flow_map(x_0)).abs().max().item() for n in steps]
    slope = math.log(errors[0] / errors[-1]) / math.log(steps[-1] / steps[0])
    assert slope == pytest.approx(METHODS[name].order, abs=0.15)
    assert errors[-1] < 10 * steps[-1] ** -METHODS[name].order


@pytest.mark.parametrize(("name", "theirs"), [("euler", "euler"), ("heun", "heun2")])
def test_each_solver_takes_torchdiffeqs_steps(name, theirs):
    x_0 = torch.randn(5, 3, dtype=torch.float64)
    times = torch.linspace(0, 1, 8, dtype=torch.float64)
    expected = odeint(lambda t, x: DATA.velocity(x, t.expand(len(x))), x_0, times, method=theirs)[-1]
    out = integrate(DATA.velocity, x_0, times.tolist(), name, lambda: None)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_steps", [1, 2, 10, 50])
def test_a_solver_calls_the_network_as_often_as_it_says(name, num_steps):
    calls, ticks = [], []

    def velocity(x, t):
        assert t.shape == (len(x),)
        calls.append(float(t[0]))
        return x

    x = torch.ones(2, 1)
    out = integrate(velocity, x, uniform_times(num_steps), name, lambda: ticks.append(1))
    assert len(calls) == num_steps * METHODS[name].num_evaluations
    assert len(ticks) == num_steps
    assert not torch.equal(out, x)
    assert min(calls) == 0
    assert max(calls) <= 1


@pytest.mark.parametrize("num_steps", [0, -1])
def test_fewer_than_one_step_is_refused(num_steps):
    with pytest.raises(ValueError, match="at least 1"):
        uniform_times(num_steps)


def test_an_unknown_method_is_answered_with_the_known():
    with pytest.raises(ValueError, match="euler, heun"):
        integrate(DATA.velocity, torch.zeros(1, 1), [0.0, 1.0], "rk5", lambda: None)


def test_a_state_that_is_not_finite_is_an_error():
    with pytest.raises(FloatingPointError, match="not finite"):
        solve(lambda x, t: x * math.nan, torch.ones(1, 1), 2, "euler")


def class_or_null(x, t, labels):
    """A stub network: 1 where the label is a class, 0 where it is null (3)."""
    return (labels != 3).float().view(-1, 1, 1, 1).expand_as(x)


@pytest.mark.parametrize("channels", [4, 16])
def test_guidance_acts_on_every_channel(channels):
    guided = classifier_free_guidance(class_or_null, torch.tensor([0, 2]), 3, cfg_scale=4)
    out = guided(torch.zeros(2, channels, 2, 2), torch.zeros(2))
    assert torch.equal(out, torch.full_like(out, 4))


def test_guidance_of_scale_one_is_the_network_itself_at_one_pass():
    calls = []

    def network(x, t, labels):
        calls.append(len(x))
        return class_or_null(x, t, labels)

    x, t, labels = torch.randn(2, 4, 2, 2), torch.zeros(2), torch.tensor([0, 3])
    out = classifier_free_guidance(network, labels, None, 1)(x, t)
    assert torch.equal(out, class_or_null(x, t, labels))
    assert calls == [2]


@pytest.mark.parametrize("scale", [0.5, 0, -1, math.nan, math.inf])
def test_a_guidance_scale_below_one_is_refused(scale):
    with pytest.raises(ValueError, match="cfg_scale must be 1"):
        classifier_free_guidance(class_or_null, torch.tensor([0]), 3, scale)
