"""One step: parts equal the whole, rates, decay groups, precision, compilation."""

import math

import pytest
import torch
from accelerate import Accelerator

from sitvit import runtime
from sitvit.data.stream import TrainingStream
from sitvit.flow.ddpm import respaced
from sitvit.flow.objective import DiffusionObjective, Objective
from sitvit.flow.paths import find_path
from sitvit.flow.times import TimeDistribution
from sitvit.models.presets import build_model
from sitvit.train import compilation
from sitvit.train.checkpoint import WEIGHTS, find_checkpoint
from sitvit.train.compilation import compile_checked
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics
from sitvit.train.optim import learning_rate, make_optimizer, trainable_names
from sitvit.train.step import Figures, LateReading, training_step

SMALL = {"hidden_size": 32, "depth": 2, "num_heads": 2, "input_size": 8, "num_classes": 10}


def opened(name="SiT-ViT5-S/2"):
    """A small network whose gates are open: a fresh one's output is zero."""
    torch.manual_seed(0)
    model = build_model(name, **SMALL)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def one_step(cache, micro=None, lr=1e-2, objective=None, times=None, model=None, batch=None, clip=0.5):
    model = opened() if model is None else model
    batch = TrainingStream(cache, 0, 8, False, 0.1, 10).batch(0, range(8)) if batch is None else batch
    optimizer = make_optimizer(model, 1.0, (0.9, 0.99), 0.01)
    handle = Accelerator()
    wrapped, _ = handle.prepare(model, optimizer)
    objective = objective or Objective(find_path("linear"))
    times = times or TimeDistribution()
    figures, _ = training_step(handle, wrapped, optimizer, batch, objective, times, lr, clip, micro)
    return model, optimizer, Figures(*figures.tolist())


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_gradients_of_parts_add_up_to_the_big_batchs(cache, micro):
    _, whole, figures = one_step(cache)
    _, parts, of_parts = one_step(cache, micro)
    assert of_parts.loss == pytest.approx(figures.loss, rel=1e-5)
    assert of_parts.grad_norm == pytest.approx(figures.grad_norm, rel=1e-4)
    # The first moment is a tenth of the gradient. Float32 sums in another order: 1e-5 of the largest entry.
    moments = [[s["exp_avg"] for s in optimizer.state.values()] for optimizer in (whole, parts)]
    for a, b in zip(*moments, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(a.abs().max().item(), 1e-4)


def test_a_run_in_parts_logs_per_optimizer_step_what_the_whole_batch_logs(tiny_config, tmp_path):
    train(tiny_config("whole"))
    train(tiny_config("parts", "train.micro_batch_size=2"))
    whole, parts = (read_metrics(tmp_path / run) for run in ("whole", "parts"))
    assert [(row["step"], row["lr"]) for row in whole] == [(row["step"], row["lr"]) for row in parts]
    for a, b in zip(whole, parts, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_parts_that_do_not_divide_the_share_are_refused(tiny_config):
    with pytest.raises(ValueError, match="micro_batch_size must be null or a number that divides"):
        tiny_config("run", "train.micro_batch_size=3")


@pytest.mark.parametrize("clip", [None, 0.01, 1.0, 1e6])
def test_the_gradient_is_cut_to_the_limit_and_without_one_never(cache, clip):
    _, optimizer, figures = one_step(cache, clip=clip)
    moments = torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])
    assert figures.grad_norm > 1
    # The first moment is a tenth of the gradient; clipping adds 1e-6 to its norm.
    assert moments.norm() / 0.1 == pytest.approx(min(clip or math.inf, figures.grad_norm), rel=1e-4)


def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments(cache):
    model = opened()
    batch = TrainingStream(cache, 0, 8, False, 0.1, 10).batch(0, range(8))
    model, optimizer, figures = one_step(cache, model=model, batch=batch)
    assert figures.finite
    before = [p.detach().clone() for p in model.parameters()]
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    batch.x_1[3, 0, 0, 0] = math.inf
    figures, losses = training_step(
        Accelerator(), model, optimizer, batch, Objective(find_path("linear")), TimeDistribution(), 1e-2
    )
    figures = Figures(*figures.tolist())
    assert losses.isfinite().tolist() == [True] * 3 + [False] + [True] * 4
    assert not figures.finite
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))
    assert {s["step"].item() for s in optimizer.state.values()} == {1.0}


def test_a_gradient_alone_that_is_not_finite_changes_no_weight(cache):
    """sqrt has a finite value and an infinite slope at zero."""

    class Steep:
        def loss(self, network, x_0, x_1, t):
            out = network(x_0, t).flatten(1).mean(1)
            return out.detach() + (out - out.detach()).abs().sqrt()

    model = opened()
    before = [p.detach().clone() for p in model.parameters()]
    _, _, figures = one_step(cache, objective=Steep(), model=model)
    assert math.isfinite(figures.loss)
    assert not figures.finite
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_figures_are_read_one_step_late_and_none_is_lost():
    late = LateReading()
    seen = [late.push(torch.tensor([float(i), 0.0, 0.0])) for i in range(3)]
    assert seen[0] is None
    assert [figures.loss for figures in (seen[1], seen[2], late.flush())] == [0, 1, 2]
    assert late.flush() is None


def test_matrices_decay_and_norms_biases_gammas_and_embeddings_do_not():
    model = build_model("SiT-ViT5-S/2", **SMALL, positions="learned", norm_affine=True)
    optimizer = make_optimizer(model, 1.0, (0.9, 0.99), 0.1)
    decayed, others = (len(group["params"]) for group in optimizer.param_groups)
    names = trainable_names(model)
    assert len(names) == decayed + others == len(list(model.parameters()))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(name.endswith("weight") for name in names[:decayed])
    spared = {"y_embedder.embedding_table.weight", "pos_embed", "reg_token", "x_embedder.proj.bias"}
    assert spared <= set(names[decayed:])
    assert not any("norm" in name or "gamma" in name for name in names[:decayed])
    assert {"blocks.0.attn.qkv.weight", "x_embedder.proj.weight"} <= set(names[:decayed])


@pytest.mark.parametrize(
    ("decay", "step", "rate"),
    [
        ("cosine", 9, (1 - math.cos(math.pi / 4)) / 2),
        ("cosine", 8, 0.5),
        ("cosine", 5, 1.0),
        ("linear", 9, 0.25),
        ("inverse_sqrt", 3, 1.0),
        ("inverse_sqrt", 16, 0.5),
        ("inverse_sqrt", 64, 0.25),
    ],
)
def test_the_rate_is_a_closed_form_of_the_step(decay, step, rate):
    assert learning_rate(step, 1.0, 10, 0, 4, decay) == pytest.approx(rate)


def test_ddpm_trains_a_dit_on_the_hybrid_loss_at_whole_timesteps(cache):
    """The step's loss is the diffusion's own at floor(1000 u), and u = 1 is timestep 999."""
    model = opened("DiT-S/2")
    seen = []

    def network(x, timesteps):
        seen.append(timesteps)
        return model(x, timesteps, labels)

    batch = TrainingStream(cache, 0, 8, False, 0.1, 10).batch(0, range(8))
    labels = batch.labels
    batch.u[0], batch.u[1] = 1.0, 0.0
    index = (batch.u * 1000).floor().clamp(max=999).long()
    expected = respaced().hybrid_loss(network, batch.x_0, batch.x_1, index).total
    assert torch.equal(DiffusionObjective().loss(network, batch.x_0, batch.x_1, batch.u), expected)
    assert seen[1].tolist()[:2] == [999, 0]
    assert seen[1].dtype == torch.int64
    _, _, figures = one_step(cache, objective=DiffusionObjective(), model=model, batch=batch)
    assert figures.loss == pytest.approx(expected.mean().item(), rel=1e-5)


def test_a_dit_trains_and_its_checkpoint_says_so(tiny_config, tmp_path):
    settings = ("train.path=ddpm", "train.prediction=noise", "train.num_steps=60", "train.lr=1e-2")
    train(tiny_config("run", *settings, "train.log_every=20", name="DiT-S/2"))
    checkpoint = find_checkpoint(str(tmp_path / "run"))
    assert (checkpoint.record["path"], checkpoint.record["prediction"]) == ("ddpm", "noise")
    network = checkpoint.load_network("model")
    assert type(network).__name__ == "DiT"
    assert network.out_channels == 8
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.path=ddpm", "train.prediction=noise"], "does not go with train.path ddpm"),
        (["model.name=DiT-S/2"], "does not go with train.path linear"),
        (["model.name=DiT-S/2", "train.path=ddpm"], "prediction must be noise with path ddpm, got velocity"),
        (["train.path=ddpm", "train.time_shift=2"], "time_shift must be 1.0 with path ddpm, got 2.0"),
        (["train.path=ddpm", "train.loss_weight=velocity"], "loss_weight must be none with path ddpm"),
    ],
)
def test_what_contradicts_ddpm_is_refused(tiny_config, overrides, words):
    with pytest.raises(ValueError, match=words):
        tiny_config("run", *overrides)


def test_bf16_keeps_weights_averages_and_moments_float32_and_nearly_the_losses(tiny_config, tmp_path):
    train(tiny_config("fp32"))
    train(tiny_config("bf16", "train.precision=bf16"))
    checkpoint = find_checkpoint(str(tmp_path / "bf16"))
    for name in checkpoint.record["files"]:
        if name.endswith(".safetensors"):
            assert {t.dtype for t in checkpoint.tensors(name).values()} == {torch.float32}
    a, b = ([row["loss"] for row in read_metrics(tmp_path / run)] for run in ("fp32", "bf16"))
    assert a != b
    assert a == pytest.approx(b, rel=1e-2)  # 8 bits of mantissa


def test_a_launcher_that_asks_for_another_precision_is_told(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="the launcher asks for mixed precision fp16"):
        runtime.accelerator("bf16")


def test_gradient_checkpointing_changes_no_bit(tiny_config, tmp_path):
    train(tiny_config("plain"))
    train(tiny_config("again", "train.gradient_checkpointing=true"))
    a, b = (find_checkpoint(str(tmp_path / run)).tensors("model/" + WEIGHTS) for run in ("plain", "again"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_compiled_network_that_differs_from_eager_is_refused_and_the_weights_come_back(monkeypatch):
    model = opened()
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(2, 4, 8, 8)

    def losses():
        return model(x, torch.full((2,), 0.5), torch.tensor([1, 2])).square().flatten(1).mean(1)

    monkeypatch.setattr(compilation, "compile_network", lambda model, how: None)
    compile_checked(model, "block", losses, "fp32")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())

    tilt = torch.linspace(0.8, 1.2, 32)  # a plain factor would be lost in the final norm

    def wrong(model, how):
        model.blocks[1].register_forward_hook(lambda module, inputs, output: output * tilt)

    monkeypatch.setattr(compilation, "compile_network", wrong)
    with pytest.raises(ValueError, match="differs from eager mode by .*train.compile=none"):
        compile_checked(model, "block", losses, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "whole"])
def test_a_compiled_run_has_the_eager_runs_losses(tiny_config, tmp_path, how):
    train(tiny_config("eager"))
    train(tiny_config("compiled", f"train.compile={how}"))
    a, b = ([row["loss"] for row in read_metrics(tmp_path / run)] for run in ("eager", "compiled"))
    assert a == pytest.approx(b, rel=1e-4)
    keys = [
        set(find_checkpoint(str(tmp_path / r)).tensors("model/" + WEIGHTS)) for r in ("eager", "compiled")
    ]
    assert keys[0] == keys[1]
