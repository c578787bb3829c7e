"""`learner.predict`: the model's outputs for all examples of some data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fluxcb._compile.arrays import spec_of
from fluxcb._compile.placement import Placement
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.losses import takes_model
from fluxcb._declare.shardings import Sharding
from fluxcb._errors import DataError, DeclarationError, FluxcbError
from fluxcb._run.averages import params_with
from fluxcb._run.batch_placement import BatchPlacement
from fluxcb._run.batch_progress import batch_progress
from fluxcb._run.inference_batches import (
    BatchesOf,
    Pieces,
    as_arrays,
    examples_in,
    innermost,
    is_arrays,
    rows_per_batch,
    shown_arrays,
)
from fluxcb._run.input_kinds import inputs_of_specs, warn_of_other_kind
from fluxcb._run.learner_core import LearnerCore
from fluxcb._traced_values import describe
from fluxcb._typing import Batch, ModelAdapter, PyTree
from fluxcb.data.loader import ArrayLoader

__all__ = ["Predictor"]

_WHAT = "`data` of `learner.predict`"
_Spec = tuple[jax.ShapeDtypeStruct, ...]  # hashable, unlike a pytree


class Predictor:
    """Applies a model to batches, with one compiled program for each shape of a batch.

    It calls the model and not the step of a phase, because a step and its traced handlers (such as `Metrics`) need
    targets.

    Args:
        model: The model's adapter.
        placement: The mesh over which the examples are divided, or None.
    """

    def __init__(self, model: ModelAdapter, placement: Placement | None) -> None:
        self.model = model
        self._context = placement.context if placement is not None else contextlib.nullcontext
        self._divider: BatchPlacement | None = None
        if placement is not None:
            # The rules for batches have the paths of a whole batch, and these batches are only its inputs.
            over_examples = Sharding(batch=PartitionSpec(placement.example_axes))
            self._divider = BatchPlacement(Placement(placement.mesh, over_examples), _WHAT)
        divider = self._divider

        def outputs(params: PyTree, model_state: PyTree, xs: PyTree, key: Any, number: Any, *, spec: _Spec) -> PyTree:
            key = jax.random.fold_in(key, number)  # for models that draw random numbers in evaluation
            if divider is not None:
                xs = divider.without_added_rows(xs, jax.tree.unflatten(jax.tree.structure(xs), spec))
            # The new model state is dropped, because a prediction does not change the Learner.
            found = model.apply(params, model_state, xs, train=False, key=key)[0]
            # While the function is traced, so that the check costs nothing for further batches of this shape.
            _check_rows(found, examples_in(xs))
            return found if divider is None else divider.divided(found)

        # Static, because the shape of the outputs depends on the number of rows before padding.
        self._outputs = jax.jit(outputs, static_argnames="spec")

    def __call__(self, core: LearnerCore, data: Any, average: str | None, batch_size: int | None) -> PyTree:
        """Return the outputs for all examples; see `Learner.predict`."""
        state = core.state
        params, model_state = params_with(state, average), state.train.carry["model_state"]
        inputs = _Inputs(core.split, core.example())
        batches, total = _batches(core, data, inputs, batch_size)
        found: list[PyTree] = []
        waiting: tuple[PyTree, int, int] | None = None
        with batch_progress(core, "predict", total) as show:
            for number, (xs, repeated) in enumerate(batches):
                try:
                    placed, spec = self._divider.place_any(xs) if self._divider is not None else (xs, spec_of(xs))
                    leaves = tuple(jax.tree.leaves(spec))
                    with self._context():
                        outputs = self._outputs(
                            params, model_state, placed, state.train.run_key, np.uint32(number), spec=leaves
                        )
                except Exception as error:
                    if not isinstance(error, FluxcbError):
                        # A loss function that takes the model has the inputs of the model in its own code.
                        unknown = inputs.of_batch and takes_model(state.loss_fn)
                        error.add_note(_note(number, None if unknown else inputs.expected, xs))
                        if unknown and isinstance(xs, Mapping) and xs:
                            error.add_note(_inputs_fix(xs))
                    raise
                # The device computes this batch while the host fetches the outputs of the previous batch.
                if waiting is not None:
                    found.append(self._fetched(*waiting))
                waiting = outputs, examples_in(xs), repeated
                show(number + 1)
            if waiting is not None:
                found.append(self._fetched(*waiting))
        return _joined(found)

    def _fetched(self, outputs: PyTree, examples: int, repeated: int) -> PyTree:
        """Return the outputs for this process's examples on the host, without those of repeated examples."""
        own_rows = self._divider.own_rows if self._divider is not None else lambda leaf, _: np.asarray(leaf)
        # The last piece repeats examples of the previous one at its beginning; see `Pieces`.
        return jax.tree.map(lambda leaf: own_rows(leaf, examples)[repeated:], outputs)


def _batches(
    core: LearnerCore, data: Any, inputs: _Inputs, batch_size: int | None
) -> tuple[Iterable[tuple[PyTree, int]], int | None]:
    """Return the inputs of each batch with its number of repeated examples, and the number of batches if known."""
    # Arrays can be divided into batches of any size, so only they can be padded and take `batch_size`.
    if is_arrays(data):
        found = Pieces(inputs.of(data), batch_size, rows_per_batch(core), _WHAT, overlap=True)
        _check_axes(found.arrays, inputs.expected, _WHAT)
        return found, len(found)
    if batch_size is not None:
        raise DeclarationError(
            f"`batch_size` of `learner.predict` is only for arrays, but `data` is of type `{type(data).__name__}`.",
            why="a loader or a list of batches already determines the batch size",
            fix=["leave out `batch_size`", "pass the inputs as an array"],
        )
    # `map` and `place` keep the order of the batches, so the loader inside is checked.
    source = innermost(data)
    if isinstance(source, ArrayLoader) and source.shuffle:
        raise DataError(
            f"{_WHAT} is an `ArrayLoader` that shuffles.",
            why="the outputs would be in random order, and not in the order of the arrays",
            fix=["pass the array of inputs: `learner.predict(xs)`", "build the loader with `shuffle=False`"],
        )
    if isinstance(source, ArrayLoader) and source.drop_last:
        raise DataError(
            f"{_WHAT} is an `ArrayLoader` with `drop_last=True`.",
            why="there would be no outputs for the examples of the last batch",
            fix=["pass the array of inputs: `learner.predict(xs)`", "build the loader with `drop_last=False`"],
        )
    # Epochs are counted from 1, but the Learner may not have trained yet.
    batches = BatchesOf(data, _WHAT, max(core.state.progress.epoch, 1))
    return _checked(batches, inputs), batches.length


def _checked(batches: Iterable[Batch], inputs: _Inputs) -> Iterator[tuple[PyTree, int]]:
    """Yield the inputs of batches, which may differ only in their numbers of examples."""
    first: Any = None
    for number, batch in enumerate(batches, 1):
        what = f"Batch {number} of {_WHAT}"
        xs = as_arrays(inputs.of(batch), what)
        _check_axes(xs, inputs.expected, what)
        kind = jax.tree.structure(xs), [(leaf.dtype, leaf.ndim) for leaf in jax.tree.leaves(xs)]
        if first is None:
            first = kind, xs
        # Usually the user passed one batch as a list, so its parts look like different batches.
        if kind != first[0]:
            raise DataError(
                f"{what} is {shown_arrays(xs)}, and the first one is {shown_arrays(first[1])}.",
                why="a list is interpreted as a list of batches",
                fix="pass one batch as a tuple, `(xs, ys)`, or only its inputs, `xs`",
            )
        yield xs, 0


class _Inputs:
    """Finds the inputs in data, which may be a batch or only the inputs.

    Args:
        split: Splits batches into inputs and targets.
        example: A training batch, or its specs; None if it is not known.

    Attributes:
        example: The same.
        expected: The specs of the model's inputs, or None.
        of_batch: Whether the inputs are a whole batch, because the Learner has no `inputs=`.
    """

    def __init__(self, split: BatchParts, example: Batch | None) -> None:
        self.example = example
        self.of_batch = split.inputs is None
        self._split = split
        self.expected = inputs_of_specs(split, example)

    def of(self, batch: Batch) -> PyTree:
        """Return the inputs of a batch, or the batch if it has the structure of the inputs and not of a batch."""
        structure = jax.tree.structure(batch)
        if self._split.inputs is not None and structure == jax.tree.structure(self.example):
            return self._split.inputs(batch)
        # Ambiguous data, such as a pair for a model whose input is a pair, is treated as inputs.
        if self.expected is not None and structure == jax.tree.structure(self.expected):
            return batch
        # The batches of a dataset without targets are often tuples of one array.
        if (
            isinstance(batch, tuple)
            and len(batch) == 1
            and jax.tree.structure(batch[0]) == jax.tree.structure(self.expected)
        ):
            return batch[0]
        return self._split.inputs_of(batch)


def _check_axes(inputs: PyTree, expected: PyTree | None, what: str) -> None:
    """Check that inputs have the number of axes that the Learner was built for.

    Raises:
        DataError: The number of axes differs, for example because the input is a single example. Many models would
            misinterpret such an input without an error.
    """
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
    warn_of_other_kind(inputs, expected, what)


def _note(number: int, expected: PyTree | None, xs: PyTree) -> str:
    note = f"raised by the model, when `learner.predict` applied it to batch {number + 1}: {shown_arrays(xs)}"
    if expected is None:
        return note
    return f"{note}; the Learner was built for inputs like {shown_arrays(expected)}"


def _inputs_fix(batch: Mapping[Any, Any]) -> str:
    name = repr(next(iter(batch)))
    return (
        f"fix: the model got a {type(batch).__name__}. If it takes a part of a batch, give the Learner, for example, "
        f"`inputs=lambda batch: batch[{name}]`, or pass only the inputs: `learner.predict(batch[{name}])`"
    )


def _check_rows(outputs: PyTree, examples: int) -> None:
    """Check that outputs have the examples of their batch along their first axes.

    Raises:
        DeclarationError: One has not.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]:
        if leaf.shape[:1] != (examples,):
            raise DeclarationError(
                f"The model's output `outputs{jax.tree_util.keystr(path)}` is {describe(leaf)} for a batch of "
                f"{examples} examples.",
                why="`learner.predict` concatenates outputs along their first axis, which must be the examples",
                fix="return outputs with the examples along the first axis, or apply `learner.model` to each batch",
            )


def _joined(found: list[PyTree]) -> PyTree:
    """Return the concatenated outputs of all batches."""
    # The first axis is that of the examples and may differ.
    shapes = {tuple(leaf.shape[1:] for leaf in jax.tree.leaves(outputs)) for outputs in found}
    if len(shapes) > 1:
        raise DataError(
            "The outputs of batches have different shapes, apart from the number of examples: "
            f"{' and '.join(sorted(map(str, shapes)))}.",
            why="`learner.predict` concatenates them",
            fix="pad the batches to one shape, or call `learner.predict` for each batch",
        )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *found)
