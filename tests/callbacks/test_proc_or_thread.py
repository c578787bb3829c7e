"""StartProcOrThread: threads and processes start in order, and none of them outlives the fit."""

import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from fluxcb import Callback, DeclarationError, ThreadExecutor, on
from fluxcb.callbacks import StartProcOrThread
from fluxcb.events import FitBegin, StepEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import testlearner


class Worker(threading.Thread):
    """Waits until it is told to stop; notes when it started and stopped."""

    made: list = []

    def __init__(self, name="worker", log=None, deaf=False):
        super().__init__(name=name, daemon=True)
        self.told, self.log, self.deaf = threading.Event(), [] if log is None else log, deaf
        Worker.made.append(self)

    def start(self):
        self.log.append(f"start {self.name}")
        super().start()

    def run(self):
        self.told.wait()

    def stop(self):
        self.log.append(f"stop {self.name}")
        if not self.deaf:
            self.told.set()


@pytest.fixture(autouse=True)
def workers():
    Worker.made = []
    yield Worker.made
    for worker in Worker.made:  # whatever a test has left
        worker.told.set()
        if worker.ident is not None:
            worker.join()


class Looks(Callback):
    """Notes who is alive in the first step."""

    def __init__(self, alive):
        self.alive, self.seen = alive, []

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(self.alive())


class Fails(Callback):
    def __init__(self, event):
        self.event = event

    @on
    def begin(self, event: FitBegin, phase: Phase, learner):
        if self.event is FitBegin:
            raise ValueError("wrong")

    @on
    def step(self, event: StepEnd, phase: TrainingPhase, learner):
        raise ValueError("wrong")


# --- threads ----------------------------------------------------------------------------------------------------------


def test_threads_start_in_order_and_stop_in_reverse_order(workers):
    log = []
    callback = StartProcOrThread([Worker("a", log), lambda: Worker("b", log)])
    looks = Looks(lambda: [worker.is_alive() for worker in workers])
    testlearner(looks, callback, batches=1).fit(1)
    assert looks.seen == [[True, True]]
    assert log == ["start a", "start b", "stop b", "stop a"]
    assert [worker.is_alive() for worker in workers] == [False, False]


@pytest.mark.parametrize("event", [FitBegin, StepEnd])
def test_they_are_stopped_after_an_error(workers, event):
    with pytest.raises(ValueError, match="wrong"):
        testlearner(StartProcOrThread(Worker), Fails(event)).fit(1)
    assert [worker.is_alive() for worker in workers] == [False]


def test_nothing_starts_when_a_learner_cannot_be_built(workers):
    class FailsToBegin(Callback):
        def init(self, learner):
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        testlearner(StartProcOrThread(Worker), FailsToBegin())
    assert workers == []


def test_started_items_are_stopped_when_the_next_one_fails(workers):
    def fails():
        raise OSError("no such program")

    log = []
    callback = StartProcOrThread([lambda: Worker("a", log), fails, lambda: Worker("c", log)])
    with pytest.raises(OSError, match="no such program"):
        testlearner(callback).fit(1)
    assert log == ["start a", "stop a"]
    assert [worker.is_alive() for worker in workers] == [False]


def test_each_fit_creates_new_threads(workers):
    learner = testlearner(StartProcOrThread(Worker))
    learner.fit(1)
    learner.fit(1)
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def test_a_thread_can_only_be_used_for_one_fit(refused):
    learner = testlearner(StartProcOrThread(Worker("once")))
    learner.fit(1)
    with refused(
        DeclarationError,
        "Worker `once` has already been started.\n"
        "  why:   a thread or process can only be started once, but each fit starts it\n"
        "  fix:   pass a function that returns a new one: `StartProcOrThread(lambda: Thread(...))`",
    ):
        learner.fit(1)


def test_items_that_are_not_stopped_keep_running_and_are_not_restarted(workers):
    learner = testlearner(StartProcOrThread([Worker, lambda: Worker("short")], stop_at_last=False))
    learner.fit(1)
    assert [worker.is_alive() for worker in workers] == [True, True]
    workers[1].told.set()
    workers[1].join()
    learner.fit(1)
    assert [worker.is_alive() for worker in workers] == [True, False, True]


def test_a_plain_thread_can_keep_running_on_request():
    told = threading.Event()
    thread = threading.Thread(target=told.wait)
    testlearner(StartProcOrThread(thread, stop_at_last=False)).fit(1)
    assert thread.is_alive()
    told.set()
    thread.join()


def test_a_thread_that_does_not_stop_is_reported_and_the_others_are_stopped(workers, refused):
    log = []
    callback = StartProcOrThread([lambda: Worker("a", log), lambda: Worker("deaf", log, deaf=True)], timeout=0.05)
    with refused(RuntimeError, "Worker `deaf` is still running 0.05 s after it was told to stop"):
        testlearner(callback).fit(1)
    assert log == ["start a", "start deaf", "stop deaf", "stop a"]
    assert [worker.is_alive() for worker in workers] == [False, True]


def test_a_failing_stop_does_not_prevent_the_others_from_stopping(workers, refused):
    class Broken(Worker):
        def stop(self):
            raise KeyError("told")

    with refused(RuntimeError, "cannot stop Broken `worker`: KeyError('told')"):
        testlearner(StartProcOrThread([Worker, Broken])).fit(1)
    assert [worker.is_alive() for worker in workers] == [False, True]


def test_a_thread_that_has_ended_is_not_told_to_stop():
    class Short(threading.Thread):
        def run(self): ...

        def stop(self):
            raise AssertionError

    thread = Short()
    looks = Looks(lambda: thread.join())
    testlearner(StartProcOrThread(thread), looks).fit(1)


def test_they_start_on_the_thread_that_called_fit(workers):
    where = []

    def make():
        where.append(threading.current_thread())
        return Worker()

    testlearner(StartProcOrThread(make), Looks(bool), executor=ThreadExecutor(2)).fit(1)
    assert where == [threading.main_thread()]
    thread = threading.Thread(target=testlearner(StartProcOrThread(make)).fit, args=(1,))
    thread.start()
    thread.join()
    assert where == [threading.main_thread(), thread]
    assert not any(worker.is_alive() for worker in workers)


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_subprocess_is_terminated_and_ignores_ctrl_c():
    made, said = [], []
    command = (
        "import signal, time; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True); time.sleep(60)"
    )

    def make():
        process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
        said.append(process.stdout.readline())
        process.stdout.close()
        made.append(process)
        return process

    before = signal.getsignal(signal.SIGINT)
    learner = testlearner(StartProcOrThread(make))
    learner.fit(1)
    learner.fit(1)
    assert said == ["True\n", "True\n"]
    assert [process.returncode for process in made] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_does_not_end_is_killed():
    made = []
    command = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )

    def make():
        process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()  # it ignores SIGTERM from here on
        process.stdout.close()
        made.append(process)
        return process

    testlearner(StartProcOrThread(make, timeout=0.1)).fit(1)
    assert [process.returncode for process in made] == [-signal.SIGKILL]


def test_a_process_that_has_ended_is_not_terminated():
    ended = []

    def make():
        ended.append(subprocess.Popen([sys.executable, "-c", ""]))
        ended[0].wait()
        return ended[0]

    testlearner(StartProcOrThread(make)).fit(1)
    assert ended[0].returncode == 0


@pytest.mark.parametrize("factory", [False, True])
def test_a_multiprocessing_process(factory):
    made = []

    def make():
        made.append(multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,)))
        return made[-1]

    testlearner(StartProcOrThread(make if factory else make())).fit(1)
    assert [process.exitcode for process in made] == [-signal.SIGTERM]


# --- what cannot be meant ---------------------------------------------------------------------------------------------


NO_STOP = (
    "  why:   a thread cannot be ended from outside, so it would outlive the fit\n"
    "  fix:   write a subclass of `threading.Thread` whose method `stop` makes its `run` return\n"
    "     or: let it run after the fit: `StartProcOrThread(..., stop_at_last=False)`"
)
NEEDS = (
    "  why:   a thread or process has the methods `start()` and `is_alive()`\n"
    "  fix:   pass a `threading.Thread`, a `multiprocessing.Process`, or `lambda: subprocess.Popen([...])`"
)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: StartProcOrThread([]),
            "`StartProcOrThread` received an empty list.\n"
            "  fix:   pass at least one thread or process, or a function that returns one",
        ),
        (
            lambda: StartProcOrThread(3),
            f"`StartProcOrThread` accepts threads, processes and functions that return them, not 3.\n{NEEDS}",
        ),
        (
            lambda: StartProcOrThread([Worker("a"), "b"]),
            f"`StartProcOrThread` accepts threads, processes and functions that return them, not 'b'.\n{NEEDS}",
        ),
        (
            lambda: StartProcOrThread(threading.Thread(name="plain")),
            f"`StartProcOrThread` cannot stop Thread `plain`, because it has no method `stop()`.\n{NO_STOP}",
        ),
        (
            lambda: StartProcOrThread(lambda name: Worker(name)),
            "`<lambda>`, an argument of `StartProcOrThread`, must be callable without arguments.\n"
            "  why:   each fit calls it to create a new thread or process\n"
            "  fix:   write `lambda: <lambda>(...)`",
        ),
        (
            lambda: StartProcOrThread(Worker("a"), 3),
            "`stop_at_last` of `StartProcOrThread` must be True or False, not 3.\n  fix:   pass True or False",
        ),
        (
            lambda: StartProcOrThread(Worker("a"), timeout=0),
            "`timeout` of `StartProcOrThread` (seconds) must be a number above 0, not 0.\n"
            "  fix:   give a finite number above 0",
        ),
    ],
)
def test_invalid_arguments_are_rejected(build, text, refused):
    with refused(DeclarationError, text):
        build()


def test_a_running_subprocess_is_rejected():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(DeclarationError) as caught:
        StartProcOrThread(process)
    assert re.fullmatch(
        r"`StartProcOrThread` received <Popen: .*>, which is already running\.\n"
        r"  why:   a `Popen` starts when it is created\n"
        r"  fix:   pass a function: `StartProcOrThread\(lambda: subprocess\.Popen\(\[\.\.\.\]\)\)`",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: threading.Thread(name="plain"),
            f"`StartProcOrThread` cannot stop Thread `plain`, because it has no method `stop()`.\n{NO_STOP}",
        ),
        (
            lambda: None,
            f"`StartProcOrThread` accepts threads, processes and functions that return them, not None.\n{NEEDS}",
        ),
    ],
)
def test_the_result_of_a_function_is_checked_before_it_starts(make, text, refused):
    with refused(DeclarationError, text):
        testlearner(StartProcOrThread(make)).fit(1)


def test_the_representation_has_the_names_of_the_items():
    assert repr(StartProcOrThread([Worker, Worker("a")])) == "StartProcOrThread(Worker, Worker `a`)"
