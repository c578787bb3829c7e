"""The data of an `InferenceRunner`, with a check of its length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fluxcb._errors import DataError, DeclarationError
from fluxcb.data.loader import ArrayLoader
from fluxcb.data.sources import MappedSource, PlacedSource, is_inputs_and_targets, length_of

__all__ = ["InferenceData"]


class InferenceData:
    """A data source that can be iterated repeatedly.

    Args:
        source: An iterable of batches.
        owner: The owner of the data, for messages.

    Attributes:
        shuffles: Whether it is an `ArrayLoader` that shuffles.

    Raises:
        DeclarationError: `source` cannot be iterated repeatedly.
        DataError: The length of `source` is 0.
    """

    def __init__(self, source: Any, owner: str) -> None:
        self.source = source
        self._owner = owner
        innermost = source
        while isinstance(innermost, MappedSource | PlacedSource):  # wrapping an iterator does not make it repeatable
            innermost = innermost.source
        if not hasattr(source, "__iter__") or isinstance(innermost, Iterator):
            kind = "is a one-shot iterator" if hasattr(source, "__iter__") else "cannot be iterated"
            raise DeclarationError(
                f"The data of {owner} {kind} ({type(innermost).__name__}).",
                why="each round iterates over the data again",
                fix="pass a list of batches, an `ArrayLoader`, or a class with `__iter__`",
            )
        # A tuple of two arrays can be iterated, so each array would be taken for a batch.
        if is_inputs_and_targets(source):
            raise DeclarationError(
                f"The data of {owner} is a pair of arrays, which is not a data source.",
                why="a data source is something that yields batches",
                fix="for inputs and targets, write `fluxcb.data.ArrayLoader((xs, ys), batch_size=32, shuffle=False)`",
            )
        self.shuffles = isinstance(innermost, ArrayLoader) and innermost.shuffle
        if self.length() == 0:
            raise self._empty()
        # A loader may reuse its buffers for the next batch, while JAX still reads NumPy arrays after a call returns.
        # Batches of a sequence exist all at once, so they cannot share buffers.
        self._copies = not (isinstance(source, Sequence) or getattr(source, "fresh_batches", False))

    def length(self) -> int | None:
        """Return the number of batches according to the data source, or None if it has no length."""
        return length_of(self.source)

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of one round.

        Args:
            epoch: The epoch to pass to `set_epoch` of the source, so that a resumed run gets the same order.

        Raises:
            DataError: There are no batches, or their number differs from the length of the source.
        """
        declared, count = self.length(), 0
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        iterator = iter(self.source)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except BaseException as error:
                error.add_note(f"raised by the data of {self._owner}, when batch {count + 1} was pulled from it")
                raise
            if declared is not None and count == declared:  # an infinite source must not run forever
                raise self._wrong_length(declared, f"there are more than {declared}")
            count += 1
            yield self._copied(batch) if self._copies else batch
        if count == 0:
            raise self._empty()
        if declared is not None and count < declared:
            raise self._wrong_length(declared, f"there are {count}")

    def _empty(self) -> DataError:
        return DataError(
            f"The data of {self._owner} has no batches.",
            why="a statistic over no samples, such as an error rate of 0, would look like a real result",
            fix="check its length and filters; with `drop_last=True`, the batch size may exceed the data",
        )

    def _wrong_length(self, declared: int, what: str) -> DataError:
        return DataError(
            f"The data of {self._owner} has length {declared}, but {what}.",
            where=f"{type(self.source).__name__}.__len__",
            why="the statistics would cover another number of batches than the length declares",
            fix="correct `__len__`, or remove it; data of unknown length is read to its end",
        )

    def _copied(self, batch: Any) -> Any:
        import jax
        import numpy as np

        return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
