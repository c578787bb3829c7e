"""`SendMonitorData`: send logged statistics to a URL or a function."""

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
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.logging.outbox import Outbox
from fluxcb.callbacks.logging.statistics_sent import latest_of, statistic_names, warn_once

__all__ = ["SendMonitorData"]


class SendMonitorData(Callback):
    """Send statistics to a URL or a function whenever all of them have a new value.

    A record contains the latest values and the step at which the last of them was logged, for example `{"step": 40,
    "loss": 0.25, "accuracy": 0.9}`. It is sent to a URL as JSON with POST, where values that are not finite become
    `"NaN"`, `"Infinity"` or `"-Infinity"`. A function is called with the record. Both happen on a background thread, so
    training does not wait. At the end of a fit, the callback waits until the remaining records are sent, for at most
    `timeout`.

    If sending a record fails, the callback issues a warning, but does not repeat the same warning. It does not send
    this record again. The callback also warns about a statistic that has no value by the end of a fit.

    Args:
        to: A URL, `http://...` or `https://...`, or a function that takes the record (a dict).
        names: Name of one statistic, or several names.
        timeout: Maximum time to send one record (seconds).

    Access:
        cbstate.monitors: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host, every 2 seconds).
        EpochEnd, FitEnd x Phase, Trigger x AbstractTrainingPhase (host); all on process 0 only.

    Cost:
        Reads the clock once per step. Fetches nothing. Does not shorten windows.

    Raises:
        DeclarationError: `to` is neither a URL nor a function, `names` does not contain names, or `timeout` is not a
            positive number.
        MissingStateError: There is no `Monitors`, or no callback logs a statistic (when the Learner is built).

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
        tensorpack, `SendMonitorData`, which runs a shell command at each step that has all values, and waits for the
        command.
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
        self.timeout = finite_number(timeout, "`timeout` of `SendMonitorData` (seconds)", above=0)
        self._taken: dict[str, tuple[int, int]] = {}  # by name: the last processed step, and how many of its values
        self._values: dict[str, float] = {}  # values of the next record
        self._outbox: Outbox | None = None
        self._warned: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Read()}}

    def watched_names(self) -> tuple[str, ...]:
        """Return the names of the statistics."""
        return self.names

    def state_dict(self) -> dict[str, Any]:
        """Return which values have been processed, and the values of the next record."""
        return {"taken": {name: list(at) for name, at in self._taken.items()}, "values": dict(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._taken = {name: (int(at[0]), int(at[1])) for name, at in state["taken"].items()}
        self._values = dict(state["values"])

    @on(StepEnd, AbstractTrainingPhase, when=EverySeconds(2.0))
    def send_steps(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send the values of earlier steps. This step may still get more values."""
        self._send(learner, learner.progress.step - 1)

    @on(EpochEnd, Phase)
    def send_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send the values of earlier steps. The last step may still get values from the validation."""
        self._send(learner, learner.progress.step - 1)

    @on(Trigger, AbstractTrainingPhase)
    def send(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send all values."""
        self._send(learner, learner.progress.step)

    @on(FitEnd, Phase)
    def end(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send the remaining values, and wait until they are sent."""
        self._send(learner, learner.progress.step)
        _, missing = latest_of(learner.cbstate.monitors, self.names)
        if missing:
            warn_once(self._warned, self, f"sent no data: {missing}")
        if self._outbox is not None:
            self._outbox.close()
            self._warn_of_failures()
            self._outbox = None

    def _send(self, learner: LearnerView, until: int) -> None:
        """Send the records of the steps up to `until`."""
        steps: dict[int, dict[str, float]] = {}
        monitors = learner.cbstate.monitors
        for name in self.names:
            latest = monitors.latest(name) if name in monitors else None
            if isinstance(latest, float):
                for step, value in self._new(name, monitors.history(name), until):
                    steps.setdefault(step, {})[name] = value
            elif latest is not None:
                kind = latest.__class__.__name__  # not `type`, because it may be a view
                warn_once(self._warned, self, f"`{name}` is a `{kind}`, and only numbers can be sent.")
        for step in sorted(steps):
            self._values.update(steps[step])
            if len(self._values) == len(self.names):  # all statistics have a new value
                record = {"step": step, **{name: self._values[name] for name in self.names}}
                self._values = {}
                if self._outbox is None:
                    self._outbox = Outbox(_post_to(self.to), self.timeout)
                self._outbox.put(record)
        self._warn_of_failures()

    def _new(self, name: str, history: Sequence[tuple[int, float]], until: int) -> list[tuple[int, float]]:
        """Return the values of a statistic that have not been processed, up to a step."""
        last, count = self._taken.get(name, (-1, 0))
        begin = len(history)
        while begin and history[begin - 1][0] >= last:  # search from the end, because histories can be long
            begin -= 1
        new = [entry for entry in history[begin:] if entry[0] <= until]
        # The last processed step may have received more values since, so its values are counted.
        seen = min(count, sum(step == last for step, _ in new))
        new = new[seen:]
        if new:
            step = new[-1][0]
            self._taken[name] = (step, sum(s == step for s, _ in new) + (seen if step == last else 0))
        return new

    def _warn_of_failures(self) -> None:
        while self._outbox is not None and self._outbox.failures:
            failure = self._outbox.failures.popleft()
            warn_once(self._warned, self, failure)

    def __repr__(self) -> str:
        # Only the host is shown, because the path of a webhook URL is often a secret.
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
        except ValueError:  # e.g. a port that is not a number
            pass
    raise DeclarationError(
        f"`SendMonitorData` sends to a URL or a function, not {to!r}.",
        fix=['write e.g. `"https://example.org/losses"`', "pass a function that takes the record, e.g. `print`"],
    )


def _post_to(to: str | Callable[[dict[str, Any]], Any]) -> Callable[[Mapping[str, Any], float], None]:
    """Return the function `deliver(record, timeout)` for an `Outbox`."""
    if not isinstance(to, str):
        return lambda record, timeout: to(dict(record))
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        """Refuse redirects, because a redirected POST becomes a GET without the record."""

        def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
            """Return None, which refuses the redirect."""
            return

    opener = build_opener(NoRedirects)

    def post(record: Mapping[str, Any], timeout: float) -> None:
        data = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False).encode()
        try:
            opener.open(Request(to, data, {"Content-Type": "application/json"}), timeout=timeout).close()
        except HTTPError as error:
            error.close()
            raise ConnectionError(f"the server responded with {error.code} {error.reason}") from None
        except URLError as error:
            raise ConnectionError(f"cannot reach the server: {error.reason}") from None
        except HTTPException as error:
            raise ConnectionError(f"the response of the server is not valid HTTP: {type(error).__name__}") from None

    return post


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
