"""DINOv2 (arXiv 2304.07193) as FD-DINOv2 has it in EDM2 and dgm-eval (arXiv 2306.04675).

uint8 images -> bicubic resize with antialias to 224 x 224 -> ImageNet's mean and deviation -> ViT-L/14
-> the final-normed class token (1024).

The network is our ViT with LayerScale. Its position table was learned at 37 x 37 patches; at 16 x 16 it is
interpolated bicubically with the scale (16 + 0.1) / 37, as the released code does.
"""

import re
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from ..data.demo import sha256_of_file
from ..models.vit5 import ViT5
from ..models.weights import read_file
from .features import Features, float32_island

URL = "https://dl.fbaipublicfiles.com/dinov2/dinov2_vitl14/dinov2_vitl14_pretrain.pth"
IMAGE_SIZE, PATCH_SIZE, HEAD_DIM = 224, 14, 64
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OFFSET = 0.1
"""What the released code adds to the number of patches before it scales the positions."""


class DinoFeatures:
    """Class tokens of a DINOv2 network of any size without registers; its weights give the size."""

    num_spatial = 0
    metrics: tuple[str, ...] = ("fid",)

    def __init__(self, device: torch.device, weights: Path | None) -> None:
        """Raises: ValueError: no weights, or a file that is no DINOv2 network."""
        if weights is None:
            raise ValueError(f"the DINOv2 weights are not there; fetch {URL} and give it to --dinov2-weights")
        network: Any = load_dinov2(weights)
        self._network = network.to(device)
        self._device = device
        self.class_names: list[str] = []
        self.num_features = network.config.embed_dim
        self.name = f"dinov2-{self.num_features}"
        self.distance_name = "FD-DINOv2"
        self.sha256 = sha256_of_file(weights)

    def __call__(self, images: Tensor) -> Features:
        """uint8 (B, H, W, 3) of any size -> class tokens (B, D)."""
        with float32_island(self._device):
            pixels = rearrange(images.to(self._device).float(), "b h w c -> b c h w")
            pixels = F.interpolate(pixels, (IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", antialias=True)
            mean, deviation = (
                torch.tensor(values, device=self._device).view(3, 1, 1) for values in (MEAN, DEVIATION)
            )
            return Features(self._network((pixels / 255 - mean) / deviation))


def load_dinov2(path: Path) -> ViT5:
    """The network of a released file (`cls_token`, `pos_embed`, `blocks.*`, `norm.*`), in evaluation mode.

    Raises:
        ValueError: the file is damaged, or of another network.
    """
    state = read_file(path)
    needed = {"cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.ls1.gamma"}
    if not isinstance(state, dict) or not needed <= set(state) or "register_tokens" in state:
        raise ValueError(f"{path} is no DINOv2 network without registers; get {URL}")
    width = state["cls_token"].shape[-1]
    depth = 1 + max(int(match[1]) for key in state if (match := re.match(r"blocks\.(\d+)\.", key)))
    network = ViT5(
        img_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        embed_dim=width,
        depth=depth,
        num_heads=width // HEAD_DIM,
        num_classes=0,
        num_registers=0,
        qkv_bias=True,
        rope=False,
        qk_norm=False,
        layer_scale_init=1.0,
        norm_layer="layernorm",
        class_position=True,
    )
    renamed = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key): value for key, value in state.items()}
    del renamed["mask_token"]  # of its training alone
    renamed["pos_embed"] = resample_positions(renamed["pos_embed"], IMAGE_SIZE // PATCH_SIZE)
    try:
        network.load_state_dict(renamed, strict=True)
    except RuntimeError as error:
        raise ValueError(
            f"{path} is another network than DINOv2: {str(error).splitlines()[-1].strip()}"
        ) from None
    return network.eval().requires_grad_(False)


def resample_positions(table: Tensor, side: int) -> Tensor:
    """A table (1, 1 + N^2, D), whose first row is the class token's, at side x side patches."""
    first, patches = table[:, :1], table[:, 1:]
    learned = round(patches.shape[1] ** 0.5)
    if learned == side:
        return table
    maps = rearrange(patches, "one (h w) d -> one d h w", h=learned)
    maps = F.interpolate(maps, scale_factor=(side + OFFSET) / learned, mode="bicubic")
    return torch.cat([first, rearrange(maps, "one d h w -> one (h w) d")], dim=1)
