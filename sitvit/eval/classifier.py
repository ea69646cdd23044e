"""The small classifier that ships with sitvit: its features make FD-fashion, its answers an agreement.

Gray 32 x 32 pixels -> [conv 3x3, batch norm, ReLU, 2x2 max pool] per width -> linear to 64, ReLU (the
features, of mean variance 1 over the training images) -> a logit per class. It knows Fashion-MNIST alone;
on other images its distance is a rough sign of progress and no more.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .. import runtime
from ..config import ClassifierConfig
from ..data.autoencoder import images_to_pixels
from ..data.demo import ASSETS
from ..data.sources import open_images, read_all
from ..data.stream import TRAINING, generator
from ..train.optim import learning_rate

EMBEDDED_CLASSIFIER = ASSETS / "fashion-classifier"
IMAGE_SIZE = 32
FEATURE_DIM = 64
STATISTICS_IMAGES = 10_000
BATCH = 500


class SmallClassifier(nn.Module):
    """Pixels (B, 3, 32, 32) in [-1, 1] -> features (B, 64) and logits (B, classes)."""

    def __init__(self, widths: list[int], num_classes: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width_in, width in zip([1, *widths[:-1]], widths, strict=True):
            blocks += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width)]
            blocks += [nn.ReLU(), nn.MaxPool2d(2)]
        self.blocks = nn.Sequential(*blocks)
        side = IMAGE_SIZE >> len(widths)
        self.features = nn.Linear(widths[-1] * side * side, FEATURE_DIM)
        self.head = nn.Linear(FEATURE_DIM, num_classes)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        gray = pixels.mean(dim=1, keepdim=True)
        maps = rearrange(self.blocks(gray), "b c h w -> b (c h w)")
        features = F.relu(self.features(maps))
        return features, self.head(features)


def load_classifier(folder: Path) -> tuple[SmallClassifier, list[str]]:
    """A saved classifier in evaluation mode, and the names of its classes."""
    config = runtime.read_json(folder / "config.json")
    network = SmallClassifier(config["widths"], len(config["class_names"]))
    network.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return network.eval().requires_grad_(False), config["class_names"]


def train_classifier(config: ClassifierConfig) -> None:
    """Train a classifier of `config.images` and save it to `config.out` with its held-out accuracy.

    Raises:
        ValueError: no such images, other classes in `held_out`, or a folder that is there already.
    """
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"{out} is there already; choose another `out`, or delete it")
    start = time.monotonic()
    source, held_out = open_images(config.images), open_images(config.held_out)
    if source.class_names != held_out.class_names:
        raise ValueError(f"{config.held_out} has other classes than {config.images}")
    images = read_all(source, IMAGE_SIZE)
    network = _fit(images, source.labels, len(source.class_names), config)
    scale_features(network, images[:STATISTICS_IMAGES])
    correct = predict(network, read_all(held_out, IMAGE_SIZE)) == held_out.labels
    accuracy = float(correct.mean())
    with runtime.write_aside(out) as temporary:
        temporary.mkdir()
        save_file(network.state_dict(), temporary / "model.safetensors")
        record = {
            "widths": config.widths,
            "class_names": source.class_names,
            "images": config.images,
            "num_steps": config.num_steps,
            "held_out_images": config.held_out,
            "held_out_accuracy": round(accuracy, 4),
            "command": runtime.command_line(),
            "seconds": round(time.monotonic() - start, 1),
        }
        runtime.write_json(temporary / "config.json", record)
    runtime.say(f"{out}: {100 * accuracy:.2f} % right on {len(held_out):,} held-out images")


def _fit(
    images: np.ndarray, labels: np.ndarray, num_classes: int, config: ClassifierConfig
) -> SmallClassifier:
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        network = SmallClassifier(config.widths, num_classes)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.lr, weight_decay=1e-2, fused=True)
    with runtime.progress(config.num_steps, 0, "classifier", " steps") as bar:
        for step in range(config.num_steps):
            ids = generator(config.seed, TRAINING, step, 0).integers(len(images), size=config.batch_size)
            _, logits = network(images_to_pixels(torch.from_numpy(images[ids])))
            loss = F.cross_entropy(logits, torch.from_numpy(labels[ids]))
            if not math.isfinite(loss.item()):
                raise ValueError(f"the classifier's loss is not finite at step {step + 1}; lower lr")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config.lr, config.num_steps, decay_steps=config.num_steps)
            optimizer.step()
            bar.update()
    return network.eval()


@torch.no_grad()
def scale_features(network: SmallClassifier, images: np.ndarray) -> None:
    """Bring the features' mean variance over `images` to 1; the logits stay as they were.

    ReLU(s x) = s ReLU(x) for s > 0, so the factor goes into the linear layers around it.
    """
    batches = np.split(images, range(BATCH, len(images), BATCH))
    features = [network(images_to_pixels(torch.from_numpy(batch)))[0] for batch in batches]
    scale = 1 / torch.cat(features).double().var(dim=0).mean().sqrt().item()
    network.features.weight.mul_(scale)
    network.features.bias.mul_(scale)
    network.head.weight.div_(scale)


@torch.no_grad()
def predict(network: SmallClassifier, images: np.ndarray) -> np.ndarray:
    """The likeliest class of each image (N, 32, 32, 3), int64 (N,)."""
    batches = np.split(images, range(BATCH, len(images), BATCH))
    logits = [network(images_to_pixels(torch.from_numpy(batch)))[1] for batch in batches]
    return torch.cat(logits).argmax(dim=1).numpy()
