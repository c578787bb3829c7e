"""Batches out of what users pass to `learner.predict` and `learner.evaluate`: arrays, one batch, or many batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fluxcb._compile.arrays import describe
from fluxcb._compile.leaves import check_leaves
from fluxcb._declare.schedules import positive
from fluxcb._errors import DataError
from fluxcb._typing import Batch, PyTree
from fluxcb.data.sources import MappedSource, PlacedSource

__all__ = ["BatchesOf", "Pieces", "as_arrays", "innermost", "is_arrays"]


class BatchesOf(Iterable[Batch]):
    """The batches of data that can be iterated, with errors that say where they came from.

    Args:
        data: A list of batches, a loader, a dataset, an iterator.
        what: What messages call the data, e.g. "`data` of `learner.predict`".
        epoch: What sources with an order of their own are told (`set_epoch`).

    Attributes:
        length: How many batches the data says there are, or None.

    Raises:
        DataError: The data cannot be iterated.
    """

    def __init__(self, data: Any, what: str, epoch: int) -> None:
        self._data, self._what, self._epoch = data, what, epoch
        if isinstance(data, str | bytes | type) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            raise DataError(
                f"{what} is {_shown(data)}, which yields no batches.",
                why="it must be an array, one batch, or something that yields batches",
                fix="give arrays of inputs, a list of batches, or a loader",
            )
        try:
            self.length: int | None = len(data)
        except TypeError:
            self.length = None
        # A loader may reuse its buffers, and JAX reads NumPy arrays after the call has returned.
        self._copies = not (isinstance(data, Sequence) or getattr(data, "fresh_batches", False))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            DataError: There are none.
        """
        set_epoch = getattr(self._data, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._epoch)
        count, batches = 0, iter(self._data)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except Exception as error:
                error.add_note(f"raised by {self._what}, when batch {count + 1} was pulled from it")
                raise
            count += 1
            yield jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch) if self._copies else batch
        if count == 0:
            raise DataError(
                f"{self._what} yields no batches.",
                fix="check its length and filters; an iterator that is used up yields nothing the second time",
            )


def is_arrays(data: Any) -> bool:
    """Return whether data is an array or a pytree of arrays, and no list of batches or loader."""
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return True
    return data is not None and not isinstance(data, list) and not jax.tree_util.all_leaves([data])


class Pieces(Iterable[tuple[PyTree, int]]):
    """Arrays in pieces; iterating yields a piece, and how many of its first examples the piece before had as well.

    Args:
        arrays: A pytree of arrays with the examples along their first axes.
        size: Examples per piece; fewer if there are fewer.
        what: What messages call the arrays.
        overlap: Whether the last piece repeats examples of the one before, so that all pieces have one shape.

    Raises:
        DataError: Something in `arrays` is no array of numbers, or they have no examples, or not equally many.
        DeclarationError: `size` is not positive.
    """

    def __init__(self, arrays: PyTree, size: int, what: str, *, overlap: bool) -> None:
        size = positive(size, "`batch_size` (examples)")
        self._arrays = as_arrays(arrays, what)
        self._count = _examples(self._arrays, what)
        self._size, self._overlap = min(size, self._count), overlap

    def __len__(self) -> int:
        """Return the number of pieces."""
        return math.ceil(self._count / self._size)

    def __iter__(self) -> Iterator[tuple[PyTree, int]]:
        """Yield the pieces; each is taken out of the arrays when it is asked for."""
        for first in range(0, self._count, self._size):
            repeated = max(first + self._size - self._count, 0) if self._overlap else 0
            part = slice(first - repeated, first + self._size - repeated)
            yield jax.tree.map(lambda x, part=part: x[part], self._arrays), repeated


def as_arrays(tree: PyTree, what: str) -> PyTree:
    """Return a pytree whose leaves are NumPy or JAX arrays.

    Raises:
        DataError: Something in it is no array of numbers.
    """
    try:
        check_leaves(tree, what, "data", DataError, lists=False)
    except DataError as error:
        error.where = ()
        error.fix = (*error.fix, "give several batches as a list, `[batch1, batch2]`, and one batch as a tuple")
        raise
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), tree)


def _examples(arrays: PyTree, what: str) -> int:
    """Return the number of examples in arrays.

    Raises:
        DataError: There are none, or the arrays have not equally many.
    """
    named = jax.tree_util.tree_flatten_with_path(arrays)[0]
    lengths = {leaf.shape[0] if leaf.ndim else 0 for _, leaf in named}
    if len(lengths) == 1 and 0 not in lengths:
        return lengths.pop()
    raise DataError(
        f"{what} has no examples along the first axes of its arrays, or not equally many.",
        where=[f"data{jax.tree_util.keystr(path)} is {describe(leaf)}" for path, leaf in named],
        why="arrays are divided into batches along their first axes",
        fix=["for a single example, add an axis: `xs[None]`", "for a batch that cannot be divided, write `[batch]`"],
    )


def innermost(source: Any) -> Any:
    """Return the source inside `fluxcb.data.map` and `fluxcb.data.place`."""
    while isinstance(source, MappedSource | PlacedSource):
        source = source.source
    return source


def _shown(data: Any) -> str:
    return repr(data) if isinstance(data, str | bytes | int | float | None) else f"of type `{type(data).__name__}`"
