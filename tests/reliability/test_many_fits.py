"""300 fits of one Learner and 60 Learners in one process, some of which fail, leave nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("many_fits_run.py")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc"),
]
SAME = ("arrays", "learners", "threads", "descriptors", "handlers", "hooks", "children")


def test_many_fits_and_learners_leave_nothing_behind(times):
    done = subprocess.run([sys.executable, RUN, str(times)], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    nothing, *held = map(json.loads, done.stdout.splitlines())
    kinds = [at["what"] for at in held]
    assert kinds == [
        *["fits of one Learner, None"] * 2,
        *["fits of one Learner, ThreadExecutor(4)"] * 2,
        *["Learners"] * 2,
    ]

    for early, late in zip(held[::2], held[1::2], strict=True):
        assert {name: late[name] for name in SAME} == {name: early[name] for name in SAME}, late["what"]
        assert late["bytes"] - early["bytes"] < 10 * 2**20, late["what"]
        # Of a fit, the metrics of its epoch and steps are kept; of a Learner, nothing is.
        each = 10 * (60 * times - 20) if late["what"] == "Learners" else 20 * (150 * times - 30)
        assert late["objects"] - early["objects"] < each, late["what"]
    # Between the fits of a Learner there is the Learner, and its open logs; after the last one there is nothing.
    last = held[-1]
    # A thread of an imported library may still have run at the beginning.
    kept = [name for name in SAME if name != "threads"]
    assert {name: last[name] for name in kept} == {name: nothing[name] for name in kept}
    assert (last["arrays"], last["learners"], last["threads"]) == (0, 0, ["MainThread"])
