"""Images that are encoded as training needs them: a `Latents` without a cache.

Threads read and crop the images that the next step will ask for, while the network computes this one; the
autoencoder runs on the training device. The moments equal the cached ones up to the cache's float16 and
the rounding of another batch shape.
"""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from .autoencoder import Autoencoder, images_to_pixels
from .encode import CROP
from .images import center_crop
from .sources import open_images, source_name


class UnreadableImage(ValueError):
    """An image that training came to cannot be read; nothing else is wrong with the run."""


class LiveLatents:
    """The images at `images`, cropped to `image_size` and encoded by `autoencoder` on `device`.

    Raises:
        ValueError: no such images or autoencoder, or a size that does not fit.
        UnreadableImage: in `moments`, an image that cannot be read.
    """

    def __init__(
        self, images: str, autoencoder: str, image_size: int, device: torch.device | str, num_readers: int = 4
    ) -> None:
        self._arguments = (images, autoencoder, image_size, device, num_readers)
        self.source = open_images(images)
        self.encoder = Autoencoder(autoencoder, device)
        self.where = self.images = source_name(images)
        self.images_fingerprint = self.source.fingerprint()
        self.class_names, self.labels = self.source.class_names, self.source.labels
        self.image_size, self.autoencoder, self.has_flip = image_size, self.encoder.identity, True
        size = self.encoder.latent_size(image_size)
        self.latent_shape = (self.autoencoder.latent_channels, size, size)
        self._num_readers, self._process = num_readers, 0
        self._coming: dict[int, Future[np.ndarray]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return LiveLatents, self._arguments

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def fingerprint(self) -> str:
        """Names the content: images, crop, size and autoencoder."""
        about = (self.images_fingerprint, CROP, self.image_size, self.autoencoder.sha256)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def expect(self, ids: np.ndarray) -> None:
        """Begin to read the images `ids` (n,)."""
        wanted = {int(i) for i in ids}
        self._coming = {i: self._begun(i) for i in wanted}

    def moments(self, ids: np.ndarray, flips: np.ndarray) -> Tensor:
        """Moments (n, 2C or C, h, w) on the device, of the images `ids` (n,), mirrored where `flips` (n,)."""
        reading = [self._begun(int(i)) for i in ids]
        pixels = images_to_pixels(torch.from_numpy(np.stack([future.result() for future in reading])))
        mirrored = torch.from_numpy(flips).view(-1, 1, 1, 1)
        return self.encoder.encode(torch.where(mirrored, pixels.flip(-1), pixels))

    def _begun(self, index: int) -> Future[np.ndarray]:
        """The reading of an image; a forked process has threads of its own, since none survive a fork."""
        if self._process != os.getpid():
            self._process, self._coming = os.getpid(), {}
            self._readers = ThreadPoolExecutor(self._num_readers, thread_name_prefix="images")
        return self._coming.get(index) or self._readers.submit(self._read, index)

    def _read(self, index: int) -> np.ndarray:
        try:
            return center_crop(self.source.read(index), self.image_size)
        except ValueError as error:
            raise UnreadableImage(
                f"{error}; repair it (scripts/encode_latents.py --check lists all such files), then continue "
                "with --accept-changes"
            ) from None
