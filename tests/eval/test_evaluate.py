"""FD-fashion: honest features, and a protocol beside every number."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from sitvit.data import sources as image_sources
from sitvit.data.autoencoder import images_to_pixels
from sitvit.data.demo import embedded_fashion
from sitvit.eval import evaluate as evaluation
from sitvit.eval.classifier import (
    EMBEDDED_CLASSIFIER,
    SmallClassifier,
    load_classifier,
    predict,
    scale_features,
)
from sitvit.eval.features import FashionFeatures
from sitvit.eval.metrics import frechet_distance
from sitvit.eval.protocol import Protocol, write_metrics
from sitvit.eval.sets import Reconstructions
from sitvit.eval.settings import EvaluationConfig
from sitvit.eval.statistics import FeatureStatistics
from sitvit.flow.guidance import Guidance
from sitvit.flow.samplers import FixedOde
from sitvit.generate.generation import generate
from sitvit.train.checkpoint import find_checkpoint

from ..conftest import FirstImages


def evaluate(samples, reference, batch_size, out, **more):
    """In the embedded classifier's features."""
    return evaluation.evaluate(
        EvaluationConfig(
            samples=samples,
            reference=reference,
            features=FashionFeatures.name,
            batch_size=batch_size,
            out=out and str(out),
            **more,
        )
    )


@pytest.fixture(scope="module")
def extractor():
    return FashionFeatures(torch.device("cpu"))


@pytest.fixture
def few(monkeypatch, images):
    """fashion-mnist has 64 images, so that an evaluation takes no time."""
    monkeypatch.setitem(image_sources.EMBEDDED, "fashion-mnist", lambda: images)


@pytest.fixture
def made(trained_run, tmp_path, few):
    return generate(
        find_checkpoint(str(trained_run)), "ema", tmp_path / "made", num_images=20, labels="balanced",
        seed=0, sampler=FixedOde("euler", 2), guidance=Guidance(), batch_size=10,
        autoencoder_name=None,
    )  # fmt: skip


def test_the_classifier_is_right_on_nine_of_ten_images_that_it_was_not_trained_on():
    source = embedded_fashion()  # trained on the other 60,000
    network, class_names = load_classifier(EMBEDDED_CLASSIFIER)
    assert class_names == source.class_names
    chosen = np.stack([source.read(i) for i in range(2000)])
    assert (predict(network, chosen) == source.labels[:2000]).mean() > 0.9
    assert sum(path.stat().st_size for path in EMBEDDED_CLASSIFIER.iterdir()) < 1e6


def test_scaling_the_features_gives_them_unit_variance_and_keeps_the_logits():
    network = SmallClassifier([4, 8], 10).eval()
    source = embedded_fashion()
    chosen = np.stack([source.read(i) for i in range(300)])
    pixels = images_to_pixels(torch.from_numpy(chosen))
    with torch.no_grad():
        before = network(pixels)[1]
        scale_features(network, chosen)
        features, logits = network(pixels)
    torch.testing.assert_close(logits, before, atol=1e-5, rtol=1e-4)
    assert features.var(dim=0).mean() == pytest.approx(1, abs=1e-4)


def test_the_distance_grows_with_noise_and_is_small_between_halves_of_the_real_images(extractor):
    source = embedded_fashion()

    class Noisy(FirstImages):
        def __init__(self, strength, start):
            super().__init__(source, 2000)
            self.labels = source.labels[start : start + 2000]
            self.strength, self.start = strength, start

        def read(self, index):
            noise = np.random.default_rng(index).normal(size=(32, 32, 3)) * 255 * self.strength
            return (source.read(self.start + index) + noise).clip(0, 255).astype(np.uint8)

    def measure(images):
        pixels = torch.from_numpy(np.stack([images.read(i) for i in range(2000)]))
        return FeatureStatistics.of(extractor(pixels).pool)

    clean = measure(Noisy(0, 0))
    distances = [frechet_distance(clean, measure(Noisy(s, 5000))) for s in (0, 0.05, 0.2)]
    assert distances[0] < 0.15 * distances[1] < distances[1] < distances[2]


def test_an_evaluation_writes_its_numbers_with_the_whole_protocol(made):
    metrics, path = evaluate(str(made), None, 8, None)
    written = json.loads(path.read_text())
    assert written["metrics"] == metrics
    assert set(metrics) == {"FD-fashion", "class_agreement"}
    assert metrics["FD-fashion"] > 0
    assert 0 <= metrics["class_agreement"] <= 1
    protocol = written["protocol"]
    assert protocol["num_samples"] == 20
    assert protocol["num_reference"] == 64
    for key in ("weights_sha256", "seed", "cfg_scale", "sampler", "labels", "autoencoder"):
        assert key in protocol["samples"]
    assert len(protocol["features"]["sha256"]) == 64
    assert path.parent == made


def test_the_numbers_do_not_depend_on_the_batch_size(made, tmp_path):
    one, _ = evaluate(str(made), None, 1, tmp_path / "a.json")
    other, _ = evaluate(str(made), None, 7, tmp_path / "b.json")
    assert one["FD-fashion"] == pytest.approx(other["FD-fashion"], rel=1e-5)


def test_the_agreement_is_the_share_that_the_classifier_gives_the_asked_class(made):
    metrics, _ = evaluate(str(made), None, 8, None)
    network, _ = load_classifier(EMBEDDED_CLASSIFIER)
    pictures = np.stack([np.asarray(Image.open(p)) for p in sorted((made / "images").iterdir())])
    asked = np.arange(20) % 10
    assert metrics["class_agreement"] == (predict(network, pictures) == asked).mean()


def test_a_second_evaluation_is_not_measured_again(made, capsys):
    first = evaluate(str(made), None, 8, None)
    assert evaluate(str(made), None, 8, None) == first
    assert "was measured before" in capsys.readouterr().out


def test_numbers_of_another_measurement_are_not_overwritten(made, tmp_path):
    out = tmp_path / "m.json"
    evaluate(str(made), None, 8, out)
    record = json.loads((made / "samples.json").read_text())
    (made / "samples.json").write_text(json.dumps({**record, "seed": 9}))
    with pytest.raises(ValueError, match="another measurement"):
        evaluate(str(made), None, 8, out)
    out.write_text("[1]")
    with pytest.raises(ValueError, match="m.json is damaged: it holds no object"):
        evaluate(str(made), None, 8, out)


def test_unfinished_and_foreign_samples_are_refused(made):
    shutil.copy(made / "images/000000.png", made / "images/000099.png")
    with pytest.raises(ValueError, match="foreign 000099.png"):
        evaluate(str(made), None, 8, None)
    (made / "images/000099.png").unlink()
    (made / "samples.json").unlink()
    with pytest.raises(ValueError, match="unfinished"):
        evaluate(str(made), None, 8, None)


def test_a_damaged_picture_is_named(made):
    (made / "images/000004.png").write_bytes(b"")
    with pytest.raises(ValueError, match="000004.png"):
        evaluate(str(made), None, 8, None)


def test_pictures_of_unequal_size_are_refused_by_name(tmp_path, few):
    for i, size in enumerate([(32, 32), (32, 32), (40, 32)]):
        path = tmp_path / "photos" / "a" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    with pytest.raises(ValueError, match="2.png has 40 x 32 pixels"):
        evaluate(str(tmp_path / "photos"), "fashion-mnist", 8, tmp_path / "m.json")


def test_real_images_need_a_reference_and_have_a_small_distance(few, tmp_path):
    with pytest.raises(ValueError, match="--reference"):
        evaluate("fashion-mnist", None, 8, None)
    metrics, _ = evaluate("fashion-mnist", "fashion-mnist", 8, tmp_path / "m.json")
    assert metrics["FD-fashion"] == pytest.approx(0, abs=1e-9)


def test_reconstructions_are_the_decoded_latents(cache, images):
    rebuilt = Reconstructions(cache, torch.device("cpu"))
    error = np.stack([rebuilt.read(i).astype(float) - images.read(i) for i in (0, 49, 50, 63)])
    assert 10 * np.log10(255**2 / np.square(error).mean()) > 20
    assert len(rebuilt) == 64


def test_images_of_another_size_are_averaged_to_the_classifiers(extractor):
    images = torch.randint(0, 255, (2, 64, 64, 3), dtype=torch.uint8)
    features, logits, _ = extractor(images)
    assert features.shape == (2, 64)
    assert logits.shape == (2, 10)


def test_a_number_without_its_protocol_cannot_be_written(tmp_path):
    with pytest.raises(TypeError):
        Protocol(samples={})
    with pytest.raises(TypeError):
        write_metrics(tmp_path / "m.json", {"FD-fashion": 1.0})


def test_changed_training_images_are_not_taken_for_those_that_were_trained_on(
    made, monkeypatch, images, tmp_path
):
    fewer = FirstImages(images.source, 60)
    monkeypatch.setitem(image_sources.EMBEDDED, "fashion-mnist", lambda: fewer)
    with pytest.raises(ValueError, match="are not those that were encoded"):
        evaluate(str(made), None, 8, None)
    evaluate(str(made), "fashion-mnist", 8, tmp_path / "m.json")  # asked for by name
