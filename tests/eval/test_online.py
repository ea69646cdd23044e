"""Online equals offline, any number of processes, continued, sweeps, references and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from sitvit import cli
from sitvit.config import load_config
from sitvit.data import sources as image_sources
from sitvit.eval import extraction
from sitvit.eval.evaluate import evaluate, make_reference
from sitvit.eval.extraction import extract
from sitvit.eval.features import CallableFeatures, FashionFeatures, Features
from sitvit.eval.manifold import precision_recall
from sitvit.eval.metrics import Gaussian, frechet_distance, inception_score, kernel_distance
from sitvit.eval.reference import is_statistics, manifold_rows, read_statistics
from sitvit.eval.sets import ImageSet, open_set
from sitvit.eval.settings import EvaluationConfig, preset_path, sweep_points
from sitvit.eval.statistics import FeatureStatistics
from sitvit.eval.sweep import check_against_published, over_seeds, sweep
from sitvit.eval.uncertainty import bootstrap_spread
from sitvit.flow.samplers import find_sampler
from sitvit.generate.request import job_of
from sitvit.generate.samples import SampleSettings
from sitvit.train.checkpoint import load_checkpoint

CPU = torch.device("cpu")
FASHION = FashionFeatures.name


@pytest.fixture
def few(monkeypatch, images):
    monkeypatch.setitem(image_sources.EMBEDDED, "fashion-mnist", lambda: images)


@pytest.fixture
def config(trained_run, few, tmp_path):
    """Of a checkpoint: 22 images in batches of 5, so the last is short."""
    return EvaluationConfig(
        checkpoint=str(trained_run), features=FASHION, out=str(tmp_path / "online.json"), num_images=22,
        method="euler", num_steps=2, cfg_scale=1.5, sampling_batch_size=5, batch_size=8,
        metrics=["fid", "pr", "kid"],
    )  # fmt: skip


def brightness(width=3):
    def function(images):
        return images.float().mean(dim=(1, 2)).repeat(1, width // 3) / 255

    return CallableFeatures(function, "brightness", width, "1")


def write_pictures(folder, count=12, size=(20, 20), suffix="png"):
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for i in range(count):
        pixels = draw.integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
        Image.fromarray(pixels).save(
            folder / f"{i:03d}.{suffix}", **({} if suffix == "png" else {"quality": 95})
        )
    return folder


def one_of(index, count):
    return SimpleNamespace(
        process_index=index, num_processes=count, is_main_process=index == 0, device=CPU,
        wait_for_everyone=lambda: None,
    )  # fmt: skip


def test_online_evaluation_equals_offline_evaluation_of_the_same_checkpoint(config, tmp_path):
    online, _ = evaluate(config)
    assert not list(tmp_path.rglob("*.png"))
    folder = tmp_path / "kept"
    kept = replace(config, keep_samples=str(folder), out=str(tmp_path / "offline.json"))
    offline, path = evaluate(kept)
    assert online == offline
    again = EvaluationConfig(samples=str(folder), **{
        key: getattr(config, key) for key in ("features", "batch_size", "metrics")
    })  # fmt: skip
    assert evaluate(again)[0] == offline
    assert len(list(folder.rglob("0*.png"))) == 22
    assert not list(tmp_path.glob(".*.features"))  # nothing is left behind
    assert json.loads(path.read_text())["protocol"]["measures"]["pr"]["distances"] == "float32"


WAYS = {
    "autoguidance": ["--autoguidance", "STEP_3", "--cfg-scale", "3"],
    "precision": ["--precision", "bfloat16"],
    "image_size": ["--image-size", "48"],
    "step": ["--step", "3"],
    "guided_channels": ["--cfg-scale", "2", "--guided-channels", "3", "--guidance-interval", "0.2", "0.9"],
    "sampler": ["--sampler", "sit-sde", "--diffusion", "constant", "--last-step", "none"],
}


@pytest.mark.parametrize("what", WAYS)
def test_what_is_measured_of_a_checkpoint_are_the_images_of_the_same_options_of_the_sampling_script(
    trained_run, few, tmp_path, what
):
    weak = str(trained_run / "checkpoints" / "step_0000003")
    options = [weak if word == "STEP_3" else word for word in WAYS[what]]
    options += [
        "--checkpoint",
        str(trained_run),
        "--labels",
        "random",
        "--num-images",
        "5",
        "--num-steps",
        "2",
    ]
    cli.sample([*options, "--batch-size", "3", "--out", str(tmp_path / "made")])
    cli.evaluate([*options, "--sampling-batch-size", "3", "--out", str(tmp_path / "online.json")])
    cli.evaluate(["--samples", str(tmp_path / "made"), "--out", str(tmp_path / "offline.json")])
    online, offline = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("online", "offline"))
    assert online["metrics"] == offline["metrics"]
    told, record = online["protocol"]["samples"], offline["protocol"]["samples"]
    assert {key: record[key] for key in told} == told
    plain = SampleSettings.__dataclass_fields__
    assert set(plain) < set(told)


def test_options_of_a_checkpoints_images_are_refused_beside_samples(tmp_path):
    with pytest.raises(ValueError, match="--seed, --image-size: of images that are made from a --checkpoint"):
        cli.evaluate(["--samples", "made", "--seed", "1", "--image-size", "32"])


def test_what_is_typed_replaces_a_presets_value_by_none_too(trained_run, few, tmp_path):
    preset = tmp_path / "three.yaml"
    preset.write_text("guided_channels: 3\ncfg_scale: 2\nnum_images: 4\nnum_steps: 1\n")
    out = tmp_path / "m.json"
    options = ["--checkpoint", str(trained_run), "--preset", str(preset), "--guided-channels", "all"]
    cli.evaluate([*options, "--out", str(out)])
    told = json.loads(out.read_text())["protocol"]["samples"]
    assert (told["guided_channels"], told["cfg_scale"]) == (None, 2)


def test_a_preset_beside_samples_says_what_of_it_does_not_count(few, tmp_path, capsys):
    samples = ["--samples", str(write_pictures(tmp_path / "p")), "--reference", str(tmp_path / "p")]
    of_features = ["--features", FASHION, "--metrics", "fid", "--out", str(tmp_path / "m.json")]
    cli.evaluate([*samples, *of_features, "--preset", "sit-sde"])
    assert "--preset sit-sde: only how images are measured is taken of it" in capsys.readouterr().out


def test_a_self_check_without_adms_files_names_them():
    with pytest.raises(ValueError, match="admnet_guided_upsampled_imagenet256.npz --reference VIRTUAL"):
        cli.evaluate(["--self-check", "256"])


def test_a_self_check_measures_in_float32_as_the_published_recall_was(monkeypatch, capsys):
    """That of the 128 batch, with 0.001 allowed; float16 distances move precision by more."""
    asked = []

    def published(config):
        asked.append(config)
        numbers = {"FID": 2.9733, "sFID": 5.0946, "IS": 141.477, "precision": 0.78042, "recall": 0.5906}
        return numbers, "m.json"

    monkeypatch.setattr("sitvit.eval.evaluate.evaluate", published)
    cli.evaluate(["--self-check", "128", "--samples", "made.npz", "--reference", "of_128.npz"])
    assert (asked[0].distances, asked[0].features, asked[0].metrics) == ("float32", "inception", None)
    assert capsys.readouterr().out.count(": ok") == 5


@pytest.mark.parametrize(
    "options",
    [
        ["--self-check", "256", "--metrics", "fid"],
        ["--self-check", "256", "--features", "dinov2"],
        ["--make-reference", "new.npz", "--sweep", "seed=0,1"],
        ["--make-reference", "new.npz", "--out", "m.json"],
    ],
)
def test_options_that_would_be_left_aside_are_refused(options):
    with pytest.raises(ValueError, match=f"{options[0]} takes nothing from {options[2]}; leave out"):
        cli.evaluate(["--reference", "real.npz", *options])


def test_the_protocol_of_an_online_number_names_all_that_the_images_follow_from(config):
    _, path = evaluate(config)
    about = json.loads(path.read_text())["protocol"]["samples"]
    for key in (
        "weights_sha256",
        "sampler",
        "cfg_scale",
        "guidance_interval",
        "labels",
        "seed",
        "uint8_rule",
    ):
        assert key in about


@pytest.mark.parametrize("num_processes", [2, 8])
def test_the_features_are_the_same_bits_for_any_number_of_processes(tmp_path, monkeypatch, num_processes):
    monkeypatch.setattr(extraction, "BLOCK", 5)
    pictures = open_set(str(write_pictures(tmp_path / "p", 23)), CPU)
    whole = extract(pictures, None, brightness(), 3, tmp_path / "one", "x", one_of(0, 1))
    for process in reversed(range(num_processes)):  # the main one last, as behind a barrier
        state = one_of(process, num_processes)
        parts = extract(pictures, None, brightness(), 3, tmp_path / "many", "x", state)
    assert np.array_equal(parts.pool, whole.pool)
    assert np.array_equal(parts.statistics.covariance, whole.statistics.covariance)


def test_a_killed_extraction_goes_on_with_the_blocks_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(extraction, "BLOCK", 4)
    pictures = open_set(str(write_pictures(tmp_path / "p", 10)), CPU)
    read = []

    class Counting:
        class_names, labels = [], pictures.images.labels

        def __len__(self):
            return 10

        def name(self, index):
            return pictures.images.name(index)

        def read(self, index):
            if index == 9 and not read.count(9):
                read.append(9)
                raise ValueError("the power is gone")
            read.append(index)
            return pictures.images.read(index)

    counted = ImageSet(Counting(), {}, "f")
    with pytest.raises(ValueError, match="power"):
        extract(counted, None, brightness(), 2, tmp_path / "s", "x", one_of(0, 1))
    read.clear()
    read.append(9)
    found = extract(counted, None, brightness(), 2, tmp_path / "s", "x", one_of(0, 1))
    assert set(read) <= {0, 8, 9}  # 0 tells the size; blocks 0 and 1 were there
    plain = extract(pictures, None, brightness(), 2, tmp_path / "t", "x", one_of(0, 1))
    assert np.array_equal(found.pool, plain.pool)


def test_a_sweep_records_every_point_and_measures_none_twice(config, tmp_path, capsys):
    swept = {"cfg_scale": ["1", "1.5"], "guidance_interval": ["0:1", "0.2:0.8"]}
    small = replace(config, metrics=["fid"])
    rows = sweep(small, swept, tmp_path / "sweep")
    assert [(r["cfg_scale"], r["guidance_interval"]) for r in rows] == [
        (1.0, [0.0, 1.0]), (1.0, [0.2, 0.8]), (1.5, [0.0, 1.0]), (1.5, [0.2, 0.8]),
    ]  # fmt: skip
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert record["tried"] == rows
    capsys.readouterr()
    assert sweep(small, swept, tmp_path / "sweep") == rows
    assert capsys.readouterr().out.count("was measured before") == 4


def test_a_sweep_grows_and_keeps_every_point_that_was_tried(config, tmp_path, monkeypatch):
    small, out = replace(config, metrics=["fid"], num_images=4), tmp_path / "sweep"
    first = sweep(small, {"cfg_scale": ["2"]}, out)
    with pytest.raises(ValueError, match="records cfg_scale_2.0, which this sweep leaves out"):
        sweep(small, {"cfg_scale": ["1"]}, out)
    begun = []

    def killed(point):
        begun.append(point.cfg_scale)
        if len(begun) > 1:
            raise KeyboardInterrupt
        return evaluate(point)

    monkeypatch.setattr("sitvit.eval.sweep.evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(small, {"cfg_scale": ["1", "1.5", "2"]}, out)
    tried = json.loads((out / "sweep.json").read_text())["tried"]
    assert [row["cfg_scale"] for row in tried] == [1, 2]  # 2 is not lost by a stop before its turn
    assert tried[1:] == first


def test_every_point_of_a_sweep_is_checked_before_one_is_measured(config, tmp_path, monkeypatch):
    monkeypatch.setattr("sitvit.eval.sweep.evaluate", None)
    for swept, words in (
        ({"weights": ["ema", "modell"]}, "no weights called 'modell'"),
        ({"guidance_interval": ["0:1", "0.9:0.1"], "cfg_scale": ["2"]}, "0 <= low <= high <= 1, got"),
    ):
        with pytest.raises(ValueError, match=words):
            sweep(config, swept, tmp_path)
    with pytest.raises(ValueError, match="--sweep names seed twice"):
        cli.evaluate(["--checkpoint", config.checkpoint, "--sweep", "seed=1", "seed=2"])


def test_a_sweep_over_seeds_tells_mean_and_spread_of_each_other_setting(config, tmp_path, capsys):
    out = tmp_path / "sweep"
    options = [
        "--checkpoint",
        config.checkpoint,
        "--features",
        FASHION,
        "--num-images",
        "4",
        "--num-steps",
        "1",
    ]
    cli.evaluate([*options, "--sweep", "seed=0,1,2", "cfg_scale=1,2", "--out", str(out)])
    record = json.loads((out / "sweep.json").read_text())
    said = []
    assert [(each["cfg_scale"], each["seeds"]) for each in record["over_seeds"]] == [(1, 3), (2, 3)]
    for each in record["over_seeds"]:
        found = [
            row["metrics"]["FD-fashion"] for row in record["tried"] if row["cfg_scale"] == each["cfg_scale"]
        ]
        assert len(set(found)) == 3  # or the spread would be of nothing
        assert each["mean"]["FD-fashion"] == pytest.approx(np.mean(found), rel=1e-12)
        assert each["std"]["FD-fashion"] == pytest.approx(np.std(found, ddof=1), rel=1e-9)
        said.append(f"FD-fashion {np.mean(found):.4f} +- {np.std(found, ddof=1):.4f}")
    told = capsys.readouterr().out
    assert all(f"3 seeds, mean +- standard deviation: {text}" in told for text in said)


def test_a_sweep_without_several_seeds_has_no_spread():
    rows = [{"cfg_scale": scale, "metrics": {"FID": 1.0}, "file": "f"} for scale in (1, 2)]
    assert over_seeds(rows) == over_seeds([{**row, "seed": 0} for row in rows]) == []


def test_a_sweep_of_unknown_keys_or_values_is_refused():
    config = EvaluationConfig(checkpoint="run")
    with pytest.raises(ValueError, match="not 'sampler'"):
        sweep_points(config, {"sampler": ["heun"]})
    with pytest.raises(ValueError, match="LOW:HIGH"):
        sweep_points(config, {"guidance_interval": ["0.1"]})
    with pytest.raises(ValueError, match="twice"):
        sweep_points(config, {"cfg_scale": ["1", "1.0"]})
    with pytest.raises(ValueError, match="cfg_scale must be 1"):
        sweep_points(config, {"cfg_scale": ["0.5"]})
    with pytest.raises(ValueError, match="--checkpoint"):
        sweep(EvaluationConfig(samples="x"), {}, Path("out"))


@pytest.mark.parametrize("name", ["sit-sde", "sit-ode", "dit", "fid10k-quick"])
def test_every_preset_is_readable_and_its_sampler_is_known(name):
    config = load_config(preset_path(name), ["checkpoint=run"], EvaluationConfig)
    assert config.features == "inception"
    find_sampler(config.sampler, config.sampler_parts())


@pytest.mark.parametrize("name", ["sit-sde", "sit-ode", "fid10k-quick"])
def test_a_preset_samples_a_folder_that_holds_one_set_of_weights_without_a_name(trained_run, tmp_path, name):
    load_checkpoint(trained_run).save_pretrained(tmp_path / "m")
    keys = [f"checkpoint={tmp_path / 'm'}", "autoencoder=fashion-autoencoder", "num_images=2"]
    config = load_config(preset_path(name), keys, EvaluationConfig)
    assert job_of(config, 2, CPU).trained.weights == "the weights of the folder"


def test_an_unknown_preset_and_no_samples_are_refused():
    with pytest.raises(ValueError, match="fid10k-quick"):
        preset_path("sit")
    with pytest.raises(ValueError, match="either samples or checkpoint"):
        load_config(None, [], EvaluationConfig)
    with pytest.raises(ValueError, match="did you mean cfg_scale"):
        load_config(None, ["cfgscale=1"], EvaluationConfig)


def test_a_statistics_file_stands_for_its_images_and_carries_its_provenance(tmp_path):
    pictures = write_pictures(tmp_path / "real", 30)
    samples = write_pictures(tmp_path / "made", 20)
    config = EvaluationConfig(
        samples=str(samples), reference=str(pictures), features=FASHION, metrics=["fid", "pr"]
    )
    direct, _ = evaluate(replace(config, out=str(tmp_path / "a.json")))
    made = make_reference(config, str(pictures), tmp_path / "real.npz", None)
    by_file, path = evaluate(replace(config, reference=str(made), out=str(tmp_path / "b.json")))
    assert by_file == pytest.approx(direct, rel=1e-12)
    about = json.loads(path.read_text())["protocol"]["reference"]["provenance"]
    assert about["num_images"] == 30
    assert about["image_shape"] == [20, 20, 3]
    with pytest.raises(ValueError, match="is there already"):
        make_reference(config, str(pictures), made, None)


def adm_file(path, extractor, **changes):
    """A reference as ADM's: statistics, and images for precision and recall."""
    draw = np.random.default_rng(1)
    width = extractor.num_features
    arrays = {
        "arr_0": draw.integers(0, 256, (30, 20, 20, 3)).astype(np.uint8),
        "mu": np.full(width, 0.5), "sigma": np.eye(width) * 0.01,
    }  # fmt: skip
    arrays |= changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return str(path)


def measured(tmp_path, reference, **more):
    samples = tmp_path / "made"
    if not samples.exists():
        write_pictures(samples, 20)
    config = EvaluationConfig(
        samples=str(samples), reference=reference, out=str(tmp_path / "m.json"),
        **{"metrics": ["fid", "pr"], **more},
    )  # fmt: skip
    return evaluate(config, brightness())


class OfThreeKinds:
    """Pool features, logits and spatial features of an image: corners of it."""

    name, distance_name, sha256 = "corners", "FID", "0"
    num_features, num_spatial, class_names = 6, 5, []
    metrics = ("fid", "sfid", "is", "pr")

    def __call__(self, images):
        values = images.flatten(1).float() / 255
        return Features(6 * values[:, :6] + 40, 4 * values[:, 6:14], values[:, 20:25])


def test_the_numbers_are_those_of_each_option_and_of_the_features_that_a_metric_is_of(tmp_path):
    options = {"distances": "adm", "neighbours": 2, "split_size": 7, "kid_subsets": 4, "kid_subset_size": 9}
    sets = {}
    for name, count in (("made", 20), ("real", 40)):
        folder = write_pictures(tmp_path / name, count)
        for path in sorted(folder.iterdir())[: count - 20]:
            path.unlink()  # or those of both would be the same
        pixels = np.stack([np.asarray(Image.open(path)) for path in sorted(folder.iterdir())])
        sets[name] = [part.numpy() for part in OfThreeKinds()(torch.from_numpy(pixels))]
    (pool, logits, spatial), (real, _, real_spatial) = sets["made"], sets["real"]
    config = EvaluationConfig(
        samples=str(tmp_path / "made"), reference=str(tmp_path / "real"), out=str(tmp_path / "m.json"),
        metrics=["fid", "sfid", "is", "pr", "kid", "spread"], resamples=3, batch_size=20, **options,
    )  # fmt: skip
    found, _ = evaluate(config, OfThreeKinds())
    of = FeatureStatistics.of
    reference = Gaussian.of(of(real).mean, of(real).covariance)
    expected = {
        "FID": frechet_distance(of(pool), of(real)),
        "sFID": frechet_distance(of(spatial), of(real_spatial)),
        "IS": inception_score(logits, 7),
        **dict(zip(("precision", "recall"), precision_recall(real, pool, "adm", 2), strict=True)),
        **dict(zip(("KID", "KID_std"), kernel_distance(pool, real, 4, 9), strict=True)),
        "FID_std": bootstrap_spread(pool, reference, 3),
    }
    assert found == pytest.approx(expected, rel=1e-9)
    defaults, _ = evaluate(
        replace(config, out=None, **{key: getattr(EvaluationConfig(), key) for key in options}, resamples=10),
        OfThreeKinds(),
    )
    same = {name for name in found if found[name] == defaults[name]}
    assert same <= {"FID", "sFID"}  # the others do follow the options
    assert precision_recall(real, pool, "adm", 2) != precision_recall(real, pool, "float32", 2)


def test_features_that_a_killed_evaluation_left_are_not_taken_for_those_of_another_network(tmp_path):
    config = EvaluationConfig(
        samples=str(write_pictures(tmp_path / "made", 20)),
        reference=str(write_pictures(tmp_path / "real", 12)),
        out=str(tmp_path / "m.json"),
    )
    calls = []

    def dying(images):
        calls.append(len(images))
        if len(calls) > 1:
            raise ValueError("the power is gone")
        return torch.zeros(len(images), 3)

    with pytest.raises(ValueError, match="power"):
        evaluate(config, CallableFeatures(dying, "brightness", 3, "another"))
    assert len(list(tmp_path.glob(".*.features"))) == 1
    found, _ = evaluate(config, brightness())
    assert found == evaluate(replace(config, out=str(tmp_path / "fresh.json")), brightness())[0]
    assert not list(tmp_path.glob(".*.features"))


def test_features_of_an_evaluation_killed_just_after_it_wrote_are_removed_by_the_same_command(
    tmp_path, monkeypatch
):
    pictures = str(write_pictures(tmp_path / "made", 20))
    config = EvaluationConfig(samples=pictures, reference=pictures, out=str(tmp_path / "m.json"))
    with monkeypatch.context() as patch:
        patch.setattr("sitvit.eval.evaluate.forget", lambda scratch: None)
        found = evaluate(config, brightness())
    assert list(tmp_path.glob(".*.features"))
    assert evaluate(config, brightness()) == found
    assert not list(tmp_path.glob(".*.features"))


def test_of_more_than_10000_reference_images_evenly_spaced_ones_are_kept():
    assert manifold_rows(9).tolist() == [*range(9)]
    rows = manifold_rows(25_000)
    assert rows[:5].tolist() == [0, 2, 5, 7, 10]
    assert (len(set(rows)), rows[-1]) == (10_000, 24_997)


def test_an_adm_reference_gives_its_statistics_and_its_images_features(tmp_path, capsys):
    metrics, _ = measured(tmp_path, adm_file(tmp_path / "ref.npz", brightness()))
    assert set(metrics) == {"FD-brightness", "precision", "recall"}
    said = capsys.readouterr().out
    assert "could be checked by its shapes alone" in said
    assert "below 2,048 the distance is biased" in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sigma": None}, "lacks sigma; it has arr_0, mu"),
        ({"mu": np.zeros(9), "sigma": np.eye(9)}, r"mu is \(9,\) .* brightness has 3 features"),
        ({"sigma": np.full((3, 3), np.nan)}, "sigma has values that are no finite numbers"),
        ({"sigma": np.arange(9.0).reshape(3, 3)}, "sigma is no covariance"),
        ({"arr_0": None}, "pr need the features of 4 or more reference images; .* has 0"),
        ({"arr_0": np.zeros((2, 20, 20, 3), np.uint8)}, "4 or more reference images; .* has 2"),
        ({"arr_0": np.zeros((30, 32, 32, 3), np.uint8)}, "samples have 20 x 20 pixels, but .* 32 x 32"),
        ({"arr_0": np.zeros((30, 20, 20, 3), np.float32)}, "needed is uint8"),
        ({"mu_s": np.zeros(2)}, "lacks mu_s or sigma_s"),
        ({"features": np.zeros((30, 2), np.float32)}, r"features are \(30, 2\); brightness has "),
        ({"features": np.full((30, 3), np.nan, np.float32)}, "features has values that are no finite"),
        ({"provenance": np.array("[1]")}, "its provenance is no JSON object"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused_by_name(tmp_path, changes, sentence):
    path = adm_file(tmp_path / "ref.npz", brightness(), **changes)
    with pytest.raises(ValueError, match=sentence) as refusal:
        measured(tmp_path, path)
    assert "ref.npz" in str(refusal.value)
    assert not (tmp_path / "m.json").exists()


def test_a_reference_of_other_features_size_or_kind_is_refused(tmp_path):
    pictures = write_pictures(tmp_path / "real", 30)
    config = EvaluationConfig(samples=str(pictures), features=FASHION)
    of_others = make_reference(config, str(pictures), tmp_path / "others.npz", None)
    with pytest.raises(ValueError, match="holds statistics of fashion-classifier .* not of brightness"):
        measured(tmp_path, str(of_others))
    larger = make_reference(config, str(pictures), tmp_path / "larger.npz", 32)
    samples = write_pictures(tmp_path / "made", 20)
    with pytest.raises(ValueError, match="samples have 20 x 20 pixels, but .* 32 x 32"):
        evaluate(replace(config, samples=str(samples), reference=str(larger), out=str(tmp_path / "m.json")))
    text = tmp_path / "text.npz"
    text.write_text("mu sigma")
    with pytest.raises(ValueError, match=r"text.npz cannot be read as an npz file"):
        measured(tmp_path, str(text))


def test_a_damaged_npz_is_read_or_refused_by_name_whichever_byte_is_wrong(tmp_path):
    extractor, path = brightness(), tmp_path / "damaged.npz"
    pictures = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    np.savez_compressed(tmp_path / "moments.npz", mu=np.zeros(3), sigma=np.eye(3))
    np.savez_compressed(tmp_path / "images.npz", arr_0=pictures)
    told = []
    for name in ("moments.npz", "images.npz"):
        whole = (tmp_path / name).read_bytes()
        for at in range(0, len(whole), 2):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            try:
                if is_statistics(path):
                    read_statistics(path, extractor)
                else:
                    open_set(str(path), CPU).images.read(1)
            except ValueError as error:
                told.append(str(error))
    assert len(told) > 200
    assert all(str(path) in sentence for sentence in told)


def test_samples_that_cannot_be_measured_are_refused_by_name(tmp_path):
    real = str(write_pictures(tmp_path / "real", 12))

    def refuse(samples, sentence):
        config = EvaluationConfig(samples=str(samples), reference=real, out=str(tmp_path / "m.json"))
        with pytest.raises(ValueError, match=sentence):
            evaluate(config, brightness())

    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "empty has no images")
    refuse(write_pictures(tmp_path / "one", 1), r"one has 1 image\(s\); at least 2")
    mixed = write_pictures(tmp_path / "mixed", 3)
    Image.new("RGB", (30, 20)).save(mixed / "999.png")
    refuse(mixed, "999.png has 30 x 20 pixels")
    corrupt = write_pictures(tmp_path / "corrupt", 3)
    (corrupt / "001.png").write_bytes(b"no picture")
    refuse(corrupt, "001.png cannot be read as an image")
    np.savez(tmp_path / "floats.npz", arr_0=np.zeros((4, 20, 20, 3), np.float32))
    refuse(tmp_path / "floats.npz", "needed is uint8")
    np.savez(tmp_path / "ones.npz", arr_0=np.ones((4, 20, 20, 3), np.uint8))
    refuse(tmp_path / "ones.npz", "only the values 0 and 1")
    refuse(tmp_path / "absent", "there is no folder")


def test_a_reference_of_another_size_is_refused_before_any_feature_and_one_of_the_same_is_not(tmp_path):
    samples = write_pictures(tmp_path / "made", 20)
    np.savez(tmp_path / "of_images.npz", arr_0=np.zeros((30, 32, 32, 3), np.uint8))
    adm = adm_file(tmp_path / "adm.npz", brightness(), arr_0=np.zeros((30, 32, 32, 3), np.uint8))

    def measure(reference, sides):
        def never(images):
            raise AssertionError("features were extracted")

        config = EvaluationConfig(samples=str(samples), reference=reference, out=str(tmp_path / "m.json"))
        with pytest.raises(ValueError, match=f"samples have 20 x 20 pixels, but .* of images of {sides}"):
            evaluate(config, CallableFeatures(never, "brightness", 3, "1"))

    measure(str(write_pictures(tmp_path / "real", 12, (20, 32))), "20 x 32; --make-reference NPZ crops")
    measure(str(tmp_path / "of_images.npz"), "32 x 32; --make-reference")
    measure(adm, "32 x 32")


def test_images_that_are_not_square_are_measured_against_those_of_their_size(trained_run, few, tmp_path):
    """Made on the fly or on disk; the square images of the training set are refused."""
    job = ["--num-images", "4", "--num-steps", "1", "--image-size", "32", "48"]
    job += ["--checkpoint", str(trained_run), "--features", FASHION]
    real = ["--reference", str(write_pictures(tmp_path / "real", 12, (48, 32)))]
    cli.evaluate([*job, *real, "--out", str(tmp_path / "online.json")])
    keep = ["--keep-samples", str(tmp_path / "kept"), "--out", str(tmp_path / "kept.json")]
    cli.evaluate([*job, *real, *keep])
    online, kept = (json.loads((tmp_path / f"{n}.json").read_text())["metrics"] for n in ("online", "kept"))
    assert online == kept
    with pytest.raises(ValueError, match="samples have 48 x 32 pixels, but fashion-mnist .* 32 x 32"):
        cli.evaluate(["--samples", str(tmp_path / "kept"), "--out", str(tmp_path / "m.json")])
    Image.new("RGB", (32, 32)).save(tmp_path / "kept" / "images" / "000001.png")
    with pytest.raises(ValueError, match="000001.png has 32 x 32 pixels, but its record has 48 x 32"):
        cli.evaluate(["--samples", str(tmp_path / "kept"), *real, "--out", str(tmp_path / "m.json")])


def test_metrics_that_the_features_do_not_have_are_refused_before_anything_is_read(tmp_path):
    path = adm_file(tmp_path / "ref.npz", brightness())
    for metric, sentence in (("sfid", "no spatial features"), ("is", "no logits of an Inception Score")):
        with pytest.raises(ValueError, match=sentence):
            measured(tmp_path, path, metrics=[metric])


def test_a_folder_of_photos_in_a_folder_called_images_is_measured(tmp_path):
    write_pictures(tmp_path / "photos" / "images", 5)
    assert len(open_set(str(tmp_path / "photos"), CPU).images) == 5


def test_weights_of_features_that_are_not_used_are_refused(config):
    for features in (None, FASHION):
        one = replace(config, features=features, inception_weights="w.pth")
        with pytest.raises(ValueError, match="features are fashion-classifier's: add --features inception"):
            evaluate(one)


def test_the_same_images_as_a_folder_a_zip_and_an_npz_give_the_same_number(tmp_path):
    import zipfile

    folder = write_pictures(tmp_path / "flat", 9)
    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
    stacked = np.stack([np.asarray(Image.open(path)) for path in sorted(folder.iterdir())])
    np.savez(tmp_path / "flat.npz", arr_0=stacked)
    real = str(write_pictures(tmp_path / "real", 30))
    found = [
        evaluate(
            EvaluationConfig(
                samples=str(tmp_path / name), reference=real, out=str(tmp_path / f"{name}.json")
            ),
            brightness(),
        )[0]["FD-brightness"]
        for name in ("flat", "flat.zip", "flat.npz")
    ]
    assert found[0] == found[1] == found[2]


def test_all_images_of_a_folder_are_counted_whatever_their_suffix_and_depth(tmp_path):
    folder = write_pictures(tmp_path / "p", 2)
    write_pictures(folder / "below", 2, suffix="JPEG")
    write_pictures(folder / "below" / "again", 1, suffix="webp")
    assert len(open_set(str(folder), CPU).images) == 5


def test_the_self_check_passes_on_the_published_numbers_and_names_what_is_missed():
    good = {"FID": 3.941, "sFID": 6.1405, "IS": 215.98, "precision": 0.8, "recall": 0.5}
    assert all(line.endswith("ok") for line in check_against_published("256", good))
    with pytest.raises(ValueError, match="misses FID:"):
        check_against_published("256", {**good, "FID": 3.95})


def test_the_images_of_a_job_are_those_that_it_is_asked_for(config):
    job = job_of(config, 5, CPU)
    assert (job.num_images, job.batch_size, job.guidance.cfg_scale) == (22, 5, 1.5)
