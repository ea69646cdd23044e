"""Training: resume is exact, the same command continues, nothing finished is lost."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sitvit import runtime
from sitvit.data.latents import LatentCache
from sitvit.data.stream import TrainingStream
from sitvit.flow.guidance import Guidance
from sitvit.flow.objective import Objective
from sitvit.flow.paths import find_path
from sitvit.flow.samplers import Sde
from sitvit.flow.times import TimeDistribution
from sitvit.generate.generation import generate
from sitvit.generate.samples import Samples
from sitvit.models.presets import preset
from sitvit.models.sit import SiT
from sitvit.models.vit5 import ViT5
from sitvit.train import preparation, step, trainer
from sitvit.train.checkpoint import WEIGHTS, find_checkpoint, latest_checkpoint, open_checkpoint
from sitvit.train.ema import Ema, constant_decay
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics
from sitvit.train.optim import learning_rate, make_optimizer


def state(run, at=6):
    """Every tensor of a checkpoint by file and name, and the logged losses."""
    folder = find_checkpoint(str(run)).folder.parent / f"step_{at:07d}"
    tensors = {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in folder.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(run)]
    return tensors, rows


def assert_same(a, b):
    assert a[0].keys() == b[0].keys()
    assert a[1] == b[1]
    assert all(torch.equal(a[0][key], b[0][key]) for key in a[0])


class Killed(Exception):
    """Stands for kill -9: no handler of ours sees it."""


def kill_at(monkeypatch, at):
    """Let `at` steps run, then die before the next one's update."""
    original, count = trainer.training_step, [0]

    def dying(*arguments):
        if count[0] == at:
            raise Killed
        count[0] += 1
        return original(*arguments)

    monkeypatch.setattr(trainer, "training_step", dying)


@pytest.mark.parametrize("name", ["SiT-S/2", "SiT-ViT5-S/2"])
@pytest.mark.parametrize("at", [0, 2, 3, 5])
def test_a_killed_run_continues_bit_for_bit(tiny_config, tmp_path, monkeypatch, name, at):
    """Weights, averages, moments, rates and logged losses, killed before or after a save at step 3."""
    train(tiny_config("whole", name=name))
    with monkeypatch.context() as patch:
        kill_at(patch, at)
        with pytest.raises(Killed):
            train(tiny_config("killed", name=name))
    train(tiny_config("killed", name=name))
    assert_same(state(tmp_path / "whole"), state(tmp_path / "killed"))


def test_a_signal_saves_the_step_and_the_same_command_continues(tiny_config, tmp_path, monkeypatch):
    import os
    import signal

    train(tiny_config("whole"))
    original, count = trainer.training_step, [0]

    def signalled(*arguments):
        count[0] += 1
        if count[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "training_step", signalled)
        with pytest.raises(runtime.Stopped, match="stopped after step 4, which is saved"):
            train(tiny_config("stopped", "train.save_every=1000000"))
    assert latest_checkpoint(tmp_path / "stopped").step == 4  # told with step 3, read after step 4
    train(tiny_config("stopped"))
    assert_same(state(tmp_path / "whole"), state(tmp_path / "stopped"))


def test_how_often_is_saved_and_logged_changes_no_weight(tiny_config, tmp_path):
    train(tiny_config("often", "train.save_every=1", "train.log_every=1", "train.keep_checkpoints=9"))
    train(tiny_config("seldom", "train.save_every=100", "train.log_every=100"))
    often, seldom = state(tmp_path / "often")[0], state(tmp_path / "seldom")[0]
    assert all(torch.equal(often[key], seldom[key]) for key in often)
    assert len(list((tmp_path / "often" / "checkpoints").iterdir())) == 6


def test_a_finished_run_is_left_alone_and_can_be_made_longer(tiny_config, tmp_path, capsys):
    train(tiny_config("run"))
    train(tiny_config("run"))
    assert "all 6 steps are done" in capsys.readouterr().out
    train(tiny_config("run", "train.num_steps=8"))
    assert latest_checkpoint(tmp_path / "run").step == 8


@pytest.mark.parametrize(
    "override", ["train.lr=2e-3", "train.batch_size=4", "train.seed=1", "model.depth=1", "data.flip=false"]
)
def test_another_setting_is_another_run(tiny_config, override):
    train(tiny_config("run"))
    with pytest.raises(ValueError, match=f"{override.split('=')[0]} was"):
        train(tiny_config("run", override, "train.num_steps=8"))


def test_a_checkpoint_holds_raw_and_averaged_weights_and_they_differ(trained_run):
    checkpoint = find_checkpoint(str(trained_run))
    assert checkpoint.networks == ["ema_0.9", "model"]
    model, average = (checkpoint.load_network(name) for name in checkpoint.networks)
    differ = [
        not torch.equal(a, b)
        for (name, a), b in zip(model.named_parameters(), average.parameters(), strict=True)
        if name != "pos_embed"
    ]
    assert sum(differ) > len(differ) / 2
    with pytest.raises(ValueError, match="has no weights called 'ema_0.5'; it has ema_0.9, model"):
        checkpoint.weights_name("ema_0.5")


def test_the_average_follows_its_recursion_in_float64(cache):
    small = {"hidden_size": 64, "depth": 2, "num_heads": 2}
    model = SiT(**{**preset("SiT-ViT5-S/2"), **small}, input_size=8).bfloat16()
    ema = Ema(model, constant_decay(0.9999))
    replay = {name: tensor.double() for name, tensor in model.state_dict().items()}
    start = {name: tensor.clone() for name, tensor in replay.items()}
    for number in range(20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        ema.update(model.state_dict(), number + 1)
        for name, tensor in model.state_dict().items():
            replay[name] = 0.9999 * replay[name] + 0.0001 * tensor.double()
    for name, average in ema.state.items():
        assert average.dtype == torch.float32
        moved, expected = (average.double() - start[name]).norm(), (replay[name] - start[name]).norm()
        assert moved == pytest.approx(expected.item(), rel=0.01)


def test_the_rate_warms_up_holds_and_decays():
    rates = [learning_rate(s, 1.0, 10, warmup_steps=4, decay_steps=3) for s in range(10)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 2 / 3, 1 / 3])
    assert learning_rate(5, 1.0, 10) == 1


def test_training_lowers_the_loss(tiny_config, tmp_path):
    train(tiny_config("run", "train.num_steps=150", "train.log_every=10", "train.lr=1e-2"))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(10, 151, 10))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert all(math.isfinite(row["grad_norm"]) for row in rows)


@pytest.mark.parametrize("name", ["SiT-S/2", "SiT-ViT5-S/2"])
def test_one_batch_is_learnt_by_heart(tiny_config, tmp_path, monkeypatch, name):
    """The same images, noise and times at each step have one answer, so the loss can fall to zero.

    It begins with what predicting zero costs, as a fresh network does, and ends below 2e-4 of that here.
    """
    original = TrainingStream.batch
    monkeypatch.setattr(TrainingStream, "batch", lambda self, step, slots: original(self, 0, slots))
    settings = ["num_steps=100", "log_every=1", "lr=1e-2", "batch_size=2", "decay_steps=40"]
    train(tiny_config("run", *(f"train.{each}" for each in settings), "train.trackers=[]", name=name))
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[0] > 1
    assert losses[-1] < 1e-3 * losses[0]


def test_a_step_is_the_textbook_step(cache):
    """Loss, clipped gradient and AdamW written out against the loop's one step."""
    from accelerate import Accelerator

    torch.manual_seed(1)
    arguments = {**preset("SiT-S/2"), "hidden_size": 32, "depth": 1, "num_heads": 2}
    ours = SiT(**arguments, input_size=8, num_classes=10)
    theirs = SiT(**arguments, input_size=8, num_classes=10)
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.load_state_dict(ours.state_dict())
    batch = TrainingStream(cache, 0, 8, False, 0.1, 10).batch(0, range(8))
    handle = Accelerator()
    optimizer = make_optimizer(ours, 1.0, (0.9, 0.99), 0.01)
    wrapped, _ = handle.prepare(ours, optimizer)
    objective = Objective(find_path("linear"))
    figures, _ = step.training_step(
        handle, wrapped, optimizer, batch, objective, TimeDistribution(), 1e-2, 0.5
    )
    loss, norm, _ = figures.tolist()

    x_t = batch.u.view(-1, 1, 1, 1) * batch.x_1 + (1 - batch.u).view(-1, 1, 1, 1) * batch.x_0
    expected = (theirs(x_t, batch.u, batch.labels) - (batch.x_1 - batch.x_0)).square().mean()
    expected.backward()
    parameters = [p for p in theirs.parameters() if p.requires_grad]
    expected_norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    decayed = [m.weight for m in theirs.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
    others = [p for p in parameters if all(p is not q for q in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99)).step()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert norm == pytest.approx(expected_norm.item(), rel=1e-5)
    assert norm > 0.5  # clipping acted
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "prediction", "weight"),
    [("gvp", "noise", "velocity"), ("vp", "score", "likelihood"), ("linear", "data", "velocity")],
)
def test_any_objective_trains_and_samples_as_what_it_is(tiny_config, tmp_path, path, prediction, weight):
    train(
        tiny_config(
            "run",
            f"train.path={path}",
            f"train.prediction={prediction}",
            f"train.loss_weight={weight}",
            "train.time_distribution=logit_normal",
        )
    )
    checkpoint = find_checkpoint(str(tmp_path / "run"))
    assert (checkpoint.record["path"], checkpoint.record["prediction"]) == (path, prediction)
    made = generate(
        checkpoint, "ema", tmp_path / "out", num_images=2, labels="balanced", seed=0,
        sampler=Sde(num_steps=3), guidance=Guidance(), batch_size=2, autoencoder_name=None,
    )  # fmt: skip
    record = Samples(made).record
    assert (record["path"], record["prediction"]) == (path, prediction)


def test_training_times_come_from_the_users_interval_or_from_what_the_objective_allows(tiny_config):
    settings = tiny_config("run", "train.prediction=noise").train
    _, times = preparation.objective_and_times(settings)
    assert times.interval == (1e-3, 1 - 1e-3)
    settings = tiny_config("run", "train.time_interval=[0.1,0.95]", "train.time_shift=2").train
    _, times = preparation.objective_and_times(settings)
    assert times == TimeDistribution(shift=2.0, interval=(0.1, 0.95))


def test_a_loss_that_is_not_finite_stops_before_it_reaches_a_weight(tiny_config, tmp_path, monkeypatch):
    original = Objective.loss
    calls = [0]

    def broken(*arguments):
        calls[0] += 1
        return original(*arguments) * (math.nan if calls[0] == 5 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "loss", broken)
        with pytest.raises(
            ValueError, match=r"loss nan.* at step 5: image \d+ at t = .* and 4 more\. .*step_0000003"
        ):
            train(tiny_config("run"))
    saved = latest_checkpoint(tmp_path / "run")
    assert saved.step == 3
    assert all(t.isfinite().all() for t in saved.tensors("model/" + WEIGHTS).values())
    train(tiny_config("whole"))
    train(tiny_config("run"))
    assert_same(state(tmp_path / "whole"), state(tmp_path / "run"))


@pytest.mark.parametrize("damage", ["truncated", "empty file", "empty folder", "no record"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_kept(
    tiny_config, tmp_path, capsys, monkeypatch, damage
):
    train(tiny_config("whole"))
    with monkeypatch.context() as patch:
        kill_at(patch, 5)
        with pytest.raises(Killed):
            train(tiny_config("run", "train.save_every=2"))
    newest = tmp_path / "run" / "checkpoints" / "step_0000004"
    weights = newest / "model" / WEIGHTS
    if damage == "empty folder":
        shutil.rmtree(newest)
        newest.mkdir()
    elif damage == "no record":
        (newest / "checkpoint.json").unlink()
    else:
        with open(weights, "r+b") as file:
            file.truncate(weights.stat().st_size // 2 if damage == "truncated" else 0)
    train(tiny_config("run", "train.save_every=2"))
    assert "step_0000004" in capsys.readouterr().out
    assert (newest.parent / "step_0000004.damaged").is_dir()
    assert_same(state(tmp_path / "whole"), state(tmp_path / "run"))


def test_a_changed_byte_in_a_checkpoint_is_noticed_when_it_is_read(trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run")
    checkpoint = find_checkpoint(str(tmp_path / "run"))
    path = checkpoint.folder / "model" / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="model/diffusion_pytorch_model.safetensors is damaged"):
        open_checkpoint(checkpoint.folder).load_network("model")


def test_checkpoints_are_ordered_by_number_not_by_name(tmp_path):
    from sitvit.train.checkpoint import step_folders

    for name in ("step_9", "step_10", "step_100", "step_2", "checkpoint-best", ".step_11.7.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in step_folders(tmp_path)] == ["step_100", "step_10", "step_9", "step_2"]


def test_a_save_that_fails_leaves_what_was_there(tiny_config, tmp_path, monkeypatch):
    """A full disk in the middle of a save: no half checkpoint, the older one untouched."""
    from sitvit.train import checkpoint

    original, saves = checkpoint.save_file, [0]

    def full(*arguments, **options):
        saves[0] += 1
        if saves[0] == 5:
            raise OSError(28, "No space left on device")
        return original(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny_config("run"))
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_0000003"]
    assert latest_checkpoint(tmp_path / "run").step == 3


def test_a_folder_of_other_files_is_no_run(tiny_config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="thesis.tex"):
        train(tiny_config("run"))


def test_a_file_is_no_run(tiny_config, tmp_path):
    (tmp_path / "run").write_text("a thesis")
    with pytest.raises(ValueError, match="`run` has to be a folder, and .*run is a file"):
        train(tiny_config("run"))
    assert (tmp_path / "run").read_text() == "a thesis"


def test_too_few_classes_are_refused_and_too_many_are_told(tiny_config, capsys):
    with pytest.raises(ValueError, match="model.num_classes is 5, but .* has 10"):
        train(tiny_config("few", "model.num_classes=5"))
    train(tiny_config("many", "model.num_classes=12"))
    assert "the rest stay untrained" in capsys.readouterr().out


def test_a_batch_larger_than_the_data_trains(tiny_config, tmp_path):
    train(tiny_config("run", "train.batch_size=100", "train.num_steps=4"))
    assert latest_checkpoint(tmp_path / "run").step == 4


def test_the_record_names_what_the_weights_come_from(trained_run):
    record = find_checkpoint(str(trained_run)).record
    assert record["class_names"][9] == "Ankle boot"
    assert record["autoencoder"]["name"] == "fashion-autoencoder"
    assert record["num_processes"] == 1


def test_two_networks_of_one_seed_begin_alike_and_another_seed_does_not(tiny_config, cache):
    a, b, c = (
        preparation.build_network(tiny_config(str(i), f"train.seed={seed}"), cache)
        for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(a.x_embedder.proj.weight, b.x_embedder.proj.weight)
    assert not torch.equal(a.x_embedder.proj.weight, c.x_embedder.proj.weight)


def test_a_new_run_can_start_from_a_vit5_classifiers_blocks(tiny_config, tmp_path, capsys):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    classifier = ViT5(**small, num_classes=3)
    classifier.save_pretrained(tmp_path / "vit5")
    train(tiny_config("run", f"train.init_from={tmp_path / 'vit5'}", "train.num_steps=4"))
    told = capsys.readouterr().out
    assert "in 1 of 2 blocks; left as they were: final_layer, pos_embed" in told
    assert "adaLN_modulation.1.bias" in told
    started = find_checkpoint(str(tmp_path / "run")).load_network("model")
    plain = preparation.build_network(tiny_config("plain"), LatentCache(Path(tiny_config("x").data.latents)))
    name = "blocks.0.attn.qkv.weight"
    moved = (started.state_dict()[name] - classifier.state_dict()[name]).abs().max()
    assert moved < 0.01 < (started.state_dict()[name] - plain.state_dict()[name]).abs().max()
    train(tiny_config("run", f"train.init_from={tmp_path / 'vit5'}"))  # continues, and is not reset
    assert latest_checkpoint(tmp_path / "run").step == 6


def test_a_damaged_checkpoint_of_a_higher_step_costs_no_good_one(tiny_config, tmp_path):
    """Counting it among the kept ones would delete what was just saved."""
    train(tiny_config("run"))
    newest = tmp_path / "run" / "checkpoints" / "step_0000006"
    (newest / "optimizer.safetensors").write_bytes(b"")
    train(tiny_config("run", "train.num_steps=5", "train.keep_checkpoints=1"))
    assert newest.is_dir()
    assert latest_checkpoint(tmp_path / "run").step == 5


def test_a_run_of_which_no_checkpoint_is_whole_is_not_started_again_over_it(tiny_config, tmp_path):
    train(tiny_config("run"))
    for record in (tmp_path / "run").glob("checkpoints/*/checkpoint.json"):
        record.write_text("{")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="has checkpoints, but none is whole"):
        train(tiny_config("run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("content", ["[]", '{"format": 1}', "{", '"text"'])
def test_a_checkpoint_with_a_strange_record_is_passed_over(tiny_config, tmp_path, content):
    train(tiny_config("whole"))
    train(tiny_config("run"))
    (tmp_path / "run/checkpoints/step_0000006/checkpoint.json").write_text(content)
    train(tiny_config("run"))
    assert_same(state(tmp_path / "whole"), state(tmp_path / "run"))


def test_a_newest_checkpoint_with_a_flipped_bit_is_passed_over_by_a_resume(tiny_config, tmp_path):
    train(tiny_config("whole"))
    train(tiny_config("run"))
    path = tmp_path / "run/checkpoints/step_0000006/optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    train(tiny_config("run"))
    assert_same(state(tmp_path / "whole"), state(tmp_path / "run"))


def test_latents_with_a_flipped_bit_are_not_trained_on(tiny_config, cache_folder, tmp_path):
    shutil.copytree(cache_folder, tmp_path / "latents")
    path = tmp_path / "latents" / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="shard_00000.safetensors is damaged: its content"):
        train(tiny_config("run", f"data.latents={tmp_path / 'latents'}"))


GOLDEN = {
    "SiT-S/2": [1.804653, 1.597752, 1.579880, 1.471334, 1.402124],
    "SiT-ViT5-S/2": [1.814297, 1.648762, 1.640322, 1.553730, 1.473705],
}


@pytest.mark.parametrize("name", ["SiT-S/2", "SiT-ViT5-S/2"])
def test_twenty_steps_lose_what_they_always_lost(tiny_config, tmp_path, name):
    """Guards stream, network, objective and optimizer together.

    One and two threads agree in all digits here; 1e-3 leaves room for the matrix kernels of other CPUs.
    """
    train(tiny_config("run", "train.num_steps=20", "train.log_every=4", "train.lr=1e-2", name=name))
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert losses == pytest.approx(GOLDEN[name], rel=1e-3)
