"""Access: permissions on state paths, in the form users write and in normal form.

Users write nested mappings, `{"step": {"loss": Read()}}`. The normal form is a flat mapping of
paths to permissions, `{("step", "loss"): Read()}`, which is what everything later works with.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = [
    "Access",
    "Append",
    "Permission",
    "Read",
    "Write",
    "dotted",
    "line_to_add",
    "lookup",
    "normalise",
    "overlap",
    "writes",
]


@dataclass(frozen=True)
class Permission:
    """What a callback may do with a state path; use `Read`, `Write` or `Append`."""


@dataclass(frozen=True)
class Read(Permission):
    """Permission to read.

    Args:
        previous: Read what an earlier moment left, and be ordered after nobody.
        borrow: Get the live object, not a copy, valid until the handler returns.
    """

    previous: bool = False
    borrow: bool = False


@dataclass(frozen=True)
class Write(Permission):
    """Permission to write, which includes to read."""


@dataclass(frozen=True)
class Append(Permission):
    """Permission to write where order does not matter: log records, counters, or-ed flags.

    Args:
        optional: Whether the entry of `cbstate` may be missing; ask for it: `"monitors" in learner.cbstate`.
    """

    optional: bool = False


Access: TypeAlias = dict[StatePath, Permission]
"""Access in normal form."""

# Writing the first also changes the second: optax keeps injected hyperparameters inside the
# optimizer's state, and a model is its parameters and state.
_ALIASES = frozenset(
    pair
    for one, other in (("hyperparams", "opt_state"), ("model", "params"), ("model", "model_state"))
    for pair in ((one, other), (other, one))
)


def writes(permission: Permission) -> bool:
    """Tell whether a permission allows to change something."""
    return isinstance(permission, Write | Append)


def dotted(path: StatePath) -> str:
    """Return the path as users write it in prose, `step.loss`."""
    return ".".join(path)


def normalise(declared: Any, *, owner: str, where: str) -> Access:
    """Flatten what `stateaccess` returned.

    Args:
        declared: The nested mapping.
        owner: What declared it, for messages, e.g. `Recorder.stateaccess`.
        where: Its place, `file:line`.

    Raises:
        DeclarationError: It is no mapping, a key is no name, or a leaf is no permission.
    """
    if not isinstance(declared, Mapping):
        raise DeclarationError(
            f"`{owner}` must return a mapping of state to permissions, not {type(declared).__name__} {declared!r}.",
            where=where,
            fix='return e.g. `{"step": {"loss": Read()}}`, or `{}` for no access',
        )
    access: Access = {}
    _flatten(declared, (), access, owner, where)
    return access


def _flatten(node: Mapping[Any, Any], prefix: StatePath, access: Access, owner: str, where: str) -> None:
    for key, value in node.items():
        if not isinstance(key, str) or not key or "." in key:
            under = f"under `{dotted(prefix)}`" if prefix else "at the top level"
            nested = f"nest it: `{_nested(key.split('.'))}`" if isinstance(key, str) and "." in key else "use a name"
            raise DeclarationError(
                f"`{owner}` has the key {key!r} {under}; keys are single names.",
                where=where,
                fix=nested,
            )
        path = (*prefix, key)
        if isinstance(value, Permission):
            access[path] = value
        elif isinstance(value, Mapping):
            _flatten(value, path, access, owner, where)
        else:
            got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"
            call = f"{value.__name__}()" if isinstance(value, type) and issubclass(value, Permission) else "Read()"
            raise DeclarationError(
                f"`{owner}` gives `{dotted(path)}` {got}, which is no permission.",
                where=where,
                fix=f"use an instance of Read, Write or Append, e.g. `{_nested(path, call)}`",
            )


def _nested(path: Iterable[str], leaf: str = "Read()") -> str:
    text = leaf
    for key in reversed(list(path)):
        text = f'{{"{key}": {text}}}'
    return text


def line_to_add(path: StatePath, permission: Permission) -> str:
    """Return the mapping a user would have to add to `stateaccess` for this permission."""
    return _nested(path, f"{type(permission).__name__}()")


def _is_prefix(a: StatePath, b: StatePath) -> bool:
    return b[: len(a)] == a


def overlap(a: StatePath, b: StatePath) -> bool:
    """Tell whether two paths share state: one is a prefix of the other, an alias of it, or `*`."""
    if a[0] == "*" or b[0] == "*" or _is_prefix(a, b) or _is_prefix(b, a):
        return True
    return (a[0], b[0]) in _ALIASES


def lookup(access: Access, path: StatePath) -> Permission | None:
    """Return the permission that governs a path (its own or that of the nearest prefix), or None."""
    for length in range(len(path), 0, -1):
        permission = access.get(path[:length])
        if permission is not None:
            return permission
    return access.get(("*",))
