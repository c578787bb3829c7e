"""Invalid data and batches: empty sources, values that are not arrays, and changes between batches."""

from __future__ import annotations

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import DataError, Learner, ThreadExecutor
from fluxcb.data import ArrayLoader
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog

BATCH = np.zeros(4, np.float32)
SWAPPED = {"little": ">", "big": "<"}[sys.byteorder]
NO_ARRAY = "A batch of `data.training` has {}, which JAX cannot use as an array of numbers."
MIXED = {"a": BATCH, 1: BATCH}


def made(log, data, **given):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: sum(jnp.mean((params["w"] - leaf) ** 2) for leaf in jax.tree.leaves(batch)),
        optax.sgd(0.1),
        data=data,
        callbacks=[log],
        default_callbacks=False,
        **given,
    )


def of_model(log, data):
    return Learner(
        (lambda key, xs: {"w": jnp.zeros(xs.shape[1:])}, lambda params, xs: params["w"] * xs),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=data,
        callbacks=[log],
        default_callbacks=False,
    )


class Passes:
    """A source that yields these passes, one after the other."""

    def __init__(self, *passes):
        self.passes = list(passes)

    def __iter__(self):
        return iter(self.passes.pop(0))


class Frame:
    """A table that NumPy can convert, and whose iterator yields the names of its columns, as in pandas."""

    def __array__(self, dtype=None, copy=None):
        return BATCH

    def __iter__(self):
        return iter(["a", "b"])


# -- sources -----------------------------------------------------------------------------------------------------------

NO_PHASE = "`data` has {!r}, but no phase has this name."


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (
            lambda epoch: [BATCH],
            "`data.training` is a function with the parameters (epoch); it must take no arguments.",
        ),
        (list, "`data.training` is type, which cannot be iterated."),
        ("digits", "`data.training` is str, which yields no batches."),
        (b"digits", "`data.training` is bytes, which yields no batches."),
        ({"training": "digits"}, "`data.training` is str, which yields no batches."),
        ({"x": BATCH, "y": BATCH}, NO_PHASE.format("x")),
        ({0: [BATCH]}, NO_PHASE.format(0)),
        ({"test": [BATCH]}, NO_PHASE.format("test")),
        ((BATCH, BATCH), "`data` is a pair of arrays, which is not a pair of data sources."),
        ((jnp.zeros(4), BATCH), "`data` is a pair of arrays, which is not a pair of data sources."),
        ([np.zeros((4, 2)), BATCH], "`data` is a pair of arrays, which is not a pair of data sources."),
        ((Frame(), Frame()), "`data` is a pair of arrays, which is not a pair of data sources."),
        (([BATCH], 5), "`data.validation` is int, which cannot be iterated."),
        ([None], "`data.training` yields None, which is not a batch."),
        (Passes([None]), "`data.training` yields None, which is not a batch."),
    ],
    ids=[
        "function",
        "class",
        "text",
        "bytes",
        "texts",
        "xy",
        "number",
        "test",
        "arrays",
        "jax",
        "list",
        "frames",
        "int",
        "none",
        "nones",
    ],
)
def test_invalid_sources_raise(data, first, refuses):
    refuses(lambda log: made(log, data), DataError, first)


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        ("abc", "str 'abc'"),
        (b"abc", "bytes b'abc'"),
        (np.array(["a", "b"]), "<U1[2]"),
        (np.array(["a", None], object), "object[2]"),
        (object(), "an object of type `object`"),
        (types.SimpleNamespace(x=1), "SimpleNamespace namespace(x=1)"),
        ({1.0}, "set {1.0}"),
        (2**70, f"int {2**70}"),
        (np.zeros(4, SWAPPED + "f4"), f"{SWAPPED}f4[4]"),
        (np.zeros(4, SWAPPED + "i8"), f"{SWAPPED}i8[4]"),
        (np.zeros(4, np.longdouble), f"{np.dtype(np.longdouble)}[4]"),
        (np.array(["2026-01-01"], "datetime64[D]"), "datetime64[D][1]"),
        (np.zeros(3, [("a", "f4")]), "[('a', '<f4')][3]"),
        (np.zeros(3, "V4"), "|V4[3]"),
        ({"x": BATCH, "name": "cat"}, "str 'cat' at `batch['name']`"),
        ([1.0, 2.0], "a list of 2 numbers"),
        (([1, 2], [True, 2.5]), "a list of 2 numbers at `batch[0]`"),
        ({"x": [[1.0], [2.0, 3.0]]}, "a list of 1 number at `batch['x'][0]`"),
        ("x" * 100, "str '" + "x" * 59 + "..."),
    ],
    ids=[
        *["text", "bytes", "texts", "objects", "object", "namespace", "set", "huge", "float-order", "int-order"],
        *["long-double", "dates", "records", "void", "one-text", "list", "lists", "ragged", "long-text"],
    ],
)
class TestLeaves:
    def test_invalid_first_batch_raises(self, batch, shown, refuses):
        refuses(lambda log: made(log, [batch, BATCH]), DataError, NO_ARRAY.format(shown))

    def test_invalid_batch_of_run_step_raises(self, batch, shown, refuses):
        first = NO_ARRAY.format(shown).replace("`data.training`", "LossTrainingPhase")
        refuses(lambda log: made(log, [BATCH]).run_step(TrainingPhase(), batch), DataError, first)


@pytest.mark.parametrize("batch", ["abc", np.array(["a"])], ids=["text", "texts"])
def test_invalid_batch_for_model_initialization_raises(batch, refuses):
    shown = "str 'abc'" if batch == "abc" else "<U1[1]"
    refuses(lambda log: of_model(log, [(batch, BATCH)]), DataError, NO_ARRAY.format(f"{shown} at `batch[0]`"))
    by_hand = f"A batch of TrainingPhase has {shown} at `batch[0]`, which JAX cannot use as an array of numbers."
    refuses(lambda log: of_model(log, None).run_step(TrainingPhase(), (batch, BATCH)), DataError, by_hand)


def test_unsortable_keys_raise(refuses):
    first = "A batch of `data.training` has a dict whose keys cannot be sorted."
    refuses(lambda log: made(log, [MIXED]), DataError, first)
    refuses(lambda log: made(log, [BATCH, MIXED]).fit(1), DataError, first)
    refuses(lambda log: made(log, iter([BATCH, MIXED])).fit(1), DataError, first)


def test_deleted_array_raises(refuses):
    batch = jnp.zeros(4)
    batch.delete()
    shown = "an array that has been deleted (float32[4])"
    refuses(lambda log: made(log, [batch]), DataError, NO_ARRAY.format(shown))


# -- batches without examples ------------------------------------------------------------------------------------------

EMPTY = np.zeros((0, 2), np.float32)
NO_EXAMPLES = (
    "Batch {} of `data.{}` has no examples.\n"
    "  where: `batch` is float32[0, 2]\n"
    "  why:   the mean loss of no examples is NaN, and an update with it makes every parameter NaN\n"
    "  fix:   leave out empty batches, e.g. after a filter in the loader"
)
SOME = np.ones((4, 2), np.float32)


@pytest.mark.parametrize("source", [list, iter, Passes], ids=["list", "iterator", "source"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
@pytest.mark.parametrize("place", [1, 3])
def test_empty_batch_raises(source, array, steps_per_call, place, refused):
    batches = [array(SOME)] * place + [array(EMPTY), array(SOME)]
    learner = made(EventLog(), source(batches), steps_per_call=steps_per_call, example_batch=SOME)
    with refused(DataError, NO_EXAMPLES.format(place + 1, "training")):
        learner.fit(1)
    assert learner.step == place
    assert np.isfinite(learner.params["w"])


def test_empty_first_batch_raises(refused):
    with refused(DataError, NO_EXAMPLES.format(1, "training")):
        made(EventLog(), [EMPTY, SOME])


def test_empty_validation_batch_raises(refused):
    learner = made(EventLog(), ([SOME], [SOME, EMPTY]))
    with refused(DataError, NO_EXAMPLES.format(2, "validation")):
        learner.fit(1)


@pytest.mark.parametrize("phase", ["LossTrainingPhase", "LossValidationPhase"])
def test_empty_batch_of_run_step_raises(phase, refused):
    learner = made(EventLog(), [SOME])
    step = TrainingPhase() if phase == "LossTrainingPhase" else ValidationPhase()
    text = NO_EXAMPLES.replace("Batch {} of `data.{}`", f"A batch of {phase}")
    with refused(DataError, text):
        learner.run_step(step, EMPTY)


def test_empty_array_beside_others_is_accepted():
    batch = {"boxes": np.zeros((0, 4), np.float32), "xs": SOME, "weight": np.float32(1.0)}
    learner = Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean((params["w"] - batch["xs"]) ** 2) + jnp.sum(batch["boxes"]),
        optax.sgd(0.25),
        data=[batch, batch],
        default_callbacks=False,
    )
    learner.fit(1)
    assert float(learner.params["w"]) == 0.75


# -- batches that change -----------------------------------------------------------------------------------------------

DIFFERS = "A batch of `data.training` differs from the one the step was compiled for: {}."


@pytest.mark.parametrize(
    ("odd", "first"),
    [
        ("abc", NO_ARRAY.format("str 'abc'")),
        (np.array(["a"] * 4), NO_ARRAY.format("<U1[4]")),
        (np.array([None] * 4), NO_ARRAY.format("object[4]")),
        (object(), NO_ARRAY.format("an object of type `object`")),
        (np.full(4, 3.0, SWAPPED + "f4"), NO_ARRAY.format(f"{SWAPPED}f4[4]")),
        ([1.0] * 4, NO_ARRAY.format("a list of 4 numbers")),
        (2**70, NO_ARRAY.format(f"int {2**70}")),
        (None, "`data.training` yields None, which is not a batch."),
        (np.zeros(5, np.float32), DIFFERS.format("expected float32[4], got float32[5]")),
        (np.zeros(4, np.complex64), DIFFERS.format("expected float32[4], got complex64[4]")),
        ((BATCH, BATCH), DIFFERS.format("expected float32[4], got (float32[4], float32[4])")),
        (1.0, DIFFERS.format("expected float32[4], got float32[]")),
    ],
    ids=[
        *["text", "texts", "objects", "object", "order", "list", "huge"],
        *["none", "longer", "complex", "pair", "scalar"],
    ],
)
@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
def test_invalid_later_batch_raises(odd, first, steps_per_call, refuses):
    batches = [BATCH, BATCH, BATCH, odd, BATCH]
    refuses(lambda log: made(log, batches, steps_per_call=steps_per_call).fit(1), DataError, first)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_other_byte_order_is_converted_or_raises(steps):
    """JAX's compiled calls ignore the byte order, and read 3.0 as 4.6e-41 (jax 0.10.2)."""
    odd = np.full(4, 3.0, SWAPPED + "f4")
    for batches in ([BATCH] * steps + [odd], (batch for batch in [BATCH] * steps + [odd])):
        learner = Learner.from_loss(
            {"w": jnp.zeros(())},
            lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
            optax.sgd(0.1),
            data=batches,
            default_callbacks=False,
        )
        with pytest.raises(DataError):
            learner.fit(1)
        assert (learner.step, float(learner.params["w"])) == (steps, 0.0)


def test_invalid_later_batch_raises_with_threads(refuses):
    data = [BATCH, "abc"]
    refuses(lambda log: made(log, data, executor=ThreadExecutor(2)).fit(1), DataError, NO_ARRAY.format("str 'abc'"))


def test_invalid_validation_batch_raises(refuses):
    first = NO_ARRAY.format("str 'abc'").replace("training", "validation")
    refuses(lambda log: made(log, ([BATCH], ["abc"])), DataError, first)
    refuses(lambda log: made(log, ([BATCH], [BATCH, "abc"])).fit(1), DataError, first)


# -- sources that end --------------------------------------------------------------------------------------------------

USED_UP = "`data.training` is a one-shot iterator ({}), and it is used up after the first epoch of `fit(2)`."


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (lambda: (BATCH for _ in range(3)), USED_UP.format("generator")),
        (lambda: iter([BATCH]), USED_UP.format("list_iterator")),
        (lambda: map(np.copy, [BATCH]), USED_UP.format("map")),
        (lambda: Passes([BATCH], []), "`data.training` yields no batches."),
        (lambda: Passes([BATCH], ["abc"]), NO_ARRAY.format("str 'abc'")),
    ],
    ids=["generator", "iterator", "map", "empty", "text"],
)
def test_invalid_second_epoch_raises(data, first, refuses):
    refuses(lambda log: made(log, data()).fit(2), DataError, first)


def test_phase_without_data_raises(refuses):
    first = "There is no data for LossValidationPhase: `data.validation` is not set."
    refuses(lambda log: made(log, [BATCH]).run_epoch(ValidationPhase()), DataError, first)
    first = "There is no data for LossTrainingPhase: `data.training` is not set."
    refuses(lambda log: made(log, (None, [BATCH])).fit(1), DataError, first)


# -- ArrayLoader -------------------------------------------------------------------------------------------------------

NO_AXIS = "`{}` has no leading axis for the examples; its type is `{}`."


@pytest.mark.parametrize(
    ("arrays", "first"),
    [
        ("abc", NO_AXIS.format("arrays", "str")),
        (5, NO_AXIS.format("arrays", "int")),
        ([1.0, 2.0], NO_AXIS.format("arrays[0]", "float")),
    ],
    ids=["text", "number", "list"],
)
def test_invalid_array_loader_raises(arrays, first, refuses):
    refuses(lambda log: ArrayLoader(arrays, 2), DataError, first)


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.array(["a", "b"]), "<U1[2]"),
        (np.array([None, 1]), "object[2]"),
        (np.zeros(4, SWAPPED + "f4"), f"{SWAPPED}f4[4]"),
    ],
    ids=["texts", "objects", "order"],
)
def test_array_loader_of_non_numeric_arrays_raises(array, shown, refuses):
    first = f"`arrays['x']` is {shown}, which cannot be stored on the device."
    refuses(lambda log: ArrayLoader({"x": array}, 2, device=True), DataError, first)
    learner = NO_ARRAY.format(f"{shown} at `batch['x']`")
    if array.dtype.kind != "f":  # what a batch of another byte order looks like is known when there is one
        refuses(lambda log: made(log, ArrayLoader({"x": array}, len(array))), DataError, learner)
    refuses(lambda log: made(log, ArrayLoader({"x": array}, len(array))).fit(1), DataError, learner)
