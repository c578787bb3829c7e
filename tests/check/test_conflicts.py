"""Conflict errors: complete messages, with the declaring lines and the suggested fixes."""

from __future__ import annotations

from typing import Any

import pytest

import fluxcb.callbacks
from fluxcb import (
    Append,
    Callback,
    NoConflict,
    NotDefined,
    RunFirst,
    Unresolvable,
    Write,
    every,
    in_order,
    on,
    resolveconflict,
)
from fluxcb._check.preflight import checked_graph
from fluxcb._errors import CheckError, ConflictError
from fluxcb.events import BackwardEnd, EpochEnd, FitBegin, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase

PHASES = (TrainingPhase, ValidationPhase)
APPEND = "     or: declare `Append()` in both if the order of the values that they add does not matter"


class Base(Callback):
    def __init__(self, access: Any) -> None:
        self.access = access

    def stateaccess(self) -> Any:  # access
        return self.access

    def __repr__(self) -> str:
        return type(self).__name__


class WarmUp(Base):
    @on  # warm
    def run(self, event: StepBegin, phase: TrainingPhase, learner) -> None: ...


class Decay(Base):
    @on
    def run(self, event: StepBegin | StepEnd, phase: AbstractTrainingPhase, learner) -> None: ...


class Everywhere(Base):
    @on
    def run(self, event: HostEvent, phase: Phase, learner) -> None: ...


class AlsoEverywhere(Everywhere): ...


LR = {"hyperparams": {"lr": Write()}}


# --- conflicts --------------------------------------------------------------------------------------------------------


def test_two_writers_without_order_conflict(refused: Any) -> None:
    with refused(
        ConflictError,
        "WarmUp and Decay both write `hyperparams.lr` and no order is declared.\n"
        "  where: Base.stateaccess  <@access>\n"
        "  why:   both run at StepBegin x TrainingPhase, and the result depends on which one is last\n"
        "  fix:   put them in the list as `in_order(WarmUp, Decay)`\n"
        "     or: make `Decay.runafter()` return `(WarmUp,)`",
    ):
        checked_graph([WarmUp(LR), Decay(LR)], PHASES)


def test_place_of_inherited_declaration_names_the_class_that_defines_it(refused: Any) -> None:
    class Slower(Decay): ...

    with refused(
        ConflictError,
        "WarmUp and Slower both write `hyperparams.lr` and no order is declared.\n"
        "  where: Base.stateaccess  <@access>\n"
        "  why:   both run at StepBegin x TrainingPhase, and the result depends on which one is last\n"
        "  fix:   put them in the list as `in_order(WarmUp, Slower)`\n"
        "     or: make `Slower.runafter()` return `(WarmUp,)`",
    ):
        checked_graph([WarmUp(LR), Slower(LR)], PHASES)


def test_two_instances_of_one_class_conflict(refused: Any) -> None:
    with refused(
        ConflictError,
        "WarmUp and WarmUp #2 both write `hyperparams.lr` and no order is declared.\n"
        "  where: Base.stateaccess  <@access>\n"
        "  why:   both run at StepBegin x TrainingPhase, and the result depends on which one is last\n"
        "  fix:   assign the two to variables, and put them in the list as `in_order(first, second)`\n"
        "     or: if you need only one WarmUp, remove the other from the list",
    ):
        checked_graph([WarmUp(LR), WarmUp(LR)], PHASES)


def test_contradictory_orders_of_different_instances_are_named_once(refused: Any) -> None:
    text = (
        "`in_order` states contradictory orders: WarmUp before Decay, and Decay before WarmUp.\n"
        "  why:   the two `in_order(...)` contain different instances, so the list contains each callback twice, and "
        "no order of its two instances is declared\n"
        "  fix:   keep the order that you need, and delete the other `in_order(...)`\n"
        "     or: to use all four, assign them to variables, and put them into one `in_order(...)`"
    )
    with refused(ConflictError, text):
        checked_graph([in_order(WarmUp(LR), Decay(LR)), in_order(Decay(LR), WarmUp(LR))], PHASES)
    first, second, third, fourth = WarmUp(LR), Decay(LR), Decay(LR), WarmUp(LR)
    checked_graph([in_order(first, second)], PHASES)
    checked_graph([in_order(first, second, third, fourth)], PHASES)
    free = {"cbstate": {"x": Append()}}  # without a conflict, both statements hold
    checked_graph([in_order(WarmUp(free), Decay(free)), in_order(Decay(free), WarmUp(free))], PHASES)


def test_conflict_message_counts_further_moments(refused: Any) -> None:
    with refused(
        ConflictError,
        "Everywhere and AlsoEverywhere at EverySteps(steps=2) both write `params` and `cbstate.a.b` "
        "and no order is declared.\n"
        "  where: Base.stateaccess  <@access>\n"
        "  why:   both run at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and 9 "
        "more, and the result depends on which one is last\n"
        "  fix:   assign the two to variables, and put them in the list as `in_order(first, second)`\n"
        "     or: make `AlsoEverywhere.runafter()` return `(Everywhere,)`",
    ):
        checked_graph(
            [
                Everywhere({"params": Write(), "cbstate": {"a": Append()}}),
                every(AlsoEverywhere({"params": Write(), "cbstate": {"a": {"b": Write()}}}), steps=2),
            ],
            PHASES,
        )


def test_runafter_fix_names_user_class_not_built_in(refused: Any) -> None:
    built_in = type("BuiltIn", (Everywhere,), {"__module__": "fluxcb.callbacks.built_in"})
    for one, other in ((Everywhere(LR), built_in(LR)), (built_in(LR), Everywhere(LR))):
        with refused(
            ConflictError,
            f"{one} and {other} both write `hyperparams.lr` and no order is declared.\n"
            "  where: Base.stateaccess  <@access>\n"
            "  why:   both run at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and "
            "9 more, and the result depends on which one is last\n"
            f"  fix:   put them in the list as `in_order({one}, {other})`\n"
            "     or: make `Everywhere.runafter()` return `(BuiltIn,)`",
        ):
            checked_graph([one, other], PHASES)


def test_runafter_fix_shows_the_modules_of_classes_with_one_name() -> None:
    shipped = fluxcb.callbacks.ClipGradients

    class ClipGradients(Callback):
        def stateaccess(self) -> Any:
            return {"step": {"grads": Write()}}

        @on
        def clip(self, event: BackwardEnd, phase: TrainingPhase, learner: Any) -> None: ...

    with pytest.raises(ConflictError) as caught:
        fluxcb.check([shipped(1.0), ClipGradients()], default_callbacks=False)
    assert caught.value.fix == (
        "put them in the list as `in_order(ClipGradients(1.0), ClipGradients())`",
        f"make `{__name__}.{ClipGradients.__qualname__}.runafter()` return `(fluxcb.callbacks.ClipGradients,)`",
    )
    ClipGradients.runafter = lambda self: (fluxcb.callbacks.ClipGradients,)  # type: ignore[method-assign]
    fluxcb.check([shipped(1.0), ClipGradients()], default_callbacks=False)


def conflicting(one: Any, other: Any) -> bool:
    try:
        checked_graph([Everywhere(one), AlsoEverywhere(other)], PHASES)
    except ConflictError:
        return True
    return False


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"cbstate": {"log": Append()}}, {"cbstate": {"log": Append()}}, False),
        ({"cbstate": {"log": Append()}}, {"cbstate": Append()}, False),
        ({"cbstate": {"log": Append()}}, {"cbstate": {"log": Write()}}, True),
        ({"cbstate": {"log": Write()}}, {"cbstate": {"log": {"x": Append()}}}, True),
        ({"cbstate": Append()}, {"cbstate": {"log": Write()}}, True),
        ({"cbstate": {"a": Write()}}, {"cbstate": {"b": Write()}}, False),
        ({"hyperparams": {"lr": Write()}}, {"hyperparams": {"decay": Write()}}, False),
        ({"hyperparams": {"lr": Write()}}, {"opt_state": Write()}, True),
        ({"model": Write()}, {"params": Write()}, True),
        ({"model": Write()}, {"opt_state": Write()}, False),
        ({"control": Append()}, {"control": Append()}, False),
        ({"control": Write()}, {"control": Write()}, False),
    ],
)
def test_conflicting_access(one: Any, other: Any, expected: bool) -> None:
    assert conflicting(one, other) is expected
    assert conflicting(other, one) is expected


class Narrow(Callback):
    """Writes `a` at StepEnd and `b` at EpochEnd."""

    def stateaccess(self) -> Any:
        return {"cbstate": Write()}

    @on(access={"cbstate": {"a": Write()}})  # narrow-a
    def at_step(self, event: StepEnd, phase, learner) -> None: ...

    @on(access={"cbstate": {"b": Write()}})
    def at_epoch(self, event: EpochEnd, phase, learner) -> None: ...

    def __repr__(self) -> str:
        return type(self).__name__


class NarrowToo(Narrow):
    @on(access={"cbstate": {"a": Write()}})  # narrow-too-a
    def at_step(self, event: StepEnd, phase: TrainingPhase, learner) -> None: ...

    @on(access={"cbstate": {"c": Write()}})
    def at_epoch(self, event: EpochEnd, phase, learner) -> None: ...


def test_conflict_message_names_only_moments_where_both_write(refused: Any) -> None:
    """The pair also has EpochEnd in common, where its handlers do not conflict."""
    with refused(
        ConflictError,
        "Narrow and NarrowToo both write `cbstate.a` and no order is declared.\n"
        "  where: Narrow.at_step  <@narrow-a>\n"
        "         NarrowToo.at_step  <@narrow-too-a>\n"
        "  why:   both run at StepEnd x TrainingPhase, and the result depends on which one is last\n"
        "  fix:   put them in the list as `in_order(Narrow, NarrowToo)`\n"
        "     or: make `NarrowToo.runafter()` return `(Narrow,)`\n"
        f"{APPEND}",
    ):
        checked_graph([Narrow(), NarrowToo()], PHASES)


def test_conflicts_on_different_paths_are_reported_separately() -> None:
    class Second(Narrow): ...

    with pytest.raises(CheckError) as caught:
        checked_graph([Narrow(), Second()], PHASES)
    assert [(type(p), p.what, p.why) for p in caught.value.problems] == [
        (
            ConflictError,
            f"Narrow and Second both write `cbstate.{name}` and no order is declared.",
            f"both run at {event} x TrainingPhase, {event} x ValidationPhase, "
            "and the result depends on which one is last",
        )
        for event, name in (("StepEnd", "a"), ("EpochEnd", "b"))
    ]


# --- resolutions ------------------------------------------------------------------------------------------------------


class Answering(Everywhere):
    def __init__(self, access: Any, answer: Any) -> None:
        super().__init__(access)
        self.answer = answer

    def resolveconflict(self, other: Callback) -> Any:
        return self.answer(self, other)


class Other(Answering): ...


def test_unresolvable_raises(refused: Any) -> None:
    with refused(
        ConflictError,
        "Everywhere and Answering can never be used together.\n"
        "  where: Answering.resolveconflict returns Unresolvable()\n"
        "  fix:   remove one of the two from the callbacks list",
    ):
        checked_graph([Everywhere({}), Answering({}, lambda me, other: Unresolvable())], PHASES)


@pytest.mark.parametrize(
    ("one", "other", "said", "also_said"),
    [
        (lambda me, it: RunFirst(me), lambda me, it: RunFirst(me), "Answering first", "Other first"),
        (lambda me, it: RunFirst(it), lambda me, it: NoConflict(), "Other first", "any order is fine"),
    ],
)
def test_contradictory_resolutions_raise(one: Any, other: Any, said: str, also_said: str, refused: Any) -> None:
    with refused(
        ConflictError,
        "Answering and Other have contradictory resolutions.\n"
        f"  where: Answering.resolveconflict: {said}\n"
        f"         Other.resolveconflict: {also_said}\n"
        "  why:   fluxcb can derive an order only if all resolutions agree\n"
        "  fix:   make the resolutions agree, or return `NotDefined()` from one of them",
    ):
        checked_graph([Answering(LR, one), Other(LR, other)], PHASES)


def test_matching_resolutions_give_same_order_for_every_list_order() -> None:
    one, other = Answering(LR, lambda me, other: RunFirst(other)), Other(LR, lambda me, other: RunFirst(me))
    for listed in ([one, other], [other, one]):
        graph = checked_graph(listed, PHASES)
        (edge,) = graph.edges.values()
        assert edge.reasons == [
            "Answering.resolveconflict returns RunFirst(Other) and Other.resolveconflict returns RunFirst(Other)"
        ]
    assert list(map(repr, graph.order(FitBegin, TrainingPhase))) == ["Other", "Answering"]


def test_registered_resolution_contradicting_method_raises(refused: Any) -> None:
    @resolveconflict.register(Answering, WarmUp)
    def _(one: Answering, other: WarmUp) -> RunFirst:
        return RunFirst(one)

    try:
        with refused(
            ConflictError,
            "WarmUp and Answering have contradictory resolutions.\n"
            "  where: Answering.resolveconflict: WarmUp first\n"
            "         resolveconflict.register: Answering first\n"
            "  why:   fluxcb can derive an order only if all resolutions agree\n"
            "  fix:   make the resolutions agree, or return `NotDefined()` from one of them",
        ):
            checked_graph([WarmUp(LR), Answering(LR, lambda me, other: RunFirst(other))], PHASES)
    finally:
        resolveconflict.unregister(Answering, WarmUp)


def test_registered_resolution_depending_on_list_order_raises(refused: Any) -> None:
    """Two instances of one class match the registered pair in both orders, so "the first" is ambiguous."""

    @resolveconflict.register(WarmUp, WarmUp)
    def _(one: WarmUp, other: WarmUp) -> RunFirst:
        return RunFirst(one)

    try:
        with refused(
            ConflictError,
            "WarmUp and WarmUp #2 have contradictory resolutions.\n"
            "  where: resolveconflict.register: WarmUp first\n"
            "         resolveconflict.register: WarmUp #2 first\n"
            "  why:   fluxcb can derive an order only if all resolutions agree\n"
            "  fix:   make the resolutions agree, or return `NotDefined()` from one of them",
        ):
            checked_graph([WarmUp(LR), WarmUp(LR)], PHASES)
    finally:
        resolveconflict.unregister(WarmUp, WarmUp)


class Stranger(Callback):
    def __repr__(self) -> str:
        return "stranger"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (lambda me, other: None, "None"),
        (lambda me, other: RunFirst(Stranger()), "RunFirst(stranger)"),
        (lambda me, other: RunFirst, repr(RunFirst)),
        (lambda me, other: me, "Answering"),
    ],
)
def test_invalid_resolution_raises(answer: Any, shown: str, refused: Any) -> None:
    with refused(
        CheckError,
        f"`Answering.resolveconflict` returned {shown} for WarmUp and Answering.\n"
        "  fix:   return NotDefined(), Unresolvable(), NoConflict(), or RunFirst(one of the two callbacks)",
    ):
        checked_graph([WarmUp(LR), Answering(LR, answer)], PHASES)


def test_run_first_with_common_base_class_raises() -> None:
    def answer(me: Any, other: Any) -> RunFirst:
        return RunFirst(Answering)

    with pytest.raises(CheckError) as caught:
        checked_graph([Answering(LR, answer), Answering(LR, answer)], PHASES)
    assert caught.value.what == (
        f"`Answering.resolveconflict` returned RunFirst({Answering!r}) for Answering and Answering #2."
    )


def test_not_defined_keeps_conflict() -> None:
    with pytest.raises(ConflictError, match=r"^WarmUp and Answering both write"):
        checked_graph([WarmUp(LR), Answering(LR, lambda me, other: NotDefined())], PHASES)


def test_text_of_each_conflict_is_made_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer(Base):
        @on
        def write(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    formatted = []
    text_of = ConflictError.__str__

    def counted(error: ConflictError) -> str:
        formatted.append(error)
        return text_of(error)

    monkeypatch.setattr(ConflictError, "__str__", counted)
    with pytest.raises(CheckError) as raised:
        checked_graph([Writer({"params": Write()}) for _ in range(30)], PHASES)
    pairs = 30 * 29 // 2
    assert len(getattr(raised.value, "problems", ())) == pairs
    # At most once for each conflict, in the message with all of them.
    assert len(formatted) <= pairs
