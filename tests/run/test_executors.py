"""Executors run handlers of one moment on threads, with the results of the serial order regardless of timing."""

import json
import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluxcb
from fluxcb import Append, Callback, CancelEpoch, CancelFitting, CancelStep, Read, Write, every, on
from fluxcb.callbacks import CustomCallback
from fluxcb.events import EpochBegin, EpochEnd, FitBegin, FitEnd, StepEnd, Trigger
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner

LONG = 600.0  # a wait that only a deadlock makes last so long (s)


class Acts(CustomCallback):
    """Call a function at one event, with its own access."""

    def __init__(self, function, event=EpochBegin, access=None, name="acts"):
        super().__init__(function, event, TrainingPhase, access=access, name=name)

    def run(self, event, phase, learner):
        self.fn(learner)

    def __repr__(self):
        return self.name


class Alone(Acts):
    main_thread = True


def shared(**permissions):
    return {"cbstate": permissions}


class Creates(Callback):
    """Create entries of `cbstate`."""

    def __init__(self, **values):
        self.values = values

    def stateaccess(self):
        return {"cbstate": dict.fromkeys(self.values, Write())}

    def init(self, learner):
        for name, value in self.values.items():
            setattr(learner.cbstate, name, value)


@contextmanager
def raises(kind, text):
    with pytest.raises(kind) as caught:
        yield caught
    assert str(caught.value) == text


def threads():
    return [thread for thread in threading.enumerate() if thread is not threading.main_thread()]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threads()
    yield
    # Dask keeps some of its own.
    assert [t for t in threads() if t not in before and t.name.startswith("fluxcb")] == []


# --- who runs at the same time --------------------------------------------------------------------------------------


def test_independent_handlers_run_concurrently():
    meet, names = threading.Barrier(3, timeout=LONG), []

    def arrive(learner):
        meet.wait()
        names.append(threading.current_thread().name)

    learner = testlearner(*(Acts(arrive) for _ in range(3)), executor=fluxcb.ThreadExecutor(3))
    learner.fit(1)
    assert sorted(names) == ["fluxcb_0", "fluxcb_1", "fluxcb_2"]


def test_default_runs_eight_independent_handlers_at_once():
    meet, names = threading.Barrier(8, timeout=LONG), []

    def arrive(learner):
        meet.wait()  # nobody passes until all eight are running
        names.append(threading.current_thread().name)

    learner = testlearner(*(Acts(arrive) for _ in range(8)), executor=fluxcb.ThreadExecutor())
    learner.fit(1)
    assert sorted(names) == [f"fluxcb_{i}" for i in range(8)]


def test_own_executor_runs_handlers_and_is_shut_down():
    class Counts(fluxcb.Executor):
        def __init__(self):
            self.jobs, self.opened, self.closed = 0, 0, 0
            self.pool = ThreadPoolExecutor(2, thread_name_prefix="own")

        def open(self):
            self.opened += 1
            return self

        def submit(self, job):
            self.jobs += 1
            return self.pool.submit(job)

        def shutdown(self):
            self.closed += 1

    meet, names = threading.Barrier(2, timeout=LONG), []

    def arrive(learner):
        meet.wait()
        names.append(threading.current_thread().name)

    executor = Counts()
    for _ in range(2):
        testlearner(Acts(arrive), Acts(arrive), executor=executor).fit(1)
    executor.pool.shutdown()
    assert (executor.opened, executor.jobs, executor.closed) == (2, 4, 2)
    assert {name.rpartition("_")[0] for name in names} == {"own"}


def test_one_worker_runs_any_number_of_handlers():
    ran = []
    learner = testlearner(*(Acts(lambda learner: ran.append(1)) for _ in range(100)), executor=fluxcb.ThreadExecutor(1))
    learner.fit(1)
    assert len(ran) == 100


def test_handler_starts_when_its_predecessors_finish():
    # slow -------------+       `slow` ends only when `reader` has run, so the two ran beside each other;
    # writer -> reader -+       the reader sees what the writer wrote.
    reader_ran, seen = threading.Event(), []

    def read(learner):
        seen.append(learner.cbstate.box)
        reader_ran.set()

    def write(learner):
        learner.cbstate.box = "written"

    callbacks = [
        Acts(lambda learner: seen.append(reader_ran.wait(LONG)), name="slow"),
        Acts(read, access=shared(box=Read()), name="reader"),
        Acts(write, access=shared(box=Write()), name="writer"),
        Creates(box="empty"),
    ]
    callbacks[3:] = [fluxcb.in_order(Creates(box="empty"), callbacks[2])]
    del callbacks[2]
    testlearner(*callbacks, executor=fluxcb.ThreadExecutor(2)).fit(1)
    assert seen == ["written", True]


def test_moment_ends_when_all_handlers_finish():
    ended = []
    go = threading.Event()

    def wait(learner):
        go.wait(LONG)
        ended.append("slow")

    def release(learner):
        go.set()

    callbacks = [
        Acts(wait, FitBegin),
        Acts(release, FitBegin),
        Acts(lambda learner: ended.append("EpochBegin")),
    ]
    testlearner(*callbacks, executor=fluxcb.ThreadExecutor(2)).fit(1)
    assert ended == ["slow", "EpochBegin"]


def overlapping(*accesses, expected):
    """Return the highest number of these handlers that ran at the same time; wait for `expected` of them."""
    inside, most, lock = [0], [0], threading.Lock()
    meet = threading.Barrier(expected, timeout=LONG)

    def enter(learner):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        meet.wait()
        time.sleep(0.05)  # gives a handler that must not start yet a chance to start
        with lock:
            inside[0] -= 1

    acts = [Acts(enter, access=access) for access in accesses]
    testlearner(Creates(box={}, other={}), *acts, executor=fluxcb.ThreadExecutor(4)).fit(1)
    return most[0]


@pytest.mark.parametrize(
    ("one", "other", "most"),
    [
        (shared(box=Read()), shared(box=Read()), 2),
        (shared(box={"a": Write()}), shared(box={"b": Write()}), 2),
        (shared(box=Write()), shared(other=Write()), 2),
        (shared(box=Write()), shared(box=Read()), 1),
        # Neither of these is ordered by the graph, but each would race.
        (shared(box=Write()), shared(box=Read(previous=True)), 1),
        (shared(box=Append()), shared(box=Append()), 1),
        (shared(box=Append()), shared(box={"a": Append()}), 1),
        ({"control": Append()}, {}, 1),
    ],
    ids=["reads", "two parts", "two entries", "write, read", "previous", "appends", "hub and name", "cancels"],
)
def test_handlers_sharing_written_state_do_not_overlap(one, other, most):
    assert overlapping(one, other, expected=most) == most


def test_log_records_are_in_serial_order():
    def append(number):
        return Acts(
            lambda learner: learner.cbstate.log.append(number), StepEnd, access=shared(log=Append()), name=f"{number}"
        )

    def train(executor):
        learner = testlearner(Creates(log=[]), *map(append, range(8)), executor=executor)
        learner.fit(2)
        return learner.cbstate["log"]

    assert (
        train(fluxcb.ThreadExecutor(4)) == train(fluxcb.SerialExecutor()) == list(range(8)) * 8
    )  # two epochs of four steps


class NoConflictWriter(Acts):
    def resolveconflict(self, other):
        return fluxcb.NoConflict()


def test_unordered_writers_run_in_serial_order():
    def write(number):
        def act(learner):
            time.sleep(0.02 * (2 - number))  # the first would be the last to write
            learner.cbstate.box = number

        return NoConflictWriter(act, access=shared(box=Write()), name=f"{number}")

    class Box(Creates):
        def resolveconflict(self, other):
            return fluxcb.NoConflict()

    learner = testlearner(Box(box=None), write(0), write(1), write(2), executor=fluxcb.ThreadExecutor(4))
    learner.fit(1)
    assert learner.cbstate["box"] == 2


def test_single_ready_handler_runs_on_calling_thread():
    where = []

    def note(learner):
        where.append(threading.current_thread())

    chain = [Acts(note, access=shared(log=Append())) for _ in range(3)]
    alone = Acts(note, Trigger)
    testlearner(Creates(log=[]), *chain, alone, executor=fluxcb.ThreadExecutor(4)).fit(1)
    assert where == [threading.main_thread()] * 4


def test_threads_start_with_two_ready_handlers_and_end_with_fit():
    seen, base = [], len(threads())

    def count(learner):
        seen.append(len(threads()) - base)

    meet = threading.Barrier(2, timeout=LONG)
    callbacks = [
        Acts(count, FitBegin),
        *(Acts(lambda learner: meet.wait(), EpochBegin) for _ in range(2)),
        Acts(count, FitEnd),
    ]
    testlearner(*callbacks, executor=fluxcb.ThreadExecutor(2)).fit(1)
    assert seen == [0, 2]
    assert len(threads()) == base


def test_fast_handlers_run_on_calling_thread():
    names = []

    def note(learner):
        names.append(threading.current_thread().name)

    testlearner(Acts(note, StepEnd), Acts(note, StepEnd), executor=fluxcb.ThreadExecutor(2), batches=200).fit(2)
    # Each handler's first call goes to a thread, since nobody knows yet what it takes. A later one may, too, if the
    # machine was busy; most do not.
    assert all(name.startswith("fluxcb") for name in names[:2])
    assert names.count("MainThread") > 600


def test_predicate_is_evaluated_after_predecessors():
    ran = []

    def write(learner):
        learner.cbstate.box = learner.progress.epoch

    writer = Acts(write, access=shared(box=Write()))
    reads = Acts(lambda learner: ran.append(learner.progress.epoch), access=shared(box=Read()))
    learner = testlearner(
        fluxcb.in_order(Creates(box=0), writer),
        fluxcb.when(reads, lambda learner: learner.cbstate.box == 2),
        *(Acts(lambda learner: None) for _ in range(3)),
        executor=fluxcb.ThreadExecutor(2),
    )
    learner.fit(3)
    assert ran == [2]


# --- by itself, on the main thread ----------------------------------------------------------------------------------


def test_main_thread_handler_runs_alone_on_calling_thread():
    busy, seen = [], []

    def work(learner):
        busy.append(1)
        time.sleep(0.02)
        busy.pop()

    def look(learner):
        seen.append((threading.current_thread(), list(busy)))

    callbacks = [Acts(work), Acts(work), Alone(look), Acts(work), every(Alone(look), epochs=1), Acts(work)]
    testlearner(*callbacks, executor=fluxcb.ThreadExecutor(4)).fit(1)
    assert seen == [(threading.main_thread(), [])] * 2


def test_handler_that_runs_epoch_requires_main_thread(refused):
    def validate(learner):
        held[0].run_epoch(ValidationPhase())

    def train(kind):
        log = EventLog()
        held[:] = [testlearner(kind(validate, Trigger), log, executor=fluxcb.ThreadExecutor(2))]
        held[0].fit(1)
        return log.names("validation").count("StepEnd")

    held = []
    # At Trigger there are two handlers that nothing orders, so others may be running.
    with refused(
        fluxcb.DeclarationError,
        "A handler requests an epoch of ValidationPhase while other handlers of its moment may be running "
        "on other threads.\n"
        "  why:   it would change the counters and the step that the other handlers read\n"
        "  fix:   write `main_thread = True` in the body of its class: its handlers then run alone, on the thread that "
        "called `fit`",
    ):
        train(Acts)
    assert train(Alone) == 4  # two batches after the epoch, and two that the handler asks for


def test_handler_that_emits_event_requires_main_thread():
    def emit(learner):
        held[0].emit(EpochEnd(), ValidationPhase())

    held = []
    held.append(testlearner(Acts(emit, Trigger), EventLog(), executor=fluxcb.ThreadExecutor(2)))
    with pytest.raises(fluxcb.DeclarationError, match=r"^A handler requests EpochEnd x ValidationPhase while"):
        held[0].fit(1)


# --- the same results -----------------------------------------------------------------------------------------------


class Traces(Callback):
    """Count steps in the carry with a traced handler."""

    def __init__(self, name):
        self.name = name

    def stateaccess(self):
        return {"cbstate": {self.name: Write()}, "step": {"loss": Read()}}

    def init(self, learner):
        setattr(learner.cbstate, self.name, jax.numpy.zeros(()))

    @on(fluxcb.events.BackwardEnd, TrainingPhase)
    def add(self, event, phase, learner):
        setattr(learner.cbstate, self.name, getattr(learner.cbstate, self.name) + learner.step.loss)


class Host(Callback):
    """Compute with declared entries at each event, so that any other order gives other numbers."""

    def __init__(self, number, reads, writes, params, jitter):
        self.number, self.reads, self.writes, self.params, self.jitter = number, reads, writes, params, jitter
        self.name = f"Host{number}"
        self.own = 0

    def stateaccess(self):
        entries = {name: Read() for name in self.reads}
        entries.update({name: Write() for name in self.writes})
        permission = {"read": Read(), "write": Write(), "borrow": Read(borrow=True)}
        params = {"params": permission[self.params]} if self.params else {}
        return {"cbstate": entries, "step": {"loss": Read()}, "hyperparams": {"learning_rate": Read()}, **params}

    def resolveconflict(self, other):
        # The earlier first, and only of two that meet: an order stated for all would leave nothing to do at once.
        if isinstance(other, Host) and (self.touches(other) or other.touches(self)):
            return fluxcb.RunFirst(self if self.number < other.number else other)
        return fluxcb.NotDefined()

    def touches(self, other):
        params = self.params == "write" and other.params is not None
        return params or bool(self.writes & (other.reads | other.writes))

    def init(self, learner):
        for name in self.writes:
            setattr(learner.cbstate, name, 1)

    def _mix(self, learner):
        if self.jitter:
            time.sleep(self.jitter * 1e-4)
        total = self.number + sum(getattr(learner.cbstate, name) for name in self.reads | self.writes)
        if self.params in ("read", "write"):
            total += int(learner.params["w"] * 1000)
        if self.params == "write":
            learner.params = jax.tree.map(lambda x: x * 0.99, learner.params)
        self.own = (self.own * 31 + total) % 10007
        for name in self.writes:
            setattr(learner.cbstate, name, (getattr(learner.cbstate, name) * 7 + self.own) % 10007)

    @on(EpochBegin | EpochEnd | Trigger | FitBegin, Phase, access=None)
    def at_epochs(self, event, phase, learner):
        self._mix(learner)

    @on(StepEnd, TrainingPhase)
    def at_steps(self, event, phase, learner):
        self.own = (self.own * 31 + int(learner.step.loss * 1000)) % 10007
        self._mix(learner)


names = st.frozensets(st.sampled_from("abcd"), max_size=2)
hosts = st.lists(
    st.tuples(names, names, st.sampled_from([None, None, "read", "write", "borrow"])), min_size=2, max_size=6
)


@settings(max_examples=15)
@given(hosts, st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(1, 4), st.integers(1, 5))
def test_results_match_serial_executor(drawn, jitters, workers, length):
    written = frozenset().union(*(writes for _, writes, _ in drawn))

    def train(executor, jitters):
        callbacks = [
            Host(i, reads & written, writes, params, jitter)
            for i, ((reads, writes, params), jitter) in enumerate(zip(drawn, jitters, strict=False))
        ]
        log = EventLog()
        learner = testlearner(
            *callbacks, Traces("sum"), log, fluxcb.callbacks.Metrics(), fluxcb.callbacks.Recorder(),
            batches=5, executor=executor, steps_per_call=length,
        )  # fmt: skip
        learner.fit(2)
        state = {key: value for key, value in learner.state.items() if key != "key"}
        bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
        cbstate = {name: learner.cbstate[name] for name in sorted(written)}
        return (
            bits,
            cbstate,
            [c.own for c in callbacks],
            log.entries,
            learner.cbstate["metrics_step"]["training"]["loss"],
        )

    assert train(fluxcb.ThreadExecutor(workers), jitters) == train(None, [0] * 6)


def test_concurrent_writes_to_parts_of_params_are_both_kept():
    def scale(name, factor):
        def act(learner):
            meet.wait()
            for _ in range(50):
                setattr(learner.params, name, getattr(learner.params, name) + factor)

        return Acts(act, FitBegin, access={"params": {name: Write()}})

    meet = threading.Barrier(2, timeout=LONG)
    learner = testlearner(scale("w", 1.0), scale("b", 2.0), executor=fluxcb.ThreadExecutor(2), learning_rate=0.0)
    learner.fit(1)
    assert learner.params == {"w": 50.0, "b": 100.0}


def test_default_callbacks_print_same_output(capsys):
    def train(executor):
        learner = testlearner(executor=executor, default_callbacks=True)
        learner.fit(2)
        return re.sub(r"[\d.]+ s\b", "- s", capsys.readouterr().out).splitlines()

    lines = train(fluxcb.ThreadExecutor(4))
    assert lines == train(None)
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "epoch", "1", "2", "Training", "Next:"]


# --- errors ---------------------------------------------------------------------------------------------------------


def where(callback):
    code = type(callback).run.__code__
    return f"{type(callback).__name__}.run  {os.path.relpath(code.co_filename)}:{code.co_firstlineno}"


def test_running_handlers_finish_and_others_do_not_start():
    started, ended, failed = threading.Event(), [], threading.Event()

    def slow(learner):
        started.set()
        failed.wait(LONG)
        ended.append("slow")

    def fail(learner):
        started.wait(LONG)
        failed.set()
        raise RuntimeError("boom")

    def late(learner):
        ended.append("late")

    callbacks = [
        Acts(slow, access=shared(box=Append())),
        Acts(fail, access=shared(other=Append())),
        Acts(late, access=shared(other=Append())),
        Acts(lambda learner: ended.append("FitEnd"), FitEnd),
    ]
    learner = testlearner(Creates(box=[], other=[]), *callbacks, executor=fluxcb.ThreadExecutor(4))
    with raises(RuntimeError, "boom") as caught:
        learner.fit(1)
    assert ended == ["slow", "FitEnd"]
    assert caught.value.__notes__ == [
        f"raised by acts #2 in {where(callbacks[1])}, at EpochBegin x TrainingPhase, epoch 1, step 0 (0 in this epoch)"
    ]
    assert learner.stop_reason == "RuntimeError: boom"


def raising(*errors, event=EpochBegin):
    """Return a Learner whose handlers all raise at the same moment."""
    meet = threading.Barrier(len(errors), timeout=LONG)

    def act(error):
        def fail(learner):
            meet.wait()
            raise error

        return Acts(fail, event)

    callbacks = [act(error) for error in errors]
    return testlearner(*callbacks, executor=fluxcb.ThreadExecutor(len(errors))), callbacks


def test_first_error_in_serial_order_is_raised_with_notes_for_others():
    learner, callbacks = raising(KeyError("one"), ValueError("two"), OSError("three"))
    with pytest.raises(KeyError) as caught:
        learner.fit(1)
    place = where(callbacks[0])
    assert caught.value.__notes__ == [
        f"raised by acts in {place}, at EpochBegin x TrainingPhase, epoch 1, step 0 (0 in this epoch)",
        f"and by acts #2 in {place}: ValueError: two",
        f"and by acts #3 in {place}: OSError: three",
    ]


def test_error_takes_precedence_over_cancel():
    learner, _ = raising(CancelFitting("enough"), ValueError("two"))
    with raises(ValueError, "two"):
        learner.fit(1)


def test_first_cancel_in_serial_order_is_raised():
    learner, _ = raising(CancelFitting("first"), CancelFitting("second"))
    learner.fit(3)
    assert (learner.stop_reason, learner.epoch, learner.step) == ("first", 1, 0)


@pytest.mark.parametrize("cancel", [CancelStep, CancelEpoch, CancelFitting])
def test_cancelled_steps_skip_same_handlers_as_serial_executor(cancel):
    def train(executor):
        seen = []

        def stop(learner):
            if learner.progress.step == 3:
                raise cancel("enough")

        def note(name):
            return Acts(
                lambda learner: seen.append((name, learner.progress.step)), StepEnd, access=shared(log=Append())
            )

        first, stops, last = note("first"), Acts(stop, StepEnd, access={"control": Append()}), note("last")
        learner = testlearner(
            Creates(log=[]), fluxcb.in_order(first, stops, last), Acts(lambda learner: None, StepEnd), executor=executor
        )
        learner.fit(2)
        return seen, learner.step, learner.epoch, learner.stop_reason

    found = train(fluxcb.ThreadExecutor(3))
    assert found == train(None)
    assert ("first", 3) in found[0]
    assert ("last", 3) not in found[0]


def test_undeclared_cancel_raises_as_in_serial_executor():
    def stop(learner):
        raise CancelFitting

    texts = []
    for executor in (fluxcb.ThreadExecutor(2), None):
        learner = testlearner(Acts(stop, StepEnd), EventLog(), executor=executor)
        with pytest.raises(fluxcb.AccessError) as caught:
            learner.fit(1)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith("acts raises a Cancel at StepEnd without declaring `control`.")


def test_write_into_read_value_is_reported_for_its_handler():
    meet = threading.Barrier(2, timeout=LONG)

    def write(learner):
        learner.params["w"] = 0
        meet.wait()  # the other ends first, and is not blamed
        done.wait(LONG)

    def innocent(learner):
        _ = learner.params["w"]
        meet.wait()
        done.set()

    done = threading.Event()
    guilty = Acts(write, access={"params": Read()}, name="guilty")
    learner = testlearner(guilty, Acts(innocent, access={"params": Read()}), executor=fluxcb.ThreadExecutor(2))
    with pytest.raises(
        fluxcb.AccessError, match=r"^guilty writes into the container that it read from `params`"
    ) as caught:
        learner.fit(1)
    assert caught.value.__notes__[0].startswith(f"raised by guilty in {where(guilty)}, at EpochBegin x TrainingPhase")


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_failing_and_slow_handlers_among_hundred(workers):
    ran = []

    def act(i):
        def quick(learner):
            ran.append(i)

        def slow(learner):
            time.sleep(0.1)
            ran.append(i)

        def fail(learner):
            raise OSError(f"callback {i} has no disk")

        return Acts({30: slow, 60: fail}.get(i, quick), Trigger, access=shared(log=Append()) if i % 7 == 0 else {})

    learner = testlearner(Creates(log=[]), *map(act, range(100)), executor=fluxcb.ThreadExecutor(workers))
    with raises(OSError, "callback 60 has no disk") as caught:
        learner.fit(2)
    assert len(caught.value.__notes__) == 1
    assert "Trigger x TrainingPhase, epoch 1, step 4 (4 in this epoch)" in caught.value.__notes__[0]
    assert 60 not in ran
    assert len(ran) == len(set(ran))
    assert learner.epoch == 1


def test_threads_end_when_data_or_step_fails():
    def batches():
        yield (np.zeros((16, 1), np.float32),) * 2
        raise OSError("no more")

    class Source:
        def __iter__(self):
            return batches()

    meet = threading.Barrier(2, timeout=LONG)
    acts = [Acts(lambda learner: meet.wait(), FitBegin) for _ in range(2)]
    example = (np.zeros((16, 1), np.float32),) * 2
    learner = testlearner(*acts, data=Source(), example_batch=example, executor=fluxcb.ThreadExecutor(2))
    with pytest.raises(OSError, match="no more"):
        learner.fit(1)
    assert not [t for t in threads() if t.name.startswith("fluxcb")]


# --- loops written by hand, measuring, arguments --------------------------------------------------------------------


def test_run_epoch_uses_threads():
    meet, names = threading.Barrier(2, timeout=LONG), []

    def arrive(learner):
        meet.wait()
        names.append(threading.current_thread().name)

    learner = testlearner(Acts(arrive), Acts(arrive), executor=fluxcb.ThreadExecutor(2))
    learner.run_epoch(TrainingPhase())
    assert sorted(names) == ["fluxcb_0", "fluxcb_1"]


def test_emitted_events_and_run_step_use_calling_thread():
    where = []

    def note(learner):
        where.append(threading.current_thread())

    callbacks = [Acts(note, event) for event in (StepEnd, StepEnd, Trigger, Trigger)]
    learner = testlearner(*callbacks, executor=fluxcb.ThreadExecutor(2))
    learner.run_step(TrainingPhase(), (np.ones((16, 1), np.float32),) * 2)
    learner.trigger()
    assert where == [threading.main_thread()] * 4


class Reads(Callback):
    def __init__(self, name, meet):
        self.name, self.meet = name, meet

    def stateaccess(self):
        return {"params": {self.name: Read()}}

    @on
    def read(self, event: EpochBegin, phase: TrainingPhase, learner):
        self.meet.wait()
        _ = getattr(learner.params, self.name)
        self.meet.wait()

    def __repr__(self):
        return f"Reads({self.name})"


def test_reads_are_measured_per_handler():
    meet = threading.Barrier(2, timeout=LONG)
    learner = testlearner(Reads("w", meet), Reads("b", meet), executor=fluxcb.ThreadExecutor(2))
    learner.callbacks.measure()
    learner.fit(1)
    rows = {row.handler: (row.calls, row.syncs, dict(row.reads)) for row in learner.callbacks.timings()}
    assert rows["Reads(w).read"] == (1, 1, {"params.w": 1})
    assert rows["Reads(b).read"] == (1, 1, {"params.b": 1})


def test_timeline_has_track_for_each_thread(tmp_path):
    meet = threading.Barrier(2, timeout=LONG)
    learner = testlearner(Reads("w", meet), Reads("b", meet), executor=fluxcb.ThreadExecutor(2))
    with learner.callbacks.trace(tmp_path / "trace.json"):
        learner.fit(1)
        learner.fit(1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"host": 1, "device": 2, "fluxcb_0": 3, "fluxcb_1": 4}
    handlers = [(e["args"]["callback"], e["tid"]) for e in events if e["name"] == "Reads.read"]
    assert sorted(tid for _, tid in handlers) == [3, 3, 4, 4]
    for e in events:
        if e["name"] in ("read params.w", "read params.b"):
            assert e["args"]["by"] == "Reads.read"
            assert e["tid"] in (3, 4)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: testlearner(executor=fluxcb.ThreadExecutor),
            "`executor` must be an executor, not the class `ThreadExecutor`.\n"
            "  fix:   write e.g. `executor=fluxcb.ThreadExecutor(4)`",
        ),
        (
            lambda: testlearner(executor=4),
            "`executor` must be an executor, not 4.\n  fix:   write e.g. `executor=fluxcb.ThreadExecutor(4)`",
        ),
        (
            lambda: fluxcb.ThreadExecutor(0),
            "`workers` of `ThreadExecutor` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (
            lambda: fluxcb.DaskExecutor(3),
            "`DaskExecutor` needs a Dask client whose workers are threads of this process, not 3.\n"
            "  why:   handlers share the Learner's memory, which other processes do not have\n"
            "  fix:   start it with `distributed.Client(processes=False)`",
        ),
    ],
)
def test_invalid_arguments_raise(build, text, refused):
    with refused(fluxcb.DeclarationError, text):
        build()


def test_executor_reprs(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", ModuleType("distributed"))
    shown = [repr(e) for e in (fluxcb.SerialExecutor(), fluxcb.ThreadExecutor(3), fluxcb.DaskExecutor())]
    assert shown == ["SerialExecutor()", "ThreadExecutor(3)", "DaskExecutor()"]


def test_function_callbacks_run_on_threads():
    meet = threading.Barrier(2, timeout=LONG)
    calls = [CustomCallback(lambda learner: meet.wait(), FitBegin, name=name) for name in ("one", "two")]
    testlearner(*calls, executor=fluxcb.ThreadExecutor(2)).fit(1)
    assert not meet.broken


# --- Dask -----------------------------------------------------------------------------------------------------------


def test_missing_dask_raises_at_construction(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "distributed", None)  # as if it were not installed
    with refused(
        fluxcb.DeclarationError,
        "`DaskExecutor` needs the package `distributed`, which is not installed.\n"
        "  fix:   `pip install 'fluxcb[dask]'`",
    ):
        fluxcb.DaskExecutor()


@pytest.fixture
def client():
    """A Dask client whose workers are threads of this process."""
    distributed = pytest.importorskip("distributed")
    with distributed.Client(processes=False, dashboard_address=None) as client:
        yield client


def arriving():
    """Return two callbacks that wait for each other, and the names of their threads."""
    meet, names = threading.Barrier(2, timeout=LONG), []

    def arrive(learner):
        meet.wait()
        names.append(threading.current_thread().name)

    return [Acts(arrive), Acts(arrive)], names


def test_handlers_run_on_dask_threads(client):
    callbacks, names = arriving()
    learner = testlearner(*callbacks, executor=fluxcb.DaskExecutor(client))
    learner.fit(1)
    assert ["Dask" in name for name in names] == [True, True]
    assert client.status == "running"  # it is the user's


def test_client_is_started_for_fit():
    pytest.importorskip("distributed")
    callbacks, names = arriving()
    testlearner(*callbacks, executor=fluxcb.DaskExecutor()).fit(1)
    assert ["Dask" in name for name in names] == [True, True]
    assert not [thread for thread in threads() if "Dask-Default" in thread.name]


def test_dask_error_is_error_of_handler(client):
    def fail(learner):
        raise OSError("no disk")

    failing = Acts(fail)
    learner = testlearner(failing, Acts(lambda learner: None), executor=fluxcb.DaskExecutor(client))
    with raises(OSError, "no disk") as caught:
        learner.fit(1)
    assert caught.value.__notes__ == [
        f"raised by acts in {where(failing)}, at EpochBegin x TrainingPhase, epoch 1, step 0 (0 in this epoch)"
    ]


def test_dask_client_with_processes_raises():
    distributed = pytest.importorskip("distributed")
    others = distributed.Client(processes=True, n_workers=1, dashboard_address=None)
    with others, pytest.raises(fluxcb.DeclarationError, match=r"^`DaskExecutor` needs a Dask client whose workers are"):
        fluxcb.DaskExecutor(others)
