"""Whether an SDE's steps are fine enough for its diffusion: from path, diffusion and grid, without a network.

On data N(0, s^2) all is linear. With V = alpha^2 s^2 + sigma^2, the variance of x_t,

    velocity b x,  b = (alpha d_alpha s^2 + sigma d_sigma) / V        drift a x,  a = b - D / V

a step is x <- f x + g z with a standard normal z and k = sqrt(2 D h),

    Euler-Maruyama   f = 1 + h a                                 g = k
    Heun             f = 1 + h/2 (a + a' (1 + h a))              g = f k      (a' at t + h; the kick first)
    last step        f = 1 + h a (Mean), 1 + h b (Euler), alpha s^2 / V (Tweedie)

and the chain's variance is carried exactly by var <- f^2 var + g^2. Latents are scaled to a spread of about 1
and vary less in some directions, for which s stands too. The smaller s, the larger D / V near the data; where
h D / V passes 2, |f| is above 1, and noise grows from step to step to large, finite values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .sde import Diffusion

SPREADS = tuple(tenths / 10 for tenths in range(1, 11))
"""Of the data that a chain is tried on."""
TOLERANCE = 0.1
"""How far from the data's a chain's spread may end: a tenth of the latents'. sit-sde's ends within 0.03."""
RUINED = 10.0
"""A spread that leaves nothing of an image."""


def chain_spreads(times: Sequence[float], diffusion: Diffusion, method: str, last_step: str) -> list[float]:
    """The spread with which the chain ends on data of each of `SPREADS`; it begins as the path has it.

    The arguments are `integrate_sde`'s; inf where float64 overflows.
    """
    t = torch.tensor(times, dtype=torch.float64)[:, None]  # (N + 1, 1), against K spreads
    h = t[1:] - t[:-1]
    variance, velocity, drift = _linear(t, diffusion)
    kick = (2 * diffusion(t[:-1]) * h).sqrt()
    f, g = 1 + h * drift[:-1], kick
    if method == "stochastic-heun":
        f = 1 + h / 2 * (drift[:-1] + drift[1:] * f)
        g = f * kick
    chain = variance[0]
    for factor, noise in zip(f.square(), g.square(), strict=True):
        chain = factor * chain + noise
    if last_step != "none":
        alpha, rest = diffusion.path.alpha(t[-1]), 1 - t[-1]
        tweedie = alpha * torch.tensor(SPREADS, dtype=t.dtype) ** 2 / variance[-1]
        chain = (
            chain
            * {
                "Mean": 1 + rest * drift[-1],
                "Euler": 1 + rest * velocity[-1],
                "Tweedie": tweedie,
            }[last_step].square()
        )
    return chain.sqrt().nan_to_num(nan=torch.inf).tolist()


def worst_spread(
    times: Sequence[float], diffusion: Diffusion, method: str, last_step: str
) -> tuple[float, float]:
    """(wanted, found) at the end for the one of `SPREADS` that comes out furthest from the path's."""
    end = torch.tensor([[times[-1] if last_step == "none" else 1.0]], dtype=torch.float64)
    wanted = _linear(end, diffusion)[0][0].sqrt().tolist()
    found = chain_spreads(times, diffusion, method, last_step)
    return max(zip(wanted, found, strict=True), key=lambda pair: abs(pair[1] - pair[0]))


def _linear(t: Tensor, diffusion: Diffusion) -> tuple[Tensor, Tensor, Tensor]:
    """V, b and a of the module, each (N, K), at times (N, 1)."""
    path, squared = diffusion.path, torch.tensor(SPREADS, dtype=t.dtype) ** 2
    alpha, sigma = path.alpha(t), path.sigma(t)
    variance = alpha**2 * squared + sigma**2
    velocity = (alpha * path.d_alpha(t) * squared + sigma * path.d_sigma(t)) / variance
    return variance, velocity, velocity - diffusion(t) / variance
