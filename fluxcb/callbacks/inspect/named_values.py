"""`NamedValues`: values of the Learner that a user selects by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.state import FIRST_LEVEL
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["NamedValues", "leaf_arrays"]

_TRAIN_STATE = ("params", "model_state", "opt_state")  # valid paths without a further part
_ROOTS = ("step", *_TRAIN_STATE, "hyperparams", "cbstate")


class NamedValues:
    """Values selected by path: `step.loss`, `step.aux.kl`, `params.layers.0.w`, `hyperparams.learning_rate`.

    Args:
        names: One path or several.
        owner: Name of the callback, for error messages.
        roots: The allowed first parts of a path.

    Attributes:
        names: The paths, in order.
        of_steps: Whether at least one path begins with `step`.

    Raises:
        DeclarationError: There are no paths, a path is invalid, or a path appears twice.
    """

    def __init__(self, names: Any, owner: str, roots: tuple[str, ...] = _ROOTS) -> None:
        paths = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else (names,)
        for name in paths or ((),):  # an empty sequence also fails the check
            _require_path(name, owner, roots)
        for name in paths:
            if paths.count(name) > 1:
                raise DeclarationError(f"`{owner}` received the path `{name}` twice.", fix="name each value once")
        self.names: tuple[str, ...] = paths
        self.of_steps = any(name.startswith("step.") for name in paths)
        self._paths = {name: tuple(name.split(".")) for name in paths}

    def access(self) -> dict[str, Any]:
        """Return the access that reads these values and as little else as possible.

        A declared path consists of names. For `params.layers.0.w`, this is `params.layers`.
        """
        declared = {_by_names(path) for path in self._paths.values()}
        nested: dict[str, Any] = {}
        for path in sorted(declared):
            if any(path != other and path[: len(other)] == other for other in declared):
                continue  # covered by the declaration of a shorter path
            node = nested
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = Read()
        return nested

    def read(self, learner: LearnerView) -> dict[str, Any]:
        """Return the values, keyed by their paths.

        Raises:
            DeclarationError: A path does not exist.
        """
        return {name: _walk(learner, path) for name, path in self._paths.items()}

    def require(self, learner: LearnerView) -> None:
        """Check the paths into the train state, which exists when a Learner is built.

        Raises:
            DeclarationError: A path does not exist.
        """
        for path in self._paths.values():
            if path[0] in _TRAIN_STATE:  # values of a step do not exist yet
                _walk(learner, path)


def leaf_arrays(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a value as NumPy arrays, each with its path.

    Types that NumPy does not define, such as bfloat16, are converted to float32.
    """
    import jax
    import numpy as np

    arrays = []
    for path, leaf in jax.tree.leaves_with_path(value):
        array = np.asarray(leaf)
        if array.dtype.kind == "V":  # NumPy sees the types of `ml_dtypes` as raw bytes
            array = array.astype(np.float32)
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        arrays.append((".".join([name, *parts]), array))
    return arrays


def _require_path(name: Any, owner: str, roots: tuple[str, ...]) -> None:
    parts = name.split(".") if isinstance(name, str) else []
    if all(parts) and parts and parts[0] in roots and (len(parts) > 1 or parts[0] in _TRAIN_STATE):
        return
    fix = [f'write e.g. `"{_EXAMPLES[root]}"`' for root in roots[:2]]
    hint = ""
    if isinstance(name, str) and name and all(parts) and parts[0] not in FIRST_LEVEL:
        hint = did_you_mean(parts[0], roots)
        fix = [f'for a value of the step, write `"step.{name}"`', *fix[1:]] if not hint else fix
    *first, last = (f"`{root}`" for root in roots)
    raise DeclarationError(
        f"`{owner}` expects paths that begin with {', '.join(first)} or {last}; got {name!r}.{hint}",
        fix=fix,
    )


_EXAMPLES = {"step": "step.loss", "params": "params.w", "hyperparams": "hyperparams.learning_rate"}


def _by_names(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path up to its first sequence index, because indices cannot be declared."""
    first = next((i for i, part in enumerate(path) if part.isdigit()), len(path))
    return path[:first]


def _walk(learner: LearnerView, path: tuple[str, ...]) -> Any:
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
            parent = ".".join(path[:position])
            known = list(map(str, value)) if isinstance(value, Mapping) else []
            raise DeclarationError(
                f"`{parent}` has no `{part}`.{did_you_mean(part, known)}",
                where=f"the path `{'.'.join(path)}`",
                fix="use " + (" or ".join(f"`{parent}.{name}`" for name in known) or f"the whole value: `{parent}`"),
            ) from None
    return value
