"""Schedules of traced handlers: compiled conditions on step and epoch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, DeclarationError, EveryEpochs, EverySteps, Write, every, inject, on, throttle, when
from fluxcb.callbacks import EnableCallbackIf
from fluxcb.events import (
    BackwardBegin,
    BackwardEnd,
    ComputeEnd,
    EpochEnd,
    FitBegin,
    ForwardBegin,
    HostEvent,
    StepEnd,
    UpdateEnd,
)
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class Skips(Callback):
    """Skip the steps with these numbers (from 0)."""

    def __init__(self, *steps):
        self.steps = steps

    def stateaccess(self):
        return {"step": {"skip": Append()}}

    @on
    def skip(self, event: ForwardBegin, phase: TrainingPhase, learner):
        learner.step.skip = jnp.isin(learner.progress.step, jnp.array(self.steps))


class CountsSteps(Callback):
    def __init__(self, name="counted"):
        self.entry = name

    def stateaccess(self):
        return {"cbstate": {self.entry: Write()}}

    def init(self, learner):
        if self.entry not in learner.cbstate:
            learner.cbstate[self.entry] = jnp.zeros(20, jnp.int32)

    @on
    def count(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.cbstate[self.entry] = learner.cbstate[self.entry].at[learner.progress.step].add(1)


@pytest.mark.parametrize(
    ("wrap", "due"),
    [
        (lambda cb: cb, range(10)),
        (lambda cb: every(cb, steps=3, traced=True), [2, 5, 8]),
        (lambda cb: every(cb, epochs=2, traced=True), range(5, 10)),
        (lambda cb: throttle(cb, UpdateEnd, freq=4), [3, 7]),
        (lambda cb: every(every(cb, steps=2, traced=True), epochs=2, traced=True), [5, 7, 9]),
    ],
    ids=["plain", "steps", "epochs", "throttle", "both"],
)
def test_schedules_of_traced_handlers(wrap, due):
    learner = testlearner(wrap(CountsSteps()), batches=5)
    learner.fit(2)
    assert np.flatnonzero(learner.cbstate["counted"]).tolist() == list(due)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}


class CountsAndLooks(CountsSteps):
    """Count in a traced handler, and also have a host handler."""

    def __init__(self):
        super().__init__()
        self.looked = []

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        self.looked.append(learner.progress.step)


def test_wrapper_does_not_schedule_traced_handlers_by_default():
    counts = CountsAndLooks()
    learner = testlearner(every(counts, steps=3), batches=7)
    learner.fit(1)
    assert counts.looked == [3, 6]
    assert np.flatnonzero(learner.cbstate["counted"]).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda cb: every(cb, steps=3), "every"),
        (lambda cb: every(cb, epochs=3), "every"),
        (lambda cb: every(cb, seconds=3), "every"),
        (lambda cb: throttle(cb, StepEnd, freq=3), "throttle"),
        (lambda cb: throttle(cb, EpochEnd, seconds=3), "throttle"),
        (lambda cb: when(cb, lambda learner: True), "when"),
    ],
)
def test_wrapper_without_scheduled_handlers_raises(wrap, name):
    counts = CountsSteps()
    with pytest.raises(DeclarationError) as raised:
        wrap(counts)
    assert str(raised.value) == (
        f"{counts!r} has no host handlers, but `{name}` schedules only host handlers.\n"
        "  why:   traced handlers are compiled into the step, and run at every step unless `traced=True` schedules "
        "them\n"
        "  fix:   write `every(callback, steps=..., traced=True)` or `every(callback, epochs=..., traced=True)`"
    )


class ScalesSometimes(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write(), "loss": Write()}}

    @on
    def scale(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda g: g * 0, learner.step.grads)

    @on
    def loss(self, event: BackwardBegin, phase: TrainingPhase, learner):
        learner.step.loss = learner.step.loss * 2


def test_scheduled_traced_handler_writes_only_when_due():
    learner = testlearner(every(ScalesSometimes(), steps=2, traced=True), batches=4)
    reference = testlearner(data=testlearner()._state.data["training"][::2])
    learner.fit(1)
    reference.fit(1)
    np.testing.assert_allclose(learner.params["w"], reference.params["w"], rtol=1e-6)


class SkipsSometimes(Skips):
    def __init__(self):
        pass

    @on
    def skip(self, event: ForwardBegin, phase: TrainingPhase, learner):
        learner.step.skip = jnp.bool_(True)


def test_scheduled_skip():
    learner = testlearner(every(SkipsSometimes(), steps=2, traced=True), batches=4)
    reference = testlearner(data=testlearner()._state.data["training"][::2])
    learner.fit(1)
    reference.fit(1)
    np.testing.assert_allclose(learner.params["w"], reference.params["w"], rtol=1e-6)


class OnTraced(Callback):
    def stateaccess(self):
        return {"cbstate": {"hits": Write()}}

    def init(self, learner):
        if "hits" not in learner.cbstate:
            learner.cbstate.hits = jnp.int32(0)

    @on(UpdateEnd, TrainingPhase, when=EverySteps(5))
    def hit(self, event, phase, learner):
        learner.cbstate.hits = learner.cbstate.hits + 1

    @on(ComputeEnd, TrainingPhase, when=EveryEpochs(2))
    def hit_more(self, event, phase, learner):
        learner.cbstate.hits = learner.cbstate.hits + 100


def test_schedule_of_single_traced_handler():
    learner = testlearner(OnTraced(), batches=4)
    learner.fit(3)  # 12 steps: due at 5 and 10; the second epoch has 4 steps
    assert int(learner.cbstate["hits"]) == 2 + 400


def test_traced_handlers_read_step_and_epoch():
    class Notes(Callback):
        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"step": {"where": Write()}}

        @on
        def note(self, event: ComputeEnd, phase: TrainingPhase | ValidationPhase, learner):
            progress = learner.progress
            learner.step.where = jnp.stack([progress.step, progress.epoch, progress.step_in_epoch])

        @on(StepEnd)
        def keep(self, event, phase, learner):
            self.seen.append((type(phase).name, *learner.step.where.tolist()))

    notes = Notes()
    testlearner(notes, batches=2, validation_batches=1).fit(2)
    assert notes.seen == [
        ("training", 0, 1, 0),
        ("training", 1, 1, 1),
        ("validation", 2, 1, 0),
        ("training", 2, 2, 0),
        ("training", 3, 2, 1),
        ("validation", 4, 2, 0),
    ]


def test_injected_optimizer_matches_plain_optimizer():
    plain, injected = testlearner(optimizer=optax.sgd(0.1)), testlearner(optimizer=inject(optax.sgd, learning_rate=0.1))
    plain.fit(2)
    injected.fit(2)
    np.testing.assert_allclose(plain.params["w"], injected.params["w"], rtol=1e-6)


def matrices(params):
    """Return a mask that selects `w`, but not the bias."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def all_but_b(params):
    """Return the same mask by the paths of the parameters, which fails for a number."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key != "b", params)


@pytest.mark.parametrize(
    ("factory", "numbers", "others"),
    [
        (optax.adamw, {"learning_rate": 0.1, "weight_decay": 0.5}, {"mask": matrices}),
        (optax.adamw, {"learning_rate": 0.1, "weight_decay": 0.5}, {"mask": all_but_b}),
        (optax.lars, {"learning_rate": 0.1}, {"weight_decay_mask": matrices, "trust_ratio_mask": matrices}),
        (optax.adam, {"learning_rate": 0.1}, {"mu_dtype": jnp.bfloat16}),
        (optax.adam, {"learning_rate": optax.constant_schedule(0.1)}, {"mu_dtype": np.float16}),
        (optax.adafactor, {"learning_rate": 0.1}, {"min_dim_size_to_factor": 2}),
        (partial(optax.lbfgs, linesearch=None), {"learning_rate": 0.1}, {"memory_size": 3}),
    ],
)
def test_injected_optimizer_gets_masks_dtypes_and_sizes_unchanged(factory, numbers, others):
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda leaf: 0.1 * leaf, params)

    def first_update(optimizer: Any) -> tuple[Any, Any]:
        return optimizer.update(grads, optimizer.init(params), params)

    expected, _ = first_update(factory(**numbers, **others))
    found, state = first_update(inject(factory, **numbers, **others))
    assert sorted(state.hyperparams) == sorted(numbers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


class AtEpochEnd(Callback):
    @on
    def act(self, event: EpochEnd, phase: TrainingPhase, learner):
        pass


class AtFitBegin(Callback):
    @on
    def act(self, event: FitBegin, phase: TrainingPhase, learner):
        pass


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (
            lambda: every(AtEpochEnd(), steps=3),
            "AtEpochEnd() has no handler that `every` schedules, so `every` has no effect on it.\n"
            "  why:   it handles EpochEnd\n"
            "  fix:   write `every(callback, epochs=...)`, which also schedules EpochBegin and EpochEnd\n"
            "     or: pass the callback without `every`",
        ),
        (
            lambda: when(AtFitBegin(), lambda learner: True),
            "AtFitBegin() has no handler that `when` schedules, so `when` has no effect on it.\n"
            "  why:   it handles FitBegin\n"
            "  fix:   pass the callback without `when`",
        ),
        (
            lambda: EnableCallbackIf(AtFitBegin(), lambda learner: True),
            "AtFitBegin() has no handler that `EnableCallbackIf` schedules, so `EnableCallbackIf` has no effect on "
            "it.\n"
            "  why:   it handles FitBegin\n"
            "  fix:   pass the callback without `EnableCallbackIf`",
        ),
        (
            lambda: throttle(AtEpochEnd(), StepEnd, freq=3),
            "AtEpochEnd() has no handler of StepEnd, so `throttle` has no effect on it.\n"
            "  why:   it handles EpochEnd\n"
            "  fix:   name an event that the callback handles: `throttle(callback, EpochEnd, ...)`\n"
            "     or: pass the callback without `throttle`",
        ),
    ],
)
def test_wrapper_that_schedules_no_handler_raises(wrap, message, refused):
    with refused(DeclarationError, message):
        wrap()
    every(AtEpochEnd(), epochs=3)
    throttle(AtEpochEnd(), EpochEnd, freq=3)


def test_wrappers_of_handlers_of_base_classes():
    class Own(HostEvent):
        pass

    class Everything(Callback):
        @on
        def act(self, event: HostEvent, phase: TrainingPhase, learner):
            pass

    every(Everything(), steps=3)
    throttle(Everything(), Own, freq=3)
    when(Everything(), lambda learner: True)
