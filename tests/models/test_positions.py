"""Attention and rotation equal the released ViT-5 classifier's, part by part."""

import math

import pytest
import torch

from sitvit.models.layers import Attention, RMSNorm
from sitvit.models.positions import grid_coordinates, rotate, rotation_angles, rotation_table, sincos_2d

from .golden import Golden, assert_equal


@pytest.fixture(params=["vit5_model_0", "vit5_model_1"])
def golden(request) -> Golden:
    return Golden(request.param)


def angles(golden: Golden, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    side = golden.config["img_size"] // golden.config["patch_size"]
    registers = round(golden.config["num_registers"] ** 0.5)
    return (
        rotation_angles(head_dim, *grid_coordinates(side, side), golden.config["rope_theta"]),
        rotation_angles(
            head_dim, *grid_coordinates(registers, registers), golden.config["register_rope_theta"]
        ),
    )


def test_rotation_of_the_patches_equals_vit5(golden):
    q = golden["in/q"]  # (B, N, heads, d)
    patches, _ = angles(golden, q.shape[-1])
    out = rotate(q, rotation_table(patches))
    assert_equal(out, golden["out/rope_patches"])


def test_attention_equals_vit5(golden):
    """Tokens [class, patches, registers]; the class token is not turned."""
    width, heads = golden.config["embed_dim"], golden.config["num_heads"]
    attention = Attention(width, heads, qkv_bias=False, qk_norm=True, eps=1e-6)
    state = {k: v for k, v in golden.under("state/blocks.0.attn.").items() if "freqs" not in k}
    attention.load_state_dict(state, strict=True)
    patches, registers = angles(golden, width // heads)
    still = torch.zeros(1, patches.shape[1], dtype=torch.float64)
    table = rotation_table(torch.cat([still, patches, registers]))
    out = attention(golden["in/tokens"], table)
    assert_equal(out, golden["out/attn0"])


def test_rotation_keeps_lengths_and_shows_only_differences_of_position():
    """q at (r, c) against k at (r', c') depends on r - r' and c - c' alone."""
    q, k = torch.randn(2, 16, dtype=torch.float64)

    def score(query_at, key_at):
        rows, columns = torch.tensor([query_at[0], key_at[0]]), torch.tensor([query_at[1], key_at[1]])
        table = rotation_table(rotation_angles(16, rows, columns, 10000.0)).double()
        turned = rotate(torch.stack([q, k]).unsqueeze(1), table).squeeze(1)
        return turned[0] @ turned[1]

    torch.testing.assert_close(score((0, 0), (2, 5)), score((3, 1), (5, 6)), atol=1e-5, rtol=0)
    assert (score((0, 0), (2, 5)) - score((0, 0), (5, 2))).abs() > 1e-3


def test_rotation_keeps_the_length_of_every_pair():
    x = torch.randn(2, 6, 3, 16, dtype=torch.float64)
    table = rotation_table(rotation_angles(16, *grid_coordinates(2, 3), 100.0))
    turned = rotate(x, table.double())
    pairs = [values.unflatten(-1, (-1, 2)).norm(dim=-1) for values in (x, turned)]
    torch.testing.assert_close(*pairs, atol=1e-6, rtol=1e-6)  # the table is float32


def test_rotation_is_multiplication_by_complex_numbers():
    x = torch.randn(1, 6, 2, 16, dtype=torch.float64)
    rows, columns = grid_coordinates(2, 3)
    frequencies = [10000.0 ** (-k / 4) for k in range(4)]
    for n in range(6):
        turn = [rows[n] * f for f in frequencies] + [columns[n] * f for f in frequencies]
        pairs = torch.view_as_complex(x[0, n].unflatten(-1, (8, 2)).contiguous())
        expected = torch.view_as_real(pairs * torch.exp(1j * torch.stack(turn))).flatten(-2)
        table = rotation_table(rotation_angles(16, rows, columns, 10000.0)).double()
        torch.testing.assert_close(rotate(x, table)[0, n], expected, atol=1e-6, rtol=1e-5)


def test_fixed_positions_of_a_rectangle_are_their_equation_cell_by_cell():
    """The column in the first half of the width, the row in the second: H and W are never swapped."""
    table = sincos_2d(16, 2, 5).double().view(2, 5, 16)
    for row in range(2):
        for column in range(5):
            expected = []
            for position in (column, row):
                angles = [position * 10000.0 ** (-k / 4) for k in range(4)]
                expected += [*map(math.sin, angles), *map(math.cos, angles)]
            found = table[row, column]
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


def test_rms_norm_computes_in_float32_under_bfloat16():
    x = torch.randn(4, 64, dtype=torch.bfloat16) * 100
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(RMSNorm(64, affine=False)(x), exact.to(torch.bfloat16))
