"""Samplers by name and part, and what all of them promise."""

import pytest
import torch

from sitvit.flow.guidance import Guidance
from sitvit.flow.ode import METHODS, PER_IMAGE
from sitvit.flow.paths import PATHS, Linear
from sitvit.flow.samplers import SAMPLERS, AdaptiveOde, FixedOde, Sde, find_sampler, from_grid_points
from sitvit.flow.sde import SDE_METHODS
from sitvit.models.sit import SiT

LINEAR = PATHS["linear"]
EACH = [
    *(FixedOde(method, 10) for method in METHODS),
    AdaptiveOde(PER_IMAGE),
    *(Sde(method, 10) for method in SDE_METHODS),
]
each_sampler = pytest.mark.parametrize("sampler", EACH, ids=lambda s: f"{type(s).__name__}-{s.method}")


def elementwise(x, t):
    return torch.tanh(0.7 * x + 0.3 * t.view(-1, *[1] * (x.dim() - 1)) - 0.1) - x


@each_sampler
@pytest.mark.parametrize("size", [1, 7])
def test_an_image_does_not_see_its_batch_mates(sampler, size):
    """Bit for bit on a network that treats each element alone: batch 1, 7 and 64."""
    x = torch.randn(64, 3, 5)
    noise = torch.randn(10, 64, 3, 5)

    def images(rows):
        return sampler.sample(elementwise, LINEAR, "velocity", x[rows], lambda i: noise[i, rows]).state

    apart = torch.cat([images(rows) for rows in torch.arange(64).split(size)])
    assert torch.equal(images(torch.arange(64)), apart)


@each_sampler
def test_on_a_transformer_batch_mates_move_an_image_by_rounding_alone(sampler):
    """Matrix kernels round differently for other shapes: 1e-5 of a state of spread 1."""
    torch.manual_seed(0)
    model = SiT(input_size=4, patch_size=2, hidden_size=32, depth=2, num_heads=2, num_classes=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x, noise, labels = torch.randn(7, 4, 4, 4), torch.randn(10, 7, 4, 4, 4), torch.arange(7) % 3

    @torch.no_grad()
    def images(rows):
        velocity = Guidance(1.5, channels=3).bind(model, labels[rows], 3)
        return sampler.sample(velocity, LINEAR, "velocity", x[rows], lambda i: noise[i, rows]).state

    apart = torch.cat([images(rows) for rows in torch.arange(7).split(1)])
    assert (images(torch.arange(7)) - apart).abs().max() < 1e-5


@pytest.mark.parametrize("sampler", [s for s in EACH if not isinstance(s, Sde)], ids=lambda s: s.method)
@pytest.mark.parametrize("path", PATHS.values(), ids=lambda path: path.name)
def test_a_constant_field_is_integrated_exactly(sampler, path):
    """From where to where the path allows."""
    start, end = sampler.times(path, "velocity")[0], sampler.times(path, "velocity")[-1]
    x = torch.zeros(2, 3, dtype=torch.float64)
    found = sampler.sample(lambda x, t: torch.full_like(x, 2.0), path, "velocity", x, None).state
    torch.testing.assert_close(found, torch.full_like(x, 2 * (end - start)), rtol=1e-12, atol=1e-12)


def test_the_published_protocols_have_their_published_settings():
    sde = SAMPLERS["sit-sde"]
    assert (sde.method, sde.num_steps, sde.diffusion) == ("euler-maruyama", 250, "sigma")
    assert (sde.last_step, sde.last_step_size, sde.diffusion_norm) == ("Mean", 0.04, 1.0)
    assert sde.num_evaluations == 250
    assert sde == from_grid_points(Sde(), 250)
    assert sde.times(LINEAR, "velocity")[-1] == 0.96
    assert len(sde.times(LINEAR, "velocity")) == 250
    ode = SAMPLERS["sit-ode"]
    assert (ode.method, ode.atol, ode.rtol) == ("dopri5", 1e-6, 1e-3)
    assert SAMPLERS["sit-heun"].num_evaluations == 250


def test_grid_points_are_one_more_than_steps_but_for_a_last_step():
    assert from_grid_points(FixedOde("euler"), 250).num_steps == 249
    assert from_grid_points(Sde(), 250).num_steps == 250
    assert from_grid_points(Sde(last_step="none", last_step_size=0), 250).num_steps == 249


def test_a_preset_is_varied_by_its_parts():
    assert find_sampler("sit-sde", {"num_steps": 50}) == Sde(num_steps=50)
    assert find_sampler("sit-sde", {"method": "stochastic-heun"}) == Sde("stochastic-heun")
    assert find_sampler("heun", {"method": "euler-maruyama", "num_steps": 9}) == Sde(num_steps=9)
    assert find_sampler("sit-sde", {"last_step": "none"}) == Sde(last_step="none", last_step_size=0)
    assert find_sampler("heun", {"method": "dopri5"}) == AdaptiveOde("dopri5")
    assert find_sampler("sit-ode", {"method": "rk4", "num_steps": 8}) == FixedOde("rk4", 8)


@pytest.mark.parametrize(
    ("name", "parts", "sentence"),
    [
        ("sit-sd", {}, "known are heun, sit-sde"),
        ("heun", {"method": "rk5"}, "no ODE method is called 'rk5'.*for SDEs euler-maruyama"),
        ("sit-ode", {"num_steps": 50}, "dopri5 has no num_steps: it chooses its own steps"),
        ("heun", {"diffusion": "sigma"}, "heun has no diffusion"),
        ("sit-sde", {"atol": 1e-3}, "euler-maruyama has no atol"),
        ("heun", {"num_steps": 0}, "at least 1"),
        ("heun", {"num_steps": 2.5}, "whole number"),
        ("sit-ode", {"atol": -1.0}, "atol must be a number above 0"),
        ("heun", {"interval": (0.9, 0.1)}, "t_min < t_max"),
        ("heun", {"shift": 0.0}, "shift"),
    ],
)
def test_parts_that_do_not_belong_or_make_no_sense_are_refused(name, parts, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_sampler(name, parts)


@pytest.mark.parametrize(
    "sampler",
    [
        FixedOde("euler", 4, shift=3.0, interval=(0.2, 0.6)),
        Sde(num_steps=4, last_step="none", last_step_size=0, shift=3.0, interval=(0.2, 0.6)),
    ],
    ids=lambda sampler: sampler.method,
)
def test_the_network_is_called_on_the_shifted_grid_of_the_interval_that_was_given(sampler):
    calls = []
    velocity = lambda x, t: calls.append(t[0].item()) or x  # noqa: E731
    x = torch.ones(1, 1, dtype=torch.float64)
    sampler.sample(velocity, LINEAR, "noise", x, lambda i: x)
    assert calls == pytest.approx([0.2 + 0.4 * u / (u + 3 * (1 - u)) for u in (0, 0.25, 0.5, 0.75)])
    assert sampler.times(LINEAR, "noise")[-1] == 0.6


@pytest.mark.parametrize("method", ["dopri5", PER_IMAGE])
def test_an_adaptive_method_runs_over_the_interval_that_was_given(method):
    sampler = AdaptiveOde(method, interval=(0.2, 0.6))
    x = torch.zeros(2, 3, dtype=torch.float64)
    there = sampler.sample(lambda x, t: torch.ones_like(x), LINEAR, "velocity", x, None).state
    torch.testing.assert_close(there, x + 0.4)


def test_only_odes_go_back_to_the_noise():
    with pytest.raises(ValueError, match="cannot be run back"):
        Sde().encode(elementwise, LINEAR, "velocity", torch.zeros(1, 1))


def test_methods_that_share_a_step_over_the_batch_say_so():
    assert AdaptiveOde("dopri5").couples_the_batch
    assert not AdaptiveOde(PER_IMAGE).couples_the_batch
    assert not any(sampler.couples_the_batch for sampler in EACH)


@pytest.mark.parametrize("method", ["dopri5", "dopri5_per_image"])
def test_a_fixed_grid_of_a_method_that_chooses_its_steps_is_refused(method):
    with pytest.raises(ValueError, match="chooses its own steps"):
        FixedOde(method, 10)


def test_tolerances_of_a_method_that_has_none_are_refused():
    with pytest.raises(ValueError, match="no tolerances"):
        AdaptiveOde("euler")


@pytest.mark.parametrize("method", ["implicit_adams", "fixed_adams"])
def test_implicit_methods_say_that_they_couple_the_batch(method):
    assert FixedOde(method).couples_the_batch


def test_points_of_a_method_without_a_grid_are_refused():
    with pytest.raises(ValueError, match="no grid"):
        from_grid_points(AdaptiveOde(), 50)


def test_the_steps_of_an_image_do_not_follow_the_rounding_of_another_batch_size():
    """A network with gain: steps that followed the error's estimate smoothly moved the median by over 1e-4.

    Powers of two leave 3e-6, rounding that the network itself enlarges. The median, since an image whose
    error lies next to a threshold may still take another step.
    """
    torch.manual_seed(0)
    network = SiT(input_size=8, patch_size=2, hidden_size=64, depth=3, num_heads=2, num_classes=10).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        x_0 = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0))

        def states(images: torch.Tensor) -> torch.Tensor:
            def velocity(x, t):
                return network(x, t, images % 10)

            sampler = AdaptiveOde("dopri5_per_image")
            return sampler.sample(velocity, Linear(), "velocity", x_0[images], None).state

        alone = torch.cat([states(image) for image in torch.arange(16).split(1)])
        moved = (states(torch.arange(16)) - alone).abs().flatten(1).amax(dim=1)
    assert moved.median() < 3e-5
