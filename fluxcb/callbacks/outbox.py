"""`Outbox`: records that are delivered in order, while the training goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

__all__ = ["Outbox"]

_LONGEST = 1000
"""How many records wait at most; then the oldest are lost."""


class Outbox:
    """Deliver records one after the other on a thread, which lives while there are some.

    Args:
        deliver: `deliver(record, timeout)` delivers one within some seconds, or raises.
        timeout: How long one may take (seconds), and how long `close` waits.

    Attributes:
        failures: What went wrong, one text each time, for the owner to take out.
    """

    def __init__(self, deliver: Callable[[Mapping[str, Any], float], None], timeout: float) -> None:
        self._deliver = deliver
        self._timeout = timeout
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None
        self.failures: deque[str] = deque(maxlen=_LONGEST)

    def put(self, record: Mapping[str, Any]) -> None:
        """Have a record delivered; this does not wait."""
        with self._lock:
            if len(self._waiting) == _LONGEST:
                self._waiting.popleft()
                self.failures.append(f"records are lost: more than {_LONGEST} wait to be sent")
            self._waiting.append(record)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="fluxcb-outbox", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for what is to be delivered, as long as one record may take; the rest is lost."""
        with self._lock:
            thread, self._deadline = self._thread, monotonic() + self._timeout
        if thread is not None:
            thread.join(self._timeout + 1.0)  # some time to give up in
            if thread.is_alive():
                self.failures.append(f"a record is still being sent after {self._timeout:g} s, and is not waited for")
        with self._lock:
            self._deadline = None
            if self._waiting:
                self.failures.append("records are lost: not all could be sent before the fit ended")
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
