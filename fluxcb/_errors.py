"""Every error that fluxcb raises on purpose, and the layout of its text.

```
FluxcbError
├ DeclarationError        A callback, a phase or an argument is written incorrectly.
│ └ AmbiguityError        Two handlers of a callback fit an event and a phase equally well.
├ CheckError              The callbacks in a list do not fit together.
│ ├ ConflictError         Two callbacks write the same value, and no order is declared.
│ ├ CycleError            The orders of several callbacks contradict each other.
│ ├ MissingStateError     A callback reads a value that nothing provides.
│ ├ UndeclaredAccessError The source code of a handler uses a value that is not declared.
│ └ UnknownStateError     A declared state path does not exist.
├ AccessError             A running handler used a value that is not declared.
├ TraceError              JAX cannot compile a step or a traced handler.
├ DataError               A batch or a data source cannot be used.
├ StateLostError          The train state was lost when a compiled program failed.
├ PeerError               Another process of the training failed or does not respond.
└ CheckpointError         A checkpoint cannot be written, found or used.
  ├ CheckpointCorruptError  A checkpoint is damaged.
  └ ResumeError           A checkpoint does not fit the Learner that loads it.
```

`CancelStep`, `CancelEpoch` and `CancelFitting` are control flow, not errors: see `_declare/control.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from fluxcb._terminal import escape_block

__all__ = [
    "AccessError",
    "AmbiguityError",
    "CheckError",
    "CheckpointCorruptError",
    "CheckpointError",
    "ConflictError",
    "CycleError",
    "DataError",
    "DeclarationError",
    "FluxcbError",
    "MissingStateError",
    "PeerError",
    "ResumeError",
    "StateLostError",
    "TraceError",
    "UndeclaredAccessError",
    "UnknownStateError",
    "as_sentence",
    "did_you_mean",
    "nearest",
]


class FluxcbError(Exception):
    """Base class of all fluxcb errors.

    Args:
        what: One sentence that is understandable without the rest.
        where: Locations in the user's code (class, file:line, moment, path), one per line.
        why: The reason why it is an error, in one sentence.
        fix: Edits that fix the error, starting with the most likely one.
    """

    def __init__(
        self, what: str, *, where: Sequence[str] | str = (), why: str = "", fix: Sequence[str] | str = ()
    ) -> None:
        # Exception pickles its positional arguments and __dict__, so there is only one positional argument.
        super().__init__(what)
        self.what = what
        self.where = tuple(place for place in ((where,) if isinstance(where, str) else where) if place)
        self.why = why
        self.fix = (fix,) if isinstance(fix, str) else tuple(fix)

    def __str__(self) -> str:
        lines = [self.what]
        lines += _labelled("  where: ", "         ", self.where)
        lines += _labelled("  why:   ", "         ", (self.why,) if self.why else ())
        lines += _labelled("  fix:   ", "     or: ", self.fix)
        return escape_block("\n".join(lines))  # messages may quote checkpoints and other untrusted files


def _labelled(first: str, rest: str, entries: Sequence[str]) -> list[str]:
    lines = []
    for position, entry in enumerate(entries):
        label = first if position == 0 else rest
        lines.append(label + entry.replace("\n", "\n         "))
    return lines


class DeclarationError(FluxcbError, ValueError):
    """A declaration (handler, `stateaccess`, `runafter`, schedule, argument) is invalid."""


class AmbiguityError(DeclarationError):
    """Two handlers of one callback fit a moment equally well."""


class CheckError(FluxcbError, ValueError):
    """The callbacks of a set do not work together. `problems` holds every problem that was found."""

    problems: tuple["CheckError", ...] = ()

    @classmethod
    def of(cls, problems: Sequence["CheckError"]) -> "CheckError":
        """Return the problem itself if there is only one, or one error that lists all problems."""
        if len(problems) == 1:
            return problems[0]
        error = cls(f"{len(problems)} problems were found in this set of callbacks.")
        error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        if not self.problems:
            return super().__str__()
        parts = [self.what]
        for number, problem in enumerate(self.problems, 1):
            parts.append(f"{number}. {type(problem).__name__}: {problem}")
        return "\n\n".join(parts)


class ConflictError(CheckError):
    """Two callbacks write overlapping state at one moment, and no order is known."""


class CycleError(CheckError):
    """The declared orders form a cycle, so no order satisfies all of them."""


class MissingStateError(CheckError):
    """A callback reads state that nothing creates, or reads it before it exists."""


class UndeclaredAccessError(CheckError):
    """The source of a handler uses state that the callback does not declare, so it would raise AccessError."""


class UnknownStateError(CheckError):
    """A state path does not exist."""


class AccessError(FluxcbError, RuntimeError):
    """A handler used state that its callback did not declare."""


class TraceError(FluxcbError, RuntimeError):
    """The step, or a handler that is traced into it, cannot be compiled as written."""


class DataError(FluxcbError, ValueError):
    """A data source or a batch does not meet the requirements of the step."""


class StateLostError(FluxcbError, RuntimeError):
    """The train state was donated to an XLA call that failed, so its arrays no longer exist."""


class PeerError(FluxcbError, RuntimeError):
    """Another process of the training failed, does not respond, or does not run the same steps."""


class CheckpointError(FluxcbError, RuntimeError):
    """A checkpoint cannot be written, found or used."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, or differs from the file that was written."""


class ResumeError(CheckpointError):
    """A checkpoint does not match the Learner that is to resume from it."""


def as_sentence(text: str) -> str:
    """Return the text with a period at its end, unless it ends in a punctuation mark."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def nearest(name: str, known: Iterable[Any]) -> str:
    """Return the known name that is most similar to `name`, or an empty string if none is similar."""
    import difflib

    close = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.6)
    return close[0] if close else ""


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """Return `` Did you mean `x`?`` for the nearest of the known names, or an empty string."""
    meant = nearest(name, known)
    return f" Did you mean `{meant}`?" if meant else ""
