"""Data for the programs: it ships with fluxcb and with Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["digits", "images", "text"]


def digits(count: int = 1536) -> tuple[np.ndarray, np.ndarray]:
    """Return handwritten digits: images `float32[count, 8, 8, 1]` between 0 and 1, and labels `int32[count]`."""
    with np.load(Path(__file__).parents[2] / "fluxcb/data/digits.npz") as stored:
        images, labels = stored["images"][:count], stored["labels"][:count]
    return (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels.astype(np.int32)


def images(count: int = 1536) -> np.ndarray:
    """Return handwritten digits `float32[count, 64]` between 0 and 1."""
    return digits(count)[0].reshape(-1, 64)


def text(length: int, count: int) -> tuple[np.ndarray, int]:
    """Return windows of English text as `int32[count, length + 1]`, and the number of different characters."""
    from pydoc_data.topics import topics

    characters = "".join(topics[name] for name in sorted(topics))
    vocabulary = sorted(set(characters))
    ids = {character: number for number, character in enumerate(vocabulary)}
    tokens = np.array([ids[character] for character in characters[: count * length + 1]], np.int32)
    return np.stack([tokens[at * length : (at + 1) * length + 1] for at in range(count)]), len(vocabulary)
