"""Names of parameters that describe a step: train flags, and random keys."""

from __future__ import annotations

import re

__all__ = ["TRAIN_FLAGS", "names_a_key", "names_a_mode"]

TRAIN_FLAGS = {"train": False, "training": False, "is_training": False, "is_train": False, "deterministic": True}
"""Parameters that select training mode, and for each whether True means evaluation instead."""

_KEY = re.compile(r"(^|_)(key|rng|prng)($|_)", re.IGNORECASE)


# From the beginning of a word, because `constrain` and `latest` are no modes.
_MODE = re.compile(
    r"(^|_|^is)(train|eval|infer|determin|running|test|update|(mode|stats?|ra|tr)($|_))",
    re.IGNORECASE,
)


def names_a_key(parameter: str) -> bool:
    """Return whether the name of a parameter says that it takes a random key."""
    return _KEY.search(parameter) is not None


def names_a_mode(parameter: str) -> bool:
    """Return whether the name of a parameter says that it selects training or evaluation mode."""
    return _MODE.search(parameter) is not None
