"""Tensors of the reference implementations, committed under tests/golden."""

import json

import torch
from safetensors import safe_open

from ..conftest import GOLDEN


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 2e-5 of the largest expected value: ours and the reference add in another order."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


class Golden:
    """One file: `config`, and tensors by name."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
            self.config = json.loads(file.metadata()["config"])
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors whose name begins with `prefix`, without it."""
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}
