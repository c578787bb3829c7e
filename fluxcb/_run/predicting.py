"""`learner.predict`: the model's outputs for all examples of some data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from fluxcb._compile.arrays import describe, leading_axis
from fluxcb._declare.phases import split_batch
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.assembly import Assembly
from fluxcb._run.averages import params_with
from fluxcb._run.batch_progress import batch_progress
from fluxcb._run.given_batches import BatchesOf, Pieces, as_arrays, innermost, is_arrays
from fluxcb._typing import Batch, ModelAdapter, PyTree
from fluxcb.data.loader import ArrayLoader

__all__ = ["DEFAULT_BATCH_SIZE", "Predictor"]

DEFAULT_BATCH_SIZE = 32
_WHAT = "`data` of `learner.predict`"


class Predictor:
    """Applies a model to batches, with a program for each shape of a batch.

    Args:
        model: The model's adapter.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self.model = model

        def outputs(params: PyTree, model_state: PyTree, xs: PyTree, key: Any, number: Any) -> PyTree:
            key = jax.random.fold_in(key, number)  # a model that draws random numbers in evaluation gets its own
            return model.apply(params, model_state, xs, train=False, key=key)[0]

        self._outputs = jax.jit(outputs)

    def __call__(self, parts: Assembly, data: Any, average: str | None, batch_size: int | None) -> PyTree:
        """Return the outputs for all examples; see `Learner.predict`."""
        state = parts.state
        params, model_state = params_with(state, average), state.carry["model_state"]
        example = parts.example()
        batches, total = _batches(data, example, batch_size, max(state.epoch, 1))
        found: list[PyTree] = []
        waiting: tuple[PyTree, int, int] | None = None
        with batch_progress(parts, "predict", total) as show:
            for number, (xs, repeated) in enumerate(batches):
                try:
                    outputs = self._outputs(params, model_state, xs, state.run_key, np.uint32(number))
                except Exception as error:
                    error.add_note(_note(number, example, xs))
                    raise
                # The device computes this batch while the host fetches the outputs of the one before.
                if waiting is not None:
                    found.append(_fetched(*waiting))
                waiting = outputs, _examples_in(xs), repeated
                show(number + 1)
            if waiting is not None:
                found.append(_fetched(*waiting))
        return _joined(found)


def _batches(
    data: Any, example: Batch | None, batch_size: int | None, epoch: int
) -> tuple[Iterable[tuple[PyTree, int]], int | None]:
    """Return how many batches there are, if it is known, and the inputs of each, with the number of repeated ones."""
    if is_arrays(data):
        size = batch_size if batch_size is not None else leading_axis(example) if example is not None else None
        inputs = _inputs_of(data, example)
        found = Pieces(inputs, DEFAULT_BATCH_SIZE if size is None else size, _WHAT, overlap=True)
        return found, len(found)
    if batch_size is not None:
        raise DeclarationError(
            f"`batch_size` of `learner.predict` goes with arrays, and `data` is of type `{type(data).__name__}`.",
            why="what yields batches has a batch size of its own",
            fix=["leave out `batch_size`", "give the inputs as an array"],
        )
    source = innermost(data)
    if isinstance(source, ArrayLoader) and source.shuffle:
        raise DataError(
            f"{_WHAT} is an `ArrayLoader` that shuffles.",
            why="the outputs would be in its random order, and not in that of its arrays",
            fix=["give the array of inputs: `learner.predict(xs)`", "build the loader with `shuffle=False`"],
        )
    batches = BatchesOf(data, _WHAT, epoch)
    return _checked(batches, example), batches.length


def _checked(batches: Iterable[Batch], example: Batch | None) -> Iterator[tuple[PyTree, int]]:
    """Yield the inputs of batches, which must be alike but for their lengths."""
    first: Any = None
    for number, batch in enumerate(batches, 1):
        inputs = as_arrays(_inputs_of(batch, example), f"Batch {number} of {_WHAT}")
        kind = jax.tree.structure(inputs), [(leaf.dtype, leaf.ndim) for leaf in jax.tree.leaves(inputs)]
        if first is None:
            first = kind, inputs
        if kind != first[0]:
            raise DataError(
                f"Batch {number} of {_WHAT} is {_described(inputs)}, and the first one is {_described(first[1])}.",
                why="a list is taken as a list of batches",
                fix="give one batch as a tuple, `(xs, ys)`, or only its inputs, `xs`",
            )
        yield inputs, 0


def _inputs_of(batch: Batch, example: Batch | None) -> PyTree:
    """Return the inputs in a batch: all of it if it has the structure of the model's inputs, or the first of a pair."""
    if example is not None and jax.tree.structure(batch) == jax.tree.structure(split_batch(example)[0]):
        return batch
    return split_batch(batch)[0]


def _note(number: int, example: Batch | None, xs: PyTree) -> str:
    note = f"raised by the model, when `learner.predict` applied it to batch {number + 1}: {_described(xs)}"
    if example is None:
        return note
    return f"{note}; the Learner was built for inputs like {_described(split_batch(example)[0])}"


def _described(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree)
    text = ", ".join(map(describe, leaves[:3])) + (", ..." if len(leaves) > 3 else "")
    return text if jax.tree_util.all_leaves([tree]) else f"{type(tree).__name__} of {text}"


def _examples_in(xs: PyTree) -> int:
    return next((leaf.shape[0] for leaf in jax.tree.leaves(xs) if leaf.ndim), 1)


def _fetched(outputs: PyTree, examples: int, repeated: int) -> PyTree:
    """Return the outputs of a batch on the host, without those of repeated examples."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]:
        if leaf.shape[:1] != (examples,):
            raise DeclarationError(
                f"The model's output `outputs{jax.tree_util.keystr(path)}` is {describe(leaf)} for a batch of "
                f"{examples} examples.",
                why="`learner.predict` concatenates outputs along their first axis, which must be the examples",
                fix="return outputs with the examples along the first axis, or apply `learner.model` to each batch",
            )
    return jax.tree.map(lambda leaf: np.asarray(leaf)[repeated:], outputs)


def _joined(found: list[PyTree]) -> PyTree:
    """Return the outputs of all batches as one."""
    shapes = {tuple(leaf.shape[1:] for leaf in jax.tree.leaves(outputs)) for outputs in found}
    if len(shapes) > 1:
        raise DataError(
            "The outputs of batches have different shapes, apart from the number of examples: "
            f"{' and '.join(sorted(map(str, shapes)))}.",
            why="`learner.predict` concatenates them",
            fix="pad the batches to one shape, or call `learner.predict` for each batch",
        )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
