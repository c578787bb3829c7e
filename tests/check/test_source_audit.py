"""The source audit compares the access in the source of handlers with their declarations."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fluxcb import Append, Callback, Read, Write, every, on, throttle, when
from fluxcb import callbacks as library
from fluxcb._check.source.visitor import Visitor
from fluxcb._check.source_audit import SourceAudit, audit_source
from fluxcb._declare.declared import declare
from fluxcb._errors import CheckError, DeclarationError, UndeclaredAccessError, UnknownStateError
from fluxcb.callbacks import CustomCallback, Metrics, Recorder
from fluxcb.events import BackwardBegin, EpochEnd, Event, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb.testing import EventLog

Access = Mapping[str, Any]
LOSS = {"step": {"loss": Read()}}


def audit(*callbacks: Any) -> SourceAudit:
    return audit_source(declare(callbacks)[0])


LINES = Path(__file__).read_text().splitlines()


def placed(text: str) -> str:
    """Replace each `<@mark>` with `file:line` of the line in this file that ends in the comment `# mark`."""

    def place(found: re.Match[str]) -> str:
        [line] = [number for number, line in enumerate(LINES, 1) if line.endswith(f"  # {found[1]}")]
        return f"{os.path.relpath(__file__)}:{line}"

    return re.sub(r"<@([\w-]+)>", place, text)


def problem_of(*callbacks: Any) -> CheckError:
    [problem] = audit(*callbacks).problems
    return problem


# --- the texts of problems --------------------------------------------------------------------------------------------


class Reads(Callback):
    def stateaccess(self) -> Access:  # reads-access
        return LOSS

    @on
    def show(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        print(
            learner.step.loss,
            learner.step.lsos,  # reads-line
        )
        self._more(learner)

    def _more(self, learner: Any) -> None:
        print(learner.step.lsos)  # reads-helper


def test_undeclared_read_is_reported() -> None:
    problem = problem_of(Reads())
    assert type(problem) is UndeclaredAccessError
    assert str(problem) == placed(
        "Reads() reads `step.lsos`, which its `stateaccess` does not declare. Did you mean `loss`?\n"
        "  where: Reads.show  <@reads-line>\n"
        "         Reads._more  <@reads-helper>\n"
        "         Reads.stateaccess  <@reads-access>\n"
        "  why:   each line raises AccessError\n"
        "  fix:   write `learner.step.loss`"
    )


class Writes(Callback):
    def stateaccess(self) -> Access:  # writes-access
        return {"step": {"loss": Read()}, "cbstate": {"log": Write()}}

    @on(BackwardBegin, access={"step": {"loss": Read()}})
    def scale(self, event: Event, phase: Phase, learner: Any) -> None:  # writes-def
        learner.step.loss *= 2  # writes-loss
        learner.cbstate.log = 1  # writes-log


def test_undeclared_write_is_reported() -> None:
    read_only, missing = audit(Writes()).problems
    assert str(read_only) == placed(
        "Writes() declares only Read() on `step.loss`, but writes it.\n"
        "  where: Writes.scale  <@writes-loss>\n"
        "         access of Writes.scale  " + _above("writes-def") + "\n"
        "  why:   it raises AccessError when that line runs\n"
        '  fix:   add `{"step": {"loss": Write()}}` to `Writes.stateaccess`, and to the `access` in the `@on` of '
        "`Writes.scale`"
    )
    assert str(missing) == placed(
        "Writes() writes `cbstate.log`, which the `access` of `Writes.scale` does not declare.\n"
        "  where: Writes.scale  <@writes-log>\n"
        "         access of Writes.scale  " + _above("writes-def") + "\n"
        "  why:   it raises AccessError when that line runs\n"
        '  fix:   add `{"cbstate": {"log": Write()}}` to the `access` in the `@on` of `Writes.scale`'
    )


def _above(mark: str) -> str:
    """Return `file:line` of the line above a mark, because functions begin with their decorators."""
    file, line = placed(f"<@{mark}>").rsplit(":", 1)
    return f"{file}:{int(line) - 1}"


class Odd(Callback):
    def __init__(self, body: Any) -> None:
        self.body = body

    def stateaccess(self) -> Access:  # odd-access
        return {"step": {"loss": Write()}}

    @on
    def handle(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        self.body(learner)


def assigning(learner: Any) -> None:
    learner.step = 1  # assigning


def engines(learner: Any) -> None:
    learner.progress.step += 1  # engines


def deleting(learner: Any) -> None:
    del learner.step.loss  # deleting


def dropping(learner: Any) -> None:
    del learner.cbstate["log"]  # dropping


def no_counter(learner: Any) -> None:
    print(learner.progress.stpe)  # no-counter


def no_part(learner: Any) -> None:
    learner.fit(1)  # no-part


def not_nested(learner: Any) -> None:
    print(learner.loss)  # not-nested


def controlling(learner: Any) -> None:
    learner.control.stop()  # controlling


def in_params(learner: Any) -> None:
    learner.params["w"] = 0  # in-params


def in_entry(learner: Any) -> None:
    learner.cbstate.log.steps = 0  # in-entry


def both(learner: Any) -> None:
    print(learner.params)
    learner.params["w"] = 0


ADD = "to `Odd.stateaccess`"


@pytest.mark.parametrize(
    ("body", "mark", "kind", "what", "fix"),
    [
        (
            assigning,
            "assigning",
            UndeclaredAccessError,
            "assigns `step` as a whole; only its parts can be assigned.",
            "\n  fix:   assign them one by one: `learner.step.<name> = ...`",
        ),
        (
            engines,
            "engines",
            UndeclaredAccessError,
            "writes `progress.step`, which only the engine may write.",
            "\n  fix:   keep your own counts in `learner.cbstate`",
        ),
        (
            deleting,
            "deleting",
            UndeclaredAccessError,
            "deletes `step.loss`; state of the Learner cannot be deleted.",
            "\n  fix:   assign a new value instead",
        ),
        (
            dropping,
            "dropping",
            UndeclaredAccessError,
            "deletes `cbstate.log`; state of the Learner cannot be deleted.",
            "\n  fix:   assign a new value instead",
        ),
        (
            no_counter,
            "no-counter",
            UnknownStateError,
            "reads `progress.stpe`, which is not a counter. Did you mean `step`?",
            "\n  fix:   it has step, epoch, step_in_epoch, epochs, steps_in_epoch, batch_size, in_turn, compiled",
        ),
        (no_part, "no-part", UnknownStateError, "reads `fit`, which is not a part of the Learner.", ""),
        (
            not_nested,
            "not-nested",
            UnknownStateError,
            "reads `loss`, which is not a part of the Learner.",
            "\n  fix:   write `learner.step.loss`",
        ),
        (
            controlling,
            "controlling",
            UnknownStateError,
            "reads `control`, which is a permission and has no value.",
            "\n  fix:   raise CancelStep, CancelEpoch or CancelFitting",
        ),
        (
            in_params,
            "in-params",
            UndeclaredAccessError,
            "writes `params.w`, which its `stateaccess` does not declare.",
            f'\n  fix:   add `{{"params": {{"w": Write()}}}}` {ADD}',
        ),
        (
            in_entry,
            "in-entry",
            UndeclaredAccessError,
            "writes `cbstate.log`, which its `stateaccess` does not declare.",
            f'\n  fix:   add `{{"cbstate": {{"log": Write()}}}}` {ADD}',
        ),
    ],
)
def test_access_that_cannot_be_declared_is_reported(
    body: Any, mark: str, kind: type[CheckError], what: str, fix: str
) -> None:
    problem = problem_of(Odd(body))
    assert type(problem) is kind
    assert str(problem) == placed(
        f"Odd() {what}\n"
        f"  where: {body.__name__}  <@{mark}>\n"
        "         Odd.stateaccess  <@odd-access>\n"
        "  why:   it raises AccessError when that line runs"
        f"{fix}"
    )


def test_read_and_write_of_same_path_is_reported_once() -> None:
    problem = problem_of(Odd(both))
    assert problem.what == "Odd() writes `params.w`, which its `stateaccess` does not declare."


def test_problem_of_several_instances_is_reported_once() -> None:
    assert len(audit(Reads(), Reads(), every(Reads(), steps=2)).problems) == 1
    assert len(audit(Odd(in_params), Odd(in_entry), Odd(in_params)).problems) == 2


# --- which access counts ----------------------------------------------------------------------------------------------


class Shared(Callback):
    """Two handlers with a common helper, which only one of them may use."""

    def stateaccess(self) -> Access:
        return LOSS

    @on(StepEnd)
    def end(self, event: Event, phase: Phase, learner: Any) -> None:
        self._show(learner)

    @on(EpochEnd, access={})
    def epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        self._show(learner)

    def _show(self, learner: Any) -> None:
        print(learner.step.loss)  # shared


def test_helper_is_checked_against_calling_handler() -> None:
    problem = problem_of(Shared())
    assert problem.what == "Shared() reads `step.loss`, which the `access` of `Shared.epoch` does not declare."
    assert problem.where[0] == placed("Shared._show  <@shared>")
    assert problem.fix == ('add `{"step": {"loss": Read()}}` to the `access` in the `@on` of `Shared.epoch`',)


def test_predicate_is_checked_against_guarded_handler() -> None:
    assert audit(when(Reading(), lambda learner: learner.step.loss > 1)).problems == []
    problem = problem_of(when(Reading(), lambda learner: learner.step.aux))
    assert "reads `step.aux`, which its `stateaccess` does not declare." in problem.what


class Reading(Callback):
    def stateaccess(self) -> Access:
        return LOSS

    @on
    def show(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        print(learner.step.loss)


class Inheriting(Reading):
    def stateaccess(self) -> Access:
        return {}

    def init(self, learner: Any) -> None:
        learner.cbstate.shown = 0


def test_inherited_handlers_are_checked_against_own_access() -> None:
    assert [p.what for p in audit(Inheriting()).problems] == [
        "Inheriting() writes `cbstate.shown`, which its `stateaccess` does not declare.",
        "Inheriting() reads `step.loss`, which its `stateaccess` does not declare.",
    ]


@pytest.mark.parametrize(
    "wrap",
    [lambda c: every(c, steps=2), lambda c: throttle(c, StepEnd, freq=2), lambda c: every(every(c, steps=2), epochs=3)],
)
def test_wrapped_callback_is_checked_like_unwrapped(wrap: Any) -> None:
    assert audit(wrap(Reading())) == SourceAudit()
    problem = problem_of(wrap(Reads()))
    assert problem.where == problem_of(Reads()).where


def test_registered_handlers_are_checked() -> None:
    class Open(Callback):
        def stateaccess(self) -> Access:
            return LOSS

    @Open.on.register(StepEnd)
    def added(self: Any, event: Event, phase: Phase, learner: Any) -> None:
        print(learner.step.loss, learner.step.aux)

    assert problem_of(Open()).what == "Open() reads `step.aux`, which its `stateaccess` does not declare."


def test_function_of_custom_callback_is_checked() -> None:
    def show(learner: Any) -> None:
        print(learner.step.loss)  # custom

    assert audit(CustomCallback(show, StepEnd, access=LOSS)) == SourceAudit()
    problem = problem_of(CustomCallback(show, StepEnd))
    assert problem.where[0] == placed("show  <@custom>")
    assert (
        problem.what == "CustomCallback(show, StepEnd) reads `step.loss`, which its argument `access` does not declare."
    )
    assert problem.fix == ('write `CustomCallback(show, StepEnd, access={"step": {"loss": Read()}})`',)
    given: Any = sum
    [unclear] = audit(CustomCallback(given, StepEnd)).unclear
    assert unclear.startswith("CustomCallback(sum, StepEnd): passes `learner` to `self.fn(...)`  CustomCallback.run  ")


class Sometimes(Callback):
    """Declarations and behavior depend on an argument of the constructor."""

    def __init__(self, name: str | None = None, verbose: bool = False) -> None:
        self.name = name
        self.verbose = verbose

    def stateaccess(self) -> Access:
        step = {} if self.name is None else {"step": {self.name: Read()}}
        return {**step, **({"params": Read()} if self.verbose else {})}

    @on
    def show(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        if self.name is not None:
            print(getattr(learner.step, self.name))
        if self.verbose:
            print(learner.params)


def test_unreachable_lines_are_ignored() -> None:
    callbacks = Sometimes(), Sometimes("loss"), Sometimes("aux", verbose=True)
    assert audit(*callbacks) == SourceAudit()


@pytest.mark.parametrize(
    ("access", "body", "problems"),
    [
        ({"cbstate": Append()}, lambda learner: setattr(learner.cbstate, "x", learner.cbstate.y), 0),
        ({"cbstate": Read()}, lambda learner: setattr(learner.cbstate, "x", 1), 1),
        ({"*": Read()}, lambda learner: print(learner.step.loss, learner.params, learner.cbstate.x.y), 0),
        ({"*": Read()}, lambda learner: setattr(learner, "params", 1), 1),
        ({"*": Read(), "params": Write()}, lambda learner: setattr(learner, "params", 1), 0),
        ({"*": Read()}, lambda learner: print(learner.nothing), 1),
        ({}, lambda learner: print(learner.progress.step, learner.key, learner.step, learner.cbstate), 0),
        ({}, lambda learner: setattr(learner, "key", 1), 1),
        ({}, lambda learner: print("x" in learner.step, list(learner.cbstate)), 0),
        ({"params": {"w": Write()}}, lambda learner: learner.params.__setitem__("w", 1), 0),
        ({"params": {"w": Read()}}, lambda learner: print(learner.params["w"].sum(), learner.params), 0),
        ({"params": {"w": Read()}}, lambda learner: learner.params.items(), 0),
        ({"params": {"w": Read()}}, lambda learner: setattr(learner, "params", 1), 1),
        ({"hyperparams": {"lr": Write()}}, lambda learner: learner.opt_state, 1),
    ],
)  # fmt: skip
def test_access_is_granted_by_declaration(access: Any, body: Any, problems: int) -> None:
    assert len(audit(CustomCallback(body, StepEnd, access=access)).problems) == problems


# --- what cannot be followed ------------------------------------------------------------------------------------------


class Unclear(Callback):
    def stateaccess(self) -> Access:
        return {"step": {"loss": Read()}, "cbstate": {"log": Read()}, "data": Write(), "params": {"w": Read()}}

    @on
    def handle(self, event: StepEnd, phase, learner: Any) -> None:
        phase.show(learner)  # whole
        phase.show(learner.step)  # view
        phase.show(learner.step.loss, learner.data, learner.key)  # values and what is granted whole: no doubt
        getattr(learner.step, phase.name)  # any
        learner.cbstate.log.append(1)  # append
        learner.cbstate.log.steps = 1  # into
        part = learner.step if phase else learner.cbstate
        print(part.log)  # perhaps
        print(learner._parts)  # private
        del learner.cbstate[phase.name]  # item
        print(learner.params)
        learner.data[phase.name] = 1


def test_unclear_uses_are_reported_as_unclear() -> None:
    found = audit(Unclear())
    assert found.problems == []
    assert found.unused == []  # of what is not followed, nothing can be known
    into = "for which it declares only Read()"
    assert found.unclear == [
        placed(f"Unclear(): {text}".replace("  ", "  Unclear.handle  "))
        for text in (
            "passes `learner` to `phase.show(...)`  <@whole>",
            "passes `learner.step` to `phase.show(...)`  <@view>",
            "reads a part of `learner.step` whose name is not known  <@any>",
            f"calls `append` of `learner.cbstate.log`, {into}  <@append>",
            f"changes something in `learner.cbstate.log`, {into}  <@into>",
            "may read `step.log`, which is not declared  <@perhaps>",
            "uses `learner._parts`, which is not part of the state  <@private>",
            "drops a part of `learner.cbstate` whose name is not known  <@item>",
        )
    ]


# --- unused access ----------------------------------------------------------------------------------------------------


class Unused(Callback):
    def stateaccess(self) -> Access:  # unused-access
        return {"step": {"loss": Read(), "aux": Read(), "skip": Read()}, "params": Read(), "control": Append()}

    @on(StepEnd, access={"step": {"loss": Read(), "skip": Read()}})
    def show(self, event: Event, phase: Phase, learner: Any) -> None:  # unused-def
        print(learner.step.loss)

    @on(StepBegin)
    def begin(self, event: Event, phase: Phase, learner: Any) -> None:
        print("skip" in learner.step)


WHY = "  why:   declared access determines order, conflicts and device-to-host transfers, even if it is unused\n"


class Marked(Callback):
    def stateaccess(self) -> Access:
        return {"step": {"loss": Read()}}

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        print(learner.step.loss)


def test_a_marked_method_that_another_replaces_is_not_called_unmarked() -> None:
    with pytest.warns(UserWarning, match="runs `Replaces.other` instead of `Marked.show`"):

        class Replaces(Marked):
            @on
            def other(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert [text.partition("\n")[0] for text in audit(Replaces()).unused] == [
        "Replaces() declares Read() on `step.loss`, but nothing in its source uses it."
    ]


class Unmarked(Callback):
    def stateaccess(self) -> Access:  # unmarked-access
        return {"step": {"loss": Read()}, "params": Read()}

    def show(self, event, phase, learner):  # unmarked-def
        print(learner.step.loss)


def test_access_used_only_by_unmarked_method_is_reported() -> None:
    assert audit(Unmarked()).unused == [
        placed(
            "Unmarked() declares Read() on `step.loss`, and only `Unmarked.show` uses it, which is not marked with "
            "`@on`.\n"
            "  where: Unmarked.show  <@unmarked-def>\n"
            "         Unmarked.stateaccess  <@unmarked-access>\n"
            "  why:   the engine calls only methods that are marked, so this method never runs\n"
            "  fix:   put `@on` above `def show`\n"
            "     or: remove it from `Unmarked.stateaccess`"
        ),
        placed(
            "Unmarked() declares Read() on `params`, but nothing in its source uses it.\n"
            f"  where: Unmarked.stateaccess  <@unmarked-access>\n{WHY}"
            "  fix:   remove it from `Unmarked.stateaccess`"
        ),
    ]


def test_unused_access_is_reported() -> None:
    found = audit(Unused())
    assert (found.problems, found.unclear) == ([], [])
    assert found.unused == [
        placed(text)
        for text in (
            "Unused() declares Read() on `step.aux`, but nothing in its source uses it.\n"
            f"  where: Unused.stateaccess  <@unused-access>\n{WHY}"
            "  fix:   remove it from `Unused.stateaccess`",
            "Unused() declares Read() on `params`, but nothing in its source uses it.\n"
            f"  where: Unused.stateaccess  <@unused-access>\n{WHY}"
            "  fix:   remove it from `Unused.stateaccess`",
            "The handler `Unused.show` declares Read() on `step.skip` in its own access, but does not use it.\n"
            f"  where: Unused.show  {_above('unused-def')}\n{WHY}"
            "  fix:   remove it from the `access` in its `@on`",
        )
    ]


@pytest.mark.parametrize(
    ("access", "body"),
    [
        ({"step": Read()}, lambda learner: learner.step.loss),
        ({"cbstate": {"log": {"steps": Read()}}}, lambda learner: learner.cbstate.log.steps.mean()),
        ({"opt_state": Read()}, lambda learner: learner.opt_state),
        ({"step": {"skip": Read()}}, lambda learner: "skip" in learner.step),
        ({"step": {"skip": Read()}}, lambda learner: list(learner.step)),
        ({"step": {"skip": Read()}}, lambda learner: None if learner else learner.step.skip),
        ({"*": Read()}, lambda learner: learner.params),
        ({"control": Append()}, lambda learner: None),
    ],
)
def test_uses_of_declared_access(access: Any, body: Any) -> None:
    assert audit(CustomCallback(body, StepEnd, access=access)).unused == []


def test_passing_through_parent_path_is_not_use() -> None:
    def body(learner: Any) -> None:
        print(learner.params["w"], learner.cbstate)

    access = {"params": {"w": Read(), "b": Read()}, "cbstate": {"log": Read()}}
    found = audit(CustomCallback(body, StepEnd, access=access, name="it")).unused
    assert [text.split(", but")[0] for text in found] == [
        "CustomCallback(it, StepEnd) declares Read() on `params.b`",
        "CustomCallback(it, StepEnd) declares Read() on `cbstate.log`",
    ]


def test_user_wrapper_is_checked_against_its_own_access() -> None:
    class Wrapper(Callback):
        def __init__(self, callback: Callback) -> None:
            self.callback = callback

        def stateaccess(self) -> Access:
            return {**self.callback.stateaccess(), "params": Read()}

        def init(self, learner: Any) -> None:
            self.callback.init(learner)

    assert audit(Wrapper(Recorder())).unused == []


# --- callbacks that exist ---------------------------------------------------------------------------------------------


MADE = {
    "ClipGradients": lambda: [library.ClipGradients(1.0)],
    "CustomCallback": lambda: [CustomCallback(lambda learner: None, StepEnd)],
    "MetricsPrinter": lambda: [library.MetricsPrinter()],
    "ModelSummary": lambda: [library.ModelSummary()],
    "ParameterEMA": lambda: [library.ParameterEMA(), library.ParameterEMA(debias=True)],
    "ProgressBar": lambda: [library.ProgressBar()],
    "Recorder": lambda: [Recorder()],
    "StopOnNaNLoss": lambda: [library.StopOnNaNLoss()],
    "ToDevice": lambda: [library.ToDevice(None)],
    "EventLog": lambda: [EventLog()],
}


@pytest.mark.parametrize("name", MADE)
def test_built_in_callbacks_are_fully_analyzed(name: str) -> None:
    assert audit(*MADE[name]()) == SourceAudit()


def public() -> list[Callback]:
    """Return the public callbacks that can be created without arguments."""
    made = []
    for cls in (getattr(library, name) for name in library.__all__):
        if inspect.isclass(cls) and issubclass(cls, Callback):
            with contextlib.suppress(TypeError, DeclarationError):
                made.append(cls())
    return made


@pytest.mark.parametrize("callback", public(), ids=lambda callback: type(callback).__name__)
def test_public_callbacks_have_no_undeclared_access(callback: Callback) -> None:
    assert audit(callback).problems == []


def test_callbacks_without_handlers_or_with_any_phase_are_checked() -> None:
    class Nothing(Callback):
        pass

    class Anywhere(Callback):
        @on
        def handle(self, event: StepEnd | EpochEnd, phase: AbstractTrainingPhase, learner: Any) -> None:
            print(learner.params)  # anywhere

    assert audit(Nothing()) == SourceAudit()
    assert problem_of(Anywhere()).where[:1] == (placed("Anywhere.handle  <@anywhere>"),)


def test_analysis_is_cached_for_many_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    original = Visitor.read
    monkeypatch.setattr(Visitor, "read", lambda self, *args: read.append(args) or original(self, *args))
    classes = [Reading, Recorder, Metrics, library.ParameterEMA, library.ProgressBar]
    audit(*(cls() for cls in classes))
    few = len(read)
    assert few >= len(classes)
    audit(*(cls() for cls in classes for _ in range(200)))
    assert len(read) == 2 * few


def test_analysis_imports_and_runs_nothing(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"  # a file, so that the class has a source
    script.write_text(
        textwrap.dedent("""
        import sys
        from fluxcb import Callback, on
        from fluxcb._check.source_audit import audit_source
        from fluxcb._declare.declared import declare
        from fluxcb.events import StepEnd

        class Loud(Callback):
            key = "x"

            def __init_subclass__(cls):
                print("ran")

            def __getattribute__(self, name):
                print("ran") if name == "key" else None
                return super().__getattribute__(name)

            @on
            def handle(self, event: StepEnd, phase, learner):
                import jax.numpy as jnp
                import no_such_module
                from fluxcb.models import EquinoxModel
                print(jnp.mean(learner.step[self.key]), no_such_module.f(1), EquinoxModel)

        audit = audit_source(declare([Loud()])[0])
        print(audit.problems[0].what, audit.unclear, sorted({"jax", "numpy", "networkx", "rich"} & set(sys.modules)))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout == "Loud() reads `step.x`, which its `stateaccess` does not declare. [] []\n"


# --- methods of a mapping ---------------------------------------------------------------------------------------------


class Iterates(Callback):
    def stateaccess(self) -> Access:
        return {**LOSS, "cbstate": {"log": {"a": Write()}}}

    @on
    def show(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        for name, value in learner.step.items():
            print(name, value, learner.step.keys(), list(learner.cbstate.log.values()), learner.hyperparams.get)
        print(learner.step.get("loss"), learner.step.get("loss", 0.0), learner.cbstate.log.get("a"))


class Gets(Callback):
    def stateaccess(self) -> Access:
        return LOSS

    @on
    def show(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        print(learner.step.get("aux"), learner.step.get("loss").items)


def test_methods_of_a_mapping_use_no_undeclared_state() -> None:
    found = audit(Iterates())
    assert (found.problems, found.unclear, found.unused) == ([], [], [])


def test_get_reads_the_name_that_it_is_called_with() -> None:
    assert problem_of(Gets()).what == "Gets() reads `step.aux`, which its `stateaccess` does not declare."


# --- names of monitors ------------------------------------------------------------------------------------------------


class LogsNames(Callback):
    """Log values under declared names, in all ways that refer to them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def stateaccess(self) -> Access:
        logged = {name: Append() for name in (*self.names, "read")}
        return {"step": {"loss": Read()}, "cbstate": {"monitors": logged}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.cbstate.monitors.put_scalar("direct", learner.step.loss)
        hub = learner.cbstate.monitors
        hub.put_histogram("alias", learner.step.loss)
        for name in ("first", "second"):
            hub.put_scalar(name, learner.step.loss)
        hub["item"].put_scalar(learner.step.loss)
        hub.latest("read")


def test_declared_names_of_monitors_are_accepted() -> None:
    found = audit(LogsNames("direct", "alias", "first", "second", "item"))
    assert (found.problems, found.unused) == ([], [])


@pytest.mark.parametrize("missing", ["direct", "alias", "item"])
def test_undeclared_name_of_a_monitor_is_a_problem(missing: str) -> None:
    names = [name for name in ("direct", "alias", "first", "second", "item") if name != missing]
    problem = problem_of(LogsNames(*names))
    assert problem.what.startswith(f"LogsNames() reads `cbstate.monitors.{missing}`, which its `stateaccess` does not")


def test_undeclared_name_in_a_loop_is_reported_as_possible() -> None:
    [possible] = audit(LogsNames("direct", "alias", "first", "item")).unclear
    assert "cbstate.monitors.second" in possible


def test_unused_name_of_a_monitor_is_reported() -> None:
    [unused] = audit(LogsNames("direct", "alias", "first", "second", "item", "other")).unused
    assert "cbstate.monitors.other" in str(unused)
