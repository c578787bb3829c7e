"""What a kill does to handlers with a deadline; docs/how-to/upload-while-training.md says the same."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("uploading_run.py")


@pytest.mark.long
def test_call_in_flight_at_kill_is_lost_and_no_other_call_is_lost_or_repeated(tmp_path):
    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(RUN.parents[2]), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(RUN), str(tmp_path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    killed = run("kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    resumed = run()
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    # The parameter falls by 1 at each of the two steps of an epoch. The call of epoch 2 was in flight, and its event
    # precedes the checkpoint.
    assert (tmp_path / "uploads.txt").read_text().splitlines() == ["1 -2.0", "3 -6.0", "4 -8.0"]
