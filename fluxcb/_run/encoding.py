"""Values of the host as JSON and arrays, and back: what callbacks keep and share, in a checkpoint.

Plain data is written down as it is, arrays go to a list beside it. Objects with a `state_dict` and a `load_state_dict`,
and dataclasses, are filled in where they are: a checkpoint names no class that would have to be imported.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import describe, is_key
from fluxcb._errors import CheckpointError, DeclarationError

__all__ = ["Decoder", "Encoder"]

_TAG = "$"
_LONG = 64  # a list of numbers as long as this is an array, which is smaller and faster to read than text
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


class Encoder:
    """Write values down as JSON.

    Attributes:
        arrays: The arrays in them, by the names under which the JSON speaks of them.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def encode(self, value: Any, where: str) -> Any:
        """Return a value as JSON.

        Args:
            value: The value.
            where: What messages call it.

        Raises:
            DeclarationError: It is, or contains, something that cannot be written down.
        """
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, bytes):
            return {_TAG: "bytes", "hex": value.hex()}
        if isinstance(value, complex):
            return {_TAG: "complex", "parts": [value.real, value.imag]}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, list):
            return self._list(value, where)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {_TAG: "namedtuple", "of": self._each(value, where)}
        if isinstance(value, set | frozenset):
            return {_TAG: type(value).__name__, "of": self._each(sorted(value, key=repr), where)}
        if isinstance(value, tuple):
            return {_TAG: "tuple", "of": self._each(value, where)}
        if isinstance(value, deque):
            return {_TAG: "deque", "of": self._each(value, where), "maxlen": value.maxlen}
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return {_TAG: "state", "of": self.encode(value.state_dict(), where)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {_TAG: "fields", "of": self._mapping(fields, where)}
        raise DeclarationError(
            f"{where} is {type(value).__name__} {_short(value)}, which a checkpoint cannot hold.",
            why="a checkpoint holds numbers, texts, arrays, and lists, tuples, sets, dicts and dataclasses of them",
            fix=[
                f"give {type(value).__name__} the methods `state_dict()` and `load_state_dict(state)`",
                "keep it in a field of the callback that `state_dict` leaves out, and make it anew in `init`",
            ],
        )

    def _each(self, values: Any, where: str) -> list[Any]:
        return [self.encode(value, f"{where}[{number}]") for number, value in enumerate(values)]

    def _list(self, value: list[Any], where: str) -> Any:
        if len(value) >= _LONG:
            kind = type(value[0])
            if kind in (int, float) and all(type(x) is kind for x in value):
                try:
                    return {_TAG: "numbers", "at": self._put(np.array(value, np.int64 if kind is int else np.float64))}
                except OverflowError:  # ints without a bound
                    pass
        return self._each(value, where)

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"a key of {where}"), self.encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "of": pairs}

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        if is_key(value):
            impl = str(jax.random.key_impl(value))
            return {_TAG: "key", "impl": impl, "of": self._array(np.asarray(jax.random.key_data(value)), where)}
        kind = "jax" if isinstance(value, jax.Array) else "scalar" if isinstance(value, np.generic) else "array"
        array = np.array(value)  # a copy, which stays what it is
        if array.dtype.kind in "OSUMmV" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise DeclarationError(
                f"{where} is {describe(array)}, an array that a checkpoint cannot hold.",
                why="arrays in checkpoints are numbers and truth values",
                fix="keep it as a list: `array.tolist()`",
            )
        if array.size == 0:
            return {_TAG: kind, "shape": list(array.shape), "dtype": str(array.dtype)}
        return {_TAG: kind, "at": self._put(array)}

    def _put(self, array: np.ndarray) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return name


class Decoder:
    """Make values of what `Encoder` wrote down.

    Args:
        arrays: The arrays.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays

    def decode(self, held: Any, present: Any, where: str) -> Any:
        """Return the value.

        Args:
            held: What was written down.
            present: What stands at its place now; objects are filled in there.
            where: What messages call it.

        Raises:
            CheckpointError: An object was written down, and there is none now that could be filled in.
        """
        if isinstance(held, list):
            return self._into(present, list, self._each(held, present, where))
        if not isinstance(held, Mapping):
            return held
        kind = held.get(_TAG)
        if kind is None:
            at = present if isinstance(present, Mapping) else {}
            items = {key: self.decode(item, at.get(key), f"{where}[{key!r}]") for key, item in held.items()}
            return self._into(present, dict, items)
        if kind in ("jax", "array", "scalar"):
            return self._array(held)
        if kind in _SEQUENCES or kind == "namedtuple":
            return self._sequence(kind, held, present, where)
        if kind == "numbers":
            return self._into(present, list, self._arrays[held["at"]].tolist())
        if kind == "dict":
            pairs = [(self.decode(key, None, where), item) for key, item in held["of"]]
            at = present if isinstance(present, Mapping) else {}
            return self._into(present, dict, {k: self.decode(v, at.get(k), f"{where}[{k!r}]") for k, v in pairs})
        if kind == "bytes":
            return bytes.fromhex(held["hex"])
        if kind == "complex":
            return complex(*held["parts"])
        if kind == "key":
            return jax.random.wrap_key_data(jnp.asarray(self._array(held["of"])), impl=held["impl"])
        return self._object(kind, held["of"], present, where)

    def _each(self, held: list[Any], present: Any, where: str) -> list[Any]:
        at = list(present) if isinstance(present, list | tuple | deque) else []
        at += [None] * (len(held) - len(at))
        return [self.decode(item, at[i], f"{where}[{i}]") for i, item in enumerate(held)]

    def _array(self, held: Mapping[str, Any]) -> Any:
        array = self._arrays[held["at"]] if "at" in held else np.empty(held["shape"], jnp.dtype(held["dtype"]))
        if held[_TAG] == "scalar":
            return array[()]
        return jnp.array(array, copy=True) if held[_TAG] == "jax" else np.array(array)

    def _sequence(self, kind: str, held: Mapping[str, Any], present: Any, where: str) -> Any:
        items = self._each(held["of"], present, where)
        if kind == "namedtuple":
            if not (isinstance(present, tuple) and hasattr(present, "_fields")):
                raise _nothing_there(where, present)
            return type(present)(*items)
        if kind == "deque":
            return self._into(present, deque, deque(items, held["maxlen"]))
        return _SEQUENCES[kind](items)

    def _object(self, kind: str, held: Any, present: Any, where: str) -> Any:
        if kind == "state" and callable(getattr(present, "load_state_dict", None)):
            present.load_state_dict(self.decode(held, present.state_dict(), where))
            return present
        if kind == "fields" and dataclasses.is_dataclass(present) and not isinstance(present, type):
            at = {f.name: getattr(present, f.name) for f in dataclasses.fields(present)}
            values = {name: self.decode(held[name], at[name], f"{where}.{name}") for name in at if name in held}
            frozen = type(present).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
            if frozen:
                return dataclasses.replace(present, **values)
            for name, value in values.items():
                setattr(present, name, value)
            return present
        raise _nothing_there(where, present)

    def _into(self, present: Any, kind: type, value: Any) -> Any:
        """Return the container that is there, filled anew, if it is of the kind: others may hold on to it."""
        if type(present) is not kind or (kind is deque and present.maxlen != value.maxlen):
            return value
        present.clear()
        (present.update if kind is dict else present.extend)(value)
        return present


def _nothing_there(where: str, present: Any) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint has an object's state for {where}, where now there is {_short(present)}.",
        why="objects are filled in where they are; a checkpoint says nothing about how to make one",
        fix="create it in `init` of the callback that owns it, before anything is restored",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
