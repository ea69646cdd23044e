"""A pipeline's folder with its model card: what `SiTPipeline.from_pretrained` reads, whole or not at all."""

from pathlib import Path

from .. import runtime
from .pipeline import SiTPipeline
from .trained import Trained

CARD = """---
library_name: diffusers
tags: [image-generation, class-conditional, {kind}]
---
# {title}

A class-conditional {kind} of {parameters:,} parameters for images of {height} x {width} pixels (height x
width), made with sitvit. {trained_on}

```python
import torch, sitvit
pipe = sitvit.SiTPipeline.from_pretrained("FOLDER")
images = pipe(class_labels=[0], guidance_scale=1.5, generator=torch.Generator().manual_seed(0)).images
```

It needs the package sitvit: `DiffusionPipeline.from_pretrained` does not find its classes.

| | |
|---|---|
| path, prediction | {path}, {prediction} |
| weights | {weights}, SHA-256 {sha256} |
| step | {step} |
| default sampler | {sampler} |
| autoencoder | SHA-256 {autoencoder} |

## class names

{names}
"""


def export_pipeline(trained: Trained, out: Path) -> None:
    """Write `out`; ValueError where it is there already."""
    if out.exists():
        raise ValueError(f"{out} is there already; choose another name, or delete it")
    pipe = SiTPipeline.from_trained(trained)
    with runtime.write_aside(out) as temporary:
        pipe.save_pretrained(temporary, safe_serialization=True)
        (temporary / "README.md").write_text(model_card(trained, out.name), "utf-8")


def model_card(trained: Trained, title: str) -> str:
    """What the pipeline is, in Markdown."""
    height, width = trained.image_size()
    images = trained.trained_on and trained.trained_on[0]
    return CARD.format(
        title=title,
        kind=type(trained.network).__name__,
        parameters=sum(parameter.numel() for parameter in trained.network.parameters()),
        height=height,
        width=width,
        trained_on=f"Trained on {Path(images).name}." if images else "",
        path=trained.path,
        prediction=trained.prediction,
        weights=trained.weights,
        sha256=trained.weights_sha256,
        step="not recorded" if trained.step is None else trained.step,
        sampler=trained.default_sampler,
        autoencoder=trained.autoencoder.sha256,
        names="\n".join(f"{label}. {name}" for label, name in enumerate(trained.class_names)),
    )
