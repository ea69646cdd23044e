"""The image reader on damaged files: each ends in an image or in one sentence with the file's name."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

FORMATS = {
    "png": ("RGB", {}), "gray.png": ("L", {}), "alpha.png": ("RGBA", {}), "palette.png": ("P", {}),
    "jpg": ("RGB", {}), "progressive.jpg": ("RGB", {"progressive": True}), "cmyk.jpg": ("CMYK", {}),
    "webp": ("RGB", {}), "gif": ("P", {}), "bmp": ("RGB", {}), "tif": ("RGB", {"compression": "tiff_lzw"}),
    "raw.tif": ("I;16", {}),
}  # fmt: skip
PER_FORMAT = 50

READER = """
import json, resource, sys, time
from pathlib import Path
from sitvit.data.images import read_image
from PIL import Image
Image.init()
start = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (start + (1 << 30),) * 2)  # one more gigabyte and no more
outcomes = {"image": 0, "refused": 0, "wrong": [], "slowest": 0.0}
for path in sorted(Path(sys.argv[1]).iterdir()):
    begun = time.monotonic()
    try:
        image = read_image(path)
        good = image.ndim == 3 and image.shape[2] == 3 and image.dtype == "uint8"
        outcomes["image"] += good
    except ValueError as error:
        good = str(path) in str(error) and "\\n" not in str(error)
        outcomes["refused"] += good
    except BaseException as error:
        good = False
    if not good:
        outcomes["wrong"].append(path.name)
    outcomes["slowest"] = max(outcomes["slowest"], time.monotonic() - begun)
print(json.dumps(outcomes))
"""


def mutated(data, draw):
    """A few bytes changed, a part cut out or doubled, or the end lost."""
    data = bytearray(data)
    place, length = int(draw.integers(len(data))), int(draw.integers(1, 40))
    match int(draw.integers(5)):
        case 0:
            del data[place:]
        case 1:
            del data[place : place + length]
        case 2:
            data[place:place] = data[place : place + length]
        case 3:
            data[draw.integers(min(60, len(data)))] = int(draw.integers(256))  # the header
        case _:
            for _ in range(length):
                data[draw.integers(len(data))] = int(draw.integers(256))
    return bytes(data)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
def test_six_hundred_damaged_files_end_in_an_image_or_a_sentence_within_a_gigabyte(tmp_path):
    draw = np.random.default_rng(0)
    for suffix, (mode, options) in FORMATS.items():
        values = draw.integers(0, 256, (32, 48, 3), dtype=np.uint8)
        image = Image.fromarray(values).convert("I" if mode == "I;16" else mode)
        whole = io.BytesIO()
        kind = {"jpg": "jpeg", "tif": "tiff"}.get(suffix.rpartition(".")[2], suffix.rpartition(".")[2])
        (image.convert("I;16") if mode == "I;16" else image).save(whole, kind, **options)
        for number in range(PER_FORMAT):
            (tmp_path / f"{number:02}.{suffix}").write_bytes(mutated(whole.getvalue(), draw))
    done = subprocess.run(
        [sys.executable, "-c", READER, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes["wrong"] == []
    assert outcomes["image"] + outcomes["refused"] == PER_FORMAT * len(FORMATS) >= 500
    assert outcomes["refused"] > 100
    assert outcomes["slowest"] < 20  # seconds
