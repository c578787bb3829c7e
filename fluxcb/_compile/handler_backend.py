"""The reads and writes of one traced handler while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from fluxcb._compile.access_source import access_source
from fluxcb._compile.carry_paths import conforming, names_in, root_of, same_form
from fluxcb._compile.hyperparams import unusable
from fluxcb._compile.leaves import check_leaves, is_number
from fluxcb._compile.lent_values import LentValues
from fluxcb._compile.skip_records import OWN_SKIP
from fluxcb._declare.access import STEP_FLAGS, Append, Permission, Write, dotted, writes
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import Event
from fluxcb._declare.signatures import assigns
from fluxcb._declare.state import PROVIDERS, writable_at
from fluxcb._errors import AccessError, FluxcbError, TraceError, did_you_mean
from fluxcb._traced_values import describe
from fluxcb._typing import StatePath

# `TraceState` imports this module.
if TYPE_CHECKING:
    from fluxcb._compile.traced import TraceState

__all__ = ["HandlerBackend", "Touched"]


@dataclass
class Touched:
    """The state that a handler has used. Tracing records it for traced handlers, and a recording for host handlers.

    Attributes:
        read: Paths that were read, or whose names were listed.
        written: Paths that were assigned.
        changeable: Paths whose live object the handler received, so that it may have changed the object in place.
    """

    read: set[StatePath] = field(default_factory=set)
    written: set[StatePath] = field(default_factory=set)
    changeable: set[StatePath] = field(default_factory=set)


class HandlerBackend:
    """Reads and writes for the proxy of one traced handler. It cannot be used after the handler has returned.

    Args:
        state: The state of the step that is traced.
        handler: The handler.
        event: The event at which it runs.

    Attributes:
        access_source: The declarations that its errors name.
    """

    def __init__(self, state: TraceState, handler: BoundHandler, event: Event) -> None:
        self._state: TraceState | None = state
        self._handler = handler
        self.access_source = access_source(handler)
        self._event = event
        # An event can be emitted several times in one step, so the uses of a handler accumulate.
        self._touched = state.touched.setdefault(handler, Touched())
        self._lent = LentValues()

    def close(self) -> None:
        """End the use of the proxy, because it would return invalid tracers after its event."""
        self._state = None

    def _live(self) -> TraceState:
        if self._state is None:
            raise AccessError(
                f"{self._handler.declared.label} uses a traced learner after its event has ended.",
                where=self._handler.where,
                why="its values exist only while the step is traced",
                fix="do not store `learner`; keep values in `learner.cbstate` instead",
            )
        return self._state

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return a traced value. Containers are copies, so writing into them changes nothing."""
        state = self._live()
        self._touched.read.add(path)
        if path[0] == "key":
            # The key depends on the name of the callback, so adding another callback does not change its random
            # numbers.
            return state.key_for(self._handler.declared.name)
        if path[0] == "progress":
            return state.progress(path[1])
        if path[0] == "hyperparams":
            state.setup.hyperparams.require(
                path[1], writing=False, declared=self.access_source, where=self._handler.where
            )
            return state.setup.hyperparams.get(state.values["opt_state",], path[1])
        if path[0] in ("loss_fn", "optimizer", "model"):
            # These are constants of the step, so they are not in the carry.
            constant = getattr(state.setup, path[0])
            return constant if path[0] == "loss_fn" else self._lent.lend_object(self._handler.declared, constant, path)
        # A handler may combine its condition with a flag that no earlier handler has written.
        if isinstance(permission, Append) and path in STEP_FLAGS:
            return state.values.get(path, jnp.bool_(False))
        # Most phases assign the loss only once, so the path may be missing.
        if path == ("step", "earlier_losses"):
            return state.values.get(path, ())
        self._require(path, state)
        return self._lent.lend(self._handler.declared, state.get(path), path, self._handler.where)

    def reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return a function that reads a path, for use as a property of a view."""
        # A traced handler runs only while a step is traced, so preparing the read in advance would save little.
        return lambda view: self.read(path, permission)

    def _require(self, path: StatePath, state: TraceState) -> None:
        # Not all declared paths exist at this event. The same handler may also run at other events.
        if root_of(path) in state.values:
            return
        label = self._handler.declared.label
        moment = f"{self._event!r} x {type(state.phase).__name__}"
        if path[0] == "step":
            known = [p[1] for p in state.values if p[0] == "step"]
            raise TraceError(
                f"{label} reads `{dotted(path)}` at {moment}, but it does not exist there."
                f"{did_you_mean(path[1], known)}",
                where=self._handler.where,
                why=f"at this event, the step has {', '.join(sorted(known))}",
                fix="handle a later event, or a phase that provides the value",
            )
        fix = f"create it in `init` as arrays: `learner.{dotted(path)} = jnp.zeros(...)`"
        if path == ("cbstate", "monitors"):
            declare = self.access_source.how_to_declare(("step", "my_value"), Write())
            fix = (
                "keep the value with `learner.step.my_value = value`, and log it in a host handler of StepEnd: "
                '`learner.cbstate.monitors.put_scalar("my_value", learner.step.my_value)`. For `my_value`, ' + declare
            )
        elif path[0] != "cbstate" or (path[1:2] and path[1] in PROVIDERS):  # objects of the host
            fix = "use it in a host handler, e.g. of StepEnd"
        raise TraceError(
            f"{label} uses `{dotted(path)}` in a traced handler, but the carry does not contain it.",
            where=self._handler.where,
            why="the carry contains only shared state that consists of JAX arrays and that a traced handler declares",
            fix=fix,
        )

    def verify(self) -> None:
        """Raise an error for changes of values that were read, because these changes would be lost."""
        self._lent.verify()

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Assign a traced value to a path, if it may be written at this event."""
        state = self._live()
        self._touched.written.add(path)
        label, where = self._handler.declared.label, self._handler.where
        if (error := self._written_too_late(path)) is not None:
            raise error
        if path in STEP_FLAGS:
            self._set_flag(state, path, value)
        elif path[0] == "step":
            self._set_step(state, path, value)
        elif path[0] == "hyperparams":
            state.setup.hyperparams.require(path[1], writing=True, declared=self.access_source, where=where)
            old = state.setup.hyperparams.get(state.values["opt_state",], path[1])
            # The cast below would turn the number into inf without an error.
            if found := unusable(path[1], value, old.dtype):
                text = f"{label} sets `{dotted(path)}` to {found.shown}."
                raise TraceError(text, where=where, why=found.why, fix=f"set it to {found.instead}")
            if not is_number(value) or jnp.shape(value) != old.shape:
                raise TraceError(
                    f"{label} sets `{dotted(path)}` to {describe(value)}; it is {describe(old)}.",
                    where=where,
                    why="a hyperparameter is a scalar on the device, and its shape is compiled into the step",
                    fix="reduce the values to one number, e.g. with `jnp.mean(...)`"
                    if is_number(value)
                    else "set it to a number",
                )
            state.values["opt_state",] = state.setup.hyperparams.set(state.values["opt_state",], path[1], value)
        else:
            self._require(path, state)
            what = f"{label} changes the structure, shape or dtype of `{dotted(path)}`"
            state.replace(path, conforming(self._old(state, path, value), value, what, where, same_form(path)))

    def refused_write(self, path: StatePath) -> FluxcbError | None:
        """Return the error for an undeclared write that would also be refused after it is declared, otherwise None."""
        error = self._written_too_late(path)
        if error is None or not writable_at(path):
            return error
        declare = self.access_source.how_to_declare(path, Write())
        return AccessError(error.what, where=error.where, why=error.why, fix=f"{error.fix[0]}, and {declare}")

    def undeclared_fix(self, path: StatePath, permission: Permission) -> str:
        """Return the complete fix for an undeclared access if the declaration of this access alone is not sufficient.

        This holds for a hyperparameter that the optimizer does not have, and for a read of a value that the same
        handler also assigns.
        """
        if path[0] != "hyperparams":
            both = not writes(permission) and assigns(self._handler.function, path[-1])
            return self.access_source.how_to_declare(path, Write()) if both and not self.refused_write(path) else ""
        return self._live().setup.hyperparams.undeclared_fix(path[1], permission, self.access_source)

    def _written_too_late(self, path: StatePath) -> AccessError | None:
        # E.g. gradients can be changed at BackwardEnd. Later, the update has already used them.
        events = writable_at(path)
        if events is None or isinstance(self._event, events):
            return None
        written = f"{self._handler.declared.label} writes `{dotted(path)}` at {self._event!r}"
        if not events:
            return AccessError(
                f"{written}, but traced handlers can only read it.",
                where=self._handler.where,
                why="the step computes it, and a write would have no effect or an unexpected effect",
                fix="write the values that it is computed from",
            )
        allowed = " or ".join(e.__name__ for e in events)
        return AccessError(
            f"{written}, but it can only be written at {allowed}.",
            where=self._handler.where,
            why="at another event, the write would have no effect or an unexpected effect",
            fix=f"move it to a handler of {allowed}",
        )

    def _old(self, state: TraceState, path: StatePath, value: Any) -> Any:
        try:
            return state.get(path)
        # `cbstate.a.b` cannot be added to an existing `cbstate.a`.
        except (KeyError, AttributeError):
            raise TraceError(
                f"{self._handler.declared.label} writes `{dotted(path)}`, which does not exist in the carry.",
                where=self._handler.where,
                why=f"the structure of the carry is fixed, and {describe(value)} would add an entry to it",
                fix=f"create `{dotted(path)}` in `init`",
            ) from None

    def _set_flag(self, state: TraceState, path: StatePath, value: Any) -> None:
        if not is_number(value) or jnp.shape(value) != () or jnp.result_type(value) != jnp.bool_:
            reducible = is_number(value) and jnp.shape(value) != ()
            raise TraceError(
                f"{self._handler.declared.label} writes {describe(value)} to `{dotted(path)}`, which is bool[].",
                where=self._handler.where,
                fix="reduce the value: `jnp.any(...)` or `jnp.all(...)`"
                if reducible
                else "assign a bool, such as `True` or the result of a comparison",
            )
        old = state.values.get(path)
        # Handlers can set a flag but not clear it. Their order therefore does not matter.
        state.values[path] = jnp.logical_or(jnp.bool_(False) if old is None else old, value)
        if path == ("step", "skip") and state.skips is not None:
            # `learner.step.skip |= bad` writes the flags of earlier handlers again, which only they have set.
            own = value & ~old if old is not None and path in self._touched.read else jnp.asarray(value)
            state.values[OWN_SKIP] = state.values.get(OWN_SKIP, jnp.bool_(False)) | own

    def _set_step(self, state: TraceState, path: StatePath, value: Any) -> None:
        old = state.values.get(path)
        # The gradient and the update depend on these shapes. Other step values may change theirs, e.g. soft labels that
        # replace class numbers.
        if path[1] in ("grads", "loss") and old is not None:
            what = f"{self._handler.declared.label} changes the structure, shape or dtype of `{dotted(path)}`"
            value = conforming(old, value, what, self._handler.where, same_form(path))
        else:
            what = f"What {self._handler.declared.label} writes to `{dotted(path)}`"
            check_leaves(value, what, dotted(path), TraceError, where=self._handler.where)
        state.replace(path, value)

    def hub(self, path: StatePath) -> None:
        """Return None, because entries in the carry are pytrees and have no named parts."""

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names in `step`, `hyperparams`, `cbstate` or a part of it."""
        state = self._live()
        self._touched.read.add(path)
        first, *below = path
        if below:
            self._require(path, state)
            return names_in(state.get(path))
        if first == "hyperparams":
            return iter(state.setup.hyperparams.names)
        return iter([p[1] for p in state.values if p[0] == first and len(p) == 2])
