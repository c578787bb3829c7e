"""The programs that compute initial states."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from fluxcb._compile.arrays import own_copy
from fluxcb._interruptions import is_interruption
from fluxcb._typing import PyTree

__all__ = ["cached_program", "compiled_opt_state"]

# Up to this size (bytes), constants are copied from host memory. A device fills larger ones faster than it copies them.
_COPIED_BYTES = 64 * 2**20


def compiled_opt_state(optimizer: Any, params: PyTree) -> tuple[PyTree] | None:
    """Return the initial state of an optimizer in new arrays, or None if a program cannot compute it.

    Most states are constants, such as the zeros of Adam, and are copied from host memory. Any other state is computed
    by one program. Called directly, `optimizer.init` would compile a program for each shape: for Adam and a network of
    two layers, this takes 155 ms, one program takes 60 ms, and the copy 1 ms (jax 0.10.2, CPU). The program is cached
    by its jaxpr, because each Learner has another optimizer object. If parameters are committed to devices, `init` has
    to be called directly, because a program would choose the placement of its results.
    """
    leaves = jax.tree.leaves(params)
    # Committed arrays have a placement that `init` must see.
    if not any(leaf.committed for leaf in leaves):
        try:
            traced = jax.jit(lambda params: optimizer.init(params)).trace(params)
            structure, closed = jax.tree.structure(traced.out_info), traced.jaxpr
            if structure.num_leaves:
                return (jax.tree.unflatten(structure, _evaluated(closed, leaves)),)
        except Exception as error:
            if is_interruption(error):
                raise
            # `init` needs concrete values, or does not return arrays. Other errors are raised again when it is called
            # directly.
    return None


def _evaluated(closed: ClosedJaxpr, leaves: list[jax.Array]) -> list[jax.Array]:
    constants = _constants(closed)
    if constants is not None:
        return own_copy(constants)
    # A program with constants, which can be large, is not cached.
    program = jax.jit(jaxpr_as_fun(closed)) if closed.consts else cached_program(closed)
    return program(*leaves)


def _constants(closed: ClosedJaxpr) -> list[np.ndarray] | None:
    """Return the values of a jaxpr whose results are numbers that are broadcast, or None for any other jaxpr."""
    if sum(out.size * out.dtype.itemsize for out in closed.out_avals) > _COPIED_BYTES:
        return None
    # JAX gives a weak type to the results of a program, but not to an array that it copies.
    if any(out.weak_type for out in closed.out_avals):
        return None
    filled = {
        equation.outvars[0]: equation.invars[0].val
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "broadcast_in_dim" and isinstance(equation.invars[0], Literal)
    }
    values = [out.val if isinstance(out, Literal) else filled.get(out) for out in closed.jaxpr.outvars]
    if any(value is None for value in values):
        return None
    return [np.full(out.shape, value, out.dtype) for value, out in zip(values, closed.out_avals, strict=True)]


@dataclass(frozen=True)
class _Jaxpr:
    """A closed jaxpr without constants, which is equal to any jaxpr with the same text and types."""

    text: str
    takes: tuple[Any, ...]  # the types, because the text does not show weak types
    returns: tuple[Any, ...]
    closed: ClosedJaxpr = field(compare=False)

    @classmethod
    def of(cls, closed: ClosedJaxpr) -> _Jaxpr:
        return cls(str(closed.jaxpr), tuple(closed.in_avals), tuple(closed.out_avals), closed)


def cached_program(closed: ClosedJaxpr) -> Any:
    """Return a compiled function that evaluates a jaxpr without constants.

    All Learners share it, such as the members of a population, which build the same model with other random keys.
    """
    return _program(_Jaxpr.of(closed))


# Bounded, because a sweep over architectures would keep a program for each of them.
@functools.lru_cache(maxsize=16)
def _program(jaxpr: _Jaxpr) -> Any:
    return jax.jit(jaxpr_as_fun(jaxpr.closed))
