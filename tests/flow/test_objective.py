"""Losses, their weights and times: golden values, equalities between predictions, closed forms."""

import math

import pytest
import torch

from sitvit.flow.intervals import ode_interval, sde_interval, training_interval
from sitvit.flow.objective import WEIGHTS, DiffusionObjective, Objective
from sitvit.flow.parameterization import CONVERSIONS, PREDICTIONS
from sitvit.flow.paths import PATHS, Linear
from sitvit.flow.times import TimeDistribution

from ..oracles import GaussianData
from .golden import TRANSPORT, assert_same
from .test_paths import NAMES, X_0, X_1, T

OFFICIAL_WEIGHTS = {"None": "none", "velocity": "velocity", "likelihood": "likelihood"}
EVERY_PATH = pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)


@pytest.mark.parametrize("key", TRANSPORT.under("loss/"))
def test_losses_equal_the_official_ones(key):
    """The reference reads a weight beside a velocity prediction and ignores it: there, none."""
    _, path, prediction, weight = key.split("/")
    ours = "none" if prediction == "velocity" else OFFICIAL_WEIGHTS[weight]
    objective = Objective(PATHS[NAMES[path]], prediction, ours)
    assert_same(objective.loss(TRANSPORT.network, X_0, X_1, T), TRANSPORT[key])


@EVERY_PATH
@pytest.mark.parametrize("weight", ["velocity", "likelihood"])
@pytest.mark.parametrize("prediction", ["noise", "score", "data"])
def test_a_weight_makes_one_loss_of_all_predictions(path, weight, prediction):
    """A network's error, told as velocity, noise, score or data, costs the same."""
    t = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    x_0, x_1, said = torch.randn(3, 7, 3, dtype=torch.float64)
    x_t = path.interpolate(x_0, x_1, t)
    converted = CONVERSIONS["velocity", prediction](path, said, x_t, t)
    expected = Objective(path, "velocity", weight).loss(lambda x, t: said, x_0, x_1, t)
    found = Objective(path, prediction, weight).loss(lambda x, t: converted, x_0, x_1, t)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@EVERY_PATH
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_loss_is_least_at_the_posterior_mean(path, weight, prediction):
    """Of Gaussian data the best prediction beats itself moved by 0.05 either way, on 20,000 pairs."""
    data = GaussianData(path=path)
    generator = torch.Generator().manual_seed(0)
    x_0, z = torch.randn(2, 1, 20_000, dtype=torch.float64, generator=generator)
    t = torch.tensor([0.4], dtype=torch.float64)
    objective = Objective(path, prediction, weight)

    def loss(shift: float) -> float:
        best = lambda x, t: data.predict(prediction, x, t) + shift  # noqa: E731
        return float(objective.loss(best, x_0, data.mean + data.std * z, t))

    assert loss(0) < min(loss(-0.05), loss(0.05))


@EVERY_PATH
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_losses_are_float32_one_a_sample_and_finite_over_the_whole_interval(path, weight, prediction):
    low, high = training_interval(path, prediction, weight)
    t = torch.tensor([low, 0.5, high])
    x_0, x_1 = torch.randn(2, 3, 4, 2, 2)
    objective = Objective(path, prediction, weight)
    loss = objective.loss(lambda x, t: x.bfloat16(), x_0.bfloat16(), x_1.bfloat16(), t)
    assert loss.shape == (3,)
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()


def test_the_loss_of_the_true_velocity_is_zero():
    objective = Objective(PATHS["linear"])
    loss = objective.loss(lambda x, t: X_1 - X_0, X_0, X_1, T)
    assert torch.equal(loss, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("kwargs", [{"prediction": "x0"}, {"weight": "snr"}])
def test_unknown_objectives_are_answered_with_the_known(kwargs):
    with pytest.raises(ValueError, match="known are"):
        Objective(PATHS["linear"], **kwargs)


@pytest.mark.parametrize("key", TRANSPORT.intervals)
def test_intervals_are_the_official_ones(key):
    """But for SBDM of a velocity, which the reference starts where it is infinite."""
    name, prediction, weight = key.split("/")
    path, official = PATHS[NAMES[name]], TRANSPORT.intervals[key]
    ours = "none" if prediction == "velocity" else OFFICIAL_WEIGHTS[weight]
    assert training_interval(path, prediction, ours) == tuple(official["train_interval"])
    assert ode_interval(path, prediction) == tuple(official["ode_interval"])
    assert sde_interval(path, prediction, "sigma", 0.04) == tuple(official["sde_interval_sigma"])
    sbdm = sde_interval(path, prediction, "SBDM", 0.04)
    if prediction == "velocity" and name != "VP":
        assert sbdm == (1e-3, 0.96)
    else:
        assert sbdm == tuple(official["sde_interval_SBDM"])


@pytest.mark.parametrize("path", ["linear", "gvp"])
def test_the_likelihood_weight_of_a_velocity_stays_off_the_ends(path):
    """It grows like 1 / (1 - t); the reference ignores it, and has no margin."""
    assert training_interval(PATHS[path], "velocity", "likelihood") == (1e-3, 1 - 1e-3)
    assert training_interval(PATHS[path], "velocity", "velocity") == (0.0, 1.0)


def test_a_dit_is_trained_at_the_timestep_whose_thousandth_its_time_lies_in():
    seen = []

    def network(x, timesteps):
        seen.extend(timesteps.tolist())
        return x

    x = torch.zeros(6, 1, 1, 1)
    DiffusionObjective().loss(network, x, x, torch.tensor([0.0, 0.0009, 0.5, 0.5009, 0.9999, 1.0]))
    assert seen == [0, 0, 500, 500, 999, 999]


def test_logit_normal_times_have_the_quantiles_of_their_definition():
    times = TimeDistribution("logit_normal", mean=-0.4, std=1.2)
    z = torch.tensor([-1.5, 0.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(times.quantile(torch.special.ndtr(z)), torch.sigmoid(-0.4 + 1.2 * z))


def test_the_shift_sends_the_middle_to_one_over_one_plus_shift():
    """log-odds of t fall by log(shift): arXiv 2403.03206, Eq. 23, with time turned round."""
    times = TimeDistribution(shift=3.0)
    assert times.quantile(torch.tensor([0.5])).item() == pytest.approx(1 / 4)
    u = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    torch.testing.assert_close(torch.logit(times.quantile(u)), torch.logit(u) - math.log(3))


@pytest.mark.parametrize("name", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 2.5])
def test_times_fill_the_interval_that_the_user_gave(name, shift):
    times = TimeDistribution(name, shift=shift, interval=(0.2, 0.7))
    t = times.quantile(torch.linspace(0, 1, 10_001)[:-1])
    assert t.min() >= 0.2
    assert t.max() <= 0.7
    assert (t.diff() >= 0).all()
    assert t[-1] - t[0] > 0.45
    assert t.isfinite().all()


def test_uniform_times_are_the_draws_themselves():
    u = torch.rand(100)
    assert torch.equal(TimeDistribution().quantile(u), u)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"name": "cosine"},
        {"std": 0.0},
        {"shift": -1.0},
        {"mean": math.nan},
        {"interval": (0.5, 0.5)},
        {"interval": (-0.1, 1.0)},
    ],
)
def test_distributions_that_make_no_sense_are_refused(kwargs):
    with pytest.raises(ValueError, match="times"):
        TimeDistribution(**kwargs)


def test_a_prediction_of_another_shape_is_refused():
    """It would broadcast against a single channel, and give a number."""
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match="must agree"):
        Objective(Linear()).loss(lambda x, t: torch.cat([x, x], dim=1), x, x, torch.ones(1))
