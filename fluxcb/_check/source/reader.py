"""`Reader`: what functions touch of the learner they are given, each read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._check.source.calls import Arguments
from fluxcb._check.source.fields import fields_of, signature
from fluxcb._check.source.statements import Interpreter
from fluxcb._check.source.touches import Reading
from fluxcb._check.source.values import UNKNOWN, Obj, Ref

__all__ = ["Reader"]

_LEARNER = frozenset((Ref(()),))


class Reader:
    """Reads functions that take a learner, without running them, and keeps what it has read.

    Callbacks of one class share a reading unless it depends on fields in which they differ.
    """

    def __init__(self) -> None:
        self._known: dict[Any, dict[tuple[str, ...], dict[Any, Reading]]] = {}

    def read(self, function: Callable[..., Any], *, before: int, me: Any) -> Reading:
        """Return what a function touches.

        Args:
            function: A bound handler, an `init`, or whatever else takes a learner.
            before: Arguments in front of the learner: 2 for handlers, 0 for an `init`.
            me: The callback it belongs to.
        """
        key = (Obj(getattr(function, "__func__", function)), type(me), before)
        known = self._known.setdefault(key, {})
        fields = fields_of(me)
        for names, readings in known.items():
            found = readings.get(_signature(fields, names))
            if found is not None:
                return found
        interpreter = Interpreter(me)
        interpreter.read(function, Arguments([*[UNKNOWN] * before, _LEARNER]))
        names = tuple(sorted(interpreter.asked))
        values = _signature(fields, names)
        reading = interpreter.journal.reading()
        known.setdefault(names, {})[values] = reading
        return reading


def _signature(fields: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(signature(fields[name]) if name in fields else None for name in names)
