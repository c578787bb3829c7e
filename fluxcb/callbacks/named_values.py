"""`NamedValues`: values of the Learner that a callback was told to look at, by their paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.state import FIRST_LEVEL
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["NamedValues", "leaf_arrays"]

_WHOLE = ("params", "model_state", "opt_state")  # these may be named without a part
_ROOTS = ("step", *_WHOLE, "hyperparams", "cbstate")


class NamedValues:
    """Values by their paths: `step.loss`, `step.aux.kl`, `params.layers.0.w`, `hyperparams.learning_rate`.

    Args:
        names: A path, or several.
        owner: Who takes them, for messages.
        roots: What a path may begin with.

    Attributes:
        names: The paths, in order.
        of_steps: Whether one of them is a value of the step.

    Raises:
        DeclarationError: There is none, one is no path of such a value, or stands there twice.
    """

    def __init__(self, names: Any, owner: str, roots: tuple[str, ...] = _ROOTS) -> None:
        given = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else (names,)
        for name in given or ((),):
            _require_path(name, owner, roots)
        for name in given:
            if given.count(name) > 1:
                raise DeclarationError(f"`{owner}` is given `{name}` twice.", fix="name each value once")
        self.names: tuple[str, ...] = given
        self.of_steps = any(name.startswith("step.") for name in given)
        self._paths = {name: tuple(name.split(".")) for name in given}

    def access(self) -> dict[str, Any]:
        """Return what to declare to read them: no more than their own parts, as far as names lead."""
        declared = {_by_names(path) for path in self._paths.values()}
        nested: dict[str, Any] = {}
        for path in sorted(declared):
            if any(path != other and path[: len(other)] == other for other in declared):
                continue  # a part of another
            node = nested
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = Read()
        return nested

    def read(self, learner: Any) -> dict[str, Any]:
        """Return the values by their paths.

        Raises:
            DeclarationError: There is no such part.
        """
        return {name: _walk(learner, path) for name, path in self._paths.items()}

    def require(self, learner: Any) -> None:
        """Check that those exist that exist between steps, when a Learner is built.

        Raises:
            DeclarationError: There is no such part.
        """
        for path in self._paths.values():
            if path[0] in _WHOLE:
                _walk(learner, path)


def leaf_arrays(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a value, each with its path, as numpy knows them: bfloat16 and its like become float32."""
    import jax
    import numpy as np

    found = []
    for path, leaf in jax.tree.leaves_with_path(value):
        array = np.asarray(leaf)
        if array.dtype.kind == "V":
            array = array.astype(np.float32)
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        found.append((".".join([name, *parts]), array))
    return found


def _require_path(name: Any, owner: str, roots: tuple[str, ...]) -> None:
    parts = name.split(".") if isinstance(name, str) else []
    if all(parts) and parts and parts[0] in roots and (len(parts) > 1 or parts[0] in _WHOLE):
        return
    fix = [f'e.g. `"{_EXAMPLES[root]}"`' for root in roots[:2]]
    hint = ""
    if isinstance(name, str) and name and all(parts) and parts[0] not in FIRST_LEVEL:
        hint = did_you_mean(parts[0], roots)
        fix = [f'for a value of the step, `"step.{name}"`', *fix[1:]] if not hint else fix
    *first, last = (f"`{root}`" for root in roots)
    raise DeclarationError(
        f"`{owner}` takes paths of values, which begin with {', '.join(first)} or {last}, not {name!r}.{hint}",
        fix=fix,
    )


_EXAMPLES = {"step": "step.loss", "params": "params.w", "hyperparams": "hyperparams.learning_rate"}


def _by_names(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path up to its first index of a sequence, which cannot be declared."""
    first = next((i for i, part in enumerate(path) if part.isdigit()), len(path))
    return path[:first]


def _walk(learner: Any, path: tuple[str, ...]) -> Any:
    value: Any = learner
    for position, part in enumerate(path):
        try:
            if isinstance(value, Mapping):
                value = value[part] if part in value or not part.isdigit() else value[int(part)]
            elif isinstance(value, list | tuple) and part.isdigit():
                value = value[int(part)]
            else:
                value = getattr(value, part)
        except (LookupError, AttributeError):
            whole = ".".join(path[:position])
            known = list(map(str, value)) if isinstance(value, Mapping) else []
            raise DeclarationError(
                f"`{whole}` has no `{part}`.{did_you_mean(part, known)}",
                where=f"named as `{'.'.join(path)}`",
                why=f"it has {', '.join(known)}" if known else "",
                fix="name what there is",
            ) from None
    return value
