"""The end of a process of a training in which another process failed or is lost.

JAX's own exit handlers wait minutes for processes that do not come. If process 0 ends first, they abort.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from fluxcb._errors import PeerError

__all__ = ["ProcessExit", "end_process"]

_LINGER = 5.0  # seconds that process 0 waits for the others, which read its message in the store that it hosts
_STDERR = 2  # the file descriptor: `sys.stderr` may be locked by another thread
_LAST = 0.5  # seconds that a process needs to exit after it has reported its end


def end_process(process: int, failure: PeerError) -> None:
    """Print a failure and end the process."""
    os.write(_STDERR, f"fluxcb ends process {process}:\n{failure}\n".encode())
    os._exit(1)


class ProcessExit:
    """How a process ends.

    While one exists, an abort of JAX's coordination client becomes an error message and exit code 1. If process 0 is
    lost, the client of every other process calls `abort` from a thread of C++, and `jax.distributed` has no setting for
    that (jax 0.7 to 0.12). A signal handler of Python would run too late, so this one is a C function.

    Args:
        process: The index of this process.
        others_ended: Returns whether the other processes have reported their ends.
        lost: Takes the failure that process 0 has ended, and returns the first failure that is known.
    """

    def __init__(self, process: int, others_ended: Callable[[], bool], lost: Callable[[PeerError], PeerError]) -> None:
        self._process, self._others_ended, self._lost = process, others_ended, lost
        self._registered: Callable[[], None] | None = None
        # The C function must live as long as the handler is installed.
        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
        self._before = _set_abort_handler(ctypes.cast(self._handler, ctypes.c_void_p))
        _exits.append(self)

    def _aborted(self, _: int) -> None:
        failure = self._lost(
            PeerError(
                "Process 0 has ended, and with it JAX's coordination service.",
                why="it failed or was killed, or its machine is down",
                fix="see the output of process 0, then start all processes again with `fit(resume=True)`",
            )
        )
        time.sleep(_LINGER)  # this thread is not needed, and the training thread raises the failure meanwhile
        end_process(self._process, failure)

    def as_usual(self) -> None:
        """Exit with JAX's own handlers again: all processes have finished a fit together."""
        while _exits:
            other = _exits.pop()
            if other._registered is not None:
                atexit.unregister(other._registered)
            _set_abort_handler(other._before)

    def without_jax(self, error: BaseException) -> None:
        """Skip JAX's exit handlers.

        The exit code is 1 even if the program handles the error, because the training of the other processes failed.

        Args:
            error: Why this process ended the training.
        """

        def end() -> None:
            code = 1
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            until = time.monotonic() + _LINGER
            while self._process == 0 and time.monotonic() < until:
                if self._others_ended():
                    time.sleep(_LAST)
                    break
                time.sleep(0.05)
            # `os._exit` skips the exit handler of `logging`, and discards the buffers of the streams.
            logging.shutdown()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

        # Handlers run in reverse order, so those that the program registered before the fit are skipped.
        self._registered = atexit.register(end)


_exits: list[ProcessExit] = []  # of the fits since all processes last finished one together


def _set_abort_handler(handler: Any) -> Any:
    """Set the handler of SIGABRT to a C function, and return the one before."""
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return libc.signal(signal.SIGABRT, handler)
