"""Run a script in several processes of this machine, which `jax.distributed` connects."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "run_processes"]

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 250  # s; the scripts end themselves earlier, and say where they waited


class Ended(NamedTuple):
    """A process that has ended: its exit code, negative after a signal, and what it has written."""

    code: int
    stdout: str
    stderr: str


def run_processes(script, count, *arguments, cwd=None, flags="", warnings_are_errors=False, never_ends=None):
    """Run a script in several processes at the same time, and return an `Ended` for each of them.

    The arguments of the script are the number of its process, the number of processes, a free port for
    `jax.distributed`, and `arguments`.

    Args:
        script: The text of the script.
        count: The number of processes.
        *arguments: More arguments of the script.
        cwd: The working directory.
        flags: Flags of XLA, in addition to those of this process.
        warnings_are_errors: Whether a warning is an error in the script.
        never_ends: The number of a process that is killed when all others have ended, or None.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    options = ["-W", "error"] if warnings_are_errors else []
    port = _free_port()
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(count):
            # Files instead of pipes: a process would wait if nobody read from its full pipe.
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            command = [sys.executable, *options, "-c", script, *map(str, (number, count, port, *arguments))]
            process = stack.enter_context(
                subprocess.Popen(command, env=environment, cwd=cwd, stdout=out, stderr=err, text=True)
            )
            stack.callback(process.kill)
            running.append((process, out, err))
        for number, (process, _, _) in enumerate(running):
            if number != never_ends:
                process.wait(timeout=TIMEOUT)
        return [_ended(*one) for one in running]


def _ended(process, out, err):
    process.kill()  # does nothing if it has ended
    code = process.wait()
    for file in (out, err):
        file.seek(0)
    return Ended(code, out.read(), err.read())


def _free_port():
    """Return a port of this machine that nothing uses at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
