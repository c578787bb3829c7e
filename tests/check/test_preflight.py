"""Unknown paths, missing state, and values that are used before they exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

import fluxcb
from fluxcb import Append, Callback, Read, Write, every, on
from fluxcb._check.preflight import checked_graph, phase_types
from fluxcb._declare.state import FIRST_LEVEL, PROGRESS, PROVIDERS
from fluxcb._errors import CheckError, DeclarationError, MissingStateError, UnknownStateError
from fluxcb.callbacks import LogMetrics, Metrics, Monitors, Recorder
from fluxcb.events import (
    BackwardBegin,
    BackwardEnd,
    ComputeEnd,
    EpochBegin,
    EpochEnd,
    Event,
    FitEnd,
    ForwardBegin,
    HostEvent,
    LossBegin,
    StepBegin,
    StepEnd,
    TracedEvent,
    Trigger,
    UpdateEnd,
)
from fluxcb.phases import AbstractTrainingPhase, LossTrainingPhase, Phase, TrainingPhase, ValidationPhase

PHASES = (TrainingPhase, ValidationPhase)


class Says(Callback):
    def __init__(self, access: Any) -> None:
        self.access = access

    def stateaccess(self) -> Any:  # says
        return self.access

    def __repr__(self) -> str:
        return type(self).__name__


# What the phases of the library provide, and what the engine adds.
STEP_NAMES = ["batch", "data_position", "earlier_losses", "grads", "hold", "loss", "outputs", "skip", "skips", "stop"]
STEP_NAMES += ["updates", "xs", "ys"]

# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "what"),
    [
        ({"stpe": {"loss": Read()}}, "`stpe.loss`, which is not a part of the Learner. Did you mean `step`?"),
        ({"zzz": Read()}, "`zzz`, which is not a part of the Learner."),
        (
            {"step": {"lsos": Read()}},
            "`step.lsos`, which no phase provides and no callback writes. Did you mean `loss`?",
        ),
        ({"step": {"zzz": Read()}}, "`step.zzz`, which no phase provides and no callback writes."),
        ({"step": {"aux": Read()}}, "`step.aux`, which no phase provides and no callback writes."),
        ({"progress": {"stp": Read()}}, "`progress.stp`, which is not a counter. Did you mean `step`?"),
        ({"data": {"trainig": Read()}}, "`data.trainig`, which is not the name of a phase. Did you mean `training`?"),
        ({"*": {"params": Read()}}, "`*.params`, but `*` has no parts."),
        ({"control": {"x": Append()}}, "`control.x`, but `control` has no parts."),
    ],
)
def test_unknown_path_raises(access: Any, what: str, refused: Any) -> None:
    (first,) = access
    known = {"step": STEP_NAMES, "progress": sorted(PROGRESS), "data": ["training", "validation"]}
    names = known.get(first, sorted(FIRST_LEVEL))
    alone = first in ("*", "control")
    fix = f"write `{first}` alone" if alone else f"name one of {', '.join(names)}"
    text = f"Says declares access to {what}\n  where: Says.stateaccess  <@says>\n  fix:   {fix}"
    with refused(UnknownStateError, text):
        checked_graph([Says(access)], PHASES)


class Creates(Callback):
    def init(self, learner: Any) -> None:
        learner.cbstate["mine"] = 0

    def stateaccess(self) -> Any:
        return {"cbstate": {"mine": Write()}}


@pytest.mark.parametrize(
    ("access", "declaration"),
    [
        ({"loss": Read()}, '{"step": {"loss": Read()}}'),
        ({"grads": Write()}, '{"step": {"grads": Write()}}'),
        ({"history": Read()}, '{"cbstate": {"history": Read()}}'),
        ({"metrics_epoch": {"validation": Read()}}, '{"cbstate": {"metrics_epoch": {"validation": Read()}}}'),
        ({"monitors": Write()}, '{"cbstate": {"monitors": Append()}}'),
        ({"mine": Read()}, '{"cbstate": {"mine": Read()}}'),
        ({"epoch": Read()}, '{"progress": {"epoch": Read()}}'),
        ({"lr": Write()}, '{"hyperparams": {"learning_rate": Write()}}'),
    ],
)
def test_part_named_alone_raises_with_its_place(access: Any, declaration: str, refused: Any) -> None:
    (first,) = access
    path = "metrics_epoch.validation" if first == "metrics_epoch" else first
    text = (
        f"Says declares access to `{path}`, which is not a part of the Learner.\n"
        f"  where: Says.stateaccess  <@says>\n  fix:   write `{declaration}`"
    )
    with refused(UnknownStateError, text):
        checked_graph([Says(access), Creates()], PHASES)


@pytest.mark.parametrize(
    ("access", "path", "fix"),
    [
        ({"*": Write()}, "*", "declare the paths it changes"),
        ({"*": Append()}, "*", "declare the paths it changes"),
        ({"key": Write()}, "key", "remove it from `stateaccess`"),
        ({"progress": {"step": Append()}}, "progress.step", "remove it from `stateaccess`"),
    ],
)
def test_read_only_path_raises_on_write(access: Any, path: str, fix: str, refused: Any) -> None:
    with refused(
        UnknownStateError,
        f"Says declares a write to `{path}`, which no callback can write.\n"
        f"  where: Says.stateaccess  <@says>\n  fix:   {fix}",
    ):
        checked_graph([Says(access)], PHASES)


def test_known_paths_are_accepted() -> None:
    access = {
        "params": Read(),
        "model_state": {"norm": {"mean": Read()}},
        "opt_state": Write(),
        "key": Read(),
        "hyperparams": {"learning_rate": Write(), "anything": Read()},
        "step": {"loss": Read(), "batch": Read(), "skip": Append(), "stop": Append(), "added_by_itself": Write()},
        "control": Append(),
        "cbstate": {"mine": {"deep": {"er": Write()}}},
        "progress": {"step": Read(), "epochs": Read()},
        "data": {"training": Write(), "validation": Read()},
        "model": Read(),
        "loss_fn": Read(),
        "optimizer": Read(),
        "callbacks": Read(),
        "*": Read(),
    }
    assert checked_graph([Says(access)], PHASES).edges == {}


def test_step_value_is_known_if_phase_provides_or_callback_writes_it() -> None:
    checked_graph([Says({"step": {"aux": Read()}})], [LossTrainingPhase])
    checked_graph([Says({"step": {"norm": Read()}}), Says({"step": {"norm": Write()}})], PHASES)


def test_narrowed_access_is_checked(refused: Any) -> None:
    class Narrow(Says):
        @on(access={"step": {"lsos": Read()}})  # narrow
        def run(self, event: StepEnd, phase, learner) -> None: ...

    with refused(
        UnknownStateError,
        "Narrow declares access to `step.lsos`, which no phase provides and no callback writes. Did you mean `loss`?\n"
        "  where: Narrow.run  <@narrow>\n"
        f"  fix:   name one of {', '.join(STEP_NAMES)}",
    ):
        checked_graph([Narrow({"step": Read()})], PHASES)


# --- shared state -----------------------------------------------------------------------------------------------------

WHY = "  why:   it would fail at the first handler that reads it"


@pytest.mark.parametrize("name", sorted(PROVIDERS))
def test_missing_state_error_names_creator(name: str, refused: Any) -> None:
    with refused(
        MissingStateError,
        f"Says reads `cbstate.{name}`, which no callback creates.\n"
        f"  where: Says.stateaccess  <@says>\n{WHY}\n"
        f"  fix:   add `{PROVIDERS[name]}()` to the callbacks, which creates it",
    ):
        checked_graph([Says({"cbstate": {name: Read()}})], PHASES)


@pytest.mark.parametrize(
    ("read", "path", "hint"),
    [
        ({"cbstate": {"mien": Read()}}, "cbstate.mien", " Did you mean `mine`?"),
        ({"cbstate": {"histroy": Read()}}, "cbstate.histroy", " Did you mean `history`?"),
        ({"cbstate": {"zzz": Read(previous=True)}}, "cbstate.zzz", ""),
        ({"cbstate": {"deep": {"los": Read()}}}, "cbstate.deep.los", " Did you mean `loss`?"),
        # A hub that somebody appends to may get any name, which is no promise, even if another reads the hub.
        ({"cbstate": {"hub": {"valid_loss": Read()}}}, "cbstate.hub.valid_loss", ""),
    ],
)
def test_missing_custom_state_raises(read: Any, path: str, hint: str, refused: Any) -> None:
    written = {"cbstate": {"mine": Write(), "deep": {"loss": Append()}, "hub": Append()}}
    listed = [Says(written), Says({"cbstate": {"hub": Read()}}), every(Says(read), steps=5)]
    provider = ", and add `Recorder()` to the callbacks" if "history" in hint else ""
    instead = f"write `{hint.split('`')[1]}` instead of `{path.split('.')[-1]}`{provider}\n     or: " if hint else ""
    with refused(
        MissingStateError,
        f"Says at EverySteps(steps=5) reads `{path}`, which no callback creates.{hint}\n"
        f"  where: Says.stateaccess  <@says>\n{WHY}\n"
        f"  fix:   {instead}add a callback that declares `Write()` on `{path}` and creates it in its `init`",
    ):
        checked_graph(listed, PHASES)


def test_misspelled_cbstate_entry_raises_with_suggestion(refused: Any) -> None:
    misspelled = Says({"cbstate": {"histry": Read()}})
    with refused(
        MissingStateError,
        "Says reads `cbstate.histry`, which no callback creates. Did you mean `history`?\n"
        f"  where: Says.stateaccess  <@says>\n{WHY}\n"
        "  fix:   write `history` instead of `histry`\n"
        "     or: add a callback that declares `Write()` on `cbstate.histry` and creates it in its `init`",
    ):
        checked_graph([misspelled, Recorder()], PHASES)
    checked_graph([Says({"cbstate": {"history": Read()}}), Recorder()], PHASES)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"a": Write()}, {"a": Read()}),
        ({"a": Append()}, {"a": Read()}),
        ({"a": Write()}, {"a": {"x": Read()}}),
        ({"a": {"x": Write()}}, {"a": Read()}),
        ({"a": {"x": Append()}}, {"a": {"x": Read()}}),
        ({"a": {"x": {"y": Append()}}}, {"a": {"x": Read()}}),
        ({"a": Write()}, {"a": {"x": Read(previous=True)}}),
    ],
)
def test_created_state_is_accepted(written: Any, read: Any) -> None:
    checked_graph([Says({"cbstate": read}), Says({"cbstate": written})], PHASES)


def test_reading_all_of_cbstate_requires_no_entry() -> None:
    checked_graph([Says({"cbstate": Read()}), Says({"*": Read()})], PHASES)


# --- step values ------------------------------------------------------------------------------------------------------


def at(event: Any, phase: Any = Phase) -> Callable[[Any], Says]:
    """Return a function that creates a callback with a handler of one moment."""

    def run(self: Any, event: Any, phase: Any, learner: Any) -> None: ...  # at

    return type("User", (Says,), {"run": on(event, phase)(run)})


OUTSIDE = "host handlers see step values only at StepBegin and StepEnd"


@pytest.mark.parametrize(
    ("event", "phase", "name", "shown", "why", "fix"),
    [
        (LossBegin, Phase, "grads", "LossBegin x TrainingPhase, LossBegin x ValidationPhase", None, "BackwardEnd"),
        (BackwardEnd, Phase, "updates", "BackwardEnd x TrainingPhase", None, "UpdateEnd"),
        (ForwardBegin, TrainingPhase, "loss", "ForwardBegin x TrainingPhase", None, "BackwardBegin"),
        (ForwardBegin, ValidationPhase, "loss", "ForwardBegin x ValidationPhase", None, "ComputeEnd"),
        (ComputeEnd, ValidationPhase, "grads", "ComputeEnd x ValidationPhase", None, ""),
        (StepBegin, TrainingPhase, "loss", "StepBegin x TrainingPhase", None, "StepEnd"),
        (StepBegin, TrainingPhase, "skip", "StepBegin x TrainingPhase", None, "StepEnd"),
        (StepBegin, TrainingPhase, "added", "StepBegin x TrainingPhase", None, "StepEnd"),
        (EpochEnd, TrainingPhase, "loss", "EpochEnd x TrainingPhase", OUTSIDE, "StepEnd"),
        (
            EpochBegin | FitEnd,
            TrainingPhase,
            "batch",
            "EpochBegin x TrainingPhase, FitEnd x TrainingPhase",
            OUTSIDE,
            "StepBegin",
        ),
        (Trigger, Phase, "stop", "Trigger x TrainingPhase", OUTSIDE, "StepEnd"),
        (EpochEnd, TrainingPhase, "added", "EpochEnd x TrainingPhase", OUTSIDE, "StepEnd"),
        (StepEnd, ValidationPhase, "grads", "StepEnd x ValidationPhase", None, ""),
    ],
)
def test_step_value_before_its_event_raises(
    event: Any, phase: Any, name: str, shown: str, why: str | None, fix: str, refused: Any
) -> None:
    adder = at(BackwardEnd, AbstractTrainingPhase)({"step": {"added": Write(), "stop": Append()}})
    with refused(
        MissingStateError,
        f"User uses `step.{name}` at {shown}, where it does not exist.\n"
        "  where: User.run  <@at>\n"
        f"  why:   {why or f'`step.{name}` does not exist yet there'}\n"
        f"  fix:   {f'handle {fix} instead' if fix else 'use it in a phase that provides it'}",
    ):
        checked_graph([at(event, phase)({"step": {name: Read()}}), adder], PHASES)


@pytest.mark.parametrize(
    ("event", "phase", "name"),
    [
        (ForwardBegin, Phase, "xs"),
        (LossBegin, Phase, "outputs"),
        (BackwardBegin, Phase, "loss"),
        (BackwardEnd, Phase, "grads"),
        (UpdateEnd, Phase, "updates"),
        (ComputeEnd, Phase, "loss"),
        (ComputeEnd, Phase, "grads"),
        (StepBegin, Phase, "batch"),
        (StepEnd, Phase, "loss"),
        (StepEnd, Phase, "grads"),
        (StepEnd, Phase, "skip"),
        (StepEnd, Phase, "added"),
        (LossBegin, Phase, "stop"),
        (TracedEvent, Phase, "grads"),
        (HostEvent, Phase, "loss"),
        (StepBegin | StepEnd, Phase, "loss"),
        (UpdateEnd, Phase, "added"),
    ],
)
def test_step_value_after_its_event_is_accepted(event: Any, phase: Any, name: str) -> None:
    adder = at(BackwardEnd, AbstractTrainingPhase)({"step": {"added": Write()}})
    checked_graph([at(event, phase)({"step": {name: Read()}}), adder], PHASES)


def test_narrowed_handler_is_checked_by_its_own_access(refused: Any) -> None:
    class Narrow(Says):
        @on
        def end(self, event: StepEnd, phase, learner) -> None: ...

        @on(access={"step": {"loss": Read()}})  # begin
        def begin(self, event: StepBegin, phase: TrainingPhase, learner) -> None: ...

    with refused(
        MissingStateError,
        "Narrow uses `step.loss` at StepBegin x TrainingPhase, where it does not exist.\n"
        "  where: Narrow.begin  <@begin>\n"
        "  why:   `step.loss` does not exist yet there\n"
        "  fix:   handle StepEnd instead",
    ):
        checked_graph([Narrow({"step": {"loss": Read()}})], PHASES)


def test_class_access_for_narrowed_handler_does_not_affect_others() -> None:
    class Narrow(Says):
        @on
        def epoch(self, event: EpochEnd, phase, learner) -> None: ...

        @on(access={"step": {"loss": Read()}})
        def step(self, event: StepEnd, phase, learner) -> None: ...

    checked_graph([Narrow({"step": {"loss": Read()}})], PHASES)


def test_step_values_at_custom_events_are_not_checked() -> None:
    class Corrupt(TracedEvent): ...

    class Draw(HostEvent): ...

    for event in (Corrupt, Draw):
        checked_graph([at(event)({"step": {"loss": Read()}})], PHASES)


def test_custom_event_provided_by_phase_is_known(refused: Any) -> None:
    class Generated(TracedEvent): ...

    class GANPhase(AbstractTrainingPhase):
        provides = {Generated: ("fake",), LossBegin: (), BackwardBegin: ("loss",), BackwardEnd: ("grads",)}

    checked_graph([at(Generated)({"step": {"fake": Read()}})], [GANPhase])
    with refused(
        MissingStateError,
        "User uses `step.loss` at Generated x GANPhase, where it does not exist.\n"
        "  where: User.run  <@at>\n"
        "  why:   `step.loss` does not exist yet there\n"
        "  fix:   handle BackwardBegin instead",
    ):
        checked_graph([at(Generated)({"step": {"loss": Read()}})], [GANPhase])


# --- phases -----------------------------------------------------------------------------------------------------------


def test_phases_may_be_classes_or_instances(refused: Any) -> None:
    assert phase_types([TrainingPhase, ValidationPhase()]) == PHASES
    assert phase_types(TrainingPhase()) == phase_types(TrainingPhase) == (TrainingPhase,)
    assert checked_graph([], (TrainingPhase, TrainingPhase())).phases == (TrainingPhase,)
    for wrong in (int, 3, Event):
        name = wrong.__name__ if isinstance(wrong, type) else type(wrong).__name__
        with refused(
            DeclarationError, f"`phases` contains {name}, which is not a phase.\n  fix:   derive it from Phase"
        ):
            checked_graph([], [wrong])


@pytest.mark.parametrize(
    ("event", "names"), [(StepEnd, ("x",)), (LossBegin, "x"), (TracedEvent(), ("x",)), ("LossBegin", ("x",))]
)
def test_provides_of_wrong_type_raises(event: Any, names: Any, refused: Any) -> None:
    with refused(
        DeclarationError,
        f"`Bad.provides` must map traced events to tuples of step names, not {event!r} to {names!r}.\n"
        f"  where: {__name__}.Bad\n"
        '  fix:   write `provides = {LossBegin: ("outputs",), BackwardBegin: ("loss",)}`',
    ):
        type("Bad", (Phase,), {"provides": {event: names}})


def test_one_error_contains_all_problems() -> None:
    with pytest.raises(CheckError) as caught:
        checked_graph(
            [Says({"stpe": Read(), "cbstate": {"history": Read()}}), at(EpochEnd)({"step": {"loss": Read()}})], PHASES
        )
    assert [type(problem).__name__ for problem in caught.value.problems] == [
        "UnknownStateError",
        "MissingStateError",
        "MissingStateError",
    ]


def test_appending_requires_creator():
    class Puts(Callback):
        def stateaccess(self):
            return {"cbstate": {"monitors": Append()}}

        @on
        def put(self, event: EpochEnd, phase, learner):
            learner.cbstate.monitors.put_scalar("x", 1.0)

    with pytest.raises(MissingStateError) as raised:
        fluxcb.check([Puts()])
    assert raised.value.what == "Puts() appends to `cbstate.monitors`, which no callback creates."
    assert raised.value.fix == ("add `Monitors()` to the callbacks, which creates it",)
    fluxcb.check([Puts(), Monitors()])


class AddsValue(TrainingPhase):
    def step(self, learner: Any, emit: Any) -> None:
        super().step(learner, emit)
        learner.step.extra = 2 * learner.step.loss


class ListsValue(AddsValue):
    provides: ClassVar = {**TrainingPhase.provides, ComputeEnd: ("extra",)}


class AddsAnother(ListsValue):
    provides: ClassVar = {**ListsValue.provides}

    def step(self, learner: Any, emit: Any) -> None:
        super().step(learner, emit)

        def add() -> None:
            learner.step.more = 1.0

        add()


@pytest.mark.parametrize(
    ("phase", "name", "fix"),
    [
        (
            AddsValue,
            "extra",
            'write `provides = {**TrainingPhase.provides, ComputeEnd: ("extra",)}` in the body of `AddsValue`, because '
            "its `step` assigns `step.extra`",
        ),
        (
            AddsAnother,
            "more",
            'add `ComputeEnd: ("extra", "more")` to `AddsAnother.provides`, because its `step` assigns `step.more`',
        ),
    ],
)
def test_value_that_a_phase_assigns_without_listing_it_names_provides(phase: Any, name: str, fix: str) -> None:
    with pytest.raises(UnknownStateError) as raised:
        fluxcb.check([Says({"step": {name: Read()}})], phases=[phase])
    assert tuple(raised.value.fix) == (fix,)
    fluxcb.check([Says({"step": {"extra": Read()}})], phases=[ListsValue])


class Zeros(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def stateaccess(self) -> Any:
        return {"step": {self.name: Write()}}

    @on  # zero
    def zero(self, event: ForwardBegin, phase: TrainingPhase, learner: Any) -> None:
        learner.step[self.name] = 0.0

    def __repr__(self) -> str:
        return "Zeros()"


def test_inputs_of_a_phase_that_does_not_split_the_batch_name_the_batch(refused: Any) -> None:
    for name in ("xs", "ys"):
        with refused(
            MissingStateError,
            f"Zeros() uses `step.{name}` at ForwardBegin x LossTrainingPhase, where it does not exist.\n"
            "  where: Zeros.zero  <@zero>\n"
            "  why:   LossTrainingPhase does not split the batch, because the loss function gets `step.batch`\n"
            "  fix:   write `step.batch` in a handler of ForwardBegin instead",
        ):
            fluxcb.check([Zeros(name)], phases=[LossTrainingPhase])
        fluxcb.check([Zeros(name)], phases=[TrainingPhase])
    fluxcb.check([Zeros("batch")], phases=[LossTrainingPhase])


def test_an_entry_that_its_reader_creates_needs_write(refused: Any) -> None:
    class Keeps(Callback):
        permission: Any = Read()

        def stateaccess(self) -> Any:  # keeps
            return {"cbstate": {"kept": self.permission}}

        def init(self, learner: Any) -> None:
            learner.cbstate.kept = {"a": 1}

        def __repr__(self) -> str:
            return "Keeps"

    with refused(
        MissingStateError,
        "Keeps reads `cbstate.kept`, which no callback creates.\n"
        "  where: Keeps.stateaccess  <@keeps>\n"
        "  why:   it would fail at the first handler that reads it\n"
        "  fix:   declare `Write()` on `cbstate.kept`, because `Keeps.init` creates it",
    ):
        checked_graph([Keeps()], PHASES)
    Keeps.permission = Write()
    checked_graph([Keeps()], PHASES)


def test_metrics_of_a_step_name_the_callback_that_computes_them():
    with pytest.raises(CheckError) as raised:
        checked_graph([Monitors(), LogMetrics()], (TrainingPhase, ValidationPhase))
    unknown = raised.value.problems[0]
    assert unknown.what == (
        "LogMetrics() declares access to `step.metrics`, which no phase provides and no callback writes."
    )
    assert unknown.fix == ("add `Metrics()` to the callbacks, which writes it",)
    checked_graph([Metrics(), Monitors(), LogMetrics()], (TrainingPhase, ValidationPhase))
