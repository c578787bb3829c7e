"""Data sources: lists, iterators, Grain and ArrayLoader; invalid data, and when it raises an error."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, DataError, DeclarationError, Learner, Read, Write, on
from fluxcb.data import ArrayLoader
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog


class Seen(Callback):
    """Keep the loss and the first input of every step."""

    def __init__(self):
        self.losses, self.firsts = [], []

    def stateaccess(self):
        return {"step": {"loss": Read(), "batch": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.losses.append(float(learner.step.loss))
        self.firsts.append(float(np.ravel(learner.step.batch)[0]))


def make(data, *callbacks, **kwargs):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1),
        data=data,
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def batch(value, rows=4):
    return np.full(rows, value, np.float32)


def by_hand(batches, rate=0.1):
    w, losses = np.float32(0), []
    for values in batches:
        losses.append(np.mean((w - values) ** 2))
        w = w - np.float32(rate) * np.mean(2 * (w - values))
    return w, losses


def check(learner, seen, batches):
    w, losses = by_hand(batches)
    np.testing.assert_allclose(learner.params["w"], w, rtol=1e-6)
    np.testing.assert_allclose(seen.losses, losses, rtol=1e-5)


def test_list_of_batches():
    seen, batches = Seen(), [batch(i) for i in range(5)]
    learner = make(batches, seen)
    learner.fit(2)
    check(learner, seen, batches * 2)


def test_generator_yields_one_epoch_and_then_raises():
    seen, log, batches = Seen(), EventLog(), [batch(i) for i in range(1, 4)]
    learner = make((b for b in batches), seen, log)
    learner.fit(1)
    check(learner, seen, batches)
    log.entries.clear()
    with pytest.raises(DataError) as raised:
        learner.fit(1)
    assert str(raised.value) == (
        "`data.training` is a one-shot iterator (generator), and it is used up.\n"
        "  why:   each epoch iterates over its data source, and an iterator yields nothing the second time\n"
        "  fix:   pass something that can be iterated again: a list, a dataset, a class with `__iter__`"
    )
    assert log.names() == ["FitBegin", "FitEnd"]
    assert (learner.step, learner.epoch) == (3, 1)


def test_fit_by_steps_with_exhausted_generator_raises():
    learner = make(batch(i) for i in range(3))
    with pytest.raises(DataError, match=r"used up"):
        learner.fit(steps=5)
    assert learner.step == 3


def test_endless_stream():
    def endless():
        number = 0
        while True:
            yield batch(number)
            number += 1

    seen = Seen()
    learner = make(endless(), seen)
    learner.fit(steps=7)
    learner.fit(2, steps_per_epoch=3)
    # nothing is lost between fits, although windows look ahead
    assert seen.firsts == list(range(13))
    check(learner, seen, [batch(i) for i in range(13)])


def test_endless_reiterable_source():
    class Endless:
        def __iter__(self):
            number = 0
            while True:
                yield batch(number)
                number += 1

    seen = Seen()
    learner = make(Endless(), seen)
    learner.fit(2, steps_per_epoch=3)
    assert seen.firsts == [0, 1, 2, 3, 4, 5]


def test_grain_map_dataset():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(list(range(12))).map(lambda i: np.float32(i)).batch(4)
    seen = Seen()
    learner = make(dataset, seen)
    learner.fit(2)
    batches = [np.arange(start, start + 4, dtype=np.float32) for start in (0, 4, 8)]
    check(learner, seen, batches * 2)


def test_grain_iter_dataset():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(list(range(12))).map(lambda i: np.float32(i)).to_iter_dataset().batch(4)
    seen = Seen()
    learner = make(dataset, seen)
    learner.fit(2)
    batches = [np.arange(start, start + 4, dtype=np.float32) for start in (0, 4, 8)]
    check(learner, seen, batches * 2)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_array_loader_with_smaller_last_batch(array):
    values = np.arange(10, dtype=np.float32)
    seen = Seen()
    learner = make(ArrayLoader(array(values), 4, seed=1), seen)
    learner.fit(2)
    # the loader documents its order; the engine numbers epochs from 1
    orders = [np.random.default_rng((1, epoch)).permutation(10) for epoch in (1, 2)]
    batches = [values[order[start : start + 4]] for order in orders for start in (0, 4, 8)]
    check(learner, seen, batches)


def test_smaller_last_batch_compiles_once_and_is_exact():
    seen, batches = Seen(), [batch(1), batch(2), batch(5, rows=3)]
    learner = make(batches, seen)
    learner.fit(1)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}
    learner.fit(3)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}
    check(learner, seen, batches * 4)


@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
def test_smaller_batches_compile_once_per_size_and_are_exact(steps_per_call):
    seen, rows = Seen(), (4, 3, 4, 4, 2, 3, 4)
    batches = [batch(i, rows=n) for i, n in enumerate(rows)]
    learner = make(batches, seen, steps_per_call=steps_per_call)
    learner.fit(2)
    assert learner.compile_counts["traces"] == len(set(rows))
    check(learner, seen, batches * 2)


DIFFERS = "A batch of `data.training` differs from the one the step was compiled for"
WHY = (
    "  why:   the step is compiled for batches of one shape; only a shorter leading axis is allowed\n"
    "  fix:   pad or drop what does not fit, or cast in the loader"
)
WHY_LARGER = WHY.partition("  fix:")[0] + (
    "  fix:   begin with a batch of the largest size\n"
    "     or: pass a batch of the largest size to the constructor: `Learner(..., example_batch=batch)`"
)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (
            np.zeros(5, np.float32),
            f"{DIFFERS}: expected float32[4], got float32[5].\n" + WHY_LARGER,
        ),
        (
            np.zeros(4, np.int32),
            f"{DIFFERS}: expected float32[4], got int32[4].\n" + WHY,
        ),
        (
            np.zeros((4, 1), np.float32),
            f"{DIFFERS}: expected float32[4], got float32[4, 1].\n" + WHY,
        ),
        (
            {"x": np.zeros(4, np.float32)},
            f'{DIFFERS}: expected float32[4], got {{"x": float32[4]}}.\n' + WHY,
        ),
    ],
    ids=["longer", "dtype", "rank", "structure"],
)
@pytest.mark.parametrize("place", [1, 3, 6])
def test_invalid_batch_raises_after_previous_steps(odd, text, place):
    batches = [batch(i) for i in range(9)]
    seen, log = Seen(), EventLog()
    learner = make([*batches[:place], odd, *batches[place:]], seen, log)
    with pytest.raises(DataError) as raised:
        learner.fit(1)
    assert str(raised.value) == text
    assert log.names() == ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * place, "FitEnd"]
    assert learner.step == place
    check(learner, seen, batches[:place])


@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_source_exception_is_raised_after_previous_steps(place):
    class Breaks:
        def __iter__(self):
            for i in range(place):
                yield batch(i)
            raise OSError("disk on fire")

    seen, log = Seen(), EventLog()
    learner = make(Breaks(), seen, log, example_batch=batch(0)) if place else None
    if learner is None:
        with pytest.raises(OSError, match=r"^disk on fire$"):
            make(Breaks(), seen, log)
        return
    with pytest.raises(OSError, match=r"^disk on fire") as raised:
        learner.fit(1)
    assert raised.value.__notes__ == [
        f"raised by `data.training`, when batch {place + 1} of pass 1 over the data was pulled"
    ]
    assert log.names() == ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * place, "FitEnd"]
    check(learner, seen, [batch(i) for i in range(place)])


class Counted:
    """Yield three batches, and count how many were read."""

    def __init__(self):
        self.pulled = 0

    def __iter__(self):
        for i in range(3):
            self.pulled += 1
            yield batch(i)


def test_example_batch_is_used_before_data():
    data, seen = Counted(), Seen()
    learner = make(data, seen, example_batch=jax.ShapeDtypeStruct((4,), np.float32))
    assert learner.compile_counts["traces"] == 1
    assert data.pulled == 0
    learner.fit(1)
    assert data.pulled == 3
    assert learner.compile_counts["traces"] == 1
    check(learner, seen, [batch(i) for i in range(3)])


def test_example_batch_does_not_constrain_validation():
    learner = make((Counted(), [batch(0, rows=7)]), example_batch=batch(0))
    learner.fit(1)
    assert learner.step == 3


def test_data_unlike_example_batch_raises():
    seen = Seen()
    learner = make(Counted(), seen, example_batch=batch(0, rows=3))
    with pytest.raises(DataError) as raised:
        learner.fit(1)
    assert str(raised.value) == f"{DIFFERS}: expected float32[3], got float32[4].\n{WHY_LARGER}"
    assert seen.losses == []


class Exchanges(Callback):
    def stateaccess(self):
        return {"data": {"training": Write()}}

    @on
    def exchange(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.data.training = [batch(1, rows=5)]


def test_replaced_data_may_differ_from_example_batch():
    learner = make(Counted(), Exchanges(), example_batch=batch(0))
    learner.fit(2)
    assert learner.step == 4
    learner.callbacks.add(Seen())
    learner.fit(1)
    assert learner.step == 5


EMPTY = (
    "`data.{name}` yields no batches.\n"
    "  why:   an epoch without a step has no loss and no metrics\n"
    "  fix:   check its length and filters; with `drop_last=True`, the batch size may exceed the data"
)


class Empty:
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("source", [[], (), (_ for _ in ()), Empty()], ids=["list", "tuple", "generator", "class"])
def test_empty_data_raises(source):
    with pytest.raises(DataError) as raised:
        make({"training": source})
    expected = EMPTY.format(name="training")
    if isinstance(source, Iterator):
        advice = "check whether the program has read it before: an iterator yields its batches only once"
        expected = expected.replace("  fix:   ", f"  fix:   {advice}\n     or: ")
    assert str(raised.value) == expected


def test_empty_validation_data_raises():
    with pytest.raises(DataError) as raised:
        make(([batch(0)], []))
    assert str(raised.value) == EMPTY.format(name="validation")


def test_data_that_is_empty_in_later_epoch_raises():
    class Once:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([batch(1)] if self.passes == 1 else [])

    learner = make(Once())
    with pytest.raises(DataError) as raised:
        learner.fit(2)
    assert str(raised.value) == EMPTY.format(name="training")


def test_non_iterable_data_raises():
    with pytest.raises(DataError) as raised:
        make(7)
    assert str(raised.value) == (
        "`data.training` is int, which cannot be iterated.\n"
        "  fix:   pass a list of batches, a Grain dataset, or `fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`"
    )


def test_data_for_unknown_phase_raises():
    with pytest.raises(DataError) as raised:
        make({"trainning": [batch(0)]})
    assert str(raised.value) == (
        "`data` has 'trainning', but no phase has this name.\n  fix:   use 'training' or 'validation'"
    )


def test_missing_data_raises():
    learner = make(None)
    with pytest.raises(DataError) as raised:
        learner.fit(1)
    assert str(raised.value) == (
        "There is no data for LossTrainingPhase: `data.training` is not set.\n"
        '  fix:   pass `data={"training": batches}` to the Learner'
    )
    assert float(learner.run_step(TrainingPhase(), batch(2))["loss"]) == 4.0


def test_only_validation_data():
    learner = make({"validation": [batch(3)]})
    assert learner.run_epoch(ValidationPhase()) == 1
    with pytest.raises(DataError, match=r"^There is no data for LossTrainingPhase"):
        learner.fit(1)


def test_set_epoch_is_called_on_source():
    class Numbered(list):
        def __init__(self, batches):
            super().__init__(batches)
            self.told = []

        def set_epoch(self, epoch):
            self.told.append(epoch)

    training, validation = Numbered([batch(0)]), Numbered([batch(0)])
    make((training, validation)).fit(3)
    assert training.told == [1, 2, 3]
    assert validation.told == [1, 2, 3]


def test_float64_and_python_number_batches():
    seen = Seen()
    learner = make([np.full(4, i, np.float64) for i in range(3)], seen)
    learner.fit(2)
    check(learner, seen, [batch(i) for i in range(3)] * 2)
    seen = Seen()
    learner = make([1.0, 2.0, 3.0], seen)
    learner.fit(2)
    check(learner, seen, [batch(i, 1) for i in (1, 2, 3)] * 2)
    assert learner.compile_counts == {"traces": 1, "compiles": 1}


def test_batch_of_typed_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    learner = Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean((params["w"] - jax.vmap(jax.random.normal)(batch)) ** 2),
        optax.sgd(0.5),
        data=[keys],
        default_callbacks=False,
    )
    learner.fit(1)
    np.testing.assert_allclose(learner.params["w"], jax.vmap(jax.random.normal)(keys).mean(), rtol=1e-5)


def test_run_step_accepts_batches_of_any_shape():
    learner = make([batch(0)])
    learner.run_step(TrainingPhase(), batch(1, rows=2))
    learner.run_step(TrainingPhase(), batch(1, rows=9))
    assert learner.step == 2


def test_first_batch_determines_shape_without_example():
    learner = Learner(
        (lambda key, xs: {"w": jnp.zeros((xs.shape[-1], 1))}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        default_callbacks=False,
    )
    xs = np.ones((4, 3), np.float32)
    assert float(learner.run_step(TrainingPhase(), (xs, np.full((4, 1), 2, np.float32)))["loss"]) == 4.0
    assert learner.params["w"].shape == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {},
            "`fit` takes exactly one of epochs and steps.\n"
            "  fix:   write `learner.fit(10)` or `learner.fit(steps=10_000)`",
        ),
        (
            {"epochs": 1, "steps": 1},
            "`fit` takes exactly one of epochs and steps.\n"
            "  fix:   write `learner.fit(10)` or `learner.fit(steps=10_000)`",
        ),
        *(
            (
                {"epochs": value},
                f"The number of epochs of `fit` must be a whole number of at least 1, not {value!r}.\n"
                "  why:   periods and counts are whole numbers of steps or epochs\n"
                "  fix:   pass a positive int",
            )
            for value in (0, -1, 1.5, True, "3")
        ),
        (
            {"steps": 0},
            "`steps` of `fit` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (
            {"epochs": 1, "steps_per_epoch": 0},
            "`steps_per_epoch` of `fit` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
    ],
)
def test_invalid_lengths_raise(arguments, text):
    log = EventLog()
    learner = make([batch(0)], log)
    with pytest.raises(DeclarationError) as raised:
        learner.fit(**arguments)
    assert str(raised.value) == text
    assert log.entries == []


def test_wrapping_generator_in_init_loses_no_batches():
    """A callback may place the data on a device after the first batch has been read."""
    import jax
    import jax.numpy as jnp
    import optax

    import fluxcb
    from fluxcb.callbacks import ToDevice

    batches = [jnp.full((2, 1), float(i)) for i in range(1, 5)]
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.zeros(1)},
        lambda params, batch, key: jnp.mean(batch @ params["w"]),
        optax.sgd(1.0),
        data=(batch for batch in batches),
        callbacks=[ToDevice(jax.devices()[0])],
        default_callbacks=False,
    )
    learner.fit(1)

    assert learner.step == 4
    assert float(learner.params["w"][0]) == -(1 + 2 + 3 + 4)  # the gradient of step i is i


def test_inputs_that_need_a_missing_key_show_the_batch():
    data = [{"image": np.zeros((4, 1), np.float32), "label": np.zeros((4, 1), np.float32)}]
    model = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])
    with pytest.raises(KeyError) as raised:
        Learner(model, lambda outputs, ys: outputs.mean(), optax.sgd(0.1), data=data, inputs=lambda batch: batch["img"])
    note = 'while calling `inputs` on {"image": float32[4, 1], "label": float32[4, 1]}'
    assert raised.value.__notes__ == [note]
