"""The backend of host handlers: step values come from the current window, everything else from the state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import copy_tree, differences, to_host
from fluxcb._compile.carry_paths import below, names_in, replaced, root_of, same_form
from fluxcb._compile.handler_backend import Touched
from fluxcb._compile.hyperparams import unusable
from fluxcb._compile.leaves import is_number
from fluxcb._compile.traced import name_hash
from fluxcb._declare.access import MONITORS, STEP_FLAGS, Permission, Read, Write, dotted, writes
from fluxcb._declare.declared import Declared
from fluxcb._errors import AccessError, DeclarationError, MissingStateError, did_you_mean
from fluxcb._run.refused_access import (
    computed_value_written,
    flag_written_late,
    missing_entry,
    refused_step_write,
    undeclared_fix,
)
from fluxcb._run.services import Services
from fluxcb._run.shared_parts import is_hub, object_at, part_names, shared_part
from fluxcb._run.state import HostState
from fluxcb._run.views import read_only
from fluxcb._traced_values import describe
from fluxcb._typing import PyTree, StatePath

__all__ = ["HostBackend", "access_watcher"]

access_watcher: ContextVar[Callable[[Declared], Touched] | None] = ContextVar("access_watcher", default=None)
"""A function that returns the record of a callback's accesses, for audits; None if accesses are not recorded."""

# Handlers get copies of these parts, so they cannot be changed in place. The arrays of a batch belong to the data
# source and are not copied.
_COPIED = frozenset(("step", "progress", "params", "model_state", "opt_state", "hyperparams", "key"))


class HostBackend:
    """Reads and writes state for the host handlers of one callback.

    Args:
        state: The state.
        declared: The callback.
        services: The services that handlers reach besides the state.

    Attributes:
        replaced: The parts of the carry that the callback has replaced, e.g. `params` or `hyperparams.learning_rate`.
            With several processes, `HostWrites` reads and clears it.
    """

    def __init__(self, state: HostState, declared: Declared, services: Services) -> None:
        self._state, self._services = state, services
        # Bound here because some readers run at every step.
        self._moment, self._train = state.moment, state.train
        self._declared = declared
        self._lend = functools.partial(state.moment.lent.lend, declared)
        # Read once: an audit sets it before it builds a Learner, and other trainings pay nothing for it at each read.
        watch = access_watcher.get()
        self._touched = watch(declared) if watch is not None else None
        self.replaced: set[StatePath] = set()

    def naming(self, declared: Declared) -> HostBackend:
        """Return the same backend, with errors that name other declarations of the callback (`access_source`)."""
        if declared is self._declared:
            return self
        backend = copy.copy(self)
        backend._declared = declared
        return backend

    # -- reading ----------------------------------------------------------------------------

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return the value at a path, as the permission allows."""
        if self._touched is not None:
            self._note_read(path, permission, self._touched)
        return self._value(path, permission)

    def _value(self, path: StatePath, permission: Permission) -> Any:
        state, train, first = self._state, self._train, path[0]
        if first == "step":
            return self._read_step(path, permission)
        if first == "progress":
            return getattr(self._holder_of(path[1]), path[1])
        if first == "cbstate" and not train.in_carry(path[1]):
            return self._read_shared(path, permission)
        if first in ("params", "model_state", "opt_state", "cbstate"):
            return self._read_carry(path, permission)
        if first == "hyperparams":
            self._require_hyperparam(path[1], writing=False)
            found = self._value_in_window(path)  # if the device is ahead, only the window has this step's value
            if found is not None:
                return found[0]
            self._refuse_ahead(path)
            state.meter.note_read(dotted(path))
            return to_host(train.hyperparams.get(train.live(("opt_state",)), path[1]))
        if first == "key":
            progress = state.progress
            key = jax.random.fold_in(jax.random.fold_in(train.run_key, progress.step), progress.step_in_epoch)
            # The name differs from that of the traced handlers of the callback, so that the two never share a key. Keys
            # are folded from the run's key, the step, and the callback name, so adding a callback changes no other
            # callback's numbers.
            return jax.random.fold_in(key, name_hash(f"host {self._declared.name}"))
        if first == "data":
            return state.data.get(path[1])
        if first == "callbacks":
            return self._services.callbacks()
        if first in ("model", "optimizer"):
            return state.moment.lent.lend_object(self._declared, getattr(state, first), path)
        return getattr(self._services if first in ("evaluation", "snapshots") else state, first)

    def _holder_of(self, name: str) -> Any:
        """Return the object that holds a value of `progress`; only the moment of a step has a batch size."""
        return self._moment if name == "batch_size" else self._state.progress

    def reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return the getter of a path, for a property of a protected learner."""
        get, touched = self._reader(path, permission), self._touched
        # Without an audit, a read must not cost another call.
        if touched is None:
            return get

        def noted(view: Any) -> Any:
            self._note_read(path, permission, touched)
            return get(view)

        return noted

    def _note_read(self, path: StatePath, permission: Permission, touched: Touched) -> None:
        touched.read.add(path)
        carried_entries = path[0] == "cbstate" and self._train.in_carry(path[1])
        copied = (path[0] in _COPIED and path[:2] != ("step", "batch")) or carried_entries
        # `LentValues` detects writes into copies. Only live objects can be changed without notice.
        if writes(permission) and not copied:
            touched.changeable.add(path)

    def _reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        # Views that run at every step get a specialized getter. All other paths go through the general lookup.
        if path[0] == "progress" and len(path) == 2:
            name, holder = path[1], self._holder_of(path[1])
            return lambda view: getattr(holder, name)
        if path[0] == "step" and len(path) == 2:
            return self._step_reader(path, permission)
        if path[0] == "cbstate" and len(path) == 2 and writes(permission):
            return self._writable_reader(path, permission)
        if path[0] == "cbstate" and len(path) == 2 and getattr(permission, "borrow", False):
            return self._live_reader(path, permission)
        return lambda view: self._value(path, permission)

    def _step_reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        moment, name, borrow = self._moment, path[1], getattr(permission, "borrow", False)

        def read(view: Any) -> Any:
            window = moment.window
            if window is not None:  # these two values need neither a fetch nor a copy
                if name == "stop":
                    return window.stop
                if name == "batch" and borrow:
                    return window.batch
            return self._value(path, permission)

        return read

    def _live_reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        state, name = self._state, path[1]

        def read(view: Any) -> Any:
            shared = state.cbstate  # read at each call, because replacing the callbacks replaces the mapping
            return shared[name] if name in shared else self._value(path, permission)

        return read

    def _writable_reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return a getter for an entry that the callback may write; see `_object_for_callback`."""
        state, name = self._state, path[1]
        known: tuple[Any, Any] = None, None  # the last entry, and the object that the callback gets for it

        def read(view: Any) -> Any:
            nonlocal known
            shared = state.cbstate
            if name not in shared:
                return self._value(path, permission)
            value = shared[name]
            held, used = known  # cached, because `used_by` makes a new object
            if held is not value:
                used = self._object_for_callback(value)
                known = value, used
            return used

        return read

    def _object_for_callback(self, value: Any) -> Any:
        """Return the object that this callback gets for an entry: `entry.used_by(...)` if the entry has this method."""
        used_by = getattr(value, "used_by", None)
        return used_by(self._declared.label) if callable(used_by) else value

    def _read_step(self, path: StatePath, permission: Permission) -> Any:
        window, name = self._moment.window, path[1]
        try:
            if window is None:
                raise KeyError(name)  # a MissingStateError explains it below
            # A value that a host handler wrote at this step hides the computed one.
            if name in window.written:
                return self._lend(below(window.written[name], path[2:]), path)
            if name == "stop":
                return window.stop
            if name == "data_position":
                return self._lend(window.data_position, path)
            if name in ("skip", "hold") and window.has(path) is None:  # no traced handler writes it
                return False
            if name == "skips" and window.computed and window.has(path) is None:
                return {"by": {}, "key": None}
            if name == "earlier_losses" and window.computed and window.has(path) is None:  # the step has one loss
                return ()
            if name != "batch":
                return self._lend(window.value(path), path)
            # A borrowed batch stays on the device; otherwise handlers get NumPy arrays.
            batch = window.batch if getattr(permission, "borrow", False) else to_host(window.batch)
            return self._lend(below(batch, path[2:]), path)
        except KeyError:
            known = window.names() if window is not None else []
            raise MissingStateError(
                f"{self._declared.label} reads `{dotted(path)}`, which does not exist here.{did_you_mean(name, known)}",
                where=self._declared.where,
                why="host handlers see step values at StepBegin (the batch) and StepEnd"
                if window is None
                else f"this step has {', '.join(known)}",
                fix="read it at StepEnd, in a phase that provides it"
                if window is None or not window.computed
                else f'assign it at each step where it is declared as `Write()`, or test `"{path[1]}" in learner.step`',
            ) from None

    def _value_in_window(self, path: StatePath) -> tuple[Any] | None:
        """Return the window's value of a part of the carry after its step, as a 1-tuple, or None if it has none."""
        # At StepBegin, the step has not run yet. A part that a handler has replaced is newer than the window.
        window, root = self._moment.window, root_of(path)
        if window is None or not window.computed or root in window.overwritten:
            return None
        if window.has(path) is not None:
            return (window.value(path),)
        for end in range(len(path), 0, -1):  # the copy may be of a part that contains the path
            if path[:end] in window.kept:
                self._state.meter.note_read(dotted(path))
                return (below(window.kept[path[:end]](), path[end:]),)
        return None

    def _read_shared(self, path: StatePath, permission: Permission) -> Any:
        # A callback that may write gets the objects themselves, to change them in place. Other callbacks get read-only
        # views.
        value: Any = self._state.cbstate
        writable = writes(permission)
        for position, part in enumerate(path[1:], 2):
            try:
                value = shared_part(value, part, writable=writable)
            except (KeyError, AttributeError):
                raise missing_entry(self._declared, path[:position], value) from None
            if writable:
                value = self._object_for_callback(value)
        return value if writable or getattr(permission, "borrow", False) else self._read_only(value, path)

    def _read_only(self, value: Any, path: StatePath) -> Any:
        return read_only(value, lambda: self._write_error(path))

    def _write_error(self, path: StatePath) -> AccessError:
        return AccessError(
            f"{self._declared.label} declares only to read `{dotted(path)}`, but writes to it.",
            where=self._declared.where,
            why="declared access determines order and conflicts",
            fix=self._declared.how_to_declare(path, Write()),
        )

    def _read_carry(self, path: StatePath, permission: Permission) -> Any:
        borrowed = isinstance(permission, Read) and permission.borrow
        # The window has copies, and a borrower wants the live arrays.
        found = self._value_in_window(path) if not borrowed else None
        if found is not None:
            return self._lend(found[0], path)
        self._refuse_ahead(path)
        self._state.meter.note_read(dotted(path))
        root = root_of(path)
        # A handler that borrows ends its window, so it gets the live arrays before the next call donates them.
        value = self._train.live(root) if borrowed else self._train.copy_of(root)
        return self._lend(below(value, path[len(root) :]), path)

    def _refuse_ahead(self, path: StatePath) -> None:
        """Refuse the train state inside a window, where only an event that a handler emits can read it undeclared."""
        if self._moment.ahead:
            raise DeclarationError(
                f"{self._declared.label} uses `{dotted(path)}` at an event that a step's handler emits.",
                where=self._declared.where,
                why="the device runs ahead of the handlers, so the train state is not that of the handler's step",
                fix=f"also declare `{dotted(path)}` for the handler that emits the event, or emit it between epochs",
            )

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names that exist below a path."""
        # Listing names is a read, because the result of the handler can depend on them.
        if self._touched is not None:
            self._touched.read.add(path)
        state, train, window = self._state, self._train, self._moment.window
        if path == ("cbstate",):
            return iter([*state.cbstate, *(train.carry["cbstate"] if train.built else ())])
        if path == ("step",):
            return iter(window.names() if window is not None else ())
        if path == ("hyperparams",):
            return iter(train.hyperparams.names)
        if path == ("data",):
            return iter(state.data)
        if path[0] == "cbstate" and not train.in_carry(path[1]):
            return iter(part_names(object_at(state.cbstate, path)))
        return names_in(below(train.live(path[:2]), path[2:]))

    def hub(self, path: StatePath) -> Any:
        """Return the shared object at a path if it has named parts (`cbstate_part`), otherwise None."""
        value = None if self._train.in_carry(path[1]) else object_at(self._state.cbstate, path)
        return value if is_hub(value) else None

    # -- writing ----------------------------------------------------------------------------

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Replace the value at a path. Arrays are copied, so that donation does not destroy the caller's arrays."""
        if self._touched is not None:
            self._touched.written.add(path)
        train, first = self._train, path[0]
        if first == "cbstate" and not train.in_carry(path[1]):
            self._write_shared(path, value)
        elif first in ("params", "model_state", "opt_state", "cbstate"):
            self._write_carry(path, value)
        elif first == "hyperparams":
            self._require_hyperparam(path[1], writing=True)
            self._refuse_ahead(path)
            old = train.hyperparams.get(train.live(("opt_state",)), path[1])
            if found := unusable(path[1], value, old.dtype):
                text = f"{self._declared.label} sets `{dotted(path)}` to {found.shown}."
                fix = f"set it to {found.instead}"
                raise DeclarationError(text, where=self._declared.where, why=found.why, fix=fix)
            if not is_number(value):
                difference = f"expected {describe(old)}, got {describe(value)}"
                raise self._mismatch_error(path, [difference], "set it to a number")
            if np.shape(value) != old.shape:  # it would broadcast and change the shapes of the carry
                raise self._mismatch_error(path, [f"expected shape {old.shape}, got shape {np.shape(value)}"])
            self.replace_part(path, value)
        elif first == "step":
            self._write_step(path, value)
        elif first == "data":
            self._services.set_data(path[1], value)
        elif first == "model":
            self._services.set_model(value)
        else:
            raise AccessError(
                f"{self._declared.label} assigns `{dotted(path)}`, which is fixed when the Learner is built.",
                where=self._declared.where,
                fix="build a new Learner",
            )

    def _write_shared(self, path: StatePath, value: Any) -> None:
        target: Any = self._state.cbstate
        for part in path[1:-1]:
            # A handler may write below a name that no handler has written yet.
            nested = isinstance(target, MutableMapping)
            target = target.setdefault(part, {}) if nested else shared_part(target, part, writable=True)
        if is_hub(target):
            raise AccessError(
                f"{self._declared.label} assigns `{dotted(path)}`, a part of a {type(target).__name__}.",
                where=self._declared.where,
                why="the assignment would not reach the object that other callbacks read",
                fix=f"change it in place, by methods of `learner.{dotted(path)}`"
                if path[:-1] != MONITORS
                else f'write `learner.cbstate.monitors.put_scalar("{path[2]}", value)`',
            )
        if isinstance(target, MutableMapping):
            target[path[-1]] = value
        else:
            setattr(target, path[-1], value)

    def _write_carry(self, path: StatePath, value: Any) -> None:
        self._refuse_ahead(path)
        root = root_of(path)
        old = self._train.live(root)
        new = replaced(old, path[len(root) :], value)
        # A Python number takes the dtype of the array that it replaces, as in `array.at[...].set(number)`.
        if jax.tree.structure(old) == jax.tree.structure(new):
            new = jax.tree.map(lambda o, n: jnp.asarray(n, o.dtype) if isinstance(n, int | float) else n, old, new)
        mismatches = differences(old, new)
        if mismatches:
            raise self._mismatch_error(path, mismatches, same_form(path))
        self.replace_part(root, copy_tree(new))  # the user may keep the arrays, and the next step donates the copies

    def replace_part(self, part: StatePath, value: PyTree) -> None:
        """Replace a hyperparameter or a root of the carry, also for later handlers of the same step."""
        window, train, root = self._moment.window, self._train, root_of(part)
        if window is not None:
            # The window's value of this part is older than the new one.
            window.overwritten.add(root)
        if part[0] == "hyperparams":
            # Optax keeps hyperparameters in the optimizer state, so that is what is replaced.
            value = train.hyperparams.set(train.live(root), part[1], value)
        self.replaced.add(part)
        train.replace(root, value)

    def _write_step(self, path: StatePath, value: Any) -> None:
        window = self._moment.window
        if window is None:
            raise AccessError(
                f"{self._declared.label} writes `{dotted(path)}` outside a step.",
                where=self._declared.where,
                fix="write it at StepBegin or StepEnd",
            )
        if path[1] == "batch":
            window.batch = value
        elif path[1] in ("xs", "ys") and not window.computed:  # before the step, these are the two parts of the batch
            batch = window.batch
            pair = list(batch) if isinstance(batch, tuple | list) else [batch, None]
            pair[("xs", "ys").index(path[1])] = value
            window.batch = tuple(pair)
        elif path[:2] in STEP_FLAGS:
            raise flag_written_late(self._declared, path, " in a host handler")
        elif window.has(path[:2]) is not None:
            raise computed_value_written(self._declared, path)
        else:
            window.written[path[1]] = value

    def refused_write(self, path: StatePath) -> AccessError | None:
        """Return the error for a write that would also be refused after it is declared, otherwise None."""
        return refused_step_write(self._declared, path, self._moment.window)

    def undeclared_fix(self, path: StatePath, permission: Permission) -> str:
        """Return the complete fix for an undeclared access if its declaration alone is not sufficient, otherwise ""."""
        return undeclared_fix(self._declared, path, permission, self._state)

    def _require_hyperparam(self, name: str, *, writing: bool) -> None:
        self._train.hyperparams.require(name, writing=writing, declared=self._declared, where=self._declared.where)

    def _mismatch_error(self, path: StatePath, mismatches: list[str], fix: str = "") -> DeclarationError:
        return DeclarationError(
            f"{self._declared.label} changes the structure, shape or dtype of `{dotted(path)}`: {mismatches[0]}.",
            where=[self._declared.where, *mismatches[1:5]],
            why="the carry of a compiled step keeps its structure, shapes and dtypes",
            fix=fix or "assign a value of the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`",
        )
