"""The data of an `InferenceRunner`: batches that are counted, and compared with how many there should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fluxcb._errors import DataError, DeclarationError
from fluxcb.data.sources import MappedSource, PlacedSource

__all__ = ["InferenceData"]


class InferenceData:
    """Batches for one round after the other.

    Args:
        source: Anything that yields batches again when iterated again.
        owner: Whose data it is, for messages.

    Raises:
        DeclarationError: It cannot be iterated again.
        DataError: It says that it is empty.
    """

    def __init__(self, source: Any, owner: str) -> None:
        self.source = source
        self._owner = owner
        innermost = source
        while isinstance(innermost, MappedSource | PlacedSource):  # these do not make an iterator repeatable
            innermost = innermost.source
        if not hasattr(source, "__iter__") or isinstance(innermost, Iterator):
            kind = "a one-shot iterator" if hasattr(source, "__iter__") else "nothing that can be iterated"
            raise DeclarationError(
                f"The data of {owner} is {kind} ({type(innermost).__name__}).",
                why="each round goes through the data anew",
                fix="give a list of batches, an `ArrayLoader`, or a class with `__iter__`",
            )
        if self.length() == 0:
            raise self._empty()
        # A loader may reuse its buffers, and numpy arrays are read later than the call returns.
        self._copies = not (isinstance(source, Sequence) or getattr(source, "fresh_batches", False))

    def length(self) -> int | None:
        """Return how many batches the data says there are, or None if it does not say."""
        try:
            return len(self.source)
        except TypeError:
            return None

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of a round.

        Args:
            epoch: What sources with an order of their own are told (`set_epoch`), so that a resumed run has the same.

        Raises:
            DataError: There are none, or more or fewer than the data says.
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
            if declared is not None and count == declared:
                raise self._of_another_length(declared, f"there are more than {declared}")
            count += 1
            yield self._copied(batch) if self._copies else batch
        if count == 0:
            raise self._empty()
        if declared is not None and count < declared:
            raise self._of_another_length(declared, f"there are {count}")

    def _empty(self) -> DataError:
        return DataError(
            f"The data of {self._owner} has no batches.",
            why="a statistic of nothing, such as an error of 0, would look like one of something",
            fix="check its length and filters; with `drop_last=True`, the batch size may exceed the data",
        )

    def _of_another_length(self, declared: int, what: str) -> DataError:
        return DataError(
            f"The data of {self._owner} says that it has {declared} batches, and {what}.",
            where=f"{type(self.source).__name__}.__len__",
            why="statistics over another number of batches are not those that were asked for",
            fix="mend its `__len__`, or leave it out: data of unknown length is read to its end",
        )

    def _copied(self, batch: Any) -> Any:
        import jax
        import numpy as np

        return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
