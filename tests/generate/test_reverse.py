"""A real image to its noise and back."""

import numpy as np
import pytest
import torch

from sitvit.cli import sample
from sitvit.data.images import read_image
from sitvit.flow.guidance import Guidance
from sitvit.flow.samplers import FixedOde
from sitvit.generate.job import Job
from sitvit.generate.reverse import reverse
from sitvit.generate.samples import write_image
from sitvit.generate.trained import open_trained


@pytest.fixture
def image(images, tmp_path):
    write_image(tmp_path / "real.png", images.read(0))
    return tmp_path / "real.png"


def job(run, sampler, scale=1.0) -> Job:
    return Job(open_trained(str(run)), 1, [3], 0, sampler, Guidance(scale), 1)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_an_image_comes_back_with_an_error_of_the_order_of_the_steps(trained_run, image, scale):
    """RK4 has order 4: half the steps, 16 times the error; 4 leaves room for steps that are not small."""
    errors = [reverse(job(trained_run, FixedOde("rk4", n), scale), image).latent_error for n in (8, 16)]
    assert errors[1] < max(errors[0] / 4, 1e-5)  # float32's rounding over the way
    assert errors[1] < 1e-2


def test_the_third_image_comes_of_the_noise(trained_run, image):
    """The noise, sampled by the job's own way, gives the third image; it is not the latents handed on."""
    made = job(trained_run, FixedOde("heun", 20))
    found = reverse(made, image)
    velocity = made.velocity(torch.tensor([3]))
    with torch.no_grad():
        state = made.sampler.sample(velocity, made.trained.flow_path, "velocity", found.noise, None).state
    again = (127.5 * made.decode(state) + 128).clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0)
    assert np.abs(again.numpy().astype(int) - found.images[2]).max() <= 1
    assert np.array_equal(found.images[0], read_image(image))


def test_the_script_writes_the_three_and_says_the_error(trained_run, image, tmp_path, capsys):
    command = ["--checkpoint", str(trained_run), "--reverse", str(image), "--labels", "3"]
    sample([*command, "--out", str(tmp_path / "out"), "--num-steps", "4"])
    (path,) = (tmp_path / "out").iterdir()
    assert read_image(path).shape == (32, 3 * 34 - 2, 3)
    assert np.array_equal(read_image(path)[:, :32], read_image(image))
    assert "rmse after noise and back" in capsys.readouterr().out
    with pytest.raises(ValueError, match="is there already"):
        sample([*command, "--out", str(tmp_path / "out"), "--num-steps", "4"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--labels", "3", "--sampler", "sit-sde"], "draws noise on its way and cannot be run back"),
        (["--labels", "3", "--image-size", "32", "48"], "crops to a square"),
        (["--labels", "3", "--num-images", "2"], "leave out --num-images"),
        (["--labels", "3", "--batch-size", "2"], "leave out --batch-size"),
        ([], "needs the image's class"),
        (["--labels", "3", "4"], "needs the image's class"),
    ],
)
def test_what_cannot_be_run_back_is_refused(trained_run, image, tmp_path, options, words):
    command = ["--checkpoint", str(trained_run), "--reverse", str(image), "--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=words):
        sample([*command, *options])
    assert not (tmp_path / "out").exists()
