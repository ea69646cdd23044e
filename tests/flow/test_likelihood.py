"""Likelihood against closed forms."""

import math

import pytest
import torch

from sitvit.flow.likelihood import log_likelihood
from sitvit.flow.times import grid

from ..oracles import GaussianData

DATA = GaussianData()
BACK = grid(50)[::-1]


def signs(shape, seed=0):
    return lambda k: torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + k))


@pytest.mark.parametrize("method", ["heun", "rk4", "dopri5_per_image"])
def test_the_log_likelihood_of_a_gaussian_is_exact(method):
    x = DATA.mean + DATA.std * torch.randn(5, 3, dtype=torch.float64)
    times = grid(400)[::-1]
    found = log_likelihood(DATA.velocity, x, times, method, None, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(found.log_p, DATA.log_density(x), rtol=0, atol=2e-3)
    torch.testing.assert_close(DATA.flow_map(found.x_0), x, rtol=0, atol=1e-3)
    assert torch.equal(found.standard_error, torch.zeros(5, dtype=torch.float64))


def test_hutchinsons_estimate_is_exact_where_dimensions_do_not_mix():
    """Signs square to one, so a diagonal Jacobian needs but one probe."""
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    exact = log_likelihood(DATA.velocity, x, BACK, "heun", None)
    estimate = log_likelihood(DATA.velocity, x, BACK, "heun", signs(x.shape), 3)
    torch.testing.assert_close(estimate.log_p, exact.log_p)
    torch.testing.assert_close(estimate.standard_error, torch.zeros(4, dtype=torch.float64))


def mixing(x, t):
    """A velocity whose dimensions mix; its divergence is the trace of the matrix."""
    matrix = torch.tensor([[0.3, 1.0, 0.2], [-0.5, 0.1, 0.4], [0.9, -0.2, -0.6]], dtype=x.dtype)
    return x @ matrix.T


def test_the_standard_error_tells_the_estimates_error():
    x = torch.randn(1, 3, dtype=torch.float64).expand(200, 3)  # 200 estimates of one image, 16 probes each
    times = grid(5)[::-1]
    exact = log_likelihood(mixing, x, times, "rk4", None).log_p
    found = log_likelihood(mixing, x, times, "rk4", signs(x.shape), 16)
    errors = (found.log_p - exact) / found.standard_error
    # Student's t of 15 degrees: mean size 0.83, of 200 known to 0.05.
    assert errors.abs().mean() == pytest.approx(0.83, abs=0.2)
    assert found.log_p.mean() == pytest.approx(exact[0].item(), abs=0.1)


def test_a_linear_flow_changes_the_density_by_its_trace():
    x = torch.randn(4, 3, dtype=torch.float64)
    found = log_likelihood(mixing, x, BACK, "rk4", None)
    normal = -(found.x_0.square().sum(1) + 3 * math.log(2 * math.pi)) / 2
    torch.testing.assert_close(found.log_p, normal + 0.2, rtol=0, atol=1e-9)


def test_the_probe_is_drawn_once_for_a_way():
    drawn = []

    def probes(k):
        drawn.append(k)
        return torch.ones(2, 3)

    found = log_likelihood(mixing, torch.randn(2, 3), BACK, "heun", probes, 4)
    assert drawn == [0, 1, 2, 3]
    assert found.num_evaluations == 100


def test_the_error_in_bits_per_dimension_is_that_of_its_estimates():
    x = torch.randn(2, 3, dtype=torch.float64)
    found = log_likelihood(mixing, x, BACK, "heun", signs(x.shape), 16)
    each = [
        log_likelihood(mixing, x, BACK, "heun", lambda _, k=k: signs(x.shape)(k), 1).bits_per_dim()
        for k in range(16)
    ]
    torch.testing.assert_close(found.bits_per_dim(), torch.stack(each).mean(dim=0))
    torch.testing.assert_close(found.bits_per_dim_error(), torch.stack(each).std(dim=0) / 4)


def test_tolerances_and_progress_are_those_that_were_given():
    x, ticks = torch.randn(2, 3, dtype=torch.float64), []

    def found(tolerance):
        return log_likelihood(
            DATA.velocity, x, [1.0, 0.0], "dopri5_per_image", None, on_step=ticks.append,
            atol=tolerance, rtol=tolerance,
        )  # fmt: skip

    assert found(1e-9).num_evaluations > 2 * found(1e-3).num_evaluations
    assert ticks


def test_one_probe_has_no_standard_error():
    found = log_likelihood(mixing, torch.randn(2, 3), BACK, "heun", signs((2, 3)), 1)
    assert found.standard_error.isnan().all()


def test_bits_per_dimension_of_a_standard_normal_at_zero():
    still = lambda x, t: torch.zeros_like(x)  # noqa: E731
    found = log_likelihood(still, torch.zeros(1, 8), BACK, "euler", None)
    assert found.bits_per_dim().item() == pytest.approx(math.log2(2 * math.pi) / 2)
    # A pixel of 8 bits in [-1, 1] falls into a bin of 2/255, -log2 of which is 6.994 bits more.
    more = found.bits_per_dim(2 / 255) - found.bits_per_dim()
    assert more.item() == pytest.approx(math.log2(255 / 2), rel=1e-5)


@pytest.mark.parametrize("size", [1, 7])
def test_an_estimate_does_not_see_its_batch_mates(size):
    x, probe = torch.randn(2, 64, 2, 2)

    def estimate(rows):
        return log_likelihood(DATA.velocity, x[rows], BACK, "heun", lambda k: probe[rows], 1).log_p

    apart = torch.cat([estimate(rows) for rows in torch.arange(64).split(size)])
    assert torch.equal(estimate(torch.arange(64)), apart)


def test_it_works_where_gradients_are_off():
    with torch.no_grad():
        found = log_likelihood(DATA.velocity, torch.randn(2, 3), BACK, "heun", None)
    assert not found.log_p.requires_grad


def test_times_that_rise_and_no_probe_are_refused():
    with pytest.raises(ValueError, match="must decrease"):
        log_likelihood(DATA.velocity, torch.zeros(1, 1), grid(10), "heun", None)
    with pytest.raises(ValueError, match="num_probes"):
        log_likelihood(DATA.velocity, torch.zeros(1, 1), BACK, "heun", signs((1, 1)), 0)


def test_inference_mode_changes_nothing():
    def field(x, t):
        return torch.tanh(x) * 0.5

    x = torch.linspace(-1, 1, 6).view(2, 3)
    times = [1.0, 0.5, 0.0]
    expected = log_likelihood(field, x, times, "rk4", None).log_p
    with torch.inference_mode():
        found = log_likelihood(field, torch.linspace(-1, 1, 6).view(2, 3), times, "rk4", None).log_p
    assert torch.equal(found, expected)


def test_a_velocity_that_turns_gradients_off_is_refused():
    with pytest.raises(ValueError, match="turns gradients off"):
        log_likelihood(torch.no_grad()(lambda x, t: 0.5 * x), torch.ones(1, 2), [1.0, 0.0], "euler", None)
