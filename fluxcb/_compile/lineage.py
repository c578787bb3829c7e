"""Probes of one path of state: what each handler makes of it in a traced step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import is_key
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._typing import PyTree, StatePath

if TYPE_CHECKING:  # `TraceState` holds a probe
    from fluxcb._compile.traced import TraceState

__all__ = ["LINEAGE", "LineageProbe", "norm_of"]

LINEAGE = ("step", "lineage")
"""The path of the measurements: one mapping for each write, in the order of the writes."""


class LineageProbe:
    """Measures the values of a path before and after each write in a traced training step.

    The traced state is compared by identity after each handler, so the probe finds all writes, whatever the handlers
    declare. The step itself computes the measurements.

    Args:
        path: The path, e.g. `("step", "grads")`.

    Attributes:
        writers: For each training phase, the handler (None for the phase itself) and the event of each write, in order.
            For the phase, it is the event that follows the write.
    """

    def __init__(self, path: StatePath) -> None:
        self.path = path
        self.writers: dict[type[Phase], list[tuple[BoundHandler | None, Event]]] = {}

    def begin(self, state: TraceState) -> LineageProbe:
        """Begin the trace of a step, and return this probe."""
        self.writers[type(state.phase)] = []
        state.values[LINEAGE] = {"last": self._value(state), "writes": ()}
        return self

    def compare(self, state: TraceState, writer: BoundHandler | None, event: Event) -> None:
        """Measure the value if it has been replaced since the last comparison.

        Args:
            state: The state that is being traced.
            writer: The handler that has just run, or None if the phase has.
            event: The event of the handler, or the event that the phase emits next.
        """
        # Inside a gradient, the parameters are replaced by its tracers, which nothing has written.
        if state.inside_gradient and self.path[0] in ("params", "model_state"):
            return
        # The last value is part of the traced state, so that it leaves a gradient together with all other values.
        known, now = state.values[LINEAGE], self._value(state)
        last = known["last"]
        if now is None or (last is not None and _same(last, now)):
            return
        with jax.named_scope("fluxcb:lineage"):
            written = _measured(last, jax.lax.stop_gradient(now))
        state.values[LINEAGE] = {"last": now, "writes": (*known["writes"], written)}
        self.writers[type(state.phase)].append((writer, event))

    def finish(self, state: TraceState) -> None:
        """End the trace of a step. Only the measurements remain."""
        state.values[LINEAGE] = state.values[LINEAGE]["writes"]

    def _value(self, state: TraceState) -> PyTree:
        try:
            value = state.get(self.path)
        except (LookupError, AttributeError, TypeError):  # it does not exist yet
            return None
        return value if jax.tree.leaves(value) else None


def _measured(last: PyTree, now: PyTree) -> dict[str, Any]:
    """Return the norms before and after a write, whether it changed the value, and whether the value is finite."""
    after, finite = norm_of(now), _finite(now)
    # The value did not exist before, so it has no earlier norm.
    if last is None:
        return {"before": jnp.float32(jnp.nan), "after": after, "finite": finite, "changed": jnp.bool_(True)}
    last = jax.lax.stop_gradient(last)
    changed = jnp.bool_(True)
    if jax.tree.map(_spec, last) == jax.tree.map(_spec, now):  # otherwise, the write has changed a shape
        pairs = zip(_numbers(last), _numbers(now), strict=True)
        # A NaN that stays a NaN has not changed.
        differ = [jnp.any((a != b) & ~((a != a) & (b != b))) for a, b in pairs]
        changed = jnp.any(jnp.stack(differ)) if differ else jnp.bool_(False)
    return {"before": norm_of(last), "after": after, "finite": finite, "changed": changed}


def _spec(leaf: Any) -> Any:
    return jnp.shape(leaf), jnp.result_type(leaf)


def _numbers(tree: PyTree) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if not is_key(leaf)]


def norm_of(tree: PyTree) -> Any:
    """Return the square root of the sum of squares over all numbers of a pytree (float32[])."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in _numbers(tree)), 0.0))


def _finite(tree: PyTree) -> Any:
    leaves = [leaf for leaf in _numbers(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.bool_(True)


def _same(a: PyTree, b: PyTree) -> bool:
    """Return whether two trees hold the same tracers."""
    first, second = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(first) == len(second) and all(x is y for x, y in zip(first, second, strict=True))
