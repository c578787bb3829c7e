"""Handlers with a deadline run on a thread, with copies of what they declare, until an event waits for them."""

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CancelFitting,
    DeclarationError,
    EverySteps,
    Learner,
    Read,
    ThreadExecutor,
    Write,
    every,
    on,
)
from fluxcb._run.deferred import MAX_WAITING
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.events import (
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    FitBegin,
    FitEnd,
    FitStopping,
    StepBegin,
    StepEnd,
    Trigger,
)
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase

LONG = 60  # seconds, for threads that would otherwise wait forever


def falling(*callbacks, steps=2, **options):
    """Return a Learner whose parameter falls by 1 at each step."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: params["w"] + 0 * jnp.sum(batch),
        fluxcb.inject(optax.sgd, learning_rate=1.0),
        data=[np.zeros(1, np.float32)] * steps,
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


class Log:
    """What has happened, in order, from several threads."""

    def __init__(self):
        self.entries = []
        self.opened = threading.Event()

    def __call__(self, entry):
        self.entries.append(entry)


def uploading(log, deadline, event=EpochEnd, waits=True):
    """Return a callback that reads the parameters after `log.opened`, and records what it has read."""

    class Uploads(Callback):
        def stateaccess(self):
            return {"params": Read(), "hyperparams": Read(), "cbstate": {"notes": Read()}}

        def init(self, learner):
            pass

        @on(event, TrainingPhase, deadline=deadline)
        def upload(self, event, phase, learner):
            if waits:
                assert log.opened.wait(LONG)
            rate = learner.hyperparams["learning_rate"]
            log((float(learner.params["w"]), learner.progress.epoch, float(rate), list(learner.cbstate.notes)))

    return Uploads()


class Notes(Callback):
    """Add to shared state at the end of each epoch and at its beginning, and record all events."""

    def __init__(self, log, opens_at):
        self.log, self.opens_at = log, opens_at

    def stateaccess(self):
        return {"cbstate": {"notes": Write()}}

    def init(self, learner):
        if "notes" not in learner.cbstate:
            learner.cbstate.notes = []

    @on(EpochBegin | EpochEnd | Trigger | FitStopping | FitEnd, TrainingPhase)
    def note(self, event, phase, learner):
        name = f"{type(event).__name__} {learner.progress.epoch}"
        if isinstance(event, EpochBegin):
            learner.cbstate.notes.append(name)
        self.log(name)
        if name == self.opens_at:
            self.log.opened.set()


def entries(deadline, opens_at, *, event=EpochEnd, **options):
    log = Log()
    falling(Notes(log, opens_at), uploading(log, deadline, event), **options).fit(2)
    return log.entries


FIRST, SECOND = (-2.0, 1, 1.0, ["EpochBegin 1"]), (-4.0, 2, 1.0, ["EpochBegin 1", "EpochBegin 2"])


@pytest.mark.parametrize("executor", [None, ThreadExecutor(2)], ids=["serial", "threads"])
def test_training_goes_on_and_handler_sees_values_of_its_moment(executor):
    # The handler of the first epoch does not return before the last event of the training.
    found = entries(FitEnd, "FitStopping 2", executor=executor)
    assert [entry for entry in found if isinstance(entry, str)] == [
        "EpochBegin 1", "EpochEnd 1", "Trigger 1",
        "EpochBegin 2", "EpochEnd 2", "Trigger 2", "FitStopping 2", "FitEnd 2",
    ]  # fmt: skip
    assert found.index(FIRST) < found.index(SECOND) < found.index("FitEnd 2")
    assert found.index(FIRST) > found.index("Trigger 2")


@pytest.mark.parametrize(
    ("deadline", "opens_at", "before"),
    [
        (Trigger, "EpochEnd 1", "Trigger 1"),
        (EpochBegin, "Trigger 1", "EpochBegin 2"),
        (EpochEnd, "EpochBegin 2", "EpochEnd 2"),
        (FitStopping, "Trigger 2", "FitStopping 2"),
        (FitEnd, "FitStopping 2", "FitEnd 2"),
    ],
)
def test_deadline_waits_for_handler(deadline, opens_at, before):
    found = entries(deadline, opens_at)
    assert found.index(opens_at) < found.index(FIRST) < found.index(before)
    assert [entry for entry in found if not isinstance(entry, str)] == [FIRST, SECOND]


def test_deadline_of_same_event_within_epoch_waits_for_previous_call():
    log = Log()

    class Opens(Callback):
        @on(StepEnd, when=EverySteps(3))
        def open(self, event, phase, learner):
            log("step 3")
            log.opened.set()

    class Reads(Callback):
        def stateaccess(self):
            return {"params": Read()}

        @on(StepEnd, TrainingPhase, deadline=StepEnd, when=EverySteps(2))
        def read(self, event, phase, learner):
            assert log.opened.wait(LONG)
            log(float(learner.params["w"]))

    falling(Opens(), Reads(), steps=6, steps_per_call=1).fit(1)
    assert [entry for entry in log.entries if isinstance(entry, float)] == [-2.0, -4.0, -6.0]
    assert log.entries[:2] == ["step 3", -2.0]


def test_queue_is_bounded_and_in_order():
    log, most = Log(), []

    class Reads(Callback):
        started = 0

        def stateaccess(self):
            return {"params": Read()}

        @on(StepEnd, TrainingPhase, deadline=FitEnd)
        def read(self, event, phase, learner):
            log(learner.progress.step)
            most.append(submitted[0] - learner.progress.step)

    submitted = [0]

    class Counts(Callback):
        def runafter(self):
            return (Reads,)

        @on(StepEnd, TrainingPhase)
        def count(self, event, phase, learner):
            submitted[0] = learner.progress.step

    falling(Reads(), Counts(), steps=40).fit(1)
    assert log.entries == list(range(1, 41))
    assert max(most) <= MAX_WAITING


class Fails(Callback):
    def __init__(self, error, deadline=None):
        self.error = error

    def stateaccess(self):
        return {"params": Read()}

    @on(EpochEnd, TrainingPhase, deadline=Trigger)
    def fail(self, event, phase, learner):
        raise self.error


def test_error_is_raised_at_deadline_and_names_handler():
    log = Log()
    learner = falling(Notes(log, ""), Fails(ConnectionError("no network")))
    with pytest.raises(ConnectionError, match="no network") as raised:
        learner.fit(2)
    assert log.entries == ["EpochBegin 1", "EpochEnd 1", "FitEnd 1"]
    (note,) = raised.value.__notes__
    assert note.startswith("raised by Fails() in Fails.fail  ")
    assert note.endswith(
        ", called at EpochEnd x LossTrainingPhase, epoch 1, step 2 (2 in this epoch), with the deadline Trigger"
    )
    learner.callbacks.remove(Fails)
    learner.fit(1)


def test_error_at_end_of_fit_is_raised():
    class FailsLate(Fails):
        @on(Trigger, TrainingPhase, deadline=FitEnd)
        def fail(self, event, phase, learner):
            raise self.error

    log = Log()
    with pytest.raises(ConnectionError):
        falling(Notes(log, ""), FailsLate(ConnectionError("no network"))).fit(1)
    assert log.entries[-1] == "FitEnd 1"


def test_handlers_that_are_running_finish_if_training_fails():
    log = Log()

    class Breaks(Callback):
        @on(EpochBegin, TrainingPhase)
        def fail(self, event, phase, learner):
            if learner.progress.epoch == 2:
                log.opened.set()
                raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        falling(Notes(log, ""), uploading(log, FitEnd), Breaks()).fit(2)
    assert FIRST in log.entries
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fluxcb-deadline")]


def test_cancel_in_handler_with_deadline_is_an_error():
    with pytest.raises(fluxcb.AccessError) as raised:
        falling(Fails(CancelFitting("enough"))).fit(1)
    assert raised.value.what == "Fails() raises CancelFitting in a handler with a deadline."
    assert raised.value.fix == ("leave out `deadline`",)


def test_handler_cannot_write_and_its_copies_do_not_change_state():
    class Changes(Callback):
        def stateaccess(self):
            return {"params": Read(), "cbstate": {"notes": Read()}}

        @on(EpochEnd, TrainingPhase, deadline=FitEnd)
        def change(self, event, phase, learner):
            with pytest.raises(fluxcb.AccessError, match=r"cbstate\.notes"):
                learner.cbstate.notes.append("mine")
            learner.params["w"] = 0.0
            with pytest.raises(fluxcb.AccessError, match="declares only Read"):
                learner.params = {}

    learner = falling(Notes(Log(), ""), Changes())
    learner.fit(1)
    assert learner.cbstate["notes"] == ["EpochBegin 1"]
    assert float(learner.params["w"]) == -2.0


def test_without_fit_handler_runs_at_once():
    log = Log()
    learner = falling(Notes(log, ""), uploading(log, FitEnd, waits=False))
    learner.run_epoch(TrainingPhase())
    assert log.entries == ["EpochBegin 1", "EpochEnd 1", FIRST]


def test_wrapped_handler_keeps_deadline():
    log = Log()
    falling(Notes(log, "FitStopping 2"), every(uploading(log, FitEnd, event=Trigger), epochs=2)).fit(2)
    assert [entry for entry in log.entries if not isinstance(entry, str)] == [SECOND]
    assert log.entries.index(SECOND) > log.entries.index("FitStopping 2")


def test_work_in_flight_at_kill_is_not_repeated_unless_its_event_is(tmp_path):
    """The process is replaced by new objects after an exception, and the unfinished call is dropped."""

    class KilledError(Exception):
        pass

    def program(log, kill_at=None):
        class Kills(Callback):
            @on(Trigger | EpochBegin, AbstractTrainingPhase)
            def kill(self, event, phase, learner):
                if (type(event), learner.progress.epoch) == kill_at:
                    raise KilledError

        return falling(Notes(log, ""), uploading(log, FitEnd, waits=False), Kills(), Checkpointer(tmp_path))

    with pytest.raises(KilledError):
        program(Log(), (EpochBegin, 2)).fit(2)
    log = Log()
    program(log).fit(2, resume=True, allow=("callbacks",))
    # The checkpoint of epoch 1 follows its EpochEnd, so only the second epoch is uploaded.
    assert [entry for entry in log.entries if not isinstance(entry, str)] == [SECOND]


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(event, deadline, access):
    class Refused(Callback):
        def stateaccess(self):
            return access

        @on(event, Phase, deadline=deadline)
        def handle(self, event, phase, learner):
            pass

    with pytest.raises(DeclarationError) as raised:
        fluxcb.check([Refused(), Metrics()])
    error = raised.value
    assert str(error).count("\n  where: Refused.handle  ") == 1
    return error.what, error.why, error.fix


NARROW = (
    "leave out `deadline`",
    'narrow the access of this handler to what it reads: `@on(..., access={"params": Read()})`',
)
COPY = "it runs while training goes on, with a copy of the values that it declares to read"


@pytest.mark.parametrize(
    ("access", "problem"),
    [
        ({"params": Write()}, "writes `params`"),
        ({"hyperparams": {"learning_rate": Write()}}, "writes `hyperparams.learning_rate`"),
        ({"cbstate": {"monitors": Append()}}, "writes `cbstate.monitors`"),
        ({"params": Read(borrow=True)}, "borrows the live arrays of `params`"),
        ({"*": Read()}, "reads more than values: `*`"),
        ({"data": Read()}, "reads more than values: `data`"),
    ],
)
def test_deadline_of_handler_that_does_more_than_read_values_is_refused(access, problem):
    what, why, fix = refused(EpochEnd, FitEnd, access)
    assert (what, why, fix) == (f"`Refused.handle` has a deadline, but {problem}.", COPY, NARROW)


def test_narrowed_access_allows_deadline():
    class Narrowed(Callback):
        def stateaccess(self):
            return {"params": Write()}

        @on(EpochEnd, Phase, deadline=FitEnd, access={"params": Read()})
        def handle(self, event, phase, learner):
            pass

    fluxcb.check([Narrowed()])


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (BackwardEnd, "a traced handler is part of the compiled step"),
        (StepBegin, "the step begins after the handlers of StepBegin have run"),
        (FitEnd, "no event follows FitEnd"),
    ],
)
def test_deadline_at_event_without_later_event_is_refused(event, why):
    assert refused(event, FitEnd, {}) == (
        f"`Refused.handle` has a deadline, but handles {event.__name__}.",
        why,
        ("leave out `deadline`, or handle another host event, e.g. EpochEnd",),
    )


@pytest.mark.parametrize("deadline", [FitBegin, "FitEnd", FitEnd(outcome="finished"), StepEnd])
def test_deadline_that_does_not_wait_is_refused(deadline):
    what, why, fix = refused(EpochEnd, deadline, {})
    assert what == f"The deadline of `Refused.handle` is {deadline!r}, not an event that can wait for it."
    assert why == (
        "these events can wait: EpochBegin, EpochEnd, Trigger, FitStopping, FitEnd, and the event of the handler"
    )
    assert fix == ("write e.g. `deadline=FitEnd`",)
