"""sitvit: train, sample and evaluate SiT flow transformers with the vanilla or the ViT-5 backbone.

The public names are imported on first use, so that `import sitvit` stays instant.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generate.pipeline import SiTPipeline as SiTPipeline
    from .models.convert import init_from as init_from
    from .models.dit import DiT as DiT
    from .models.presets import build_model as build_model
    from .models.sit import SiT as SiT
    from .models.vit5 import ViT5 as ViT5
    from .train.checkpoint import load_checkpoint as load_checkpoint

__version__ = "0.1.0"
__all__ = ["DiT", "SiT", "SiTPipeline", "ViT5", "__version__", "build_model", "init_from", "load_checkpoint"]

_HOME = {
    "DiT": "sitvit.models.dit",
    "SiT": "sitvit.models.sit",
    "SiTPipeline": "sitvit.generate.pipeline",
    "ViT5": "sitvit.models.vit5",
    "build_model": "sitvit.models.presets",
    "init_from": "sitvit.models.convert",
    "load_checkpoint": "sitvit.train.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sitvit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
