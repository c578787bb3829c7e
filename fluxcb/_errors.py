"""Every error fluxcb raises on purpose, and how its text is laid out.

```
FluxcbError
├ DeclarationError        a callback, phase or argument states something that cannot be meant
│ └ AmbiguityError        two handlers fit one moment equally well
├ CheckError              the callbacks of a set do not fit together (holds `.problems`)
│ ├ ConflictError         two callbacks write one place and no order is known
│ ├ CycleError            the declared orders contradict each other
│ ├ MissingStateError     something is read that nobody provides
│ ├ UndeclaredAccessError a handler's source touches what it does not declare
│ └ UnknownStateError     a state path that does not exist
├ AccessError             a handler touched what it did not declare (never an AttributeError)
├ TraceError              a step or a traced handler cannot be compiled as written
├ DataError               batches that do not fit, run dry, or change shape
├ StateLostError          the train state went down with a failed XLA call
└ CheckpointError         a checkpoint cannot be written, found or used
  ├ CheckpointCorruptError  a file of it is not what was written
  └ ResumeError           it was written by another run than this one: what differs, line by line
```

`CancelStep`, `CancelEpoch` and `CancelFitting` are control flow, not errors: see `_declare/control.py`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

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
    "ResumeError",
    "StateLostError",
    "TraceError",
    "UndeclaredAccessError",
    "UnknownStateError",
    "did_you_mean",
    "nearest",
]


class FluxcbError(Exception):
    """Base of all fluxcb errors.

    Args:
        what: One sentence, understandable alone.
        where: Places in the user's code (class, file:line, moment, path), one a line.
        why: Why it matters, one sentence.
        fix: Edits that cure it, the likeliest first.
    """

    def __init__(
        self, what: str, *, where: Sequence[str] | str = (), why: str = "", fix: Sequence[str] | str = ()
    ) -> None:
        # One positional argument only, the rest in __dict__: that is what survives pickling.
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
        return "\n".join(lines)


def _labelled(first: str, rest: str, entries: Sequence[str]) -> list[str]:
    lines = []
    for position, entry in enumerate(entries):
        label = first if position == 0 else rest
        lines.append(label + entry.replace("\n", "\n         "))
    return lines


class DeclarationError(FluxcbError, ValueError):
    """A declaration (handler, `stateaccess`, `runafter`, schedule, argument) is not valid."""


class AmbiguityError(DeclarationError):
    """Two handlers of one callback fit a moment equally well."""


class CheckError(FluxcbError, ValueError):
    """The callbacks of a set do not fit together; `problems` holds every one found."""

    problems: tuple["CheckError", ...] = ()

    @classmethod
    def of(cls, problems: Sequence["CheckError"]) -> "CheckError":
        """Return the only problem itself, or one error that tells all of them."""
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
    """Two callbacks write overlapping state at one moment and no order is known."""


class CycleError(CheckError):
    """The declared orders form a loop, so no order satisfies them all."""


class MissingStateError(CheckError):
    """State is read that nobody creates, or before it exists."""


class UndeclaredAccessError(CheckError):
    """The source of a handler touches state that it does not declare: when the line runs, it raises AccessError."""


class UnknownStateError(CheckError):
    """A state path names something that does not exist."""


class AccessError(FluxcbError, RuntimeError):
    """A handler touched state that its callback did not declare."""


class TraceError(FluxcbError, RuntimeError):
    """The step, or a handler traced into it, cannot be compiled as written."""


class DataError(FluxcbError, ValueError):
    """A data source or a batch is not what the step needs."""


class StateLostError(FluxcbError, RuntimeError):
    """The train state was donated to an XLA call that failed, and is gone."""


class CheckpointError(FluxcbError, RuntimeError):
    """A checkpoint cannot be written, found or used."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, or not what was written."""


class ResumeError(CheckpointError):
    """A checkpoint does not fit the Learner that is to go on from it."""


def nearest(name: str, known: Iterable[Any]) -> str:
    """Return the known name that is most similar to a name, or an empty string if none is similar."""
    import difflib

    close = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.6)
    return close[0] if close else ""


def did_you_mean(name: str, known: Iterable[Any]) -> str:
    """Return `` Did you mean `x`?`` for the nearest of the known names, or an empty string."""
    meant = nearest(name, known)
    return f" Did you mean `{meant}`?" if meant else ""
