"""Experiment files: what is mistyped is named, all at once, before anything heavy."""

from pathlib import Path

import pytest

from sitvit.config import AutoencoderConfig, ClassifierConfig, Config, dump_config, load_config
from sitvit.models.presets import preset

ROOT = Path(__file__).parent.parent
VALID = "run: r\nmodel: {name: SiT-S/2}\ndata: {latents: l}\ntrain: {num_steps: 10}\n"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


def problems(file, text, *overrides):
    with pytest.raises(ValueError, match="c.yaml") as caught:
        load_config(file(text), list(overrides), Config)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_file_loads_and_says_what_it_is(path):
    text = path.read_text()
    for word in ("# What:", "# Paper:", "# Command:", "# Cost:", "# Expected:"):
        assert word in text
    kinds = {"demo_autoencoder.yaml": AutoencoderConfig, "demo_classifier.yaml": ClassifierConfig}
    load_config(path, [], kinds.get(path.name, Config))


def test_file_then_override_and_numbers_as_people_write_them(file):
    config = load_config(file(VALID + "# lr\n"), ["train.lr=1e-3", "model.depth=3"], Config)
    assert config.train.lr == 0.001
    assert config.model_arguments() == {**preset("SiT-S/2"), "depth": 3, "class_dropout_prob": 0.1}


def test_a_base_file_comes_first(tmp_path):
    (tmp_path / "base.yaml").write_text(VALID)
    (tmp_path / "next.yaml").write_text("base: base.yaml\nrun: other\nmodel: {name: SiT-ViT5-S/2}\n")
    config = load_config(tmp_path / "next.yaml", [], Config)
    assert (config.run, config.model.name, config.train.num_steps) == ("other", "SiT-ViT5-S/2", 10)


def test_the_dumped_file_makes_the_same_configuration(file, tmp_path):
    config = load_config(file(VALID), ["run=001", "model.layer_scale_init=null"], Config)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml", [], Config) == config


@pytest.mark.parametrize("text", ["001", "no", "a b=c", "1e5", "null", "a/${x} b", "${run}"])
def test_a_text_value_stays_as_it_was_typed_and_as_it_was_dumped(file, tmp_path, text):
    config = load_config(file(VALID), [f"run={text}", f"data.latents=/{text}"], Config)
    assert (config.run, config.data.latents) == (text, f"/{text}")
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml", [], Config) == config


def test_a_brace_that_is_not_closed_is_told(file):
    assert "run must be of type str, got '${'" in problems(file, VALID, "run=${")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trian.lr=1", "did you mean train.lr?"),
        ("lr=1", "did you mean train.lr?"),
        ("train.learning_rate=1", "known are train.seed"),
        ("train.lr=abc", "train.lr must be of type float, got 'abc'"),
        ("train.batch_size=2.5", "train.batch_size must be of type int, got 2.5"),
        ("train.num_steps=1000.0", "of type int, got 1000.0"),
        ("train.batch_size=-1", "train.batch_size must be at least 1, got -1"),
        ("train.seed=true", "of type int, got True"),
        ("train.lr=0", "train.lr must be above 0"),
        ("train.lr=nan", "train.lr must be above 0"),
        ("train.weight_decay=nan", "train.weight_decay must be at least 0, got nan"),
        ("train.seed=99999999999999999999", "train.seed must be"),
        ("model.mlp_ratio=-1", "model.mlp_ratio must be above 0"),
        ("model.mlp_ratio=inf", "model.mlp_ratio must be above 0"),
        ("model.layer_scale_init=nan", "model.layer_scale_init must be above 0"),
        ("train.ema_decays=[1]", "train.ema_decays must be different numbers from 0 to below 1"),
        ("train.decay_steps=11", "at most train.num_steps = 10"),
        ("model.name=SiT-XXL/2", "SiT-XL/2"),
        ("model.name=DiT-XL/2", "model.name DiT-XL/2 does not go with train.path linear"),
        ("train.path=ddpm", "train.prediction must be noise with path ddpm, got velocity"),
        ("model.rope=maybe", "model.rope must be of type bool"),
        ("data.flip=2", "data.flip must be of type bool, got 2"),
        ("run=", "run must not be empty"),
        ("data.latents= ", "data.latents must not be empty"),
        ("train.flip=true", "did you mean data.flip?"),
        ("batch=8", "did you mean train.batch_size?"),
        ("train.freeze=[*.attn.*]", """got '[*.attn.*]'; write it as ["one", "two"]"""),
        ("model=3", "needs keys below it"),
        ("train.lr", "not of the form key=value"),
    ],
)
def test_a_mistyped_override_is_named_with_what_is_right(file, override, words):
    assert words in problems(file, VALID, override)


def test_all_problems_are_listed_at_once(file):
    told = problems(file, "run: r\nmodel: {nam: SiT-S/2}\ntrain: {num_steps: ten}\n", "x=1")
    for words in ("model.name", "train.num_steps must be of type int", "'x'", "data.latents is missing"):
        assert words in told


def test_text_that_yaml_takes_for_something_else_is_refused(file):
    """`run: 001` would become the folder "1" in silence."""
    assert "put text in quotes" in problems(file, VALID.replace("run: r", "run: 001"))


@pytest.mark.parametrize("text", ["", "a: 1\na: 2\n", "a:\n\t- b\n", "[1, 2]", "just words"])
def test_a_file_that_is_no_mapping_is_refused_by_name(file, text):
    assert "c.yaml" in problems(file, text)


def test_a_missing_file_and_a_missing_base_are_named(file, tmp_path):
    with pytest.raises(ValueError, match="no configuration file .*nowhere.yaml"):
        load_config(tmp_path / "nowhere.yaml", [], Config)
    assert "gone.yaml" in problems(file, "base: gone.yaml\n")
    assert "is based on itself" in problems(file, "base: c.yaml\n")


def test_the_small_networks_files_are_checked_alike(file):
    text = "images: a\nheld_out: b\nout: c\nnum_steps: 0\nblock_out_channels: [3]\n"
    with pytest.raises(ValueError, match="num_steps must be at least 1") as caught:
        load_config(file(text), [], AutoencoderConfig)
    assert "multiples of norm_num_groups 8" in str(caught.value)
    text = "images: a\nheld_out: a\nout: c\nnum_steps: 1\nimage_size: 30\n"
    with pytest.raises(ValueError, match="held_out must be other images") as caught:
        load_config(file(text), [], AutoencoderConfig)
    assert "image_size must be a multiple of 4, got 30" in str(caught.value)
    text = "images: a\nheld_out: b\nout: c\nnum_steps: 1\nwidths: []\n"
    with pytest.raises(ValueError, match="widths must be one to five numbers"):
        load_config(file(text), [], ClassifierConfig)


def test_a_folder_in_place_of_a_file_is_told(tmp_path):
    with pytest.raises(ValueError, match="is a folder; name a configuration file"):
        load_config(tmp_path, [], Config)
