"""Invalid handlers and methods raise errors when the class is defined, with the line and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fluxcb import Callback, EverySeconds, EverySteps, on
from fluxcb._errors import DeclarationError
from fluxcb.events import BackwardEnd, EpochEnd, Event, HostEvent, StepBegin, StepEnd
from fluxcb.phases import LossTrainingPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

SIGNATURE = "  fix:   write `def run(self, event: StepEnd, phase: Phase, learner):`"
SIGNATURE_WITH_ANY = "  fix:   write `def run(self, event: StepEnd, phase: Phase, learner: Any):`"


def test_missing_parameter_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_missing_parameter_raises.<locals>.Bad.run(self, event, phase)` "
        "must take (self, event, phase, learner).\n"
        f"  where: test_missing_parameter_raises.<locals>.Bad.run  <@short>\n{SIGNATURE}",
    ):

        class Bad(Callback):
            @on  # short
            def run(self, event: StepEnd, phase: Phase) -> None: ...


def test_missing_event_raises_and_its_fixes_work(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_missing_event_raises_and_its_fixes_work.<locals>.Bad.run` does not name its event.\n"
        "  where: test_missing_event_raises_and_its_fixes_work.<locals>.Bad.run  <@eventless>\n"
        "  why:   `@on` reads the event from the annotation of the second parameter, which has none\n"
        "  fix:   annotate it, e.g. `def run(self, event: StepEnd, phase: TrainingPhase, learner):`\n"
        "     or: write `@on(StepEnd, TrainingPhase)` instead of `@on`\n"
        "     or: annotate it as `event: HostEvent` if the handler is for all host events",
    ):

        class Bad(Callback):
            @on  # eventless
            def run(self, event, phase: TrainingPhase, learner): ...

    class Annotated(Callback):
        @on
        def run(self, event: StepEnd, phase: TrainingPhase, learner): ...

    class Named(Callback):
        @on(StepEnd, TrainingPhase)
        def run(self, event, phase, learner): ...

    class Every(Callback):
        @on
        def run(self, event: HostEvent, phase: TrainingPhase, learner): ...


def test_extra_keyword_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_extra_keyword_raises.<locals>.Bad.run(self, event, phase, learner, *, loud)` "
        "must take (self, event, phase, learner).\n"
        f"  where: test_extra_keyword_raises.<locals>.Bad.run  <@keyword>\n{SIGNATURE_WITH_ANY}",
    ):

        class Bad(Callback):
            @on(StepEnd)  # keyword
            def run(self, event: StepEnd, phase: Phase, learner: Any, *, loud: bool) -> None: ...


def test_variadic_signature_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_variadic_signature_raises.<locals>.Bad.run(self, *args)` "
        "must take (self, event, phase, learner).\n"
        f"  where: test_variadic_signature_raises.<locals>.Bad.run  <@anything>\n{SIGNATURE}",
    ):

        class Bad(Callback):
            @on  # anything
            def run(self, *args: Any) -> None: ...


@pytest.mark.parametrize("postponed", [False, True])
@pytest.mark.parametrize(
    ("parameters", "corrected"),
    [
        ("self, event: StepEnd, phase: TrainingPhase", "self, event: StepEnd, phase: TrainingPhase, learner"),
        ("self, phase: TrainingPhase, learner", "self, event: StepEnd, phase: TrainingPhase, learner"),
        ("event: StepBegin, phase: TrainingPhase, learner", "self, event: StepBegin, phase: TrainingPhase, learner"),
        ("self, e: StepBegin | StepEnd", "self, event: StepBegin | StepEnd, phase: Phase, learner"),
        (
            "self, learner, event: StepBegin, phase: TrainingPhase",
            "self, event: StepBegin, phase: TrainingPhase, learner",
        ),
    ],
)
def test_fix_keeps_annotations(parameters: str, corrected: str, postponed: bool) -> None:
    future = "from __future__ import annotations\n" if postponed else ""

    def define(parameters: str) -> None:
        exec(f"{future}class Made(Callback):\n    @on\n    def run({parameters}): ...", dict(globals()))

    with pytest.raises(DeclarationError) as caught:
        define(parameters)
    assert caught.value.fix == (f"write `def run({corrected}):`",)
    define(corrected)


class Good(Callback):
    @on  # good
    def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...


def test_override_with_other_signature_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The handler `test_override_with_other_signature_raises.<locals>.Bad.run(self, learner)` "
        f"must take (self, event, phase, learner).\n  where: Bad.run  <@override>\n{SIGNATURE_WITH_ANY}",
    ):

        class Bad(Good):
            def run(self, learner: Any) -> None: ...  # override


def test_mixin_override_with_other_signature_raises(refused: Any) -> None:
    class Mixin:
        def run(self, learner: Any) -> None: ...  # mixin

    with refused(
        DeclarationError,
        "The handler `test_mixin_override_with_other_signature_raises.<locals>.Mixin.run(self, learner)` "
        f"must take (self, event, phase, learner).\n  where: Bad.run  <@mixin>\n{SIGNATURE_WITH_ANY}",
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
def test_invalid_event_or_phase_raises(event: Any, phase: Any, role: str, said: str, refused: Any) -> None:
    base = role.capitalize()
    with refused(
        DeclarationError,
        f"A handler's {role} must be a subclass of `{base}`, not {said}.\n"
        "  where: test_invalid_event_or_phase_raises.<locals>.run  <@explicit>\n"
        f"  fix:   name one of `fluxcb.{role}s`, or a class derived from `fluxcb.{role}s.{base}`",
    ):

        @on(event, phase)  # explicit
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...


def test_type_of_event_annotation_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "A handler's event must be a subclass of `Event`, not type[fluxcb._declare.events.StepEnd].\n"
        "  where: test_type_of_event_annotation_raises.<locals>.Bad.run  <@type-of>\n"
        "  fix:   name one of `fluxcb.events`, or a class derived from `fluxcb.events.Event`",
    ):

        class Bad(Callback):
            @on  # type-of
            def run(self, event: type[StepEnd], phase: Phase, learner: Any) -> None: ...


def test_unresolvable_annotation_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "The annotation `event: StepFinished` of `test_unresolvable_annotation_raises.<locals>.Bad.run` "
        "cannot be resolved (name 'StepFinished' is not defined).\n"
        "  where: test_unresolvable_annotation_raises.<locals>.Bad.run  <@unknown>\n"
        "  fix:   import the class before the callback, or name it in the decorator: `@on(StepEnd, TrainingPhase)`",
    ):

        class Bad(Callback):
            @on  # unknown
            def run(self, event: StepFinished, phase: Phase, learner: Any) -> None: ...  # noqa: F821


def test_module_name_wins_over_caller_name() -> None:
    def define() -> type[Callback]:
        namespace: dict[str, Any] = {}
        exec(SOURCE, namespace)
        return namespace["define"]()

    StepEnd = "a local of a caller in another module"  # noqa: F841, N806
    assert [entry.title() for entry in define()().handlers()] == ["(StepEnd, Phase)"]


SOURCE = """
from __future__ import annotations
from fluxcb import Callback, EverySeconds, EverySteps, on
from fluxcb.events import StepEnd

def define():
    class Inner(Callback):
        @on
        def run(self, event: StepEnd, phase, learner): ...
    return Inner
"""


def test_mixing_host_and_traced_events_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`test_mixing_host_and_traced_events_raises.<locals>.Bad.run` names both host and traced events, "
        "but a handler must be one or the other.\n"
        "  where: test_mixing_host_and_traced_events_raises.<locals>.Bad.run  <@mixed>\n"
        "  why:   host handlers run in Python with concrete values, and traced handlers become part of the compiled "
        "step\n"
        "  fix:   write two handlers, or name HostEvent or TracedEvent",
    ):

        class Bad(Callback):
            @on  # mixed
            def run(self, event: StepEnd | BackwardEnd, phase: Phase, learner: Any) -> None: ...


def test_event_neither_host_nor_traced_raises(refused: Any) -> None:
    class Homeless(Event): ...

    with refused(
        DeclarationError,
        "`Homeless` is neither a host nor a traced event, so its handlers would never run.\n"
        "  where: test_event_neither_host_nor_traced_raises.<locals>.Bad.run  <@homeless>\n"
        "  fix:   derive `Homeless` from HostEvent or TracedEvent",
    ):

        class Bad(Callback):
            @on  # homeless
            def run(self, event: Homeless, phase: Phase, learner: Any) -> None: ...


def test_two_handlers_with_same_name_raise(refused: Any) -> None:
    with refused(
        DeclarationError,
        "Two handlers marked with `@on` in one class body are called `run`.\n"
        "  where: test_two_handlers_with_same_name_raise.<locals>.Bad.run  <@first>\n"
        "         test_two_handlers_with_same_name_raise.<locals>.Bad.run  <@second>\n"
        "  why:   in a Python class body, the second would silently replace the first\n"
        "  fix:   give each handler a unique name",
    ):

        class Bad(Callback):
            @on  # first
            def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

            @on(StepBegin)  # second
            def run(self, event: Any, phase: Any, learner: Any) -> None: ...  # noqa: F811


def test_two_handlers_of_same_moment_raise(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Bad` handles (StepEnd, Phase) twice: in `one` and in `other`.\n"
        "  where: Bad.one  <@one>\n"
        "         Bad.other  <@other>\n"
        "  why:   each callback has at most one handler per moment\n"
        "  fix:   merge the two, or split the callback",
    ):

        class Bad(Callback):
            @on  # one
            def one(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

            @on(StepEnd | StepBegin)  # other
            def other(self, event: Any, phase: Any, learner: Any) -> None: ...


ON = "  fix:   mark methods with the decorator: `@on` above `def anything(self, event: StepEnd, phase, learner)`"


def test_method_named_on_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Bad` defines `on`, which is reserved for the table of handlers.\n"
        f"  where: {__name__}.test_method_named_on_raises.<locals>.Bad  <@called-on>\n{ON}",
    ):

        class Bad(Callback):
            def on(self, event: Any, phase: Any, learner: Any) -> None: ...  # called-on


def test_field_named_on_raises(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`Bad` defines `on`, which is reserved for the table of handlers.\n"
        f"  where: {__name__}.test_field_named_on_raises.<locals>.Bad\n{ON}",
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
def test_misspelled_declaration_raises_with_suggestion(spelt: str, meant: str, refused: Any) -> None:
    def method(self: Any) -> tuple[()]:  # misspelt
        return ()

    with refused(
        DeclarationError,
        f"`Bad.{spelt}` looks like a misspelled `{meant}` and would never be called.\n"
        f"  where: Bad.{spelt}  <@misspelt>\n"
        f"  fix:   rename it to `{meant}`, or to a less similar name if it is a different method",
    ):
        type("Bad", (Callback,), {spelt: method})


@pytest.mark.parametrize("name", ["on_init", "access", "state", "run", "dict", "_run_after", "initialize"])
def test_other_names_are_accepted(name: str) -> None:
    type("Fine", (Callback,), {name: lambda self: None})


def test_declaration_that_is_not_method_raises(refused: Any) -> None:
    where = f"  where: {__name__}.test_declaration_that_is_not_method_raises.<locals>.Bad\n"
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

    with refused(
        DeclarationError,
        "`Bad.stateaccess` must be a method, not a property.\n"
        "  where: Bad.stateaccess  <@declared>\n  fix:   remove `@property`",
    ):

        class Bad(Callback):  # type: ignore[no-redef]
            @property  # declared
            def stateaccess(self) -> Any:
                return {}


def test_dataclasses_with_slots_are_callbacks() -> None:
    @dataclass(slots=True)
    class Counts(Callback):
        steps: int = 0

        @on
        def step(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
            self.steps += 1

    counts = Counts()
    testlearner(counts).fit(steps=3)
    assert counts.steps == 3


def test_invalid_use_of_decorator_raises(refused: Any) -> None:
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


def test_invalid_handler_options_raise(refused: Any) -> None:
    name = "test_invalid_handler_options_raise.<locals>.run"
    with refused(
        DeclarationError,
        f"`access` of a handler must be a mapping, not ['step'].\n  where: {name}  <@access>\n"
        '  fix:   write e.g. `access={"step": {"loss": Read()}}`',
    ):

        @on(StepEnd, access=["step"])  # access
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    with refused(
        DeclarationError,
        f"`when` of a handler must be a schedule, not 10.\n  where: {name}  <@when>\n"
        "  fix:   write `when=EverySteps(10)`",
    ):

        @on(StepEnd, when=10)  # when
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...


def test_registration_validates_handlers(refused: Any) -> None:
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
        "The handler `test_registration_validates_handlers.<locals>.run(self)` "
        "must take (self, event, phase, learner).\n"
        f"  where: Root.on.register  <@late-short>\n{SIGNATURE}",
    ):

        @Root.on.register(StepEnd)  # late-short
        def run(self: Any) -> None: ...

    with refused(
        DeclarationError,
        "`when` of a handler must be a schedule, not 10.\n  where: Root.on.register  <@late-when>\n"
        "  fix:   write `when=EverySteps(10)`",
    ):

        @Root.on.register(StepEnd, when=10)  # late-when
        def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    assert Root().handlers() == []


def test_state_dict_without_load_state_dict_raises(refused: Any) -> None:
    Good().load_state_dict({})
    with refused(
        DeclarationError,
        "`Good` was given a saved state but has no `load_state_dict`.\n"
        f"  where: {__name__}.Good  <@good>\n"
        "  fix:   define `load_state_dict(self, state)` next to `state_dict`",
    ):
        Good().load_state_dict({"count": 1})


def test_misspelled_declaration_that_is_not_method_raises() -> None:
    with pytest.raises(DeclarationError) as caught:

        class Sorted(Callback):
            run_after = (Callback,)

    assert str(caught.value).splitlines()[0] == (
        "`Sorted.run_after` looks like a misspelled `runafter` and would never be called."
    )


def test_traced_handler_with_time_schedule_raises() -> None:
    with pytest.raises(DeclarationError) as caught:

        class Clocked(Callback):
            @on(when=EverySeconds(1.0))
            def look(self, event: BackwardEnd, phase: Phase, learner: object) -> None: ...

    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "The traced handler `test_traced_handler_with_time_schedule_raises.<locals>.Clocked.look` cannot be"
    )
    assert lines[0].endswith("scheduled by EverySeconds(seconds=1.0).")
    assert lines[-1] == "  fix:   use EverySteps or EveryEpochs, or a host handler"


def test_one_on_for_a_method_that_has_two() -> None:
    with pytest.raises(DeclarationError, match=r"C\.act` is marked with `@on` twice") as raised:

        class C(Callback):
            @on(EpochEnd, TrainingPhase)
            @on(EpochEnd, ValidationPhase)
            def act(self, event, phase, learner): ...

    assert list(raised.value.fix) == ["write `@on(EpochEnd, TrainingPhase | ValidationPhase)`"]

    class Mended(Callback):
        @on(EpochEnd, TrainingPhase | ValidationPhase)
        def act(self, event, phase, learner): ...

    assert [(h.event, h.phase) for h in Mended().handlers()] == [
        (EpochEnd, TrainingPhase),
        (EpochEnd, ValidationPhase),
    ]


@pytest.mark.parametrize("options", [{}, {"when": EverySteps(2)}])
def test_a_method_for_each_on(options) -> None:
    phase = ValidationPhase if not options else TrainingPhase
    with pytest.raises(DeclarationError, match="is marked with `@on` twice") as raised:

        class C(Callback):
            @on(StepEnd, TrainingPhase, **options)
            @on(EpochEnd, phase)
            def act(self, event, phase, learner): ...

    assert list(raised.value.fix) == [
        "write a method for each `@on`; one can call the other: `self.act(event, phase, learner)`"
    ]
