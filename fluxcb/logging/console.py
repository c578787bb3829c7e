"""`ConsoleBackend`: the values of an epoch, on a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import IO, Any

from fluxcb._errors import DeclarationError
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.consoles import console_for, print_line, text_file
from fluxcb.logging.loggables import Loggable, Text, Value

__all__ = ["ConsoleBackend"]


class ConsoleBackend(LoggerBackend):
    """Print values and texts, sorted by name: a line per epoch, or per step.

    A line has the last value that each name got; numbers have five digits. A live bar of the same file stays below.

    Args:
        include: Regular expressions; names in which one is found are printed. None for all names, `[]` for none.
        exclude: Regular expressions; names in which one is found are not printed, whatever `include` says.
        every_step: Whether there is a line for each step at which something was put.
        file: Where to print; standard output by default.

    Raises:
        DeclarationError: A pattern is none.

    Example:
        >>> import sys
        >>> with ConsoleBackend(exclude=["^debug/"], file=sys.stdout) as backend:
        ...     for step, name, value in [
        ...         (1, "loss", 0.5),
        ...         (2, "loss", 0.4),
        ...         (2, "acc", 0.9123456),
        ...         (2, "debug/x", 1),
        ...     ]:
        ...         backend.log(name, Value(value), step=step, epoch=1, seconds=0.0)
        ...     backend.end_epoch(1)
        epoch 1, step 2  acc: 0.91235  loss: 0.4

    Source:
        tensorpack, `ScalarPrinter`.
    """

    loggables = (Value, Text)

    def __init__(
        self,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        *,
        every_step: bool = False,
        file: IO[str] | None = None,
    ) -> None:
        self.include = None if include is None else _patterns(include, "include")
        self.exclude = _patterns(exclude, "exclude")
        self.every_step = every_step
        self.file = text_file(file, "ConsoleBackend")
        parts = {"include": include, "exclude": exclude or None, "every_step": every_step or None, "file": file}
        self.name = f"ConsoleBackend({', '.join(f'{k}={v!r}' for k, v in parts.items() if v is not None)})"
        self._lines: dict[tuple[int, int], tuple[int, dict[str, str]]] = {}  # by epoch, and by step where each has one

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Keep a value for its line."""
        if not self._wanted(name):
            return
        shown = f"{loggable.data:.5g}" if isinstance(loggable, Value) else str(getattr(loggable, "data", ""))
        key = (epoch, step if self.every_step else 0)
        _, values = self._lines.get(key, (0, {}))
        values[name] = shown
        self._lines[key] = step, values

    def _wanted(self, name: str) -> bool:
        included = self.include is None or any(pattern.search(name) for pattern in self.include)
        return included and not any(pattern.search(name) for pattern in self.exclude)

    def flush(self) -> None:
        """Print the steps, if each has a line."""
        if self.every_step:
            self._print()

    def end_epoch(self, epoch: int) -> None:
        """Print the epoch."""
        self._print()

    def _print(self) -> None:
        lines, self._lines = self._lines, {}
        for (epoch, _), (step, values) in lines.items():
            shown = "".join(f"  {name}: {values[name]}" for name in sorted(values))
            print_line(console_for(self.file), f"epoch {epoch}, step {step}{shown}")

    def close(self) -> None:
        """Print what has not been printed."""
        self._print()

    def state_dict(self) -> dict[str, Any]:
        """Return what waits for the end of its epoch."""
        return {"lines": [[*key, step, dict(values)] for key, (step, values) in self._lines.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back, to be printed when that epoch ends."""
        self._lines = {(epoch, of): (step, dict(values)) for epoch, of, step, values in state.get("lines", ())}


def _patterns(given: Iterable[str], what: str) -> tuple[re.Pattern[str], ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DeclarationError(
            f"`{what}` of `ConsoleBackend` takes a list of regular expressions, not {given!r}.", fix=f"`{what}=[...]`"
        )
    try:
        return tuple(re.compile(pattern) for pattern in given)
    except (re.error, TypeError) as error:
        raise DeclarationError(f"`{what}` of `ConsoleBackend` has a pattern that is none: {error}.") from error
