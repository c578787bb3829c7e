"""Batches that were filled up to a common size, with a mask of their examples."""

from __future__ import annotations

from typing import Any

__all__ = ["PaddedDict", "PaddedTuple", "mask_of", "padded"]


class PaddedTuple(tuple[Any, ...]):
    """A batch that is a tuple, such as `(inputs, targets)`, with the attribute `mask`.

    Attributes:
        mask: float32[batch], 1 for the examples of the data source, and 0 for those that were added.
    """

    mask: Any


class PaddedDict(dict[Any, Any]):
    """A batch that is a dictionary, with the attribute `mask`; see `PaddedTuple`."""

    mask: Any


def padded(batch: Any, mask: Any) -> PaddedTuple | PaddedDict | None:
    """Return a batch with a mask, or None if the batch is neither a tuple nor a list nor a dictionary."""
    made = PaddedDict(batch) if type(batch) is dict else PaddedTuple(batch) if type(batch) in (tuple, list) else None
    if made is not None:
        made.mask = mask
    return made


def mask_of(batch: Any) -> Any:
    """Return the mask of a batch that was filled up, or None for another batch."""
    return batch.mask if isinstance(batch, PaddedTuple | PaddedDict) else None
