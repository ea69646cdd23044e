"""The Inception network of 2015-12-05, in torch-fidelity's graph, as ADM's evaluation suite reads it.

uint8 images -> bilinear resize to 299 x 299 as TensorFlow 1 did (no half-pixel centres, no antialias)
-> (x - 128) / 128 -> pool_3 (2048: FID, precision, recall), logits without their bias (1008: IS), and the
first 7 of 192 channels of mixed_6/conv after its ReLU, flattened in NHWC order (17 x 17 x 7 = 2023: sFID).

mixed_6/conv is `Mixed_6d.branch1x1` here; torch-fidelity's own `768` features are another layer's. The
weights are one published file, read only after its hash was found right, as plain tensors.
"""

import io
import urllib.error
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import runtime
from ..data.demo import sha256_of_file
from ..models.weights import read_file
from .features import Features, float32_island

SHA256_START = "6726825d"
WEIGHTS_NAME = f"weights-inception-2015-12-05-{SHA256_START}.pth"
URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS_NAME}"
SPATIAL_CHANNELS = 7
SPATIAL = SPATIAL_CHANNELS * 17 * 17


class InceptionFeatures:
    """FID's features, sFID's spatial ones, and the logits of the Inception Score."""

    name = "inception-2015-12-05"
    distance_name = "FID"
    num_features, num_spatial = 2048, SPATIAL
    metrics: tuple[str, ...] = ("fid", "sfid", "is", "pr")

    def __init__(
        self, device: torch.device, weights: Path | None = None, network: nn.Module | None = None
    ) -> None:
        """`weights` is the published file (downloaded once without one); or `network`, an `inception_graph`.

        Raises:
            ValueError: the file is not the published one.
            OSError: it cannot be downloaded.
        """
        self.class_names: list[str] = []  # its 1008 logits are not in ImageNet's order
        if network is None:
            path = weights or download_weights()
            self.sha256 = check_weights(path)
            network = inception_graph()
            network.load_state_dict(read_file(path), strict=True)
        else:
            self.sha256 = "none: not the published weights"
        self._device = device
        graph: Any = network.to(device).eval().requires_grad_(False)
        self._network = graph
        self._spatial: Tensor | None = None
        graph.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def _keep_spatial(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._spatial = rearrange(output[:, :SPATIAL_CHANNELS], "b c h w -> b (h w c)")

    def __call__(self, images: Tensor) -> Features:
        """uint8 (B, H, W, 3) of any size -> pool (B, 2048), logits (B, 1008), spatial (B, 2023)."""
        with float32_island(self._device):
            pool, logits = self._network(rearrange(images.to(self._device), "b h w c -> b c h w"))
        return Features(pool, logits, self._spatial)


def inception_graph() -> nn.Module:
    """torch-fidelity's network with random weights; its constructor would unpickle a file unchecked."""
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit its torch
        raise ValueError(
            f"the Inception network needs torch-fidelity and a fitting torchvision ({error}); "
            "install them with: pip install 'sitvit[eval]'"
        ) from None

    class Graph(FeatureExtractorInceptionV3):  # type: ignore[misc]
        def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True) -> object:
            return super().load_state_dict(state_dict, strict) if state_dict else None

    nothing = io.BytesIO()
    torch.save({}, nothing)
    nothing.seek(0)
    return Graph("inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=nothing)


def check_weights(path: Path) -> str:
    """The file's SHA-256; ValueError where it is not the published file's."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --inception-weights takes {WEIGHTS_NAME} ({URL})")
    found = sha256_of_file(path)
    if not found.startswith(SHA256_START):
        raise ValueError(
            f"{path} is not the Inception network of 2015-12-05: its sha256 begins {found[:8]}, not "
            f"{SHA256_START}. It is damaged or another file; get it from {URL}"
        )
    return found


def download_weights() -> Path:
    """The published file in torch's hub folder, where torch-fidelity keeps it too; fetched if not there."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS_NAME
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        runtime.say(f"fetching {URL} (92 MB) to {path}")
        torch.hub.download_url_to_file(URL, str(path), hash_prefix=SHA256_START, progress=False)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise OSError(
            f"cannot download the Inception weights ({getattr(error, 'reason', error)}); fetch {URL} "
            "elsewhere and give the file to --inception-weights, or choose other --features"
        ) from None
    except RuntimeError as error:  # the hash is wrong; nothing was kept
        raise ValueError(f"what {URL} sent is not the published file ({error})") from None
    return path
