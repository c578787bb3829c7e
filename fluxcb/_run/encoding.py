"""Encoding host values as JSON and arrays for checkpoints, and decoding them: the state of callbacks.

A checkpoint names no class, because importing and calling a class that a file names would run code of the file's
author. Objects with `state_dict` and `load_state_dict`, dataclasses, and namedtuples are therefore restored into
existing objects.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.signatures import source_of
from fluxcb._errors import CheckpointCorruptError, CheckpointError, DeclarationError, FluxcbError
from fluxcb._interruptions import is_interruption
from fluxcb._traced_values import describe

__all__ = ["Decoder", "Encoder", "state_of_callback"]

_TAG = "$"
_MIN_ARRAY_LENGTH = 64  # longer lists of numbers are stored as arrays, which are smaller and faster to read than text
_MAX_DEPTH = 100  # levels of containers; each takes up to four Python frames, and the limit of Python is 1000 frames
_INT_BITS = 14_000  # Python converts integers with up to 4300 digits to text and back

# A value that is not plain JSON is an object with its kind in the field "$". A kind that is stored as an array has the
# name of the array in the field "at", and all other kinds have their content in the field "of". The field "as" is the
# type of an array that NumPy cannot store, the implementation of random keys, or the length of a deque.
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "jax": lambda array: jnp.array(array, copy=True),
    "array": np.array,
    "scalar": lambda array: array[()],
    "numbers": np.ndarray.tolist,
    "bytes": np.ndarray.tobytes,
    "complex": complex,
}
# The number of dimensions and the types of the arrays in which these kinds are stored.
_STORED: dict[str, tuple[int, tuple[Any, ...]]] = {
    "numbers": (1, (np.int64, np.float64)),
    "bytes": (1, (np.uint8,)),
    "complex": (0, (np.complex128,)),
}
_CONTENT: dict[str, type] = {
    **dict.fromkeys((*_ARRAYS, "key"), str),
    **dict.fromkeys((*_SEQUENCES, "namedtuple", "dict"), list),
    "fields": dict,
    "state": object,
}


def state_of_callback(declared: Declared) -> Any:
    """Return what `state_dict` of a callback returns.

    Raises:
        DeclarationError: It returns None, often because `return` is missing, or the callback cannot restore its state.
    """
    saved = declared.callback.state_dict()
    if saved is None:
        raise DeclarationError(
            f"`{declared.cls.__name__}.state_dict` returned None.",
            where=source_of(declared.cls.state_dict),
            why="the checkpoint would contain nothing of the callback",
            fix="return a dict, `{}` if there is nothing to save",
        )
    wrapped = unwrap(declared.callback)
    cls = type(wrapped)
    only_saves = cls.state_dict is not Callback.state_dict and cls.load_state_dict is Callback.load_state_dict
    if only_saves and wrapped.state_dict():  # not `saved`, which can be the state of a wrapper
        raise DeclarationError(
            f"`{cls.__name__}` has `state_dict`, but no `load_state_dict`.",
            where=source_of(cls.state_dict),
            why="a run could not resume from this checkpoint",
            fix="define `load_state_dict(self, state)`, which restores what `state_dict(self)` returns",
        )
    return saved


class Encoder:
    """Encodes values as JSON and arrays.

    Attributes:
        arrays: The arrays of the encoded values, by their names in the JSON.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._open: list[Any] = []  # the containers and objects around the value that is being encoded

    def encode(self, value: Any, where: str) -> Any:
        """Return a value in a form that `json` accepts.

        Args:
            value: The value.
            where: The name of the value in messages.

        Raises:
            DeclarationError: The value is, or contains, something that cannot be saved.
        """
        # Exact types: `np.float64` is a subclass of float and an IntEnum of int, but JSON would not preserve their
        # types.
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value if type(value) is not int else _checked_int(value, where)
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return self._array(value, where)
        if isinstance(value, bytes):
            return {_TAG: "bytes", "at": self._store(np.frombuffer(value, np.uint8))}
        if isinstance(value, complex):
            return {_TAG: "complex", "at": self._store(np.array(value, np.complex128))}
        self._check_nesting(value, where)
        self._open.append(value)
        try:
            return self._container(value, where)
        finally:
            self._open.pop()

    def _container(self, value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, list):
            return self._list(value, where)
        for kind, cls in _SEQUENCES.items():
            if isinstance(value, cls):
                # The order of a set differs from process to process, and the same state must give the same file.
                items = sorted(value, key=repr) if kind in ("set", "frozenset") else value
                kind = "namedtuple" if hasattr(value, "_fields") else kind
                encoded = {_TAG: kind, "of": self._encode_items(items, where)}
                return {**encoded, "as": value.maxlen} if kind == "deque" else encoded
        # Before dataclasses, because the methods know more about an object than its fields.
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return {_TAG: "state", "of": self.encode(value.state_dict(), where)}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # Not `dataclasses.asdict`, which would also convert the values inside.
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {_TAG: "fields", "of": self._mapping(fields, where)}
        raise DeclarationError(
            f"{where} is {type(value).__name__} {_short(value)}, which a checkpoint cannot hold.",
            why="a checkpoint holds numbers, texts, arrays, and lists, tuples, sets, dicts and dataclasses of them",
            fix=[
                f"give {type(value).__name__} the methods `state_dict()` and `load_state_dict(state)`",
                "keep it in a field of the callback that `state_dict` leaves out, and create it in `init`",
            ],
        )

    def _check_nesting(self, value: Any, where: str) -> None:
        """Refuse a value that contains itself, or that is nested too deeply."""
        if any(value is container for container in self._open):
            raise DeclarationError(
                f"{_capitalized(where)} is a {type(value).__name__} that contains itself, so a checkpoint cannot hold "
                "it.",
                why="a checkpoint stores these values as JSON, which has no references",
                fix="store a name or an index instead of the reference",
            )
        if len(self._open) == _MAX_DEPTH:
            outermost = _capitalized(where.partition("[")[0])
            raise DeclarationError(
                f"{outermost} has more than {_MAX_DEPTH} levels of nested containers, so a checkpoint cannot hold it.",
                why="a checkpoint stores these values as JSON, which is read recursively",
                fix="store a flat list, e.g. one of `(parent, value)` pairs",
            )

    def _encode_items(self, values: Any, where: str) -> list[Any]:
        return [self.encode(value, f"{where}[{number}]") for number, value in enumerate(values)]

    def _list(self, value: list[Any], where: str) -> Any:
        if len(value) >= _MIN_ARRAY_LENGTH:
            kind = type(value[0])
            if kind in (int, float) and all(type(x) is kind for x in value):
                try:
                    return {
                        _TAG: "numbers",
                        "at": self._store(np.array(value, np.int64 if kind is int else np.float64)),
                    }
                except OverflowError:  # an int with more than 64 bits
                    pass
        return self._encode_items(value, where)

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        # JSON allows only string keys, so other keys are stored as pairs. A dict that looks like an encoded value is
        # stored as pairs as well.
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [self.encode(key, f"a key of {where}"), self.encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "of": pairs}

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        if is_key(value):
            data = np.array(jax.random.key_data(value))
            return {_TAG: "key", "at": self._store(data), "as": str(jax.random.key_impl(value))}
        kind = "jax" if isinstance(value, jax.Array) else "scalar" if isinstance(value, np.generic) else "array"
        array = np.array(value)  # a copy, because later steps may change the original
        if not _storable(array.dtype):
            raise DeclarationError(
                f"{where} is {describe(array)}, an array that a checkpoint cannot hold.",
                why="arrays in checkpoints are numbers and truth values",
                fix="keep it as a list: `array.tolist()`",
            )
        if array.dtype.isbuiltin == 2:  # from ml_dtypes, such as bfloat16, which NumPy files do not preserve
            bits = array.view(f"u{array.dtype.itemsize}")
            return {_TAG: kind, "at": self._store(bits), "as": str(array.dtype)}
        return {_TAG: kind, "at": self._store(array)}

    def _store(self, array: np.ndarray) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return name


class Decoder:
    """Decodes values that an `Encoder` encoded.

    Args:
        arrays: The arrays.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = dict(arrays)

    def decode(self, encoded: Any, existing: Any, where: str) -> Any:
        """Return the value.

        Args:
            encoded: The encoded value.
            existing: The current value. The state of objects is restored into it.
            where: The name of the value in messages.

        Raises:
            CheckpointCorruptError: An `Encoder` cannot have written the value.
            CheckpointError: The value is the state of an object, and there is no existing object for it.
        """
        try:
            return self._decode(encoded, existing, where)
        except Exception as error:  # includes RecursionError and errors of an object's own `load_state_dict`
            if isinstance(error, FluxcbError) or is_interruption(error):
                raise
            raise CheckpointCorruptError(
                f"The checkpoint has a value for {where} that cannot be restored: {type(error).__name__}: {error}.",
                why="its files have the right checksums, but either fluxcb did not write them, or the class of an "
                "object has changed since",
                fix=["restore another checkpoint", "use the version of the code that wrote the checkpoint"],
            ) from error

    def _decode(self, encoded: Any, existing: Any, where: str) -> Any:
        if isinstance(encoded, list):
            return self._fill(existing, list, self._decode_items(encoded, existing, where))
        if not isinstance(encoded, Mapping):
            return encoded
        if _TAG not in encoded:
            return self._dict(list(encoded.items()), existing, where)
        # Only the exact output of `Encoder` is accepted, so that a restored state is exactly what the file contains.
        # A missing field gives None, which has the wrong type below.
        kind, content = encoded[_TAG], encoded.get("at", encoded.get("of"))
        field = "at" if kind in _ARRAYS or kind == "key" else "of"
        if set(encoded) - {"as"} != {_TAG, field} or not isinstance(content, _CONTENT[kind]):
            raise ValueError(f"{_short(encoded)} is not an encoded value")
        if field == "at":
            # Each array is used only once: `Encoder` refers to each array in one place, and several references in a
            # forged file could multiply its size in memory.
            value = _array_of(kind, self._arrays.pop(content), encoded.get("as"))
            return self._fill(existing, list, value) if kind == "numbers" else value
        if kind == "dict":
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
                raise ValueError("the items of a dict are not pairs")
            return self._dict(content, existing, where)
        if kind in ("state", "fields"):
            return self._object(kind, content, existing, where)
        return self._sequence(kind, content, encoded.get("as"), existing, where)

    def _decode_items(self, encoded: list[Any], existing: Any, where: str) -> list[Any]:
        # The file names no classes, so an object in a list is restored into the object at the same position.
        at = dict(enumerate(existing)) if isinstance(existing, list | tuple | deque) else {}
        return [self._decode(item, at.get(i), f"{where}[{i}]") for i, item in enumerate(encoded)]

    def _dict(self, encoded: list[Any], existing: Any, where: str) -> Any:
        at = existing if isinstance(existing, Mapping) else {}
        items = {}
        for key, item in encoded:
            key = self._decode(key, None, where)
            items[key] = self._decode(item, at.get(key), f"{where}[{key!r}]")
        if len(items) < len(encoded):
            raise ValueError("a key occurs twice")
        return self._fill(existing, dict, items)

    def _sequence(self, kind: str, encoded: list[Any], maxlen: Any, existing: Any, where: str) -> Any:
        items = self._decode_items(encoded, existing, where)
        if kind == "namedtuple":
            if not (isinstance(existing, tuple) and hasattr(existing, "_fields")):
                raise _no_object_error(where, existing)
            return type(existing)(*items)
        if kind == "deque":
            return self._fill(existing, deque, deque(items, maxlen))
        made = _SEQUENCES[kind](items)
        if len(made) < len(items):
            raise ValueError(f"a value occurs twice in a {kind}")
        return made

    def _object(self, kind: str, encoded: Any, existing: Any, where: str) -> Any:
        # The class comes from the existing object; the checkpoint only has its state.
        if kind == "state" and callable(getattr(existing, "load_state_dict", None)):
            # The current state provides the objects into which the objects inside the state are restored.
            existing.load_state_dict(self._decode(encoded, _state_of(existing), where))
            return existing
        if kind == "fields" and dataclasses.is_dataclass(existing) and not isinstance(existing, type):
            at = {f.name: getattr(existing, f.name) for f in dataclasses.fields(existing)}
            # Fields that the class has gained since the checkpoint keep their current value.
            values = {name: self._decode(encoded[name], at[name], f"{where}.{name}") for name in at if name in encoded}
            frozen = type(existing).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
            if frozen:
                return dataclasses.replace(existing, **values)
            for name, value in values.items():
                setattr(existing, name, value)
            return existing
        raise _no_object_error(where, existing)

    def _fill(self, existing: Any, kind: type, value: Any) -> Any:
        """Fill the existing container, if its type fits, and return it: other objects may hold references to it."""
        if type(existing) is not kind or (kind is deque and existing.maxlen != value.maxlen):
            return value
        existing.clear()
        (existing.update if kind is dict else existing.extend)(value)
        return existing


def _checked_int(value: int, where: str) -> int:
    if value.bit_length() > _INT_BITS:
        raise DeclarationError(
            f"{_capitalized(where)} is an int of {value.bit_length()} bits, and a checkpoint holds ints of at most "
            f"{_INT_BITS} bits.",
            why="a checkpoint stores ints as decimal text, and Python limits the length of such text",
            fix='store the bytes: `value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True)`',
        )
    return value


def _capitalized(where: str) -> str:
    return where[:1].upper() + where[1:]


def _state_of(value: Any) -> Any:
    """Return an object's state, or None if `state_dict` fails in its current state."""
    try:
        return value.state_dict()
    except Exception as error:
        if is_interruption(error):
            raise
        return None


def _array_of(kind: str, array: np.ndarray, stored_as: Any) -> Any:
    """Return the value that is stored as an array; refuse arrays that an `Encoder` does not store."""
    if kind == "key":
        return jax.random.wrap_key_data(jnp.asarray(array), impl=stored_as)
    if stored_as is not None:
        dtype = jnp.dtype(stored_as)
        # Only types of ml_dtypes are stored as another type. A forged type such as object would make `view` unsafe.
        if dtype.isbuiltin != 2:
            raise ValueError(f"{stored_as} is not stored as bits")
        array = array.view(dtype)
    ndim, types = _STORED.get(kind, (0 if kind == "scalar" else array.ndim, (array.dtype,)))
    if not _storable(array.dtype) or array.ndim != ndim or array.dtype not in types:
        raise ValueError(f"no {kind} is stored as {describe(array)}")
    return _ARRAYS[kind](array)


def _storable(dtype: np.dtype) -> bool:
    # Objects, texts, dates, and structures are refused. The types of ml_dtypes have the kind `V`, as structures have.
    return dtype.kind not in "OSUMmV" or jnp.issubdtype(dtype, jnp.floating)


def _no_object_error(where: str, existing: Any) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint has the state of an object for {where}, but the current value is {_short(existing)}.",
        why="a checkpoint restores the state of existing objects; it does not know how to create them",
        fix="create the object in `init` of the callback that owns it, which runs before the restore",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
