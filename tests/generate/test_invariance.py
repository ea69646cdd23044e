"""A SiT by an ODE, a SiT by an SDE, a DiT: the same images whatever the batch, the processes, the kills."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sitvit.cli import sample
from sitvit.config import Config, load_config
from sitvit.flow.guidance import Guidance
from sitvit.flow.ode import PER_IMAGE
from sitvit.flow.samplers import AdaptiveOde, Ddim, Ddpm, FixedOde, Sde
from sitvit.generate import samples
from sitvit.generate.generation import write
from sitvit.generate.job import Job
from sitvit.generate.reverse import reverse
from sitvit.generate.samples import Samples, write_image
from sitvit.generate.trained import open_trained
from sitvit.models.convert import save_official
from sitvit.models.dit import DiT

from ..conftest import TINY

SAMPLERS = {"heun": FixedOde("heun", 3), "sde": Sde(num_steps=6), "dit": Ddpm(num_steps=5)}


@pytest.fixture(scope="module")
def dit_run(cache_folder, tmp_path_factory) -> Path:
    """A finished run of a tiny DiT."""
    from sitvit.train.loop import train

    folder = tmp_path_factory.mktemp("dit")
    path = folder / "config.yaml"
    path.write_text(TINY.format(run=folder / "run", name="DiT-S/2", latents=cache_folder))
    train(load_config(path, ["train.path=ddpm", "train.prediction=noise", "train.lr=1e-2"], Config))
    return folder / "run"


@pytest.fixture(params=SAMPLERS)
def job(request, trained_run, dit_run):
    """job(batch_size): ten guided images of each kind of network and sampler."""
    trained = open_trained(str(dit_run if request.param == "dit" else trained_run))

    def make(batch_size: int) -> Job:
        return Job(trained, 10, "random", 0, SAMPLERS[request.param], Guidance(1.5), batch_size)

    return make


def made_by(job: Job, num_processes: int) -> np.ndarray:
    """All images of the job, the last process first; each exactly once."""
    found: dict[int, np.ndarray] = {}
    for process in reversed(range(num_processes)):
        for indices, images in job.images(process, num_processes):
            assert not found.keys() & set(indices)
            found |= dict(zip(indices, images, strict=True))
    assert sorted(found) == [*range(job.num_images)]
    return np.stack([found[index] for index in sorted(found)])


def test_one_two_or_three_processes_make_the_same_bits(job):
    alone = made_by(job(3), 1)
    assert len({image.tobytes() for image in alone}) == 10
    for num_processes in (2, 3):
        assert np.array_equal(made_by(job(3), num_processes), alone)


def test_a_job_killed_within_a_batch_continues_to_the_same_bytes(job, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def dying(path, image):
        if path.name == "000004.png":
            path.write_bytes(b"half a png")
            raise Killed
        write_image(path, image)

    with monkeypatch.context() as patch:
        patch.setattr(samples, "write_image", dying)
        with pytest.raises(Killed):
            write(job(3), tmp_path / "killed")
    assert len([*(tmp_path / "killed" / "images").iterdir()]) == 5
    with pytest.raises(ValueError, match="unfinished"):
        Samples(tmp_path / "killed")
    for name in ("killed", "whole"):
        write(job(3), tmp_path / name)
    for index in range(10):
        killed, whole = (samples.image_path(tmp_path / name, index) for name in ("killed", "whole"))
        assert killed.read_bytes() == whole.read_bytes()


def test_pixels_before_rounding_differ_by_less_than_1e_4_between_batches_of_1_and_8(job):
    """Of a range from -1 to 1; kernels round otherwise for other shapes, and nothing more."""
    one, eight = job(1), job(8)
    alone = torch.cat([one.decode(one.latents(range(i, i + 1))) for i in range(8)])
    together = eight.decode(eight.latents(range(8)))
    assert (alone - together).abs().max() < 1e-4


def test_latents_of_the_method_with_a_step_for_each_image_are_the_same_bits_at_any_batch_size(trained_run):
    """Rounding alone would tip a step here and there: images 8k .. 8k + 7 are always sampled together."""
    trained = open_trained(str(trained_run))

    def latents(batch_size, ranges):
        job = Job(trained, 10, "random", 0, AdaptiveOde(PER_IMAGE), Guidance(1.5), batch_size)
        return torch.cat([job.latents(indices) for indices in ranges])

    whole = latents(10, [range(10)])
    assert len(whole.flatten(1).unique(dim=0)) == 10
    assert torch.equal(latents(1, [range(i, i + 1) for i in (0, 7, 9)]), whole[[0, 7, 9]])
    assert torch.equal(latents(7, [range(5, 10)]), whole[5:])


def test_a_trained_dit_is_sampled_from_its_run_by_its_own_sampler(dit_run, tmp_path, capsys):
    sample(["--checkpoint", str(dit_run), "--num-images", "3", "--num-steps", "4", "--cfg-scale", "1.5",
            "--out", str(tmp_path / "out"), "--trajectory"])  # fmt: skip
    record = Samples(tmp_path / "out").record
    assert (record["path"], record["sampler"]["name"], record["num_evaluations"]) == ("ddpm", "ddpm4", 4)
    assert (tmp_path / "out" / "trajectory.gif").is_file()
    assert "ema_0.9 at step 6" in capsys.readouterr().out


def test_an_official_dit_file_gives_the_images_of_the_network_that_it_holds(tmp_path):
    network = DiT(input_size=8, hidden_size=384, depth=1, num_heads=6, num_classes=10, learn_sigma=True)
    for parameter in network.parameters():  # a fresh network has gates of zero and says nothing
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    network.save_pretrained(tmp_path / "folder")
    save_official(network, tmp_path / "DiT-S-2.pt", ".pt")
    options = ["--autoencoder", "fashion-autoencoder", "--labels", "7", "--num-images", "2"]
    for source in ("folder", "DiT-S-2.pt"):
        out = ["--num-steps", "3", "--out", str(tmp_path / "out" / source)]
        sample(["--checkpoint", str(tmp_path / source), *options, *out])
    folder, file = (Samples(tmp_path / "out" / source) for source in ("folder", "DiT-S-2.pt"))
    assert file.record["sampler"]["name"] == "ddpm3"
    assert file.labels.tolist() == [7, 7]
    for index in range(2):
        assert np.array_equal(file.read(index), folder.read(index))


def test_ddim_carries_an_image_to_noise_and_back_and_what_draws_noise_refuses(dit_run, images, tmp_path):
    write_image(tmp_path / "real.png", images.read(0))
    trained = open_trained(str(dit_run))

    def error(sampler) -> float:
        return reverse(Job(trained, 1, [3], 0, sampler, Guidance(), 1), tmp_path / "real.png").latent_error

    assert error(Ddim(num_steps=200)) < error(Ddim(num_steps=20)) / 2  # order 1: about a tenth
    for sampler in (Ddim(eta=0.5), Ddpm()):
        with pytest.raises(ValueError, match="cannot be run back"):
            error(sampler)
