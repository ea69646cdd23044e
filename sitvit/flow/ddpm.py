"""DiT's discrete diffusion: 1000 timesteps, noise prediction, learned variance (arXiv 2212.09748).

    q(x_t | x_1)        = N(alpha_t x_1, sigma_t^2),   alpha_t^2 = alpha_bar_t = prod (1 - beta),
                          sigma_t^2 = 1 - alpha_bar_t,  beta linear from 1e-4 to 0.02      (arXiv 2006.11239)
    q(x_t' | x_t, x_1)  = N(a x_1 + b x_t, beta~),   t' the timestep before t               (ibid., Eq. 7)
    p(x_t' | x_t)       = N(a x_1_hat + b x_t, exp((1 + v)/2 log beta + (1 - v)/2 log beta~))
                          x_1_hat = (x_t - sigma_t noise_hat) / alpha_t           (arXiv 2102.09672, Eq. 15)

A network `network(x_t, timesteps) -> (B, 2C, ...)` gives noise_hat, then v; the timesteps (B,) are whole
numbers, and here DiT's own direction is kept: 0 lies next to the data, 999 is noise. x_0 is noise and x_1
data, as everywhere in sitvit. A network of C channels has v = 1, the variance beta. Guidance is bound
before, on noise_hat alone: the first C channels, or the published 3; v stays the conditional half's.

The official code computes its coefficients in float64, as here, and rounds them to float32; it takes the
betas of a respaced chain from ratios of alpha_bar, which rounds them by 4e-13. Here two steps of betas
a, b are one of a + b - a b, so that a chain that keeps all timesteps has the linear betas exactly.

Diffusers (0.42) takes the same steps, in float32 tables whose smallest betas are wrong by up to 5e-4, with
    DDPMScheduler(variance_type="learned_range", clip_sample=False, timestep_spacing="linspace"), except
        where a timestep falls half-way between two (278 step counts, not 10, 25, 50, 100 or 250);
    DDIMScheduler(clip_sample=False, timestep_spacing="leading") for "ddimN" where N divides 1000.
With other spacings its DDIM looks for the timestep before t at t - 1000 // N, wherever that is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .evaluations import NoiseSource
from .respacing import NUM_TIMESTEPS, spaced_timesteps

BETA_MIN, BETA_MAX = 1e-4, 0.02

NoiseNetwork = Callable[[Tensor, Tensor], Tensor]


class Prediction(NamedTuple):
    """What a network's output says at x_t, all like x_t; the last two are those of p(x_t' | x_t)."""

    noise_hat: Tensor
    x_1_hat: Tensor
    mean: Tensor
    log_variance: Tensor


class HybridLoss(NamedTuple):
    """Both parts of the objective, (B,), float32 or better."""

    mse: Tensor
    bound: Tensor

    @property
    def total(self) -> Tensor:
        """What training minimises (arXiv 2102.09672, Eq. 16; lambda 0.001 of 1000 timesteps makes 1)."""
        return self.mse + self.bound


@dataclass(frozen=True, eq=False)
class Diffusion:
    """A chain over some of the 1000 timesteps; `respaced` makes one.

    `timesteps` (N,) int64, rising, are what the network is fed; `beta` (N,) float64 the variance that each
    step adds. An `index` counts within the chain, 0 .. N - 1: (B,) int64, or one number for all samples.
    """

    timesteps: Tensor
    beta: Tensor

    def __len__(self) -> int:
        return len(self.timesteps)

    @cached_property
    def alpha_bar(self) -> Tensor:
        """(N,) float64, the share of the data in the variance of x_t for data of variance 1."""
        return torch.cumprod(1 - self.beta, dim=0)

    @cached_property
    def alpha_bar_before(self) -> Tensor:
        """(N,) float64, alpha_bar one step nearer to the data, which itself has 1."""
        return torch.cat([self.alpha_bar.new_ones(1), self.alpha_bar[:-1]])

    @cached_property
    def posterior_variance(self) -> Tensor:
        """(N,) float64, beta~ of q(x_t' | x_t, x_1); 0 at index 0."""
        return self.beta * (1 - self.alpha_bar_before) / (1 - self.alpha_bar)

    @cached_property
    def posterior_log_variance(self) -> Tensor:
        """(N,) float64, log beta~; at index 0 that of index 1, as in the official code."""
        first = self.posterior_variance[1:2] if len(self) > 1 else self.beta
        return torch.cat([first, self.posterior_variance[1:]]).log()

    def diffuse(self, x_0: Tensor, x_1: Tensor, index: Tensor | int) -> Tensor:
        """x_t = alpha_t x_1 + sigma_t x_0 for noise and data (B, ...)."""
        alpha, sigma = _coefficients(self.alpha_bar, index, x_1)
        return alpha * x_1 + sigma * x_0

    def posterior(self, x_1: Tensor, x_t: Tensor, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """Mean, like x_t, and log variance, which broadcasts over it, of q(x_t' | x_t, x_1)."""
        before, beta = self.alpha_bar_before, self.beta
        a = beta * before.sqrt() / (1 - self.alpha_bar)
        b = (1 - before) * (1 - beta).sqrt() / (1 - self.alpha_bar)
        mean = _at(a, index, x_t) * x_1 + _at(b, index, x_t) * x_t
        return mean, _at(self.posterior_log_variance, index, x_t)

    def predict(self, output: Tensor, x_t: Tensor, index: Tensor | int) -> Prediction:
        """Read the network's `output` (B, 2C or C, ...) at `x_t` (B, C, ...).

        Raises:
            ValueError: another number of channels.
        """
        noise_hat, v = _noise_and_variance(output, x_t)
        alpha, sigma = _coefficients(self.alpha_bar, index, x_t)
        x_1_hat = (x_t - sigma * noise_hat) / alpha
        mean, smallest = self.posterior(x_1_hat, x_t, index)
        largest = _at(self.beta.log(), index, x_t)
        share = (v + 1) / 2
        return Prediction(noise_hat, x_1_hat, mean, share * largest + (1 - share) * smallest)

    def evaluate(self, network: NoiseNetwork, x_t: Tensor, index: int) -> Prediction:
        """Call the network once, at `x_t` (B, C, ...) and the timestep of `index`."""
        timesteps = torch.full((len(x_t),), int(self.timesteps[index]), device=x_t.device)
        return self.predict(network(x_t, timesteps), x_t, index)

    def bound(self, output: Tensor, x_1: Tensor, x_t: Tensor, index: Tensor) -> Tensor:
        """The term of the variational bound on -log p(x_1) that belongs to `index`: (B,) bits per dimension.

        KL(q(x_t' | x_t, x_1) || p(x_t' | x_t)), and at index 0 the negative log-likelihood of the data,
        taken for 8-bit images in [-1, 1] as the official code takes latents too.
        """
        p = self.predict(output, x_t, index)
        mean, log_variance = self.posterior(x_1, x_t, index)
        gap = log_variance - p.log_variance
        kl = (gap.exp() - gap - 1 + (mean - p.mean).square() * (-p.log_variance).exp()) / 2
        nll = -discretised_gaussian_log_likelihood(x_1, p.mean, p.log_variance / 2)
        at_data = (index == 0).view(-1, *[1] * (x_1.dim() - 1))
        return torch.where(at_data, nll, kl).flatten(1).mean(dim=1) / math.log(2)

    def hybrid_loss(self, network: NoiseNetwork, x_0: Tensor, x_1: Tensor, index: Tensor) -> HybridLoss:
        """DiT's objective: the noise's squared error, and the bound as a function of v alone.

        Noise `x_0` and data `x_1` (B, C, ...), `index` (B,). The bound is 0 for a network of C channels,
        and not rescaled in a respaced chain, as with the official settings.
        """
        x_t = self.diffuse(x_0, x_1, index)
        output = network(x_t, self.timesteps.to(index.device)[index])
        noise_hat, v = _noise_and_variance(output, x_t)
        mse = (noise_hat - x_0).square().flatten(1).mean(dim=1)
        if output.shape[1] == x_t.shape[1]:
            return HybridLoss(mse, torch.zeros_like(mse))
        return HybridLoss(mse, self.bound(torch.cat([noise_hat.detach(), v], dim=1), x_1, x_t, index))


def respaced(respacing: int | str = NUM_TIMESTEPS) -> Diffusion:
    """The chain over the timesteps of `spaced_timesteps`, with the alpha_bar that they have in the whole.

    Raises:
        ValueError: a respacing that cannot be read or met.
    """
    timesteps = spaced_timesteps(respacing)
    kept, betas, merged = set(timesteps), [], 0.0
    for t in range(NUM_TIMESTEPS):
        beta = BETA_MIN + (BETA_MAX - BETA_MIN) * t / (NUM_TIMESTEPS - 1)
        merged += beta - merged * beta
        if t in kept:
            betas.append(merged)
            merged = 0.0
    return Diffusion(torch.tensor(timesteps), torch.tensor(betas, dtype=torch.float64))


def discretised_gaussian_log_likelihood(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Nats of the 8-bit value at `x` in [-1, 1] under N(mean, std^2), like `x` (arXiv 2006.11239, Eq. 13).

    A value owns 1/255 to both sides, the outermost all beyond. The normal distribution function is the
    official code's approximation, (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))) / 2, wrong by up to 2e-4.
    """
    above = _approximate_normal_cdf((x - mean + 1 / 255) * (-log_std).exp())
    below = _approximate_normal_cdf((x - mean - 1 / 255) * (-log_std).exp())
    probability = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return probability.clamp(min=1e-12).log()


def ddpm_sample(
    diffusion: Diffusion,
    network: NoiseNetwork,
    x: Tensor,
    noise: NoiseSource,
    on_step: Callable[[Tensor], object] = lambda x: None,
) -> Tensor:
    """Carry noise `x` (B, C, ...) to data by ancestral sampling, in len(diffusion) calls of the network.

    `noise(i)` is used at step i = 0, 1, ... from the noisiest on, and not at the last. Nothing is clipped,
    as where latents are sampled. Returns float32 or better; `on_step` is called after each step.

    Raises:
        FloatingPointError: the result is not finite.
    """
    x, bad = _wide(x), None
    for step, index in enumerate(reversed(range(len(diffusion)))):
        prediction = diffusion.evaluate(network, x, index)
        x = prediction.mean
        if index > 0:
            x = x + (prediction.log_variance / 2).exp() * noise(step).to(x)
        bad = _first_bad(bad, x, diffusion.timesteps[index])
        on_step(x)
    return _finite(x, f"{len(diffusion)} steps of DDPM", bad)


def ddim_sample(
    diffusion: Diffusion,
    network: NoiseNetwork,
    x: Tensor,
    noise: NoiseSource,
    eta: float = 0.0,
    on_step: Callable[[Tensor], object] = lambda x: None,
) -> Tensor:
    """`ddpm_sample`, by DDIM's steps (arXiv 2010.02502, Eqs. 12 and 16), which do not look at v.

    `eta` in [0, 1]: 0 asks for no noise, and 1 is DDPM with variance beta~.

    Raises:
        ValueError: `eta` outside [0, 1].
        FloatingPointError: the result is not finite.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta must be from 0 (no noise) to 1 (as DDPM), got {eta}")
    x, bad = _wide(x), None
    for step, index in enumerate(reversed(range(len(diffusion)))):
        prediction = diffusion.evaluate(network, x, index)
        variance = eta**2 * diffusion.posterior_variance
        alpha = _at(diffusion.alpha_bar_before.sqrt(), index, x)
        sigma = _at((1 - diffusion.alpha_bar_before - variance).sqrt(), index, x)
        x = alpha * prediction.x_1_hat + sigma * prediction.noise_hat
        if eta > 0 and index > 0:
            x = x + _at(variance.sqrt(), index, x) * noise(step).to(x)
        bad = _first_bad(bad, x, diffusion.timesteps[index])
        on_step(x)
    return _finite(x, f"{len(diffusion)} steps of DDIM", bad)


def ddim_encode(
    diffusion: Diffusion,
    network: NoiseNetwork,
    x: Tensor,
    on_step: Callable[[Tensor], object] = lambda x: None,
) -> Tensor:
    """Carry data `x` (B, C, ...) to the noise that `ddim_sample` with eta 0 takes back to it, to order 1.

    The same steps backwards: the one to timestep t is made with the noise predicted at t, for the state
    before (as in diffusers' DDIMInverseScheduler). Calls, result and errors as in `ddpm_sample`.
    """
    x, bad = _wide(x), None
    for index, timestep in enumerate(diffusion.timesteps.tolist()):
        output = network(x, torch.full((len(x),), timestep, device=x.device))
        noise_hat, _ = _noise_and_variance(output, x)
        alpha, sigma = _coefficients(diffusion.alpha_bar_before, index, x)
        x = diffusion.diffuse(noise_hat, (x - sigma * noise_hat) / alpha, index)
        bad = _first_bad(bad, x, diffusion.timesteps[index])
        on_step(x)
    return _finite(x, f"{len(diffusion)} steps of DDIM back", bad)


def _noise_and_variance(output: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
    channels = x_t.shape[1]
    if output.shape[1] not in (channels, 2 * channels):
        raise ValueError(
            f"a noise network for {channels} channels gives {channels}, or {2 * channels} with the learned "
            f"variance (learn_sigma), got {output.shape[1]}"
        )
    # Under autocast a network gives bfloat16; the state and the loss stay in float32.
    output = output.to(torch.promote_types(x_t.dtype, torch.float32))
    noise_hat = output[:, :channels]
    return noise_hat, output[:, channels:] if output.shape[1] > channels else torch.ones_like(noise_hat)


def _coefficients(alpha_bar: Tensor, index: Tensor | int, x: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and sigma of a table of alpha_bar at `index`."""
    return _at(alpha_bar.sqrt(), index, x), _at((1 - alpha_bar).sqrt(), index, x)


def _at(table: Tensor, index: Tensor | int, x: Tensor) -> Tensor:
    """Entries of `table` (N,) that broadcast over `x` (B, ...), in its precision, float32 at least."""
    entries = table.to(torch.promote_types(x.dtype, torch.float32)).to(x.device)[index]
    return entries.view(-1, *[1] * (x.dim() - 1))


def _approximate_normal_cdf(z: Tensor) -> Tensor:
    return (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _first_bad(first: Tensor | None, x: Tensor, timestep: Tensor) -> Tensor:
    """The first timestep from which a step gave a state that is not finite; -1: none so far."""
    first = torch.full((), -1, device=x.device) if first is None else first
    bad = ~torch.isfinite(x).all()
    return torch.where(bad & (first < 0), timestep.to(x.device), first)


def _finite(x: Tensor, what: str, bad_from: Tensor | None) -> Tensor:
    # Looked at once, at the end: each look waits for a GPU.
    if bad_from is not None and bad_from >= 0:
        raise FloatingPointError(
            f"the sample is not finite after {what}, from the step at timestep {int(bad_from)} on"
        )
    return x
