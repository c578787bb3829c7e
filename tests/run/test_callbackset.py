"""`learner.callbacks`: reading the callbacks and replacing them atomically."""

import copy
import os
import pickle
import sys
import types

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
from fluxcb.callbacks import Recorder
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
    """A callback that cannot be traced."""

    def stateaccess(self):
        return {"step": {"grads": Write()}, "cbstate": {"broken": Write()}}

    def init(self, learner):
        learner.cbstate.broken = jnp.zeros(())

    @on
    def branch(self, event: BackwardEnd, phase: TrainingPhase, learner):
        if learner.step.grads["w"] > 0:
            learner.step.grads = learner.step.grads


class Average(Callback):
    """Keep a running sum in the carry."""

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


def test_wrapped_callbacks_are_found_by_wrapped_class():
    counts = Counts()
    wrapped = every(counts, steps=2)
    learner = testlearner(wrapped)
    assert learner.callbacks.get(Counts) is counts
    assert counts in learner.callbacks
    assert wrapped in learner.callbacks
    learner.callbacks.remove(counts)
    assert list(learner.callbacks) == []


def test_in_order_groups_survive_replace():
    one, two, three = Scales(0.5), Scales(2.0), Scales(3.0)
    learner = testlearner(ordered(one, two))
    learner.callbacks.replace(three)  # the first of its class
    assert list(learner.callbacks) == [three, two]
    learner.callbacks.remove(two)
    assert list(learner.callbacks) == [three]


def test_missing_callbacks_raise():
    learner = testlearner(Counts())
    with pytest.raises(DeclarationError) as raised:
        learner.callbacks.get(EventLog)
    assert str(raised.value) == (
        "This Learner has no EventLog.\n"
        "  why:   it has Counts\n"
        "  fix:   add one: `learner.callbacks.add(EventLog(...))`"
    )
    for change in (learner.callbacks.remove, learner.callbacks.replace):
        with pytest.raises(DeclarationError):
            change(EventLog())
    with pytest.raises(DeclarationError, match=r"^This Learner has no EventLog\.") as raised:
        learner.callbacks.remove(EventLog)
    assert raised.value.fix == ("delete this call, or pass one of the callbacks in `learner.callbacks`",)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("Counts", "write `learner.callbacks.remove(learner.callbacks.get(Counts))`"),
        ("mine", "write `learner.callbacks.remove(next(c for c in learner.callbacks if c.name == 'mine'))`"),
        ("Counted", "delete this call, or pass one of the callbacks in `learner.callbacks`"),
    ],
)
def test_removing_by_name_says_how_to_remove_the_callback(name, fix):
    counts = Counts()
    counts.name = "mine"
    learner = testlearner(every(counts, steps=2), EventLog())
    with pytest.raises(DeclarationError) as raised:
        learner.callbacks.remove(name)
    assert str(raised.value) == f"{name!r} is not a callback of this Learner.\n  fix:   {fix}"
    if name != "Counted":
        exec(fix.split("`")[1], {"learner": learner, "Counts": Counts})
        assert [type(callback) for callback in learner.callbacks] == [EventLog]


def bad_sets():
    return {
        "conflict": ([Scales(2.0)], ConflictError),
        "trace": ([Breaks()], TraceError),
        "nothing": ([42], DeclarationError),
        "class": ([Counts], DeclarationError),
    }


@pytest.mark.parametrize("name", list(bad_sets()))
def test_invalid_set_keeps_old_callbacks(name):
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


def test_failed_construction_releases_callbacks():
    counts, scales = Counts(), Scales()
    with pytest.raises(ConflictError):
        testlearner(counts, scales, Scales(2.0))
    with pytest.raises(TraceError):
        testlearner(counts, Breaks())
    learner = testlearner(counts, scales)
    learner.fit(1)
    assert counts.calls == 4


def test_instance_belongs_to_one_learner():
    counts = Counts()
    learner = testlearner(counts)
    with pytest.raises(DeclarationError) as raised:
        testlearner(counts)
    assert str(raised.value) == (
        "Counts() already belongs to another Learner.\n"
        "  why:   a callback's own state would mix the two trainings\n"
        "  fix:   construct a new instance for each Learner; `fluxcb check` and pytest call a function such as "
        "`make_learner` several times, so construct it inside the function\n"
        "     or: free it first: `other.callbacks.remove(callback)`"
    )
    learner.callbacks.remove(counts)
    testlearner(counts).fit(1)
    assert counts.calls == 4


def test_deleted_learner_releases_callbacks():
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
def test_copied_callback_belongs_to_no_learner(clone):
    counts = Counts()
    learner = testlearner(counts)
    learner.fit(1)
    other = clone(counts)
    testlearner(other).fit(1)
    assert (counts.calls, other.calls) == (4, 8)


class Needy(Average):
    """A callback that cannot be traced the first time."""

    ready = False

    @on
    def add(self, event: BackwardEnd, phase: TrainingPhase, learner):
        if not self.ready:
            raise ValueError("not yet")
        super().add(event, phase, learner)


def test_learner_that_failed_at_first_batch_can_be_built_at_next():
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


def test_duplicate_instance_raises():
    counts = Counts()
    with pytest.raises(DeclarationError) as raised:
        testlearner(counts, every(counts, steps=2))
    assert str(raised.value) == (
        "The callback Counts() at EverySteps(steps=2) appears twice in the list; first as Counts() at position 0.\n"
        "  why:   an instance has only one state, and it would run twice at each moment\n"
        "  fix:   remove one of the two, or create a second instance"
    )


class Exchanges(Callback):
    def __init__(self):
        self.learner = None

    @on
    def exchange(self, event: EpochEnd, phase: TrainingPhase, learner):
        self.learner.callbacks.add(Counts())


def test_changing_callbacks_during_fit_raises():
    exchanges = Exchanges()
    exchanges.learner = learner = testlearner(exchanges)
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    assert str(raised.value) == (
        "The callbacks of a Learner cannot be replaced while it is fitting.\n"
        "  why:   the plan of a running fit is fixed\n"
        "  fix:   replace them between two calls of `fit`"
    )


def test_carried_cbstate_survives_replace():
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
    """Declare an entry that no callback creates."""

    def stateaccess(self):
        return {"cbstate": {"unborn": Write()}}

    @on
    def use(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.unborn = 1


def test_uncreated_entry_raises():
    with pytest.raises(MissingStateError) as raised:
        testlearner(Unborn())
    assert str(raised.value) == (
        "Unborn() declares `cbstate.unborn`, which no callback's `init` creates.\n"
        f"  where: Unborn.stateaccess  {at(Unborn.stateaccess)}\n"
        "  why:   shared state must exist before the first handler runs\n"
        "  fix:   assign `learner.cbstate.unborn` in the `init` of Unborn()"
    )


def test_rejected_set_is_forgotten_before_first_batch():
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
def test_invalid_callbacks_list_raises(callbacks):
    with pytest.raises(DeclarationError):
        Learner.from_loss(
            {"w": jnp.zeros(())}, lambda p, b, k: p["w"], optax.sgd(0.1), callbacks=callbacks, default_callbacks=False
        )
    with pytest.raises(DeclarationError):
        Learner.from_loss({"w": jnp.zeros(())}, lambda p, b, k: p["w"], optax.sgd(0.1), callbacks=callbacks)


def test_callback_instead_of_list_raises():
    with pytest.raises(DeclarationError) as raised:
        Learner.from_loss(
            {"w": jnp.zeros(())}, lambda p, b, k: p["w"], optax.sgd(0.1), callbacks=Counts(), default_callbacks=False
        )
    assert str(raised.value) == (
        "`callbacks` must be a list of callback instances, not Counts().\n"
        "  fix:   put it into a list: `callbacks=[...]`"
    )


def test_graph_is_that_of_current_callbacks():
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


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("append", "write `learner.callbacks.add(callback)`"),
        ("extend", "write `learner.callbacks.add(*callbacks)`"),
        ("insert", "write `learner.callbacks.set([...])` with the whole list"),
    ],
)
def test_list_methods_name_method_to_call(name, fix, refused):
    callbacks = testlearner().callbacks
    with refused(AttributeError, f"`learner.callbacks` has no attribute `{name}`.\n  fix:   {fix}"):
        getattr(callbacks, name)
    assert not hasattr(callbacks, name)
    assert not hasattr(callbacks, "qqq")


def test_subscript_names_what_to_write(refused):
    callbacks = testlearner(Recorder()).callbacks
    what = "`learner.callbacks` has no entry {}, because it is neither a list nor a dict.\n  fix:   write "
    fix = "e.g. `learner.callbacks.get(Recorder)`\n     or: write `list(learner.callbacks)[0]`"
    with refused(TypeError, what.format(0) + fix):
        callbacks[0]  # pyright: ignore[reportIndexIssue]
    with refused(TypeError, what.format(repr(Recorder)) + "`learner.callbacks.get(Recorder)`"):
        callbacks[Recorder]  # pyright: ignore[reportIndexIssue]
    assert callbacks.get(Recorder) in list(callbacks)


def test_addition_names_what_to_write(refused):
    learner = testlearner()
    text = "`learner.callbacks` is not a list, so `+` does not add to it.\n  fix:   write "
    text += "`learner.callbacks.add(*callbacks)`"
    with refused(TypeError, text):
        learner.callbacks += [Recorder()]  # pyright: ignore
    callbacks = [Recorder()]
    learner.callbacks.add(*callbacks)
    assert learner.callbacks.get(Recorder) is callbacks[0]


_CELL = """
from fluxcb import Callback, on
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase

class Redefined(Callback):
    def stateaccess(self):
        return {}

    @on
    def show(self, event: EpochEnd, phase: TrainingPhase, learner):
        pass
"""


@pytest.fixture
def cell(monkeypatch):
    """Return a function that runs a cell with a class again, and returns the new class."""
    module = types.ModuleType("notebook_cells")
    monkeypatch.setitem(sys.modules, "notebook_cells", module)

    def run() -> type[Callback]:
        exec(_CELL, vars(module))
        return module.Redefined

    return run


def test_callback_of_redefined_class_is_found_replaced_and_removed(cell):
    old = cell()()
    learner = testlearner(old)
    new = cell()()
    assert learner.callbacks.get(type(new)) is old
    learner.callbacks.replace(new)
    assert new in learner.callbacks
    assert old not in learner.callbacks
    learner.callbacks.remove(cell())
    assert new not in learner.callbacks


def test_runafter_that_names_old_definition_of_class_orders_new_one(cell):
    old = cell()

    class Later(Callback):
        def stateaccess(self):
            return {}

        def runafter(self):
            return (old,)

        @on
        def show(self, event: EpochEnd, phase: TrainingPhase, learner):
            pass

    graph = testlearner(Later(), cell()()).graph
    assert ("Redefined()", "Later()") in graph.edges


class Keeps(Callback):
    """Count the steps in `cbstate.steps`."""

    def __init__(self, checks):
        self.checks = checks

    def stateaccess(self):
        return {"cbstate": {"steps": Write()}}

    def init(self, learner):
        if not self.checks or "steps" not in learner.cbstate:
            learner.cbstate.steps = jnp.zeros((), jnp.int32)


class KeepsTraced(Keeps):
    @on
    def count(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.cbstate.steps = learner.cbstate.steps + 1


class KeepsOnHost(Keeps):
    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.steps = learner.cbstate.steps + 1


@pytest.mark.parametrize("cls", [KeepsTraced, KeepsOnHost])
def test_init_that_replaces_its_entry_when_the_list_changes_is_a_warning_whose_fix_works(cls):
    learner = testlearner(cls(checks=False))
    learner.fit(1)
    with pytest.warns(UserWarning, match="callbacks list has changed") as caught:
        learner.callbacks.add(Recorder())
    assert [str(warning.message) for warning in caught] == [
        f"The callbacks list has changed, and the `init` of {cls.__name__}() replaced `cbstate.steps`, which already "
        'existed. To keep its value, write `if "steps" not in learner.cbstate:` before the assignment.'
    ]
    learner = testlearner(cls(checks=True))
    learner.fit(1)
    steps = int(learner.cbstate["steps"])
    learner.callbacks.add(Recorder())
    assert steps == int(learner.cbstate["steps"]) == learner.step
