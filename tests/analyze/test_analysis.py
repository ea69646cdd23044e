"""An analysis of trained networks: what it measures, that it repeats, and what it says to a mistake."""

import json
import shutil

import numpy as np
import pytest
import torch

from sitvit import cli
from sitvit.analyze.analysis import analyze, norm_numbers
from sitvit.analyze.gates import gates
from sitvit.analyze.inputs import choose_images, names_of
from sitvit.analyze.recording import record
from sitvit.data.autoencoder import sha256_of_weights
from sitvit.generate.trained import Trained, open_trained
from sitvit.models.dit import DiT
from sitvit.models.sit import SiT

SIZES = {"input_size": 8, "hidden_size": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
PARTS = {"norm": "rmsnorm", "rope": True, "num_registers": 4, "layer_scale_init": 1e-4}


def shaken(network, cache) -> Trained:
    """A network whose every weight is random, and what belongs to it."""
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    path, prediction = ("ddpm", "noise") if isinstance(network, DiT) else ("linear", "velocity")
    return Trained(
        network.eval(), "model", sha256_of_weights(network), path, prediction, cache.autoencoder,
        cache.class_names, "here", cache.folder,
    )  # fmt: skip


@pytest.fixture
def vit5(cache):
    return shaken(SiT(in_channels=cache.latent_shape[0], **SIZES, **PARTS), cache)


def run(networks, cache, **settings):
    settings = {"num_images": 40, "times": [0.3, 0.8], "seed": 0, "batch_size": 16, **settings}
    return analyze(networks, cache, device=torch.device("cpu"), **settings)


def test_every_place_time_head_and_branch_is_measured(vit5, cache):
    vanilla = shaken(SiT(in_channels=cache.latent_shape[0], **SIZES), cache)
    found = run({"a": vit5, "b": vanilla}, cache)["results"]
    for result in found.values():
        places = {(row["t"], row["block"]) for row in result["probe"]}
        assert places == {(t, place) for t in (0.3, 0.8) for place in ("embedding", 0, 1, 2)}
        assert {(row["t"], row["block"]) for row in result["norms"]} == places
        assert len(result["attention"]) == 2 * 3 * 2  # times, blocks, heads
        assert len(result["gates"]) == 2 * 3 * 2  # times, blocks, branches
        assert {row["t"] for row in result["maps"]} == {0.8}
        assert np.array(result["maps"][0]["attention"]).shape == (4, 4)
    assert found["a"]["norms"][0]["register_median"] > 0
    assert found["b"]["norms"][0]["register_median"] is None
    assert any(row["register_share"] > 0 for row in found["a"]["attention"])
    assert all(row["register_share"] == 0 for row in found["b"]["attention"])


def test_what_is_recorded_of_a_block_is_what_the_block_returns(vit5, cache):
    network = vit5.network
    x_t, labels = torch.randn(3, *cache.latent_shape), torch.tensor([1, 2, 10])
    tokens = network.x_embedder(x_t) + network.pos_embed
    tokens = torch.cat([tokens, network.reg_token.expand(3, -1, -1)], dim=1)
    c = network.t_embedder(torch.full((3,), 0.4)) + network.y_embedder(labels)
    found = record(vit5, x_t, 0.4, labels)
    with torch.no_grad():
        for place in range(4):
            torch.testing.assert_close(found.features[place], tokens[:, :16].mean(1))
            norms = torch.cat([found.norms[place], found.register_norms[place]], dim=1)
            torch.testing.assert_close(norms, tokens.norm(dim=-1))
            if place < 3:
                tokens = network.blocks[place](tokens, network.rotation(network.grid), c)


def test_looking_leaves_the_network_as_it_was(vit5, cache):
    x_t, t, labels = torch.randn(2, *cache.latent_shape), torch.full((2,), 0.5), torch.tensor([0, 1])
    with torch.no_grad():
        before = vit5.network(x_t, t, labels)
        run({"a": vit5}, cache)
        assert torch.equal(vit5.network(x_t, t, labels), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in vit5.network.modules())


def test_the_same_call_gives_the_same_bits_and_another_seed_others(vit5, cache):
    first = run({"a": vit5}, cache)
    assert json.dumps(first) == json.dumps(run({"a": vit5}, cache))
    assert json.dumps(first["results"]) != json.dumps(run({"a": vit5}, cache, seed=1)["results"])


def test_noise_alone_tells_no_class(vit5, cache):
    """At t = 0 x_t is the noise: no image is in it, and the label may not come in by adaLN."""
    result = run({"a": vit5}, cache, num_images=64, times=[0.0])
    for row in result["results"]["a"]["probe"]:  # 32 images test it: four standard errors of a rare success
        assert abs(row["accuracy"] - result["chance"]) < 4 * (0.1 * 0.9 / 32) ** 0.5


def test_networks_see_the_same_images_and_noise_whatever_the_batch(cache):
    images = choose_images(cache, 40, 3)
    assert len(set(images.ids.tolist())) == 40
    whole = images.pair(slice(0, 40))
    for some, full in zip(images.pair(slice(5, 9)), whole, strict=True):
        assert torch.equal(some, full[5:9])


def test_a_gate_that_is_planted_is_found_in_its_block_and_branch(vit5):
    with torch.no_grad():
        last = vit5.network.blocks[1].adaLN_modulation[-1]
        last.weight.zero_()
        last.bias.copy_(torch.arange(6.0).repeat_interleave(32))  # chunk 2 is attention's gate, 5 the MLP's
        vit5.network.blocks[1].gamma_1.fill_(-0.5)
        vit5.network.blocks[1].gamma_2.fill_(0.1)
    rows = {row["branch"]: row for row in gates(vit5, 0.5) if row["block"] == 1}
    assert [rows["attention"][key] for key in ("gate", "gamma", "product")] == pytest.approx([2, 0.5, 1])
    assert [rows["mlp"][key] for key in ("gate", "gamma", "product")] == pytest.approx([5, 0.1, 0.5])


def test_one_patch_of_high_norm_shows_in_the_ratio_and_a_register_does_not():
    norms, registers = np.ones((10, 16), np.float32), np.ones((10, 4), np.float32)
    registers[0, 0] = 50
    found = norm_numbers(norms, registers)
    assert (found["max_over_median"], found["register_max"], found["register_median"]) == (1, 50, 1)
    norms[3, 7] = 50
    assert norm_numbers(norms, registers)["max_over_median"] == 50
    assert norm_numbers(norms, registers[:, :0])["register_max"] is None


def test_a_dit_is_asked_at_its_own_timesteps(cache):
    trained = shaken(DiT(in_channels=cache.latent_shape[0], **SIZES), cache)
    first = run({"a": trained}, cache, times=[0.5])["results"]["a"]["gates"]
    network = trained.network
    with torch.no_grad():
        c = network.t_embedder(torch.full((10,), 500)) + network.y_embedder(torch.arange(10))
        gate = network.blocks[0].adaLN_modulation(c).chunk(6, dim=1)[2]
    assert first[0]["gate"] == pytest.approx(gate.abs().mean().item())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_images": 65}, "from 4 to the 64 of"),
        ({"num_images": 3}, "from 4 to the 64 of"),
        ({"times": [0.5, 1.5]}, r"from 0 \(noise\) to 1 \(data\)"),
        ({"times": [0.5, 0.5]}, "times must be different"),
        ({"times": [float("nan")]}, "times must be different"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be from 0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(vit5, cache, settings, words):
    with pytest.raises(ValueError, match=words):
        run({"a": vit5}, cache, **settings)


def test_names_are_what_tells_places_apart():
    step = ["runs", "vanilla", "seed_0", "checkpoints", "step_0000900", "ema"]
    other = ["runs", "vit5", "seed_0", "checkpoints", "step_0000900", "ema"]
    assert names_of([step, other]) == ["vanilla", "vit5"]
    assert names_of([step, [*step[:4], "step_0000300", "ema"]]) == ["step_0000900", "step_0000300"]
    assert names_of([step, [*step[:5], "model"]]) == ["ema", "model"]
    assert names_of([step]) == ["seed_0"]
    with pytest.raises(ValueError, match="seed_0/checkpoints/step_0000900 is named twice"):
        names_of([step, step])


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes most of the time of a tiny analysis."""
    monkeypatch.setattr("sitvit.report.analysis.write_figures", lambda analysis, out: [])


def test_the_verb_writes_the_numbers_with_their_weights_and_all_figures(trained_run, tmp_path):
    command = [str(trained_run), "--num-images", "32", "--times", "0.5", "--out", str(tmp_path / "out")]
    cli.analyze(command)
    names = {"probe", "attention_distance", "token_norms", "gates", "attention_maps"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"analysis.json", *(f"{name}.png" for name in names)}
    found = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert found["networks"]["run"]["weights_sha256"] == open_trained(str(trained_run)).weights_sha256
    assert found["protocol"]["num_images"] == 32


def test_an_analysis_is_made_once_and_never_overwritten_by_another(trained_run, tmp_path, undrawn):
    shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("analysis"))
    command = [str(tmp_path / "run"), "--num-images", "32", "--times", "0.5"]
    cli.analyze(command)
    out = tmp_path / "run" / "analysis"
    content = (out / "analysis.json").read_bytes()
    cli.analyze(command)
    with pytest.raises(ValueError, match="of other weights or settings; choose another --out"):
        cli.analyze([*command, "--weights", "model"])
    assert (out / "analysis.json").read_bytes() == content
    cli.analyze([*command, "--weights", "model", "--step", "3"])
    assert (out / "step_0000003" / "analysis.json").is_file()


def test_latents_that_are_gone_are_asked_for_by_name(trained_run, cache_folder, tmp_path, undrawn):
    shutil.copytree(trained_run, tmp_path / "run")
    (config,) = (tmp_path / "run" / "checkpoints").glob("step_0000006/config.yaml")
    moved = config.read_text().replace(str(cache_folder), "gone")
    config.write_text(moved)
    record_file = config.with_name("checkpoint.json")
    record = json.loads(record_file.read_text())
    record["files"]["config.yaml"]["bytes"] = len(moved)
    record_file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"trained on the latents gone, .* with --data"):
        cli.analyze([str(tmp_path / "run")])
    few = ["--num-images", "8", "--times", "0.5"]
    cli.analyze([str(tmp_path / "run"), "--data", str(cache_folder), *few])
    assert (tmp_path / "run" / "analysis" / "analysis.json").is_file()


def test_a_bare_network_needs_data_and_no_autoencoder_and_two_networks_a_place(
    trained_run, cache_folder, tmp_path
):
    (model,) = (trained_run / "checkpoints").glob("step_0000006/model")
    shutil.copytree(model, tmp_path / "bare")
    few = ["--num-images", "8", "--times", "0.5", "--data", str(cache_folder)]
    cli.analyze([str(tmp_path / "bare"), str(trained_run), *few, "--out", str(tmp_path / "both")])
    assert (tmp_path / "both" / "attention_maps_2.png").is_file()
    with pytest.raises(ValueError, match="say where to write with --out"):
        cli.analyze([str(tmp_path / "bare"), str(trained_run), *few])
    with pytest.raises(ValueError, match="--autoencoder|--data"):
        cli.analyze([str(tmp_path / "bare"), "--out", str(tmp_path / "one")])
