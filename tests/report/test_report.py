"""The report holds each run's numbers and pictures, and how they were made."""

import html
import json
import re
import shutil

import pytest
from PIL import Image

from sitvit import cli
from sitvit.data import sources as image_sources
from sitvit.eval.evaluate import evaluate
from sitvit.eval.settings import EvaluationConfig
from sitvit.flow.guidance import Guidance
from sitvit.flow.samplers import FixedOde
from sitvit.generate.generation import generate
from sitvit.report.html import write_report
from sitvit.train.checkpoint import find_checkpoint

from ..browser import check, needs_chromium


@pytest.fixture
def run(trained_run, tmp_path, monkeypatch, images):
    monkeypatch.setitem(image_sources.EMBEDDED, "fashion-mnist", lambda: images)
    folder = tmp_path / "sit <b>"  # a name that must not become markup
    shutil.copytree(trained_run, folder)
    for name, scale in (("plain", 1.0), ("guided", 3.0)):
        made = generate(
            find_checkpoint(str(folder)), "ema", folder / "samples" / name, num_images=20,
            labels="balanced", seed=0, sampler=FixedOde("euler", 2), guidance=Guidance(scale), batch_size=10,
            autoencoder_name=None,
        )  # fmt: skip
        evaluate(EvaluationConfig(samples=str(made)))
    return folder


def test_the_page_is_self_contained_and_shows_each_number_and_picture(run, tmp_path):
    written = write_report([run], tmp_path / "out" / "report.html", None)
    page = written[0].read_text()
    for name in ("plain", "guided"):
        metrics = json.loads(next((run / "samples" / name).glob("metrics_*.json")).read_text())["metrics"]
        assert f"{metrics['FD-fashion']:.3f}" in page
        assert f"{100 * metrics['class_agreement']:.1f} %" in page
    assert page.count("data:image/png;base64,") == 3  # the losses and two grids
    assert not re.search(r"(src|href)=['\"](?!data:|#)", page)
    assert "sit &lt;b&gt;" in page
    assert "<b>" not in page
    assert "FID" in page  # only to say that it is not
    assert "not FID" in page


def test_an_analysis_beside_the_run_is_shown_with_the_weights_that_it_is_of(run, tmp_path):
    cli.analyze(
        [str(run), "--num-images", "8", "--times", "0.5", "--step", "3", "--out", str(run / "analysis")]
    )
    page = write_report([run], tmp_path / "report.html", None)[0].read_text()
    for name in ("probe", "attention distance", "attention maps", "token norms", "gates"):
        assert f"alt='{name} of {html.escape(str(run))}'" in page
    assert "ema_0.9 at step 3" in page


@needs_chromium
def test_the_page_of_a_run_fits_a_phone_fetches_nothing_and_has_no_error(run, tmp_path):
    check(write_report([run], tmp_path / "report.html", None)[0].read_text(), 390, tmp_path)


def test_the_exported_grid_is_the_guided_one_with_the_json_that_reproduces_it(run, tmp_path):
    prefix = str(tmp_path / "samples" / "demo_")
    write_report([run], tmp_path / "report.html", prefix)
    record = json.loads((tmp_path / "samples" / f"demo_{run.name}.json").read_text())
    assert record["cfg_scale"] == 3.0
    assert record["config"]["model"]["name"] == "SiT-ViT5-S/2"
    assert len(record["weights_sha256"]) == 64
    with Image.open(tmp_path / "samples" / f"demo_{run.name}.png") as picture:
        assert picture.width > 32 * 2
    assert (tmp_path / "samples" / "demo_loss.png").is_file()


def test_a_run_without_samples_is_refused_with_what_to_do(trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("samples"))
    with pytest.raises(
        ValueError, match=r"no finished samples of step 6 in .*/samples; run scripts/sample.py"
    ):
        write_report([tmp_path / "run"], tmp_path / "report.html", None)
    with pytest.raises(ValueError, match="nowhere"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html", None)
