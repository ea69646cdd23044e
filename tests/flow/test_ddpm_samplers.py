"""DiT's diffusion behind the interface of the samplers."""

import pytest
import torch

from sitvit.flow.ddpm import ddim_encode, ddim_sample, ddpm_sample, respaced
from sitvit.flow.ddpm_samplers import Ddim, Ddpm, over_time, time_of, timestep_of
from sitvit.flow.guidance import Guidance
from sitvit.flow.paths import PATHS
from sitvit.flow.respacing import NUM_TIMESTEPS
from sitvit.flow.samplers import SAMPLERS, find_sampler

VP = PATHS["vp"]
LABELS = torch.tensor([0, 1, 2])


def noise_network(x, timesteps, labels):
    """A noise of its own at each timestep and label, and a variance between the bounds."""
    where = (timesteps.double() / 300 + labels).float().view(-1, 1, 1, 1)
    return torch.cat([torch.tanh(x + where), torch.sin(x * where)], dim=1)


def run(sampler, network, x, noise, guidance=None):
    velocity = (guidance or Guidance()).bind(over_time(network), LABELS, 3)
    return sampler.sample(velocity, VP, "noise", x, noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_timestep_comes_back_from_its_time_and_runs_from_data_to_noise(dtype):
    timesteps = torch.arange(NUM_TIMESTEPS)
    t = time_of(timesteps).to(dtype)
    assert torch.equal(timestep_of(t), timesteps)
    assert t[0] == pytest.approx(0.9995, abs=1e-6)
    assert t[-1] == pytest.approx(0.0005, abs=1e-6)
    assert (t.diff() < 0).all()
    assert timestep_of(torch.tensor([0.0, 1.0])).tolist() == [999, 0]


@pytest.mark.parametrize("num_steps", [1, 7, 250])
def test_the_samplers_take_the_steps_of_ddpm_and_ddim_bit_for_bit(num_steps):
    x, draws = torch.randn(3, 4, 2, 2), torch.randn(250, 3, 4, 2, 2)
    chain = respaced(num_steps)

    def network(x, timesteps):
        return noise_network(x, timesteps, LABELS)

    ancestral = run(Ddpm(num_steps=num_steps), noise_network, x, lambda i: draws[i])
    assert torch.equal(ancestral.state, ddpm_sample(chain, network, x, lambda i: draws[i]))
    assert ancestral.num_evaluations == num_steps
    for eta in (0.0, 0.5):
        found = run(Ddim(num_steps=num_steps, eta=eta), noise_network, x, lambda i: draws[i]).state
        assert torch.equal(found, ddim_sample(chain, network, x, lambda i: draws[i], eta))
    velocity = Guidance().bind(over_time(noise_network), LABELS, None)
    back = Ddim(num_steps=num_steps).encode(velocity, VP, "noise", x).state
    assert torch.equal(back, ddim_encode(chain, network, x))


def test_the_chain_is_that_of_the_vp_path():
    """alpha_bar of 1000 steps against the integral: both sum beta over 1 - t, to a step's width."""
    timesteps = torch.arange(NUM_TIMESTEPS)
    alpha = respaced().alpha_bar.sqrt()
    torch.testing.assert_close(VP.alpha(time_of(timesteps).double()), alpha, atol=0.01, rtol=0)


def test_guidance_sees_the_interval_in_t_and_leaves_the_variance_to_the_label():
    seen = []

    def network(x, timesteps, labels):
        seen.append((int(timesteps[0]), len(x)))
        return noise_network(x, timesteps, labels)

    x, draws = torch.randn(3, 4, 2, 2), torch.randn(1000, 3, 4, 2, 2)
    run(Ddpm(num_steps=1000), network, x, lambda i: draws[i], Guidance(2.0, interval=(0.25, 0.75)))
    assert [i for i, size in seen if size == 6] == list(range(749, 249, -1))  # t = 0.2505 to 0.7495
    assert [i for i, _ in seen] == list(range(999, -1, -1))
    output = Guidance(2.0, channels=3).bind(over_time(network), LABELS, 3)(x, time_of(torch.tensor([9] * 3)))
    alone = noise_network(x, torch.tensor([9] * 3), LABELS)
    assert torch.equal(output[:, 3:], alone[:, 3:])
    assert not torch.equal(output[:, :3], alone[:, :3])


def test_an_output_that_is_not_finite_names_its_time():
    def network(x, timesteps, labels):
        return x / 0 if timesteps[0] == 500 else x

    with pytest.raises(FloatingPointError, match=r"not finite at t = 0.4995 \(timestep 500\)"):
        run(Ddim(num_steps=1000), network, torch.randn(3, 4, 2, 2), lambda i: torch.zeros(1))


def test_presets_of_dit_are_varied_by_their_parts():
    assert SAMPLERS["dit"].num_evaluations == 250
    assert SAMPLERS["dit"].name == "ddpm250"
    assert find_sampler("dit", {"num_steps": 50}) == Ddpm(num_steps=50)
    assert find_sampler("dit", {"method": "ddim", "eta": 0.5}) == Ddim(eta=0.5)
    assert [*SAMPLERS["dit"].times(VP, "noise")[-2:]] == [pytest.approx(0.9995), 1.0]


@pytest.mark.parametrize(
    ("name", "parts", "words"),
    [
        ("dit", {"num_steps": 1001}, "from 1 to 1000, got 1001"),
        ("dit", {"num_steps": 0}, "from 1 to 1000"),
        ("dit", {"eta": 0.1}, "ddpm has no eta"),
        ("dit-ddim", {"eta": 1.5}, "eta must be from 0"),
        ("dit", {"interval": (0.0, 1.0)}, "ddpm has no interval"),
        ("dit", {"shift": 2.0}, "ddpm has no shift"),
    ],
)
def test_parts_that_a_dit_has_not_are_refused(name, parts, words):
    with pytest.raises(ValueError, match=words):
        find_sampler(name, parts)


@pytest.mark.parametrize("sampler", [Ddpm(), Ddim(eta=0.1)], ids=lambda s: s.name)
def test_only_ddim_without_noise_goes_back(sampler):
    with pytest.raises(ValueError, match="cannot be run back"):
        sampler.encode(lambda x, t: x, VP, "noise", torch.zeros(1, 1, 1, 1))
