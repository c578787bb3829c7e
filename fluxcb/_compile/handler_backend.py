"""What one traced handler reads and writes, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import describe
from fluxcb._compile.carried import conforming, names_in, root_of
from fluxcb._compile.leaves import check_leaves, is_number
from fluxcb._declare.access import Append, Permission, dotted
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import Event
from fluxcb._declare.state import STEP_FLAGS, writable_at
from fluxcb._errors import AccessError, TraceError, did_you_mean
from fluxcb._typing import StatePath

if TYPE_CHECKING:
    from fluxcb._compile.traced import TraceState

__all__ = ["HandlerBackend", "Touched"]


@dataclass
class Touched:
    """What a handler really accessed: of traced ones the dry run sees it, of host ones who asks for it.

    Attributes:
        read: Paths that were read, or asked for what there is below them.
        written: Paths that were assigned.
        changeable: Paths whose live object was handed out: it may have been changed in place.
    """

    read: set[StatePath] = field(default_factory=set)
    written: set[StatePath] = field(default_factory=set)
    changeable: set[StatePath] = field(default_factory=set)


class HandlerBackend:
    """Where the proxy of one traced handler reads and writes; dead once the handler has returned."""

    def __init__(self, state: TraceState, handler: Handler, event: Event) -> None:
        self._state: TraceState | None = state
        self._handler = handler
        self._event = event
        self._touched = state.touched.setdefault(handler, Touched())
        self._handed: list[tuple[StatePath, Any, list[Any], Any]] = []

    def close(self) -> None:
        """End the proxy's life: kept beyond its event, it would hand out dead tracers."""
        self._state = None

    def _live(self) -> TraceState:
        if self._state is None:
            raise AccessError(
                f"{self._handler.declared.label} uses a traced learner after its event has ended.",
                where=self._handler.where,
                why="its values exist only while the step is traced",
                fix="do not keep `learner`; put what must survive into `learner.cbstate`",
            )
        return self._state

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return a traced value; containers are fresh, so that writing into them changes nothing."""
        state = self._live()
        self._touched.read.add(path)
        if path[0] == "key":
            return state.key_for(self._handler.declared.name)
        if path[0] == "progress":
            return state.progress(path[1])
        if path[0] == "hyperparams":
            state.setup.hyperparams.require(
                path[1], writing=False, declared=self._handler.declared, where=self._handler.where
            )
            return state.setup.hyperparams.get(state.values["opt_state",], path[1])
        if path[0] in ("loss_fn", "optimizer", "model"):
            return getattr(state.setup, path[0])
        if isinstance(permission, Append) and path in STEP_FLAGS:
            return state.values.get(path, jnp.bool_(False))
        self._require(path, state)
        return self._hand_out(path, state.get(path))

    def reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return what reads a path, as a property of a view."""
        return lambda view: self.read(path, permission)

    def _require(self, path: StatePath, state: TraceState) -> None:
        if root_of(path) in state.values:
            return
        label = self._handler.declared.label
        moment = f"{self._event!r} x {type(state.phase).__name__}"
        if path[0] == "step":
            known = [p[1] for p in state.values if p[0] == "step"]
            raise TraceError(
                f"{label} reads `{dotted(path)}` at {moment}, where it does not exist (yet)."
                f"{did_you_mean(path[1], known)}",
                where=self._handler.where,
                why=f"at that point the step has {', '.join(sorted(known))}",
                fix="handle a later event, or a phase that provides it",
            )
        raise TraceError(
            f"{label} touches `{dotted(path)}` in a traced handler, but it is not in the carry.",
            where=self._handler.where,
            why="only shared state made of JAX arrays, and declared by a traced handler, rides in the carry",
            fix=f"create it in `init` as arrays: `learner.{dotted(path)} = jnp.zeros(...)`",
        )

    def _hand_out(self, path: StatePath, value: Any) -> Any:
        leaves, structure = jax.tree.flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        fresh = jax.tree.unflatten(structure, leaves)
        self._handed.append((path, fresh, leaves, structure))
        return fresh

    def verify(self) -> None:
        """Refuse writes into containers that were read: they would be lost."""
        for path, fresh, leaves, structure in self._handed:
            now, now_structure = jax.tree.flatten(fresh)
            if (
                structure == now_structure
                and len(now) == len(leaves)
                and all(a is b for a, b in zip(now, leaves, strict=True))
            ):
                continue
            raise AccessError(
                f"{self._handler.declared.label} writes into the container it read from `{dotted(path)}`.",
                where=self._handler.where,
                why="what is read is a copy, so the change would be lost",
                fix=f"declare Write(), change a copy, and assign it: `learner.{dotted(path)} = copy`",
            )

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Put a traced value at a path, if it may be written at this event."""
        state = self._live()
        self._touched.written.add(path)
        label, where = self._handler.declared.label, self._handler.where
        events = writable_at(path)
        if events is not None and not isinstance(self._event, events):
            allowed = " or ".join(e.__name__ for e in events) or "no traced event"
            raise AccessError(
                f"{label} writes `{dotted(path)}` at {self._event!r}; it can be written at {allowed}.",
                where=where,
                why="elsewhere the write would have no effect, or another one than it seems",
                fix=f"move it to a handler of {allowed}" if events else "write what it is computed from",
            )
        if path in STEP_FLAGS:
            self._set_flag(state, path, value)
        elif path[0] == "step":
            self._set_step(state, path, value)
        elif path[0] == "hyperparams":
            state.setup.hyperparams.require(path[1], writing=True, declared=self._handler.declared, where=where)
            old = state.setup.hyperparams.get(state.values["opt_state",], path[1])
            if not is_number(value) or jnp.shape(value) != old.shape:
                raise TraceError(
                    f"{label} sets `{dotted(path)}` to {describe(value)}; it is {describe(old)}.",
                    where=where,
                    why="a hyperparameter is one number on the device, and its shape is compiled into the step",
                    fix="give one number, e.g. `jnp.mean(...)` of several",
                )
            state.values["opt_state",] = state.setup.hyperparams.set(state.values["opt_state",], path[1], value)
        else:
            self._require(path, state)
            what = f"{label} changes the structure, shape or dtype of `{dotted(path)}`"
            state.replace(path, conforming(self._old(state, path, value), value, what, where))

    def _old(self, state: TraceState, path: StatePath, value: Any) -> Any:
        try:
            return state.get(path)
        except (KeyError, AttributeError):
            raise TraceError(
                f"{self._handler.declared.label} writes `{dotted(path)}`, which does not exist in the carry.",
                where=self._handler.where,
                why=f"the carry keeps its structure; {describe(value)} would add to it",
                fix=f"create `{dotted(path)}` in `init`",
            ) from None

    def _set_flag(self, state: TraceState, path: StatePath, value: Any) -> None:
        if not is_number(value) or jnp.shape(value) != () or jnp.result_type(value) != jnp.bool_:
            raise TraceError(
                f"{self._handler.declared.label} writes {describe(value)} to `{dotted(path)}`, which is bool[].",
                where=self._handler.where,
                fix="reduce it: `jnp.any(...)` or `jnp.all(...)`",
            )
        state.values[path] = jnp.logical_or(state.values.get(path, jnp.bool_(False)), value)

    def _set_step(self, state: TraceState, path: StatePath, value: Any) -> None:
        old = state.values.get(path)
        if path[1] in ("grads", "loss") and old is not None:
            what = f"{self._handler.declared.label} changes the structure, shape or dtype of `{dotted(path)}`"
            value = conforming(old, value, what, self._handler.where)
        else:
            what = f"What {self._handler.declared.label} writes to `{dotted(path)}`"
            check_leaves(value, what, dotted(path), TraceError, where=self._handler.where)
        state.replace(path, value)

    def hub(self, path: StatePath) -> None:
        """Return None, because entries in the carry are pytrees and have no named parts."""

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names below `step`, `hyperparams`, `cbstate` or a part of it."""
        state = self._live()
        self._touched.read.add(path)
        first, *below = path
        if below:
            self._require(path, state)
            return names_in(state.get(path))
        if first == "hyperparams":
            return iter(state.setup.hyperparams.names)
        return iter([p[1] for p in state.values if p[0] == first and len(p) == 2])
