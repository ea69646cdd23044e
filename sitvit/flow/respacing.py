"""Which of DiT's 1000 timesteps a sampler keeps: the rule behind "250 respaced" of the published figures.

Each of a number of equal sections keeps timesteps from its first to its last, evenly spread and rounded
(arXiv 2102.09672, section 4); "ddimN" keeps every k-th from 0 (arXiv 2010.02502, appendix D.2).
"""

NUM_TIMESTEPS = 1000


def spaced_timesteps(respacing: int | str) -> list[int]:
    """Which timesteps a chain keeps, rising.

    "250" (or 250) spreads 250 over all from end to end; "10,40" does so with 10 in the half nearer to the
    data and 40 in the other; "ddim50" takes every 20th from 0. The official rule, except that "1" keeps 999
    and not 0, from which one step would lead nowhere.

    Raises:
        ValueError: what cannot be read, fewer than 1 or more than there are, a count without a stride.
    """
    text = str(respacing).strip()
    if text.startswith("ddim"):
        return _strided_timesteps(_count(text.removeprefix("ddim"), text, NUM_TIMESTEPS))
    if text == "1":
        return [NUM_TIMESTEPS - 1]
    sections = text.split(",")
    size, remainder = divmod(NUM_TIMESTEPS, len(sections))
    timesteps, start = [], 0
    for number, section in enumerate(sections):
        length = size + (number < remainder)
        count = _count(section, text, length)
        stride = (length - 1) / max(count - 1, 1)
        position = 0.0
        for _ in range(count):
            timesteps.append(start + round(position))
            position += stride  # added up as the official code does: it decides what lies half-way
        start += length
    return timesteps


def _strided_timesteps(count: int) -> list[int]:
    strides = {len(range(0, NUM_TIMESTEPS, stride)): stride for stride in range(NUM_TIMESTEPS - 1, 0, -1)}
    if count not in strides:
        near = sorted(strides, key=lambda other: abs(other - count))[:2]
        raise ValueError(
            f"respacing 'ddim{count}': no whole stride keeps exactly {count} of {NUM_TIMESTEPS} timesteps; "
            f"take 'ddim{near[0]}' or 'ddim{near[1]}', or '{count}' without ddim"
        )
    return list(range(0, NUM_TIMESTEPS, strides[count]))


def _count(text: str, respacing: str, limit: int) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= limit:
        raise ValueError(
            f"respacing {respacing!r}: a number of steps must be a whole number from 1 to {limit}, "
            f"got {text!r}; write '250', sections as '10,40', or 'ddim50'"
        )
    return int(text)
