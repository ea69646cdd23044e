"""SiT on ViT-5 and the ViT-5 classifier, token by token and head by head, from the equations alone.

`s` is a state dict in float64, whose tensors may ask for gradients; no code is shared with the package.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

State = dict[str, Tensor]
Place = tuple[int, int, float] | None
"""Row, column and theta of a token; None for one that does not turn."""


def linear(s: State, x: Tensor, name: str) -> Tensor:
    bias = s.get(f"{name}.bias")
    return x @ s[f"{name}.weight"].T + (0 if bias is None else bias)


def rms_norm(s: State, x: Tensor, name: str) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return normed * s[f"{name}.weight"] if f"{name}.weight" in s else normed


def turned(vector: Tensor, place: Place) -> Tensor:
    """First half of the dimensions by the row, second by the column; pairs lie side by side."""
    if place is None:
        return vector
    row, column, theta = place
    pairs = len(vector) // 4
    out = []
    for half, coordinate in enumerate((row, column)):
        for k in range(pairs):
            angle = torch.tensor(coordinate * theta ** (-k / pairs), dtype=torch.float64)
            a, b = vector[2 * (half * pairs + k)], vector[2 * (half * pairs + k) + 1]
            out += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
    return torch.stack(out)


def attention(s: State, h: Tensor, at: str, num_heads: int, places: list[Place]) -> Tensor:
    d = h.shape[1] // num_heads
    q_all, k_all, v_all = linear(s, h, f"{at}.qkv").chunk(3, dim=1)
    heads = []
    for head in range(num_heads):
        q, k, v = (part[:, head * d : (head + 1) * d] for part in (q_all, k_all, v_all))
        q, k = rms_norm(s, q, f"{at}.q_norm"), rms_norm(s, k, f"{at}.k_norm")
        q = torch.stack([turned(a, place) for a, place in zip(q, places, strict=True)])
        k = torch.stack([turned(a, place) for a, place in zip(k, places, strict=True)])
        heads.append((q @ k.T / d**0.5).softmax(-1) @ v)
    return linear(s, torch.cat(heads, dim=1), f"{at}.proj")


def patches_of(image: Tensor, p: int) -> list[Tensor]:
    """The patches (C p p,), row by row."""
    rows, columns = image.shape[1] // p, image.shape[2] // p
    return [
        image[:, r * p : (r + 1) * p, c * p : (c + 1) * p].flatten()
        for r in range(rows)
        for c in range(columns)
    ]


def embedded(s: State, image: Tensor, p: int, name: str) -> Tensor:
    kernel = s[f"{name}.proj.weight"].flatten(1)
    return torch.stack([kernel @ patch + s[f"{name}.proj.bias"] for patch in patches_of(image, p)])


def places_of(rows: int, columns: int, num_registers: int) -> list[Place]:
    side = round(num_registers**0.5)
    on_patches: list[Place] = [(r, c, 10000.0) for r in range(rows) for c in range(columns)]
    return on_patches + [(r, c, 100.0) for r in range(side) for c in range(side)]


def slow_vit5(s: State, config, images: Tensor) -> Tensor:
    """The logits (B, classes)."""
    p, logits = config.patch_size, []
    for image in images:
        places = [None, *places_of(image.shape[1] // p, image.shape[2] // p, config.num_registers)]
        patches = embedded(s, image, p, "patch_embed") + s["pos_embed"][0]
        x = torch.cat([s["cls_token"][0], patches, s["reg_token"][0]])
        for i in range(config.depth):
            at = f"blocks.{i}"
            h = attention(s, rms_norm(s, x, f"{at}.norm1"), f"{at}.attn", config.num_heads, places)
            x = x + s[f"{at}.gamma_1"] * h
            h = gelu(linear(s, rms_norm(s, x, f"{at}.norm2"), f"{at}.mlp.fc1"))
            x = x + s[f"{at}.gamma_2"] * linear(s, h, f"{at}.mlp.fc2")
        logits.append(linear(s, rms_norm(s, x, "norm")[0], "head"))
    return torch.stack(logits)


def slow_sit(s: State, config, x_t: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The velocity (B, C, H, W)."""
    return torch.stack(
        [_velocity(s, config, *one) for one in zip(x_t, t.double(), labels.tolist(), strict=True)]
    )


def _velocity(s: State, config, image: Tensor, time: Tensor, label: int) -> Tensor:
    p, channels = config.patch_size, image.shape[0]
    rows, columns = image.shape[1] // p, image.shape[2] // p
    angles = time * 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    features = torch.cat([angles.cos(), angles.sin()])
    c = linear(s, silu(linear(s, features, "t_embedder.mlp.0")), "t_embedder.mlp.2")
    c = c + s["y_embedder.embedding_table.weight"][label]
    x = torch.cat([embedded(s, image, p, "x_embedder") + s["pos_embed"][0], s["reg_token"][0]])
    places = places_of(rows, columns, config.num_registers)
    for i in range(config.depth):
        at = f"blocks.{i}"
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = linear(
            s, silu(c), f"{at}.adaLN_modulation.1"
        ).chunk(6)
        h = rms_norm(s, x, f"{at}.norm1") * (1 + scale_1) + shift_1
        x = x + gate_1 * s[f"{at}.gamma_1"] * attention(s, h, f"{at}.attn", config.num_heads, places)
        h = rms_norm(s, x, f"{at}.norm2") * (1 + scale_2) + shift_2
        h = gelu(linear(s, h, f"{at}.mlp.fc1"), approximate="tanh")
        x = x + gate_2 * s[f"{at}.gamma_2"] * linear(s, h, f"{at}.mlp.fc2")
    shift, scale = linear(s, silu(c), "final_layer.adaLN_modulation.1").chunk(2)
    patches = rms_norm(s, x[: rows * columns], "final_layer.norm_final")
    tokens = linear(s, patches * (1 + scale) + shift, "final_layer.linear")
    cells = [token.view(p, p, channels).permute(2, 0, 1) for token in tokens]
    strips = [torch.cat(cells[r * columns : (r + 1) * columns], dim=2) for r in range(rows)]
    return torch.cat(strips, dim=1)
