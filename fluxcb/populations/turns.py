"""Threads that take turns: exactly one of them runs at any time, in a fixed order."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Turn"]


class _Abandoned(BaseException):
    """Ends a thread whose caller was interrupted and no longer waits for it."""


class Turn:
    """A function that runs on its own thread, but only between `resume` and its next `park`.

    A member of a population runs the loop of its Learner here, and parks where it has to wait for the other members.
    Because the caller waits while the function runs, there is never more than one running thread, and the order of
    all operations is fixed.

    Args:
        function: The function.
        name: The name of the thread.

    Attributes:
        waits_for: The argument of `park`, while the function is parked there.
        ended: Whether the function has ended.
        result: What the function returned.
        error: The exception that ended it, or None.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        # Locks instead of semaphores, because these are Python objects and take ten times as long.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._answer: Any = None
        self._failure: BaseException | None = None
        self._running = False
        self.waits_for: Any = None
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        # A daemon, because the thread may stay parked forever after a second Ctrl-C.
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self._failure is not None:
                raise self._failure
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()

    def resume(self, answer: Any = None, failure: BaseException | None = None) -> None:
        """Run the function until it parks or ends.

        Args:
            answer: What `park` returns to the function.
            failure: An exception that `park` raises instead.
        """
        self._answer, self._failure, self.waits_for, self._running = answer, failure, None, True
        self._go.release()
        self._back.acquire()
        self._running = False
        if self.ended:
            self._thread.join()

    def park(self, waits_for: Any) -> Any:
        """Wait on the function's own thread until the caller resumes it; return the answer.

        Args:
            waits_for: What the caller has to do before.
        """
        self.waits_for = waits_for
        self._back.release()
        self._go.acquire()
        if self._failure is not None:
            raise self._failure
        return self._answer

    def abandon(self) -> None:
        """End the function at the place where it is parked. Its handlers and `finally` blocks run.

        A function that is running cannot be ended, which is so if an exception has interrupted `resume`.
        """
        while not (self.ended or self._running):
            self.resume(failure=_Abandoned("the population was interrupted"))
