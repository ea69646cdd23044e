"""Checkpoints: self-describing folders, written whole or not at all, loaded without running code.

RUN/checkpoints/step_0000100/
    model/  ema_0.9999/      config.json and safetensors each, as diffusers' from_pretrained reads
    optimizer.safetensors    AdamW's moments by parameter name
    config.yaml              the resolved experiment file
    checkpoint.json          step, label names, autoencoder, latents, versions, and the size and
                             SHA-256 of every other file; written last

A save that fails or is killed leaves a hidden `.step_*.partial` folder at most, which the next save removes;
a deletion first takes the folder's name away. So whatever is called step_N was once whole, and what was
damaged since (a power cut, a disk) is told by its sizes and hashes, passed over, and kept.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import runtime
from ..data.autoencoder import AutoencoderIdentity
from ..data.demo import sha256_of_file
from ..models.convert import check_recorded, load_model
from ..models.dit import DiT
from ..models.sit import SiT

FORMAT = 1
RECORD = "checkpoint.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
_STEP_FOLDER = re.compile(r"step_(\d+)")


class Damaged(ValueError):
    """A checkpoint folder that is not, or no longer, whole."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and its record."""

    folder: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.record["step"]

    @property
    def class_names(self) -> list[str]:
        """The label map: name of each class."""
        return self.record["class_names"]

    @property
    def autoencoder(self) -> AutoencoderIdentity:
        """The autoencoder that made the latents."""
        return AutoencoderIdentity(**self.record["autoencoder"])

    @property
    def networks(self) -> list[str]:
        """The sets of weights in here: "model", each "ema_DECAY" and "power_WIDTH"."""
        return sorted(Path(name).parent.as_posix() for name in self.record["files"] if WEIGHTS in name)

    def weights_name(self, wanted: str) -> str:
        """`wanted` is "model", "ema" (the only average) or a full name; ValueError if not there."""
        averages = [name for name in self.networks if name != "model"]
        if wanted == "ema" and len(averages) == 1:
            return averages[0]
        if wanted == "ema" and averages:
            raise ValueError(
                f"{self.folder} has several averages; say which weights: {', '.join(self.networks)}"
            )
        if wanted not in self.networks:
            raise ValueError(
                f"{self.folder} has no weights called {wanted!r}; it has {', '.join(self.networks)}"
            )
        return wanted

    def weights_sha256(self, name: str) -> str:
        """Hash of a set of weights: what a sample's record names."""
        return self.record["files"][f"{name}/{WEIGHTS}"]["sha256"]

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Read a safetensors file after checking its hash; ValueError where it is damaged."""
        path = self.folder / file
        if sha256_of_file(path) != self.record["files"][file]["sha256"]:
            raise Damaged(f"{path} is damaged: its content is not what was saved")
        return load_file(path)

    def load_network(self, name: str) -> SiT | DiT:
        """The network with the weights `name` ("model", "ema_0.9999"), in evaluation mode."""
        config = SiT.load_config(str(self.folder / name))
        model = (DiT if config["_class_name"] == "DiT" else SiT).from_config(config)
        model.load_state_dict(self.tensors(f"{name}/{WEIGHTS}"), strict=True)
        return model.eval()


def save_checkpoint(
    checkpoints: Path,
    step: int,
    model: SiT | DiT,
    networks: dict[str, dict[str, Tensor]],
    optimizer: dict[str, Tensor] | None,
    config_text: str,
    details: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step`; `networks` maps names to states, `details` enters the record.

    `model` is asked for its configuration alone; without `optimizer` none is in it.

    Raises:
        OSError: the disk is full or cannot be written; what was there before is as it was.
    """
    _delete(_leftovers(checkpoints))  # of a killed save: they may hold the space that this one needs
    folder = checkpoints / f"step_{step:07d}"
    if folder.exists():  # only a damaged one can be in the way: resuming would have used it
        folder.rename(_unused_name(folder.with_name(folder.name + ".damaged")))
    with runtime.write_aside(folder) as temporary:
        for name, state in networks.items():
            model.save_config(temporary / name)
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
            save_file(tensors, temporary / name / WEIGHTS, metadata={"format": "pt"})
        if optimizer is not None:
            save_file(optimizer, temporary / "optimizer.safetensors")
        (temporary / "config.yaml").write_text(config_text, "utf-8")
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        record = {
            "format": FORMAT,
            "step": step,
            **details,
            "versions": runtime.versions(),
            "files": {
                path.relative_to(temporary).as_posix(): {
                    "bytes": path.stat().st_size,
                    "sha256": sha256_of_file(path),
                }
                for path in files
            },
        }
        runtime.write_json(temporary / RECORD, record)
    return folder


def _unused_name(path: Path) -> Path:
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def open_checkpoint(folder: Path, verify: bool = False) -> Checkpoint:
    """A checkpoint folder whose files are all there in full size; ValueError naming what is not.

    With `verify` their content is compared with its hash too, which reads it all.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {folder}")
    if not (folder / RECORD).is_file():
        raise Damaged(f"{folder} is not a complete checkpoint: it has no {RECORD}")
    record = _read_record(folder)
    for name, entry in record["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != entry["bytes"]:
            raise Damaged(f"{path} is damaged: {found} bytes, expected {entry['bytes']}")
        if verify and sha256_of_file(path) != entry["sha256"]:
            raise Damaged(f"{path} is damaged: its content is not what was saved")
    return Checkpoint(folder, record)


def _read_record(folder: Path) -> dict[str, Any]:
    """The record; a whole one of another format is not damage, and not to be passed over in silence."""
    try:
        record = runtime.read_record(folder / RECORD, ["format"])
        if record["format"] == FORMAT:
            return runtime.read_record(folder / RECORD, ["step", "class_names", "autoencoder", "files"])
    except ValueError as error:
        raise Damaged(str(error)) from None
    raise ValueError(f"{folder} has checkpoint format {record['format']}, this version reads {FORMAT}")


def step_folders(run: Path) -> list[Path]:
    """The checkpoint folders of a run, newest step first, complete or not."""
    found = (run / "checkpoints").glob("step_*")
    folders = [path for path in found if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=_step_of, reverse=True)


def latest_checkpoint(run: Path, verify: bool = False) -> Checkpoint | None:
    """The newest whole checkpoint of a run; damaged ones are passed over with a notice."""
    for folder in step_folders(run):
        try:
            return open_checkpoint(folder, verify)
        except Damaged as error:
            runtime.say(f"passed over a checkpoint: {error}")
    return None


def find_checkpoint(where: str | None) -> Checkpoint:
    """The checkpoint folder `where`, the newest of the run `where`, or of the newest run in runs/.

    Raises:
        ValueError: nothing complete there, naming what was looked for.
    """
    if where is None:
        folders = [path.parent for path in Path("runs").glob(f"**/checkpoints/step_*/{RECORD}")]
        if not folders:
            raise ValueError(
                "there is no checkpoint under runs/ yet; train one with scripts/train_sit.py, or name "
                "one with --checkpoint"
            )
        newest = max(folders, key=lambda path: (path / RECORD).stat().st_mtime)
        where = str(newest.parent.parent)
    path = Path(where)
    if (path / "checkpoints").is_dir():
        checkpoint = latest_checkpoint(path)
        if checkpoint is None:
            raise ValueError(f"{path} has no complete checkpoint")
        return checkpoint
    if path.is_dir() and not (path / RECORD).is_file():
        raise ValueError(f"{path} is neither a run nor a checkpoint: it has no checkpoints/ or {RECORD}")
    return open_checkpoint(path)


def load_checkpoint(
    path: str | Path,
    weights: str | None = None,
    family: str | None = None,
    num_heads: int | None = None,
    input_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
) -> Any:
    """A network from a run, a checkpoint folder, a model folder, or an official SiT, DiT, ViT-5 or ViT file.

    Says which weights were taken. `weights` is "ema", "model", of a run also a full name ("ema_0.999"), or
    None for the average where there is one; for the other arguments, which only foreign files need, see
    `sitvit.models.convert.load_model`.

    Raises:
        ValueError: nothing loadable there, unsafe, damaged, or not fitting, naming file and keys; or an
            argument that contradicts what is recorded there.
    """
    where = Path(path)
    if (where / "checkpoints").is_dir() or (where / RECORD).is_file():
        checkpoint = find_checkpoint(str(where))
        name = checkpoint.weights_name(weights or "ema")
        network = checkpoint.load_network(name)
        check_recorded(network, checkpoint.folder, family, num_heads, input_size, num_classes)
        runtime.say(f"{checkpoint.folder}: {name}")
        return network
    model, which = load_model(where, weights, family, num_heads, input_size, num_classes)
    runtime.say(f"{where}: {type(model).__name__} with {which}")
    return model


def prune_checkpoints(run: Path, keep: int, keep_every: int | None = None) -> None:
    """Delete the whole checkpoints but the newest `keep` and those at a multiple of `keep_every` steps.

    A damaged one is left for its owner to look at, and does not count.
    """
    whole = [folder for folder in step_folders(run) if _is_whole(folder)]
    old = [folder for folder in whole[keep:] if not keep_every or _step_of(folder) % keep_every]
    _delete([*old, *_leftovers(run / "checkpoints")])


def _leftovers(checkpoints: Path) -> list[Path]:
    """What killed saves and deletions left behind."""
    return list(checkpoints.glob(".step_*.partial"))


def _delete(folders: list[Path]) -> None:
    for folder in folders:
        hidden = folder
        if not folder.name.startswith("."):  # a deletion that is killed half-way leaves no half checkpoint
            hidden = folder.rename(folder.with_name(f".{folder.name}.deleted.partial"))
        shutil.rmtree(hidden)


def _step_of(folder: Path) -> int:
    match = _STEP_FOLDER.fullmatch(folder.name)
    assert match
    return int(match[1])


def _is_whole(folder: Path) -> bool:
    try:
        open_checkpoint(folder)
    except ValueError:
        return False
    return True
