"""Records of skipped steps: which callbacks write `step.skip`, and the values that they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import is_key
from fluxcb._compile.carry_paths import below, root_of
from fluxcb._compile.lineage import norm_of
from fluxcb._compile.updating import FLAG_SCOPE
from fluxcb._declare.access import STEP_FLAGS, dotted
from fluxcb._declare.declared import BoundHandler
from fluxcb._typing import StatePath

if TYPE_CHECKING:  # `TraceState` holds the records
    from fluxcb._compile.traced import TraceState

__all__ = ["OWN_SKIP", "SKIPS", "SkipRecords"]

SKIPS = ("step", "skips")
"""The path of the records: `by`, with one entry for each writer of `step.skip`, and `key`, the step's random key."""
OWN_SKIP = ("own_skip",)
"""What the running handler has written to `step.skip`. Other writers share the flag itself."""

_NORMS = (("step", "grads"), ("step", "updates"))
_ALWAYS = (("step", "loss"), ("step", "grads"))


class SkipRecords:
    """Records, in the traced step, which callbacks write `step.skip`, and which values they use.

    The values are the scalars in `step`, `cbstate` and `hyperparams` that the handler reads, as they are before it
    runs; the scalars in `step` that it writes; the loss; and the norm of the gradients. Handlers need no code for this.

    Args:
        state: The state that is being traced.
    """

    def __init__(self, state: TraceState) -> None:
        self._state = state

    def handled(self, handler: BoundHandler, before: Mapping[StatePath, Any]) -> None:
        """Record what a handler that has just run has written to `step.skip`, if anything.

        Args:
            handler: The handler.
            before: The values before the handler.
        """
        own = self._state.values.pop(OWN_SKIP, None)
        if own is None:
            return
        with jax.named_scope(FLAG_SCOPE):
            self._add(handler.declared.name, own, self._used(handler, before))

    def assigned(self, value: Any) -> None:
        """Record that the phase itself has assigned `step.skip`."""
        self._add(f"{type(self._state.phase).__name__}.step", jnp.asarray(value), {})

    def _add(self, writer: str, skip: Any, values: dict[str, Any]) -> None:
        records = self._state.values.get(SKIPS, {})
        if (earlier := records.get(writer)) is not None:  # e.g. a phase with two losses emits BackwardEnd twice
            # The values of the first event at which it skipped the step.
            old = earlier["values"]
            values = {name: jnp.where(earlier["skip"], old.get(name, now), now) for name, now in values.items()}
            values, skip = {**old, **values}, earlier["skip"] | skip
        # Part of the traced state, so that the records leave a gradient together with all other values.
        self._state.values[SKIPS] = {**records, writer: {"skip": skip, "values": values}}

    def _used(self, handler: BoundHandler, before: Mapping[StatePath, Any]) -> dict[str, Any]:
        touched, hyperparams, used = self._state.touched[handler], self._state.setup.hyperparams, {}
        # Sorted, because the order of a set differs between processes, which must trace the same step.
        for path in sorted({*touched.read, *_ALWAYS}):
            if path[0] == "hyperparams" and len(path) == 2:
                used[dotted(path)] = hyperparams.get(before["opt_state",], path[1])
            elif path[0] in ("step", "cbstate") and path not in STEP_FLAGS and root_of(path) in before:
                used |= _numbers(path, before)
        for path in sorted(touched.written):
            if path[0] == "step" and path not in STEP_FLAGS and path[:2] not in before:
                used |= _numbers(path, self._state.values)
        return used

    def finish(self) -> None:
        """Complete the records at the end of the step."""
        state = self._state
        records = state.values.pop(SKIPS, None)
        if records is None:
            return
        with jax.named_scope(FLAG_SCOPE):
            # A handler may skip a step before its loss and its gradients exist.
            final = {name: value for path in _ALWAYS for name, value in _numbers(path, state.values).items()}
            by = {w: {"skip": r["skip"], "values": {**final, **r["values"]}} for w, r in records.items()}
            # The raw words of the key, because a typed key cannot be fetched.
            state.values[SKIPS] = {"by": by, "key": jax.random.key_data(state.step_key())}


def _numbers(path: StatePath, values: Mapping[StatePath, Any]) -> dict[str, Any]:
    """Return the scalars at a path by name, or the norm of gradients and updates; empty if there is no such value."""
    root = root_of(path)
    try:
        value = below(values[root], path[len(root) :])
    except (LookupError, AttributeError, TypeError):
        return {}
    if path in _NORMS:
        return {f"norm of {dotted(path)}": norm_of(value)}
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
        if jnp.shape(leaf) == () and not is_key(leaf) and not jnp.iscomplexobj(leaf):
            found[".".join([dotted(path), *(_text(key) for key in keys)])] = jnp.asarray(leaf)
    return found


def _text(key: Any) -> str:
    """Return a key of a pytree as a part of a path."""
    return jax.tree_util.keystr((key,), simple=True)
