"""ODE solvers: golden values, order and limit, torchdiffeq, call counts, what goes wrong."""

import math

import pytest
import torch
from torchdiffeq import odeint
from torchdiffeq._impl.odeint import SOLVERS

from sitvit.flow import ode
from sitvit.flow.ode import ADAPTIVE, METHODS, PER_IMAGE, TORCHDIFFEQ_FIXED, integrate
from sitvit.flow.parameterization import as_velocity
from sitvit.flow.paths import PATHS
from sitvit.flow.samplers import AdaptiveOde, FixedOde
from sitvit.flow.times import grid

from ..oracles import GaussianData, MixtureData
from .golden import TRANSPORT, assert_same
from .test_paths import NAMES

DATA = GaussianData()
OURS = {"euler": "euler", "midpoint": "midpoint", "heun2": "heun", "heun3": "heun3", "rk4": "rk4"}
EVERY_PATH = pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)


def solve(velocity, x, num_steps, method):
    return integrate(velocity, x, grid(num_steps), method).state


@pytest.mark.parametrize("key", [k for k in TRANSPORT.under("ode/") if "dopri5" not in k])
def test_fixed_steps_equal_the_official_ones(key):
    _, name, prediction, method, points = key.split("/")
    path = PATHS[NAMES[name]]
    sampler = FixedOde(OURS[method], num_steps=int(points) - 1)
    velocity = as_velocity(TRANSPORT.network, path, prediction)
    found = sampler.sample(velocity, path, prediction, TRANSPORT["in/z"], None)
    assert_same(found.state, TRANSPORT[key])


@pytest.mark.parametrize("method", ["dopri5", PER_IMAGE])
@pytest.mark.parametrize("key", [k for k in TRANSPORT.under("ode/") if "dopri5" in k])
def test_adaptive_steps_reach_the_official_result_within_their_tolerance(key, method):
    """The reference ran at tight tolerances; noise and score predictions are stiff at their start."""
    _, name, prediction, _, _ = key.split("/")
    path = PATHS[NAMES[name]]
    velocity = as_velocity(TRANSPORT.network, path, prediction)
    sampler = AdaptiveOde(method, atol=1e-10, rtol=1e-10)
    found = sampler.sample(velocity, path, prediction, TRANSPORT["in/z"], None).state
    assert (found - TRANSPORT[key]).abs().max() <= 1e-7 * TRANSPORT[key].abs().max()


def test_every_torchdiffeq_method_has_its_name_here():
    ours_or_theirs = {*METHODS, *ADAPTIVE, *TORCHDIFFEQ_FIXED, "heun2"}
    assert set(SOLVERS) <= ours_or_theirs
    assert ours_or_theirs - set(SOLVERS) == {"heun", PER_IMAGE}


@EVERY_PATH
@pytest.mark.parametrize("name", METHODS)
def test_each_method_reaches_the_exact_flow_map(name, path):
    data = GaussianData(path=path)
    x_0 = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1)
    end = 1 - 1e-3 if path.name == "vp" else 1.0  # the vp path's slope is infinite at 1
    exact = data.flow_map(x_0, 0, end)
    steps = [64, 128, 256]
    errors = [
        (integrate(data.velocity, x_0, grid(n, (0, end)), name).state - exact).abs().max().item()
        for n in steps
    ]
    assert errors == sorted(errors, reverse=True)
    # The vp velocity is near a root of 1 - t: there the order shows only below steps of 1e-3.
    assert errors[-1] < (0.02 if path.name == "vp" else 10 * steps[-1] ** -METHODS[name].order)


@pytest.mark.parametrize("path", ["linear", "gvp"])
@pytest.mark.parametrize("name", METHODS)
def test_each_method_has_the_order_that_it_states(name, path):
    """On a mixture, since on one Gaussian a method can be better than its order."""
    data = MixtureData(PATHS[path])
    x_0 = torch.linspace(-2, 2, 41, dtype=torch.float64).view(-1, 1)
    steps = [256, 512]
    ends = [integrate(data.velocity, x_0, grid(n), name).state for n in steps]
    errors = [(data.cdf(end, 1) - data.cdf(x_0, 0)).abs().max().item() for end in ends]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(METHODS[name].order, abs=0.15)


@EVERY_PATH
@pytest.mark.parametrize("method", [*METHODS, "dopri5", PER_IMAGE])
def test_a_flow_keeps_quantiles_of_a_mixture(path, method):
    """The exact map of a non-linear one-dimensional flow: P(x_1 < its end) = P(x_0 < its start)."""
    data = MixtureData(path)
    x_0 = torch.linspace(-2, 2, 15, dtype=torch.float64).view(-1, 1)
    end = 1 - 1e-3
    steps = {"euler": 2000}.get(method, 400)
    found = integrate(data.velocity, x_0, grid(steps, (0, end)), method, atol=1e-8, rtol=1e-8).state
    tolerance = 5e-3 if path.name == "vp" or method == "euler" else 1e-4
    torch.testing.assert_close(data.cdf(found, end), data.cdf(x_0, 0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("theirs", ["euler", "midpoint", "heun2", "rk4"])
def test_each_method_of_ours_takes_torchdiffeqs_steps(theirs):
    x_0 = torch.randn(5, 3, dtype=torch.float64)
    times = torch.linspace(0, 1, 8, dtype=torch.float64)
    expected = odeint(lambda t, x: DATA.velocity(x, t.expand(len(x))), x_0, times, method=theirs)[-1]
    out = integrate(DATA.velocity, x_0, times.tolist(), OURS[theirs]).state
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*METHODS, *ADAPTIVE, *TORCHDIFFEQ_FIXED])
def test_each_method_integrates_a_constant_field_exactly(name):
    out = integrate(lambda x, t: torch.full_like(x, 3.0), torch.zeros(2, 3).double(), grid(8), name).state
    torch.testing.assert_close(out, torch.full((2, 3), 3.0).double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*METHODS, *ADAPTIVE, *TORCHDIFFEQ_FIXED])
def test_each_method_solves_the_exponential_and_says_how_often_it_asked(name):
    calls = []

    def velocity(x, t):
        assert t.shape == (len(x),)
        calls.append(1)
        return x

    solution = integrate(velocity, torch.ones(2, 1).double(), grid(50), name, atol=1e-8, rtol=1e-8)
    assert solution.num_evaluations == len(calls)
    assert solution.state[0, 0].item() == pytest.approx(math.e, rel=0.012 if name == "euler" else 1e-3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_steps", [1, 2, 10, 50])
def test_a_fixed_method_calls_the_network_as_often_as_its_steps_say(name, num_steps):
    calls, ticks = [], []

    def velocity(x, t):
        calls.append(float(t[0]))
        return x

    x = torch.ones(2, 1)
    out = integrate(velocity, x, grid(num_steps), name, ticks.append)
    assert out.num_evaluations == len(calls) == FixedOde(name, num_steps).num_evaluations
    assert len(ticks) == num_steps
    assert not torch.equal(out.state, x)
    assert min(calls) == 0
    assert max(calls) <= 1


@pytest.mark.parametrize("name", [*METHODS, "dopri5", PER_IMAGE])
def test_the_way_back_undoes_the_way_there(name):
    x_0 = torch.randn(5, 3, dtype=torch.float64)
    there = integrate(DATA.velocity, x_0, grid(200), name, atol=1e-9, rtol=1e-9).state
    back = integrate(DATA.velocity, there, grid(200)[::-1], name, atol=1e-9, rtol=1e-9).state
    torch.testing.assert_close(back, x_0, rtol=0, atol=0.06 if name == "euler" else 1e-3)


def test_encoding_by_a_sampler_is_the_exact_inverse_map():
    x_1 = torch.randn(5, 3, dtype=torch.float64)
    sampler = AdaptiveOde(PER_IMAGE, atol=1e-9, rtol=1e-9)
    x_0 = sampler.encode(DATA.velocity, PATHS["linear"], "velocity", x_1).state
    torch.testing.assert_close(DATA.flow_map(x_0), x_1, rtol=0, atol=1e-6)


def test_any_rising_grid_is_heeded():
    times = [0.0, 0.05, 0.3, 0.31, 1.0]
    seen = []
    velocity = lambda x, t: seen.append(float(t[0])) or DATA.velocity(x, t)  # noqa: E731
    integrate(velocity, torch.zeros(1, 1).double(), times, "euler")
    assert seen == times[:-1]


def test_a_shifted_grid_has_its_middle_in_the_noise():
    assert grid(2, shift=3)[1] == pytest.approx(1 / 4)
    assert grid(4) == [0, 0.25, 0.5, 0.75, 1]
    assert grid(2, (0.2, 0.6)) == pytest.approx([0.2, 0.4, 0.6])


@pytest.mark.parametrize("times", [[0.0], [0.0, 0.5, 0.5], [0.0, 1.5], [0.0, 0.5, 0.2], [0.0, math.nan]])
def test_grids_that_make_no_sense_are_refused(times):
    with pytest.raises(ValueError, match="time"):
        integrate(DATA.velocity, torch.zeros(1, 1), times, "euler")


@pytest.mark.parametrize("num_steps", [0, -1, 2.5, True, "5"])
def test_step_counts_that_are_no_whole_number_from_one_are_refused(num_steps):
    with pytest.raises(ValueError, match="whole number"):
        grid(num_steps)


def test_an_unknown_method_is_answered_with_the_known():
    with pytest.raises(ValueError, match="euler, midpoint, heun, rk4"):
        integrate(DATA.velocity, torch.zeros(1, 1), [0.0, 1.0], "rk5")


@pytest.mark.parametrize("bad", [0, -1e-3, math.nan, math.inf, "1e-3", [1e-3], True, None])
def test_tolerances_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="atol must be a number above 0"):
        integrate(DATA.velocity, torch.zeros(1, 1), [0.0, 1.0], "dopri5", atol=bad)


def nan_after_half(x, t):
    return torch.where(t.view(-1, 1) > 0.5, torch.nan, x)


@pytest.mark.parametrize("name", [*METHODS, *ADAPTIVE])
def test_a_network_that_is_not_finite_is_an_error_that_says_when(name):
    with pytest.raises(FloatingPointError, match=r"output is not finite at t = 0\.(5|6|7|8|9)"):
        integrate(nan_after_half, torch.ones(2, 1), grid(10), name)


def test_a_state_that_overflows_is_an_error():
    with pytest.raises(FloatingPointError, match="not finite"):
        solve(lambda x, t: 1e30 * x, torch.ones(1, 1), 4, "euler")


@pytest.mark.parametrize("name", ["dopri5", "bosh3", PER_IMAGE])
def test_a_step_that_underflows_names_solver_time_tolerances_and_a_way_out(name):
    def cliff(x, t):  # a jump that no step resolves
        return torch.where(t.view(-1, 1) > 0.5, 1e12 * torch.sin(1e12 * x), x)

    with pytest.raises(FloatingPointError, match=rf"{name} gave up at t = 0\.5.*1e-12.*fixed-step"):
        integrate(cliff, torch.ones(2, 1, dtype=torch.float64), grid(1), name, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["dopri5", PER_IMAGE])
def test_too_many_steps_are_an_error_that_names_solver_and_time(name, monkeypatch):
    monkeypatch.setattr(ode, "MAX_STEPS", 3)
    with pytest.raises(FloatingPointError, match=rf"{name} gave up at t = 0\.\d+ .*fixed-step"):
        integrate(stiff, torch.ones(2, 1).double(), grid(1), name, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", [*METHODS, "dopri5", PER_IMAGE])
def test_a_state_in_bfloat16_is_carried_in_float32(name):
    x = torch.randn(4, 3).bfloat16()
    seen = []

    def network(x, t):
        seen.append((x.dtype, t.dtype))
        return DATA.velocity(x, t).bfloat16()

    out = integrate(network, x, grid(20), name, atol=1e-2, rtol=1e-2).state
    assert out.dtype == torch.float32
    assert set(seen) == {(torch.float32, torch.float32)}


def stiff(x, t):
    """Elementwise, and harder for some samples than for others."""
    return torch.sin(8 * x) * x.square() + t.view(-1, 1)


def test_the_adaptive_method_of_each_image_does_not_see_its_batch_mates():
    x = 3 * torch.randn(8, 7, generator=torch.Generator().manual_seed(0))
    together = integrate(stiff, x, grid(1), PER_IMAGE).state
    apart = torch.cat([integrate(stiff, part, grid(1), PER_IMAGE).state for part in x.split(1)])
    shared = integrate(stiff, x, grid(1), "dopri5").state
    shared_apart = torch.cat([integrate(stiff, part, grid(1), "dopri5").state for part in x.split(1)])
    assert torch.equal(together, apart)
    assert (shared - shared_apart).abs().max() > 1e-5  # what torchdiffeq's shared step does


@pytest.mark.parametrize("rtol", [1e-3, 1e-5, 1e-7])
def test_the_adaptive_method_errs_about_as_much_as_its_tolerance(rtol):
    x_0 = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1)
    found = integrate(DATA.velocity, x_0, grid(1), PER_IMAGE, atol=rtol, rtol=rtol).state
    assert (found - DATA.flow_map(x_0)).abs().max() < 10 * rtol


def test_a_velocity_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="shape"):
        integrate(lambda x, t: torch.cat([x, x], dim=1), torch.ones(1, 1, 2), [0.0, 1.0], "euler")


@pytest.mark.parametrize("method", ["dopri5", "dopri5_per_image"])
def test_a_tolerance_finer_than_float32_is_refused(method):
    with pytest.raises(ValueError, match="finer than the state's rounding"):
        integrate(lambda x, t: x, torch.ones(1, 2), [0.0, 1.0], method, atol=1e-12, rtol=1e-12)


def test_a_field_that_overflows_ends_the_adaptive_method_at_once():
    calls = []

    def steep(x, t):
        calls.append(t)
        return 1e20 * x

    with pytest.raises(FloatingPointError, match="underflows"):
        integrate(steep, torch.ones(2, 2), [0.0, 1.0], "dopri5_per_image")
    assert len(calls) < 200
