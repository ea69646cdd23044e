"""What the schemas' checks are made of: a sentence for each value that makes no sense."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import MISSING

Rule = tuple[str, Any, bool, str]
"""(dotted key, value, whether it is legal, what is legal)"""


def broken(rules: Iterable[Rule]) -> list[str]:
    """ "KEY must be WHAT, got VALUE" for each rule that does not hold."""
    return [f"{key} must be {what}, got {value}" for key, value, legal, what in rules if not legal]


def below(part: Any, prefix: str, lowest: Mapping[str, float]) -> list[str]:
    """A sentence for each of `part`'s named numbers that is below its lowest, infinite or not a number."""
    return [
        f"{prefix}{name} must be at least {least}, got {value}"
        for name, least in lowest.items()
        for value in [getattr(part, name)]
        if value != MISSING and not least <= value < math.inf  # not a number is below everything
    ]


def one_of(part: Any, prefix: str, known: Mapping[str, tuple[str, ...]]) -> list[Rule]:
    """A rule for each of `part`'s named texts: it is one of the known."""
    return [
        (prefix + name, getattr(part, name), getattr(part, name) in names, f"one of {', '.join(names)}")
        for name, names in known.items()
    ]
