"""A run is killed at random moments, with forked processes and second starts, and restarted until it ends.

A moment is a number of Python calls, counted from the first line of the program or from its first step. The imports are
done before that line. The long form is `FLUXCB_LONG=17 pytest tests/reliability/test_random_kills.py`: 102 kills.
"""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

pytest.importorskip("tensorboardX")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

pytestmark = pytest.mark.integration

HERE = Path(__file__).resolve().parent
KILLS = 6
# Where counting starts, and the most calls until the signal, from those of an undisturbed run until its first step and
# in all. A start that has fewer calls left ends undisturbed.
MOMENTS = [
    ("first line", lambda begun, calls: begun),
    ("first step", lambda begun, calls: calls - begun),
    ("first line", lambda begun, calls: calls),
    ("first step", lambda begun, calls: (calls - begun) // 4),
]


class Starts:
    """Start the program in new processes.

    Attributes:
        forked: A connection for each start that may have forked a process. The forked processes hold its other end.
    """

    def __init__(self, program, cache: Path) -> None:
        self._program, self._cache = program, cache
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([program.__name__, "orbax.checkpoint", "fluxcb.checkpoints.saving"])
        self._started, self.forked = [], []

    def start(self, folder: Path, *moment, forks=False):
        """Return a new process, and the connection to it."""
        mine, its = self._context.Pipe()
        process = self._context.Process(
            target=self._program.train, args=(str(folder), str(self._cache), its, *moment), kwargs={"forks": forks}
        )
        process.start()
        its.close()
        self._started.append(process)
        if forks:
            self.forked.append(mine)
        return process, mine

    def end_forked(self) -> int:
        """End the live forked processes, and return their number."""
        ended = 0
        for connection in self.forked:
            with contextlib.suppress(OSError):
                connection.send(None)
                # Only a process that holds the other end can receive the message. Each start forks at most one.
                with pytest.raises(EOFError):
                    connection.recv()
                ended += 1
        self.forked.clear()
        return ended

    def close(self) -> None:
        """End all processes."""
        for process in self._started:
            process.kill()
            process.join()
        self.end_forked()


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    sys.path.insert(0, str(HERE))
    import randomly_killed_run

    starts = Starts(randomly_killed_run, tmp_path_factory.mktemp("programs"))
    yield starts
    starts.close()
    sys.path.remove(str(HERE))


def answer(process, connection):
    """Return the first message of a process, or None if it is killed before."""
    wait([connection, process.sentinel])
    return connection.recv() if connection.poll() else None


def finished(process, connection):
    """Return the result of a process that is not killed."""
    found = connection.recv()
    process.join()
    assert process.exitcode == 0
    return found


@pytest.fixture(scope="module")
def undisturbed(starts, tmp_path_factory):
    """Return the outcome of an uninterrupted training, and its number of calls before the first step and in total."""
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome, begun, calls = finished(*starts.start(folder))
    check(folder, outcome, outcome, "undisturbed")
    return outcome, begun, calls


def until_stopped(process) -> None:
    """Wait until all threads of a process have stopped."""
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.is_alive()
        time.sleep(0.001)


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(folder: Path, outcome, expected, told: str) -> None:
    """Compare the outcome with an uninterrupted run, and the logs with the sequence of steps."""
    assert outcome.keys() == expected.keys(), told
    assert [name for name in expected if outcome[name] != expected[name]] == [], told
    check_logs(folder, told)


def check_logs(folder: Path, told: str) -> None:
    steps = list(range(25))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["count"]) for line in lines] == [(step, step) for step in steps], told
    header, *rows = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert header == ["step", "epoch", "time", "count"], told
    assert [(int(row[0]), float(row[3])) for row in rows] == [(step, step) for step in steps], told
    events = event_accumulator.EventAccumulator(str(folder / "events"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("count")] == [(step, step) for step in steps], told
    # No log was set aside, and no dump of an abandoned step is left.
    assert [path.name for path in (folder / "events").iterdir() if path.is_dir()] == [], told
    assert {path.name for path in folder.iterdir()} == {"dumps", "events", "log.csv", "log.jsonl", "run"}, told
    assert sorted(path.name for path in (folder / "dumps").iterdir()) == [f"arrays-{s:08}.npz" for s in steps[1:]], told


def start_again(starts, folder: Path, first) -> bool:
    """Start a run a second time while its first process is stopped, and return whether the second start was refused.

    If the first process was stopped before it had the lock, the second one trains to the end.
    """
    before = files_in(folder)
    found = finished(*starts.start(folder))
    if not isinstance(found, str):
        return False
    holder = f"process {first.pid} on {re.escape(socket.gethostname())}, since [-0-9]+ [:0-9]+|an unknown process"
    assert re.fullmatch(
        f"Another run is writing checkpoints to {re.escape(str(folder / 'run'))}: ({holder})\\.\n"
        "  why:   two runs in one directory would mix their checkpoints\n"
        "  fix:   use a separate directory for each run",
        found,
    )
    assert files_in(folder) == before
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the states of processes are read from /proc")
def test_randomly_killed_run_matches_uninterrupted_run(starts, undisturbed, tmp_path, times):
    expected, begun, calls = undisturbed
    seed = int(os.environ.get("FLUXCB_SEED", "20261122"))
    draw = random.Random(seed)
    folders = [tmp_path / "0"]
    kills, refused, before_first_step = 0, 0, 0
    while kills < KILLS * times:
        folder = folders[-1]
        folder.mkdir(exist_ok=True)
        second = kills % 3 == 2
        origin, most = MOMENTS[kills % 4]
        last = draw.randrange(1, most(begun, calls))
        number, forks = signal.SIGSTOP if second else signal.SIGKILL, origin == "first step" or draw.random() < 0.5
        process, connection = starts.start(folder, origin, last, number, forks=forks)
        told = f"seed {seed}, start after {kills} kills, {last} calls after the {origin}"
        moment = found = answer(process, connection)
        if second and moment in ("starting", "training"):
            until_stopped(process)
            refused += start_again(starts, folder, process)
            if draw.random() < 0.5:
                process.kill()
            else:
                os.kill(process.pid, signal.SIGCONT)
                found = answer(process, connection)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            before_first_step += moment == "starting"
        else:
            assert process.exitcode == 0, told
            check(folder, found[0], expected, told)
            folders.append(tmp_path / str(len(folders)))
    folders[-1].mkdir(exist_ok=True)
    check(folders[-1], finished(*starts.start(folders[-1]))[0], expected, f"seed {seed}, the last start")
    forked = starts.end_forked()
    for folder in folders:
        check_logs(folder, f"seed {seed}, {folder.name}, after the end of the forked processes")
    print(
        f"{kills} kills, {before_first_step} of them before the first step of a start, {forked} forked processes, "
        f"{refused} refused second starts, {len(folders)} trainings, seed {seed}"
    )
    assert min(before_first_step, forked, refused) > 0
