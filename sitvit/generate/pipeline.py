"""A diffusers pipeline around a SiT or DiT: the images of `scripts/sample.py`, bit for bit in float32.

    pipe = sitvit.SiTPipeline.from_pretrained("FOLDER")
    images = pipe(class_labels=[207, "pizza"], guidance_scale=1.5, generator=torch.manual_seed(0)).images

What a `torch.Generator` means: its seed alone counts (`initial_seed()`), not how much was drawn from it, and
calling twice with one generator gives the same images twice.

    one generator of seed s        image i is image i of `--seed s`
    a list, of seeds s_0, s_1, ... image i is the first image of seed s_i, as by `--seeds`
    none                           a seed is drawn from torch's global generator

The batch is what is asked for in one call, so the bits are those of `--batch-size` of that many.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from torch import Tensor, nn

from ..data.autoencoder import PIXELS, Autoencoder, pixels_to_images
from ..flow.guidance import Guidance
from ..flow.samplers import find_sampler
from ..models.dit import DiT
from ..models.sit import SiT
from .draws import Key, check_labels, keys_of, noise_of, resolve_labels
from .job import bind, check_finite, latent_shape, sample_latents
from .trained import Trained, names_of, open_trained

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
Callback = Callable[["SiTPipeline", int, float, dict[str, Tensor]], dict[str, Tensor] | None]


class SiTPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Class labels to images.

    Args:
        transformer: the network.
        vae: its autoencoder (`AutoencoderKL` or `AutoencoderTiny`), or None where latents are pixels.
        path, prediction: what it was trained on: linear, gvp, vp, or ddpm for a DiT.
        id2label: class names by label.
        channel_mean, channel_std: of the scaled latents, where training normalised them.
    """

    config: Any
    model_cpu_offload_seq = "transformer->vae"  # type: ignore[assignment]
    _optional_components = ["vae"]  # noqa: RUF012 (diffusers reads it from the class)

    def __init__(
        self,
        transformer: SiT | DiT,
        vae: Any,
        path: str = "linear",
        prediction: str = "velocity",
        id2label: Mapping[Any, str] | None = None,
        channel_mean: list[float] | None = None,
        channel_std: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        names = names_of(id2label, transformer.num_classes)
        self.register_to_config(
            path=path,
            prediction=prediction,
            id2label={str(label): name for label, name in enumerate(names)},
            channel_mean=channel_mean,
            channel_std=channel_std,
        )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, where: str | Path, torch_dtype: torch.dtype = torch.float32
    ) -> "SiTPipeline":
        """The pipeline in a folder of `scripts/export_pipeline.py`, a diffusers DiT's, or one on the hub.

        Only JSON and safetensors are read (or fetched), so nothing in it can run code. `torch_dtype` is the
        network's; the autoencoder stays in float32.

        Raises:
            ValueError: no pipeline, or a damaged one, naming what.
        """
        folder = Path(where)
        if not folder.is_dir():
            folder = _fetch(str(where))
        if not (folder / "model_index.json").is_file():
            raise ValueError(f"{folder} is no pipeline: it has no model_index.json")
        pipe = cls.from_trained(open_trained(str(folder)))
        network: Any = pipe.transformer
        nn.Module.to(network, torch_dtype)  # diffusers' own warns of modules to keep, of which there are none
        return pipe

    @classmethod
    def from_trained(cls, trained: Trained) -> "SiTPipeline":
        """A pipeline around what `open_trained` found."""
        identity = trained.autoencoder
        vae = None if identity.name == PIXELS else Autoencoder(identity.name, "cpu").network
        if vae is not None:
            vae.register_to_config(_name_or_path="")  # where it lay is nobody's business
        return cls(
            trained.network,
            vae,
            trained.path,
            trained.prediction,
            dict(enumerate(trained.class_names)),
            identity.channel_mean,
            identity.channel_std,
        )

    @property
    def class_names(self) -> list[str]:
        """The name of each label."""
        return names_of(self.config.id2label, self.transformer.num_classes)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        guidance_scale: float = 1.0,
        num_inference_steps: int | None = None,
        guidance_interval: tuple[float, float] = (0.0, 1.0),
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        sampler: str | None = None,
        guided_channels: int | None = None,
        guidance_rescale: float = 0.0,
        height: int | None = None,
        width: int | None = None,
        latents: Tensor | None = None,
        callback_on_step_end: Callback | None = None,
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """One image a label.

        Args:
            class_labels: labels or class names.
            guidance_scale, guidance_interval, guided_channels, guidance_rescale: as `Guidance`; 1 is off.
            num_inference_steps: network steps; by default the sampler's own.
            generator: which images; see the module.
            output_type: "pil", "np" (B, H, W, 3) or "pt" (B, 3, H, W) in [0, 1], or "latent".
            sampler: a preset; by default heun for a SiT and dit for a DiT.
            height, width: in pixels, by default as trained.
            latents: the noise x_0 (B, C, h, w) to start from in place of the generator's.
            callback_on_step_end: `callback(pipe, step, t, {"latents": x_t})` after each step of t, from 0
                (noise) to 1; sampling goes on with the "latents" that it returns, where it returns some.

        Raises:
            ValueError: an argument that makes no sense, naming it.
            FloatingPointError: latents or pixels that are not finite.
        """
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        labels = self._labels(class_labels)
        trained, autoencoder = self._trained()
        device = self._execution_device
        parts = {} if num_inference_steps is None else {"num_steps": num_inference_steps}
        way = find_sampler(sampler or trained.default_sampler, parts)
        trained.check_sampler(way)
        if len(guidance_interval) != 2:
            raise ValueError(f"guidance_interval must be two numbers, from t to t, got {guidance_interval}")
        low, high = guidance_interval
        guidance = Guidance(guidance_scale, (low, high), guided_channels, guidance_rescale)
        guidance.check_channels(self.transformer.in_channels)
        null_label = None if guidance.is_off else self.transformer.null_label
        trained_height, trained_width = trained.image_size()
        size = trained_height if height is None else height, trained_width if width is None else width
        shape = latent_shape(trained, size)
        noise = partial(noise_of, keys_of_generator(generator, len(labels)), shape)
        start = noise if latents is None else _starting_from(latents, (len(labels), *shape), noise)
        velocity = bind(trained, way, guidance, torch.tensor(labels, device=device), null_label)
        times = way.times(trained.flow_path, trained.prediction)
        if callback_on_step_end is not None and way.num_ticks is None:
            raise ValueError(f"{way.name} chooses its own steps and calls nothing back; use another")
        done: list[bool] = []
        with self.progress_bar(total=way.num_ticks) as bar:

            def on_step(x: Tensor) -> None:
                if callback_on_step_end is not None:
                    answer = callback_on_step_end(self, len(done), times[len(done)], {"latents": x})
                    if answer and answer.get("latents") is not None:
                        x.copy_(answer["latents"])  # the solver goes on with this very tensor
                    done.append(True)
                bar.update()

            state = sample_latents(trained, way, velocity, start, device, on_step).state
        images: Any = state if output_type == "latent" else self._decoded(autoencoder, state, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _labels(self, given: int | str | Sequence[int | str]) -> list[int]:
        one = isinstance(given, str) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0
        words: list[Any] = [given] if one else list(given)  # type: ignore[arg-type]
        labels = [label for word in words for label in _label(word, self.class_names)]
        check_labels(labels, self.transformer.num_classes)
        return labels

    def _trained(self) -> tuple[Trained, Autoencoder]:
        config = self.config
        autoencoder = Autoencoder.around(self.vae, "vae", config.channel_mean, config.channel_std)
        trained = Trained(
            network=self.transformer,
            weights="transformer",
            weights_sha256="",
            path=config.path,
            prediction=config.prediction,
            autoencoder=autoencoder.identity,
            class_names=self.class_names,
            where="this pipeline",
            home=Path(),
        )
        return trained, autoencoder

    def _decoded(self, autoencoder: Autoencoder, latents: Tensor, output_type: str) -> Any:
        pixels = check_finite(autoencoder.decode(latents))
        if output_type == "pil":
            return self.numpy_to_pil(pixels_to_images(pixels).cpu().numpy() / 255.0)
        unit = (pixels / 2 + 0.5).clamp(0, 1).cpu()
        return unit if output_type == "pt" else unit.permute(0, 2, 3, 1).numpy()


# Saved indices name the public class, so that moving this file breaks nobody's folder.
SiTPipeline.__module__ = "sitvit"


def keys_of_generator(
    generator: torch.Generator | Sequence[torch.Generator] | None, num_images: int
) -> list[Key]:
    """(seed, index) of each image; ValueError for a list of another length."""
    if generator is None:
        return keys_of(int(torch.randint(2**62, ())), range(num_images))
    if isinstance(generator, torch.Generator):
        return keys_of(generator.initial_seed(), range(num_images))
    if len(generator) != num_images:
        raise ValueError(
            f"{len(generator)} generators for {num_images} class labels: give one for all, or one for each"
        )
    return [(each.initial_seed(), 0) for each in generator]


def _label(word: Any, class_names: list[str]) -> list[int]:
    if not isinstance(word, str):
        try:
            return [operator.index(word)]  # numpy's and torch's whole numbers too
        except TypeError:
            raise ValueError(f"class_labels are labels or names, got {word!r}") from None
    found = resolve_labels([word], class_names)
    if isinstance(found, str):
        raise ValueError(f"class_labels are labels or names; {word!r} is a rule of scripts/sample.py")
    return found


def _starting_from(
    latents: Tensor, shape: tuple[int, ...], noise: Callable[[int], Tensor]
) -> Callable[[int], Tensor]:
    if tuple(latents.shape) != shape:
        raise ValueError(f"latents must be of shape {shape}, got {tuple(latents.shape)}")
    return lambda draw: latents.float() if draw == 0 else noise(draw)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "README.md"]))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"there is no folder {name}, and the hub has no such pipeline ({reason})") from None
