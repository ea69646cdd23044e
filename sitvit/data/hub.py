"""Images of the Hugging Face hub, or of a folder that `datasets` saved (`save_to_disk`).

The package `datasets` is an extra (`pip install sitvit[hub]`). The image column is the one of type Image
(else called image or img), the label column that of type ClassLabel (else called label, labels, fine_label
or class).
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import check_labels
from .images import decode_image
from .sources import class_order

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class")


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    )


class HubImages:
    """A split with images and labels: `hub:NAME`, `hub:NAME:SPLIT`, FOLDER (of several splits, `train`).

    Raises:
        ValueError: `datasets` is not installed, the hub cannot be reached, or there are no such columns.
    """

    def __init__(self, where: str) -> None:
        self.where, self.notices = where, []
        data = _load(where)
        if hasattr(data, "keys"):
            split = "train" if "train" in data else next(iter(data))
            self.notices.append(f"{where} has splits {', '.join(data)}; taken is {split}")
            data = data[split]
        image = _column(where, data.features, "Image", IMAGE_COLUMNS)
        label = _column(where, data.features, "ClassLabel", LABEL_COLUMNS)
        self.labels, self.class_names = _labels(where, data, label)
        self._fingerprint = hashlib.sha256(f"{data._fingerprint} {len(data)}".encode()).hexdigest()
        self._images, self._column = _undecoded(data.select_columns([image]), image), image

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Where image `index` comes from, for messages."""
        return f"{self.where}[{index}]"

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        entry = self._images[index][self._column]
        if entry.get("bytes") is not None:
            return decode_image(io.BytesIO(entry["bytes"]), self.name(index))
        try:
            with open(entry["path"], "rb") as file:
                return decode_image(file, f"{self.name(index)} ({entry['path']})")
        except OSError as error:
            raise ValueError(f"{self.name(index)} cannot be read ({error})") from None

    def fingerprint(self) -> str:
        """Changes with the data set, as `datasets` sees it."""
        return self._fingerprint


def _load(where: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{where} needs the package datasets, which is not installed: pip install 'sitvit[hub]'"
        ) from None
    try:
        if not where.startswith("hub:"):
            return datasets.load_from_disk(where)
        name, _, split = where.removeprefix("hub:").partition(":")
        return datasets.load_dataset(name, split=split or None)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"cannot open the data set {where} ({reason}); without a network, save it elsewhere with "
            "save_to_disk and give that folder"
        ) from None


def _column(where: str, features: Any, kind: str, names: tuple[str, ...]) -> str:
    found = [name for name, feature in features.items() if type(feature).__name__ == kind]
    found += [name for name in names if name in features]
    if not found:
        raise ValueError(f"{where} has no {kind} column; its columns are {', '.join(features)}")
    return found[0]


def _labels(where: str, data: Any, column: str) -> tuple[np.ndarray, list[str]]:
    """Labels (N,) and class names: of a ClassLabel its own; numbers as they are; text in class order."""
    values = np.asarray(data.select_columns([column])[column])
    names = getattr(data.features[column], "names", None)
    if values.dtype.kind in "UO" and all(isinstance(value, str) for value in values.tolist()):
        names = class_order(values.tolist())
        label_of = {name: label for label, name in enumerate(names)}
        values = np.array([label_of[value] for value in values.tolist()])
    if values.dtype.kind not in "iu" or not len(values) or values.min() < 0:
        raise ValueError(f"{where}: column {column} must hold a label from 0, or text, for every image")
    check_labels(f"{where}: column {column}", values)
    return values.astype(np.int64), list(names or map(str, range(int(values.max()) + 1)))


def _undecoded(data: Any, column: str) -> Any:
    """The images as the bytes of their files, for our own reading rule."""
    import datasets

    return data.cast_column(column, datasets.Image(decode=False))
