"""Attention distances against closed forms: looking everywhere, at oneself, at registers."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from sitvit.analyze.attention import (
    attention_distance,
    attention_weights,
    centre_map,
    register_share,
    uniform_distance,
)
from sitvit.models.layers import Attention

GRID = (4, 6)


def closed_form(rows: int, columns: int) -> float:
    """Mean distance of two places drawn independently: a sum over offsets, each as often as it occurs."""
    total = sum(
        (rows - abs(i)) * (columns - abs(j)) * math.hypot(i, j)
        for i, j in itertools.product(range(1 - rows, rows), range(1 - columns, columns))
    )
    return total / (rows * columns) ** 2


@pytest.mark.parametrize("grid", [(1, 1), (3, 3), GRID, (16, 16)])
def test_uniform_attention_has_the_closed_form_distance(grid):
    n = grid[0] * grid[1]
    weights = torch.full((2, 3, n, n), 1 / n)
    assert attention_distance(weights, grid) == pytest.approx(
        torch.full((2, 3), closed_form(*grid)), rel=1e-5
    )
    assert uniform_distance(grid) == pytest.approx(closed_form(*grid), rel=1e-6)


def test_attention_to_oneself_has_distance_zero_and_to_the_neighbour_one():
    itself = torch.eye(24).expand(1, 1, 24, 24)
    assert attention_distance(itself, GRID).item() == 0
    neighbour = itself.roll(1, dims=-1).unflatten(2, GRID)[:, :, :, :-1].flatten(2, 3)  # no row's last patch
    places = torch.ones(1, 1, 24, 24) * torch.eye(24)
    places[0, 0, [r * 6 + c for r in range(4) for c in range(5)]] = neighbour[0, 0]
    assert attention_distance(places, GRID).item() == pytest.approx(20 / 24)


def test_registers_take_their_share_and_change_no_distance():
    among = torch.rand(2, 3, 24, 24).softmax(dim=-1)
    weights = torch.cat([0.25 * among, torch.full((2, 3, 24, 4), 0.75 / 4)], dim=-1)
    weights = torch.cat([weights, torch.full((2, 3, 4, 28), 1 / 28)], dim=2)
    torch.testing.assert_close(attention_distance(weights, GRID), attention_distance(among, GRID))
    assert register_share(weights, 24) == pytest.approx(torch.full((2, 3), 0.75), rel=1e-5)


def test_the_map_is_the_row_of_the_centre_patch():
    weights = torch.zeros(1, 1, 28, 28)
    weights[0, 0, 2 * 6 + 3, 1 * 6 + 5] = 1
    picture = centre_map(weights, GRID)[0, 0]
    assert picture.shape == GRID
    assert picture[1, 5] == picture.sum() == 1


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_weights_are_those_that_the_network_computes_with(qk_norm):
    attention = Attention(32, 4, qkv_bias=True, qk_norm=qk_norm, eps=1e-6)
    x = torch.randn(2, 9, 32)
    weights = attention_weights(attention, x)
    _, _, v = attention.heads(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    expected = F.linear((weights @ v).transpose(1, 2).flatten(2), attention.proj.weight, attention.proj.bias)
    torch.testing.assert_close(attention(x), expected, atol=1e-6, rtol=1e-5)  # float32, another order of sums
