"""Weights, averages and moments cut over the processes (FSDP2), for networks that fill a device.

Each of N processes holds 1/N of every tensor, and gathers a block's weights only while the block is computed
(ZeRO stage 3, arXiv 1910.02054). The launcher asks for it (configs/accelerate/fsdp2.yaml), not the
experiment: it changes no arithmetic but the order of sums. What leaves the devices is whole, so a checkpoint
of a sharded run is any run's, and is continued by any number of processes, sharded or not.

Difference from accelerate's own FSDP2: weights are gathered in float32 and cast by autocast, as without
sharding. A policy that casts whole blocks would cast the times and the float32 islands, too.
"""

import warnings

from torch import Tensor, nn

from ..models.dit import DiT
from ..models.sit import SiT


def shard(model: SiT | DiT) -> None:
    """Cut the parameters of `model` over all processes, in place; block by block, then the rest.

    Raises:
        ValueError: this torch has no FSDP2.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise ValueError("sharded weights (FSDP2) need torch 2.6 or later") from None
    # What comes out of the network is a view of its last layer's output, which no loss writes into.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    name = type(model).__name__
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    type(model).__name__ = name  # what is saved names the network, and not torch's class around it


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` cut it."""
    return any(_is_cut(parameter) for parameter in model.parameters())


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with what is cut gathered to the CPU; all processes call it together.

    What is not cut is handed on as it is, not copied.
    """
    return {
        name: tensor.detach().full_tensor().cpu() if _is_cut(tensor) else tensor  # type: ignore[attr-defined]
        for name, tensor in tensors.items()
    }


def cut_as(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `whole`: `tensors`, named as parameters of `model`, cut as those are."""
    parameters = dict(model.named_parameters())
    return {
        name: cut(tensor, parameters[name]) if name in parameters else tensor
        for name, tensor in tensors.items()
    }


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's share of a whole `tensor`, cut as `like` of the same shape; itself where that is not."""
    if not _is_cut(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)  # nothing is sent


def _is_cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
