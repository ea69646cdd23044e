"""The verb `geometry`: a table, json, a sentence for each mistake, and no heavy import."""

import json
import subprocess
import sys

import pytest

from sitvit import cli
from sitvit.models.descriptions import preset_shape
from sitvit.models.geometry import geometry
from sitvit.models.memory import memory

from ..conftest import ROOT


def run_geometry(capsys, *arguments):
    cli.geometry(list(arguments))
    return capsys.readouterr().out


def test_the_table_compares_models_in_aligned_columns(capsys):
    shown = run_geometry(
        capsys, "SiT-XL/2", "SiT-ViT5-XL/2", "--image-size", "256", "--batch-size", "32", "--dtype", "bf16"
    )
    table = shown.split("\n\n")[0].splitlines()
    assert table[0].split() == ["SiT-XL/2", "SiT-ViT5-XL/2"]
    assert len({len(line) for line in table}) == 1
    rows = {line[:40].strip(): line[40:].split() for line in table}
    assert rows["parameters"] == ["675,111,184", "675,087,568"]
    assert rows["multiply-adds an image, forward, G"] == ["118.62", "120.53"]
    assert "mlp" not in rows
    assert "2 FLOPs" in shown


def test_parts_and_overrides_reach_the_table(capsys):
    shown = run_geometry(capsys, "SiT-S/2", "depth=1", "--parts", "mlp=swiglu", "layer_scale_init=none")
    rows = {line[:40].strip(): line[40:].split() for line in shown.splitlines()}
    total = geometry(preset_shape("SiT-S/2", {"depth": 1, "mlp": "swiglu"})).parameters.total
    assert rows["adaln"] == ["0.001"]  # its last row: multiply-adds, in G
    assert rows["parameters"] == [f"{total:,}"]


def test_json_holds_counts_and_bytes_with_what_they_are_for(capsys):
    shown = run_geometry(capsys, "--json", "ViT-B/16", "--batch-size", "3", "--image-size", "224x448")
    (record,) = json.loads(shown)
    assert (record["model"], record["size"], record["tokens"]) == ("ViT-B/16", [448, 224], 393)
    shape = preset_shape("ViT-B/16", {"img_size": "448,224"})
    assert record["parameters"]["total"] == geometry(shape).parameters.total
    assert record["memory"]["total"] == memory(shape, 3, "float32").total
    assert (record["memory"]["batch_size"], record["memory"]["dtype"]) == (3, "float32")


def test_the_grid_question_states_both_rules(capsys):
    shown = run_geometry(capsys, "--image", "1280x720", "--patch", "14")
    assert "floor" in shown
    assert "91 x 51 = 4,641 patches; crops 6 pixels of the width, 6 of the height" in shown
    assert "92 x 52 = 4,784 patches; pads 8" in shown
    assert json.loads(run_geometry(capsys, "--image", "1920x1080", "--patch", "14", "--json"))["floor"] == [
        77,
        137,
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("SiT-XXL/2", "did you mean"),
        ("SiT-S/2 dept=3", "has no argument 'dept'; did you mean depth"),
        ("ViT-B/16 learn_sigma=true", "ViT-B/16 has no argument 'learn_sigma'"),
        (
            "input_size=8 patch_size=2 hidden_size=64 num_heads=4 depth=x",
            "depth must be of type int, got 'x'",
        ),
        ("SiT-S/2 depth=2.5", "depth must be of type int, got '2.5'"),
        ("SiT-S/2 rope=maybe", "rope must be of type bool"),
        ("SiT-S/2 input_size=1,2,3", "input_size must be of type int | tuple"),
        ("SiT-S/2 depth=0", "depth must be at least 1"),
        ("SiT-S/2 patch_size=0 --image-size 256", "patch_size must be at least 1"),
        ("SiT-S/2 mlp_ratio=nan", "mlp_ratio"),
        ("SiT-S/2 norm=batchnorm", "one of layernorm, rmsnorm"),
        ("SiT-S/2 mlp=relu", "one of gelu_tanh, gelu, swiglu"),
        ("SiT-S/2 positions=rotary", "one of sincos, learned, none"),
        ("SiT-S/2 hidden_size=390 num_heads=6", "multiple of 4"),
        ("SiT-S/2 num_heads=7", "multiple of num_heads"),
        ("SiT-ViT5-S/2 num_heads=64", "2-D RoPE"),
        ("SiT-S/2 num_registers=3", "must be a square"),
        ("SiT-S/2 class_dropout_prob=1", "from 0 to below 1"),
        ("SiT-S/2 input_size=9", "nearest legal values are 8 and 10"),
        ("SiT-S/2 --image-size 250", "nearest legal values are 240 and 256"),
        ("ViT-L/14 --image-size 336x340", "image height 340 is not a multiple of 14; .* 336 and 350"),
        ("SiT-S/2 input_size=32 --image-size 256", "the same thing"),
        ("SiT-S/2 --image-size 256x", "WIDTHxHEIGHT"),
        ("SiT-S/2 layer_scale_init=nan", "layer_scale_init must be above 0 and finite, got nan"),
        ("SiT-S/2 layer_scale_init=inf", "layer_scale_init must be above 0 and finite, got inf"),
        ("ViT5-S/16 layer_scale_init=-1", "layer_scale_init must be above 0 and finite, got -1"),
        ("ViT5-S/16 num_classes=-1", "num_classes must be at least 0, got -1"),
        ("ViT5-S/16 pool=max", "pool must be one of class, mean, got 'max'"),
        ("depth=3 hidden_size=64", "missing: input_size, patch_size, num_heads"),
        ("depth=3 embed_dim=64", "missing: img_size, patch_size, num_heads"),
        ("--image-size 64 patch_size=2 hidden_size=6 depth=1 num_heads=4", "multiple of num_heads 4"),
        ("SiT-S/2 --batch-size 0", "--batch-size"),
        ("SiT-S/2 --dtype fp8", "float32, bf16"),
        ("SiT-S/2 --patch 14", "name models"),
        ("--image 1280x720", "name models"),
        ("depth=3", "name a model, such as SiT-XL/2, or describe one"),
        ("--image 10x20 --patch 14", "from 1 to 10 pixels"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(ValueError, match=words):
        cli.geometry(arguments.split())


def test_a_network_without_a_name_is_described_by_its_arguments(capsys):
    sizes = "patch_size=2 hidden_size=384 depth=12 num_heads=6"
    (named,) = json.loads(run_geometry(capsys, "--json", "SiT-S/2", "input_size=16,32"))
    (bare,) = json.loads(run_geometry(capsys, "--json", "input_size=16,32", *sizes.split()))
    (by_image,) = json.loads(run_geometry(capsys, "--json", "--image-size", "256x128", *sizes.split()))
    assert bare == by_image == {**named, "model": "SiT"}


def test_a_classifier_without_a_name_is_described_by_its_arguments(capsys):
    sizes = "img_size=224 patch_size=16 embed_dim=384 depth=12 num_heads=6 num_classes=0 pool=mean mlp=swiglu"
    (bare,) = json.loads(run_geometry(capsys, "--json", *sizes.split()))
    assert bare["model"] == "ViT5"
    shape = preset_shape("ViT5-S/16", {"num_classes": 0, "pool": "mean", "mlp": "swiglu"})
    assert bare["parameters"]["total"] == geometry(shape).parameters.total


def test_an_answer_imports_neither_torch_nor_numpy():
    program = """
import sys
from sitvit import cli
cli.geometry(["SiT-XL/2", "ViT5-B/16", "--parts"])
cli.geometry(["input_size=32", "patch_size=2", "hidden_size=64", "depth=2", "num_heads=4"])
cli.geometry(["--image", "1280x720", "--patch", "14"])
assert not {"torch", "numpy", "diffusers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
