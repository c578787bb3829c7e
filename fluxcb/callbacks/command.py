"""Commands with places for statistics."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["Command"]

_TOKENS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


@dataclass(frozen=True)
class _Place:
    """Where a statistic stands, and its format."""

    name: str
    spec: str


class Command:
    """A command with `{name}` or `{name:format}` in it, for the values of statistics; `{{` and `}}` are braces.

    Without a shell, each part is one argument, whatever the values are. With one, values are handed over as variables
    of the environment, which a shell expands and never reads as commands. To quote them would not be safe everywhere:
    within quotes, backticks and here-documents a quoted text ends where its author wants it to.

    Args:
        command: Program and arguments; a string if there is a shell.
        names: The statistics' names.
        shell: Whether `/bin/sh` runs it.
        owner: Whose it is, for messages.

    Attributes:
        text: The command as it was given, for messages.

    Raises:
        DeclarationError: It is no command, a placeholder names no statistic, or a statistic has no placeholder.
    """

    def __init__(self, command: Any, names: Sequence[str], *, shell: bool, owner: str) -> None:
        self._names, self._owner = names, owner
        _require(command, shell, owner)
        self.text = command if shell else shlex.join(command)
        self._parts = [list(self._split(part)) for part in ([command] if shell else command)]
        used = {piece.name for part in self._parts for piece in part if isinstance(piece, _Place)}
        for name in names:
            if name not in used:
                raise DeclarationError(
                    f"The command of `{owner}` has no place for the statistic {name!r}.",
                    where=self.text,
                    fix=[f"write `{{{name}}}` in it", "leave it out of `names`"],
                )
        self._script = self._scripted() if shell else None

    def filled(self, values: Mapping[str, float | str]) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of the process to start, and its environment."""
        environment = dict(os.environ)
        if self._script is None:
            parts = ["".join(p if isinstance(p, str) else _shown(values, p) for p in part) for part in self._parts]
            return parts, environment
        places = (piece for piece in self._parts[0] if isinstance(piece, _Place))
        environment.update({_variable(i): _shown(values, place) for i, place in enumerate(places)})
        return ["/bin/sh", "-c", self._script], environment

    def _split(self, part: str) -> Iterator[str | _Place]:
        end = 0
        for found in _TOKENS.finditer(part):
            yield part[end : found.start()]
            end = found.end()
            if found[0] in ("{{", "}}"):
                yield found[0][0]
            elif found[1] is not None:
                yield self._place(found[1])
            else:
                raise DeclarationError(
                    f"The command of `{self._owner}` has a lonely `{found[0]}`.",
                    where=self.text,
                    fix=f"write `{found[0] * 2}` for a brace",
                )
        yield part[end:]

    def _place(self, text: str) -> _Place:
        name, _, spec = (text, "", "") if text in self._names else text.rpartition(":")
        name = name or text
        if name not in self._names:
            raise DeclarationError(
                f"`{{{text}}}` in the command of `{self._owner}` names no statistic in `names`."
                f"{did_you_mean(name, self._names)}",
                where=self.text,
                why=f"`names` has {', '.join(map(repr, self._names))}",
                fix=["name it there, too", "write `{{` and `}}` for braces"],
            )
        try:
            format(1.0, spec)
        except ValueError:
            raise DeclarationError(
                f"`{{{text}}}` in the command of `{self._owner}` has no format for a number: {spec!r}.",
                where=self.text,
                fix=f"e.g. `{{{name}:.3f}}`",
            ) from None
        return _Place(name, spec)

    def _scripted(self) -> str:
        """Return what the shell reads: each place is an argument of its own, or a part of one within double quotes."""
        script, count = "", 0
        for piece in self._parts[0]:
            if isinstance(piece, str):
                script += piece
                continue
            quote = _open_quote(script)
            if quote == "'":
                raise DeclarationError(
                    f"`{{{piece.name}}}` stands within single quotes in the command of `{self._owner}`.",
                    where=self.text,
                    why="a shell fills in nothing there",
                    fix=["leave the quotes out: a value is one argument without them", "use double quotes"],
                )
            expanded = f"${{{_variable(count)}}}"
            script += expanded if quote else f'"{expanded}"'
            count += 1
        return script


def _require(command: Any, shell: bool, owner: str) -> None:
    if shell:
        if not isinstance(command, str) or not command.strip():
            raise DeclarationError(
                f"With `shell=True`, the command of `{owner}` is a string, not {command!r}.",
                fix='e.g. `"echo {loss} >> losses.txt"`',
            )
        return
    if isinstance(command, str):
        parts = ["program", "{loss}"]
        with contextlib.suppress(ValueError):  # quotes that are not closed
            parts = shlex.split(command) or parts
        raise DeclarationError(
            f"The command of `{owner}` is a list of arguments, not the string {command!r}.",
            why="with a blank or a semicolon in it, a value would become several arguments, or a command",
            fix=[f"write `{parts}`", "`shell=True`, if a shell is to run it"],
        )
    fits = isinstance(command, Sequence) and len(command) > 0 and all(isinstance(part, str) for part in command)
    if not fits or not command[0].strip():
        raise DeclarationError(
            f"The command of `{owner}` is a list of arguments, the program first, not {command!r}.",
            fix='e.g. `["notify-send", "loss {loss:.3f}"]`',
        )


def _variable(number: int) -> str:
    return f"FLUXCB_STATISTIC_{number}"


def _shown(values: Mapping[str, float | str], place: _Place) -> str:
    value = values[place.name]
    return value if isinstance(value, str) else format(value, place.spec) if place.spec else str(value)


def _open_quote(script: str) -> str:
    """Return the quotation mark that is open at the end of a shell's script, or an empty string."""
    quote, escaped = "", False
    for character in script:
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
    return quote
