"""Many fits and Learners in one process, some of which fail. It regularly prints the remaining resources.

To run ten times as many: `python tests/reliability/many_fits_run.py 10`.
"""

import ctypes
import gc
import io
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import jax

import fluxcb
import fluxcb.callbacks as library
from fluxcb import Append, CancelFitting, Read
from fluxcb.callbacks import CustomCallback
from fluxcb.events import StepEnd
from fluxcb.logging import CSVBackend, JSONLinesBackend
from fluxcb.testing import testlearner

LIBC = ctypes.CDLL(None)
EXECUTORS = (None, fluxcb.ThreadExecutor(4))


class Ends(CustomCallback):
    """End each fit in a different way: normally, by an error, by a cancel, by Ctrl-C, and by two of these."""

    WAYS = ("runs", "fails", "cancels", "interrupted", "interrupted twice")

    def __init__(self):
        self.way = "runs"
        super().__init__(self.end, StepEnd, access={"control": Append()}, name="ends")

    def end(self, learner):
        if learner.progress.step_in_epoch != 2:
            return
        if self.way == "fails":
            raise OSError("no disk")
        if self.way == "cancels":
            raise CancelFitting("enough")
        if self.way.startswith("interrupted"):
            signal.raise_signal(signal.SIGINT)
        if self.way == "interrupted twice":
            signal.raise_signal(signal.SIGINT)


class LogsLoss(CustomCallback):
    def __init__(self):
        super().__init__(self.log, StepEnd, access={"step": {"loss": Read()}, "cbstate": {"monitors": Append()}})

    def log(self, learner):
        learner.cbstate.monitors.put_scalar("loss", learner.step.loss)


class Idle(threading.Thread):
    def __init__(self):
        super().__init__(name="fluxcb-idle", daemon=True)
        self._over = threading.Event()
        self.stop = self._over.set

    def run(self):
        self._over.wait()


def learner_in(folder, executor):
    """Return a Learner whose callbacks hold files, threads and memory during training."""
    ends = Ends()
    monitors = library.Monitors(JSONLinesBackend(folder / "log.jsonl"), CSVBackend(folder / "log.csv"), history=20)
    learner = testlearner(
        ends, monitors, LogsLoss(), library.Metrics(), library.Recorder(), library.LogMetrics(),
        library.ProgressBar(io.StringIO()), library.StepTimeout(300), library.StartProcOrThread(Idle),
        library.SendMonitorData(lambda record: None, "loss"), library.ParameterEMA(),
        executor=executor,
    )  # fmt: skip
    return learner, ends


def fit(learner, ends, way):
    """Train for an epoch, and check that it ended as intended."""
    ends.way = way
    ended = "runs"
    try:
        learner.fit(1)
    except OSError:
        ended = "fails"
    except KeyboardInterrupt:
        ended = "interrupted"
    else:
        ended = "cancels" if learner.stop_reason == "enough" else "runs"
    assert way.startswith(ended), (way, ended)


def left(what):
    """Print the remaining resources."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)  # what malloc keeps for later is no leak
    signals = sorted(number for number in signal.valid_signals() if isinstance(number, signal.Signals))
    state = {
        "what": what,
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "objects": sys.getallocatedblocks(),
        "arrays": len(jax.live_arrays()),
        "learners": sum(isinstance(thing, fluxcb.Learner) for thing in gc.get_objects()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "handlers": {number.name: str(signal.getsignal(number)) for number in signals},
        "hooks": [str(sys.excepthook), str(threading.excepthook), sys.getswitchinterval(), gc.isenabled()],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }
    print(json.dumps(state), flush=True)


def one_learner(folder, times):
    """Fit one Learner repeatedly."""
    for number, executor in enumerate(EXECUTORS):
        inside = folder / f"one{number}"
        inside.mkdir()
        learner, ends = learner_in(inside, executor)
        for turn in range(75 * times):
            if turn == 30:
                left(f"fits of one Learner, {executor}")
            fit(learner, ends, Ends.WAYS[turn % len(Ends.WAYS)])
        left(f"fits of one Learner, {executor}")
        del learner, ends


def many_learners(folder, times):
    """Build Learners, train them briefly, and drop them; every fifth one is never trained."""
    for turn in range(30 * times):
        if turn == 20:
            left("Learners")
        inside = folder / f"many{turn}"
        inside.mkdir()
        learner, ends = learner_in(inside, EXECUTORS[turn % 2])
        for way in Ends.WAYS[: turn % 5]:
            fit(learner, ends, way)
        del learner, ends
    left("Learners")


if __name__ == "__main__":
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name:
        left("nothing")
        one_learner(Path(name), int(sys.argv[1]))
        many_learners(Path(name), int(sys.argv[1]))
