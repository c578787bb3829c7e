"""Commands with placeholders for statistics."""

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

# Matches shell text in which a placeholder, marked as `\0`, is run as code: as an argument of a builtin or program that
# joins its arguments into code, in arithmetic, or after `-c` or `-e` of an interpreter.
_RUN_AS_CODE = re.compile(
    r"""
    (?:^|[;&|(`\n{!]|\b(?:then|do|else|sudo|env|exec|command|builtin|time|nohup|nice)\b)\s*(?:[^\s"']*/)?
        (?:eval|let|trap|ssh|rsh|xargs|parallel|watch|[gmn]?awk)["']?\s .* \0
    | \(\( .* \0
    | \[\[ .* \0
    | \$\{ [^}]* \0
    | (?<![\w.-]) (?:(?:ba|da|z|k|mk|a|fi|c|tc)?sh|su|python[\d.]*|perl|ruby|node|lua|php|Rscript|"?\$\{?SHELL\}?"?)
        ["']?\s [^|;&\n]*? (?<!\S) -[-\w]*[ceErS] [\s=]+
        (?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'\\\0])* (?:"(?:\\.|[^"\\])*\0|'[^']*\0|\0)
    """,
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class _Placeholder:
    """A placeholder for a statistic, with its format."""

    name: str
    spec: str


class Command:
    """A command in which `{name}` or `{name:format}` is replaced with the value of a statistic.

    `{{` and `}}` are literal braces. Without a shell, each item of the list is a single argument, whichever values it
    contains. With a shell, values are passed as environment variables, which the shell expands without running them.
    Quoting the values would not always be safe: within quotes, backticks and here-documents, a value could contain the
    closing quote.

    The command can still run a value as code, for example with `eval` or a nested `sh -c`. Formatted numbers are
    harmless there, but texts are not; see `text_run_as_code`.

    Args:
        command: The program and its arguments; a string if there is a shell.
        names: The names of the statistics.
        shell: Whether to run the command with `/bin/sh`.
        owner: Name of the callback, for messages.

    Attributes:
        text: The whole command, for errors at construction.
        program: The program, for warnings. Arguments are not shown there, because they may contain tokens and
            passwords.

    Raises:
        DeclarationError: The command is invalid, a placeholder is not in `names`, or a statistic has no placeholder.
    """

    def __init__(self, command: Any, names: Sequence[str], *, shell: bool, owner: str) -> None:
        self._names, self._owner = names, owner
        _require(command, shell, owner)
        self.text = command if shell else shlex.join(command)
        self.program = "/bin/sh" if shell else command[0]
        self._parts = [list(self._split(part)) for part in ([command] if shell else command)]
        used = {piece.name for part in self._parts for piece in part if isinstance(piece, _Placeholder)}
        for name in names:
            if name not in used:
                raise DeclarationError(
                    f"The command of `{owner}` does not use the statistic {name!r}.",
                    where=self.text,
                    fix=[
                        f"write `{{{name}}}` in the command",
                        *([f"remove {name!r} from the names"] if names[1:] else []),
                    ],
                )
        self._script = self._scripted() if shell else None
        marked = ["".join(p if isinstance(p, str) else "\0" for p in part) for part in self._parts]
        self._runs_code = _RUN_AS_CODE.search(marked[0] if shell else shlex.join(marked)) is not None

    def filled(self, values: Mapping[str, float | str]) -> tuple[list[str], dict[str, str]]:
        """Return the arguments of the process to start, and its environment."""
        environment = dict(os.environ)
        if self._script is None:
            parts = ["".join(p if isinstance(p, str) else _shown(values, p) for p in part) for part in self._parts]
            return parts, environment
        placeholders = (piece for piece in self._parts[0] if isinstance(piece, _Placeholder))
        environment.update({_variable(i): _shown(values, piece) for i, piece in enumerate(placeholders)})
        return ["/bin/sh", "-c", self._script], environment

    def text_run_as_code(self, values: Mapping[str, float | str]) -> str | None:
        """Return the name of a text that the command would run as code, or None.

        This recognizes common shells, interpreters and builtins. It cannot know how other programs use their arguments.
        """
        return next((name for name in self._names if self._runs_code and isinstance(values[name], str)), None)

    def _split(self, part: str) -> Iterator[str | _Placeholder]:
        end = 0
        for found in _TOKENS.finditer(part):
            yield part[end : found.start()]
            end = found.end()
            if found[0] in ("{{", "}}"):
                yield found[0][0]
            elif found[1] is not None:
                yield self._placeholder(found[1])
            else:
                raise DeclarationError(
                    f"The command of `{self._owner}` has an unmatched `{found[0]}`.",
                    where=self.text,
                    fix=f"write `{found[0] * 2}` for a literal brace",
                )
        yield part[end:]

    def _placeholder(self, text: str) -> _Placeholder:
        # The name of a statistic may contain a colon itself.
        name, _, spec = (text, "", "") if text in self._names else text.rpartition(":")
        name = name or text
        if name not in self._names:
            raise DeclarationError(
                f"The placeholder `{{{text}}}` in the command of `{self._owner}` is not in `names`."
                f"{did_you_mean(name, self._names)}",
                where=self.text,
                why=f"`names` contains {', '.join(map(repr, self._names))}",
                fix=[
                    f"add the missing name: `{[*self._names, name]}`",
                    "write `{{` and `}}` for literal braces",
                ],
            )
        try:
            format(1.0, spec)
        except ValueError:
            raise DeclarationError(
                f"`{{{text}}}` in the command of `{self._owner}` has an invalid format for a number: {spec!r}.",
                where=self.text,
                fix=f"write e.g. `{{{name}:.3f}}`",
            ) from None
        return _Placeholder(name, spec)

    def _scripted(self) -> str:
        """Return the shell script, in which each placeholder is a quoted variable."""
        script, count = "", 0
        for piece in self._parts[0]:
            if isinstance(piece, str):
                script += piece
                continue
            quote = _open_quote(script)
            if quote == "'":
                raise DeclarationError(
                    f"`{{{piece.name}}}` is inside single quotes in the command of `{self._owner}`.",
                    where=self.text,
                    why="the shell does not expand variables inside single quotes",
                    fix=["remove the quotes, because each value is a single argument anyway", "use double quotes"],
                )
            expanded = f"${{{_variable(count)}}}"
            script += expanded if quote else f'"{expanded}"'
            count += 1
        return script


def _require(command: Any, shell: bool, owner: str) -> None:
    if shell:
        if not isinstance(command, str) or not command.strip():
            raise DeclarationError(
                f"With `shell=True`, the command of `{owner}` must be a string, not {command!r}.",
                fix='write e.g. `"echo {loss} >> losses.txt"`',
            )
        return
    if isinstance(command, str):
        parts = ["program", "{loss}"]
        with contextlib.suppress(ValueError):  # the string has an unclosed quote
            parts = shlex.split(command) or parts
        raise DeclarationError(
            f"The command of `{owner}` must be a list of arguments, not the string {command!r}.",
            why="a value that contains a space or a semicolon would become several arguments or another command",
            fix=[f"write `{parts}`", "pass `shell=True` to run the string in a shell"],
        )
    fits = isinstance(command, Sequence) and len(command) > 0 and all(isinstance(part, str) for part in command)
    if not fits or not command[0].strip():
        raise DeclarationError(
            f"The command of `{owner}` must be a list of arguments that begins with the program, not {command!r}.",
            fix='write e.g. `["notify-send", "loss {loss:.3f}"]`',
        )


def _variable(number: int) -> str:
    return f"FLUXCB_STATISTIC_{number}"


def _shown(values: Mapping[str, float | str], placeholder: _Placeholder) -> str:
    value = values[placeholder.name]
    return value if isinstance(value, str) else format(value, placeholder.spec) if placeholder.spec else str(value)


def _open_quote(script: str) -> str:
    """Return the quotation mark that is still open at the end of a shell script, or an empty string."""
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
