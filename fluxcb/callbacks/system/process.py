"""Run a command with a timeout, so that it cannot block the training."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

__all__ = ["run_command"]

_MOST_CHARACTERS = 500  # from the end of the output


def run_command(arguments: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run a command and wait for it.

    The command has no standard input and is not affected by Ctrl-C. If it takes too long, it is killed together with
    the processes that it has started.

    Args:
        arguments: The program and its arguments.
        environment: The environment variables.
        timeout: Maximum time (seconds).

    Returns:
        A description of the failure with the end of the output, or an empty string if the command succeeded.
    """
    # The output goes to a file, because a background process of the command could keep a pipe open.
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
        except (OSError, ValueError) as error:  # ValueError: an argument contains a NUL character
            return f"the command could not be started: {error}"
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"the command was killed after {timeout:g} s{_output_end(output)}"
        except BaseException:
            _kill(process)
            raise
        return f"the command ended with exit code {code}{_output_end(output)}" if code else ""


def _kill(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
    process.wait()


def _output_end(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _MOST_CHARACTERS))
    text = output.read().decode(errors="replace").strip()
    # Control characters could move the cursor of the terminal that shows the warning.
    text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
    return f", with the output: {text}" if text else ", without output"
