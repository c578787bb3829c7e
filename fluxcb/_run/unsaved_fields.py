"""Fields of callbacks that training changes and that checkpoints do not contain."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import is_key
from fluxcb._declare.callback import Callback, unwrap
from fluxcb.checkpoints.savers import RunSaver

__all__ = ["fields_that_begin_again", "unsaved_fields"]

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
    callback = unwrap(callback)
    cls = type(callback)
    if cls.state_dict is not Callback.state_dict or cls.__module__.startswith("fluxcb.") or issubclass(cls, RunSaver):
        return {}
    # Names with this prefix are attributes of the engine, such as the Learner that owns the callback.
    texts = {name: _text(value) for name, value in vars(callback).items() if not name.startswith("_fluxcb_")}
    return {name: text for name, text in texts.items() if text is not None}


def fields_that_begin_again(
    graph: CallbackGraph, about: Mapping[str, Any], program: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each callback whose unsaved fields had other values in a saved run, with a clause about them.

    Args:
        graph: The graph of this run, whose callbacks have not been trained yet.
        about: The description of the saved run; see `describe_run`.
        program: The description of this run.
    """
    for declared in graph.declared:
        name = declared.name
        # A field that holds a changed argument is reported as the argument.
        arguments = _changed_arguments(about["arguments"].get(name, {}), program["arguments"].get(name, {}))
        then, now = about.get("unsaved_fields", {}).get(name, {}), program["unsaved_fields"].get(name, {})
        changed = [
            f"`{field}`"
            for field in then
            # A field that training has created does not exist yet.
            if then[field] != now.get(field, then[field]) and field.removeprefix("_") not in arguments
        ]
        if changed:
            several = len(changed) > 1
            yield (
                name,
                f"the {'fields' if several else 'field'} {', '.join(changed)} {'start' if several else 'starts'} from "
                f"{'their initial values' if several else 'the initial value'}, because "
                f"`{type(unwrap(declared.callback)).__name__}` has no `state_dict`",
            )


def _changed_arguments(then: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Return the names of arguments of a callback whose descriptions differ; see `describe_arguments`."""
    paths = {path for path in (*then, *now) if then.get(path) != now.get(path)}
    return {re.split(r"[.\[]", path)[0] for path in paths}


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
