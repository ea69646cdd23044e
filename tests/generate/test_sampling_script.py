"""scripts/sample.py: sources, seeds, the npz of the ADM suite, and what it refuses."""

import shutil

import numpy as np
import pytest

from sitvit.cli import sample
from sitvit.data.images import read_image
from sitvit.generate.samples import Samples


@pytest.fixture
def make(trained_run, tmp_path):
    def run(name, *options, at=trained_run):
        common = ["--checkpoint", str(at), "--num-steps", "2", "--out", str(tmp_path / name)]
        sample([*common, *map(str, options)])
        made = Samples(tmp_path / name)
        return np.stack([made.read(i) for i in range(len(made))])

    return run


def test_a_seed_of_a_range_gives_the_first_image_of_that_seed(make):
    range_of_seeds = make("each", "--seeds", "3-5", "--labels", 1)
    for i in range(3):
        alone = make(f"seed{i}", "--seed", 3 + i, "--num-images", 3, "--labels", 1)
        assert np.array_equal(range_of_seeds[i], alone[0])


def test_the_npz_holds_the_very_images_under_the_name_that_adm_reads(make, tmp_path):
    images = make("out", "--num-images", 3, "--npz", "--image-size", 32, 48)
    with np.load(tmp_path / "out" / "samples_3x32x48x3.npz") as archive:
        assert archive.files == ["arr_0"]
        assert archive["arr_0"].dtype == np.uint8
        assert np.array_equal(archive["arr_0"], images)


def test_a_step_a_model_folder_and_its_copy_elsewhere_give_the_same_images(make, trained_run, tmp_path):
    options = ("--num-images", 2, "--labels", 0)
    expected = make("run", *options, "--step", 3)
    inside = trained_run / "checkpoints" / "step_0000003" / "ema_0.9"
    assert np.array_equal(make("inside", *options, at=inside), expected)
    shutil.copytree(inside, tmp_path / "copy")
    copied = make("copied", *options, "--autoencoder", "fashion-autoencoder", at=tmp_path / "copy")
    assert np.array_equal(copied, expected)
    with pytest.raises(ValueError, match="give --autoencoder"):
        make("lost", *options, at=tmp_path / "copy")
    with pytest.raises(ValueError, match="no checkpoint of step 4; it has 3, 6"):
        make("other", *options, "--step", 4)


def test_autoguidance_leads_away_from_another_step(make, trained_run):
    weak = trained_run / "checkpoints" / "step_0000003"
    plain = make("plain", "--num-images", 2)
    guided = make("guided", "--num-images", 2, "--cfg-scale", 3, "--autoguidance", weak)
    assert (plain != guided).any()
    with pytest.raises(ValueError, match="autoguidance.weights"):
        make("guided", "--num-images", 2, "--cfg-scale", 3)
    with pytest.raises(ValueError, match="does nothing"):
        make("off", "--num-images", 2, "--autoguidance", weak)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seeds", "0-3", "--seed", "1"], "leave out --seed"),
        (["--sampler", "dit"], "is a SiT, which ddpm2 cannot sample"),
        (["--sampler", "ditt"], "no sampler is called 'ditt'"),
        (["--image-size", "30"], "autoencoder 4 x patch 2 = 8; the nearest legal values are 24 and 32"),
        (["--labels", "balanced", "3"], "balanced is a rule for all images; it stands alone"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_made(make, options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        make("out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("sampler", ["heun", "sit-sde"])
def test_the_trajectory_changes_no_image_and_ends_in_them(make, tmp_path, sampler):
    options = ("--num-images", 3, "--batch-size", 2, "--sampler", sampler, "--num-steps", 5)
    images = make("plain", *options)
    assert np.array_equal(make("watched", *options, "--trajectory"), images)
    strip = read_image(tmp_path / "watched" / "trajectory.png")
    assert strip.shape == (2 * 34 - 2, 6 * 34 - 2, 3)  # two images; the noise and five steps
    assert np.array_equal(strip[:32, -32:], images[0])
    assert np.array_equal(strip[34:, -32:], images[1])
    assert (tmp_path / "watched" / "trajectory.gif").read_bytes().startswith(b"GIF89a")
