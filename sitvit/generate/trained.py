"""A trained network with all that its images follow from, from wherever it lies.

a run, or its step          its checkpoint.json says it all
a pipeline's folder         ours (`SiTPipeline`) or diffusers' DiT: model_index.json and vae/
a model folder, a file      the network alone: the autoencoder has to be named, and a SiT is taken for
                            what the official ones are, a velocity on the linear path
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import runtime
from ..data.autoencoder import Autoencoder, AutoencoderIdentity, sha256_of_weights
from ..flow.ddpm_samplers import over_time
from ..flow.guidance import ConditionalVelocity
from ..flow.paths import Path as FlowPath
from ..flow.paths import find_path
from ..flow.samplers import Sampler
from ..models.convert import load_model
from ..models.dit import DiT
from ..models.sit import SiT
from ..train.checkpoint import RECORD, Checkpoint, find_checkpoint, open_checkpoint, step_folders
from ..train.trainer import Trainer

DISCRETE = "ddpm"
"""The path of a DiT."""


@dataclass(frozen=True)
class Trained:
    """A network, in evaluation mode, and what belongs to it.

    `path` is a flow path's name, or "ddpm" for a DiT; `home` is where its samples go by default; `step` and
    `trained_on` (name and fingerprint of the images) are None where nobody recorded them.
    """

    network: SiT | DiT
    weights: str
    weights_sha256: str
    path: str
    prediction: str
    autoencoder: AutoencoderIdentity
    class_names: list[str]
    where: str
    home: Path
    step: int | None = None
    trained_on: tuple[str, str] | None = None

    @property
    def is_discrete(self) -> bool:
        """Whether it is a DiT of the discrete diffusion."""
        return self.path == DISCRETE

    @property
    def flow_path(self) -> FlowPath:
        """The path whose times its samplers count in; DiT's chain is vp's."""
        return find_path("vp" if self.is_discrete else self.path)

    @property
    def default_sampler(self) -> str:
        """The preset that is taken unless another is asked for."""
        return "dit" if self.is_discrete else "heun"

    def identity(self) -> dict[str, str]:
        """Which weights these are, for records."""
        return {"weights": self.weights, "weights_sha256": self.weights_sha256}

    def over_time(self) -> ConditionalVelocity:
        """The network as a function of (x, t, labels) with t in [0, 1]; times and results are not rounded to
        the type of its weights."""
        network: Any = self.network

        def typed(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            return network(x.to(network.dtype), t, labels).to(x.dtype)  # type: ignore[no-any-return]

        return over_time(typed) if self.is_discrete else typed

    def check_sampler(self, sampler: Sampler) -> None:
        """ValueError where the sampler is of the other family, or ruins any image; doubts are said."""
        if sampler.takes_noise == self.is_discrete:
            doubt = sampler.doubt(self.flow_path, self.prediction)
            if doubt:
                runtime.say(f"the images will suffer: {doubt}")
            return
        kind, other = (
            ("a DiT", "dit or dit-ddim") if self.is_discrete else ("a SiT", "heun, sit-sde or sit-ode")
        )
        raise ValueError(f"{self.where} is {kind}, which {sampler.name} cannot sample; use --sampler {other}")

    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that it was trained on."""
        factor = self.autoencoder.downsampling
        return self.network.height * factor, self.network.width * factor


def open_trained(
    where: str | None,
    weights: str | None = None,
    step: int | None = None,
    autoencoder: str | None = None,
    family: str | None = None,
    latents_of: AutoencoderIdentity | None = None,
) -> Trained:
    """What lies at `where`; None is the newest run under runs/.

    `weights` is "ema", "model" or a full name, by default the average; `step` chooses a checkpoint of a run;
    `autoencoder` says where the autoencoder lies now, or which it is where nothing recorded it; `family` is
    "SiT" or "DiT" where an official file does not tell; `latents_of` is the autoencoder of a network alone,
    where it is known and need not be opened.

    Raises:
        ValueError: nothing loadable there, unsafe, damaged or not fitting, naming what.
    """
    path = Path(where) if where is not None else None
    inside = path is not None and (path.parent / RECORD).is_file() and (path / "config.json").is_file()
    if path is not None and inside:  # one of a checkpoint's sets of weights
        path, weights = path.parent, path.name
    if path is None or (path / "checkpoints").is_dir() or (path / RECORD).is_file():
        found = find_checkpoint(None if path is None else str(path))
        return of_checkpoint(found if step is None else _of_step(found, step), weights, autoencoder)
    if not path.exists() or (path.is_dir() and not any(path.glob("*.json"))):
        find_checkpoint(str(path))  # says what it is not
    if step is not None:
        raise ValueError(f"a step is one of a run's; {path} is not a run")
    return _from_elsewhere(path, weights, autoencoder, family, latents_of)


def of_checkpoint(
    checkpoint: Checkpoint, weights: str | None = None, autoencoder: str | None = None
) -> Trained:
    """The weights called `weights` of a checkpoint; `autoencoder` says where that lies, if it moved."""
    name = checkpoint.weights_name(weights or "ema")
    parent = checkpoint.folder.parent
    identity = checkpoint.autoencoder
    return Trained(
        network=checkpoint.load_network(name),
        weights=name,
        weights_sha256=checkpoint.weights_sha256(name),
        path=checkpoint.record["path"],
        prediction=checkpoint.record["prediction"],
        autoencoder=replace(identity, name=autoencoder) if autoencoder else identity,
        class_names=checkpoint.class_names,
        where=str(checkpoint.folder),
        home=parent.parent if parent.name == "checkpoints" else checkpoint.folder,
        step=checkpoint.step,
        trained_on=(checkpoint.record["images"], checkpoint.record["images_fingerprint"]),
    )


def of_trainer(trainer: Trainer, weights: str | None = None) -> Trained:
    """A copy of the average called `weights` as it is now in a run, by default the first.

    `weights_sha256` is of the tensors (`sha256_of_weights`), not of a checkpoint's file. All processes
    call it together. It draws from torch's generators: see `preview.beside_training`.
    """
    name = weights or next(iter(trainer.averages))
    network: Any = type(trainer.model).from_config(trainer.model.config)
    network.load_state_dict(trainer.whole_weights(name), strict=True)
    cache, settings = trainer.cache, trainer.settings
    return Trained(
        network=network.eval(),
        weights=name,
        weights_sha256=sha256_of_weights(network),
        path=settings.path,
        prediction=settings.prediction,
        autoencoder=cache.autoencoder,
        class_names=cache.class_names,
        where=str(trainer.run),
        home=trainer.run,
        step=trainer.step,
        trained_on=(cache.images, cache.images_fingerprint),
    )


def _of_step(found: Checkpoint, step: int) -> Checkpoint:
    folders = {
        int(path.name.removeprefix("step_")): path for path in step_folders(found.folder.parent.parent)
    }
    if step not in folders:
        known = ", ".join(str(number) for number in sorted(folders))
        raise ValueError(f"{found.folder.parent.parent} has no checkpoint of step {step}; it has {known}")
    return open_checkpoint(folders[step])


def _from_elsewhere(
    path: Path,
    weights: str | None,
    autoencoder: str | None,
    family: str | None,
    latents_of: AutoencoderIdentity | None,
) -> Trained:
    index = (
        runtime.read_record(path / "model_index.json", []) if (path / "model_index.json").is_file() else {}
    )
    ours = index.get("_class_name") == "SiTPipeline"
    network, told = load_model(path, weights, family)
    runtime.say(f"{path}: {type(network).__name__} with {told}")
    if not isinstance(network, (SiT, DiT)):
        raise ValueError(
            f"{path} is a {type(network).__name__}, which makes no images; needed is a SiT or DiT"
        )
    discrete = isinstance(network, DiT)
    flow = (index["path"], index["prediction"]) if ours else (DISCRETE, "noise") if discrete else None
    if flow is None:
        flow = "linear", "velocity"
        runtime.say(f"{path} does not say what it predicts: taken for a velocity on the linear path")
    named = autoencoder or ("pixels" if ours and index.get("vae", [None])[0] is None else None)
    vae = path / "vae"
    if latents_of is None and named is None and not vae.is_dir():
        raise ValueError(f"{path} does not say which autoencoder its latents are of: give --autoencoder")
    identity = latents_of or Autoencoder(named or str(vae), "cpu").identity
    if ours:
        identity = replace(identity, channel_mean=index["channel_mean"], channel_std=index["channel_std"])
    if identity.latent_channels != network.in_channels:
        raise ValueError(
            f"autoencoder {identity.name} has {identity.latent_channels} latent channels, but {path} takes "
            f"{network.in_channels}"
        )
    return Trained(
        network=network,
        weights=told,
        weights_sha256=sha256_of_weights(network),
        path=flow[0],
        prediction=flow[1],
        autoencoder=identity,
        class_names=names_of(index.get("id2label"), network.num_classes),
        where=str(path),
        home=Path("runs") / path.stem,
        trained_on=None,
    )


def names_of(id2label: Mapping[Any, str] | None, num_classes: int) -> list[str]:
    """The class names by label; a class without one is called by its number."""
    known = {int(label): str(name) for label, name in (id2label or {}).items()}
    return [known.get(label, str(label)) for label in range(num_classes)]


def without_name(identity: AutoencoderIdentity) -> dict[str, Any]:
    """What an autoencoder is, wherever it lies."""
    return {key: value for key, value in asdict(identity).items() if key != "name"}
