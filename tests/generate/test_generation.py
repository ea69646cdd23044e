"""Image i is a pure function of (weights, settings, seed, i); more of it in test_invariance.py."""

import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from sitvit.data.images import read_image
from sitvit.flow.guidance import Guidance
from sitvit.flow.samplers import AdaptiveOde, FixedOde, Sde
from sitvit.generate import draws, generation
from sitvit.generate import job as job_module
from sitvit.generate.draws import keys_of, resolve_labels
from sitvit.generate.generation import generate
from sitvit.generate.job import Job
from sitvit.generate.samples import Samples
from sitvit.generate.trained import of_checkpoint
from sitvit.generate.trajectory import trajectory
from sitvit.train.checkpoint import find_checkpoint
from sitvit.train.loop import train

NAMES = ["cat", "dog", "10"]


@pytest.fixture(scope="module")
def checkpoint(trained_run):
    return find_checkpoint(str(trained_run))


@pytest.fixture
def run(checkpoint, tmp_path):
    """run(name, ...) generates 10 images in three steps into a folder of that name."""

    def make(name="out", at=checkpoint, **changes) -> Path:
        settings = {
            "weights": "ema", "num_images": 10, "labels": "balanced", "seed": 0,
            "sampler": FixedOde("heun", 3), "guidance": Guidance(1.5), "batch_size": 4,
            "autoencoder_name": None,
        }  # fmt: skip
        return generate(at, out=tmp_path / name, **{**settings, **changes})

    return make


def pictures(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "images").iterdir()}


def pixels(folder) -> np.ndarray:
    made = Samples(folder)
    return np.stack([made.read(i) for i in range(len(made))]).astype(int)


def noise_of(indices, seed=0, draw=0):
    return draws.noise_of(keys_of(seed, indices), (4, 8, 8), draw)


def labels_of(rule, indices, num_classes, seed):
    return draws.labels_of(rule, indices, keys_of(seed, indices), num_classes)


def job(checkpoint, sampler) -> Job:
    return Job(of_checkpoint(checkpoint), 2, "balanced", 0, sampler, Guidance(), 2)


def test_steps_too_few_for_a_diffusion_are_said_before_the_first_image(checkpoint, capsys):
    job(checkpoint, Sde(num_steps=10, diffusion="constant", last_step="Euler"))
    said = capsys.readouterr().out
    assert "diffusion constant (norm 1), num_steps 10" in said
    assert "num_steps 100 would do" in said
    job(checkpoint, Sde(num_steps=100, diffusion="constant", last_step="Euler"))
    job(checkpoint, Sde())
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="diffusion SBDM .* num_steps 2 .* num_steps 25 would do"):
        job(checkpoint, Sde(num_steps=2, diffusion="SBDM"))


def test_a_batch_is_no_larger_than_the_images_and_made_of_whole_blocks(checkpoint):
    def batch_size(num_images, asked, method):
        sampler = AdaptiveOde(method)
        return Job(
            of_checkpoint(checkpoint), num_images, "balanced", 0, sampler, Guidance(), asked
        ).batch_size

    assert [batch_size(*case, "dopri5") for case in ((3, 64), (64, 3), (3, 3))] == [3, 3, 3]
    assert [batch_size(*case, "dopri5_per_image") for case in ((3, 64), (64, 3), (64, 12))] == [8, 8, 16]


def test_a_network_that_knows_no_class_unknown_is_sampled_unguided(run, tiny_config, tmp_path):
    train(tiny_config("all-classes", "model.class_dropout_prob=0"))
    at = find_checkpoint(str(tmp_path / "all-classes"))
    assert len(pictures(run(at=at, guidance=Guidance()))) == 10
    with pytest.raises(ValueError, match="no null label .*cannot be guided"):
        run("guided", at=at)


def test_guidance_of_a_bfloat16_network_is_computed_in_float32(checkpoint):
    trained = of_checkpoint(checkpoint)
    network = trained.network.to(torch.bfloat16)
    labels, x, t = torch.tensor([1, 2]), torch.randn(2, 4, 8, 8), torch.full((2,), 0.3)
    velocity = job_module.bind(trained, FixedOde("heun", 3), Guidance(1.5), labels, network.null_label)
    with torch.no_grad():
        found = velocity(x, t)
        both = network(torch.cat([x, x]).bfloat16(), torch.cat([t, t]), torch.cat([labels, labels * 0 + 10]))
    assert both.dtype == torch.bfloat16
    wanted, null = both.float().chunk(2)
    # A rounding of a bfloat16 anywhere would be 4e-3.
    assert torch.allclose(found, null + 1.5 * (wanted - null), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["dopri5", "dopri5_per_image"])
def test_a_tolerance_that_float32_cannot_meet_is_refused_before_a_folder_is_taken(run, tmp_path, method):
    with pytest.raises(ValueError, match="rtol 1e-12 is finer than the state's rounding"):
        run("fine", sampler=AdaptiveOde(method, rtol=1e-12))
    assert not (tmp_path / "fine").exists()


@pytest.mark.parametrize("sampler", [AdaptiveOde("dopri5"), FixedOde("heun", 3)], ids=lambda s: s.name)
def test_a_signal_is_heeded_at_the_next_call_of_the_network_and_the_job_continues(run, monkeypatch, sampler):
    calls = []
    bound = job_module.bind

    def bind(*arguments):
        velocity = bound(*arguments)

        def signalled(x, t):
            calls.append(1)
            if len(calls) == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            return velocity(x, t)

        return signalled

    with monkeypatch.context() as patch:
        patch.setattr(job_module, "bind", bind)
        with pytest.raises(KeyboardInterrupt, match="the same command continues"):
            run("stopped", sampler=sampler)
    assert len(calls) == 9
    assert pictures(run("stopped", sampler=sampler)) == pictures(run("whole", sampler=sampler))


def test_noise_of_an_image_is_the_same_bits_in_every_batch():
    whole = noise_of(range(8))
    for size in (1, 3, 8):
        parts = [noise_of(range(i, min(i + size, 8))) for i in range(0, 8, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert len(whole.flatten(1).unique(dim=0)) == 8
    assert not torch.equal(noise_of(range(8), seed=1), whole)


@pytest.mark.parametrize(
    "sampler",
    [FixedOde("heun", 3), Sde(num_steps=6), AdaptiveOde("dopri5_per_image")],
    ids=lambda sampler: sampler.name,
)
def test_batches_of_1_and_8_give_the_same_images_within_rounding(run, sampler):
    """uint8 truncates, so a value at a boundary may move by one."""
    one = pixels(run("one", batch_size=1, sampler=sampler))
    eight = pixels(run("eight", batch_size=8, sampler=sampler))
    assert np.abs(one - eight).max() <= 1
    assert (one != eight).mean() < 1e-3


def test_images_and_labels_do_not_depend_on_how_many_are_made(run):
    few, many = run("few", num_images=6), run("many", num_images=10)
    assert pictures(few).items() <= pictures(many).items()
    assert Samples(few).labels.tolist() == Samples(many).labels.tolist()[:6]


@pytest.mark.parametrize("num_processes", [2, 3])
def test_any_number_of_processes_makes_the_same_bytes(run, monkeypatch, num_processes):
    whole = pictures(run("whole"))
    original = generation._write_missing

    def in_turn(out, job, index, count):
        for process in reversed(range(num_processes)):
            original(out, job, process, num_processes)

    monkeypatch.setattr(generation, "_write_missing", in_turn)
    assert pictures(run("split")) == whole


@pytest.mark.parametrize("num_processes", [1, 3, 8])
def test_50001_images_are_shared_out_once_each_in_batches_that_do_not_depend_on_the_processes(
    checkpoint, num_processes
):
    job = Job(of_checkpoint(checkpoint), 50_001, "random", 0, FixedOde(), Guidance(), 64)
    shares = [job.batches_of(process, num_processes) for process in range(num_processes)]
    batches = sorted((batch for share in shares for batch in share), key=lambda batch: batch.start)
    assert batches == [range(start, start + 64) for start in range(0, 50_001, 64)]  # the last one passes N
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_exactly_the_asked_number_is_made_and_all_differ(run):
    made = run(num_images=7, batch_size=3)
    assert sorted(pictures(made)) == [f"{i:06d}.png" for i in range(7)]
    assert len(set(pictures(made).values())) == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_images": 11}, "num_images"),
        ({"seed": 1}, "seed"),
        ({"weights": "model"}, "weights"),
        ({"labels": [1]}, "labels"),
        ({"batch_size": 5}, "batch_size"),
        ({"guidance": Guidance(2.0)}, "cfg_scale = 1.5, not 2"),
        ({"guidance": Guidance(1.5, (0.1, 0.9))}, "guidance_interval"),
        ({"guidance": Guidance(1.5, channels=3)}, "guided_channels = None, not 3"),
        ({"guidance": Guidance(1.5, rescale=0.7)}, "guidance_rescale"),
        ({"sampler": FixedOde("heun", 4)}, "sampler.num_steps|sampler.name"),
        ({"sampler": FixedOde("heun", 3, shift=2.0)}, "sampler.shift = 1.0, not 2.0"),
        ({"sampler": Sde(num_steps=3)}, "sampler"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(run, change, words):
    before = pictures(run())
    with pytest.raises(ValueError, match=words):
        run(**change)
    assert pictures(run()) == before


def test_a_folder_of_other_pictures_is_not_written_into(run, tmp_path):
    (tmp_path / "holiday.png").write_bytes(b"")
    with pytest.raises(ValueError, match="no samples"):
        run("")
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.png"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "images/000003.png").unlink(), "lacks 000003.png"),
        (lambda folder: shutil.copy(folder / "images/000003.png", folder / "images/x.png"), "x.png"),
    ],
)
def test_finished_samples_are_exactly_the_promised_images(run, change, words):
    folder = run()
    change(folder)
    with pytest.raises(ValueError, match=words):
        Samples(folder)


def test_guidance_weights_and_labels_each_change_the_image(run):
    base = pixels(run("base"))
    for name, change in {
        "g": {"guidance": Guidance(4.0)}, "w": {"weights": "model"}, "l": {"labels": [9]}, "s": {"seed": 5}
    }.items():  # fmt: skip
        assert (pixels(run(name, **change)) != base).mean() > 0.01


def test_the_record_names_everything_that_an_image_follows_from(run, checkpoint):
    record = Samples(run()).record
    assert record["weights"] == "ema_0.9"
    assert record["weights_sha256"] == checkpoint.weights_sha256("ema_0.9")
    assert record["num_evaluations"] == 6
    assert record["image_labels"] == list(range(10))
    for key in ("autoencoder", "uint8_rule", "precision", "seed", "versions", "command", "class_names"):
        assert key in record


def test_the_steps_of_an_sde_have_noise_of_their_own():
    found = torch.stack([noise_of(range(4), draw=draw) for draw in range(3)])
    assert len(found.flatten(2).flatten(0, 1).unique(dim=0)) == 12
    assert torch.equal(noise_of(range(2, 3), draw=2), found[2][2:3])


def test_an_adaptive_method_reports_the_evaluations_that_it_took(run, capsys):
    record = Samples(run(sampler=AdaptiveOde("dopri5"))).record
    low, high = record["num_evaluations"]
    assert 6 < low <= high
    shown = capsys.readouterr().out
    assert f"network evaluations (NFE) {low if low == high else f'{low} to {high}'}\n" in shown
    assert "dopri5 shares its step over a batch" in shown


def test_an_adaptive_job_killed_before_its_record_is_finished_by_the_same_command(run, capsys):
    """All images are there, so nobody knows how many evaluations they took."""
    sampler = AdaptiveOde("dopri5_per_image")
    folder = run(sampler=sampler)
    images = pictures(folder)
    (folder / "samples.json").unlink()
    assert Samples(run(sampler=sampler)).record["num_evaluations"] is None
    assert pictures(folder) == images
    assert "network evaluations (NFE) not known" in capsys.readouterr().out


def test_a_network_is_sampled_as_what_it_was_trained_to_predict(run, checkpoint, monkeypatch):
    """The checkpoint says noise: the images are those of the velocity that the noise implies."""
    base = pixels(run("velocity"))
    monkeypatch.setitem(checkpoint.record, "prediction", "noise")
    made = run("noise")
    assert (pixels(made) != base).mean() > 0.01
    record = Samples(made).record
    assert record["prediction"] == "noise"


def test_published_channels_are_those_of_a_latent_of_four(run):
    base, published = pixels(run("all")), pixels(run("three", guidance=Guidance(1.5, channels=3)))
    assert (base != published).any()


def test_a_trajectory_begins_with_the_noise_that_the_image_comes_of(checkpoint):
    made = job(checkpoint, FixedOde("heun", 3))
    frames = trajectory(made, 25)
    assert len(frames) == 4
    decoded = torch.from_numpy(frames[0]) / 127.5 - 1
    assert torch.allclose(decoded, made.decode(noise_of(range(2))).clamp(-1, 1).movedim(1, -1), atol=1 / 127)


def test_a_job_killed_while_its_settings_were_written_continues(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".settings.json.123.partial").write_text('{"form')
    assert len(pictures(run())) == 10


def test_a_finished_folder_is_left_alone(run, monkeypatch, capsys):
    run()
    monkeypatch.setattr(generation, "_write_missing", None)
    run()
    assert "all 10 images are there already" in capsys.readouterr().out


@pytest.mark.parametrize("label", [-1, 10, 1000])
def test_a_label_out_of_range_names_the_limit(run, label, tmp_path):
    with pytest.raises(ValueError, match=f"label {label} is out of range.*labels 0 to 9"):
        run(labels=[0, label])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_images": 0}, "num_images must be at least 1"),
        ({"batch_size": -1}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"weights": "ema_0.5"}, "has no weights called"),
        ({"labels": "sorted"}, "balanced, random"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_makes_no_sense_is_named_before_the_first_image(run, change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(**change)
    assert not (tmp_path / "out" / "images").exists()


def test_another_autoencoder_is_refused(run, tmp_path):
    from sitvit.data.autoencoder import new_autoencoder

    new_autoencoder(32, [8, 8, 8], 4, 4, seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="not the one that made the latents"):
        run(autoencoder_name=str(tmp_path / "other"))


def test_an_output_that_is_not_finite_names_the_images(run, monkeypatch, checkpoint):
    network = checkpoint.load_network("model")
    with torch.no_grad():
        network.final_layer.linear.bias.fill_(float("nan"))
    monkeypatch.setattr(type(checkpoint), "load_network", lambda self, name: network)
    with pytest.raises(FloatingPointError, match="images 0 to 3: "):
        run()


def test_labels_follow_their_rule_and_index_alone():
    assert labels_of("balanced", range(3, 8), 4, 0).tolist() == [3, 0, 1, 2, 3]
    assert labels_of([7, 9], range(3), 10, 0).tolist() == [7, 9, 7]
    whole = labels_of("random", range(4000), 4, 0)
    assert torch.equal(labels_of("random", range(1000, 4000), 4, 0), whole[1000:])
    counts = torch.bincount(whole)
    assert len(counts) == 4
    assert (counts - 1000).abs().max() < 5 * (4000 * 0.25 * 0.75) ** 0.5  # five standard deviations
    assert not torch.equal(labels_of("random", range(4000), 4, 1), whole)


def test_a_class_is_found_by_name_before_number(capsys):
    assert resolve_labels(["dog", "0"], NAMES) == [1, 0]
    assert resolve_labels(["10"], NAMES) == [2]
    assert "class 2" in capsys.readouterr().out
    assert resolve_labels(["random"], NAMES) == "random"
    with pytest.raises(ValueError, match=re.escape("there is no class 'dgo'; did you mean dog")):
        resolve_labels(["dgo"], NAMES)


def test_pictures_are_plain_rgb_png(run):
    assert read_image(run() / "images" / "000000.png").shape == (32, 32, 3)


@pytest.mark.parametrize(
    "left", [None, b"", bytes(900), b"\x89PNG\r\n\x1a\n"], ids=["gone", "empty", "zeros", "begun"]
)
def test_an_image_that_went_missing_or_was_cut_short_is_made_again_to_the_same_bytes(run, left):
    """A loss of power may cost the end of a file that has its name already."""
    folder = run()
    whole = pictures(folder)
    path = folder / "images" / "000003.png"
    path.unlink() if left is None else path.write_bytes(left)
    with pytest.raises(ValueError, match="000003.png.* the same scripts/sample.py command makes it again"):
        Samples(folder).read(3)
    assert pictures(run()) == whole
