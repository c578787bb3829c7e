"""Running a command so that it cannot hold up a training for longer than it may."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

__all__ = ["run_command"]

_SHOWN = 500  # characters of what it said, the last ones


def run_command(arguments: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run a command and wait for it.

    It reads nothing, and gets no Ctrl-C that is meant for the training. If it takes too long it is killed, with the
    processes that it has started.

    Args:
        arguments: Program and arguments.
        environment: Its environment.
        timeout: How long it may take (seconds).

    Returns:
        What went wrong, with what it said; an empty string if nothing did.
    """
    # A file, because the end of a pipe may be held open by what the command leaves in the background.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # ValueError: a value with a NUL in it
            return f"it could not be started: {error}"
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"it was killed after {timeout:g} s{_said(output)}"
        except BaseException:
            _kill(process)
            raise
        return f"it ended with exit code {code}{_said(output)}" if code else ""


def _kill(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
    process.wait()


def _said(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _SHOWN))
    text = output.read().decode(errors="replace").strip()
    # What moves a terminal's cursor has no place in a warning.
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return f", and said: {text}" if text else ", and said nothing"
