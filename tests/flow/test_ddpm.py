"""DiT's discrete diffusion against the reference's tensors, diffusers, and closed forms."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler, DDPMScheduler
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from sitvit.flow.ddpm import (
    Diffusion,
    ddim_encode,
    ddim_sample,
    ddpm_sample,
    discretised_gaussian_log_likelihood,
    respaced,
)
from sitvit.flow.guidance import Guidance
from sitvit.flow.respacing import spaced_timesteps

from ..conftest import GOLDEN

WHOLE = respaced()

with safe_open(GOLDEN / "dit_diffusion.safetensors", "pt") as file:
    REFERENCE = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    TOY = json.loads(file.metadata()["toy_model"])


def toy(x, t):
    """The elementwise network that the reference was run with."""
    t = t.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    noise_hat = TOY["s"] * torch.tanh(TOY["a"] * x + TOY["b"] * t + TOY["c"])
    return torch.cat([noise_hat, torch.sin(3 * x + 0.01 * t)], dim=1)


def silence(step):
    raise AssertionError("no noise is needed")


# Against the reference implementation. It keeps its tables in float64, but rounds what it takes from them
# to float32 and computes on in it: single operations agree to 1e-6 of the largest value, and so do ten
# steps. The bound is a small difference of larger numbers, hence its 1e-5.


def assert_equal_in_float32(found, expected, rtol=1e-6):
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= rtol * expected.abs().max()


def test_betas_and_alpha_bar_are_the_references():
    for found, name in ((WHOLE.beta, "betas"), (WHOLE.alpha_bar, "alphas_cumprod")):
        torch.testing.assert_close(found, REFERENCE[f"schedule/{name}"], rtol=1e-10, atol=0)


def test_ten_steps_keep_the_references_timesteps():
    assert spaced_timesteps(10) == REFERENCE["timesteps/10"].tolist()


def test_noising_and_what_is_read_from_the_network_are_the_references():
    x_0, x_1, t = REFERENCE["in/noise"], REFERENCE["in/x0"], REFERENCE["in/t"]
    x_t = WHOLE.diffuse(x_0, x_1, t)
    assert_equal_in_float32(x_t, REFERENCE["q_sample"])
    prediction = WHOLE.predict(toy(x_t, t), x_t, t)
    assert_equal_in_float32(prediction.mean, REFERENCE["posterior/mean"])
    assert_equal_in_float32(prediction.x_1_hat, REFERENCE["posterior/pred_xstart"])
    assert_equal_in_float32(prediction.log_variance, REFERENCE["posterior/log_variance"])
    assert_equal_in_float32(prediction.log_variance.exp(), REFERENCE["posterior/variance"])


def test_the_hybrid_loss_is_the_references_at_the_first_the_second_a_middle_and_the_last_timestep():
    assert REFERENCE["in/t"].tolist() == [0, 1, 500, 999]
    loss = WHOLE.hybrid_loss(toy, REFERENCE["in/noise"], REFERENCE["in/x0"], REFERENCE["in/t"])
    torch.testing.assert_close(loss.mse, REFERENCE["loss/mse"], rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.bound, REFERENCE["loss/vb"], rtol=1e-5, atol=0)
    torch.testing.assert_close(loss.total, REFERENCE["loss/loss"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("sample", "name"), [(ddpm_sample, "ddpm"), (ddim_sample, "ddim")])
def test_ten_steps_give_the_references_samples(sample, name):
    noise = REFERENCE["in/step_noise"]
    assert_equal_in_float32(
        sample(respaced(10), toy, REFERENCE["in/z"], lambda step: noise[step]),
        REFERENCE[f"sample/{name}/10"],
    )


# Against diffusers: exactly the same steps in its code, once its tables are float64.


def run_diffusers(scheduler, num_steps, x, seed, in_float64, **options):
    if in_float64:
        scheduler.alphas_cumprod = WHOLE.alpha_bar
    scheduler.set_timesteps(num_steps)
    generator = torch.Generator().manual_seed(seed)
    for t in scheduler.timesteps:
        output = toy(x, t.expand(len(x)))
        if scheduler.config.get("variance_type") != "learned_range":
            output = output[:, : x.shape[1]]
        x = scheduler.step(output, t, x, generator=generator, **options).prev_sample
    return x


def drawn(shape, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return lambda step: torch.randn(shape, generator=generator, dtype=dtype)


# Their 1 - alpha_bar ratio loses 12 of 16 digits of the smallest beta in float64, and 4 of 7 in float32.
PRECISIONS = [(torch.float64, 1e-11), (torch.float32, 1e-4)]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("num_steps", [2, 10, 250])
def test_ddpm_takes_the_steps_of_diffusers_with_learned_range_and_linspace(num_steps, dtype, tolerance):
    x = torch.randn(3, 4, 2, 2, dtype=dtype)
    scheduler = DDPMScheduler(
        variance_type="learned_range", clip_sample=False, timestep_spacing="linspace", beta_schedule="linear"
    )
    theirs = run_diffusers(scheduler, num_steps, x, 3, dtype == torch.float64)
    ours = ddpm_sample(respaced(num_steps), toy, x, drawn(x.shape, 3, dtype))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("eta", [0, 0.5, 1])
@pytest.mark.parametrize("num_steps", [10, 50])
def test_ddim_takes_the_steps_of_diffusers_with_leading(num_steps, eta, dtype, tolerance):
    x = torch.randn(3, 4, 2, 2, dtype=dtype)
    scheduler = DDIMScheduler(clip_sample=False, timestep_spacing="leading")
    theirs = run_diffusers(scheduler, num_steps, x, 3, dtype == torch.float64, eta=eta)
    ours = ddim_sample(respaced(f"ddim{num_steps}"), toy, x, drawn(x.shape, 3, dtype), eta)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_encoding_takes_the_steps_of_diffusers_ddim_inverse_scheduler():
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    scheduler = DDIMInverseScheduler(clip_sample=False, timestep_spacing="leading")
    scheduler.alphas_cumprod, scheduler.initial_alpha_cumprod = WHOLE.alpha_bar, torch.tensor(1.0)
    scheduler.set_timesteps(50)
    theirs = x
    for t in scheduler.timesteps:
        theirs = scheduler.step(toy(theirs, t.expand(len(x)))[:, :4], t, theirs).prev_sample
    torch.testing.assert_close(ddim_encode(respaced("ddim50"), toy, x), theirs, rtol=1e-11, atol=1e-11)


def test_diffusers_ddim_on_linspace_is_another_sampler():
    """Its timestep before t is t - 100, where the grid has t - 111: say so, and don't expect our samples."""
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    scheduler = DDIMScheduler(clip_sample=False, timestep_spacing="linspace")
    theirs = run_diffusers(scheduler, 10, x, 3, True)
    assert (ddim_sample(respaced(10), toy, x, silence) - theirs).abs().max() > 0.01


@given(num_steps=st.integers(2, 1000))
def test_diffusers_linspace_keeps_our_timesteps_but_for_halves(num_steps):
    scheduler = DDPMScheduler(timestep_spacing="linspace")
    scheduler.set_timesteps(num_steps)
    for i, (ours, theirs) in enumerate(
        zip(spaced_timesteps(num_steps), scheduler.timesteps.flip(0).tolist(), strict=True)
    ):
        half_way = 2 * i * 999 % (2 * (num_steps - 1)) == num_steps - 1
        assert ours == theirs or (half_way and abs(ours - theirs) == 1)


# Respacing.


def test_all_timesteps_keep_the_linear_betas_to_the_last_bit():
    assert WHOLE.timesteps.tolist() == list(range(1000))
    expected = torch.tensor([1e-4 + (0.02 - 1e-4) * t / 999 for t in range(1000)], dtype=torch.float64)
    assert torch.equal(WHOLE.beta, expected)
    np.testing.assert_allclose(WHOLE.beta.numpy(), np.linspace(1e-4, 0.02, 1000), rtol=3e-16)


@given(num_steps=st.integers(1, 1000))
def test_a_respaced_chain_has_the_wholes_alpha_bar_at_its_timesteps(num_steps):
    chain = respaced(num_steps)
    assert len(chain) == num_steps == len(set(chain.timesteps.tolist()))
    # alpha_bar ends at 4e-5, and a beta near 1 knows that to 1e-16 only.
    torch.testing.assert_close(chain.alpha_bar, WHOLE.alpha_bar[chain.timesteps], rtol=1e-10, atol=0)


@given(num_steps=st.integers(2, 1000))
def test_timesteps_rise_evenly_from_end_to_end(num_steps):
    kept = spaced_timesteps(num_steps)
    assert (kept[0], kept[-1]) == (0, 999)
    assert all(abs(t - i * 999 / (num_steps - 1)) < 0.5 + 1e-9 for i, t in enumerate(kept))


@pytest.mark.parametrize(
    ("respacing", "kept"),
    [
        ("2,3", [0, 499, 500, 750, 999]),  # 249.5 is rounded to the even 250
        ("3,1,2", [0, 166, 333, 334, 667, 999]),  # sections of 334, 333, 333; a single one keeps its first
        ("ddim4", [0, 250, 500, 750]),
        ("1", [999]),
    ],
)
def test_sections_and_strides_keep_what_their_rule_says(respacing, kept):
    assert spaced_timesteps(respacing) == kept


@pytest.mark.parametrize(
    ("respacing", "match"),
    [
        (0, "from 1 to 1000, got '0'"),
        (-1, "got '-1'"),
        (1001, "from 1 to 1000, got '1001'"),
        (2.5, "got '2.5'"),
        (True, "got 'True'"),
        ("", "got ''"),
        ("10,", "respacing '10,'"),
        ("600,1", "from 1 to 500, got '600'"),
        ("ddim", "respacing 'ddim'"),
        ("ddim37", "'ddim36' or 'ddim38'"),
        ("ddim1", "'ddim2' or 'ddim3'"),
    ],
)
def test_a_respacing_that_cannot_be_met_is_refused_by_name(respacing, match):
    with pytest.raises(ValueError, match=match):
        respaced(respacing)


# Gaussian data N(mean, std^2) per element: the best noise prediction is affine in x_t.


class GaussianNoise:
    """The exact network of such data: noise_hat = E[x_0 | x_t], and v given, or that of the true step.

    The reverse step q(x_t' | x_t) has variance beta~ + a^2 Var(x_1 | x_t).
    """

    mean, std = 0.7, 0.4

    def __init__(self, chain: Diffusion, v: float | None = None) -> None:
        self.chain, self.alpha, self.sigma = chain, chain.alpha_bar.sqrt(), (1 - chain.alpha_bar).sqrt()
        self.variance = chain.alpha_bar * self.std**2 + 1 - chain.alpha_bar
        a = chain.beta * chain.alpha_bar_before.sqrt() / (1 - chain.alpha_bar)
        of_data = self.std**2 * (1 - chain.alpha_bar) / self.variance
        reverse = (chain.posterior_variance + a**2 * of_data).log()
        smallest, largest = chain.posterior_log_variance, chain.beta.log()
        true_v = 2 * (reverse - smallest) / (largest - smallest) - 1
        self.v = true_v if v is None else torch.full_like(true_v, v)

    def __call__(self, x, t):
        index = torch.searchsorted(self.chain.timesteps, t)
        alpha, sigma, variance, v = (
            table[index].view(-1, 1) for table in (self.alpha, self.sigma, self.variance, self.v)
        )
        noise_hat = sigma / variance * (x - alpha * self.mean)
        return torch.cat([noise_hat, v.expand_as(x)], dim=1)

    def flow_map(self, x):
        """Where the exact probability flow takes the noisiest state of the chain."""
        return self.mean + self.std * (x - self.alpha[-1] * self.mean) / self.variance[-1].sqrt()


@pytest.mark.parametrize("respacing", [3, 50, 1000, "ddim25"])
def test_with_the_true_variance_every_step_of_ddpm_keeps_the_exact_marginal(respacing):
    chain = respaced(respacing)
    network = GaussianNoise(chain)
    index = torch.arange(1, len(chain))
    at = [torch.full((len(index), 1), value, dtype=torch.float64) for value in (0, 1)]
    zero, one = (chain.predict(network(x, chain.timesteps[index]), x, index) for x in at)
    slope, offset = one.mean - zero.mean, zero.mean
    mean = slope.flatten() * network.alpha[1:] * network.mean + offset.flatten()
    variance = slope.flatten() ** 2 * network.variance[1:] + zero.log_variance.exp().flatten()
    torch.testing.assert_close(mean, network.alpha[:-1] * network.mean, rtol=1e-10, atol=0)
    torch.testing.assert_close(variance, network.variance[:-1], rtol=1e-10, atol=0)


def end_of_the_chain(chain, v):
    """Exact mean and variance that ddpm_sample ends with from noise N(0, 1).

    The chain is affine in its noises: row 0 is fed none, row 1 a start of 1, row i + 2 a 1 at step i, and
    each row's distance from row 0 is that noise's weight.
    """
    impulses = torch.eye(len(chain) + 1, len(chain) + 1, dtype=torch.float64)
    rows = torch.cat([torch.zeros_like(impulses[:1]), impulses])
    out = ddpm_sample(chain, GaussianNoise(chain, v), rows[:, :1], lambda step: rows[:, step + 1, None])
    weights = out[1:] - out[0]
    return float(out[0]), float(weights.square().sum())


def one_over(n):
    return 1 / n


def log_over(n):
    return math.log(n) / n


# Next to the data the true variance is beta, v = 1. Another v is wrong there by beta^2 / sigma^2, whose sum
# over the steps is harmonic: log N / N.
@pytest.mark.parametrize(("v", "rate"), [(1, one_over), (0, log_over), (-1, log_over)])
def test_ddpm_tends_to_the_datas_mean_and_variance_as_the_steps_grow(v, rate):
    constants = []
    for count in (50, 100, 200, 400):
        mean, variance = end_of_the_chain(respaced(count), v)
        constants.append(abs(variance - GaussianNoise.std**2) / rate(count))
        # The chain starts at mean 0, the data's noisiest state at 0.0064 times their mean.
        assert mean == pytest.approx(GaussianNoise.mean, abs=1e-5)
    assert max(constants) < 1.2 * min(constants)


@pytest.mark.parametrize("sampled", [True, False])
def test_ddim_follows_the_exact_flow_at_order_one_in_both_directions(sampled):
    x = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1)
    counts, errors = [25, 50, 100, 200, 400], []
    for count in counts:
        chain = respaced(count)
        network = GaussianNoise(chain)
        if sampled:
            error = ddim_sample(chain, network, x, silence) - network.flow_map(x)
        else:
            error = ddim_encode(chain, network, network.flow_map(x)) - x
        errors.append(error.abs().max().item())
    slope = math.log(errors[0] / errors[-1]) / math.log(counts[-1] / counts[0])
    assert slope == pytest.approx(1, abs=0.05)
    assert errors[-1] < 10 / counts[-1]


def test_ddim_with_eta_one_is_ddpm_with_the_posterior_variance():
    chain, x = respaced(20), torch.randn(3, 1, dtype=torch.float64)
    network = GaussianNoise(chain, v=-1)
    ddim = ddim_sample(chain, network, x, drawn(x.shape, 3, x.dtype), eta=1)
    ddpm = ddpm_sample(chain, network, x, drawn(x.shape, 3, x.dtype))
    torch.testing.assert_close(ddim, ddpm, rtol=1e-12, atol=1e-12)


# The objective.


def example(dtype=torch.float64, batch=1000):
    """Noise, data, and an index each: all 1000."""
    x_0, x_1 = torch.randn(2, batch, 3, 2, 2, dtype=dtype)
    return x_0, x_1, torch.arange(batch)


def test_the_bound_is_zero_where_the_models_posterior_is_the_true_one():
    x_0, x_1, index = example()
    loss = WHOLE.hybrid_loss(lambda x, t: torch.cat([x_0, -torch.ones_like(x_0)], dim=1), x_0, x_1, index)
    assert torch.equal(loss.mse, torch.zeros_like(loss.mse))
    # x_1 is got back through a division by alpha_t, which is 0.006 at the end.
    assert loss.bound[1:].abs().max() < 1e-12


def test_the_bound_is_torchs_divergence_of_the_two_gaussians():
    x_0, x_1, index = example()
    x_t = WHOLE.diffuse(x_0, x_1, index)
    output = torch.randn(1000, 6, 2, 2, dtype=torch.float64)
    mean, log_variance = WHOLE.posterior(x_1, x_t, index)
    model = WHOLE.predict(output, x_t, index)
    nats = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, (log_variance / 2).exp().expand_as(mean)),
        torch.distributions.Normal(model.mean, (model.log_variance / 2).exp()),
    )
    expected = nats.mean(dim=(1, 2, 3)) / math.log(2)
    torch.testing.assert_close(WHOLE.bound(output, x_1, x_t, index)[1:], expected[1:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.01), (0.3, 0.4), (-1.0, 0.1), (2.0, 1.0)])
def test_the_256_values_of_a_pixel_have_probabilities_that_sum_to_one(mean, std):
    values = torch.linspace(-1, 1, 256, dtype=torch.float64)
    log_std = torch.tensor(math.log(std), dtype=torch.float64)
    log_likelihood = discretised_gaussian_log_likelihood(values, torch.tensor(mean), log_std)
    # 1e-12 is the least that a value is given.
    assert float(log_likelihood.exp().sum()) == pytest.approx(1, abs=256e-12)


def test_a_pixels_likelihood_is_the_normal_distributions_within_the_known_error_of_the_approximation():
    x = torch.linspace(-1, 1, 256, dtype=torch.float64)
    found = discretised_gaussian_log_likelihood(x, torch.tensor(0.2), torch.tensor(math.log(0.5))).exp()
    edges = torch.special.ndtr((x[:-1] + 1 / 255 - 0.2) / 0.5)
    exact = torch.diff(edges, prepend=torch.zeros(1), append=torch.ones(1))
    assert (found - exact).abs().max() < 2 * 2e-4


def test_the_bound_trains_the_variance_alone_and_the_error_the_noise_alone():
    x_0, x_1, index = example(batch=50)
    output = torch.randn(50, 6, 2, 2, dtype=torch.float64, requires_grad=True)
    loss = WHOLE.hybrid_loss(lambda x, t: output, x_0, x_1, index)
    (of_bound,) = torch.autograd.grad(loss.bound.sum(), output, retain_graph=True)
    (of_error,) = torch.autograd.grad(loss.mse.sum(), output)
    assert torch.equal(of_bound[:, :3], torch.zeros_like(x_0))
    assert torch.equal(of_error[:, 3:], torch.zeros_like(x_0))
    assert of_bound[:, 3:].abs().min() > 0
    torch.testing.assert_close(of_error[:, :3], 2 * (output[:, :3].detach() - x_0) / 12)


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16])
def test_in_float32_loss_gradient_and_prediction_are_finite_at_every_timestep(output_dtype):
    x_0, x_1, index = example(torch.float32)
    output = torch.randn(1000, 6, 2, 2).to(output_dtype).requires_grad_()
    loss = WHOLE.hybrid_loss(lambda x, t: output, x_0, x_1, index)
    assert loss.total.shape == (1000,)
    assert loss.total.dtype == torch.float32
    loss.total.sum().backward()
    x_t = WHOLE.diffuse(x_0, x_1, index)
    prediction = WHOLE.predict(output, x_t, index)
    for value in (loss.total, output.grad, *prediction, prediction.log_variance.exp()):
        assert torch.isfinite(value).all()


# A network of C channels, and wrong ones.


def noise_alone(x, t):
    return toy(x, t)[:, : x.shape[1]]


def test_a_network_without_variance_has_the_error_as_its_loss_and_samples_with_beta():
    x_0, x_1, index = example(batch=50)
    loss = WHOLE.hybrid_loss(noise_alone, x_0, x_1, index)
    assert torch.equal(loss.total, WHOLE.hybrid_loss(toy, x_0, x_1, index).mse)

    def with_beta(x, t):
        return torch.cat([noise_alone(x, t), torch.ones_like(x)], dim=1)

    chain = respaced(7)
    alone, learned = (
        ddpm_sample(chain, network, x_0, drawn(x_0.shape, 3, x_0.dtype))
        for network in (noise_alone, with_beta)
    )
    assert torch.equal(alone, learned)


def test_another_number_of_channels_is_refused():
    with pytest.raises(ValueError, match="gives 4, or 8 with the learned variance"):
        ddpm_sample(respaced(2), lambda x, t: x[:, :3], torch.zeros(1, 4, 2, 2), silence)


# The samplers.


def ddim_half(chain, network, x, noise):
    return ddim_sample(chain, network, x, noise, eta=0.5)


def encode(chain, network, x, noise):
    return ddim_encode(chain, network, x)


SAMPLERS = [ddpm_sample, ddim_half, encode]


def noise_of(indices, step):
    """Image i's own noise of step `step`; step -1 is its start."""
    return torch.stack(
        [torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(1000 * i + step + 1)) for i in indices]
    )


@pytest.mark.parametrize("sample", SAMPLERS)
def test_an_image_has_the_same_bits_in_batches_of_1_7_and_64(sample):
    def images(indices):
        return sample(respaced(10), toy, noise_of(indices, -1), lambda step: noise_of(indices, step))

    all_images = images(range(64))
    assert len(all_images.flatten(1).unique(dim=0)) == 64
    assert torch.equal(images(range(7)), all_images[:7])
    assert torch.equal(images([63]), all_images[63:])


@pytest.mark.parametrize("num_steps", [1, 2, 10, 250])
@pytest.mark.parametrize("sample", SAMPLERS)
def test_n_steps_are_n_calls_at_the_timesteps_kept_and_n_minus_one_noises(sample, num_steps):
    calls, noises = [], []

    def network(x, t):
        assert t.dtype == torch.int64
        assert t.shape == (len(x),)
        calls.append(int(t[0]))
        return toy(x, t)

    def noise(step):
        noises.append(step)
        return torch.zeros(2, 4, 1, 1)

    x = torch.ones(2, 4, 1, 1)
    out = sample(respaced(num_steps), network, x, noise)
    kept = spaced_timesteps(num_steps)
    assert calls == (kept if sample is encode else kept[::-1])
    assert noises == ([] if sample is encode else list(range(num_steps - 1)))
    assert (out - x).abs().min() > 0.01


def test_progress_is_told_after_each_step():
    ticks = []
    tick = ticks.append
    x = torch.ones(1, 4, 1, 1)
    ddpm_sample(respaced(3), toy, x, lambda step: torch.zeros(1), tick)
    ddim_sample(respaced(3), toy, x, silence, on_step=tick)
    ddim_encode(respaced(3), toy, x, tick)
    assert len(ticks) == 9


def test_one_step_from_noise_is_the_data_that_the_network_sees_in_it():
    x = torch.randn(2, 4, 3, 3)
    seen = WHOLE.predict(toy(x, torch.full((2,), 999)), x, 999).x_1_hat
    for sample in (ddpm_sample, ddim_sample):
        torch.testing.assert_close(sample(respaced(1), toy, x, silence), seen)


def test_a_bfloat16_network_is_rounded_once_and_the_state_never():
    x, t = torch.randn(2, 4, 3, 3), torch.full((2,), 500)
    output = toy(x, t).bfloat16()
    for found, expected in zip(
        WHOLE.predict(output, x, 500), WHOLE.predict(output.float(), x, 500), strict=True
    ):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


@pytest.mark.parametrize("sample", SAMPLERS)
def test_a_sample_that_is_not_finite_is_an_error(sample):
    """It names the timestep of the first step that gave one."""
    with pytest.raises(FloatingPointError, match="not finite after 2 steps of DD.* at timestep (999|0) on"):
        sample(respaced(2), lambda x, t: x * math.nan, torch.ones(1, 4, 1, 1), lambda step: torch.ones(1))

    def network(x, t):
        return torch.where(t.view(-1, 1, 1, 1) == 500, math.nan, x)

    with pytest.raises(FloatingPointError, match="not finite after 1000 steps of DD.* at timestep 500 on"):
        sample(respaced(1000), network, torch.ones(1, 4, 1, 1), lambda step: torch.ones(1))


@pytest.mark.parametrize("eta", [-0.1, 1.1, math.nan])
def test_an_eta_outside_zero_to_one_is_refused(eta):
    with pytest.raises(ValueError, match="eta must be from 0"):
        ddim_sample(respaced(2), toy, torch.ones(1, 4, 1, 1), silence, eta)


@pytest.mark.parametrize("channels", [3, None])
def test_guidance_moves_the_noise_and_leaves_the_variance_to_the_conditional_half(channels):
    """Four latent channels; the published protocol guides three of them."""
    calls = []

    def network(x, t, labels):
        calls.append((len(x), t.dtype))
        shift = labels.view(-1, 1, 1, 1) / 4  # class 1, null label 2
        return toy(x, t) + shift

    x, t = torch.randn(2, 4, 3, 3), torch.full((2,), 500)
    labels = torch.ones(2, dtype=torch.int64)
    guided = Guidance(4, channels=channels).bind(network, labels, 2)
    out, conditional = guided(x, t), toy(x, t) + 1 / 4
    count = channels or 4
    torch.testing.assert_close(out[:, :count], conditional[:, :count] - 3 / 4)
    assert torch.equal(out[:, count:], conditional[:, count:])
    assert torch.isfinite(ddpm_sample(respaced(10), guided, x, lambda step: torch.zeros_like(x))).all()
    assert calls == [(4, torch.int64)] * 11
