"""Two fused functions for eager training: RMSNorm + modulate, and QK-norm + rotation.

PyTorch runs RMSNorm and rotary embeddings as chains of small kernels and keeps each intermediate for
the backward pass. These compute the same values (tests prove value and gradient) with the derivative
written out; `torch.compile` fuses the plain code by itself, so they step aside there.

    n = x r,  r = (mean(x^2) + eps)^(-1/2)       dx = r (g - n mean(g n))  for g = dL/dn

They have a first derivative in reverse mode only; `plain()` switches to code that has others too (attention
has them in SDPA's MATH backend alone).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_plain = False


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Within the block, code that forward mode, `torch.func` and second derivatives can go through."""
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def is_plain() -> bool:
    """Whether the plain code is to be used here: asked for, or traced by a compiler."""
    return _plain or torch.compiler.is_compiling()


def wide(x: Tensor) -> Tensor:
    """`x` in float32, or in float64 where it has that: what norms and rotations compute in."""
    return x if x.dtype == torch.float64 else x.float()


def rms_modulate(x: Tensor, shift: Tensor, factor: Tensor, eps: float) -> Tensor:
    """x / rms(x) * factor + shift for x (B, N, D) and shift, factor (B, D); float32 inside, shift's type."""
    return _RmsModulate.apply(x, shift, factor, eps)  # type: ignore[no-untyped-call]


def norm_rotate(x: Tensor, weight: Tensor, table: Tensor, eps: float) -> Tensor:
    """RMSNorm with `weight` (d,), then rotation, of x (B, N, heads, d) by `table` (2, N, d)."""
    return _NormRotate.apply(x, weight, table, eps)  # type: ignore[no-untyped-call]


class _RmsModulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, factor: Tensor, eps: float) -> Tensor:
        values = wide(x)
        r = _inverse_rms(values, eps)
        ctx.dtypes = x.dtype, shift.dtype, factor.dtype
        n, factor = values * r, wide(factor).unsqueeze(1)
        ctx.save_for_backward(n.to(shift.dtype), r, factor)
        return torch.addcmul(wide(shift).unsqueeze(1), n, factor).to(shift.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        n, r, factor = ctx.saved_tensors
        grad, n = wide(grad), wide(n)
        both = grad * n
        along = both @ (factor / n.shape[-1]).transpose(1, 2)  # mean(g n) with g = grad * factor
        grad_x = (grad * factor).addcmul_(n, along, value=-1).mul_(r).to(ctx.dtypes[0])
        return grad_x, grad.sum(dim=1).to(ctx.dtypes[1]), both.sum(dim=1).to(ctx.dtypes[2]), None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, table: Tensor, eps: float) -> Tensor:
        values = wide(x)
        r = _inverse_rms(values, eps)
        ctx.save_for_backward(x, r, weight, table)
        scaled = (values * r).mul_(wide(weight))
        return _turn(scaled, _complex(table)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, r, weight, table = ctx.saved_tensors
        n, wide_weight = wide(x) * r, wide(weight)
        turned_back = _turn(wide(grad).contiguous(), _complex(table).conj())
        both = turned_back * n
        along = (both @ (wide_weight / x.shape[-1])).unsqueeze(-1)  # mean(g n), g = turned_back * weight
        grad_x = turned_back.mul_(wide_weight).addcmul_(n, along, value=-1).mul_(r).to(x.dtype)
        return grad_x, both.flatten(0, -2).sum(dim=0).to(weight.dtype), None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _complex(table: Tensor) -> Tensor:
    """A table (2, N, d) of cosines and sines as unit complex numbers, one for each pair: (N, 1, d / 2)."""
    cos, sin = table[:, :, ::2]
    return torch.complex(cos, sin).unsqueeze(1)


def _turn(x: Tensor, table: Tensor) -> Tensor:
    """Multiply the pairs of x (..., d), seen as complex numbers, by `table`."""
    return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * table).flatten(
        -2
    )
