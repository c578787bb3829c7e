"""`ConsoleBackend`: one line of values per epoch or per step."""

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
    """Print values and texts, sorted by name, in one line per epoch or per step.

    A line contains the last value of each name. Numbers have five digits. A live bar on the same file stays below the
    lines.

    Args:
        include: Regular expressions. A name is printed if one of them matches a part of it. None prints all names, and
            `[]` prints no names.
        exclude: Regular expressions. A name is not printed if one of them matches a part of it, even if it is included.
        every_step: Whether to print a line for each step that has values, instead of each epoch.
        file: Output file. The default is standard output.

    Raises:
        DeclarationError: A pattern is not a regular expression.

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
        self._lines: dict[tuple[int, int], tuple[int, dict[str, str]]] = {}  # by epoch, and by step if each has a line

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Keep a value until its line is printed."""
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
        """Print the lines of steps, if `every_step` is set."""
        if self.every_step:
            self._print()

    def end_epoch(self, epoch: int) -> None:
        """Print the line of the epoch."""
        self._print()

    def _print(self) -> None:
        lines, self._lines = self._lines, {}
        for (epoch, _), (step, values) in lines.items():
            shown = "".join(f"  {name}: {values[name]}" for name in sorted(values))
            print_line(console_for(self.file), f"epoch {epoch}, step {step}{shown}")

    def close(self) -> None:
        """Print the remaining lines."""
        self._print()

    def state_dict(self) -> dict[str, Any]:
        """Return the values that are printed at the end of their epoch."""
        return {"lines": [[*key, step, dict(values)] for key, (step, values) in self._lines.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore these values."""
        self._lines = {(epoch, of): (step, dict(values)) for epoch, of, step, values in state.get("lines", ())}


def _patterns(given: Iterable[str], what: str) -> tuple[re.Pattern[str], ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DeclarationError(
            f"`{what}` of `ConsoleBackend` takes a list of regular expressions, not {given!r}.", fix=f"`{what}=[...]`"
        )
    try:
        return tuple(re.compile(pattern) for pattern in given)
    except (re.error, TypeError) as error:
        raise DeclarationError(f"`{what}` of `ConsoleBackend` has an invalid pattern: {error}.") from error
