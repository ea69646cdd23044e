"""scripts/sample.py --from: the record of images makes the same images again."""

import json
import shutil

import numpy as np
import pytest

from sitvit.cli import evaluate, sample
from sitvit.data import sources
from sitvit.generate.samples import Samples

WAYS = {
    "guided": "--num-steps 2 --labels random --cfg-scale 2 --guidance-interval 0.2 0.8 --precision bfloat16",
    "sde": "--num-steps 2 --sampler sit-sde --last-step none --seed 9 --weights model",
    "adaptive": "--method dopri5_per_image --rtol 1 --atol 1",
    "sized": "--num-steps 2 --image-size 32 48 --labels Bag 3 --interval 0.1 0.9 --shift 2 --step 3",
}


@pytest.fixture
def make(tmp_path):
    def run(name, *options):
        sample([*map(str, options), "--out", str(tmp_path / name)])
        made = Samples(tmp_path / name)
        return np.stack([made.read(i) for i in range(len(made))])

    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_record_makes_its_images_again_bit_for_bit(make, trained_run, tmp_path, way):
    first = make(
        "first", "--checkpoint", trained_run, "--num-images", 5, "--batch-size", 2, *WAYS[way].split()
    )
    assert np.array_equal(make("again", "--from", tmp_path / "first" / "samples.json"), first)
    told = [(tmp_path / name / "settings.json").read_text() for name in ("first", "again")]
    assert told[0] == told[1]


def test_a_record_of_seeds_and_of_a_weak_network_is_made_again_where_they_moved_to(
    make, trained_run, tmp_path
):
    weak = trained_run / "checkpoints" / "step_0000003"
    options = ["--checkpoint", trained_run, "--num-steps", 2, "--seeds", "4-6", "--cfg-scale", 3]
    first = make("first", *options, "--autoguidance", weak)
    record = tmp_path / "first" / "samples.json"
    assert np.array_equal(make("again", "--from", record), first)
    moved = shutil.copytree(trained_run, tmp_path / "moved")
    told = json.loads(record.read_text())
    record.write_text(json.dumps({**told, "checkpoint": "gone", "autoguidance_checkpoint": "gone"}))
    elsewhere = ["--checkpoint", moved, "--autoguidance", moved / "checkpoints" / "step_0000003"]
    assert np.array_equal(make("elsewhere", "--from", record, *elsewhere), first)


def test_the_numbers_of_a_checkpoint_make_the_images_that_they_are_of(
    make, trained_run, tmp_path, images, monkeypatch
):
    monkeypatch.setitem(sources.EMBEDDED, "fashion-mnist", lambda: images)
    options = ["--checkpoint", str(trained_run), "--num-images", "5", "--num-steps", "2", "--seed", "3"]
    evaluate([*options, "--sampling-batch-size", "2", "--out", str(tmp_path / "numbers.json")])
    made = make("made", "--from", tmp_path / "numbers.json")
    expected = make("expected", *options, "--labels", "random", "--batch-size", "2")
    assert np.array_equal(made, expected)


def test_what_contradicts_a_record_or_is_none_is_refused_and_nothing_is_made(make, trained_run, tmp_path):
    make("first", "--checkpoint", trained_run, "--num-images", 1, "--num-steps", 1)
    record = tmp_path / "first" / "samples.json"
    with pytest.raises(ValueError, match="leave out --seed"):
        make("out", "--from", record, "--seed", 1)
    with pytest.raises(ValueError, match="of images with weights_sha256 = "):
        make("out", "--from", record, "--weights", "model")
    with pytest.raises(ValueError, match="settings.json does not say checkpoint: .* samples.json"):
        make("out", "--from", record.with_name("settings.json"))
    old = json.loads(record.read_text())
    del old["sampler"]
    record.write_text(json.dumps(old))
    with pytest.raises(ValueError, match="does not say sampler: .* of an earlier version"):
        make("out", "--from", record)
    assert not (tmp_path / "out").exists()
