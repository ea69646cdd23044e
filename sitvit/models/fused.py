"""Two fused functions for eager training: RMSNorm + modulate, and QK-norm + rotation of all heads.

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
from torch import Tensor, nn
from torch.autograd import Variable

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


def linear_after_norm(linear: nn.Module, x: Tensor) -> Tensor:
    """linear(x); an `x` from `rms_modulate` is not kept for backward but made again there.

    Of a block's nineteen (B, N, D) that are two, for two multiply-adds a value.
    """
    node: Any = x.grad_fn if not is_plain() else None
    if not getattr(node, "can_remake", False) or not x.is_contiguous():
        return linear(x)
    whole = x.data_ptr(), x.numel(), x.dtype, x._version

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        # Whatever stands in for the Linear (LoRA, a hook) may turn x over or change it in place.
        seen = tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version
        return tensor.shape if seen == whole and tensor.is_contiguous() else tensor

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else _RmsModulate.remake(node).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return linear(x)


def norm_rotate_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `qkv` (B, N, 3, heads, d): queries and keys after RMSNorm with their weights (d,) and rotation by
    `table` (2, N, d / 2), and the values as they are; (B, N, heads, d) each."""
    return _NormRotateHeads.apply(qkv, q_weight, k_weight, table, eps)  # type: ignore[no-untyped-call]


def _refuse_a_second_derivative() -> None:
    """For the head of a backward, which runs with gradients on where it is to be differentiated in turn.

    PyTorch's `once_differentiable` puts an error into the graph, and autograd.grad with `inputs` goes by it.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the fused norms have no second derivative; call the network, and "
            "backward, within sitvit.models.fused.plain()"
        )


class _RmsModulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, factor: Tensor, eps: float) -> Tensor:
        values = wide(x)
        r = _inverse_rms(values, eps)
        ctx.dtypes = x.dtype, shift.dtype, factor.dtype
        n, factor = values * r, wide(factor).unsqueeze(1)
        shift = shift.unsqueeze(1)
        if not any(ctx.needs_input_grad):  # n is not kept: the result takes its place
            return torch.addcmul(wide(shift), n, factor, out=n).to(shift.dtype)
        ctx.save_for_backward(n.to(shift.dtype), r, factor, shift)
        ctx.can_remake = n.dtype == shift.dtype  # else n was rounded, and the result would be another one
        return torch.addcmul(wide(shift), n, factor).to(shift.dtype)

    @staticmethod
    def remake(ctx: Any) -> Tensor:
        """The output once more, bit for bit, from what is kept for backward."""
        unpacked = ctx.__dict__.get("unpacked")
        if unpacked is None:
            unpacked = ctx.saved_tensors
            # Gradient checkpointing gives them once a pass. Kept for longer, they would be held until the
            # graph ends, and a change of them in between would go unseen.
            with contextlib.suppress(RuntimeError):  # not within a backward pass
                Variable._execution_engine.queue_callback(lambda: ctx.__dict__.pop("unpacked", None))
                ctx.unpacked = unpacked
        n, _, factor, shift = unpacked
        return torch.addcmul(shift, n, factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_a_second_derivative()
        n, r, factor, _ = ctx.__dict__.pop("unpacked", None) or ctx.saved_tensors
        grad, n = wide(grad), wide(n)
        both = grad * n
        along = both @ (factor / n.shape[-1]).transpose(1, 2)  # mean(g n) with g = grad * factor
        grad_shift, grad_factor = grad.sum(dim=1), both.sum(dim=1)
        grad_x = torch.mul(grad, factor, out=both).addcmul_(n, along, value=-1).mul_(r)
        return grad_x.to(ctx.dtypes[0]), grad_shift.to(ctx.dtypes[1]), grad_factor.to(ctx.dtypes[2]), None


class _NormRotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        both = wide(qkv[:, :, :2])
        r = _inverse_rms(both, eps)
        turn = torch.complex(*table).unsqueeze(1)  # (N, 1, d / 2)
        ctx.save_for_backward(qkv, r, q_weight, k_weight, turn)
        weight = torch.stack([wide(q_weight), wide(k_weight)]).unsqueeze(1)  # (2, 1, d)
        both = (both * r).mul_(weight)
        _pairs(both).mul_(turn.unsqueeze(1))
        q, k = both.to(qkv.dtype).unbind(2)
        return q, k, qkv[:, :, 2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_a_second_derivative()
        qkv, r, q_weight, k_weight, turn = ctx.saved_tensors
        grad_qkv, grad_weights = torch.empty_like(qkv), []
        grad_qkv[:, :, 2] = grads[2]
        for part, weight in enumerate((q_weight, k_weight)):
            x, r_x, wide_weight = wide(qkv[:, :, part]), r[:, :, part], wide(weight)
            g = torch.view_as_real(_pairs(wide(grads[part])) * turn.conj()).flatten(-2)  # turned back
            g_x = g * x
            grad_weights.append((r_x.flatten() @ g_x.flatten(0, -2)).to(weight.dtype))
            along = (g_x @ (wide_weight / g.shape[-1])).unsqueeze(-1).mul_(r_x)  # mean(g weight n)
            g.mul_(wide_weight).addcmul_(x, along.mul_(r_x), value=-1)
            torch.mul(g, r_x, out=grad_qkv[:, :, part])
        return grad_qkv, *grad_weights, None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _pairs(x: Tensor) -> Tensor:
    """The pairs of x (..., d) seen as complex numbers (..., d / 2); of a copy where it lies otherwise."""
    if x.stride(-1) != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:-1]):
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
