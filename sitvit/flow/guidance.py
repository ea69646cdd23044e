"""Guidance: a better velocity from two, given back as a velocity like any other.

    v = v_weak + s (v_main - v_weak)

Classifier-free guidance (arXiv 2207.12598): weak is the same network with the null label; both go through
it as one batch. Autoguidance (arXiv 2406.02507): weak is another, worse network with the same label. Scale
s = 1 is the main velocity itself. Outside an interval of t the main velocity alone is used and paid for
(arXiv 2404.07724). Rescaling by phi (arXiv 2305.08891, Eqs. 15 and 16) brings the spread of each sample back
towards the main velocity's: v <- phi std(v_main) / std(v) v + (1 - phi) v.

The official SiT and DiT code guides the first 3 of 4 latent channels, and published numbers used that:
`channels=3`. Output channels beyond the latent's (DiT's variances) are the main network's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .intervals import Interval
from .parameterization import Velocity
from .paths import per_sample

ConditionalVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`network(x_t, t, labels)` with labels (B,)."""


@dataclass(frozen=True)
class Guidance:
    """Settings of guidance; `bind` makes a velocity of them.

    `interval` = [low, high] in t; `channels` None guides all, 3 as published; `rescale` from 0 (off) to 1.

    Raises:
        ValueError: naming the setting that makes no sense.
    """

    cfg_scale: float = 1.0
    interval: Interval = (0.0, 1.0)
    channels: int | None = None
    rescale: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.cfg_scale < math.inf:
            raise ValueError(f"cfg_scale must be 1 (no guidance) or more, got {self.cfg_scale}")
        if not 0 <= self.interval[0] <= self.interval[1] <= 1:
            raise ValueError(f"the guidance interval needs 0 <= low <= high <= 1, got {self.interval}")
        if self.channels is not None and (self.channels != 3 or not isinstance(self.channels, int)):
            raise ValueError(
                f"guided channels must be 3, as published, or None for all; got {self.channels!r}"
            )
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"the guidance rescale must be from 0 (off) to 1, got {self.rescale}")

    @property
    def is_off(self) -> bool:
        """Whether the velocity is the main network's at every t."""
        return self.cfg_scale == 1

    def check_channels(self, num_channels: int) -> None:
        """ValueError where some channels, but not all, are asked for of a latent that has not 4."""
        count = self.channels
        if count is not None and num_channels not in (count, 4):
            raise ValueError(
                f"guiding {count} channels is the published protocol of 4-channel latents; this one has "
                f"{num_channels}: guide all"
            )

    def bind(
        self,
        network: ConditionalVelocity,
        labels: Tensor,
        null_label: int | None,
        weak_network: ConditionalVelocity | None = None,
    ) -> Velocity:
        """The guided velocity of `labels` (B,).

        With `weak_network` guidance is away from that network, else away from `null_label`. At scale 1 and
        outside the interval a call costs one pass.

        Raises:
            ValueError: guidance without a null label or a weak network.
        """
        if self.is_off:
            return lambda x, t: network(x, t, labels)
        if weak_network is None and null_label is None:
            raise ValueError(
                f"cfg_scale {self.cfg_scale} needs a null label or a weak network; use cfg_scale 1"
            )
        null_labels = None if null_label is None else torch.full_like(labels, null_label)

        def main_and_weak(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            if weak_network is not None:
                return network(x, t, labels), weak_network(x, t, labels)
            assert null_labels is not None
            both = network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null_labels]))
            main, weak = both.chunk(2)
            return main, weak

        def guided(x: Tensor, t: Tensor) -> Tensor:
            self.check_channels(x.shape[1])
            always = self.interval == (0, 1)
            low, high = self.interval
            # A trial step of torchdiffeq's dopri5 may ask just past the ends of the way.
            inside = (t >= (low if low > 0 else -math.inf)) & (t <= (high if high < 1 else math.inf))
            if not always and not inside.any():
                return network(x, t, labels)
            main, weak = main_and_weak(x, t)
            count = x.shape[1] if self.channels is None else self.channels
            head = main[:, :count]
            better = self._combine(head, weak[:, :count])
            if not always:
                better = torch.where(per_sample(inside, x), better, head)
            return torch.cat([better, main[:, count:]], dim=1) if count < main.shape[1] else better

        return guided

    def _combine(self, main: Tensor, weak: Tensor) -> Tensor:
        better = weak + self.cfg_scale * (main - weak)
        if self.rescale == 0:
            return better
        spread = _spread(better)
        ratio = torch.where(spread > 0, _spread(main) / spread, 1.0)  # what is flat has nothing to rescale
        return self.rescale * ratio * better + (1 - self.rescale) * better


def _spread(x: Tensor) -> Tensor:
    return x.flatten(1).std(dim=1, correction=0).view(-1, *[1] * (x.dim() - 1))
