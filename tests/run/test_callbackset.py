"""`learner.callbacks`: looking at the set, and exchanging it, whole or not at all."""

import copy
import os
import pickle

import jax.numpy as jnp
import optax
import pytest

from fluxcb import (
    Callback,
    ConflictError,
    DeclarationError,
    Learner,
    MissingStateError,
    Read,
    TraceError,
    Write,
    every,
    on,
)
from fluxcb import in_order as ordered
from fluxcb.events import BackwardEnd, EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog, testlearner


def at(function):
    return f"{os.path.relpath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


class Counts(Callback):
    def __init__(self):
        self.calls = 0

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        self.calls += 1


class Scales(Callback):
    def __init__(self, factor=0.5):
        self.factor = factor

    def __repr__(self):
        return f"Scales({self.factor})"

    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def scale(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = {name: self.factor * g for name, g in learner.step.grads.items()}


class Breaks(Callback):
    """Cannot be traced."""

    def stateaccess(self):
        return {"step": {"grads": Write()}, "cbstate": {"broken": Write()}}

    def init(self, learner):
        learner.cbstate.broken = jnp.zeros(())

    @on
    def branch(self, event: BackwardEnd, phase: TrainingPhase, learner):
        if learner.step.grads["w"] > 0:
            learner.step.grads = learner.step.grads


class Average(Callback):
    """Keeps a running sum in the carry."""

    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"total": Write()}}

    def init(self, learner):
        if "total" not in learner.cbstate:
            learner.cbstate.total = jnp.zeros(())

    @on
    def add(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.cbstate.total = learner.cbstate.total + learner.step.loss


def test_add_get_replace_remove_set():
    learner = testlearner(Counts())
    learner.callbacks.add(log := EventLog())
    assert [type(c) for c in learner.callbacks] == [Counts, EventLog]
    assert len(learner.callbacks) == 2
    assert log in learner.callbacks
    assert learner.callbacks.get(EventLog) is log
    old, new = learner.callbacks.get(Counts), Counts()
    learner.callbacks.replace(new)
    assert list(learner.callbacks) == [new, log]
    learner.fit(1)
    assert (old.calls, new.calls) == (0, 4)
    learner.callbacks.remove(Counts)
    learner.callbacks.remove(log)
    assert list(learner.callbacks) == []
    learner.fit(1)
    assert (new.calls, len(log.entries)) == (4, 1 + 10 + 6 + 1 + 2)
    learner.callbacks.set([old])
    learner.fit(1)
    assert old.calls == 4
    assert repr(learner.callbacks) == "[Counts()]"


def test_wrapped_callbacks_are_found_by_what_is_inside():
    counts = Counts()
    wrapped = every(counts, steps=2)
    learner = testlearner(wrapped)
    assert learner.callbacks.get(Counts) is counts
    assert counts in learner.callbacks
    assert wrapped in learner.callbacks
    learner.callbacks.remove(counts)
    assert list(learner.callbacks) == []


def test_order_groups_survive_an_exchange():
    one, two, three = Scales(0.5), Scales(2.0), Scales(3.0)
    learner = testlearner(ordered(one, two))
    learner.callbacks.replace(three)  # the first of its class
    assert list(learner.callbacks) == [three, two]
    learner.callbacks.remove(two)
    assert list(learner.callbacks) == [three]


def test_what_is_not_there_cannot_be_had():
    learner = testlearner(Counts())
    with pytest.raises(DeclarationError) as raised:
        learner.callbacks.get(EventLog)
    assert str(raised.value) == (
        "This Learner has no EventLog.\n  fix:   add one: `learner.callbacks.add(EventLog(...))`; it has Counts"
    )
    for change in (learner.callbacks.remove, learner.callbacks.replace):
        with pytest.raises(DeclarationError):
            change(EventLog())
    with pytest.raises(DeclarationError, match=r"^This Learner has no EventLog\."):
        learner.callbacks.remove(EventLog)


def bad_sets():
    return {
        "conflict": ([Scales(2.0)], ConflictError),
        "trace": ([Breaks()], TraceError),
        "nothing": ([42], DeclarationError),
        "class": ([Counts], DeclarationError),
    }


@pytest.mark.parametrize("name", list(bad_sets()))
def test_a_set_that_does_not_fit_leaves_the_old_one_at_work(name):
    added, error = bad_sets()[name]
    counts, scales, average = Counts(), Scales(0.5), Average()
    callbacks = [counts, average] if name == "trace" else [counts, scales, average]
    learner, reference = (
        testlearner(*callbacks),
        testlearner(Counts(), *([Scales(0.5)] if name != "trace" else []), Average()),
    )
    learner.fit(1)
    reference.fit(1)
    with pytest.raises(error):
        learner.callbacks.add(*added)
    assert list(learner.callbacks) == callbacks
    assert set(learner.cbstate) == {"total"}
    learner.fit(1)
    reference.fit(1)
    assert counts.calls == 8
    for value in ("w", "b"):
        assert float(learner.params[value]) == float(reference.params[value])
    assert float(learner.cbstate["total"]) == float(reference.cbstate["total"])
    # what was refused is free for others
    if name == "conflict":
        testlearner(*added).fit(1)


def test_a_failed_construction_leaves_the_callbacks_free():
    counts, scales = Counts(), Scales()
    with pytest.raises(ConflictError):
        testlearner(counts, scales, Scales(2.0))
    with pytest.raises(TraceError):
        testlearner(counts, Breaks())
    learner = testlearner(counts, scales)
    learner.fit(1)
    assert counts.calls == 4


def test_one_instance_belongs_to_one_learner():
    counts = Counts()
    learner = testlearner(counts)
    with pytest.raises(DeclarationError) as raised:
        testlearner(counts)
    assert str(raised.value) == (
        "Counts() already belongs to another Learner.\n"
        "  why:   a callback's own state would mix the two trainings\n"
        "  fix:   construct a new instance for each Learner\n"
        "     or: free it first: `other.callbacks.remove(callback)`"
    )
    learner.callbacks.remove(counts)
    testlearner(counts).fit(1)
    assert counts.calls == 4


def test_a_learner_that_is_gone_owns_nothing():
    counts = Counts()
    learner = testlearner(counts)
    learner.fit(1)
    del learner
    testlearner(counts).fit(1)
    assert counts.calls == 8


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))],
    ids=["copy", "deep", "pickle"],
)
def test_a_copy_belongs_to_nobody(clone):
    counts = Counts()
    learner = testlearner(counts)
    learner.fit(1)
    other = clone(counts)
    testlearner(other).fit(1)
    assert (counts.calls, other.calls) == (4, 8)


class Needy(Average):
    """Cannot be traced the first time."""

    ready = False

    @on
    def add(self, event: BackwardEnd, phase: TrainingPhase, learner):
        if not self.ready:
            raise ValueError("not yet")
        super().add(event, phase, learner)


def test_a_learner_that_could_not_be_built_at_its_first_batch_can_be_built_at_the_next():
    def apply(params, xs):
        return xs @ params["w"]

    needy = Needy()
    learner = Learner(
        (lambda key, xs: {"w": jnp.zeros((xs.shape[-1], 1))}, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        callbacks=[needy],
        default_callbacks=False,
    )
    batch = jnp.ones((2, 3)), jnp.ones((2, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            learner.run_step(TrainingPhase(), batch)
    needy.ready = True
    assert float(learner.run_step(TrainingPhase(), batch)["loss"]) == 1.0
    assert float(learner.cbstate["total"]) == 1.0


def test_one_instance_twice_is_an_error():
    counts = Counts()
    with pytest.raises(DeclarationError) as raised:
        testlearner(counts, every(counts, steps=2))
    assert str(raised.value) == (
        "The callback Counts() at EverySteps(steps=2) stands in the list twice; first as Counts() at position 0.\n"
        "  why:   one instance has one state, and would run twice per moment\n"
        "  fix:   remove one, or construct a second instance"
    )


class Exchanges(Callback):
    def __init__(self):
        self.learner = None

    @on
    def exchange(self, event: EpochEnd, phase: TrainingPhase, learner):
        self.learner.callbacks.add(Counts())


def test_the_set_cannot_be_exchanged_while_fitting():
    exchanges = Exchanges()
    exchanges.learner = learner = testlearner(exchanges)
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    assert str(raised.value) == (
        "The callbacks of a Learner cannot be exchanged while it is fitting.\n"
        "  why:   the plan of a running fit is fixed\n"
        "  fix:   exchange them between two calls of `fit`"
    )


def test_shared_state_in_the_carry_survives_an_exchange():
    learner = testlearner(Average())
    learner.fit(1)
    total = float(learner.cbstate["total"])
    assert total > 0
    learner.callbacks.add(Counts())
    assert float(learner.cbstate["total"]) == total
    learner.callbacks.remove(Average)
    learner.callbacks.add(Average())
    assert float(learner.cbstate["total"]) == total


class Unborn(Callback):
    """Declares shared state that nobody creates."""

    def stateaccess(self):
        return {"cbstate": {"unborn": Write()}}

    @on
    def use(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.unborn = 1


def test_shared_state_that_nobody_creates():
    with pytest.raises(MissingStateError) as raised:
        testlearner(Unborn())
    assert str(raised.value) == (
        "Unborn() declares `cbstate.unborn`, which no callback's `init` creates.\n"
        f"  where: Unborn.stateaccess  {at(Unborn.stateaccess)}\n"
        "  why:   shared state must exist before the first handler runs\n"
        "  fix:   assign `learner.cbstate.unborn` in the `init` of Unborn()"
    )


def test_a_refused_set_is_forgotten_while_nothing_tells_a_batchs_shape():
    learner = testlearner(data=None)
    counts = Counts()
    learner.callbacks.add(counts)
    with pytest.raises(ConflictError):
        learner.callbacks.add(Scales(1.0), Scales(2.0))
    xs = jnp.ones((2, 1))
    learner.run_step(TrainingPhase(), (xs, xs))
    assert counts.calls == 1
    assert list(learner.callbacks) == [counts]


@pytest.mark.parametrize("callbacks", [Counts(), Counts, 5, "abc"])
def test_callbacks_that_are_no_list(callbacks):
    with pytest.raises(DeclarationError):
        Learner.from_loss(
            {"w": jnp.zeros(())}, lambda p, b, k: p["w"], optax.sgd(0.1), callbacks=callbacks, default_callbacks=False
        )
    with pytest.raises(DeclarationError):
        Learner.from_loss({"w": jnp.zeros(())}, lambda p, b, k: p["w"], optax.sgd(0.1), callbacks=callbacks)


def test_a_callback_instead_of_a_list():
    with pytest.raises(DeclarationError) as raised:
        Learner.from_loss(
            {"w": jnp.zeros(())}, lambda p, b, k: p["w"], optax.sgd(0.1), callbacks=Counts(), default_callbacks=False
        )
    assert str(raised.value) == (
        "`callbacks` must be a list of callback instances, not Counts().\n"
        "  fix:   put it into a list: `callbacks=[...]`"
    )


def test_the_graph_is_that_of_the_set_at_work_and_notebooks_show_it():
    learner = testlearner(Counts(), default_callbacks=False)
    assert learner.callbacks.graph.render().splitlines() == [
        "Callbacks at all moments: 1 callback, 0 edges",
        "",
        "unordered",
        "  host    Counts()",
    ]
    learner.callbacks.add(Scales())
    assert [d.label for d in learner.callbacks.graph.declared] == ["Counts()", "Scales(0.5)"]
    assert learner.callbacks._repr_mimebundle_() == learner.callbacks.graph._repr_mimebundle_()
