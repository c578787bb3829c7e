"""Fields of callbacks that training changes and that checkpoints do not contain."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import is_key
from fluxcb._declare.callback import Callback, unwrap
from fluxcb.checkpoints.savers import RunSaver

__all__ = ["UnsavedFields", "unsaved_fields"]

# Limits of the work for one field, because each checkpoint contains a description of all fields.
_MAX_BYTES = 1 << 20
_MAX_PARTS = 1000
# This also ends the recursion if a container contains itself.
_MAX_DEPTH = 4
_LONGEST = 40  # characters of a text


def unsaved_fields(callback: Callback) -> dict[str, str]:
    """Return a text of each field that a checkpoint does not contain, by name. Equal texts mean equal values.

    A callback that defines `state_dict` has decided what a checkpoint contains. Those of fluxcb are tested to save all
    that they need, and savers hold the checkpoints. Fields with values other than numbers, strings, arrays, random
    generators, and containers of these are left out.
    """
    cls = type(callback)
    if cls.state_dict is not Callback.state_dict or cls.__module__.startswith("fluxcb.") or issubclass(cls, RunSaver):
        return {}
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("fluxcb."):
            fields |= vars(base)  # a field may have its initial value in the class
    fields |= vars(callback)
    # Names with these prefixes are attributes of Python and of the engine, such as the Learner that owns the callback.
    texts = {name: _text(value) for name, value in fields.items() if not name.startswith(("__", "_abc_", "_fluxcb_"))}
    return {name: text for name, text in texts.items() if text is not None}


class _Known(NamedTuple):
    callback: Callback
    initial: dict[str, str]


class UnsavedFields:
    """The fields of the callbacks of a Learner that training changes and that a checkpoint does not contain."""

    def __init__(self) -> None:
        self._callbacks: dict[str, _Known] = {}

    def watch(self, graph: CallbackGraph) -> None:
        """Take the present values of the fields as the initial ones, except for callbacks that are known already."""
        known, self._callbacks = self._callbacks, {}
        for declared in graph.declared:
            before, callback = known.get(declared.name), unwrap(declared.callback)
            if before is None or before.callback is not callback:
                before = _Known(callback, unsaved_fields(callback))
            self._callbacks[declared.name] = before

    def changed(self) -> dict[str, dict[str, str]]:
        """Return a text of each field that has another value than initially, by callback and field."""
        found = {
            name: {field: text for field, text in unsaved_fields(callback).items() if initial.get(field) != text}
            for name, (callback, initial) in self._callbacks.items()
        }
        return {name: fields for name, fields in found.items() if fields}

    def that_begin_again(self, saved: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
        """Yield the name of each callback whose fields start from other values than a saved run had, with a clause.

        Args:
            saved: What `changed` returned in the saved run. The callbacks of this run have not been trained yet.
        """
        for name, (callback, _) in self._callbacks.items():
            then, now = saved.get(name, {}), unsaved_fields(callback)
            # A field that training has created does not exist yet.
            changed = [f"`{field}`" for field in then if then[field] != now.get(field, then[field])]
            if changed:
                several = len(changed) > 1
                yield (
                    name,
                    f"the {'fields' if several else 'field'} {', '.join(changed)} {'start' if several else 'starts'} "
                    f"from {'their initial values' if several else 'the initial value'}, because "
                    f"`{type(callback).__name__}` has no `state_dict`",
                )


def _text(value: Any, depth: int = 0) -> str | None:
    """Return a text of a value that is the same in another process, or None for a value of another kind."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
    elif isinstance(value, np.generic | np.ndarray | jax.Array):
        return _array_text(value)
    elif isinstance(value, np.random.Generator):
        text = repr(value.bit_generator.state)
    elif isinstance(value, random.Random):
        text = repr(value.getstate())
    elif isinstance(value, Mapping | list | tuple | set | frozenset) and depth < _MAX_DEPTH:
        parts = list(value.items() if isinstance(value, Mapping) else value)
        kept = [_text(part, depth + 1) or "?" for part in parts[-_MAX_PARTS:]]
        if isinstance(value, set | frozenset):
            kept.sort()  # the order of strings in a set differs between processes
        text = f"{type(value).__name__}[{len(parts)}]({', '.join(kept)})"
    else:
        return None
    # UTF-8 cannot encode lone surrogates, which a string of Python may contain.
    return text if len(text) <= _LONGEST else f"{len(text)} characters, {_checksum(text.encode(errors='replace'))}"


def _array_text(value: Any) -> str | None:
    # The array may have been donated to a program, or another process may hold a part of it.
    unreadable = isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable)
    if unreadable or is_key(value) or value.nbytes > _MAX_BYTES or value.dtype.hasobject:
        return None
    return f"{value.dtype}{list(value.shape)} {_checksum(np.asarray(value).tobytes())}"


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"
