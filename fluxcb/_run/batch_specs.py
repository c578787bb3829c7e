"""The specs of the batches of a data source, and checks of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fluxcb._compile.arrays import spec_of
from fluxcb._compile.leaves import check_examples, check_leaves
from fluxcb._errors import DataError
from fluxcb._run.batch_placement import BatchPlacement
from fluxcb._run.stream_errors import none_as_batch
from fluxcb._typing import Batch, PyTree

__all__ = ["check_batch", "find_spec"]


def find_spec(source: Any, name: str, peek: Callable[[], Batch], placement: BatchPlacement | None) -> PyTree:
    """Return the specs of a batch, from the source's own spec, its first item, or the batch that `peek` returns.

    Args:
        source: The data source.
        name: Its name in messages.
        peek: Function that returns the first batch, placed on the mesh, and keeps it for the first step.
        placement: Places batches on a mesh, or None.

    Raises:
        DataError: The batch is wrong.
    """
    spec = getattr(source, "element_spec", None)
    if spec is not None:
        check_batch(spec, name, 1)
    elif isinstance(source, Sequence):  # in memory
        if source[0] is None:
            raise none_as_batch(name)
        check_batch(source[0], name, 1)
        spec = spec_of(source[0])
    else:
        try:
            batch = peek()
        except NameError as error:
            error.add_note(
                "The first batch is read when the Learner is built, to find its shape. If the source uses the Learner, "
                "assign it afterwards: `learner.data = (training, validation)`."
            )
            raise
        check_batch(batch, name, 1)
        return spec_of(batch)
    return spec if placement is None else placement.spec(spec)


def check_batch(batch: Batch, name: str, number: int) -> None:
    """Check that a batch consists of arrays with examples along their first axes.

    Args:
        batch: The batch, or its specs.
        name: The name of the data source in messages.
        number: Its number in the pass, from 1.

    Raises:
        DataError: It does not.
    """
    check_leaves(batch, f"A batch of `{name}`", "batch", DataError, lists=False)
    check_examples(batch, f"Batch {number} of `{name}`")
