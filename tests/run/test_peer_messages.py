"""Messages between processes. Threads stand for the processes, and a dictionary for the key-value store."""

import random
import threading
import time
from pathlib import Path

import pytest

import fluxcb
from fluxcb import PeerError
from fluxcb._run import peers as peers_module
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.peers import Peers
from tests.processes_as_threads import Process, Store, keep_processes, run_processes


@pytest.fixture(autouse=True)
def _processes_do_not_exit(monkeypatch):
    keep_processes(monkeypatch)


def test_call_returns_value_and_raises_error_of_function():
    def program(process):
        with pytest.raises(KeyError, match="mine"):
            process.peers.call(lambda: {}["mine"])
        return process.peers.call(lambda: process.number)

    assert [process.result for process in run_processes(program)] == [0, 1]


def test_outside_watch_call_runs_function_on_same_thread():
    peers = Peers(0, 2, 30.0, None, "1")
    assert peers.call(lambda: 3) == 3
    peers.wait_until(lambda: False, print)
    peers.mark("nowhere")
    peers.report(RuntimeError())
    assert not peers.lost


FAILED = (
    "Process 1 failed: OSError: no disk\n"
    "  why:   if one process of a run fails, all processes stop\n"
    "  fix:   see the traceback of process 1"
)


def test_failure_is_raised_in_process_that_waits():
    lost = []

    def program(process):
        if process.number == 1:
            raise OSError("no disk")
        try:
            process.peers.wait_until(lambda: False, lost.append)
        finally:
            assert process.peers.lost

    other, failed = run_processes(program)
    assert str(failed.error) == "no disk"
    assert isinstance(other.error, PeerError)
    assert str(other.error) == FAILED
    assert [str(error) for error in lost] == [FAILED]


def test_collective_whose_connection_breaks_raises_cause():
    lost, exited = [], threading.Event()

    def collective():
        exited.wait()
        raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:59562")

    def program(process):
        if process.number == 1:
            exited.set()
            raise OSError("no disk")
        process.peers.call(collective, abandoned=lost.append)

    other, _ = run_processes(program)
    assert str(other.error) == FAILED
    assert isinstance(other.error.__cause__, ValueError)
    assert [str(error) for error in lost] == [FAILED]


def test_other_processes_learn_of_failure_in_collective():
    exited = threading.Event()

    def collective():
        exited.wait()
        raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:59562")

    def program(process):
        if process.number == 0:
            return process.peers.collective(collective)
        try:
            process.peers.collective(lambda: Path("/no/such/file").read_text())
        except OSError:
            # The process takes part in no agreement that would follow.
            assert process.peers.lost
            exited.set()

    other, failed = run_processes(program)
    assert failed.error is None
    assert str(other.error).splitlines()[0] == (
        "Process 1 failed: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    )


def test_collective_returns_value_of_function():
    def program(process):
        return process.peers.collective(lambda: process.number)

    assert [process.result for process in run_processes(program)] == [0, 1]
    assert fluxcb.collective(lambda: 3) == 3  # without other processes


def test_call_after_failure_raises():
    def program(process):
        if process.number == 1:
            raise OSError("no disk")
        with pytest.raises(PeerError):
            process.peers.wait_until(lambda: False, lambda failure: None)
        process.peers.call(lambda: pytest.fail("a collective was called"))

    other, _ = run_processes(program)
    assert str(other.error) == FAILED


def test_process_that_does_not_return_is_ended(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(peers_module, "_GRACE", 0.01)
    monkeypatch.setattr(peers_module, "end_process", lambda process, failure: messages.append(failure) or ended.set())
    messages = []

    def program(process):
        if process.number == 1:
            raise OSError("no disk")
        process.peers.call(ended.wait)

    run_processes(program)
    assert [str(message) for message in messages[:1]] == [FAILED]


def test_agreed_error_is_not_reported():
    gathered = threading.Barrier(2)

    def program(process):
        error = RuntimeError("both")
        process.peers.agreed_on(error)
        process.peers.report(error)
        return process.peers.call(gathered.wait) is not None

    assert [process.result for process in run_processes(program)] == [True, True]


def test_equal_marks_pass():
    def program(process):
        for number in range(5):
            process.peers.mark(f"epoch {number}")
        return "done"

    assert [process.result for process in run_processes(program, count=3)] == ["done"] * 3


def test_different_marks_raise_in_all_processes():
    processes = run_processes(lambda process: process.peers.mark(f"batch of {process.number}"))
    for process in processes:  # whoever compares first reports it, and the other one may relay the report
        lines = str(process.error).splitlines()
        assert lines[0] in {
            "Process 0 and process 1 do not run the same steps.",
            "Process 1 and process 0 do not run the same steps.",
        }
        assert sorted(line.removeprefix("  where:").strip() for line in lines[1:3]) == [
            "process 0: batch of 0",
            "process 1: batch of 1",
        ]


def test_mark_while_other_process_continues_raises():
    def program(process):
        process.peers.call(lambda: None, steps=lambda: 8)
        if process.number == 0:
            process.peers.mark("the data ends")
        else:
            process.peers.call(lambda: None, steps=lambda: 8)
            process.peers.wait_until(lambda: False, lambda failure: None)

    first, second = run_processes(program)
    assert str(second.error) == (
        "Process 1 and process 0 do not run the same steps.\n"
        "  where: process 1: continues with another step\n"
        "         process 0: the data ends\n"
        "  why:   each step is computed by all processes, with batches of the same shape on each\n"
        "  fix:   pass the same number of batches, of the same shapes, to all processes"
    )
    assert str(first.error) == str(second.error).replace(
        "the data ends\n", "the data ends\n         reported by process 1\n"
    )


@pytest.mark.parametrize("seed", range(20))
def test_request_to_stop_reaches_all_processes_at_same_position(seed):
    """Each call stands for a window: it ends when all processes have called it."""
    draw = random.Random(seed)
    count, lengths = draw.choice([2, 3, 5]), [draw.choice([1, 8, 32]) for _ in range(40)]
    requests = {(draw.randrange(count), draw.randrange(30)): draw.random() < 0.5 for _ in range(draw.choice([1, 2]))}
    # A device may run calls later: then the call itself does not wait for the other processes.
    ahead = draw.choice([0, 2])
    windows = [threading.Barrier(count) for _ in lengths]
    requested = []

    def program(process):
        waits = []
        for number, length in enumerate(lengths):
            if (process.number, number) in requests:
                process.pressed.requested = True
                process.pressed.preempted = requests[process.number, number]
                requested.append(number)
            waits.append(windows[number].wait)
            process.peers.call(waits.pop(0) if len(waits) > ahead else lambda: None, steps=lambda: length)  # noqa: B023
            if process.agreed.requested:
                break
        for wait in waits:
            process.peers.call(wait, steps=lambda: 0)
        return number, process.agreed.preempted

    processes = run_processes(program, count)
    results = {process.result for process in processes}
    assert [process.error for process in processes] == [None] * count
    assert len(results) == 1
    ((stopped, preempted),) = results
    assert stopped <= min(requested) + 2 + ahead
    assert preempted or not all(requests.values())


def test_process_that_does_not_respond_is_named():
    def program(process):
        process.peers.mark("begin")
        if process.number == 1:
            process.store.frozen.set()  # its heartbeats end
        process.peers.wait_until(lambda: False, lambda failure: None)

    entries, lock = {}, threading.Lock()
    first, second = (Process(number, 2, entries, lock, program, 0.5) for number in range(2))
    first.start()
    second.start()
    first.join()
    second.store.thawed.set()
    message = str(first.error)
    assert message.startswith("Process 1 has not responded for ")
    assert message.endswith(
        "  why:   it was killed or stopped, its machine is down, or the network is down\n"
        "  fix:   see the output of process 1, then start all processes again with `fit(resume=True)`\n"
        "     or: if it was only slow, give the Learner a longer `peer_timeout`"
    )


def test_no_other_process_is_blamed_if_store_is_silent():
    """Process 0, which has the store, is stopped. The last heartbeats are older than the last answer of the store."""
    store = Store({}, threading.Lock())
    store.frozen.set()
    session = peers_module._Session(1, 3, 1e6, store, "folder", Interrupt, Interrupt)
    now = time.monotonic()
    with session._changed:
        session._beats = {0: ("7", now - 1.1e6), 2: ("7", now - 1.1e6)}
        session._answered = now - 0.9e6
        session._find_silent(1e6)
        assert not session.lost
        session._answered = now - 1.05e6
        session._find_silent(1e6)
        assert session._failure.what.startswith("Process 0 has not responded for ")
    store.thawed.set()
    session.close()
