"""SiT's transport on a closed-form network in float64, committed under tests/golden."""

import json
from typing import Any

import torch
from safetensors import safe_open

from ..conftest import GOLDEN


class Transport:
    """Golden tensors by name, their inputs, and the toy network of the file's metadata."""

    def __init__(self) -> None:
        with safe_open(GOLDEN / "sit_transport.safetensors", "pt") as file:
            metadata = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.intervals: dict[str, Any] = json.loads(metadata["intervals"])
        self.toy: dict[str, float] = json.loads(metadata["toy_model"])

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def under(self, prefix: str) -> list[str]:
        return [key for key in self.tensors if key.startswith(prefix)]

    def network(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """s tanh(a x + b t + c), elementwise."""
        t = t.view(-1, *[1] * (x.dim() - 1))
        return self.toy["s"] * torch.tanh(self.toy["a"] * x + self.toy["b"] * t + self.toy["c"])


TRANSPORT = Transport()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-10 of the largest expected value: both are float64, in another order of operations."""
    assert found.shape == expected.shape
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
