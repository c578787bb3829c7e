"""Errors while compiling are raised before the first step: complete messages."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import (
    AccessError,
    Append,
    Callback,
    MissingStateError,
    Read,
    TraceError,
    Write,
    on,
)
from fluxcb.events import BackwardBegin, BackwardEnd, LossBegin, UpdateEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

XS = np.array([[1.0], [2.0]], np.float32)
YS = 3 * XS - 1


def at(function):
    return f"{os.path.relpath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def fails(error, *callbacks, **kwargs):
    """Return the message of the error that construction raises, and check that the callbacks can be used again."""
    with pytest.raises(error) as raised:
        testlearner(*callbacks, **kwargs)
    assert all(getattr(callback, "_fluxcb_owner", None) is None for callback in callbacks)
    return str(raised.value)


def made(event, access, function):
    class Made(Callback):
        def stateaccess(self):
            return access

        @on(event, TrainingPhase)
        def handle(self, event, phase, learner):
            function(learner)

    return Made()


def where(made):
    return f"  where: Made.handle  {at(type(made).handle)}\n"


# -- access ------------------------------------------------------------------------------------------------------------


def declared(made):
    return f"  where: Made.stateaccess  {at(type(made).stateaccess)}\n         Made.handle  {at(type(made).handle)}\n"


WHY_DECLARED = "  why:   declared access determines order, conflicts and device-to-host transfers\n"


def test_undeclared_read_raises():
    bad = made(BackwardEnd, {"step": {"grads": Write()}}, lambda learner: learner.step.loss)
    assert fails(AccessError, bad) == (
        "Made() may not read `step.loss`: its `stateaccess` does not declare it.\n"
        + declared(bad)
        + WHY_DECLARED
        + '  fix:   add `{"step": {"loss": Read()}}` to `stateaccess`'
    )


def test_misspelled_read_raises_with_suggestion():
    bad = made(BackwardEnd, {"step": {"grads": Write()}}, lambda learner: learner.step.grad)
    assert fails(AccessError, bad).splitlines()[0] == (
        "Made() may not read `step.grad`: its `stateaccess` does not declare it. Did you mean `grads`?"
    )


def test_undeclared_write_raises():
    def write(learner):
        learner.params = learner.step.grads

    bad = made(UpdateEnd, {"step": {"grads": Read()}}, write)
    assert fails(AccessError, bad) == (
        "Made() may not write `params`: its `stateaccess` does not declare it.\n"
        + declared(bad)
        + WHY_DECLARED
        + '  fix:   add `{"params": Write()}` to `stateaccess`'
    )


def test_write_with_read_access_raises():
    def write(learner):
        learner.step.grads = learner.step.grads

    bad = made(BackwardEnd, {"step": {"grads": Read()}}, write)
    assert fails(AccessError, bad) == (
        "Made() declares only Read() on `step.grads`, but writes it.\n"
        + declared(bad)
        + WHY_DECLARED
        + '  fix:   add `{"step": {"grads": Write()}}` to `stateaccess`'
    )


def test_write_into_dict_with_read_access_raises():
    def write(learner):
        learner.step.grads["w"] = jnp.zeros(())

    bad = made(BackwardEnd, {"step": {"grads": Read()}}, write)
    assert fails(AccessError, bad) == (
        "Made() writes into the container that it read from `step.grads`.\n"
        + where(bad)
        + "  why:   reading returns a copy, so the change would be lost\n"
        "  fix:   declare Write(), change a copy, and assign it: `learner.step.grads = copy`"
    )


@pytest.mark.parametrize(
    ("event", "path", "events"),
    [
        (BackwardEnd, "step.loss", "BackwardBegin"),
        (BackwardBegin, "step.outputs", "LossBegin"),
        (BackwardEnd, "params", "UpdateEnd or ComputeEnd"),
        (UpdateEnd, "step.skip", "ForwardBegin or LossBegin or BackwardBegin or BackwardEnd"),
    ],
)
def test_write_at_event_without_effect_raises(event, path, events):
    names = path.split(".")
    access = {"step": {names[1]: Write()}} if len(names) == 2 else {path: Write()}

    def write(learner):
        if len(names) == 2:
            setattr(learner.step, names[1], jnp.bool_(False))
        else:
            learner.params = 0

    bad = made(event, access, write)
    assert fails(AccessError, bad) == (
        f"Made() writes `{path}` at {event.__name__}, but it can only be written at {events}.\n"
        + where(bad)
        + "  why:   at another event, the write would have no effect or an unexpected effect\n"
        f"  fix:   move it to a handler of {events}"
    )


def test_reading_value_before_its_event_raises():
    class Early(Callback):
        def stateaccess(self):
            return {"step": {"grads": Read()}}

        @on
        def early(self, event: LossBegin | BackwardEnd, phase: TrainingPhase, learner):
            learner.step.grads  # noqa: B018 - the read is the test

    assert fails(TraceError, Early()) == (
        "Early() reads `step.grads` at LossBegin x TrainingPhase, but it does not exist there.\n"
        f"  where: Early.early  {at(Early.early)}\n"
        "  why:   at this event, the step has batch, outputs, xs, ys\n"
        "  fix:   handle a later event, or a phase that provides the value"
    )


def test_using_learner_after_its_event_raises():
    kept = []
    good = made(BackwardEnd, {"step": {"grads": Read()}}, lambda learner: kept.append(learner))
    learner = testlearner(good)
    with pytest.raises(AccessError) as raised:
        kept[0].step.grads  # noqa: B018 - the read is the test
    assert str(raised.value) == (
        "Made() uses a traced learner after its event has ended.\n"
        + where(good)
        + "  why:   its values exist only while the step is traced\n"
        "  fix:   do not store `learner`; keep values in `learner.cbstate` instead"
    )
    learner.fit(1)


# -- Python on tracers -------------------------------------------------------------------------------------------------


def branches(learner):
    if learner.step.loss > 1:
        pass


def floats(learner):
    float(learner.step.loss)


def numpys(learner):
    np.asarray(learner.step.loss)


def indexes(learner):
    [1, 2][learner.step.loss.astype(int)]


def formats(learner):
    return f"{learner.step.loss:.3f}"


@pytest.mark.parametrize("function", [branches, floats, numpys, indexes, formats])
def test_traced_handler_using_concrete_value_raises(function):
    bad = made(BackwardBegin, {"step": {"loss": Read()}}, function)
    lines = fails(TraceError, bad).splitlines()
    assert lines[0].startswith("The traced handler Made().handle needs a value in Python: ")
    assert lines[1] == where(bad).rstrip()
    assert lines[-3:] == [
        "  why:   BackwardBegin handlers run while the step is traced, when values are not known yet",
        "  fix:   use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() "
        "or format values",
        "     or: read the value in a host handler, at StepEnd",
    ]


def test_branching_error_names_line():
    class Branches(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on
        def branch(self, event: BackwardBegin, phase: TrainingPhase, learner):
            if learner.step.loss > 1:
                pass

    text = fails(TraceError, Branches())
    file, first = os.path.relpath(__file__), Branches.branch.__code__.co_firstlineno
    assert text == (
        "The traced handler Branches().branch needs a value in Python: "
        "Attempted boolean conversion of traced array with shape bool[].\n"
        f"  where: Branches.branch  {at(Branches.branch)}\n"
        f"         branch  {file}:{first + 2}\n"
        "  why:   BackwardBegin handlers run while the step is traced, when values are not known yet\n"
        "  fix:   use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() "
        "or format values\n"
        "     or: read the value in a host handler, at StepEnd"
    )


def test_leaked_tracer_raises():
    class Keeps(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on
        def keep(self, event: BackwardBegin, phase: TrainingPhase, learner):
            self.last = {"loss": learner.step.loss}

    assert fails(TraceError, Keeps()) == (
        "Keeps() stores a traced value in `self.last`.\n"
        f"  where: Keeps.keep  {at(Keeps.keep)}\n"
        "  why:   a traced handler runs once, while the step is traced, and its values are invalid afterwards\n"
        "  fix:   put it into `learner.cbstate` (created in `init`) to carry it from step to step\n"
        "     or: read it in a host handler, at StepEnd"
    )


class Holder(Callback):
    """Keep an object that is not a pytree in a field and in `cbstate`."""

    def __init__(self, kept):
        self.kept = kept

    def stateaccess(self):
        return {"cbstate": Write(), "step": {"loss": Read()}}

    def init(self, learner):
        learner.cbstate.kept = self.kept

    @on
    def look(self, event: BackwardBegin, phase: TrainingPhase, learner):
        _ = learner.step.loss


@pytest.mark.parametrize(
    "kept",
    [iter([1]), (x for x in [1]), [map(str, [1])], {"a": {"b": zip([1], [2], strict=True)}}, {1: 2, "a": iter([1])}],
    ids=["iterator", "generator", "map", "zip", "mixed"],
)
def test_non_pytree_entry_is_kept_unchanged(kept):
    learner = testlearner(Holder(kept), batches=2)
    learner.fit(1)
    assert learner.cbstate["kept"] is kept
    assert learner.step == 2


# -- shapes ------------------------------------------------------------------------------------------------------------

CARRY = (
    "  why:   the structure, shapes and dtypes of the carry are fixed when the step is compiled\n"
    "  fix:   keep the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`, or create the value "
    "with the new ones in `init`"
)


class Holds(Callback):
    def __init__(self, change, first=None):
        self.change = change
        self.first = jnp.zeros(2) if first is None else first

    def __repr__(self):
        return "Holds()"

    def stateaccess(self):
        return {"cbstate": {"held": Write()}}

    def init(self, learner):
        if "held" not in learner.cbstate:
            learner.cbstate.held = self.first

    @on
    def update(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.cbstate.held = self.change(learner.cbstate.held)


@pytest.mark.parametrize(
    ("change", "first", "difference"),
    [
        (lambda held: held.astype(jnp.int32), None, "expected float32[2], got int32[2]"),
        (lambda held: held.astype(jnp.float16), None, "expected float32[2], got float16[2]"),
        (lambda held: jnp.append(held, 1.0), None, "expected float32[2], got float32[3]"),
        (lambda held: {"a": held}, None, 'expected float32[2], got {"a": float32[2]}'),
        (lambda held: {**held, "n": 1}, {"a": jnp.zeros(1)}, "['n'] is new: int 1"),
        (lambda held: {"a": held["a"].sum()}, {"a": jnp.zeros(1)}, "['a']: expected float32[1], got float32[]"),
    ],
)
def test_changing_shape_of_carried_state_raises(change, first, difference):
    lines = fails(TraceError, Holds(change, first)).splitlines()
    assert lines[0] == f"Holds() changes the structure, shape or dtype of `cbstate.held`: {difference}."
    assert lines[1] == f"  where: Holds.update  {at(Holds.update)}"
    assert "\n".join(lines[-2:]) == CARRY


def test_python_numbers_and_weak_types_take_carried_dtype():
    learner = testlearner(Holds(lambda held: 3, jnp.zeros((), jnp.float16)))
    learner.fit(1)
    assert (learner.cbstate["held"].dtype, float(learner.cbstate["held"])) == (jnp.float16, 3.0)
    learner = testlearner(Holds(lambda held: jnp.where(held > 0, 2.0, 1.0), jnp.zeros((), jnp.float32)))
    learner.fit(1)
    assert float(learner.cbstate["held"]) == 2.0
    assert learner.compile_counts == {"traces": 2, "compiles": 2}


def test_changing_shape_of_gradients_raises():
    def reshape(learner):
        learner.step.grads = {**learner.step.grads, "w": jnp.zeros(3)}

    bad = made(BackwardEnd, {"step": {"grads": Write()}}, reshape)
    assert fails(TraceError, bad) == (
        "Made() changes the structure, shape or dtype of `step.grads`: ['w']: expected float32[], got float32[3].\n"
        + where(bad)
        + "  why:   the structure, shapes and dtypes of the carry are fixed when the step is compiled\n"
        "  fix:   compute each array from the old one, with the same dtype: "
        "`learner.step.grads = jax.tree.map(lambda old: ..., learner.step.grads)`"
    )


def test_non_scalar_hyperparameter_raises():
    def put(learner):
        learner.hyperparams.learning_rate = jnp.zeros(2)

    bad = made(UpdateEnd, {"hyperparams": {"learning_rate": Write()}}, put)
    assert fails(TraceError, bad) == (
        "Made() sets `hyperparams.learning_rate` to float32[2]; it is float32[].\n"
        + where(bad)
        + "  why:   a hyperparameter is a scalar on the device, and its shape is compiled into the step\n"
        "  fix:   reduce the values to one number, e.g. with `jnp.mean(...)`"
    )


def test_non_boolean_flag_raises():
    def stop(learner):
        learner.step.stop = jnp.array([True, False])

    bad = made(BackwardEnd, {"step": {"stop": Append()}}, stop)
    assert fails(TraceError, bad) == (
        "Made() writes bool[2] to `step.stop`, which is bool[].\n"
        + where(bad)
        + "  fix:   reduce the value: `jnp.any(...)` or `jnp.all(...)`"
    )


# -- shared state that does not ride -----------------------------------------------------------------------------------


def test_python_state_in_traced_handler_raises():
    class Lists(Callback):
        def stateaccess(self):
            return {"cbstate": {"values": Write()}}

        def init(self, learner):
            learner.cbstate.values = []

        @on
        def use(self, event: UpdateEnd, phase: TrainingPhase, learner):
            learner.cbstate.values.append(1)

    assert fails(TraceError, Lists()) == (
        "Lists() uses `cbstate.values` in a traced handler, but the carry does not contain it.\n"
        f"  where: Lists.use  {at(Lists.use)}\n"
        "  why:   the carry contains only shared state that consists of JAX arrays and that a traced handler declares\n"
        "  fix:   create it in `init` as arrays: `learner.cbstate.values = jnp.zeros(...)`"
    )


def test_uncreated_entry_raises():
    bad = made(UpdateEnd, {"cbstate": {"never": Write()}}, lambda learner: learner.cbstate.never)
    assert fails(MissingStateError, bad) == (
        "Made() declares `cbstate.never`, which no callback's `init` creates.\n"
        f"  where: Made.stateaccess  {at(type(bad).stateaccess)}\n"
        "  why:   shared state must exist before the first handler runs\n"
        "  fix:   assign `learner.cbstate.never` in the `init` of Made()"
    )
