"""A run's average measured as the run trains, by the evaluation of checkpoints."""

import hashlib
from pathlib import Path

from .. import runtime
from ..generate.preview import beside_training
from ..generate.trained import Trained, of_trainer
from ..train.trainer import Row, Trainer
from .evaluate import check_metrics, evaluate, open_extractor, open_reference
from .features import FeatureExtractor
from .online import open_checkpoint_set
from .settings import EvaluationConfig


class Evaluation:
    """A hook that adds a distance to the row of every `train.evaluate_every`-th step, 0: never.

    The numbers are those of `scripts/evaluate.py --checkpoint` of that step, with the first average,
    `train.evaluate_images` images and all else as there by default (a DiT's sampler is its own). They lie in
    RUN/evaluations with their protocol, too. All processes share the work.
    """

    def __init__(self) -> None:
        self._extractor: FeatureExtractor | None = None

    def __call__(self, trainer: Trainer, row: Row | None) -> None:
        """Measure, where this step is one that measures.

        Raises:
            ValueError: already after the first step, where what an evaluation needs is not there.
        """
        every = trainer.settings.evaluate_every
        if not every:
            return
        with beside_training():
            if self._extractor is None:
                self._extractor = _open(trainer)
            if row is not None and trainer.step % every == 0:
                trained = of_trainer(trainer)
                found, _ = evaluate(_config(trainer, trained), self._extractor, trained)
                row.update(found)


def _config(trainer: Trainer, trained: Trained) -> EvaluationConfig:
    """What is measured and how; the file is named by that too, since a rollback comes by a step twice."""
    settings = trainer.settings
    about = f"{trained.weights_sha256} {settings.evaluate_images} {settings.evaluate_reference}"
    name = f"step_{trainer.step:07d}-{hashlib.sha256(about.encode()).hexdigest()[:8]}.json"
    return EvaluationConfig(
        checkpoint=str(trainer.run),
        reference=settings.evaluate_reference,
        num_images=settings.evaluate_images,
        sampler=trained.default_sampler,
        out=str(Path(trainer.run) / "evaluations" / name),
    )


def _open(trainer: Trainer) -> FeatureExtractor:
    """The feature network, after a look at all else that a measurement needs."""
    trained, state = of_trainer(trainer), runtime.processes()
    config = _config(trainer, trained)
    images = open_checkpoint_set(config, state.device, trained)
    extractor = open_extractor(config, images, state)
    reference = config.reference or trainer.cache.images
    side = open_reference(reference, extractor, images, config.reference is None, state.device)
    check_metrics(extractor.metrics, extractor, side, config.num_images, config.neighbours)
    return extractor
