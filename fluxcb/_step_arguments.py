"""Names of parameters that describe a step: train flags, and random keys."""

from __future__ import annotations

import re

__all__ = ["TRAIN_FLAGS", "names_a_key"]

TRAIN_FLAGS = {"train": False, "training": False, "is_training": False, "is_train": False, "deterministic": True}
"""Parameters that select training mode, and for each whether True means evaluation instead."""

_KEY = re.compile(r"(^|_)(key|rng|prng)($|_)", re.IGNORECASE)


def names_a_key(parameter: str) -> bool:
    """Return whether the name of a parameter says that it takes a random key."""
    return _KEY.search(parameter) is not None
