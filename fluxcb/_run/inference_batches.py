"""Batches from the `data` argument of `learner.predict` and `learner.evaluate`: arrays, one batch, or many batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fluxcb._compile.leaves import check_leaves
from fluxcb._declare.schedules import positive
from fluxcb._errors import DataError
from fluxcb._run.learner_core import LearnerCore
from fluxcb._traced_values import describe
from fluxcb._typing import Batch, PyTree
from fluxcb.data.sources import FunctionSource, MappedSource, PlacedSource, length_of

__all__ = [
    "BatchesOf",
    "Pieces",
    "as_arrays",
    "examples_in",
    "innermost",
    "is_arrays",
    "rows_per_batch",
    "shown_arrays",
]

_BATCH_SIZE = 32  # examples, if the size of a training batch is unknown


class BatchesOf(Iterable[Batch]):
    """The batches of iterable data, with errors that name the data.

    Args:
        data: A list of batches, a loader, a dataset, an iterator.
        what: The name of the data in messages, e.g. "`data` of `learner.predict`".
        epoch: Number of the epoch, which is passed to `set_epoch` of data whose order depends on it.

    Attributes:
        length: The number of batches according to `len(data)`, or None.

    Raises:
        DataError: The data cannot be iterated.
    """

    def __init__(self, data: Any, what: str, epoch: int) -> None:
        data = FunctionSource.of(data, what)
        self._data, self._what, self._epoch = data, what, epoch
        # A string is iterable, but never a sequence of batches.
        if isinstance(data, str | bytes | type) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            raise DataError(
                f"{what} must be an array, a batch, or an iterable of batches, but it is {_shown(data)}.",
                fix="pass arrays of inputs, a list of batches, or a loader",
            )
        self.length = length_of(data)
        # A loader may reuse its buffers, and JAX reads NumPy arrays after the call has returned.
        self._copies = not (isinstance(data, Sequence) or getattr(data, "fresh_batches", False))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            DataError: The data has no batches.
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
            # The note names the batch, because the traceback of a loader rarely shows it.
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
    """Return whether data is an array or a pytree of arrays, and not a list of batches or a loader."""
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return True
    # A list is a list of batches; any other pytree with children is one batch.
    return data is not None and not isinstance(data, list) and not jax.tree_util.all_leaves([data])


class Pieces(Iterable[tuple[PyTree, int]]):
    """Arrays that are divided into pieces. Iterating yields each piece with the number of examples that it repeats.

    Args:
        arrays: A pytree of arrays with the examples along their first axes.
        size: Examples per piece, or None for the size of a training batch. The pieces are smaller if there are fewer
            examples.
        default: The size of a training batch (examples), or None if it is not known.
        what: The name of the arrays in messages.
        overlap: Whether the last piece repeats examples of the previous piece, so that all pieces have the same shape.
            Padding with made-up rows would change the outputs of a model that computes across the batch.

    Attributes:
        arrays: The arrays.

    Raises:
        DataError: A leaf of `arrays` is not a numeric array, there are no examples, or the arrays differ in length.
        DeclarationError: `size` is not positive.
    """

    def __init__(self, arrays: PyTree, size: int | None, default: int | None, what: str, *, overlap: bool) -> None:
        if size is None:
            size = _BATCH_SIZE if default is None else default
        size = positive(size, "`batch_size` (examples)")
        self.arrays = as_arrays(arrays, what)
        self._count = _examples(self.arrays, what)
        # With a size above the number of examples, `repeated` would make the beginning of the slice negative.
        self._size, self._overlap = min(size, self._count), overlap

    def __len__(self) -> int:
        """Return the number of pieces."""
        return math.ceil(self._count / self._size)

    def __iter__(self) -> Iterator[tuple[PyTree, int]]:
        """Yield the pieces; each piece is sliced from the arrays when it is needed."""
        for first in range(0, self._count, self._size):
            # The last piece starts earlier instead of being shorter, so it needs no program of its own.
            repeated = max(first + self._size - self._count, 0) if self._overlap else 0
            part = slice(first - repeated, first + self._size - repeated)
            yield jax.tree.map(lambda x, part=part: x[part], self.arrays), repeated


def as_arrays(tree: PyTree, what: str) -> PyTree:
    """Return a pytree whose leaves are NumPy or JAX arrays.

    Raises:
        DataError: A leaf is not a numeric array.
    """
    try:
        check_leaves(tree, what, "data", DataError, lists=False)
    except DataError as error:
        # The location would be that of a batch in training data.
        error.where = ()
        error.fix = (*error.fix, "pass several batches as a list, `[batch1, batch2]`, and one batch as a tuple")
        raise
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), tree)


def _examples(arrays: PyTree, what: str) -> int:
    """Return the number of examples in arrays.

    Raises:
        DataError: A leaf is a scalar, there are no examples, or the arrays differ in length.
    """
    named = jax.tree_util.tree_flatten_with_path(arrays)[0]
    where = [f"data{jax.tree_util.keystr(path)} is {describe(leaf)}" for path, leaf in named]
    why = "arrays are divided into batches along their first axes"
    undivided = "write `[batch]` for one batch that is not divided"
    lengths = {leaf.shape[0] for _, leaf in named if leaf.ndim}
    if any(leaf.ndim == 0 for _, leaf in named):
        fixes = ["pass arrays whose first axis is that of the examples"]
        if lengths:
            fixes = [
                f"repeat it for each example: `np.full({max(lengths)}, value)`",
                f"if it is one value, {undivided}",
            ]
        raise DataError(f"{what} has a scalar, which has no axis of examples.", where=where, why=why, fix=fixes)
    if len(lengths) != 1:
        raise DataError(
            f"{what} has arrays with different numbers of examples along their first axes.",
            where=where,
            why=why,
            fix=[
                "pass arrays that describe the same examples, one entry for each example",
                f"if an array has no axis of examples, {undivided}",
            ],
        )
    if 0 in lengths:
        raise DataError(
            f"{what} has no examples.",
            where=where,
            why=why,
            fix="pass at least one example; check the filter or the slice that selected them",
        )
    return lengths.pop()


def examples_in(batch: Batch) -> int:
    """Return the number of examples of a batch (or its specs): the first axis of the first array with axes, or 1."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), 1)


def rows_per_batch(core: LearnerCore) -> int | None:
    """Return the number of examples that this process has in a training batch, or None if it is not known."""
    example = core.example()
    if example is None:
        return None
    # On a mesh, the spec of a data source is that of the batch of all processes.
    return max(1, examples_in(example) // (core.placement.processes if core.placement is not None else 1))


def innermost(source: Any) -> Any:
    """Return the source inside `fluxcb.data.map` and `fluxcb.data.place`."""
    while isinstance(source, MappedSource | PlacedSource):
        source = source.source
    return source


def shown_arrays(tree: PyTree) -> str:
    """Return a description of a pytree of arrays or specs for messages: `tuple of float32[32, 64], int32[32]`."""
    leaves = jax.tree.leaves(tree)
    text = ", ".join(map(describe, leaves[:3])) + (", ..." if len(leaves) > 3 else "")
    return text if jax.tree_util.all_leaves([tree]) else f"{type(tree).__name__} of {text}"


def _shown(data: Any) -> str:
    return repr(data) if isinstance(data, str | bytes | int | float | None) else f"of type `{type(data).__name__}`"
