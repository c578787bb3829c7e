"""The argument `data` of a Learner: one data source for each phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fluxcb._declare.phases import Phase
from fluxcb._errors import DataError
from fluxcb._tracebacks import warn_user
from fluxcb.data.loader import ArrayLoader
from fluxcb.data.sources import is_inputs_and_targets

__all__ = ["data_sources"]

_LONG_BATCH = 256
"""An array with at least this many examples is probably a dataset and not a batch."""


def data_sources(data: Any, phases: tuple[Phase, ...]) -> dict[str, Any]:
    """Return the data sources by phase name.

    Raises:
        DataError: A name is not the name of a phase, or the data is a pair of inputs and targets, or it has validation
            data without a phase for it.
    """
    if data is None:
        return {}
    names = {type(p).name for p in phases}
    if isinstance(data, Mapping):
        for name in data:
            if name not in names:
                fix = [f"use {' or '.join(map(repr, sorted(names)))}"]
                of_arrays = all(isinstance(source, np.ndarray | jax.Array) for source in data.values())
                # The names become variables in the fix, so they must be identifiers.
                if of_arrays and all(isinstance(key, str) and key.isidentifier() for key in data):
                    arrays = ", ".join(f'"{key}": {key}' for key in data)
                    fix.append(
                        f"for arrays of examples, write `data=fluxcb.data.ArrayLoader({{{arrays}}}, batch_size=32)`"
                    )
                raise DataError(f"`data` has {name!r}, but no phase has this name.", fix=fix)
        return dict(data)
    # Only a tuple is a pair of sources, because a list of two is one source with two batches.
    if (isinstance(data, tuple) and len(data) == 2) or _is_list_of_inputs_and_targets(data):
        # `(xs, ys)` is the most common mistake. A source is never an array in practice, so the error loses nothing.
        if all(hasattr(source, "__array__") for source in data):  # also pandas and torch
            raise DataError(
                "`data` is a pair of arrays, which is not a pair of data sources.",
                why="`data=(training, validation)` takes two things that yield batches",
                fix=[
                    "for inputs and targets, write `data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`",
                    'for arrays of batches, write `data={"training": a, "validation": b}`',
                ],
            )
        # A tuple of two arrays can be iterated, so training would take each array for a batch.
        if any(is_inputs_and_targets(source) for source in data):
            raise DataError(
                "`data` contains a pair of arrays, which is not a data source.",
                why="`data=(training, validation)` takes two things that yield batches",
                fix="for inputs and targets, write `fluxcb.data.ArrayLoader((xs, ys), batch_size=32)` in its place",
            )
        if data[1] is not None and "validation" not in names:
            others = ", ".join(f'"{name}": ...' for name in sorted(names))
            raise DataError(
                "`data` is a pair `(training, validation)`, but no phase is named 'validation'.",
                why="the second source would never be used",
                fix=[
                    "add `ValidationPhase()` to the phases, e.g. `phases=(TrainingPhase(), ValidationPhase())`, or, "
                    "without a `loss_fn`, a subclass of `AbstractValidationPhase` with a `step` of your own",
                    "pass only the training data: `data=training`"
                    if names == {"training"}
                    else f"write a mapping by the names of the phases: `data={{{others}}}`",
                ],
            )
        return {
            name: source for name, source in zip(("training", "validation"), data, strict=True) if source is not None
        }
    # As a data source, it would yield the loaders themselves as batches.
    if isinstance(data, tuple | list) and any(isinstance(part, ArrayLoader) for part in data):
        raise DataError(
            f"`data` is a {type(data).__name__} of {len(data)}, which is neither batches nor `(training, validation)`.",
            why="a Learner trains on the first and validates on the second after each epoch",
            fix="write `data=training`, or `data=(training, validation)`"
            if len(data) == 1
            else [
                "write `data=(training, validation)`, and `learner.evaluate(test)` after `fit`",
                'measure on the other data in training: `InferenceRunner(test, ScalarStats("loss"), name="test")`',
            ],
        )
    # Only a warning, because a list of two long batches is valid data.
    if "validation" in names and _may_be_training_and_validation(data):
        sizes = " and ".join(str(len(xs)) for xs, _ in data)
        warn_user(
            f"`data` is a list of two pairs of arrays, so the Learner trains on two batches of {sizes} examples. For "
            "training and validation data, write `data=(training, validation)` with two data sources, such as "
            "`fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`.",
            UserWarning,
        )
    return {"training": data}


def _may_be_training_and_validation(data: Any) -> bool:
    """Return whether data is a list of two pairs of arrays of different lengths that are long for a batch."""
    if not isinstance(data, list) or len(data) != 2 or not all(map(is_inputs_and_targets, data)):
        return False
    first, second = (len(xs) for xs, _ in data)
    # Arrays of equal length are probably two batches.
    return first != second and first >= _LONG_BATCH


def _is_list_of_inputs_and_targets(data: Any) -> bool:
    """Return whether data is a list of two arrays of equal length, of which only one has further axes."""
    if not isinstance(data, list) or len(data) != 2:
        return False
    shapes: list[tuple[int, ...]] = [getattr(part, "shape", ()) for part in data]
    first, second = shapes
    # Batches of one source have equal numbers of axes, and inputs and targets often do not.
    return bool(first and second) and first[0] == second[0] and len(first) != len(second)
