"""Callbacks with invalid declarations, or with effects that they do not declare."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import (
    AccessError,
    Append,
    Callback,
    CheckError,
    ConflictError,
    DataError,
    DeclarationError,
    MissingStateError,
    NoConflict,
    NotDefined,
    Read,
    RunFirst,
    TraceError,
    UnknownStateError,
    Unresolvable,
    Write,
    on,
)
from fluxcb._traced_values import shapes
from fluxcb.events import BackwardBegin, BackwardEnd, ForwardBegin, LossBegin, StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import EventLog, testlearner

EPOCH_OF_ONE_STEP = ["FitBegin", "EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger", "FitStopping", "FitEnd"]

# -- classes -----------------------------------------------------------------------------------------------------------


def handler(function):
    return type("Made", (Callback,), {"handle": on(StepEnd)(function)})


async def coroutine(self, event, phase, learner):
    pass


def generator(self, event, phase, learner):
    yield


async def stream(self, event, phase, learner):
    yield


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, "a coroutine function"),
        (generator, "a generator function"),
        (stream, "a generator function"),
    ],
    ids=["coroutine", "generator", "stream"],
)
class TestWhatRunsLater:
    def test_handler_of_wrong_kind_raises(self, function, kind, told):
        first = f"The handler `{function.__name__}` is {kind}; a handler must run when it is called."
        told(lambda: handler(function), DeclarationError, first)

    def test_registered_handler_of_wrong_kind_raises(self, function, kind, told):
        class Open(Callback): ...

        first = f"The handler `{function.__name__}` is {kind}; a handler must run when it is called."
        told(lambda: Open.on.register(StepEnd)(function), DeclarationError, first)

    def test_override_of_wrong_kind_raises(self, function, kind, told):
        first = f"The handler `{function.__name__}` is {kind}; a handler must run when it is called."
        told(lambda: type("Later", (EventLog,), {"record": function}), DeclarationError, first)

    @pytest.mark.parametrize("name", ["stateaccess", "runafter", "resolveconflict", "init", "state_dict"])
    def test_declaration_of_wrong_kind_raises(self, function, kind, name, told):
        first = f"`Made.{name}` is {kind}; it must run when it is called."
        told(lambda: type("Made", (Callback,), {name: function}), DeclarationError, first)


# -- what they state ---------------------------------------------------------------------------------------------------


class States(Callback):
    def __init__(self, access=None, after=()):
        self.access, self.after = access, after

    def __repr__(self):
        return "States()"

    def stateaccess(self):
        return {} if self.access is None else self.access

    def runafter(self):
        return self.after

    @on
    def handle(self, event: StepEnd, phase: TrainingPhase, learner): ...


MAPPING = "`States.stateaccess` must return a mapping of state to permissions, not {}."
PERMISSION = "`States.stateaccess` maps `{}` to {}, which is not a permission."
KEY = "`States.stateaccess` has the key {!r} at the top level; keys are single names."
PART = "States() declares access to `{}`, which is not a part of the Learner.{}"


@pytest.mark.parametrize(
    ("access", "kind", "first"),
    [
        (Read, DeclarationError, MAPPING.format("type <class 'fluxcb._declare.access.Read'>")),
        (("params", Write()), DeclarationError, MAPPING.format("tuple ('params', Write())")),
        ("params", DeclarationError, MAPPING.format("str 'params'")),
        ({"params"}, DeclarationError, MAPPING.format("set {'params'}")),
        ({"params": Read}, DeclarationError, PERMISSION.format("params", "the class Read")),
        ({"params": True}, DeclarationError, PERMISSION.format("params", "bool True")),
        ({"params": None}, DeclarationError, PERMISSION.format("params", "NoneType None")),
        ({"step": ["loss"]}, DeclarationError, PERMISSION.format("step", "list ['loss']")),
        ({"step.loss": Read()}, DeclarationError, KEY.format("step.loss")),
        ({"step": Write(), "step.loss": Read()}, DeclarationError, KEY.format("step.loss")),
        ({"": Read()}, DeclarationError, KEY.format("")),
        ({5: Read()}, DeclarationError, KEY.format(5)),
        ({"parms": Read()}, UnknownStateError, PART.format("parms", " Did you mean `params`?")),
        ({"../params": Read()}, DeclarationError, KEY.format("../params")),
        ({"a/b": Read()}, UnknownStateError, PART.format("a/b", "")),
        ({"p\u0430rams": Read()}, UnknownStateError, PART.format("p\u0430rams", " Did you mean `params`?")),
        ({"x" * 300: Read()}, UnknownStateError, PART.format("x" * 300, "")),
        (
            {"step": {"los": Read()}},
            UnknownStateError,
            "States() declares access to `step.los`, which no phase provides and no callback writes. "
            "Did you mean `loss`?",
        ),
        (
            {"data": {"test": Read()}},
            UnknownStateError,
            "States() declares access to `data.test`, which is not the name of a phase.",
        ),
        ({"*": Write()}, UnknownStateError, "States() declares a write to `*`, which no callback can write."),
        ({"key": Write()}, UnknownStateError, "States() declares a write to `key`, which no callback can write."),
        (
            {"cbstate": {"nope": Read()}},
            MissingStateError,
            "States() reads `cbstate.nope`, which no callback creates.",
        ),
        (
            {"hyperparams": {"momentum": Read()}},
            MissingStateError,
            "States() needs `hyperparams.momentum`, which this optimizer does not have. It has `learning_rate`.",
        ),
    ],
)
def test_invalid_access_raises(access, kind, first, refuses):
    refuses(lambda log: testlearner(log, States(access)), kind, first)


TUPLE = "`States.runafter` must return a tuple of callback classes, not {}."
NAMES = "`States.runafter` names {}, which is not a callback class."


@pytest.mark.parametrize(
    ("after", "first"),
    [
        (None, TUPLE.format("None")),
        (5, TUPLE.format("5")),
        (EventLog, TUPLE.format("EventLog")),
        (("EventLog",), NAMES.format("'EventLog'")),
        ((int,), NAMES.format("<class 'int'>")),
        ((EventLog(),), NAMES.format("EventLog()")),
    ],
    ids=["none", "number", "class", "text", "int", "instance"],
)
def test_invalid_order_raises(after, first, refuses):
    refuses(lambda log: testlearner(log, States(after=after)), DeclarationError, first)


class Answers(States):
    def __init__(self, answer):
        super().__init__({"params": Write()})
        self.answer = answer

    def __repr__(self):
        return "Answers()"

    def resolveconflict(self, other):
        return self.answer if type(other) is States else NotDefined()


ANSWERED = "`Answers.resolveconflict` returned {} for Answers() and States()."


@pytest.mark.parametrize(
    ("answer", "kind", "first"),
    [
        (None, CheckError, ANSWERED.format("None")),
        (True, CheckError, ANSWERED.format("True")),
        ("first", CheckError, ANSWERED.format("'first'")),
        (NoConflict, CheckError, ANSWERED.format("<class 'fluxcb._declare.resolution.NoConflict'>")),
        (RunFirst(5), CheckError, ANSWERED.format("RunFirst(5)")),
        (RunFirst(EventLog()), CheckError, ANSWERED.format("RunFirst(EventLog())")),
        (Unresolvable(), ConflictError, "Answers() and States() can never be used together."),
    ],
    ids=["none", "bool", "text", "class", "number", "another", "never"],
)
def test_invalid_resolution_raises(answer, kind, first, refuses):
    refuses(lambda log: testlearner(log, Answers(answer), States({"params": Write()})), kind, first)


# -- what they do ------------------------------------------------------------------------------------------------------


class Does(Callback):
    """Call a function with the learner in a handler, or in `init`."""

    def __init__(self, function, access):
        self.function, self.access = function, access

    def __repr__(self):
        return "Does()"

    def stateaccess(self):
        return self.access


class AtStepEnd(Does):
    @on
    def handle(self, event: StepEnd, phase: TrainingPhase, learner):
        self.function(learner)


class InInit(Does):
    def init(self, learner):
        self.function(learner)


def traced(event):
    def handle(self, event, phase, learner):
        return self.function(learner)

    return type("Traced", (Does,), {"handle": on(event, AbstractTrainingPhase)(handle)})


def put(path, value):
    """Return a function that assigns a value at a path of the learner, and the access that it requires."""
    *names, last = path.split(".")
    access = Append() if path == "step.skip" else Write()
    for name in reversed([*names, last]):
        access = {name: access}

    def assign(learner):
        for name in names:
            learner = getattr(learner, name)
        setattr(learner, last, value)

    return assign, access


CHANGES = "Does() changes the structure, shape or dtype of `{}`: {}."
RATE = "hyperparams.learning_rate"
BOTH = '{"b": float32[], "w": float32[]}'


@pytest.mark.parametrize(
    ("path", "value", "difference"),
    [
        (RATE, "high", "expected float32[], got str 'high'"),
        (RATE, None, "expected float32[], got None"),
        (RATE, np.zeros(2), "expected shape (), got shape (2,)"),
        ("params", None, f"expected {BOTH}, got None"),
        ("params", {"w": np.zeros((), np.float32)}, "['b'] is missing"),
        ("params", {"w": "a", "b": "b"}, "['b']: expected float32[], got str 'b'"),
        ("params", {"w": np.zeros(()), "b": np.zeros(())}, "['b']: expected float32[], got float64[]"),
    ],
    ids=["text", "none", "vector", "no-params", "part", "texts", "doubles"],
)
@pytest.mark.parametrize("where", [AtStepEnd, InInit])
def test_invalid_value_written_on_host_raises(path, value, difference, where, refuses):
    bad = where(*put(path, value))
    refuses(lambda log: testlearner(log, bad).fit(1), DeclarationError, CHANGES.format(path, difference))


NO_ARRAY = "What Does() writes to `{}` has {}, which JAX cannot use as an array of numbers."


@pytest.mark.parametrize(
    ("event", "path", "value", "first"),
    [
        (ForwardBegin, "step.xs", "x", NO_ARRAY.format("step.xs", "str 'x'")),
        (LossBegin, "step.outputs", object(), NO_ARRAY.format("step.outputs", "an object of type `object`")),
        (BackwardBegin, "step.mine", {"a": "x"}, NO_ARRAY.format("step.mine", "str 'x' at `step.mine['a']`")),
        (BackwardBegin, "step.loss", "x", CHANGES.format("step.loss", "expected float32[], got str 'x'")),
        (BackwardBegin, "step.loss", 5.0, "The loss does not depend on `params`."),
        (BackwardEnd, "step.grads", None, CHANGES.format("step.grads", f"expected {BOTH}, got None")),
        (BackwardEnd, "step.skip", "x", "Does() writes str 'x' to `step.skip`, which is bool[]."),
        (BackwardEnd, "step.skip", 0.5, "Does() writes float 0.5 to `step.skip`, which is bool[]."),
        (BackwardEnd, RATE, "x", f"Does() sets `{RATE}` to str 'x'; it is float32[]."),
        (BackwardEnd, RATE, None, f"Does() sets `{RATE}` to None; it is float32[]."),
        (UpdateEnd, "params", "x", CHANGES.format("params", f"expected {BOTH}, got str 'x'")),
    ],
    ids=["xs", "outputs", "own", "loss", "constant", "grads", "skip", "number", "rate", "none", "params"],
)
def test_invalid_value_written_while_tracing_raises(event, path, value, first, refuses):
    bad = traced(event)(*put(path, value))
    refuses(lambda log: testlearner(log, bad), TraceError, first)


@pytest.mark.parametrize("returned", [jnp.zeros(2), (1, 2), False, {"w": 0.0}], ids=["array", "tuple", "bool", "dict"])
def test_return_value_of_traced_handler_raises(returned, refuses):
    bad = traced(BackwardEnd)(lambda learner: returned, {"step": {"grads": Write()}})
    shown = shapes(returned)
    refuses(
        lambda log: testlearner(log, bad),
        TraceError,
        f"The traced handler Does().handle returned {shown}, and return values of handlers have no effect.",
    )


@pytest.mark.parametrize(
    ("function", "access", "kind", "first"),
    [
        (
            lambda learner: learner.params,
            {},
            AccessError,
            "Does() may not read `params`: its `stateaccess` does not declare it.",
        ),
        (
            lambda learner: setattr(learner, "params", 5),
            {"params": Read()},
            AccessError,
            "Does() declares only Read() on `params`, but writes it.",
        ),
        (
            lambda learner: setattr(learner.data, "training", 5),
            {"data": Write()},
            DataError,
            "`data.training` is int, which cannot be iterated.",
        ),
        (
            lambda learner: setattr(learner, "model", 5),
            {"model": Write()},
            DeclarationError,
            "`model` is of type `int`, which fluxcb cannot train.",
        ),
        (
            lambda learner: setattr(learner, "loss_fn", 5),
            {"loss_fn": Write()},
            AccessError,
            "Does() assigns `loss_fn`, which is fixed when the Learner is built.",
        ),
    ],
    ids=["undeclared", "read", "data", "model", "loss"],
)
def test_invalid_init_raises(function, access, kind, first, refuses):
    refuses(lambda log: testlearner(log, InInit(function, access)), kind, first)


@pytest.mark.parametrize(
    "change",
    [
        lambda callbacks, log: callbacks.add(log, 5),
        lambda callbacks, log: callbacks.add(log, States({"parms": Read()})),
        lambda callbacks, log: callbacks.add(log, InInit(*put("params", None))),
        lambda callbacks, log: callbacks.add(log, traced(BackwardEnd)(lambda learner: 5, {})),
        lambda callbacks, log: callbacks.set([log, log]),
    ],
    ids=["list", "access", "init", "traced", "twice"],
)
def test_rejected_callbacks_leave_learner_unchanged(change):
    learner, refused = testlearner(good := EventLog(), batches=1, validation_batches=0), EventLog()
    with pytest.raises((DeclarationError, CheckError, TraceError)):
        change(learner.callbacks, refused)
    assert list(learner.callbacks) == [good]
    testlearner(refused, batches=1, validation_batches=0).fit(1)
    learner.fit(1)
    assert good.names() == refused.names() == EPOCH_OF_ONE_STEP
