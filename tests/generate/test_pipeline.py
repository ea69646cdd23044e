"""The diffusers pipeline gives the images of scripts/sample.py, and its folder says all that it needs."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import sitvit
from sitvit.data.images import read_image
from sitvit.flow.guidance import Guidance
from sitvit.flow.samplers import FixedOde, Sde
from sitvit.generate.job import Job
from sitvit.generate.trained import open_trained
from sitvit.models.dit import DiT

from ..conftest import run_script


@pytest.fixture(scope="module")
def trained(trained_run):
    return open_trained(str(trained_run))


@pytest.fixture(scope="module")
def pipe(trained):
    made = sitvit.SiTPipeline.from_trained(trained)
    made.set_progress_bar_config(disable=True)
    return made


def native(trained, labels, seed, each=False, sampler=None, guidance=None):
    job = Job(
        trained, len(labels), labels, seed, sampler or FixedOde("heun", 3), guidance or Guidance(1.5), 50,
        seed_per_image=each,
    )  # fmt: skip
    return next(job.images())[1]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_one_generator_gives_the_images_of_its_seed_bit_for_bit(trained, pipe):
    made = pipe([3, 1, 9], guidance_scale=1.5, num_inference_steps=3, generator=seeded(7)).images
    assert np.array_equal(np.stack(made), native(trained, [3, 1, 9], 7))


def test_a_list_of_generators_gives_the_first_image_of_each_seed(trained, pipe):
    generators = [seeded(5), seeded(6)]
    made = pipe([0, 1], guidance_scale=1.5, num_inference_steps=3, generator=generators).images
    assert np.array_equal(np.stack(made), native(trained, [0, 1], 5, each=True))


def test_interval_channels_and_an_sde_are_the_same_too(trained, pipe):
    guidance = Guidance(2.0, (0.2, 0.8), channels=3)
    made = pipe(
        [0, 1], 2.0, 4, (0.2, 0.8), seeded(0), "latent", sampler="sit-sde", guided_channels=3
    ).images  # fmt: skip
    job = Job(trained, 2, [0, 1], 0, Sde(num_steps=4), guidance, 2)
    assert torch.equal(made, job.latents(range(2)))


def test_a_callback_sees_each_step_and_what_it_returns_is_taken(pipe):
    seen = []

    def watch(pipe, step, t, tensors):
        seen.append((step, t))
        return {"latents": torch.zeros_like(tensors["latents"])} if step == 3 else {}

    made = pipe([0], num_inference_steps=4, generator=seeded(0), output_type="latent",
                callback_on_step_end=watch).images  # fmt: skip
    assert seen == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert not made.any()


def test_output_types_show_the_same_image(pipe):
    call = {"class_labels": [0], "num_inference_steps": 2, "generator": seeded(0)}
    made = {kind: pipe(output_type=kind, **call).images for kind in ("np", "pt")}
    assert np.array_equal(made["pt"].permute(0, 2, 3, 1).numpy(), made["np"])
    pil = np.asarray(pipe(**call).images[0])
    assert np.abs(made["np"][0] * 255 - pil).max() <= 1.01  # rounding differs from truncation
    assert pipe(return_dict=False, **call)[0][0].size == (32, 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"class_labels": ["Bga"]}, "did you mean Bag"),
        ({"class_labels": [10]}, "label 10 is out of range"),
        ({"class_labels": [0, 1], "generator": [seeded(0)]}, "1 generators for 2 class labels"),
        ({"class_labels": [0], "output_type": "jpeg"}, "output_type must be one of"),
        ({"class_labels": [0], "sampler": "dit"}, "is a SiT, which ddpm250 cannot sample"),
        ({"class_labels": [0], "height": 30}, "nearest legal values are 24 and 32"),
        ({"class_labels": [0], "width": 0}, "image width 0 is not a multiple"),
        ({"class_labels": [0], "latents": torch.zeros(1, 4, 4, 4)}, "latents must be of shape"),
        ({"class_labels": ["random"]}, "is a rule of"),
        ({"class_labels": [1.5]}, "labels or names, got 1.5"),
        ({"class_labels": [0], "guidance_interval": (0.2,)}, "guidance_interval must be two numbers"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_an_argument_that_makes_no_sense_is_named(pipe, arguments, words):
    with pytest.raises(ValueError, match=words):
        pipe(**arguments)


def test_labels_may_be_numpys_and_torchs_numbers(pipe):
    call = {"num_inference_steps": 1, "output_type": "np"}
    expected = pipe([3, 1], generator=seeded(0), **call).images
    for labels in (np.array([3, 1]), torch.tensor([3, 1]), [np.int64(3), "1"]):
        assert np.array_equal(pipe(labels, generator=seeded(0), **call).images, expected)
    alone = pipe(3, generator=seeded(0), **call).images
    assert np.array_equal(pipe(torch.tensor(3), generator=seeded(0), **call).images, alone)


def test_another_size_and_half_precision_are_drawn(pipe, trained):
    made = pipe([0], num_inference_steps=2, height=32, width=48, generator=seeded(0)).images[0]
    assert made.size == (48, 32)
    job = Job(trained, 1, [0], 0, FixedOde("heun", 3), Guidance(), 1, precision="bfloat16")
    full = Job(trained, 1, [0], 0, FixedOde("heun", 3), Guidance(), 1)
    gap = (job.latents(range(1)) - full.latents(range(1))).abs().max()
    assert 0 < gap < 0.1  # bfloat16 has 8 bits of a value of about 3


def test_a_bfloat16_network_is_asked_at_times_that_bfloat16_could_not_tell_apart(pipe, tmp_path):
    """Below 1 it goes by 1/256; here by 1/415."""
    pipe.save_pretrained(tmp_path / "out")
    pipe = sitvit.SiTPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert pipe.transformer.dtype == torch.bfloat16
    asked = []
    handle = pipe.transformer.t_embedder.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0]))
    pipe.set_progress_bar_config(disable=True)
    pipe([0], num_inference_steps=400, sampler="sit-sde", generator=seeded(0), output_type="latent")
    handle.remove()
    times = torch.cat(asked)
    assert times.dtype == torch.float32
    assert len(times.unique()) == 400


def test_the_channels_statistics_go_with_the_pipeline(trained):
    mean, std = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]
    identity = dataclasses.replace(trained.autoencoder, channel_mean=mean, channel_std=std)
    pipe = sitvit.SiTPipeline.from_trained(dataclasses.replace(trained, autoencoder=identity))
    assert (pipe.config.channel_mean, pipe.config.channel_std) == (mean, std)


def test_an_export_loads_offline_in_a_fresh_process_and_gives_the_same_images(trained_run, trained, tmp_path):
    done = run_script("export_pipeline", trained_run, tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "class names" in (tmp_path / "out" / "README.md").read_text()
    program = """
import sys, numpy, torch, sitvit
pipe = sitvit.SiTPipeline.from_pretrained("out")
images = pipe(["Bag", 1], 1.5, 3, generator=torch.Generator().manual_seed(7)).images
numpy.save("images.npy", numpy.stack(images))
pipe.save_pretrained("again")
"""
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**__import__("os").environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "should be kept" not in loaded.stderr + loaded.stdout  # a warning of nothing
    bag = trained.class_names.index("Bag")
    assert np.array_equal(np.load(tmp_path / "images.npy"), native(trained, [bag, 1], 7))
    files = [p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file()]
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
        assert file.suffix in (".json", ".safetensors")
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert list(index["id2label"].values()) == trained.class_names
    assert str(tmp_path) not in json.dumps(index) + (tmp_path / "out" / "vae" / "config.json").read_text()
    again = run_script("export_pipeline", trained_run, tmp_path / "out", cwd=tmp_path)
    assert again.returncode == 2
    assert "is there already" in again.stderr


def test_a_dit_is_drawn_by_its_own_sampler_and_refuses_an_odes(trained, tmp_path):
    network = DiT(input_size=8, hidden_size=32, depth=2, num_heads=2, num_classes=3, learn_sigma=True).eval()
    network.save_pretrained(tmp_path / "dit")
    found = open_trained(str(tmp_path / "dit"), autoencoder="fashion-autoencoder")
    assert (found.path, found.default_sampler) == ("ddpm", "dit")
    pipe = sitvit.SiTPipeline.from_trained(found)
    pipe.set_progress_bar_config(disable=True)
    made = pipe([0, 2], 1.5, 4, generator=seeded(3), guided_channels=3, output_type="latent").images
    from sitvit.flow.samplers import find_sampler

    job = Job(found, 2, [0, 2], 3, find_sampler("dit", {"num_steps": 4}), Guidance(1.5, channels=3), 2)
    assert torch.equal(made, job.latents(range(2)))
    with pytest.raises(ValueError, match="is a DiT, which heun50 cannot sample"):
        pipe([0], sampler="heun")


def test_pngs_hold_the_very_pixels(trained, tmp_path):
    from sitvit.generate.generation import write

    job = Job(trained, 2, [0, 1], 0, FixedOde("heun", 2), Guidance(), 2)
    write(job, tmp_path / "out")
    images = next(job.images())[1]
    assert all(
        np.array_equal(read_image(tmp_path / "out" / "images" / f"{i:06d}.png"), images[i]) for i in range(2)
    )
