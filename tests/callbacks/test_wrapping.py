"""ProxyCallback, ConditionalCallback with its conditions, and CallbackFactory."""

import pytest

from fluxcb import Append, Callback, CancelFitting, DeclarationError, Read, Write, every, on
from fluxcb.callbacks import (
    CallbackCondition,
    CallbackFactory,
    ConditionalCallback,
    FrequencyThrottle,
    PeriodicTrigger,
    ProxyCallback,
    Recorder,
    TimeThrottle,
)
from fluxcb.events import (
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    FitStopping,
    HostEvent,
    StepBegin,
    StepEnd,
    Trigger,
    UpdateEnd,
)
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner


def fired(log, event, phase="training"):
    return [entry[2] for entry in log.entries if entry[:2] == (event, phase)]


# --- ProxyCallback ----------------------------------------------------------------------------------------------------


class Counts(Callback):
    """Counts training steps in shared state."""

    name = "counts"

    def stateaccess(self):
        return {"cbstate": {"count": Write()}}

    def init(self, learner):
        if "count" not in learner.cbstate:
            learner.cbstate.count = 0

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.count += 1


class Shows(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"cbstate": {"count": Read()}}

    def runafter(self):
        return (Counts,)

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(learner.cbstate.count)


def test_a_proxy_has_the_type_of_the_wrapped_callback():
    inner, shows = Counts(), Shows()
    learner = testlearner(shows, ProxyCallback(inner), batches=3)
    learner.fit(1)
    assert shows.seen == [1, 2, 3]  # the order follows from the declarations of what is wrapped
    assert learner.callbacks.get(Counts) is inner
    assert repr(ProxyCallback(inner)) == "ProxyCallback(Counts())"


def test_a_proxy_says_of_itself_what_is_said_of_what_it_wraps_also_later():
    inner = Counts()
    proxy = PeriodicTrigger(ProxyCallback(every(EventLog(), steps=2)), every_k_steps=2)
    assert (proxy.name, proxy.chief_only, proxy.main_thread) == (None, False, False)
    proxy = ProxyCallback(inner)
    assert proxy.name == "counts"
    inner.chief_only = inner.main_thread = True
    inner.name = "renamed"
    assert (proxy.name, proxy.chief_only, proxy.main_thread) == ("renamed", True, True)


class Around(ProxyCallback):
    """Does something before and after the wrapped callback's StepEnd."""

    def __init__(self, callback):
        super().__init__(callback)
        self.said = []

    @on
    def around(self, event: StepEnd, phase: TrainingPhase, learner):
        self.said.append(("before", learner.progress.step))
        self.forward(event, phase, learner)
        self.said.append(("after", learner.progress.step))

    @on
    def only_here(self, event: Trigger, phase: TrainingPhase, learner):
        self.said.append("trigger")


def test_handlers_of_a_proxy_replace_those_of_the_wrapped_callback():
    log = EventLog()
    around = Around(log)
    testlearner(around, batches=2).fit(1)
    assert around.said == [("before", 1), ("after", 1), ("before", 2), ("after", 2), "trigger"]
    assert fired(log, "StepEnd") == [1, 2]
    assert fired(log, "StepEnd", "validation") == [2, 2]
    assert fired(log, "Trigger") == []


def test_handlers_of_a_proxy_have_the_schedule_of_the_wrapped_handler():
    around = Around(every(Counts(), steps=2))
    testlearner(around, batches=4).fit(1)
    assert around.said == [("before", 2), ("after", 2), ("before", 4), ("after", 4), "trigger"]
    outer = every(Around(Counts()), steps=3)
    learner = testlearner(outer, batches=4)
    learner.fit(1)
    assert outer.callback.said == [("before", 3), ("after", 3), "trigger"]
    assert learner.cbstate["count"] == 1


def test_forwarding_to_a_missing_handler_does_nothing():
    said = []

    class Forwards(ProxyCallback):
        @on
        def begin(self, event: FitBegin, phase: Phase, learner):
            self.forward(event, phase, learner)
            said.append("begin")

    testlearner(Forwards(Counts())).fit(1)
    assert said == ["begin"]


@pytest.mark.parametrize(
    ("given", "example"), [(3, "ProxyCallback(Recorder())"), (Counts, "ProxyCallback(Counts())")], ids=str
)
def test_a_proxy_wraps_a_callback(given, example, refused):
    with refused(
        DeclarationError,
        f"`ProxyCallback` wraps a callback instance, not {given!r}.\n  fix:   pass e.g. `{example}`",
    ):
        ProxyCallback(given)


# --- ConditionalCallback ----------------------------------------------------------------------------------------------


class History(Callback):
    """What FluxTraining.jl's test of `throttle` looks at."""

    def __init__(self):
        self.steps = 0

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        self.steps += 1


@pytest.mark.parametrize(("freq", "steps"), [(1, 16), (2, 8), (16, 1), (17, 0)])
def test_frequencies_match_fluxtraining(freq, steps):
    history = History()
    testlearner(ConditionalCallback(history, FrequencyThrottle(freq, StepEnd)), batches=16).fit(1)
    assert history.steps == steps


def test_a_frequency_applies_to_one_event_and_counts_steps_not_calls():
    log = EventLog()
    learner = testlearner(ConditionalCallback(log, FrequencyThrottle(3, StepEnd)), batches=4, validation_batches=0)
    learner.fit(1)
    learner.fit(1)
    assert fired(log, "StepEnd") == [3, 6]
    assert fired(log, "StepBegin") == list(range(8))
    log = EventLog()
    testlearner(ConditionalCallback(log, FrequencyThrottle(2, Trigger)), batches=1).fit(5)
    assert fired(log, "Trigger") == [2, 4]
    assert fired(log, "EpochEnd") == [1, 2, 3, 4, 5]


def test_a_frequency_can_apply_to_a_traced_event():
    import jax.numpy as jnp

    class Traced(Callback):
        def stateaccess(self):
            return {"cbstate": {"count": Write()}}

        def init(self, learner):
            if "count" not in learner.cbstate:
                learner.cbstate.count = jnp.int32(0)

        @on
        def count(self, event: UpdateEnd, phase: TrainingPhase, learner):
            learner.cbstate.count = learner.cbstate.count + 1

    learner = testlearner(ConditionalCallback(Traced(), FrequencyThrottle(3, UpdateEnd)), batches=4)
    learner.fit(2)
    assert int(learner.cbstate["count"]) == 2


def test_seconds_match_fluxtraining(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fluxcb._declare.schedules.time.monotonic", lambda: now[0])
    log = EventLog()

    class Takes(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def pass_time(self, event: StepBegin, phase: TrainingPhase, learner):
            now[0] += 4

    learner = testlearner(Takes(), ConditionalCallback(log, TimeThrottle(10, StepEnd)), batches=9, validation_batches=0)
    learner.fit(1)
    # The clock starts with the first step, which ends 4 s after the begin; 16, 28 are at least 10 s later each.
    assert fired(log, "StepEnd") == [4, 7]
    assert len(fired(log, "StepBegin")) == 9


class Asked(CallbackCondition):
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def shouldrun(self, event, phase, learner):
        self.asked.append((event, phase, learner.progress.step))
        return self.answer(event, phase, learner)


def test_a_custom_condition_is_evaluated_before_each_host_handler():
    log = EventLog()
    condition = Asked(lambda event, phase, learner: issubclass(phase, ValidationPhase) and event is StepEnd)
    testlearner(ConditionalCallback(log, condition), batches=1, validation_batches=2).fit(1)
    assert log.entries == [
        ("FitBegin", "training", 0, 0, 0),
        ("StepEnd", "validation", 1, 1, 1),
        ("StepEnd", "validation", 1, 1, 2),
        ("FitStopping", "training", 1, 1, 1),
        ("FitEnd", "training", 1, 1, 1),
    ]
    assert [event.__name__ for event, phase, _ in condition.asked if phase is TrainingPhase] == [
        *("EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger")
    ]


def test_a_condition_has_the_access_of_the_callback():
    shows = Shows()
    condition = Asked(lambda event, phase, learner: learner.cbstate.count > 2)
    testlearner(Counts(), ConditionalCallback(shows, condition), batches=4).fit(1)
    assert shows.seen == [3, 4]


def test_the_base_class_of_conditions():
    assert repr(CallbackCondition()) == "CallbackCondition()"
    with pytest.raises(NotImplementedError):
        CallbackCondition().shouldrun(StepEnd, TrainingPhase, None)
    assert FrequencyThrottle(3, StepEnd).shouldrun(StepEnd, TrainingPhase, None) is True
    assert CallbackCondition().schedule(UpdateEnd, TrainingPhase) is None
    assert CallbackCondition().schedule(FitStopping, TrainingPhase) is None
    assert CallbackCondition().schedule(FitEnd, TrainingPhase) is None
    shown = repr(ConditionalCallback(Recorder(), FrequencyThrottle(2, EpochEnd)))
    assert shown == "ConditionalCallback(Recorder(), FrequencyThrottle(2, EpochEnd))"


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: FrequencyThrottle(10, TrainingPhase),
            f"`FrequencyThrottle` takes an event class, not {TrainingPhase!r}.\n"
            "  fix:   write e.g. `FrequencyThrottle(10, StepEnd)`",
        ),
        (
            lambda: FrequencyThrottle(0, StepEnd),
            "The period of `EverySteps` (steps) must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n  fix:   pass a positive int",
        ),
        (
            lambda: FrequencyThrottle(10, Event),
            f"`FrequencyThrottle` takes an event class, not {Event!r}.\n"
            "  fix:   write e.g. `FrequencyThrottle(10, StepEnd)`",
        ),
        (
            lambda: TimeThrottle(10, StepEnd()),
            "`TimeThrottle` takes an event class, not StepEnd.\n  fix:   write e.g. `TimeThrottle(60, StepEnd)`",
        ),
        (
            lambda: TimeThrottle(0, StepEnd),
            "The period of `EverySeconds` (seconds) must be a number above 0, not 0.\n"
            "  fix:   pass a positive number of seconds",
        ),
        (
            lambda: TimeThrottle(10, UpdateEnd),
            "`TimeThrottle` requires a host event, but UpdateEnd is traced.\n"
            "  why:   the compiled step cannot read the clock\n"
            "  fix:   write `FrequencyThrottle(freq, event)`, or use a host event",
        ),
        (
            lambda: ConditionalCallback(Recorder(), len),
            "`ConditionalCallback` requires a `CallbackCondition`, not <built-in function len>.\n"
            "  fix:   pass e.g. `FrequencyThrottle(10, StepEnd)`, or write a subclass of `CallbackCondition`\n"
            "     or: write `when(callback, function)` for a function of the learner",
        ),
        (
            lambda: ConditionalCallback(3, FrequencyThrottle(10, HostEvent)),
            "`ConditionalCallback` wraps a callback instance, not 3.\n"
            "  fix:   pass e.g. `ConditionalCallback(Recorder(), ...)`",
        ),
    ],
)
def test_invalid_conditions_are_rejected(build, text, refused):
    with refused(DeclarationError, text):
        build()


# --- CallbackFactory --------------------------------------------------------------------------------------------------


def test_the_functions_of_a_factory_run_at_their_events():
    said = []
    factory = CallbackFactory(
        lambda learner: said.append("init"),
        lambda learner: said.append("before"),
        lambda learner: said.append(learner.progress.epoch),
        lambda learner: said.append("after"),
    )
    testlearner(factory).fit(2)
    assert said == ["init", "before", 1, 2, "after"]


def test_after_train_runs_even_after_an_error_and_trigger_can_be_rescheduled():
    said = []

    def stop(learner):
        said.append(learner.progress.step)
        if learner.progress.step == 6:
            raise ValueError("no more")

    factory = CallbackFactory(trigger=stop, after_train=lambda learner: said.append("after"))
    with pytest.raises(ValueError, match="no more"):
        testlearner(PeriodicTrigger(factory, every_k_steps=3), batches=4).fit(3)
    assert said == [3, 6, "after"]


def test_the_functions_need_declared_access():
    def begin(learner):
        learner.cbstate.best = 0

    def stop(learner):
        learner.cbstate.best += 1
        if learner.cbstate.best == 2:
            raise CancelFitting("twice")

    access = {"cbstate": {"best": Write()}, "control": Append()}
    learner = testlearner(CallbackFactory(begin, trigger=stop, access=access))
    learner.fit(5)
    assert (learner.epoch, learner.stop_reason) == (2, "twice")


def named(learner): ...


@pytest.mark.parametrize(
    ("factory", "shown"),
    [
        (lambda: CallbackFactory(trigger=named), "CallbackFactory(named)"),
        (lambda: CallbackFactory(before_train=lambda learner: None, trigger=named), "CallbackFactory(named)"),
        (lambda: CallbackFactory(after_train=lambda learner: None), "CallbackFactory(<lambda>)"),
        (lambda: CallbackFactory(named, name="mine"), "CallbackFactory(mine)"),
    ],
)
def test_the_default_name(factory, shown):
    assert repr(factory()) == shown


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: CallbackFactory(),
            "`CallbackFactory` requires at least one of `init`, `before_train`, `trigger` and `after_train`.\n"
            "  fix:   write e.g. `CallbackFactory(trigger=lambda learner: ...)`",
        ),
        (
            lambda: CallbackFactory(trigger="save"),
            "`trigger` of `CallbackFactory` must be a function of the learner, not 'save'.\n"
            "  fix:   write e.g. `lambda learner: ...`",
        ),
        (
            lambda: CallbackFactory(after_train=test_the_default_name),
            "`after_train` of `CallbackFactory` must be a function of the learner; `test_the_default_name` takes "
            "(factory, shown).\n"
            "  fix:   write `def test_the_default_name(learner):`",
        ),
        (
            lambda: CallbackFactory(int),
            "`init` of `CallbackFactory` must be a function of the learner, not <class 'int'>.\n"
            "  fix:   write e.g. `lambda learner: ...`",
        ),
    ],
)
def test_invalid_factories_are_rejected(build, text, refused):
    with refused(DeclarationError, text):
        build()
