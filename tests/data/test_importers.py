"""Latent caches of other projects: what each wrote, read back with the scale applied once."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file

from sitvit import cli
from sitvit.data.autoencoder import (
    EMBEDDED_AUTOENCODERS,
    Autoencoder,
    images_to_pixels,
    latents_of_moments,
)
from sitvit.data.importers import import_latents
from sitvit.data.latents import LatentCache

N = 24


@pytest.fixture(scope="module")
def sd_like(tmp_path_factory):
    """The embedded autoencoder with latents r times as large, so that its scale is SD's, 0.18215."""
    network = AutoencoderKL.from_pretrained(EMBEDDED_AUTOENCODERS["fashion-autoencoder"])
    r = network.config.scaling_factor / 0.18215
    with torch.no_grad():
        network.quant_conv.weight[:4] *= r
        network.quant_conv.bias[:4] *= r
        network.quant_conv.bias[4:] += 2 * np.log(r)
        network.post_quant_conv.weight /= r
    network.register_to_config(scaling_factor=0.18215)
    folder = tmp_path_factory.mktemp("sd")
    network.save_pretrained(folder)
    return Autoencoder(str(folder), "cpu")


@pytest.fixture(scope="module")
def draws(images, sd_like):
    """Unscaled draws of the posteriors of N images and of their mirrors, as LightningDiT keeps them."""
    distribution = posterior(images, sd_like)
    return distribution.sample().contiguous(), distribution.sample().flip(-1).contiguous()


@pytest.fixture(scope="module")
def labels():
    return (torch.arange(N) * 7) % 5


def posterior(images, autoencoder):
    pixels = images_to_pixels(torch.from_numpy(np.stack([images.read(i) for i in range(N)])))
    return autoencoder.network.encode(pixels).latent_dist


def write_edm2(folder, distribution, labels):
    """As REPA's tool: float32 mean and standard deviation, labels in dataset.json."""
    moments = torch.cat([distribution.mean, distribution.std], dim=1)
    entries = []
    for i in range(N):
        name = f"{i // 10:05}/img-mean-std-{i:08}.npy"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, moments[i].numpy())
        entries.append([name, int(labels[i])])
    (folder / "dataset.json").write_text(json.dumps({"labels": entries[::-1]}))


def test_mean_and_deviation_become_the_moments_of_the_same_posterior(images, sd_like, labels, tmp_path):
    distribution = posterior(images, sd_like)
    write_edm2(tmp_path / "data" / "vae-sd", distribution, labels)
    import_latents(tmp_path / "data", sd_like, tmp_path / "c", False)
    cache = LatentCache(tmp_path / "c")
    assert np.array_equal(cache.labels, labels.numpy())
    assert cache.image_size == 32
    noise = torch.randn(N, 4, 8, 8)
    found = latents_of_moments(cache.moments(np.arange(N), np.zeros(N, bool)), noise, cache.autoencoder)
    expected = (distribution.mean + distribution.std * noise) * 0.18215
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=5e-3)  # float16
    assert cache.manifest["imported_from"] == "REPA/EDM2"
    cache.verify()


def test_lightningdits_draws_and_their_mirrors_are_scaled_once(draws, sd_like, labels, tmp_path):
    z, mirrored = draws
    (tmp_path / "l").mkdir()
    for shard, rows in enumerate((slice(0, 16), slice(16, N))):
        tensors = {"latents": z[rows], "latents_flip": mirrored[rows], "labels": labels[rows]}
        save_file(
            {k: v.contiguous() for k, v in tensors.items()},
            tmp_path / "l" / f"latents_rank00_shard{shard:03}.safetensors",
        )
    import_latents(tmp_path / "l", sd_like, tmp_path / "c", False)
    cache = LatentCache(tmp_path / "c")
    assert cache.has_flip
    for flip, expected in ((False, z), (True, mirrored)):
        moments = cache.moments(np.arange(N), np.full(N, flip))
        found = latents_of_moments(moments, torch.randn(N, 4, 8, 8), cache.autoencoder)
        torch.testing.assert_close(found, expected * 0.18215, atol=1e-3, rtol=1e-3)  # float16
    assert np.array_equal(cache.labels, labels.numpy())


def write_fast_dit(folder, latents, labels):
    for kind, values in (("features", latents), ("labels", labels)):
        (folder / f"imagenet256_{kind}").mkdir(parents=True)
        for i in range(len(values)):
            np.save(folder / f"imagenet256_{kind}" / f"{i}.npy", values[i : i + 1].numpy())


def test_fast_dits_scaled_draws_are_not_scaled_twice(draws, sd_like, labels, tmp_path):
    latents = draws[0] * 0.18215  # as its tool saves them
    write_fast_dit(tmp_path / "f", latents, labels)
    import_latents(tmp_path / "f", sd_like, tmp_path / "c", False)
    cache = LatentCache(tmp_path / "c")
    moments = cache.moments(np.arange(N), np.zeros(N, bool))
    found = latents_of_moments(moments, torch.randn(N, 4, 8, 8), cache.autoencoder)
    torch.testing.assert_close(found, latents, atol=1e-3, rtol=1e-3)  # float16
    assert np.array_equal(cache.labels, labels.numpy())  # 10 comes after 9, not after 1


def test_pairs_that_do_not_match_are_refused_by_name(draws, sd_like, labels, tmp_path):
    write_fast_dit(tmp_path / "f", draws[0], labels)
    (tmp_path / "f" / "imagenet256_labels" / "7.npy").unlink()
    with pytest.raises(ValueError, match=r"in one only: 7.npy"):
        import_latents(tmp_path / "f", sd_like, tmp_path / "c", False)


class Exact:
    """A posterior around the pixels themselves, which `pixels` decodes as they are."""

    def __init__(self, pixels):
        self.mean, self.std = pixels, torch.full_like(pixels, 0.01)


def test_latents_of_pixels_from_zero_to_one_are_found_out(images, labels, tmp_path):
    """EDM2's own tool gives the autoencoder x / 255."""
    pixels = images_to_pixels(torch.from_numpy(np.stack([images.read(i) for i in range(N)])))
    write_edm2(tmp_path / "edm2", Exact((pixels + 1) / 2), labels)
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\], as EDM2's own tool does"):
        import_latents(tmp_path / "edm2", Autoencoder("pixels", "cpu"), tmp_path / "c", False)
    write_edm2(tmp_path / "over", Exact((pixels + 1) * 0.65 - 0.3), labels)  # -0.3 ... 1
    with pytest.raises(ValueError, match=r"decode to -0.30 \.\.\. "):
        import_latents(tmp_path / "over", Autoencoder("pixels", "cpu"), tmp_path / "c", False)
    write_edm2(tmp_path / "repa", Exact(pixels), labels)
    import_latents(tmp_path / "repa", Autoencoder("pixels", "cpu"), tmp_path / "c", False)
    assert len(LatentCache(tmp_path / "c")) == N


def test_what_cannot_be_imported_is_refused_by_name(draws, sd_like, tmp_path, labels):
    with pytest.raises(ValueError, match="there is no folder"):
        import_latents(tmp_path / "none", sd_like, tmp_path / "c", False)
    with pytest.raises(ValueError, match="is no latent cache of a known kind"):
        import_latents(tmp_path, sd_like, tmp_path / "c", False)
    write_fast_dit(tmp_path / "f", torch.randn(N, 16, 8, 8), labels)
    with pytest.raises(ValueError, match=r"shape \(16, 8, 8\), which autoencoder .* with 4 channels"):
        import_latents(tmp_path / "f", sd_like, tmp_path / "c", False)
    shutil.rmtree(tmp_path / "f")
    bad = draws[0].clone()
    bad[11, 0, 0, 0] = float("nan")
    write_fast_dit(tmp_path / "f", bad, labels)
    with pytest.raises(ValueError, match=r"imagenet256_features/11.npy in .* not finite"):
        import_latents(tmp_path / "f", sd_like, tmp_path / "c", False)
    assert not (tmp_path / "c" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (["00000/img-mean-std-00000003.npy", 1.5], "must list .*has .*1.5"),
        (["00000/img-mean-std-00000003.npy", None], "must list .*has .*None"),
        ("00000", "must list .*has '00000'"),
        (["00000/img-mean-std-00000003.npy", 1], "lists 1 files twice, such as 00000/img-mean-std-00000003"),
    ],
)
def test_labels_that_are_no_list_of_files_and_numbers_are_refused(
    images, sd_like, labels, tmp_path, entry, words
):
    write_edm2(tmp_path, posterior(images, sd_like), labels)
    record = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": [*record["labels"], entry]}))
    with pytest.raises(ValueError, match=f"dataset.json {words}"):
        import_latents(tmp_path, sd_like, tmp_path / "c", False)


def test_labels_as_a_dictionary_are_refused(tmp_path, sd_like):
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"x.npy": 0}}))
    with pytest.raises(ValueError, match="dataset.json must list"):
        import_latents(tmp_path, sd_like, tmp_path / "c", False)


def test_files_that_are_not_listed_and_the_span_of_pixels_are_told(images, sd_like, labels, tmp_path, capsys):
    write_edm2(tmp_path / "e", posterior(images, sd_like), labels)
    np.save(tmp_path / "e" / "extra.npy", np.zeros(3))
    import_latents(tmp_path / "e", sd_like, tmp_path / "c", False)
    told = capsys.readouterr().out
    assert "passed over 1 files that" in told
    assert "extra.npy" in told
    assert "their pixels, decoded: -1." in told


def test_a_file_of_another_shape_is_named(images, sd_like, labels, tmp_path):
    write_edm2(tmp_path / "e", posterior(images, sd_like), labels)
    np.save(tmp_path / "e" / "00000" / "img-mean-std-00000005.npy", np.zeros((8, 4, 4), np.float32))
    with pytest.raises(ValueError, match=r"img-mean-std-00000005.npy holds float32 \(8, 4, 4\), others"):
        import_latents(tmp_path / "e", sd_like, tmp_path / "c", False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latents_flip": torch.zeros(N - 1, 4, 8, 8)}, r"latents_flip \[23, 4, 8, 8\]"),
        ({"labels": torch.zeros(N)}, "labels are F32, needed is I32 or I64"),
        ({"latents": torch.zeros(N, 4, 8, 8, dtype=torch.uint8)}, "latents are U8, needed is BF16 or F16"),
        ({"labels": torch.full((N,), 2_000_000_000)}, "has a label 2000000000"),
    ],
)
def test_lightningdits_files_of_another_kind_are_refused_by_name(
    draws, sd_like, labels, tmp_path, change, words
):
    z = draws[0]
    save_file(
        {"latents": z, "latents_flip": z.clone(), "labels": labels, **change}, tmp_path / "x.safetensors"
    )
    with pytest.raises(ValueError, match=words):
        import_latents(tmp_path, sd_like, tmp_path / "c", False)


def test_latents_in_bfloat16_come_to_the_bit(draws, sd_like, labels, tmp_path):
    """Its 8 bits of mantissa fit into float16's 11, within float16's range."""
    z, mirrored = (drawn.bfloat16() for drawn in draws)
    tensors = {"latents": z.contiguous(), "latents_flip": mirrored.contiguous(), "labels": labels}
    save_file(tensors, tmp_path / "x.safetensors")
    import_latents(tmp_path, sd_like, tmp_path / "c", False)
    cache = LatentCache(tmp_path / "c")
    for flip, expected in ((False, z), (True, mirrored)):
        found = cache.moments(np.arange(N), np.full(N, flip)).float()
        # below 2^-14 float16 has fewer bits: steps of 2^-24, rounded
        torch.testing.assert_close(found, expected.float(), atol=2**-25, rtol=0)


def test_a_safetensors_file_that_was_cut_off_is_named(draws, sd_like, labels, tmp_path):
    save_file({"latents": draws[0], "labels": labels}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    for cut in (data[:-100], data[:50], b""):
        (tmp_path / "x.safetensors").write_bytes(cut)
        with pytest.raises(ValueError, match=r"x.safetensors cannot be read as a safetensors file"):
            import_latents(tmp_path, sd_like, tmp_path / "c", False)


def test_labels_of_32_bits_are_read(draws, sd_like, labels, tmp_path):
    save_file({"latents": draws[0], "labels": labels.int()}, tmp_path / "x.safetensors")
    import_latents(tmp_path, sd_like, tmp_path / "c", False)
    assert np.array_equal(LatentCache(tmp_path / "c").labels, labels.numpy())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--import", "x", "--out", "c", "--flip"], "--import does not go with --flip"),
        (
            ["--import", "x", "--out", "c", "--image-size", "64", "--images", "y"],
            "--import .* --images, --i",
        ),
        (["--import", "x", "--out", "c", "--verify"], "--verify does not go with --import"),
        (["--check", "--verify", "--out", "c"], "--verify does not go with --check"),
        (["--check", "--on-error", "skip"], "--check does not go with --on-error"),
        (["--image-size", "0"], "--image-size must be at least 1"),
    ],
)
def test_options_that_would_not_be_read_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        cli.encode_latents(arguments)


def arguments_of(folder, autoencoder, out, *more):
    return ["--import", str(folder), "--autoencoder", autoencoder.identity.name, "--out", str(out), *more]


def test_the_verb_imports_once_and_says_what_the_network_will_see(draws, sd_like, labels, tmp_path, capsys):
    write_fast_dit(tmp_path / "f", draws[0] * 0.18215, labels)
    cli.encode_latents(arguments_of(tmp_path / "f", sd_like, tmp_path / "c"))
    printed = capsys.readouterr().out
    assert "imported 24 latents of fast-DiT" in printed
    assert re.search(r"channel means 0\.[012]\d from 0, standard deviation (0\.9|1\.0)", printed)
    cli.encode_latents(arguments_of(tmp_path / "f", sd_like, tmp_path / "c"))
    assert "all 24 latents are there already" in capsys.readouterr().out


@pytest.mark.parametrize("times", [0.18215, 1 / 0.18215])
def test_latents_of_another_scale_are_refused_with_the_value_unless_it_is_to_be_taken_out(
    draws, sd_like, labels, tmp_path, times
):
    write_fast_dit(tmp_path / "f", draws[0] * 0.18215 * times, labels)
    with pytest.raises(
        ValueError, match=r"scaled by 0.18215 .* standard deviation (0\.1|5\.).*scaled already"
    ):
        cli.encode_latents(arguments_of(tmp_path / "f", sd_like, tmp_path / "c"))
    assert not (tmp_path / "c").exists()
    cli.encode_latents(arguments_of(tmp_path / "f", sd_like, tmp_path / "c", "--normalize-channels"))
    assert LatentCache(tmp_path / "c").autoencoder.channel_std == pytest.approx([times] * 4, rel=0.2)


def test_latents_of_pixels_from_zero_to_one_are_refused_though_the_decoder_overshoots(
    images, sd_like, labels, tmp_path
):
    """This decoder makes black of the flat gray that black is in [0, 1]; the channels' means tell."""
    pixels = images_to_pixels(torch.from_numpy(np.stack([images.read(i) for i in range(N)])))
    distribution = sd_like.network.encode((pixels + 1) / 2).latent_dist
    decoded = sd_like.network.decode(distribution.mean).sample
    assert decoded.quantile(0.01) < -0.9
    write_edm2(tmp_path / "edm2", distribution, labels)
    with pytest.raises(
        ValueError, match=r"channel means 1\.\d\d from 0.* pixels in \[0, 1\] \(EDM2's own tool"
    ):
        import_latents(tmp_path / "edm2", sd_like, tmp_path / "c", False)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("finished", [True, False])
def test_latents_that_were_written_again_since_are_not_taken_for_the_old_ones(
    draws, sd_like, labels, tmp_path, finished
):
    """Also those that lie beyond what is looked at first."""
    write_fast_dit(tmp_path / "f", draws[0].repeat(3, 1, 1, 1) * 0.18215, labels.repeat(3))
    cli.encode_latents(arguments_of(tmp_path / "f", sd_like, tmp_path / "c"))
    if not finished:
        (tmp_path / "c" / "manifest.json").unlink()
    changed = next((tmp_path / "f").glob("*_features")) / "70.npy"
    np.save(changed, np.load(changed) * 1.5)
    with pytest.raises(ValueError, match="was begun with other images"):
        cli.encode_latents(arguments_of(tmp_path / "f", sd_like, tmp_path / "c"))
