"""An SDE whose steps are too coarse for its diffusion is told from one that is fine, without a network."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from sitvit.flow.parameterization import PREDICTIONS
from sitvit.flow.paths import PATHS
from sitvit.flow.samplers import SAMPLERS, Sde
from sitvit.flow.sde import DIFFUSIONS, LAST_STEPS, SDE_METHODS, Diffusion
from sitvit.flow.stiffness import SPREADS, chain_spreads

from ..oracles import GaussianData, MixtureData
from .test_sde import EVERY_PATH, law


def sde(num_steps, form, method="euler-maruyama", last_step="Mean"):
    size = 0.0 if last_step == "none" else 0.04
    return Sde(method, num_steps, form, last_step=last_step, last_step_size=size)


def exact_spread(sampler, path, std):
    """By the whole chain with each noise on its own, and another writing of the path's coefficients."""
    diffusion = Diffusion(path, sampler.diffusion, sampler.diffusion_norm)
    times = sampler.times(path, "velocity")
    data = GaussianData(mean=0.0, std=std, path=path)
    return law(data, times, diffusion, sampler.method, sampler.last_step)[1] ** 0.5


@EVERY_PATH
@pytest.mark.parametrize("method", SDE_METHODS)
@pytest.mark.parametrize("last_step", LAST_STEPS)
def test_the_spread_is_that_of_the_chain_itself(path, method, last_step):
    for form, num_steps in itertools.product(DIFFUSIONS, (2, 9)):
        sampler = sde(num_steps, form, method, last_step)
        times = sampler.times(path, "velocity")
        found = chain_spreads(times, Diffusion(path, form), method, last_step)
        for std in (0.1, 0.4, 1.0):
            expected = exact_spread(sampler, path, std)
            assert found[SPREADS.index(std)] == pytest.approx(expected, rel=1e-6)


@EVERY_PATH
@pytest.mark.parametrize("form", DIFFUSIONS)
@pytest.mark.parametrize("method", SDE_METHODS)
def test_what_is_doubted_ends_far_off_and_what_is_not_doubted_does_not(path, form, method):
    """By the chain itself, two of the spreads not looked at; near the tolerance of 0.1 both may be."""
    for num_steps, last_step in itertools.product((3, 6, 15), ("Mean", "none")):
        sampler = sde(num_steps, form, method, last_step)
        off = max(abs(exact_spread(sampler, path, std) - std) for std in (0.1, 0.35, 0.85))
        try:
            doubted = sampler.doubt(path, "velocity") is not None
        except ValueError:
            assert off > 1
        else:
            assert off > 0.05 if doubted else off < 0.12


@EVERY_PATH
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_no_preset_is_doubted(path, prediction):
    for sampler in (*SAMPLERS.values(), Sde("stochastic-heun"), Sde(last_step="Euler"), sde(100, "SBDM")):
        assert sampler.doubt(path, prediction) is None


@EVERY_PATH
@pytest.mark.parametrize("form", DIFFUSIONS)
@pytest.mark.parametrize("last_step", LAST_STEPS)
def test_the_remedy_that_is_named_is_one(path, form, last_step):
    sampler = sde(3, form, last_step=last_step)
    try:
        told = sampler.doubt(path, "velocity")
    except ValueError as error:
        told = str(error)
    assert told is not None
    assert f"diffusion {form} (norm 1), num_steps 3 and last_step {last_step} on the {path.name}" in told
    remedy = told.removesuffix(" would do").split("(latents have about 1). ")[1]
    changes = dict(re.findall(r"(num_steps|last_step) (\w+)", remedy))
    assert changes
    typed = {key: int(value) if key == "num_steps" else value for key, value in changes.items()}
    assert replace(sampler, **typed).doubt(path, "velocity") is None


def test_what_only_noise_comes_out_of_is_refused():
    with pytest.raises(
        ValueError, match=r"diffusion SBDM .* num_steps 2 .* too coarse.* num_steps 25 would do"
    ):
        sde(2, "SBDM").doubt(PATHS["linear"], "velocity")


@pytest.mark.parametrize(("num_steps", "doubted"), [(10, True), (100, False)])
def test_samples_of_a_mixture_spread_as_the_doubt_says(num_steps, doubted):
    """1000 samples of a non-linear velocity; their spread is 1.15, to 0.04."""
    path, data = PATHS["linear"], MixtureData(PATHS["linear"], stds=(0.1, 0.1))
    sampler = sde(num_steps, "constant", last_step="Euler")
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(num_steps + 1, 1000, 1, generator=generator)
    end = sampler.sample(data.velocity, path, "velocity", draws[-1], lambda i: draws[i]).state
    wanted = (0.01 + 0.3 * 0.7 * 2.5**2) ** 0.5
    assert (sampler.doubt(path, "velocity") is not None) == doubted
    assert (abs(float(end.std()) - wanted) > 0.5) == doubted
    assert doubted or abs(float(end.std()) - wanted) < 0.08
