"""A method that looks like a handler but lacks `@on` raises an error; helpers and overrides are accepted."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from fluxcb import Callback, DeclarationError, Read, Write, every, on
from fluxcb.callbacks import ProxyCallback
from fluxcb.events import EpochEnd, Event, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb.testing import testlearner

WHY = "  why:   the engine calls only methods that are marked, so this method would never run\n"


def told(name: str, events: str, mark: str, parameter: str = "event") -> str:
    method = name.split(".")[1]
    return (
        f"`{name}` looks like a handler of {events}, but it is not marked with `@on`.\n"
        f"  where: {name}  <@{mark}>\n{WHY}"
        f"  fix:   put `@on` above `def {method}`\n"
        f"     or: annotate the parameter as `{parameter}: Event` if other code calls this method"
    )


def test_annotated_method_without_on_raises(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.show", "StepEnd", "plain")):

        class Printer(Callback):
            def show(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...  # plain


def test_union_of_events_with_local_class_raises(refused: Any) -> None:
    class Mine(HostEvent):
        pass

    with refused(DeclarationError, told("Printer.show", "Mine | StepEnd", "union", "moment")):

        class Printer(Callback):
            def show(self, moment: Mine | StepEnd, phase: Any, learner: Any) -> None: ...  # union


def test_quoted_annotation_raises(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.show", "StepEnd", "quoted")):

        class Printer(Callback):
            def show(self, event: "StepEnd", phase, learner): ...  # noqa: UP037  # quoted


def test_annotated_method_without_learner_raises(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.show", "StepEnd", "short")):

        class Printer(Callback):
            def show(self, event: StepEnd, phase: TrainingPhase) -> None: ...  # short


def test_builtin_with_same_name_is_not_call_of_method(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.print", "StepEnd", "builtin")):

        class Printer(Callback):
            @on
            def other(self, event: EpochEnd, phase: Phase, learner: Any) -> None:
                print(learner.other.print)

            def print(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...  # builtin


def test_first_fix_works() -> None:
    class Printer(Callback):
        @on
        def show(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert [entry.title() for entry in Printer().handlers()] == ["(StepEnd, TrainingPhase)"]


def test_second_fix_works() -> None:
    class Printer(Callback):
        def show(self, event: Event, phase: TrainingPhase, learner: Any) -> None: ...

    assert Printer().handlers() == []


def test_helpers_called_by_method_are_accepted() -> None:
    class Base(Callback):
        @on
        def begin(self, event: StepBegin, phase: Phase, learner: Any) -> None:
            self.direct(event, phase, learner)

        def direct(self, event: StepBegin, phase: Phase, learner: Any) -> None:
            for call in [lambda: self.nested(event, phase, learner), self.inherited]:
                call()

        def nested(self, event: StepBegin, phase: Phase, learner: Any) -> None: ...

    class Sub(Base):
        def inherited(self, event: StepBegin, phase: Phase, learner: Any) -> None: ...

    assert [entry.name for entry in Sub().handlers()] == ["begin"]


def test_overrides_need_no_annotation_of_the_event(refused) -> None:
    class Base(Callback):
        @on(StepEnd, TrainingPhase)
        def named(self, event, phase, learner): ...

        @on
        def annotated(self, event: EpochEnd, phase, learner): ...

    class Plain(Base):
        def named(self, event, phase, learner): ...

        def annotated(self, event, phase, learner): ...

    class Marked(Base):
        @on(EpochEnd)
        def annotated(self, event, phase, learner): ...

    for cls in (Base, Plain, Marked):
        assert {handler.name: handler.title() for handler in cls().handlers()} == {
            "named": "(StepEnd, TrainingPhase)",
            "annotated": "(EpochEnd, Phase)",
        }
    # Without the error, the bare `@on` would replace EpochEnd with all host events.
    with pytest.raises(DeclarationError, match=r"Bare\.annotated` does not name its event\."):

        class Bare(Base):
            @on
            def annotated(self, event, phase, learner): ...


def test_undecorated_override_is_handler() -> None:
    class Base(Callback):
        @on
        def show(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    class Sub(Base):
        def show(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert Sub.on.lookup(StepEnd, TrainingPhase) is Base.on.lookup(StepEnd, TrainingPhase)


def test_class_with_handlers_method_is_accepted() -> None:
    class Chooses(ProxyCallback):
        def handlers(self) -> list[Any]:
            return []

        def begin(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert Chooses.on.entries == {}


@pytest.mark.parametrize("annotation", ["Event", "Any", "type[StepEnd]", "'NoSuchName'", "StepEnd | None", "str"])
def test_annotations_without_event_are_accepted(annotation: str) -> None:
    namespace: dict[str, Any] = dict(globals())
    exec(  # the annotation is the parameter of this test
        "from __future__ import annotations\n"
        "class Helps(Callback):\n"
        f"    def show(self, event: {annotation}, phase: AbstractTrainingPhase, learner): ...\n",
        namespace,
    )
    assert namespace["Helps"]().handlers() == []


def test_methods_with_other_signatures_are_accepted() -> None:
    class Helps(Callback):
        def note(self, event: StepEnd, learner: Any) -> None: ...

        def add(self, event: StepEnd, name: Any, learner: Any, value: float) -> None: ...

        def of(self, phase: AbstractTrainingPhase, learner: Any) -> None: ...

        @staticmethod
        def plain(event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert Helps().handlers() == []


# -- without annotations -------------------------------------------------------------------------


class Shows(Callback):
    def show(self, event, phase, learner):
        self.shown = True


def test_unannotated_method_warns_once_when_learner_is_built():
    with pytest.warns(UserWarning, match="parameters of a handler") as caught:
        testlearner(Shows(), Shows())
    assert [(str(warning.message), warning.filename) for warning in caught] == [
        (
            "`Shows.show` has the parameters of a handler, but it is not marked with `@on`, so fluxcb does not call "
            "it. Write e.g. `@on(StepEnd, TrainingPhase)` above `def show`. If other code calls it, annotate the "
            "parameter: `event: Event`.",
            __file__,
        )
    ]


def test_fixes_of_warning_work():
    class Marked(Callback):
        @on(StepEnd, TrainingPhase)
        def show(self, event, phase, learner): ...

    class Annotated(Callback):
        def show(self, event: Event, phase, learner): ...

        @on
        def act(self, event: StepEnd, phase, learner): ...

    testlearner(Marked(), Annotated())


def test_unannotated_helpers_may_be_called_by_subclasses():
    class Base(Callback):
        def helper(self, event, phase, learner): ...

    class Calls(Base):
        @on
        def act(self, event: StepEnd, phase, learner):
            self.helper(event, phase, learner)

    class Overrides(Shows):
        @on(StepEnd, TrainingPhase)
        def show(self, event, phase, learner): ...

    testlearner(Calls(), Overrides())


# -- no handlers at all --------------------------------------------------------------------------


def test_callback_without_handlers_warns():
    class Idle(Callback):
        def stateaccess(self):
            return {"params": Read()}

    with pytest.warns(UserWarning, match="no handlers") as caught:
        testlearner(every(Idle(), steps=2))
    assert [(str(warning.message), warning.filename) for warning in caught] == [
        (
            "Idle() at EverySteps(steps=2) has no handlers, so it does nothing. Mark a method with `@on`, e.g. "
            "`@on(StepEnd, TrainingPhase)` above `def act(self, event, phase, learner):`.",
            __file__,
        )
    ]


def test_callback_without_handlers_but_with_other_effect_is_accepted():
    class Creates(Callback):
        def stateaccess(self):
            return {"cbstate": {"mine": Write()}}

        def init(self, learner):
            learner.cbstate.mine = 0

    assert testlearner(Creates()).cbstate.mine == 0


# -- names of other libraries --------------------------------------------------------------------

HOOKS = {
    "on_train_begin": ("FitBegin", "AbstractTrainingPhase"),
    "on_fit_start": ("FitBegin", "AbstractTrainingPhase"),
    "on_train_end": ("FitEnd", "AbstractTrainingPhase"),
    "on_epoch_begin": ("EpochBegin", "AbstractTrainingPhase"),
    "on_epoch_end": ("Trigger", "AbstractTrainingPhase"),
    "on_train_epoch_end": ("Trigger", "AbstractTrainingPhase"),
    "on_train_batch_start": ("StepBegin", "AbstractTrainingPhase"),
    "on_train_batch_end": ("StepEnd", "AbstractTrainingPhase"),
    "on_test_begin": ("EpochBegin", "AbstractValidationPhase"),
    "on_validation_epoch_end": ("EpochEnd", "AbstractValidationPhase"),
    "on_validation_batch_end": ("StepEnd", "AbstractValidationPhase"),
    "on_after_backward": ("BackwardEnd", "AbstractTrainingPhase"),
    "on_before_zero_grad": ("UpdateEnd", "AbstractTrainingPhase"),
}


def hook(self, epoch, logs=None): ...  # hook


@pytest.mark.parametrize("name", HOOKS)
def test_hook_of_another_library_raises(name: str, refused: Any) -> None:
    event, phase = HOOKS[name]
    with refused(
        DeclarationError,
        f"`Printer.{name}` has the name of a hook of other libraries, but fluxcb does not call it.\n"
        f"  where: Printer.{name}  <@hook>\n"
        "  why:   the engine calls the methods that are marked with `@on`, regardless of their names\n"
        f"  fix:   write `@on({event}, {phase})` above `def {name}(self, event, phase, learner):`, after "
        f"`from fluxcb import on`, `from fluxcb.events import {event}` and `from fluxcb.phases import {phase}`\n"
        "     or: rename it if other code of yours calls it",
    ):
        type("Printer", (Callback,), {name: hook})
    names: dict[str, Any] = {"Callback": Callback}
    exec(
        f"from fluxcb import on\nfrom fluxcb.events import {event}\nfrom fluxcb.phases import {phase}\n"
        f"class Fixed(Callback):\n    @on({event}, {phase})\n    def {name}(self, event, phase, learner): ...\n",
        names,
    )
    (entry,) = names["Fixed"]().handlers()
    assert entry.title() == f"({event}, {phase})"


def test_state_dict_hooks_are_accepted(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Printer.on_save_checkpoint` has the name of a hook of other libraries, but fluxcb does not call it.\n"
        "  where: Printer.on_save_checkpoint  <@hook>\n"
        "  why:   the engine calls the methods that are marked with `@on`, regardless of their names\n"
        "  fix:   write `def state_dict(self):` instead\n"
        "     or: rename it if other code of yours calls it",
    ):
        type("Printer", (Callback,), {"on_save_checkpoint": hook})


def test_hooks_that_are_called_are_accepted() -> None:
    class Foreign:
        def on_epoch_end(self, epoch): ...

    class Bridge(Callback, Foreign):
        def on_epoch_end(self, epoch): ...

        def on_train_begin(self): ...

        @on
        def begin(self, event: EpochEnd, phase: Phase, learner: Any) -> None:
            self.on_train_begin()

    assert [entry.name for entry in Bridge().handlers()] == ["begin"]


# -- marks that another decorator hides ------------------------------------------------------------


def timed(function: Any) -> Any:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def timed_with_wraps(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@pytest.mark.parametrize(
    ("decorator", "fix"),
    [
        (timed, "put `@functools.wraps(function)` above the function that this decorator returns"),
        (staticmethod, "remove `@staticmethod`, and write `def step(self, event, phase, learner):`"),
        (classmethod, "remove `@classmethod`, and write `def step(self, event, phase, learner):`"),
        (property, "remove `@property`, and write `def step(self, event, phase, learner):`"),
    ],
)
def test_a_decorator_above_on_that_hides_the_mark_is_an_error(decorator: Any, fix: str, refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Hidden.step` is marked with `@on`, but the decorator above `@on` hides the mark.\n"
        f"  where: Hidden.step  <@hidden>\n{WHY}  fix:   {fix}",
    ):

        class Hidden(Callback):
            @decorator  # hidden
            @on
            def step(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

            @on
            def epoch(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None: ...


def test_a_decorator_above_on_that_keeps_the_mark_is_no_error() -> None:
    ran = []

    class Shown(Callback):
        @timed_with_wraps
        @on
        def step(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
            ran.append("step")

    testlearner(Shown()).fit(steps=1)
    assert ran == ["step"]


def test_hook_of_another_library_has_one_fix() -> None:
    with pytest.raises(DeclarationError, match="looks like a handler of StepEnd") as raised:

        class Keras(Callback):
            def on_train_batch_end(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert list(raised.value.fix) == ["put `@on` above `def on_train_batch_end`"]

    class Mended(Callback):
        @on
        def on_train_batch_end(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert [handler.event for handler in Mended().handlers()] == [StepEnd]
