"""For every error class: a program that raises it, and the program with each suggested fix.

A case contains the complete `fix` of its message, and the edited program for each line of it. Code between backticks is
taken from the message itself, so that the tested edit always matches the message.
"""

import itertools
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    Learner,
    NoConflict,
    NotDefined,
    Read,
    RunFirst,
    Unresolvable,
    Write,
    _errors,
    in_order,
    on,
)
from fluxcb._check.source_audit import audit_source
from fluxcb._declare.declared import declare
from fluxcb.callbacks import (
    Checkpointer,
    CustomCallback,
    LearningRate,
    Metric,
    Metrics,
    Recorder,
    Scheduler,
    SmoothLoss,
    accuracy,
)
from fluxcb.checkpoints import load_params
from fluxcb.events import BackwardEnd, Event, StepEnd
from fluxcb.phases import TrainingPhase
from tests.processes_as_threads import keep_processes, run_processes

XS = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
BATCHES = [(x, 3 * x) for x in np.split(XS, 4)]

Fixed = Callable[..., Any]
"""A program that is given the pieces of code in one line of a message."""


@dataclass
class Case:
    """A program that raises an error, and the edited program for each line of the error's `fix`."""

    kind: type[Exception]
    broken: Callable[[], Any]
    fixed: Mapping[str, Fixed]


CASES: dict[str, Callable[[Path], Case]] = {}
"""By name of the class and, where it has several, what they are about; each makes its case in an empty directory."""


def case(function: Callable[[Path], Case]) -> Callable[[Path], Case]:
    CASES[function.__name__] = function
    return function


def code(line: str) -> list[str]:
    return re.findall(r"`(.+?)`", line)


def evaluated(source: str, **names: Any) -> Any:
    names = {"fluxcb": fluxcb, "Append": Append, "Read": Read, "Write": Write, "in_order": in_order, **names}
    return eval(source, names)  # noqa: S307 - of the messages' own text


def learner(*callbacks: Any, **options: Any) -> Learner:
    model = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])
    loss = options.pop("loss_fn", lambda outputs, ys: jnp.mean((outputs - ys) ** 2))
    given = {"data": BATCHES, "callbacks": callbacks, "default_callbacks": False, **options}
    return Learner(model, loss, optax.sgd(0.1), **given)


def check(*callbacks: Any) -> Any:
    return fluxcb.check(callbacks, default_callbacks=False)


def made(name: str, access: Any, event: type[Event] = StepEnd, act: Any = None, **body: Any) -> type[Callback]:
    """Return a class of callbacks with one handler."""

    def handle(self, event, phase, learner):
        if act is not None:
            act(learner)

    body = {"stateaccess": lambda self: access, "handle": on(event, TrainingPhase)(handle), **body}
    return type(name, (Callback,), body)


def passing() -> Any:
    """Return a function that does nothing and can be a handler."""

    def passes(self, event, phase, learner): ...

    return passes


# --- declarations -----------------------------------------------------------------------------------------------------


@case
def DeclarationError(folder: Path) -> Case:  # noqa: N802 - the class's name
    def define(name: str) -> type[Callback]:
        return type("Printer", (Callback,), {name: lambda self: {"step": {"loss": Read()}}})

    line = "rename it to `stateaccess`, or to a less similar name if it is a different method"
    return Case(fluxcb.DeclarationError, lambda: define("state_access"), {line: define})


@case
def AmbiguityError(folder: Path) -> Case:  # noqa: N802
    def define(*added: Any) -> type[Callback]:
        handlers = {f"handle{i}": decorator(passing()) for i, decorator in enumerate(added)}
        return type("Watcher", (Callback,), handlers)

    two = [on(StepEnd), on(Event, TrainingPhase)]

    def fixed(source: str) -> Any:
        return define(*two, evaluated(source.removeprefix("@"), on=on, StepEnd=StepEnd, TrainingPhase=TrainingPhase))

    line = "add a handler for `@on(StepEnd, TrainingPhase)`, which takes precedence over both"
    return Case(fluxcb.AmbiguityError, lambda: define(*two), {line: fixed})


# --- sets of callbacks ------------------------------------------------------------------------------------------------


@case
def CheckError(folder: Path) -> Case:  # noqa: N802
    def settled(answer: Callable[[Any, Any], Any]) -> Any:
        access = {"cbstate": {"total": Write()}}
        one = made("One", access, resolveconflict=answer, init=lambda self, learner: None)
        return check(one(), made("Other", access)())

    def fixed() -> None:
        settled(lambda one, other: NoConflict())
        settled(lambda one, other: RunFirst(one))
        settled(lambda one, other: RunFirst(other))
        for answer in (NotDefined(), Unresolvable()):  # which leave the conflict as it is
            with pytest.raises(fluxcb.ConflictError):
                settled(lambda one, other, answer=answer: answer)

    line = "return NotDefined(), Unresolvable(), NoConflict(), or RunFirst(one of the two callbacks)"
    return Case(fluxcb.CheckError, lambda: settled(lambda one, other: "first"), {line: fixed})


@case
def ConflictError(folder: Path) -> Case:  # noqa: N802
    def pair(permission: Any = Write(), **body: Any) -> tuple[Callback, Callback]:  # noqa: B008
        access = {"cbstate": {"total": permission}}
        return made("Adds", access)(), made("Halves", access, **body)()

    def ordered(source: str) -> Any:
        adds, halves = pair()
        return check(evaluated(source.replace("()", ""), in_order=in_order, Adds=adds, Halves=halves))

    def after(method: str, returned: str) -> Any:
        adds, _ = pair()
        assert method == "Halves.runafter()"
        body = {"runafter": lambda self: evaluated(returned, Adds=type(adds))}
        return check(adds, pair(**body)[1])

    return Case(
        fluxcb.ConflictError,
        lambda: check(*pair()),
        {
            "put them in the list as `in_order(Adds(), Halves())`": ordered,
            "make `Halves.runafter()` return `(Adds,)`": after,
            "declare `Append()` in both if the order of the values that they add does not matter": lambda source: check(
                *pair(evaluated(source))
            ),
        },
    )


@case
def ConflictError_twins(folder: Path) -> Case:  # noqa: N802
    """Two equal-looking instances, of which no code can name the second one by its repr."""
    adds = made("Adds", {"params": Write()})

    def ordered(source: str) -> Any:
        return check(evaluated(source, first=adds(), second=adds()))

    line = "assign the two to variables, and put them in the list as `in_order(first, second)`"
    removed = "if you need only one Adds(), remove the other from the list"
    fixes = {line: ordered, removed: lambda: check(adds())}
    return Case(fluxcb.ConflictError, lambda: check(adds(), adds()), fixes)


@case
def ConflictError_shipped(folder: Path) -> Case:  # noqa: N802
    """Classes of the library cannot be edited, so neither `Append()` in both nor `runafter` is suggested."""
    adds = made("Adds", {"cbstate": {"history": Write()}}, runafter=lambda self: ())

    def ordered(source: str) -> Any:
        return check(evaluated(source, Recorder=Recorder, Adds=adds))

    def after(method: str, returned: str) -> Any:
        assert method == "Adds.runafter()"
        late = made(
            "Adds",
            {"cbstate": {"history": Write()}},
            runafter=lambda self: evaluated(returned, Recorder=Recorder),
        )
        return check(Recorder(), late())

    lines = {
        "put them in the list as `in_order(Recorder(), Adds())`": ordered,
        "make `Adds.runafter()` return `(Recorder,)`": after,
    }
    return Case(fluxcb.ConflictError, lambda: check(Recorder(), adds()), lines)


@case
def ConflictError_metrics(folder: Path) -> Case:  # noqa: N802
    def top5(outputs: Any, ys: Any) -> Any:
        return jnp.zeros(())

    half = Metric(top5, name="half", phase=TrainingPhase)

    def fixed(source: str) -> Any:
        names = {"Metrics": Metrics, "Metric": Metric, "accuracy": accuracy, "top5": top5}
        return check(evaluated(source, TrainingPhase=TrainingPhase, SmoothLoss=SmoothLoss, **names))

    line = 'use one: `Metrics(accuracy, Metric(top5, name="half", phase=TrainingPhase), SmoothLoss(0.9))`'
    return Case(
        fluxcb.ConflictError,
        lambda: check(Metrics(accuracy, half), Metrics(accuracy, SmoothLoss(0.9))),
        {line: fixed},
    )


@case
def CycleError(folder: Path) -> Case:  # noqa: N802
    def pair(previous: bool = False, **narrowed: Any) -> dict[str, Callback]:
        ping = {"cbstate": {"ping": Write(), "pong": Read(previous=previous)}}
        pong = {"cbstate": {"pong": Write(), "ping": Read()}}
        return {"Ping": made("Ping", ping, **narrowed)(), "Pong": made("Pong", pong)()}

    def ordered(source: str) -> Any:
        both = pair()
        return check(evaluated(source.replace("()", ""), **both))

    def narrowed(*source: str) -> Any:
        narrow = on(StepEnd, TrainingPhase, access={"cbstate": {"ping": Write()}})(passing())
        return check(*pair(handle=narrow).values())

    return Case(
        fluxcb.CycleError,
        lambda: check(*pair().values()),
        {
            "put them in the list as `in_order(Ping(), Pong())`": ordered,
            "put them in the list as `in_order(Pong(), Ping())`": ordered,
            "in `Ping` or `Pong`, declare `Read(previous=True)` if a value from an earlier moment is sufficient": (
                lambda ping, pong, source: check(*pair(previous=evaluated(source).previous).values())
            ),
            "in `Ping` or `Pong`, narrow a handler that uses less with `@on(..., access={...})`": narrowed,
        },
    )


@case
def MissingStateError(folder: Path) -> Case:  # noqa: N802
    show = made("HistoryPrinter", {"cbstate": {"history": Read()}})
    return Case(
        fluxcb.MissingStateError,
        lambda: check(show()),
        {
            "add `Recorder()` to the callbacks, which creates it": lambda source: check(
                show(), evaluated(source, Recorder=Recorder)
            )
        },
    )


class Watch(Callback):
    """Read an undeclared value at a later step."""

    access: Any = {"step": {"loss": Read()}}

    def stateaccess(self):
        return self.access

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step % 1000 == 0:
            print(learner.step.loss, learner.params)


@case
def UndeclaredAccessError(folder: Path) -> Case:  # noqa: N802
    def audit(access: Any) -> None:
        watch = Watch()
        watch.access = access
        problems = audit_source(declare([watch])[0]).problems
        if problems:
            raise problems[0]

    def fixed(source: str, method: str) -> None:
        assert method == "Watch.stateaccess"
        audit({**Watch.access, **evaluated(source)})

    line = 'add `{"params": Read()}` to `Watch.stateaccess`'
    return Case(fluxcb.UndeclaredAccessError, lambda: audit(Watch.access), {line: fixed})


@case
def UnknownStateError(folder: Path) -> Case:  # noqa: N802
    def reads(name: str) -> Any:
        return check(made("Prints", {"step": {name: Read()}})())

    names = "batch, data_position, earlier_losses, grads, hold, loss, outputs, skip, skips, stop, updates, xs, ys"
    return Case(
        fluxcb.UnknownStateError,
        lambda: reads("lsos"),
        {f"name one of {names}": lambda: [reads(name) for name in names.split(", ")]},
    )


# --- running ----------------------------------------------------------------------------------------------------------


@case
def AccessError(folder: Path) -> Case:  # noqa: N802
    def run(access: Any) -> Any:
        peeker = made("Peeker", access, act=lambda learner: (learner.step.loss, learner.params))
        return learner(peeker()).fit(1)

    declared = {"step": {"loss": Read()}}
    line = 'add `{"params": Read()}` to `stateaccess`'
    return Case(
        fluxcb.AccessError, lambda: run(declared), {line: lambda source, method: run({**declared, **evaluated(source)})}
    )


@case
def AccessError_misspelt(folder: Path) -> Case:  # noqa: N802
    def run(access: Any, path: str) -> Any:
        peeker = made("Peeker", access, act=lambda learner: evaluated(path, learner=learner))
        return learner(peeker()).fit(1)

    def fixed(path: str, before: str, access: str, method: str) -> Any:
        assert (before, method) == ("learner.parms", "stateaccess")
        return run(evaluated(access), path)

    line = 'write `learner.params` instead of `learner.parms`, and add `{"params": Read()}` to `stateaccess`'
    return Case(fluxcb.AccessError, lambda: run({}, "learner.parms"), {line: fixed})


@case
def AccessError_of_a_function(folder: Path) -> Case:  # noqa: N802
    """The access of a function is an argument instead of a `stateaccess` of the user."""

    def show(learner):
        print(learner.params)

    def run(callback: Any) -> Any:
        return learner(callback).fit(1)

    names = {"CustomCallback": CustomCallback, "show": show, "StepEnd": StepEnd}
    line = 'write `CustomCallback(show, StepEnd, access={"params": Read()})`'
    return Case(
        fluxcb.AccessError,
        lambda: run(CustomCallback(show, StepEnd)),
        {line: lambda source: run(evaluated(source, **names))},
    )


@case
def AccessError_of_a_function_that_cancels(folder: Path) -> Case:  # noqa: N802
    def cancel(learner):
        if learner.step.loss > 0:
            raise fluxcb.CancelFitting("enough")

    access = {"step": {"loss": Read()}}

    def run(added: Any) -> Any:
        return learner(CustomCallback(cancel, StepEnd, access={**access, **added})).fit(1)

    line = 'add `{"control": Append()}` to the argument `access`: `CustomCallback(cancel, StepEnd, access={...})`'
    return Case(fluxcb.AccessError, lambda: run({}), {line: lambda source, *rest: run(evaluated(source))})


@case
def AccessError_alias(folder: Path) -> Case:  # noqa: N802
    def run(path: str) -> Any:
        act = lambda learner: exec(f"{path} = 0.1", {"learner": learner})  # noqa: E731
        sets = made("Sets", {"hyperparams": {"learning_rate": Write()}}, act=act)
        made_with = Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch, key: jnp.mean(params["w"] * batch[0]),
            fluxcb.inject(optax.sgd, learning_rate=0.1),
            data=BATCHES,
            callbacks=[sets()],
            default_callbacks=False,
        )
        return made_with.fit(1)

    line = "write `learner.hyperparams.learning_rate` instead of `learner.hyperparams.lr`"
    return Case(fluxcb.AccessError, lambda: run("learner.hyperparams.lr"), {line: lambda path, before: run(path)})


@case
def MissingStateError_alias(folder: Path) -> Case:  # noqa: N802
    def build(callback: Any) -> Any:
        optimizer = fluxcb.inject(optax.sgd, learning_rate=0.1)
        loss = lambda params, batch, key: jnp.mean(params["w"] * batch[0])  # noqa: E731
        return Learner.from_loss(
            {"w": jnp.ones(())}, loss, optimizer, data=BATCHES, callbacks=[callback], default_callbacks=False
        )

    def fixed(source: str) -> Any:
        names = {"Scheduler": Scheduler, "LearningRate": LearningRate}
        return build(evaluated(source.replace("...", "0.1"), **names))

    line = "write `Scheduler({LearningRate: ...})`"
    return Case(fluxcb.MissingStateError, lambda: build(Scheduler({"lr": 0.1})), {line: fixed})


@case
def UndeclaredAccessError_misspelt(folder: Path) -> Case:  # noqa: N802
    def audit(cls: type[Callback]) -> None:
        problems = audit_source(declare([cls()])[0]).problems
        if problems:
            raise problems[0]

    def fixed(path: str) -> None:
        assert path == "learner.step.loss"
        audit(Spelt)

    return Case(fluxcb.UndeclaredAccessError, lambda: audit(Misspelt), {"write `learner.step.loss`": fixed})


class Misspelt(Watch):
    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        print(learner.step.los)


class Spelt(Watch):
    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        print(learner.step.loss)


@case
def DeclarationError_list(folder: Path) -> Case:  # noqa: N802
    a, b = (made(name, {})() for name in "AB")
    line = "pass them one by one: `learner.callbacks.add(a, b)`"
    return Case(
        fluxcb.DeclarationError,
        lambda: learner().callbacks.add([a, b]),
        {line: lambda source: evaluated(source, learner=learner(), a=a, b=b)},
    )


@case
def DeclarationError_evaluate(folder: Path) -> Case:  # noqa: N802
    def size(outputs: Any, ys: Any) -> Any:
        return jnp.mean(jnp.abs(outputs))

    def evaluate(metrics: Any) -> Any:
        return learner().evaluate(BATCHES, metrics=metrics)

    def fixed(source: str) -> None:
        # The accuracy of fluxcb needs two or more classes.
        callbacks = SimpleNamespace(callbacks=SimpleNamespace(accuracy=size))
        found = evaluated(source, learner=learner(), data=BATCHES, fluxcb=callbacks)
        assert found == evaluate(Metrics(size))
        assert "size" in found

    return Case(
        fluxcb.DeclarationError,
        lambda: evaluate({"size": size}),
        {"write e.g. `learner.evaluate(data, metrics=[fluxcb.callbacks.accuracy])`": fixed},
    )


@case
def DeclarationError_optimizer(folder: Path) -> Case:  # noqa: N802
    from flax import nnx

    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    made_by = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def build(optimizer: Any) -> Any:
        loss = lambda params, batch, key: jnp.mean(params["w"] * batch[0])  # noqa: E731
        return Learner.from_loss({"w": jnp.ones(())}, loss, optimizer, data=BATCHES)

    line = "pass the optax transformation, for example `optax.adam(1e-3)`, not the `nnx.Optimizer` around it"
    return Case(
        fluxcb.DeclarationError,
        lambda: build(made_by),
        {line: lambda source, other: build(evaluated(source, optax=optax))},
    )


@case
def TraceError(folder: Path) -> Case:  # noqa: N802
    access = {"step": {"loss": Read(), "skip": Append()}}

    def skip_if(learner):
        if learner.step.loss > 100:
            learner.step.skip = True

    def skip_where(learner):
        learner.step.skip = jnp.where(learner.step.loss > 100, True, False)

    def look(learner):
        if learner.step.loss > 100:
            pass

    def traced(act: Any) -> Any:
        return learner(made("Skips", access, BackwardEnd, act)()).fit(1)

    return Case(
        fluxcb.TraceError,
        lambda: traced(skip_if),
        {
            "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() or "
            "format values": (lambda where, statement: traced(skip_where)),
            "read the value in a host handler, at StepEnd": lambda: learner(
                made("Looks", {"step": {"loss": Read()}}, StepEnd, look)()
            ).fit(1),
        },
    )


@case
def DataError(folder: Path) -> Case:  # noqa: N802
    class Again:
        def __iter__(self):
            return iter(BATCHES)

    line = "pass something that can be iterated again: a list, a dataset, a class with `__iter__`"
    return Case(
        fluxcb.DataError,
        lambda: learner(data=(batch for batch in BATCHES)).fit(2),
        {
            line: lambda method: [learner(data=data).fit(2) for data in (BATCHES, Again())],
            "if it never ends, pass the length of an epoch: `fit(2, steps_per_epoch=100)`": lambda method: learner(
                data=itertools.cycle(BATCHES)
            ).fit(2, steps_per_epoch=100),
        },
    )


@case
def StateLostError(folder: Path) -> Case:  # noqa: N802
    def fails(outputs, ys):
        def weigh(x):
            raise RuntimeError("the disk is full")

        loss = jnp.mean((outputs - ys) ** 2)
        return loss * jax.pure_callback(weigh, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(loss))

    def broken() -> Any:
        learner(Checkpointer(folder)).fit(1)
        lost = learner(loss_fn=fails)
        with pytest.raises(jax.errors.JaxRuntimeError):
            lost.fit(1)
        return lost.params

    def fixed() -> None:
        new = learner(Checkpointer(folder))
        new.restore(folder)
        assert new.step == 4
        new.fit(1)

    return Case(fluxcb.StateLostError, broken, {"build a new Learner, and restore a checkpoint": fixed})


@case
def PeerError(folder: Path) -> Case:  # noqa: N802
    def marks(*batches: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            keep_processes(patch)
            ended = run_processes(lambda process: process.peers.mark(f"{batches[process.number]} batches"))
        for process in ended:
            if process.error is not None:
                raise process.error

    same = "pass the same number of batches, of the same shapes, to all processes"
    return Case(fluxcb.PeerError, lambda: marks(7, 40), {same: lambda: marks(7, 7)})


# --- checkpoints ------------------------------------------------------------------------------------------------------


@case
def CheckpointError(folder: Path) -> Case:  # noqa: N802
    run = folder / "run"

    def broken() -> Any:
        learner(Checkpointer(run)).fit(1)
        return learner(Checkpointer(run)).fit(1)

    def resumed(source: str) -> None:
        again = learner(Checkpointer(run))
        evaluated(source.replace("...", "2"), learner=again)
        assert again.step == 8

    def new_run() -> None:
        learner(Checkpointer(folder / "other")).fit(1)
        shutil.rmtree(run)
        learner(Checkpointer(run)).fit(1)

    return Case(
        fluxcb.CheckpointError,
        broken,
        {
            "continue that run: `learner.fit(..., resume=True)`": resumed,
            "start a new run: use another directory, or delete this one": new_run,
        },
    )


@case
def CheckpointCorruptError(folder: Path) -> Case:  # noqa: N802
    def broken() -> Any:
        learner(Checkpointer(folder)).fit(1)
        (folder / "4").rename(folder / "5")
        return load_params(folder / "5")

    def fixed() -> Any:
        (folder / "5").rename(folder / "4")
        return load_params(folder / "4")

    return Case(_errors.CheckpointCorruptError, broken, {"restore the original name of the folder": fixed})


@case
def ResumeError(folder: Path) -> Case:  # noqa: N802
    def broken() -> Any:
        learner(Checkpointer(folder)).fit(1)
        return learner(Recorder()).restore(folder)

    def as_it_was() -> None:
        learner(Checkpointer(folder)).restore(folder)

    def allowed(call: str) -> None:
        other = learner(Recorder())
        evaluated(call, learner=other)
        other.fit(1)

    def params(call: str) -> None:
        assert evaluated(call)["w"].shape == (1, 1)

    path = str(folder)
    return Case(
        _errors.ResumeError,
        broken,
        {
            "build the Learner as it was when the run began": as_it_was,
            f"if the differences are intended, call `learner.restore({path!r}, allow=('callbacks',))`": allowed,
            f"load only the parameters: `fluxcb.checkpoints.load_params({path!r})`": params,
        },
    )


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_error_class_has_case():
    """`FluxcbError` itself is raised only if a run was ended on purpose, which has no fix."""
    classes = {name for name in _errors.__all__ if isinstance(getattr(_errors, name), type)}
    assert {name.partition("_")[0] for name in CASES} == classes - {"FluxcbError"}


@pytest.mark.parametrize("name", CASES)
def test_each_suggested_fix_works(name, tmp_path):
    found = CASES[name](tmp_path)
    with pytest.raises(found.kind) as raised:
        found.broken()
    assert type(raised.value) is found.kind
    assert raised.value.fix == tuple(found.fixed)
    for line, fixed in found.fixed.items():
        fixed(*code(line))


def test_message_without_location_has_no_where_line():
    with pytest.raises(fluxcb.DeclarationError) as raised:
        Learner.from_loss({"w": "text"}, lambda params, batch, key: 0.0, optax.sgd(0.1), data=BATCHES)
    assert str(raised.value) == (
        "`params` has str 'text' at `params['w']`, which JAX cannot use as an array of numbers.\n"
        "  why:   the arguments of a compiled program are arrays of numbers\n"
        "  fix:   convert it to numbers, or remove it"
    )


def test_duplicate_metrics_are_one_problem():
    with pytest.raises(fluxcb.ConflictError) as raised:
        check(Metrics(accuracy), Metrics(accuracy))
    assert str(raised.value) == (
        "The callbacks list contains more than one `Metrics`.\n"
        "  where: Metrics(accuracy)\n"
        "         Metrics(accuracy)\n"
        "  why:   both would store their values in `cbstate.metrics_epoch` and `cbstate.metrics_step`\n"
        "  fix:   use one: `Metrics(accuracy)`"
    )
    check(evaluated(*code(raised.value.fix[0]), Metrics=Metrics, accuracy=accuracy))


def test_fixes_of_all_problems_resolve_combined_error(tmp_path):
    conflict, missing = (CASES[name](tmp_path) for name in ("ConflictError", "MissingStateError"))
    adds = made("Adds", {"cbstate": {"total": Write()}})
    show = made("HistoryPrinter", {"cbstate": {"history": Read()}})
    other = made("Halves", {"cbstate": {"total": Write()}})
    with pytest.raises(fluxcb.CheckError) as raised:
        check(adds(), other(), show())
    one, two = raised.value.problems
    assert (one.fix, two.fix) == (tuple(conflict.fixed), tuple(missing.fixed))
    (ordered,), (added,) = code(one.fix[0]), code(two.fix[0])
    check(evaluated(ordered, Adds=adds, Halves=other), show(), evaluated(added, Recorder=Recorder))
