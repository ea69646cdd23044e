"""Where times are drawn and where samplers run, so that no formula divides by zero (SiT's official code).

Two margins: 1e-3 for networks that predict noise, score or data (their velocity divides by alpha or sigma)
and for the SBDM diffusion, which is infinite where alpha is 0; on the vp path, whose noise end is harmless,
1e-5 below t = 1 in training and 1e-3 in sampling. A velocity on a linear or gvp path needs none. Every
interval can be given instead.

Difference from the official code: there a user's margins are overwritten, and SBDM with velocity starts
at t = 0, where it is infinite.
"""

from .parameterization import check_prediction
from .paths import Path

Interval = tuple[float, float]

MARGIN = 1e-3
VP_TRAINING_MARGIN = 1e-5


def training_interval(path: Path, prediction: str, weight: str = "none") -> Interval:
    """From where times of training are drawn.

    A likelihood weight on velocity grows like 1 / (1 - t) and takes the margin too.
    """
    check_prediction(prediction)
    if path.name == "vp":
        return 0.0, 1 - VP_TRAINING_MARGIN
    if prediction == "velocity" and weight != "likelihood":
        return 0.0, 1.0
    return MARGIN, 1 - MARGIN


def ode_interval(path: Path, prediction: str) -> Interval:
    """From where to where the ODE runs."""
    check_prediction(prediction)
    if path.name == "vp":
        return 0.0, 1 - MARGIN
    return (0.0, 1.0) if prediction == "velocity" else (MARGIN, 1 - MARGIN)


def sde_interval(path: Path, prediction: str, diffusion: str, last_step_size: float) -> Interval:
    """From where to where the SDE runs; after it comes a last step of `last_step_size`, where above 0."""
    first, last = ode_interval(path, prediction)
    if diffusion == "SBDM" and path.name != "vp":
        first = max(first, MARGIN)
    return first, 1 - last_step_size if last_step_size > 0 else last


def check_interval(interval: Interval) -> None:
    """ValueError unless 0 <= t_min < t_max <= 1."""
    t_min, t_max = interval
    if not 0 <= t_min < t_max <= 1:
        raise ValueError(f"an interval of times needs 0 <= t_min < t_max <= 1, got {t_min} to {t_max}")
