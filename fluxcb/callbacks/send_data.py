"""`SendMonitorData`: send the values of statistics to a web address or a function, as they come."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, FitEnd, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.outbox import Outbox
from fluxcb.callbacks.statistics_sent import latest_of, statistic_names, warn_once

__all__ = ["SendMonitorData"]


class SendMonitorData(Callback):
    """Send statistics to a web address, or a function, each time that all of them have a new value.

    A record is `{"step": 40, "loss": 0.25, "accuracy": 0.9}`: the step at which the last of them came, and their latest
    values. It is sent by POST as JSON (a value that is not finite as `"NaN"`, `"Infinity"`, `"-Infinity"`), or given to
    the function, on a thread beside the training, which never waits for it; only the end of a fit does, for what is
    still to be sent, as long as one record may take.

    What fails gives a warning, the same one once; the record is lost, and the next one is sent again. So does a
    statistic that has no value by the end of a fit.

    Args:
        to: An address, `http://...` or `https://...`, or a function of the record (a dict).
        names: The statistic, or several.
        timeout: How long sending one record may take (seconds).

    Access:
        cbstate.monitors: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host, every 2 seconds).
        EpochEnd, FitEnd x Phase, Trigger x AbstractTrainingPhase (host); all on process 0 only.

    Cost:
        Reads the clock once per step. Fetches nothing, and bounds no window.

    Raises:
        DeclarationError: `to` is no such address and no function, `names` are no names, or `timeout` is no number above
            0.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import InferenceRunner, Monitors, ScalarStats, SendMonitorData
        >>> from fluxcb.testing import testlearner
        >>> import jax.numpy as jnp
        >>> runner = InferenceRunner([(jnp.zeros((4, 1)), jnp.ones((4, 1)))], ScalarStats("loss"))
        >>> learner = testlearner(Monitors(), runner, SendMonitorData(print, "inference/loss"))
        >>> history = learner.fit(2)
        {'step': 4, 'inference/loss': ...}
        {'step': 8, 'inference/loss': ...}

    Source:
        tensorpack, `SendMonitorData`, which runs a shell command at each step that has all values, and waits for it.
    """

    chief_only = True

    def __init__(
        self,
        to: str | Callable[[dict[str, Any]], Any],
        names: str | Sequence[str],
        *,
        timeout: float = 10.0,
    ) -> None:
        self.to = _checked(to)
        self.names = statistic_names(names, "SendMonitorData")
        self.timeout = number_above(0, timeout, "`timeout` of `SendMonitorData` (seconds)")
        self._taken: dict[str, tuple[int, int]] = {}  # by name: the last step looked at, how many of its values
        self._values: dict[str, float] = {}  # of the next record
        self._outbox: Outbox | None = None
        self._said: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Read()}}

    def state_dict(self) -> dict[str, Any]:
        """Return which values have been looked at, and those of the next record."""
        return {"taken": {name: list(at) for name, at in self._taken.items()}, "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take both back."""
        self._taken = {name: (int(at[0]), int(at[1])) for name, at in state["taken"].items()}
        self._values = dict(state["values"])

    @on(StepEnd, AbstractTrainingPhase, when=EverySeconds(2.0))
    def send_now_and_then(self, event: Event, phase: Phase, learner: Any) -> None:
        """Send what was put at the steps before this one, which may get more values."""
        self._send(learner, learner.progress.step - 1)

    @on(EpochEnd, Phase)
    def send_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Send what was put at the steps before this one; those of the validation belong to its last step."""
        self._send(learner, learner.progress.step - 1)

    @on(Trigger, AbstractTrainingPhase)
    def send(self, event: Event, phase: Phase, learner: Any) -> None:
        """Send everything."""
        self._send(learner, learner.progress.step)

    @on(FitEnd, Phase)
    def end(self, event: Event, phase: Phase, learner: Any) -> None:
        """Send the rest, and wait until it is sent."""
        self._send(learner, learner.progress.step)
        _, missing = latest_of(learner.cbstate.monitors, self.names)
        if missing:
            warn_once(self._said, self, f"nothing is sent: {missing}")
        if self._outbox is not None:
            self._outbox.close()
            self._tell()
            self._outbox = None

    def _send(self, learner: Any, until: int) -> None:
        """Send the records of the steps up to `until`."""
        steps: dict[int, dict[str, float]] = {}
        monitors = learner.cbstate.monitors
        for name in self.names:
            latest = monitors.latest(name) if name in monitors else None
            if isinstance(latest, float):
                for step, value in self._new(name, monitors.history(name), until):
                    steps.setdefault(step, {})[name] = value
            elif latest is not None:
                kind = latest.__class__.__name__  # not `type`: it may be a view
                warn_once(self._said, self, f"`{name}` is of the kind {kind}, and only numbers can be sent.")
        for step in sorted(steps):
            self._values.update(steps[step])
            if len(self._values) == len(self.names):
                record = {"step": step, **{name: self._values[name] for name in self.names}}
                self._values = {}
                if self._outbox is None:
                    self._outbox = Outbox(_post_to(self.to), self.timeout)
                self._outbox.put(record)
        self._tell()

    def _new(self, name: str, history: Sequence[tuple[int, float]], until: int) -> list[tuple[int, float]]:
        """Return those of a statistic's values that have not been looked at, and are not of later steps."""
        last, count = self._taken.get(name, (-1, 0))
        begin = len(history)
        while begin and history[begin - 1][0] >= last:  # from the end: histories grow long
            begin -= 1
        fresh = [entry for entry in history[begin:] if entry[0] <= until]
        seen = min(count, sum(step == last for step, _ in fresh))
        fresh = fresh[seen:]
        if fresh:
            step = fresh[-1][0]
            self._taken[name] = (step, sum(s == step for s, _ in fresh) + (seen if step == last else 0))
        return fresh

    def _tell(self) -> None:
        while self._outbox is not None and self._outbox.failures:
            failure = self._outbox.failures.popleft()
            warn_once(self._said, self, failure)

    def __repr__(self) -> str:
        # Addresses of chats and services are secrets, from the path on.
        where = urlsplit(self.to).hostname if isinstance(self.to, str) else getattr(self.to, "__name__", "...")
        return f"SendMonitorData({where}, {', '.join(self.names)})"


def _checked(to: Any) -> str | Callable[[dict[str, Any]], Any]:
    if callable(to):
        return to
    if isinstance(to, str):
        try:
            parts = urlsplit(to)
            if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return to
        except ValueError:  # e.g. a port that is no number
            pass
    raise DeclarationError(
        f"`SendMonitorData` sends to an address or a function, not {to!r}.",
        fix=['e.g. `"https://example.org/losses"`', "a function of the record, e.g. `print`"],
    )


def _post_to(to: str | Callable[[dict[str, Any]], Any]) -> Callable[[Mapping[str, Any], float], None]:
    """Return what delivers a record: `deliver(record, timeout)`."""
    if not isinstance(to, str):
        return lambda record, timeout: to(dict(record))
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        """A redirected POST would become a GET, without the record."""

        def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
            """Follow nothing."""
            return

    opener = build_opener(NoRedirects)

    def post(record: Mapping[str, Any], timeout: float) -> None:
        data = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False).encode()
        try:
            opener.open(Request(to, data, {"Content-Type": "application/json"}), timeout=timeout).close()
        except HTTPError as error:
            error.close()
            raise ConnectionError(f"the server answers {error.code} {error.reason}") from None
        except URLError as error:
            raise ConnectionError(f"the server cannot be reached: {error.reason}") from None
        except HTTPException as error:
            raise ConnectionError(f"the server does not speak HTTP: {type(error).__name__}") from None

    return post


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
