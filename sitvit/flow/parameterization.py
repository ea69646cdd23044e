"""What a network may predict, and how each prediction becomes each other.

At a point x = alpha d + sigma e of a path, data d, noise e, velocity v and score s are tied by

    v = d_alpha d + d_sigma e,        s = -e / sigma        (SiT, Eqs. 4 to 7; arXiv 2202.00512)

so one of them and x give the rest. With speed = d_alpha sigma - alpha d_sigma:

    from velocity   e = (d_alpha x - alpha v) / speed       d = (sigma v - d_sigma x) / speed
    from noise      v = (d_alpha x - speed e) / alpha       d = (x - sigma e) / alpha
    from data       v = (d_sigma x + speed d) / sigma       e = (x - alpha d) / sigma
    from score      e = -sigma s

Velocity determines all at every t. Where alpha = 0 (the noise end) x is the noise, and noise or score say
nothing of the data; where sigma = 0 (the data end) data says nothing of the noise. There alpha and sigma
count as `FLOOR` in the denominators: the value is finite, and means nothing. Samplers stay inside
(`intervals`).
"""

from collections.abc import Callable

from torch import Tensor

from .names import PREDICTIONS
from .paths import FLOOR, Path, per_sample

Velocity = Callable[[Tensor, Tensor], Tensor]
"""`velocity(x_t, t)` with x_t (B, ...) and t (B,) in [0, 1] gives dx_t/dt of x_t's shape."""

Conversion = Callable[[Path, Tensor, Tensor, Tensor], Tensor]
"""`convert(path, value, x, t)` with value and x (B, ...), t (B,)."""


def noise_from_velocity(path: Path, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(d_alpha x - alpha v) / speed."""
    t = per_sample(t, x)
    return (path.d_alpha(t) * x - path.alpha(t) * velocity) / path.speed(t)


def noise_from_data(path: Path, data: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(x - alpha d) / sigma; nothing is known at sigma = 0."""
    t = per_sample(t, x)
    return (x - path.alpha(t) * data) / path.sigma(t).clamp(min=FLOOR)


def noise_from_score(path: Path, score: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """-sigma s."""
    return -path.sigma(per_sample(t, x)) * score


def data_from_velocity(path: Path, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(sigma v - d_sigma x) / speed."""
    t = per_sample(t, x)
    return (path.sigma(t) * velocity - path.d_sigma(t) * x) / path.speed(t)


def data_from_noise(path: Path, noise: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(x - sigma e) / alpha; nothing is known at alpha = 0."""
    t = per_sample(t, x)
    return (x - path.sigma(t) * noise) / path.alpha(t).clamp(min=FLOOR)


def data_from_score(path: Path, score: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(x + sigma^2 s) / alpha, Tweedie's formula; nothing is known at alpha = 0."""
    return data_from_noise(path, noise_from_score(path, score, x, t), x, t)


def velocity_from_noise(path: Path, noise: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(d_alpha x - speed e) / alpha; nothing is known at alpha = 0."""
    t = per_sample(t, x)
    return (path.d_alpha(t) * x - path.speed(t) * noise) / path.alpha(t).clamp(min=FLOOR)


def velocity_from_data(path: Path, data: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(d_sigma x + speed d) / sigma; nothing is known at sigma = 0."""
    t = per_sample(t, x)
    return (path.d_sigma(t) * x + path.speed(t) * data) / path.sigma(t).clamp(min=FLOOR)


def velocity_from_score(path: Path, score: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(d_alpha x + speed sigma s) / alpha; nothing is known at alpha = 0."""
    return velocity_from_noise(path, noise_from_score(path, score, x, t), x, t)


def score_from_noise(path: Path, noise: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """-e / sigma; at sigma = 0 the true score is finite and this one a bounded stand-in."""
    return -noise / path.sigma(per_sample(t, x)).clamp(min=FLOOR)


def score_from_velocity(path: Path, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(alpha v - d_alpha x) / (speed sigma)."""
    return score_from_noise(path, noise_from_velocity(path, velocity, x, t), x, t)


def score_from_data(path: Path, data: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """(alpha d - x) / sigma^2."""
    return score_from_noise(path, noise_from_data(path, data, x, t), x, t)


CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("velocity", "noise"): noise_from_velocity,
    ("velocity", "data"): data_from_velocity,
    ("velocity", "score"): score_from_velocity,
    ("noise", "velocity"): velocity_from_noise,
    ("noise", "data"): data_from_noise,
    ("noise", "score"): score_from_noise,
    ("data", "velocity"): velocity_from_data,
    ("data", "noise"): noise_from_data,
    ("data", "score"): score_from_data,
    ("score", "velocity"): velocity_from_score,
    ("score", "noise"): noise_from_score,
    ("score", "data"): data_from_score,
}
"""(what is given, what is wanted) -> the function."""


def check_prediction(name: str) -> None:
    """ValueError unless `name` is in `PREDICTIONS`."""
    if name not in PREDICTIONS:
        raise ValueError(f"no prediction is called {name!r}; known are {', '.join(PREDICTIONS)}")


def as_velocity(network: Velocity, path: Path, prediction: str) -> Velocity:
    """The velocity of a network `network(x_t, t)` that predicts `prediction`."""
    check_prediction(prediction)
    if prediction == "velocity":
        return network
    convert = CONVERSIONS[prediction, "velocity"]
    return lambda x, t: convert(path, network(x, t), x, t)
