"""Guidance on stub networks: what it computes, what it costs, what it refuses."""

import math

import pytest
import torch

from sitvit.flow.guidance import Guidance
from sitvit.flow.ode import integrate
from sitvit.flow.times import grid

NULL = 3


def class_or_null(x, t, labels):
    """1 where the label is a class, 0 where it is null."""
    return (labels != NULL).float().view(-1, 1, 1, 1).expand_as(x)


def by_label(x, t, labels):
    """Something that depends on everything, each sample alone."""
    return torch.sin(x) * (1 + labels.view(-1, 1, 1, 1)) + t.view(-1, 1, 1, 1)


class Counted:
    def __init__(self, network):
        self.network, self.sizes = network, []

    def __call__(self, x, t, labels):
        self.sizes.append(len(x))
        return self.network(x, t, labels)


X, T, LABELS = torch.randn(2, 4, 2, 2), torch.tensor([0.2, 0.6]), torch.tensor([0, 2])


@pytest.mark.parametrize("channels", [4, 16])
def test_guidance_acts_on_every_channel(channels):
    out = Guidance(4).bind(class_or_null, LABELS, NULL)(torch.zeros(2, channels, 2, 2), torch.zeros(2))
    assert torch.equal(out, torch.full_like(out, 4))


def test_three_channels_are_guided_when_asked_for_and_the_fourth_is_the_conditional():
    out = Guidance(4, channels=3).bind(class_or_null, LABELS, NULL)(torch.zeros(2, 4, 2, 2), torch.zeros(2))
    assert torch.equal(out[:, :3], torch.full((2, 3, 2, 2), 4.0))
    assert torch.equal(out[:, 3:], torch.ones(2, 1, 2, 2))


@pytest.mark.parametrize("num_channels", [3, 16, 32])
def test_three_channels_of_another_latent_are_refused_unless_they_are_all(num_channels):
    guided = Guidance(4, channels=3).bind(class_or_null, LABELS, NULL)
    x = torch.zeros(2, num_channels, 2, 2)
    if num_channels == 3:
        assert torch.equal(guided(x, torch.zeros(2)), torch.full_like(x, 4))
    else:
        with pytest.raises(ValueError, match=f"{num_channels}: guide all"):
            guided(x, torch.zeros(2))


@pytest.mark.parametrize("channels", [None, 3])
def test_channels_beyond_the_latents_stay_conditional(channels):
    """DiT's variances stand behind the noise."""
    doubled = lambda x, t, labels: torch.cat([class_or_null(x, t, labels)] * 2, dim=1)  # noqa: E731
    out = Guidance(4, channels=channels).bind(doubled, LABELS, NULL)(torch.zeros(2, 4, 2, 2), torch.zeros(2))
    assert out.shape == (2, 8, 2, 2)
    assert torch.equal(out[:, 4:], torch.ones(2, 4, 2, 2))
    assert torch.equal(out[:, :3], torch.full((2, 3, 2, 2), 4.0))


def test_scale_one_is_the_network_itself_at_one_pass():
    network = Counted(by_label)
    assert torch.equal(Guidance(1).bind(network, LABELS, None)(X, T), by_label(X, T, LABELS))
    assert network.sizes == [2]


def test_conditional_and_null_are_one_batch():
    network = Counted(by_label)
    out = Guidance(1.5).bind(network, LABELS, NULL)(X, T)
    null = by_label(X, T, torch.full_like(LABELS, NULL))
    torch.testing.assert_close(out, null + 1.5 * (by_label(X, T, LABELS) - null))
    assert network.sizes == [4]


def test_outside_its_interval_guidance_is_off_and_costs_one_pass():
    network = Counted(by_label)
    guided = Guidance(4, interval=(0.3, 0.8)).bind(network, LABELS, NULL)
    integrate(guided, X, grid(10), "euler")
    # t = 0, 0.1, ..., 0.9; guided from 0.3 to 0.8
    assert network.sizes == [2, 2, 2, 4, 4, 4, 4, 4, 4, 2]


def test_an_interval_is_heeded_by_each_sample_of_its_own():
    out = Guidance(4, interval=(0.5, 1)).bind(by_label, LABELS, NULL)(X, T)
    always = Guidance(4).bind(by_label, LABELS, NULL)(X, T)
    assert torch.equal(out[0], by_label(X, T, LABELS)[0])  # t = 0.2
    assert torch.equal(out[1], always[1])  # t = 0.6


def test_rescaling_brings_the_spread_of_each_sample_back():
    plain, full, half = (Guidance(5, rescale=phi).bind(by_label, LABELS, NULL)(X, T) for phi in (0, 1, 0.5))
    wanted = by_label(X, T, LABELS).flatten(1).std(dim=1)
    torch.testing.assert_close(full.flatten(1).std(dim=1), wanted)
    torch.testing.assert_close(half, (plain + full) / 2)


def test_autoguidance_goes_away_from_the_weak_network():
    weak = Counted(lambda x, t, labels: 0.5 * by_label(x, t, labels))
    network = Counted(by_label)
    out = Guidance(3).bind(network, LABELS, None, weak)(X, T)
    torch.testing.assert_close(out, 2 * by_label(X, T, LABELS))  # 0.5 + 3 (1 - 0.5)
    assert network.sizes == weak.sizes == [2]


@pytest.mark.parametrize("size", [1, 7])
def test_a_guided_image_does_not_see_its_batch_mates(size):
    x, t = torch.randn(64, 4, 2, 2), torch.rand(64)
    labels = torch.arange(64) % 3
    settings = {"interval": (0.2, 0.9), "channels": 3, "rescale": 0.7}
    together = Guidance(2.5, **settings).bind(by_label, labels, NULL)(x, t)
    parts = zip(x.split(size), t.split(size), labels.split(size), strict=True)
    apart = torch.cat([Guidance(2.5, **settings).bind(by_label, y, NULL)(x, t) for x, t, y in parts])
    assert torch.equal(together, apart)


@pytest.mark.parametrize("scale", [0.5, 0, -1, math.nan, math.inf])
def test_a_scale_below_one_is_refused(scale):
    with pytest.raises(ValueError, match="cfg_scale must be 1"):
        Guidance(scale).bind(class_or_null, LABELS, NULL)


def test_guidance_without_a_null_label_is_refused():
    with pytest.raises(ValueError, match="needs a null label or a weak network"):
        Guidance(2).bind(class_or_null, LABELS, None)


@pytest.mark.parametrize(
    "kwargs",
    [{"interval": (0.8, 0.3)}, {"interval": (0, 1.5)}, {"channels": 0}, {"rescale": 1.5}, {"rescale": -1}],
)
def test_settings_that_make_no_sense_are_refused(kwargs):
    with pytest.raises(ValueError, match="guid"):
        Guidance(2.0, **kwargs)


def test_rescaling_what_has_no_spread_leaves_it_as_it_is():
    """A stub's velocity, and that of an untrained network, is the same everywhere."""
    velocity = Guidance(4.0, rescale=0.7).bind(
        lambda x, t, labels: torch.ones_like(x) * (labels < 10).view(-1, 1, 1, 1), torch.tensor([1, 2]), 10
    )
    x = torch.zeros(2, 4, 3, 3)
    assert torch.equal(velocity(x, torch.zeros(2)), torch.full_like(x, 4.0))


@pytest.mark.parametrize("channels", [1, 2, 3.0, True])
def test_guided_channels_are_three_or_all(channels):
    with pytest.raises(ValueError, match="must be 3"):
        Guidance(2.0, channels=channels)


def test_a_trial_step_past_the_end_of_the_way_is_inside_an_interval_that_ends_there():
    calls = []

    def network(x, t, labels):
        calls.append(len(x))
        return x

    Guidance(2.0, (0.5, 1.0)).bind(network, torch.tensor([1]), 10)(
        torch.zeros(1, 4, 1, 1), torch.tensor([1.01])
    )
    assert calls == [2]
