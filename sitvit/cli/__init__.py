"""The verbs, as `scripts/` call them: parse, check, hand over. Heavy imports wait until they are needed."""

from .analyze import analyze
from .bench import bench
from .compare import compare
from .data import encode_latents, fetch_data
from .evaluate import evaluate, report
from .frame import explain, main
from .generate import export_pipeline, sample
from .models import geometry, import_checkpoint
from .train import reconstruct_average, train_autoencoder, train_classifier, train_sit

__all__ = [
    "analyze",
    "bench",
    "compare",
    "encode_latents",
    "evaluate",
    "explain",
    "export_pipeline",
    "fetch_data",
    "geometry",
    "import_checkpoint",
    "main",
    "reconstruct_average",
    "report",
    "sample",
    "train_autoencoder",
    "train_classifier",
    "train_sit",
]
