"""Where the proxies of host handlers read and write: step values in the window at hand, the rest in the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import copy_tree, describe, differences, to_host
from fluxcb._compile.carried import below, names_in, replaced, root_of
from fluxcb._compile.handler_backend import Touched
from fluxcb._compile.leaves import is_number
from fluxcb._compile.traced import name_hash
from fluxcb._declare.access import Permission, Read, Write, dotted, writes
from fluxcb._declare.declared import Declared
from fluxcb._errors import AccessError, DeclarationError, MissingStateError, did_you_mean
from fluxcb._run.state import HostState
from fluxcb._run.views import read_only
from fluxcb._typing import PyTree, StatePath

__all__ = ["HostBackend", "watching"]

watching: ContextVar[Callable[[Declared], Touched] | None] = ContextVar("watching", default=None)
"""Says where to note what a callback touches, for the Learners that are built meanwhile; usually nobody asks."""

# What cannot be changed in place: handlers get copies of it. A batch's arrays are the data source's own.
_COPIED = frozenset(("step", "progress", "params", "model_state", "opt_state", "hyperparams", "key"))


class HostBackend:
    """Where the proxies of one callback read and write on the host.

    Args:
        state: The state.
        declared: The callback.
    """

    def __init__(self, state: HostState, declared: Declared) -> None:
        self._state = state
        self._declared = declared
        watch = watching.get()
        self._touched = watch(declared) if watch is not None else None

    # -- reading ----------------------------------------------------------------------------

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return the value at a path, as the permission allows."""
        if self._touched is not None:
            self._note_read(path, permission, self._touched)
        return self._value(path, permission)

    def _value(self, path: StatePath, permission: Permission) -> Any:
        state, first = self._state, path[0]
        if first == "step":
            return self._read_step(path, permission)
        if first == "progress":
            return self._progress(path[1])
        if first == "cbstate" and not state.in_carry(path[1]):
            return self._read_shared(path, permission)
        if first in ("params", "model_state", "opt_state", "cbstate"):
            return self._read_carry(path, permission)
        if first == "hyperparams":
            self._require_hyperparam(path[1], writing=False)
            found = self._of_window(path)
            if found is not None:
                return found[0]
            self._refuse_ahead(path)
            state.meter.note_read(dotted(path))
            return to_host(state.hyperparams.get(state.live(("opt_state",)), path[1]))
        if first == "key":
            key = jax.random.fold_in(jax.random.fold_in(state.run_key, state.step), state.step_in_epoch)
            # Another name than the traced handlers of the callback have, so that the two never share a key.
            return jax.random.fold_in(key, name_hash(f"host {self._declared.name}"))
        if first == "data":
            return state.data.get(path[1])
        return getattr(state, first)

    def reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return what reads a path, as a property of a view; those that handlers read at every step are short."""
        get, touched = self._reader(path, permission), self._touched
        if touched is None:
            return get

        def noted(view: Any) -> Any:
            self._note_read(path, permission, touched)
            return get(view)

        return noted

    def _note_read(self, path: StatePath, permission: Permission, touched: Touched) -> None:
        touched.read.add(path)
        riding = path[0] == "cbstate" and self._state.in_carry(path[1])
        copied = (path[0] in _COPIED and path[:2] != ("step", "batch")) or riding
        if writes(permission) and not copied:
            touched.changeable.add(path)

    def _reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        state = self._state
        if path[0] == "progress" and len(path) == 2:
            name = path[1]
            return lambda view: getattr(state, name)
        if path[0] == "step" and len(path) == 2:
            return self._step_reader(path, permission)
        if path[0] == "cbstate" and len(path) == 2 and writes(permission):
            return self._own_reader(path, permission)
        if path[0] == "cbstate" and len(path) == 2 and getattr(permission, "borrow", False):
            return self._live_reader(path, permission)
        return lambda view: self._value(path, permission)

    def _step_reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        state, name, borrow = self._state, path[1], getattr(permission, "borrow", False)

        def read(view: Any) -> Any:
            window = state.window
            if window is not None:
                if name == "stop":
                    return window.stop
                if name == "batch" and borrow:
                    return window.batch
            return self._value(path, permission)

        return read

    def _live_reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        state, name = self._state, path[1]

        def read(view: Any) -> Any:
            shared = state.cbstate
            return shared[name] if name in shared else self._value(path, permission)

        return read

    def _own_reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return a function that reads an entry that the callback may write; see `_as_used`."""
        state, name = self._state, path[1]
        known: tuple[Any, Any] = None, None  # an entry, and the object that the callback gets instead

        def read(view: Any) -> Any:
            nonlocal known
            shared = state.cbstate
            if name not in shared:
                return self._value(path, permission)
            value = shared[name]
            held, used = known
            if held is not value:
                used = self._as_used(value)
                known = value, used
            return used

        return read

    def _as_used(self, value: Any) -> Any:
        """Return the object that this callback gets for an entry: `entry.used_by(...)` if the entry has this method."""
        used_by = getattr(value, "used_by", None)
        return used_by(self._declared.label) if callable(used_by) else value

    def _read_step(self, path: StatePath, permission: Permission) -> Any:
        window, name = self._state.window, path[1]
        try:
            if window is None:
                raise KeyError(name)
            if name in window.written:
                return self._handed_out(below(window.written[name], path[2:]), path)
            if name == "stop":
                return window.stop
            if name in ("skip", "hold") and window.has(path) is None:  # nobody writes it
                return False
            if name != "batch":
                return self._handed_out(window.value(path), path)
            batch = window.batch if getattr(permission, "borrow", False) else to_host(window.batch)
            return self._handed_out(below(batch, path[2:]), path)
        except KeyError:
            known = window.names() if window is not None else []
            raise MissingStateError(
                f"{self._declared.label} reads `{dotted(path)}`, which is not there.{did_you_mean(name, known)}",
                where=self._declared.where,
                why="host handlers see step values at StepBegin (the batch) and StepEnd"
                if window is None
                else f"this step has {', '.join(known)}",
                fix="read it at StepEnd, in a phase that provides it",
            ) from None

    def _of_window(self, path: StatePath) -> tuple[Any] | None:
        """Return what the window has of a part of the carry as its step left it, or None: then the carry has it."""
        window, root = self._state.window, root_of(path)
        if window is None or not window.computed or root in window.overwritten:
            return None
        if window.has(path) is not None:
            return (window.value(path),)
        for end in range(len(path), 0, -1):
            if path[:end] in window.kept:
                self._state.meter.note_read(dotted(path))
                return (below(window.kept[path[:end]](), path[end:]),)
        return None

    def _handed_out(self, value: PyTree, path: StatePath) -> PyTree:
        """Return a pytree in fresh containers: JAX knows those, which it would not know views to be."""
        leaves, structure = jax.tree.flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        fresh = jax.tree.unflatten(structure, leaves)
        self._state.handed.append((self._declared.label, path, fresh, leaves, structure))
        return fresh

    def _progress(self, name: str) -> int:
        return getattr(self._state, name)

    def _read_shared(self, path: StatePath, permission: Permission) -> Any:
        value: Any = self._state.cbstate
        writable = writes(permission)
        for position, part in enumerate(path[1:], 2):
            try:
                value = _part(value, part, writable=writable)
            except (KeyError, AttributeError):
                raise self._nothing_at(path[:position], value) from None
            if writable:
                value = self._as_used(value)
        return value if writable or getattr(permission, "borrow", False) else self._viewed(value, path)

    def _nothing_at(self, path: StatePath, container: Any) -> MissingStateError:
        label, where, name = self._declared.label, self._declared.where, path[-1]
        hint = did_you_mean(name, _names(container))
        if hasattr(type(container), "cbstate_part"):
            return MissingStateError(
                f"{label} reads `{dotted(path)}`, which has no value yet.{hint}",
                where=where,
                why=f"so far, `{dotted(path[:-1])}` has {', '.join(map(repr, _names(container))) or 'nothing'}",
                fix=f'ask first: `if "{name}" in learner.{dotted(path[:-1])}`',
            )
        return MissingStateError(
            f"{label} reads `{dotted(path)}`, which nobody has created.{hint}",
            where=where,
            why="an entry exists once a callback's `init` (or a handler before this one) has assigned it",
            fix="create it in `init` of the callback that writes it",
        )

    def _viewed(self, value: Any, path: StatePath) -> Any:
        return read_only(value, lambda: self._refusal(path))

    def _refusal(self, path: StatePath) -> AccessError:
        return AccessError(
            f"{self._declared.label} declares only to read `{dotted(path)}`, and writes into it.",
            where=self._declared.where,
            why="order and conflicts are derived from what is declared",
            fix=self._declared.how_to_declare(path, Write()),
        )

    def _read_carry(self, path: StatePath, permission: Permission) -> Any:
        borrowed = isinstance(permission, Read) and permission.borrow
        found = self._of_window(path) if not borrowed else None
        if found is not None:
            return self._handed_out(found[0], path)
        self._refuse_ahead(path)
        self._state.meter.note_read(dotted(path))
        root = root_of(path)
        value = self._state.live(root) if borrowed else self._state.copy_of(root)
        return self._handed_out(below(value, path[len(root) :]), path)

    def _refuse_ahead(self, path: StatePath) -> None:
        """Refuse the train state at a moment inside a window, which only an event emitted by a handler can be."""
        if self._state.ahead:
            raise DeclarationError(
                f"{self._declared.label} is to see `{dotted(path)}` at an event that a step's handler emits.",
                where=self._declared.where,
                why="the device runs ahead of the handlers, so the train state is not that of the handler's step",
                fix=f"declare `{dotted(path)}` for the handler that emits the event, too, or emit it between epochs",
            )

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names that exist below a path."""
        if self._touched is not None:
            self._touched.read.add(path)
        state = self._state
        if path == ("cbstate",):
            return iter([*state.cbstate, *(state.carry["cbstate"] if state.built else ())])
        if path == ("step",):
            return iter(state.window.names() if state.window is not None else ())
        if path == ("hyperparams",):
            return iter(state.hyperparams.names)
        if path == ("data",):
            return iter(state.data)
        if path[0] == "cbstate" and not state.in_carry(path[1]):
            return iter(_names(self._shared(path)))
        return names_in(below(state.live(path[:2]), path[2:]))

    def hub(self, path: StatePath) -> Any:
        """Return the shared object at a path if it has named parts (`cbstate_part`), otherwise None."""
        value = None if self._state.in_carry(path[1]) else self._shared(path)
        return value if hasattr(type(value), "cbstate_part") else None

    def _shared(self, path: StatePath) -> Any:
        """Return the shared object at a path, or an empty mapping if there is none."""
        value: Any = self._state.cbstate
        try:
            for part in path[1:]:
                value = _part(value, part, writable=False)
        except (KeyError, AttributeError):
            return {}
        return value

    # -- writing ----------------------------------------------------------------------------

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Replace the value at a path; arrays are copied, so that the user's own survive donation."""
        if self._touched is not None:
            self._touched.written.add(path)
        state, first = self._state, path[0]
        if first == "cbstate" and not state.in_carry(path[1]):
            self._write_shared(path, value)
        elif first in ("params", "model_state", "opt_state", "cbstate"):
            self._write_carry(path, value)
        elif first == "hyperparams":
            self._require_hyperparam(path[1], writing=True)
            self._refuse_ahead(path)
            old = state.hyperparams.get(state.live(("opt_state",)), path[1])
            if not is_number(value):
                raise self._misfit(path, [f"{describe(old)} became {describe(value)}"])
            if np.shape(value) != old.shape:
                raise self._misfit(path, [f"shape {old.shape} became {np.shape(value)}"])
            state.replace(("opt_state",), state.hyperparams.set(state.live(("opt_state",)), path[1], value))
        elif first == "step":
            self._write_step(path, value)
        elif first == "data":
            state.on_data(path[1], value)
        elif first == "model":
            state.on_model(value)
        else:
            raise AccessError(
                f"{self._declared.label} assigns `{dotted(path)}`, which cannot be exchanged while a Learner exists.",
                where=self._declared.where,
                fix="build a new Learner",
            )

    def _write_shared(self, path: StatePath, value: Any) -> None:
        target: Any = self._state.cbstate
        for part in path[1:-1]:
            if isinstance(target, MutableMapping):
                target = target.setdefault(part, {})
            else:
                target = _part(target, part, writable=True)
        if hasattr(type(target), "cbstate_part"):
            raise AccessError(
                f"{self._declared.label} assigns `{dotted(path)}`, a part of a {type(target).__name__}.",
                where=self._declared.where,
                why="the assignment would not reach the object that other callbacks read",
                fix=f"change it in place, by methods of `learner.{dotted(path)}`",
            )
        if isinstance(target, MutableMapping):
            target[path[-1]] = value
        else:
            setattr(target, path[-1], value)

    def _write_carry(self, path: StatePath, value: Any) -> None:
        self._refuse_ahead(path)
        root = root_of(path)
        old = self._state.live(root)
        new = replaced(old, path[len(root) :], value)
        if jax.tree.structure(old) == jax.tree.structure(new):
            new = jax.tree.map(lambda o, n: jnp.asarray(n, o.dtype) if isinstance(n, int | float) else n, old, new)
        wrong = differences(old, new)
        if wrong:
            raise self._misfit(path, wrong)
        self._state.replace(root, copy_tree(new))

    def _write_step(self, path: StatePath, value: Any) -> None:
        window = self._state.window
        if window is None:
            raise AccessError(
                f"{self._declared.label} writes `{dotted(path)}` outside a step.",
                where=self._declared.where,
                fix="write it at StepBegin or StepEnd",
            )
        if path[1] == "batch":
            window.batch = value
        elif path[1] in ("xs", "ys") and not window.computed:  # before the step: they are the batch's two parts
            batch = window.batch
            pair = list(batch) if isinstance(batch, tuple | list) else [batch, None]
            pair[("xs", "ys").index(path[1])] = value
            window.batch = tuple(pair)
        elif window.has(path[:2]) is not None or path[1] == "stop":
            raise AccessError(
                f"{self._declared.label} writes `{dotted(path)}`, which the step has computed.",
                where=self._declared.where,
                why="the other handlers of this moment would read what never happened",
                fix="write it in a traced handler, or under another name",
            )
        else:
            window.written[path[1]] = value

    def _require_hyperparam(self, name: str, *, writing: bool) -> None:
        self._state.hyperparams.require(name, writing=writing, declared=self._declared, where=self._declared.where)

    def _misfit(self, path: StatePath, wrong: list[str]) -> DeclarationError:
        return DeclarationError(
            f"{self._declared.label} changes the structure, shape or dtype of `{dotted(path)}`: {wrong[0]}.",
            where=[self._declared.where, *wrong[1:5]],
            why="the carry of a compiled step keeps its structure, shapes and dtypes",
            fix="assign what has the same structure, e.g. with `.astype(old.dtype)`",
        )


def _part(value: Any, name: str, *, writable: bool) -> Any:
    """Return the part of a shared object that a path names.

    Raises:
        KeyError, AttributeError: There is no such part.
    """
    if isinstance(value, Mapping):
        return value[name]
    if hasattr(type(value), "cbstate_part"):
        return value.cbstate_part(name, writable=writable)
    return getattr(value, name)


def _names(value: Any) -> list[str]:
    """Return the names of the parts of a shared object."""
    return list(value) if hasattr(type(value), "cbstate_part") else list(names_in(value))
