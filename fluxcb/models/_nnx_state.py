"""State of Flax NNX modules that evaluation reads and changes, and that the next batch does not see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fluxcb._tracebacks import warn_user

__all__ = ["StateUses"]

_Path = tuple[Any, ...]

# Batch statistics and what `sow` stores are meant to be dropped in evaluation. Random streams are seeded for each call.
_DROPPED = (nnx.BatchStat, nnx.RngState, nnx.Intermediate, nnx.Param)


class StateUses:
    """The variables that calls of a module in evaluation read and then change.

    A variable that a call sets before it reads it, such as a hidden state that each call resets, is not one of them.

    Args:
        name: The name of the module.
        variables: Its variables that are model state, by path.
    """

    # Transforms such as `nnx.jit` replace the values of all variables, so a new value does not mean that the module has
    # changed it. The hooks of a variable also run in transforms.

    def __init__(self, name: str, variables: Mapping[_Path, Any]) -> None:
        self._name = name
        kept = {p: v for p, v in variables.items() if isinstance(v, nnx.Variable) and not isinstance(v, _DROPPED)}
        self._uses = {path: _Use() for path in kept}
        self._resets = {path: _zeros(variable.get_raw_value()) for path, variable in kept.items()}
        self._warned = False

    def watch(self, leaves: dict[_Path, Any]) -> None:
        """Replace variables by those that record how they are used, and forget earlier uses.

        Args:
            leaves: The variables of a module, by path.
        """
        for path, use in self._uses.items():
            use.clear()
            metadata = leaves[path].get_metadata()
            leaves[path].set_metadata(
                on_get_value=(*_hooks(metadata, "on_get_value"), use.on_read),
                on_set_value=(*_hooks(metadata, "on_set_value"), use.on_write),
            )

    def warn(self, module: Any) -> None:
        """Warn about a variable that the call of a module in evaluation has read and then changed; once."""
        if self._warned:
            return
        variables = dict(nnx.to_flat_state(nnx.state(module)))
        changed = [p for p, use in self._uses.items() if use.read and (use.changed or _replaced(variables, p, use))]
        if not changed:
            return
        self._warned = True
        attribute, zeros = _code(changed[0]), self._resets[changed[0]]
        warn_user(
            f"The NNX module `{self._name}` changes its variable `{attribute}` in evaluation, where fluxcb drops the "
            "new value: each batch starts with the value of the training. For a state of one call, set it at the "
            f"beginning of the call: `self.{attribute}[...] = {zeros}`. If each batch should start with the value of "
            "the training, make the variable an `nnx.BatchStat`. To keep the value from batch to batch, "
            "call `learner.model` in a loop of your own.",
            UserWarning,
        )


class _Use:
    """How the calls of a module use one of its variables.

    Attributes:
        read: Whether they have read a value, or a part of it, that they have not set themselves.
        changed: Whether they have set another value.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the calls."""
        self.read = self.changed = self._reset = False

    def on_read(self, variable: Any, value: Any) -> Any:
        """Record that the module reads the variable."""
        del variable
        self.read = self.read or not self._reset
        return value

    def on_write(self, variable: Any, value: Any) -> Any:
        """Record that the module sets the variable."""
        old, new = jax.tree.leaves(variable.get_raw_value()), jax.tree.leaves(value)
        if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
            self.changed = True
            # A value of another shape is a part, as in `self.cache[0] = value`.
            self._reset = self._reset or list(map(jnp.shape, old)) == list(map(jnp.shape, new))
        return value


def _replaced(variables: Mapping[_Path, Any], path: _Path, use: _Use) -> bool:
    """Return whether a module has another variable in place of the one that was watched."""
    variable = variables.get(path)
    return isinstance(variable, nnx.Variable) and use.on_read not in _hooks(variable.get_metadata(), "on_get_value")


def _hooks(metadata: Mapping[str, Any], name: str) -> Iterable[Any]:
    hooks = metadata.get(name, ())
    return hooks if isinstance(hooks, tuple) else (hooks,)


def _zeros(value: Any) -> str:
    """Return the code of an array of zeros like a value."""
    return f"jnp.zeros({tuple(value.shape)}, {str(value.dtype)!r})" if isinstance(value, jax.Array) else "..."


def _code(path: _Path) -> str:
    """Return the code that reads a variable from its module."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
