"""The SDE: golden values; and on Gaussian data the exact law of the chain, without Monte Carlo."""

import itertools

import pytest
import torch

from sitvit.flow.ode import integrate
from sitvit.flow.parameterization import PREDICTIONS, as_velocity, noise_from_velocity
from sitvit.flow.paths import PATHS
from sitvit.flow.samplers import Sde, from_grid_points
from sitvit.flow.sde import DIFFUSIONS, LAST_STEPS, SDE_METHODS, Diffusion, integrate_sde
from sitvit.flow.times import grid

from ..oracles import GaussianData, MixtureData
from .golden import TRANSPORT, assert_same
from .test_paths import NAMES, T

METHODS = {"Euler": "euler-maruyama", "Heun": "stochastic-heun"}
EVERY_PATH = pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)


def law(data, times, diffusion, method, last_step="none"):
    """Mean and variance of the chain's end, exactly, from the path's own law at the first time.

    On Gaussian data a step is affine in state and noise, so the end is a + b x + sum_i c_i z_i for a start
    mean + std x. Rows of one run: all zero (a), the noise z_i alone (c_i), x = 1 alone (b).
    """
    steps = len(times) - 1
    mean, variance = data.moments(torch.tensor(times[0], dtype=torch.float64))
    x = mean.repeat(steps + 2, 1)
    x[-1] += variance.sqrt()

    def noise(step):
        z = torch.zeros_like(x)
        z[step + 1] = 1
        return z

    end = integrate_sde(data.velocity, x, times, diffusion, method, last_step, noise).state
    return end[0].item(), (end[1:] - end[0]).square().sum().item()


@pytest.mark.parametrize("key", TRANSPORT.under("sde/"))
def test_chains_equal_the_official_ones(key):
    """9 grid points, norm 1, a last step of 0.04: the reference's noise in its order."""
    _, name, prediction, method, form, last = key.split("/")
    path = PATHS[NAMES[name]]
    none = last == "None"
    sampler = from_grid_points(
        Sde(
            METHODS[method],
            diffusion=form,
            last_step="none" if none else last,
            last_step_size=0 if none else 0.04,
        ),
        9,
    )
    velocity = as_velocity(TRANSPORT.network, path, prediction)
    noise = TRANSPORT["in/sde_noise"]
    found = sampler.sample(velocity, path, prediction, TRANSPORT["in/z"], lambda i: noise[i])
    assert_same(found.state, TRANSPORT[key])
    assert found.num_evaluations == sampler.num_evaluations


@pytest.mark.parametrize("key", [k for k in TRANSPORT.under("path/") if "/diffusion/" in k])
def test_diffusions_equal_the_official_ones(key):
    _, name, _, form, norm = key.split("/")
    found = Diffusion(PATHS[NAMES[name]], form, float(norm))(T)
    assert_same(found, TRANSPORT[key])


@EVERY_PATH
@pytest.mark.parametrize("form", DIFFUSIONS)
@pytest.mark.parametrize("method", SDE_METHODS)
def test_each_diffusion_has_the_paths_marginals_at_order_one_in_the_step(path, form, method):
    data = GaussianData(path=path)
    wanted_mean, wanted_variance = data.moments(torch.tensor(0.9, dtype=torch.float64))
    errors = []
    for num_steps in (200, 400):
        mean, variance = law(data, grid(num_steps, (0.1, 0.9)), Diffusion(path, form), method)
        errors.append([abs(mean - wanted_mean), abs(variance - wanted_variance)])
    for coarse, fine in zip(*errors, strict=True):
        assert fine < 0.02
        assert coarse / fine > 1.7 or fine < 1e-5  # order one, or better by luck


@EVERY_PATH
@pytest.mark.parametrize("form", DIFFUSIONS)
@pytest.mark.parametrize("last_step", LAST_STEPS)
def test_250_steps_from_noise_reach_the_data(path, form, last_step):
    """The published setting but for the diffusion: mean 0.7 and spread 0.4 within 0.02.

    The norm is 1 but for "constant", which near t = 1 is far stiffer than the step: there 0.1.
    """
    data = GaussianData(path=path)
    none = last_step == "none"
    size = 0.0 if none else 0.04
    norm = 0.1 if form == "constant" else 1.0
    sampler = Sde(diffusion=form, diffusion_norm=norm, last_step=last_step, last_step_size=size)
    times = sampler.times(path, "velocity")
    mean, variance = law(data, times, Diffusion(path, form, norm), sampler.method, last_step)
    shrink = 0.0 if last_step in ("none", "Euler") else 0.04  # a mean has less spread than the data
    assert mean == pytest.approx(0.7, abs=0.02)
    assert variance**0.5 == pytest.approx(0.4, abs=0.02 + shrink)


@pytest.mark.parametrize("form", ["constant", "SBDM", "sigma", "linear", "increasing-decreasing"])
@EVERY_PATH
def test_a_diffusion_of_norm_zero_is_the_ode(path, form):
    x = torch.randn(5, 3, dtype=torch.float64)
    data = GaussianData(path=path)
    times = grid(20, (0.01, 0.95))
    noise = torch.randn(20, 5, 3, dtype=torch.float64)
    found = integrate_sde(
        data.velocity, x, times, Diffusion(path, form, 0), "euler-maruyama", "none", lambda i: noise[i]
    )
    expected = integrate(data.velocity, x, times, "euler")
    assert torch.equal(found.state, expected.state)


@pytest.mark.parametrize("form", ["sigma", "linear", "decreasing", "increasing-decreasing"])
def test_the_chain_has_a_mixtures_law(form):
    """The non-linear case, by the transition kernel on a grid of points: P(x_t < x) within 0.02 everywhere.

    100 Euler-Maruyama steps from N(0, 1) at t = 0 to t = 0.9; from a point x a step goes to a normal law.
    """
    data = MixtureData(PATHS["linear"])
    points = torch.linspace(-5, 5, 501, dtype=torch.float64)
    x = points.view(-1, 1)
    diffusion = Diffusion(PATHS["linear"], form)
    law = torch.exp(-(points**2) / 2)

    def step(times, noise):
        return integrate_sde(
            data.velocity, x, times, diffusion, "euler-maruyama", "none", lambda i: noise
        ).state

    for times in itertools.pairwise(grid(100, (0, 0.9))):
        mean = step(times, torch.zeros_like(x))
        spread = (step(times, torch.ones_like(x)) - mean).clamp(min=0.01)  # half the points' distance
        kernel = torch.exp(-(((points - mean) / spread) ** 2) / 2)  # from a row to a column
        law = (law[:, None] * kernel / kernel.sum(dim=1, keepdim=True)).sum(dim=0)
    law = law / law.sum()
    assert (law.cumsum(0) - law / 2 - data.cdf(points, 0.9)).abs().max() < 0.02


@EVERY_PATH
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("form", DIFFUSIONS)
@pytest.mark.parametrize("num_steps", [2, 25])
def test_every_combination_is_finite(path, prediction, form, num_steps):
    """With a network in bfloat16, every method and last step, few steps and more."""
    data = GaussianData(path=path)
    network = lambda x, t: data.predict(prediction, x, t).bfloat16()  # noqa: E731
    velocity = as_velocity(network, path, prediction)
    x_0 = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(num_steps, 8, 3, generator=torch.Generator().manual_seed(1))
    for method, last_step in itertools.product(SDE_METHODS, LAST_STEPS):
        size = 0.0 if last_step == "none" else 0.04
        sampler = Sde(method, num_steps, form, last_step=last_step, last_step_size=size)
        found = sampler.sample(velocity, path, prediction, x_0, lambda i: noise[i])
        assert found.state.isfinite().all()
        assert found.state.dtype == torch.float32
        assert not torch.equal(found.state, x_0)


@pytest.mark.parametrize("method", SDE_METHODS)
@pytest.mark.parametrize("last_step", LAST_STEPS)
def test_drift_and_score_share_one_call(method, last_step):
    """250 steps of Euler-Maruyama are 250 calls where the official code makes 500; Heun 499 for 998."""
    calls = []
    size = 0.0 if last_step == "none" else 0.04
    sampler = Sde(method, last_step=last_step, last_step_size=size)
    data = GaussianData()

    def velocity(x, t):
        calls.append(1)
        return data.velocity(x, t)

    found = sampler.sample(velocity, data.path, "velocity", torch.zeros(1, 1), lambda i: torch.zeros(1, 1))
    last = last_step != "none"
    assert len(calls) == found.num_evaluations == sampler.num_evaluations
    assert len(calls) == (250 - last) * (2 if method == "stochastic-heun" else 1) + last


def test_sharing_the_call_changes_no_bit():
    """Velocity and score each from a call of its own, as the official code has it, written out here."""
    data, path = GaussianData(), PATHS["linear"]
    start = torch.randn(16, 4, dtype=torch.float64)
    noise = torch.randn(50, 16, 4, dtype=torch.float64)
    times = grid(50, (0, 0.96))
    diffusion = Diffusion(path, "sigma")
    shared = integrate_sde(
        data.velocity, start, times, diffusion, "euler-maruyama", "none", lambda i: noise[i]
    )
    calls, x = [], start

    def network(x, t):
        calls.append(1)
        return data.velocity(x, t)

    for i, (t, t_next) in enumerate(itertools.pairwise(times)):
        at, h = torch.full((16,), t, dtype=torch.float64), t_next - t
        implied_noise = noise_from_velocity(path, network(x, at), x, at)
        drift = network(x, at) - implied_noise  # D / sigma = 1
        x = x + h * drift + (2 * (1 - at) * h).sqrt()[:, None] * noise[i]
    assert len(calls) == 2 * shared.num_evaluations
    assert torch.equal(shared.state, x)


@pytest.mark.parametrize("method", SDE_METHODS)
def test_one_step_moves(method):
    sampler = Sde(method, num_steps=1, last_step="none", last_step_size=0)
    x = torch.ones(2, 1)
    velocity = lambda x, t: torch.full_like(x, 3.0)  # noqa: E731
    assert (sampler.sample(velocity, PATHS["linear"], "velocity", x, lambda i: 0 * x).state != x).all()


def test_steps_too_few_for_a_last_step_are_refused():
    with pytest.raises(ValueError, match="2 or more"):
        Sde(num_steps=1)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"diffusion": "cosine"}, "known are constant, SBDM"),
        ({"diffusion_norm": -1.0}, "norm must be 0 or more"),
        ({"last_step": "mean"}, "known are none, Mean, Tweedie, Euler"),
        ({"last_step": "none"}, "do not go together"),
        ({"last_step_size": 0.0}, "do not go together"),
        ({"last_step_size": 1.5}, "below 1"),
        ({"method": "heun"}, "euler-maruyama, stochastic-heun"),
        ({"interval": (0.1, 0.9)}, "last step ends at t = 1"),
        ({"num_steps": 0}, "whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sde(**kwargs)


def test_a_chain_that_runs_backwards_is_refused():
    with pytest.raises(ValueError, match="must increase"):
        integrate_sde(
            GaussianData().velocity,
            torch.zeros(1, 1),
            [1.0, 0.0],
            Diffusion(PATHS["linear"], "sigma"),
            "euler-maruyama",
            "none",
            lambda i: torch.zeros(1, 1),
        )


def test_a_network_that_is_not_finite_is_an_error_that_says_when():
    velocity = lambda x, t: torch.where(t[:, None] > 0.5, torch.nan, x)  # noqa: E731
    with pytest.raises(FloatingPointError, match=r"not finite at t = 0\.50"):
        Sde().sample(velocity, PATHS["linear"], "velocity", torch.ones(2, 1), lambda i: torch.ones(2, 1))
