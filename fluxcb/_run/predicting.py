"""`learner.predict`: the model's outputs for all examples of some data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from fluxcb._compile.arrays import describe
from fluxcb._declare.phases import split_batch
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.assembly import Assembly
from fluxcb._run.averages import params_with
from fluxcb._run.batch_progress import batch_progress
from fluxcb._run.given_batches import BatchesOf, Pieces, as_arrays, examples_in, innermost, is_arrays, shown_arrays
from fluxcb._typing import Batch, ModelAdapter, PyTree
from fluxcb.data.loader import ArrayLoader

__all__ = ["Predictor"]

_WHAT = "`data` of `learner.predict`"


class Predictor:
    """Applies a model to batches, with one compiled program for each shape of a batch.

    Args:
        model: The model's adapter.
    """

    def __init__(self, model: ModelAdapter) -> None:
        self.model = model

        def outputs(params: PyTree, model_state: PyTree, xs: PyTree, key: Any, number: Any) -> PyTree:
            key = jax.random.fold_in(key, number)  # for models that draw random numbers in evaluation
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
                # The device computes this batch while the host fetches the outputs of the previous batch.
                if waiting is not None:
                    found.append(_fetched(*waiting))
                waiting = outputs, examples_in(xs), repeated
                show(number + 1)
            if waiting is not None:
                found.append(_fetched(*waiting))
        return _joined(found)


def _batches(
    data: Any, example: Batch | None, batch_size: int | None, epoch: int
) -> tuple[Iterable[tuple[PyTree, int]], int | None]:
    """Return the number of batches, if it is known, and the inputs of each with its number of repeated examples."""
    if is_arrays(data):
        found = Pieces(_inputs_of(data, example), batch_size, example, _WHAT, overlap=True)
        _check_axes(found.arrays, example, _WHAT)
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
    """Yield the inputs of batches, which may differ only in their numbers of examples."""
    first: Any = None
    for number, batch in enumerate(batches, 1):
        what = f"Batch {number} of {_WHAT}"
        inputs = as_arrays(_inputs_of(batch, example), what)
        _check_axes(inputs, example, what)
        kind = jax.tree.structure(inputs), [(leaf.dtype, leaf.ndim) for leaf in jax.tree.leaves(inputs)]
        if first is None:
            first = kind, inputs
        if kind != first[0]:
            raise DataError(
                f"{what} is {shown_arrays(inputs)}, and the first one is {shown_arrays(first[1])}.",
                why="a list is taken as a list of batches",
                fix="give one batch as a tuple, `(xs, ys)`, or only its inputs, `xs`",
            )
        yield inputs, 0


def _inputs_of(batch: Batch, example: Batch | None) -> PyTree:
    """Return the inputs of a batch: the batch if it has the structure of the model's inputs, or the first of a pair."""
    if example is not None and jax.tree.structure(batch) == jax.tree.structure(split_batch(example)[0]):
        return batch
    return split_batch(batch)[0]


def _check_axes(inputs: PyTree, example: Batch | None, what: str) -> None:
    """Check that inputs have the number of axes that the Learner was built for.

    Raises:
        DataError: The number of axes differs, for example because the input is a single example. Many models would
            misinterpret such an input without an error.
    """
    expected = split_batch(example)[0] if example is not None else None
    if jax.tree.structure(inputs) != jax.tree.structure(expected):
        return
    if any(a.ndim != len(b.shape) for a, b in zip(jax.tree.leaves(inputs), jax.tree.leaves(expected), strict=True)):
        raise DataError(
            f"{what} has the inputs {shown_arrays(inputs)}, and the Learner was built for {shown_arrays(expected)}.",
            why="the first axis is that of the examples, and the others are those of one example",
            fix=[
                "for a single example, add an axis: `learner.predict(x[None])`",
                "for inputs and targets, write a tuple: `learner.predict((xs, ys))`",
            ],
        )


def _note(number: int, example: Batch | None, xs: PyTree) -> str:
    note = f"raised by the model, when `learner.predict` applied it to batch {number + 1}: {shown_arrays(xs)}"
    if example is None:
        return note
    return f"{note}; the Learner was built for inputs like {shown_arrays(split_batch(example)[0])}"


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
    """Return the concatenated outputs of all batches."""
    shapes = {tuple(leaf.shape[1:] for leaf in jax.tree.leaves(outputs)) for outputs in found}
    if len(shapes) > 1:
        raise DataError(
            "The outputs of batches have different shapes, apart from the number of examples: "
            f"{' and '.join(sorted(map(str, shapes)))}.",
            why="`learner.predict` concatenates them",
            fix="pad the batches to one shape, or call `learner.predict` for each batch",
        )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
