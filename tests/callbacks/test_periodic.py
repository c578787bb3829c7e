"""PeriodicTrigger, PeriodicCallback and EnableCallbackIf: when they run, compared with tensorpack."""

import itertools

import jax.numpy as jnp
import pytest

from fluxcb import Callback, DeclarationError, Read, Write, every, on, throttle, when
from fluxcb.callbacks import (
    CallbackFactory,
    EnableCallbackIf,
    LearningRate,
    Metrics,
    PeriodicCallback,
    PeriodicTrigger,
    Scheduler,
    StopOnNaNLoss,
)
from fluxcb.events import EpochEnd, FitBegin, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog, testlearner


class Reads(EventLog):
    """Sees every event, and reads a parameter at the end of a step, so that windows end where it is due."""

    def stateaccess(self):
        return {"params": Read(borrow=True)}

    @on
    def step_end(self, event: StepEnd, phase: TrainingPhase, learner):
        assert jnp.isfinite(learner.params["w"])
        self.record(event, phase, learner)


WINDOWS = pytest.mark.parametrize(
    ("steps_per_call", "log"), [(1, EventLog), (4, EventLog), ("auto", EventLog), (4, Reads)]
)


def fired(log, event):
    """Return the numbers of finished steps at which an event was seen."""
    return [entry[2] for entry in log.entries if entry[0] == event]


def run(wrap, *, batches, epochs, steps_per_call="auto", log=EventLog):
    log = log()
    learner = testlearner(wrap(log), batches=batches, validation_batches=0, steps_per_call=steps_per_call)
    learner.fit(epochs)
    return log


# --- PeriodicTrigger --------------------------------------------------------------------------------------------------


@WINDOWS
@pytest.mark.parametrize(
    ("given", "batches", "epochs", "expected"),
    [
        ({"every_k_steps": 3}, 4, 3, [3, 6, 9, 12]),
        ({"every_k_steps": 5}, 4, 1, []),
        ({"every_k_epochs": 2}, 4, 3, [8]),
        ({"before_train": True}, 4, 3, [0]),
        # Where both periods meet, tensorpack triggers twice: 0, 2, 2, 4, 4.
        ({"every_k_steps": 2, "every_k_epochs": 1, "before_train": True}, 2, 2, [0, 2, 4]),
        ({"every_k_steps": 2, "every_k_epochs": 1}, 3, 2, [2, 3, 4, 6]),
        ({"every_k_steps": 4, "every_k_epochs": 2}, 3, 4, [4, 6, 8, 12]),
    ],
    ids=str,
)
def test_a_callback_is_only_triggered_at_its_periods(given, batches, epochs, expected, steps_per_call, log):
    log = run(
        lambda log: PeriodicTrigger(log, **given),
        batches=batches,
        epochs=epochs,
        steps_per_call=steps_per_call,
        log=log,
    )
    assert fired(log, "Trigger") == expected
    # The other handlers run as ever.
    steps = list(range(1, batches * epochs + 1))
    assert fired(log, "StepEnd") == steps
    assert fired(log, "StepBegin") == [step - 1 for step in steps]
    assert fired(log, "EpochEnd") == steps[batches - 1 :: batches]
    assert fired(log, "FitBegin") == [0]
    assert fired(log, "FitStopping") == fired(log, "FitEnd") == steps[-1:]


def test_a_trigger_runs_after_the_step_and_after_the_beginning_of_the_fit():
    log = run(lambda log: PeriodicTrigger(log, every_k_steps=2, before_train=True), batches=2, epochs=1)
    assert log.names() == [
        *("FitBegin", "Trigger", "EpochBegin", "StepBegin", "StepEnd", "StepBegin", "StepEnd", "Trigger", "EpochEnd"),
        *("FitStopping", "FitEnd"),
    ]


def test_periods_count_from_the_beginning_of_the_training_even_after_a_resume():
    first = testlearner(batches=3, validation_batches=0)
    first.fit(2)
    epochs, steps = EventLog(), EventLog()
    learner = testlearner(
        PeriodicTrigger(epochs, every_k_epochs=2),
        PeriodicTrigger(steps, every_k_steps=4),
        batches=3,
        validation_batches=0,
    )
    learner.state = first.state
    learner.fit(4)  # epochs 3 to 6
    assert [entry[3] for entry in epochs.entries if entry[0] == "Trigger"] == [4, 6]
    assert fired(steps, "Trigger") == [8, 12, 16]


def test_the_period_replaces_every_other_schedule_of_trigger():
    never = lambda log: PeriodicTrigger(EnableCallbackIf(log, lambda learner: False), every_k_steps=2)  # noqa: E731
    assert fired(run(never, batches=4, epochs=1), "Trigger") == [2, 4]
    assert fired(run(never, batches=4, epochs=1), "StepEnd") == []
    rarer = lambda log: PeriodicTrigger(every(log, steps=2), every_k_steps=3)  # noqa: E731
    assert fired(run(rarer, batches=6, epochs=1), "Trigger") == [3, 6]
    outer = lambda log: EnableCallbackIf(PeriodicTrigger(log, every_k_steps=2), lambda learner: False)  # noqa: E731
    assert fired(run(outer, batches=4, epochs=1), "Trigger") == []


def test_a_trigger_before_training_has_the_declared_access_and_runs_after_fit_begin():
    said = []
    callback = CallbackFactory(
        before_train=lambda learner: said.append("begin"),
        trigger=lambda learner: said.append(float(learner.params["w"])),
        access={"params": Read()},
    )
    testlearner(PeriodicTrigger(callback, before_train=True)).fit(1)
    assert said == ["begin", 0.0]


# --- PeriodicCallback -------------------------------------------------------------------------------------------------


@WINDOWS
def test_a_period_of_steps_gates_both_handlers_of_one_step(steps_per_call, log):
    log = run(
        lambda log: PeriodicCallback(log, every_k_steps=2), batches=3, epochs=3, steps_per_call=steps_per_call, log=log
    )
    assert fired(log, "EpochBegin") == [0, 6]
    # In tensorpack, what comes before a step runs at steps 1, 3, 5, 7, 9, what comes after it at 2, 4, 6, 8.
    assert fired(log, "StepBegin") == [1, 3, 5, 7]
    assert fired(log, "StepEnd") == [2, 4, 6, 8]
    assert fired(log, "EpochEnd") == fired(log, "Trigger") == [6]


@WINDOWS
def test_a_period_of_epochs_and_the_last_step_of_the_last_epoch(steps_per_call, log):
    log = run(
        lambda log: PeriodicCallback(log, every_k_epochs=2), batches=3, epochs=3, steps_per_call=steps_per_call, log=log
    )
    inside = [entry[:1] + entry[2:4] for entry in log.entries if not entry[0].startswith("Fit")]
    # As in tensorpack: epoch 3 has its begin and its end, and of its steps the last one.
    assert inside == [
        ("EpochBegin", 3, 2),
        *[(name, step, 2) for n in (4, 5, 6) for name, step in (("StepBegin", n - 1), ("StepEnd", n))],
        ("EpochEnd", 6, 2),
        ("Trigger", 6, 2),
        ("EpochBegin", 6, 3),
        ("StepBegin", 8, 3),
        ("StepEnd", 9, 3),
        ("EpochEnd", 9, 3),
        ("Trigger", 9, 3),
    ]


def test_the_last_epoch_may_be_the_only_one_and_a_fit_of_steps_has_none():
    log = run(lambda log: PeriodicCallback(log, every_k_epochs=5), batches=2, epochs=1)
    assert fired(log, "StepBegin") == [1]
    assert fired(log, "StepEnd") == fired(log, "Trigger") == [2]
    log = EventLog()
    learner = testlearner(PeriodicCallback(log, every_k_epochs=2), batches=2)
    learner.fit(steps=6)
    assert fired(log, "Trigger") == [4]
    learner.fit(2)  # epochs 4 and 5: a multiple, and the last one
    assert fired(log, "Trigger") == [4, 8, 10]


def test_with_both_periods_a_handler_runs_if_either_allows_it():
    log = run(lambda log: PeriodicCallback(log, 5, 2), batches=3, epochs=3)
    assert fired(log, "StepEnd") == [4, 5, 6, 9]
    log = run(lambda log: PeriodicCallback(log, 2, 4), batches=3, epochs=5)  # and the last step, 15
    assert fired(log, "StepEnd") == [2, 4, 6, 8, 10, 11, 12, 14, 15]
    assert fired(log, "Trigger") == [6, 12, 15]


class Unsized:
    """Batches whose number nobody knows."""

    def __iter__(self):
        return iter([(jnp.ones((2, 1)), jnp.ones((2, 1)))] * 3)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_the_last_step_is_unknown_if_the_length_of_the_epoch_is(steps_per_call):
    log = EventLog()
    learner = testlearner(PeriodicCallback(log, every_k_epochs=2), data=Unsized(), steps_per_call=steps_per_call)
    learner.fit(3)
    assert fired(log, "StepBegin") == [3, 4, 5]
    assert fired(log, "StepEnd") == [4, 5, 6]
    assert fired(log, "EpochEnd") == fired(log, "Trigger") == [6, 9]


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_an_epoch_of_validation_has_its_own_last_step(steps_per_call):
    log = EventLog()
    learner = testlearner(
        PeriodicCallback(log, every_k_epochs=5), batches=3, validation_batches=4, steps_per_call=steps_per_call
    )
    learner.fit(2)
    assert log.names("validation") == ["EpochBegin", "StepBegin", "StepEnd", "EpochEnd"]


def test_it_never_adds_calls():
    log = run(lambda log: PeriodicCallback(log, every_k_steps=1), batches=3, epochs=2)
    assert fired(log, "Trigger") == [3, 6]


# --- EnableCallbackIf -------------------------------------------------------------------------------------------------


def between(learner):
    return 2 <= learner.progress.step < 4


class AtEnds(Callback):
    """Has no handler at the begin of anything."""

    def __init__(self):
        self.entries = []

    @on(StepEnd | EpochEnd)
    def see(self, event, phase, learner):
        self.entries.append((type(event).__name__, None, learner.progress.step))


@WINDOWS
@pytest.mark.parametrize("wrap", [EnableCallbackIf, when])
def test_the_result_at_the_beginning_also_applies_to_the_end(wrap, steps_per_call, log):
    log = run(lambda log: wrap(log, between), batches=3, epochs=2, steps_per_call=steps_per_call, log=log)
    assert fired(log, "StepBegin") == [2, 3]
    assert fired(log, "StepEnd") == [3, 4]  # the same steps; in tensorpack those before them
    assert fired(log, "EpochBegin") == [3]
    assert fired(log, "EpochEnd") == [6]  # of the same epoch; in tensorpack of the one before
    assert fired(log, "Trigger") == [3]
    assert fired(log, "FitBegin") == [0]
    assert fired(log, "FitStopping") == fired(log, "FitEnd") == [6]


def test_handlers_without_a_begin_event_are_checked_at_the_end():
    log = run(lambda log: EnableCallbackIf(log, between), batches=3, epochs=2, log=AtEnds)
    assert fired(log, "StepEnd") == [2, 3]
    assert fired(log, "EpochEnd") == [3]


@pytest.mark.parametrize("numbers", [(True, False), (True, False, False), (False, True, True, False, True)])
def test_a_changing_predicate_still_runs_the_matching_end_handler(numbers):
    answers = itertools.cycle(numbers)
    log = run(lambda log: EnableCallbackIf(log, lambda learner: next(answers)), batches=5, epochs=4)
    assert [step + 1 for step in fired(log, "StepBegin")] == fired(log, "StepEnd")
    assert [step + 5 for step in fired(log, "EpochBegin")] == fired(log, "EpochEnd")
    assert 0 < len(fired(log, "StepBegin")) < 20


def test_results_are_not_shared_between_phases():
    log = EventLog()
    learner = testlearner(EnableCallbackIf(log, lambda learner: learner.progress.epoch == 2), batches=2)
    learner.fit(3)
    for phase, steps in (("training", 2), ("validation", 2)):
        pairs = ["EpochBegin", *["StepBegin", "StepEnd"] * steps, "EpochEnd"]
        trigger = ["Trigger"] if phase == "training" else []
        names = [name for name in log.names(phase) if not name.startswith("Fit")]
        assert names == pairs + trigger


# --- what cannot be meant ---------------------------------------------------------------------------------------------


class OnlyEpochEnd(Callback):
    @on
    def work(self, event: EpochEnd, phase: TrainingPhase, learner): ...

    @on
    def begin(self, event: FitBegin, phase: TrainingPhase, learner): ...


class OnlyTraced(Callback):
    def stateaccess(self):
        return {"cbstate": {"count": Write()}}

    @on
    def count(self, event: UpdateEnd, phase: TrainingPhase, learner): ...


def never(learner):
    return False


WHOLE = "  why:   periods and counts are whole numbers of steps or epochs\n  fix:   pass a positive int"
TRACED = (
    "  why:   traced handlers are compiled into the step, and run at every step unless `traced=True` schedules them\n"
    "  fix:   write `every(callback, steps=..., traced=True)` or `every(callback, epochs=..., traced=True)`"
)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: PeriodicTrigger(EventLog()),
            "`PeriodicTrigger` requires `every_k_steps`, `every_k_epochs` or `before_train`.\n"
            "  why:   without any of them, the callback would never be triggered\n"
            "  fix:   write e.g. `PeriodicTrigger(callback, every_k_epochs=5)`",
        ),
        (
            lambda: PeriodicTrigger(EventLog(), every_k_steps=0),
            f"`every_k_steps` of `PeriodicTrigger` must be a whole number of at least 1, not 0.\n{WHOLE}",
        ),
        (
            lambda: PeriodicTrigger(EventLog(), every_k_epochs=2.5),
            f"`every_k_epochs` of `PeriodicTrigger` must be a whole number of at least 1, not 2.5.\n{WHOLE}",
        ),
        (
            lambda: PeriodicTrigger(EventLog(), before_train=3),
            "`before_train` of `PeriodicTrigger` must be True or False, not 3.\n  fix:   pass True or False",
        ),
        (
            lambda: PeriodicTrigger(OnlyEpochEnd(), every_k_steps=3),
            "OnlyEpochEnd() has no handler of Trigger, which is the only event that `PeriodicTrigger` schedules.\n"
            "  why:   it handles EpochEnd, FitBegin\n"
            "  fix:   write `every(callback, steps=...)` or `every(callback, epochs=...)`, which schedules all its "
            "host handlers",
        ),
        (
            lambda: PeriodicTrigger(Callback(), every_k_steps=3),
            "Callback() has no handler of Trigger, which is the only event that `PeriodicTrigger` schedules.\n"
            "  why:   it handles nothing\n"
            "  fix:   write `every(callback, steps=...)` or `every(callback, epochs=...)`, which schedules all its "
            "host handlers",
        ),
        (
            lambda: PeriodicTrigger(when(PeriodicTrigger(EventLog(), 2), never), every_k_steps=3),
            "`PeriodicTrigger` wraps PeriodicTrigger(EventLog(), every_k_steps=2), which already has a "
            "period.\n"
            "  why:   a callback can only have one period in steps and one in epochs\n"
            "  fix:   use a single `PeriodicTrigger` with `every_k_steps` and `every_k_epochs`",
        ),
        (
            lambda: PeriodicTrigger(EventLog, 3),
            f"`PeriodicTrigger` wraps a callback instance, not {EventLog!r}.\n"
            "  fix:   pass e.g. `PeriodicTrigger(EventLog(), ...)`",
        ),
        (
            lambda: PeriodicCallback(EventLog()),
            "`PeriodicCallback` requires `every_k_steps` or `every_k_epochs`.\n"
            "  fix:   write e.g. `PeriodicCallback(callback, every_k_epochs=5)`",
        ),
        (
            lambda: PeriodicCallback(EventLog(), every_k_epochs=-1),
            f"`every_k_epochs` of `PeriodicCallback` must be a whole number of at least 1, not -1.\n{WHOLE}",
        ),
        (
            lambda: PeriodicCallback(OnlyTraced(), 3),
            f"OnlyTraced() has no host handlers, but `PeriodicCallback` schedules only host handlers.\n{TRACED}",
        ),
        (
            lambda: EnableCallbackIf(OnlyTraced(), never),
            f"OnlyTraced() has no host handlers, but `EnableCallbackIf` schedules only host handlers.\n{TRACED}",
        ),
        (
            lambda: EnableCallbackIf(EventLog(), True),
            "`pred` of `EnableCallbackIf` must be a function of the learner, not True.\n"
            "  fix:   write e.g. `lambda learner: learner.progress.epoch > 3`",
        ),
        (
            lambda: EnableCallbackIf(3, never),
            "`EnableCallbackIf` wraps a callback instance, not 3.\n"
            "  fix:   pass e.g. `EnableCallbackIf(Recorder(), ...)`",
        ),
    ],
)
def test_invalid_arguments_are_rejected(build, text, refused):
    with refused(DeclarationError, text):
        build()


def test_the_representations_of_the_wrappers():
    log = EventLog()
    assert repr(PeriodicTrigger(log, 3, 2, True)) == (
        "PeriodicTrigger(EventLog(), every_k_steps=3, every_k_epochs=2, before_train=True)"
    )
    assert repr(PeriodicCallback(log, every_k_epochs=2)) == "PeriodicCallback(EventLog(), every_k_epochs=2)"
    assert repr(EnableCallbackIf(log, never)) == "EnableCallbackIf(EventLog(), never)"


def test_chief_only_also_applies_to_trigger():
    # What is said of the wrapped callback counts at the moment that the wrapper adds.
    entries = PeriodicTrigger(CallbackFactory(trigger=print), before_train=True).handlers()
    assert [(entry.event, entry.name) for entry in entries] == [(Trigger, "trigger"), (FitBegin, "begin")]


SWITCHING = "To switch it on and off, write `switchable(callback)` and call `learner.callbacks.enable` and `disable`."
TO_SCHEDULE = "To schedule it as well, write `traced=True` with `steps=` or `epochs=`."


@pytest.mark.parametrize(
    ("wrap", "wrapper", "advice"),
    [
        (lambda callback: every(callback, steps=2), "every", TO_SCHEDULE),
        (lambda callback: every(callback, seconds=1), "every", TO_SCHEDULE),
        (lambda callback: when(callback, never), "when", SWITCHING),
        (lambda callback: EnableCallbackIf(callback, never), "EnableCallbackIf", SWITCHING),
        (
            lambda callback: PeriodicCallback(callback, 2),
            "PeriodicCallback",
            "To schedule it as well, write `every(callback, steps=..., traced=True)`.",
        ),
    ],
)
def test_traced_handlers_that_change_training_and_have_no_schedule_give_warning(wrap, wrapper, advice):
    with pytest.warns(UserWarning, match="schedules only") as caught:
        wrap(StopOnNaNLoss())
    assert [str(warning.message) for warning in caught] == [
        f"`{wrapper}` schedules only the host handlers of StopOnNaNLoss(). Its traced handler `mark` writes "
        f"`step.skip`, and runs at every step. {advice}"
    ]
    assert caught[0].filename == __file__
    wrap(EventLog())
    with pytest.raises(DeclarationError, match=r"^Scheduler\(learning_rate\) has no host handlers"):
        wrap(Scheduler({LearningRate: 0.5}))
    every(Scheduler({LearningRate: 0.5}), steps=2, traced=True)


@pytest.mark.parametrize(
    ("wrapper", "wrap"),
    [
        ("every", lambda callback: every(callback, steps=2)),
        ("every", lambda callback: every(callback, seconds=2)),
        ("every", lambda callback: every(every(callback, epochs=2), steps=2, traced=True)),
        ("throttle", lambda callback: throttle(callback, StepEnd, freq=2)),
        ("when", lambda callback: when(callback, never)),
        ("PeriodicCallback", lambda callback: PeriodicCallback(callback, 2)),
        ("PeriodicCallback", lambda callback: PeriodicCallback(callback, every_k_epochs=2)),
        ("EnableCallbackIf", lambda callback: EnableCallbackIf(callback, never)),
    ],
)
def test_wrappers_do_not_skip_steps_of_metrics(wrapper, wrap):
    with pytest.raises(DeclarationError, match=rf"`{wrapper}` would skip steps of Metrics\(\)"):
        wrap(Metrics())


def test_metrics_of_every_second_epoch():
    plain, scheduled = (testlearner(metrics).fit(4) for metrics in (Metrics(), every(Metrics(), epochs=2)))
    for phase in ("training", "validation"):
        expected = plain.to_dict()["per_epoch"][phase]["loss"]
        found = scheduled.to_dict()["per_epoch"][phase]["loss"]
        assert found == {"epochs": [2, 4], "values": expected["values"][1::2]}
