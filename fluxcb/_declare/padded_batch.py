"""Batches that were filled up to a common size, with a mask of their examples."""

from __future__ import annotations

from typing import Any

__all__ = ["PaddedDict", "PaddedTuple", "mask_of", "padded"]


class _Masked:
    """A batch with a mask.

    Attributes:
        mask_was_read: Whether `mask` has been read. A loss function that does not read it is a mistake.
    """

    mask_was_read: bool = False
    _mask: Any

    @property
    def mask(self) -> Any:
        """float32[batch], 1 for the examples of the data source, and 0 for those that were added."""
        self.mask_was_read = True
        return self._mask

    @mask.setter
    def mask(self, mask: Any) -> None:
        self._mask = mask


class PaddedTuple(_Masked, tuple[Any, ...]):
    """A batch that is a tuple, such as `(inputs, targets)`, with the attribute `mask`."""


class PaddedDict(_Masked, dict[Any, Any]):
    """A batch that is a dictionary, with the attribute `mask`."""


def padded(batch: Any, mask: Any) -> PaddedTuple | PaddedDict | None:
    """Return a batch with a mask, or None if the batch is neither a tuple nor a list nor a dictionary."""
    made = PaddedDict(batch) if type(batch) is dict else PaddedTuple(batch) if type(batch) in (tuple, list) else None
    if made is not None:
        made.mask = mask
    return made


def mask_of(batch: Any) -> Any:
    """Return the mask of a batch that was filled up, or None for another batch."""
    return batch._mask if isinstance(batch, _Masked) else None
