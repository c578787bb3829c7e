"""`Outbox`: deliver records in order on a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

__all__ = ["Outbox"]

_MOST_WAITING = 1000
"""Maximum number of waiting records. When it is exceeded, the oldest record is dropped."""


class Outbox:
    """Deliver records one by one on a background thread, which runs only while records are waiting.

    Args:
        deliver: `deliver(record, timeout)` delivers a record within a time (seconds), or raises an exception.
        timeout: Maximum time for one record, and for `close` (seconds).

    Attributes:
        failures: A message for each failure. The owner removes the messages that it has reported.
    """

    def __init__(self, deliver: Callable[[Mapping[str, Any], float], None], timeout: float) -> None:
        self._deliver = deliver
        self._timeout = timeout
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None
        self.failures: deque[str] = deque(maxlen=_MOST_WAITING)

    def put(self, record: Mapping[str, Any]) -> None:
        """Queue a record for delivery without waiting."""
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                self._waiting.popleft()
                self.failures.append(f"a record was dropped, because more than {_MOST_WAITING} were waiting to be sent")
            self._waiting.append(record)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fluxcb-outbox", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait until all records are delivered, or until the timeout. Records that are left then are dropped."""
        with self._lock:
            thread, self._deadline = self._thread, monotonic() + self._timeout
        if thread is not None:
            thread.join(self._timeout + 1.0)  # `deliver` has the same timeout and needs some time to return
            if thread.is_alive():
                self.failures.append(f"sending a record took longer than the timeout of {self._timeout:g} s")
        with self._lock:
            self._deadline = None
            if self._waiting:
                self.failures.append("some records were dropped, because the fit ended before they were sent")
                self._waiting.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                left = self._timeout if self._deadline is None else self._deadline - monotonic()
                if not self._waiting or left <= 0:
                    self._thread = None
                    return
                record = self._waiting.popleft()
            try:
                self._deliver(record, min(left, self._timeout))
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
