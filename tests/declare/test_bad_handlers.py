"""Handlers and methods that cannot be meant are refused when the class is defined, with the line and the cure."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import Callback, EverySeconds, on
from fluxcb._errors import DeclarationError
from fluxcb.events import BackwardEnd, Event, StepBegin, StepEnd
from fluxcb.phases import LossTrainingPhase, Phase, TrainingPhase

SIGNATURE = "  fix:   write `def run(self, event: StepEnd, phase: Phase, learner):`"


def test_a_signature_with_too_little(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_a_signature_with_too_little.<locals>.Bad.run(self, event, phase)` "
        "must take (self, event, phase, learner).\n"
        f"  where: test_a_signature_with_too_little.<locals>.Bad.run  <@short>\n{SIGNATURE}",
    ):

        class Bad(Callback):
            @on  # short
            def run(self, event: StepEnd, phase: Phase) -> None: ...


def test_a_signature_with_a_keyword_more(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_a_signature_with_a_keyword_more.<locals>.Bad.run(self, event, phase, learner, *, loud)` "
        "must take (self, event, phase, learner).\n"
        f"  where: test_a_signature_with_a_keyword_more.<locals>.Bad.run  <@keyword>\n{SIGNATURE}",
    ):

        class Bad(Callback):
            @on(StepEnd)  # keyword
            def run(self, event: StepEnd, phase: Phase, learner: Any, *, loud: bool) -> None: ...


def test_a_signature_that_takes_anything(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_a_signature_that_takes_anything.<locals>.Bad.run(self, *args)` "
        "must take (self, event, phase, learner).\n"
        f"  where: test_a_signature_that_takes_anything.<locals>.Bad.run  <@anything>\n{SIGNATURE}",
    ):

        class Bad(Callback):
            @on  # anything
            def run(self, *args: Any) -> None: ...


class Good(Callback):
    @on  # good
    def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...


def test_an_undecorated_override_with_another_signature(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_an_undecorated_override_with_another_signature.<locals>.Bad.run(self, learner)` "
        f"must take (self, event, phase, learner).\n  where: Bad.run  <@override>\n{SIGNATURE}",
    ):

        class Bad(Good):
            def run(self, learner: Any) -> None: ...  # override


def test_an_override_by_a_base_that_does_not_know_of_the_handler(refused: Any) -> None:
    class Mixin:
        def run(self, learner: Any) -> None: ...  # mixin

    with refused(
        DeclarationError,
        "The handler `test_an_override_by_a_base_that_does_not_know_of_the_handler.<locals>.Mixin.run(self, learner)` "
        f"must take (self, event, phase, learner).\n  where: Bad.run  <@mixin>\n{SIGNATURE}",
    ):

        class Bad(Mixin, Good): ...


@pytest.mark.parametrize(
    ("event", "phase", "role", "said"),
    [
        (int, Phase, "event", "the class `int`"),
        (TrainingPhase, StepEnd, "event", "the class `TrainingPhase`"),
        (StepEnd(), Phase, "event", "StepEnd"),
        ("StepEnd", Phase, "event", "'StepEnd'"),
        (type[StepEnd], Phase, "event", "type[fluxcb._declare.events.StepEnd]"),
        (None, Phase, "event", "None"),
        (StepEnd, LossTrainingPhase(), "phase", "LossTrainingPhase()"),
        (StepEnd | int, Phase, "event", "the class `int`"),
        (StepEnd, StepEnd, "phase", "the class `StepEnd`"),
    ],
)
def test_events_and_phases_that_are_none(event: Any, phase: Any, role: str, said: str, refused: Any) -> None:
    base = role.capitalize()
    with refused(
        DeclarationError,
        f"A handler's {role} must be a subclass of `{base}`, not {said}.\n"
        "  where: test_events_and_phases_that_are_none.<locals>.run  <@explicit>\n"
        f"  fix:   name one of `fluxcb.{role}s`, or a class derived from `fluxcb.{role}s.{base}`",
    ):

        @on(event, phase)  # explicit
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...


def test_an_annotation_that_is_a_type_of_a_type(refused: Any) -> None:
    with refused(
        DeclarationError,
        "A handler's event must be a subclass of `Event`, not type[fluxcb._declare.events.StepEnd].\n"
        "  where: test_an_annotation_that_is_a_type_of_a_type.<locals>.Bad.run  <@type-of>\n"
        "  fix:   name one of `fluxcb.events`, or a class derived from `fluxcb.events.Event`",
    ):

        class Bad(Callback):
            @on  # type-of
            def run(self, event: type[StepEnd], phase: Phase, learner: Any) -> None: ...


def test_an_annotation_that_nobody_knows(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The annotation `event: StepFinished` of `test_an_annotation_that_nobody_knows.<locals>.Bad.run` "
        "cannot be resolved (name 'StepFinished' is not defined).\n"
        "  where: test_an_annotation_that_nobody_knows.<locals>.Bad.run  <@unknown>\n"
        "  fix:   import the class before the callback, or name it in the decorator: `@on(StepEnd, TrainingPhase)`",
    ):

        class Bad(Callback):
            @on  # unknown
            def run(self, event: StepFinished, phase: Phase, learner: Any) -> None: ...  # noqa: F821


def test_a_callers_name_does_not_shadow_the_modules() -> None:
    def define() -> type[Callback]:
        namespace: dict[str, Any] = {}
        exec(SOURCE, namespace)
        return namespace["define"]()

    StepEnd = "a local of a caller in another module"  # noqa: F841, N806
    assert [entry.title() for entry in define()().handlers()] == ["(StepEnd, Phase)"]


SOURCE = """
from __future__ import annotations
from fluxcb import Callback, EverySeconds, on
from fluxcb.events import StepEnd

def define():
    class Inner(Callback):
        @on
        def run(self, event: StepEnd, phase, learner): ...
    return Inner
"""


def test_host_and_traced_in_one_handler(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`test_host_and_traced_in_one_handler.<locals>.Bad.run` names host and traced events; "
        "a handler is of one kind.\n"
        "  where: test_host_and_traced_in_one_handler.<locals>.Bad.run  <@mixed>\n"
        "  why:   host handlers see values in Python, traced handlers become part of the compiled step\n"
        "  fix:   write two handlers, or name HostEvent or TracedEvent",
    ):

        class Bad(Callback):
            @on  # mixed
            def run(self, event: StepEnd | BackwardEnd, phase: Phase, learner: Any) -> None: ...


def test_an_event_of_no_kind(refused: Any) -> None:
    class Homeless(Event): ...

    with refused(
        DeclarationError,
        "`Homeless` is neither a host nor a traced event, so its handlers could run nowhere.\n"
        "  where: test_an_event_of_no_kind.<locals>.Bad.run  <@homeless>\n"
        "  fix:   derive `Homeless` from HostEvent or TracedEvent",
    ):

        class Bad(Callback):
            @on  # homeless
            def run(self, event: Homeless, phase: Phase, learner: Any) -> None: ...


def test_two_handlers_of_one_name(refused: Any) -> None:
    with refused(
        DeclarationError,
        "Two handlers marked with `@on` in one class body are called `run`.\n"
        "  where: test_two_handlers_of_one_name.<locals>.Bad.run  <@first>\n"
        "         test_two_handlers_of_one_name.<locals>.Bad.run  <@second>\n"
        "  why:   in a Python class body the second would silently replace the first\n"
        "  fix:   give each handler a name that says what it does",
    ):

        class Bad(Callback):
            @on  # first
            def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

            @on(StepBegin)  # second
            def run(self, event: Any, phase: Any, learner: Any) -> None: ...  # noqa: F811


def test_two_handlers_of_one_pair(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Bad` handles (StepEnd, Phase) twice: in `one` and in `other`.\n"
        "  where: Bad.one  <@one>\n"
        "         Bad.other  <@other>\n"
        "  why:   one handler runs per callback and moment\n"
        "  fix:   merge the two, or split the callback",
    ):

        class Bad(Callback):
            @on  # one
            def one(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

            @on(StepEnd | StepBegin)  # other
            def other(self, event: Any, phase: Any, learner: Any) -> None: ...


ON = "  fix:   mark methods with the decorator: `@on` above `def anything(self, event: StepEnd, phase, learner)`"


def test_a_method_called_on(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Bad` defines `on`, which is the table of its handlers.\n"
        f"  where: {__name__}.test_a_method_called_on.<locals>.Bad  <@called-on>\n{ON}",
    ):

        class Bad(Callback):
            def on(self, event: Any, phase: Any, learner: Any) -> None: ...  # called-on


def test_a_field_called_on(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Bad` defines `on`, which is the table of its handlers.\n"
        f"  where: {__name__}.test_a_field_called_on.<locals>.Bad\n{ON}",
    ):

        class Bad(Callback):
            on = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("spelt", "meant"),
    [
        ("run_after", "runafter"),
        ("runAfter", "runafter"),
        ("state_access", "stateaccess"),
        ("stateacess", "stateaccess"),
        ("resolve_conflict", "resolveconflict"),
        ("Init", "init"),
        ("statedict", "state_dict"),
        ("load_statedict", "load_state_dict"),
    ],
)
def test_a_misspelt_declaration(spelt: str, meant: str, refused: Any) -> None:
    def method(self: Any) -> tuple[()]:  # misspelt
        return ()

    with refused(
        DeclarationError,
        f"`Bad.{spelt}` looks like a misspelt `{meant}`, and would never be called.\n"
        f"  where: Bad.{spelt}  <@misspelt>\n"
        f"  fix:   rename it to `{meant}`, or to something less alike if you mean another method",
    ):
        type("Bad", (Callback,), {spelt: method})


@pytest.mark.parametrize("name", ["on_init", "access", "state", "run", "dict", "_run_after", "initialise"])
def test_other_names_are_left_alone(name: str) -> None:
    type("Fine", (Callback,), {name: lambda self: None})


def test_declarations_that_are_no_methods(refused: Any) -> None:
    where = f"  where: {__name__}.test_declarations_that_are_no_methods.<locals>.Bad\n"
    with refused(
        DeclarationError,
        "`Bad.stateaccess` must be a method, not dict {}.\n"
        f"{where}  fix:   write `def stateaccess(self): return {{}}`",
    ):

        class Bad(Callback):
            stateaccess = {}  # type: ignore[assignment]

    with refused(DeclarationError, f"`Bad.init` must be a method, not int 3.\n{where}  fix:   write a method"):

        class Bad(Callback):  # type: ignore[no-redef]
            init = 3  # type: ignore[assignment]


def test_what_the_decorator_cannot_mark(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`@on` takes an event and a phase, not 3 arguments.\n"
        "  fix:   for several events, write a union: `@on(StepBegin | StepEnd, TrainingPhase)`",
    ):
        on(StepBegin, StepEnd, TrainingPhase)
    with refused(DeclarationError, "`@on` marks methods, not 3.\n  fix:   put it above a `def`"):
        on(StepEnd)(3)
    for wrapper, name in ((staticmethod, "staticmethod"), (classmethod, "classmethod"), (property, "property")):
        with refused(
            DeclarationError,
            f"`@on` marks methods, not a {name}.\n"
            "  fix:   make it a plain method, `def name(self, event, phase, learner):`",
        ):
            on(wrapper(lambda event, phase, learner: None))


def test_options_of_a_handler(refused: Any) -> None:
    name = "test_options_of_a_handler.<locals>.run"
    with refused(
        DeclarationError,
        f"`access` of a handler must be a mapping, not ['step'].\n  where: {name}  <@access>\n"
        '  fix:   e.g. `access={"step": {"loss": Read()}}`',
    ):

        @on(StepEnd, access=["step"])  # access
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    with refused(
        DeclarationError,
        f"`when` of a handler must be a schedule, not 10.\n  where: {name}  <@when>\n"
        "  fix:   e.g. `when=EverySteps(10)`",
    ):

        @on(StepEnd, when=10)  # when
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...


def test_late_registration_checks_the_same(refused: Any) -> None:
    class Root(Callback): ...

    with refused(
        DeclarationError,
        "A handler's event must be a subclass of `Event`, not the class `TrainingPhase`.\n  where: Root.on.register\n"
        "  fix:   name one of `fluxcb.events`, or a class derived from `fluxcb.events.Event`",
    ):
        Root.on.register(TrainingPhase, StepEnd)
    with refused(
        DeclarationError,
        "`on.register` adds functions, not <built-in function print>.\n"
        "  where: Root.on.register\n  fix:   put it above a `def`",
    ):
        Root.on.register(StepEnd)(print)
    with refused(
        DeclarationError,
        "The handler `test_late_registration_checks_the_same.<locals>.run(self)` "
        "must take (self, event, phase, learner).\n"
        f"  where: Root.on.register  <@late-short>\n{SIGNATURE}",
    ):

        @Root.on.register(StepEnd)  # late-short
        def run(self: Any) -> None: ...

    with refused(
        DeclarationError,
        "`when` of a handler must be a schedule, not 10.\n  where: Root.on.register  <@late-when>\n"
        "  fix:   e.g. `when=EverySteps(10)`",
    ):

        @Root.on.register(StepEnd, when=10)  # late-when
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    assert Root().handlers() == []


def test_a_saved_state_for_a_callback_that_has_none(refused: Any) -> None:
    Good().load_state_dict({})
    with refused(
        DeclarationError,
        "`Good` was given a saved state but has no `load_state_dict`.\n"
        f"  where: {__name__}.Good  <@good>\n"
        "  fix:   define `load_state_dict(self, state)` next to `state_dict`",
    ):
        Good().load_state_dict({"count": 1})


def test_a_declaration_that_is_no_method_under_a_misspelt_name() -> None:
    with pytest.raises(DeclarationError) as caught:

        class Sorted(Callback):
            run_after = (Callback,)

    assert str(caught.value).splitlines()[0] == (
        "`Sorted.run_after` looks like a misspelt `runafter`, and would never be called."
    )


def test_a_traced_handler_on_a_clock() -> None:
    with pytest.raises(DeclarationError) as caught:

        class Clocked(Callback):
            @on(when=EverySeconds(1.0))
            def look(self, event: BackwardEnd, phase: Phase, learner: object) -> None: ...

    lines = str(caught.value).splitlines()
    assert lines[0].startswith("The traced handler `test_a_traced_handler_on_a_clock.<locals>.Clocked.look` cannot be")
    assert lines[0].endswith("scheduled by EverySeconds(seconds=1.0).")
    assert lines[-1] == "  fix:   use EverySteps or EveryEpochs, or a host handler"
