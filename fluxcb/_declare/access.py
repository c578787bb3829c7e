"""Access permissions on state paths, in the nested form that users write and in normal form.

Users write nested mappings, `{"step": {"loss": Read()}}`. The normal form is a flat mapping of
paths to permissions, `{("step", "loss"): Read()}`. All later stages use the normal form.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from fluxcb._calls import Constructed
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = [
    "MONITORS",
    "STEP_FLAGS",
    "Access",
    "Append",
    "Permission",
    "Read",
    "Write",
    "code_reading",
    "dotted",
    "line_to_add",
    "lookup",
    "normalise",
    "overlap",
    "recommended",
    "writes",
]

MONITORS = ("cbstate", "monitors")
"""The path of the hub of `Monitors`."""

STEP_FLAGS = (("step", "skip"), ("step", "hold"), ("step", "stop"))
"""The paths of the flags of a step."""


@dataclass(frozen=True, repr=False)
class Permission(Constructed):
    """Base class of `Read`, `Write` and `Append`, the permissions that a callback can declare for a state path."""

    def __repr__(self) -> str:
        values = ((entry, getattr(self, entry.name)) for entry in fields(self))
        shown = (f"{entry.name}={value!r}" for entry, value in values if value != entry.default)
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Read(Permission):
    """Allow a callback to read a state path.

    Args:
        previous: Whether to read the value that was left by an earlier moment. Such a read does not order the callback
            after the callbacks that write the path.
        borrow: Whether the handler gets the live object instead of a copy. The object is valid until the handler
            returns.
    """

    previous: bool = False
    borrow: bool = False


@dataclass(frozen=True, repr=False)
class Write(Permission):
    """Allow a callback to read and write a state path."""


@dataclass(frozen=True, repr=False)
class Append(Permission):
    """Allow a callback to write a state path to which the order of writes does not matter.

    Examples are log records, counters, and flags that are combined with "or".

    Args:
        optional: Whether the entry of `cbstate` may be missing. The handler tests for it with
            `"monitors" in learner.cbstate`.
    """

    optional: bool = False


Access: TypeAlias = dict[StatePath, Permission]
"""Access in normal form."""

# A write to the first path also changes the second. Optax keeps injected hyperparameters in the
# optimizer state, and a model consists of its parameters and its state.
_ALIASES = frozenset(
    pair
    for one, other in (("hyperparams", "opt_state"), ("model", "params"), ("model", "model_state"))
    for pair in ((one, other), (other, one))
)


def writes(permission: Permission) -> bool:
    """Return whether a permission allows writing."""
    return isinstance(permission, (Write, Append))  # `Write | Append` would be made on each call


def code_reading(path: StatePath) -> str:
    """Return the code that reads a path in a handler. A name that is no identifier needs a subscript."""
    return "learner" + "".join(f".{name}" if name.isidentifier() else f'["{name}"]' for name in path)


def dotted(path: StatePath) -> str:
    """Return the path in dotted form, e.g. `step.loss`."""
    return ".".join(path)


def normalise(declared: Any, *, owner: str, where: str) -> Access:
    """Return what `stateaccess` returned, in normal form.

    Args:
        declared: The nested mapping.
        owner: The name of the declaration for messages, e.g. `Recorder.stateaccess`.
        where: The location of the declaration, `file:line`.

    Raises:
        DeclarationError: `declared` is not a mapping, a key is not a name, or a leaf is not a permission.
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
    grouped = prefix[:1] == ("hyperparams",)  # `hyperparams["encoder.learning_rate"]` is one name
    for key, value in node.items():
        if not isinstance(key, str) or not key or ("." in key and not grouped):
            under = f"under `{dotted(prefix)}`" if prefix else "at the top level"
            nested = f"nest it: `{_nested(key.split('.'))}`" if isinstance(key, str) and "." in key else "use a name"
            raise DeclarationError(
                f"`{owner}` has the key {key!r} {under}; keys are single names.",
                where=where,
                fix=nested,
            )
        path = (*prefix[:1], ".".join((*prefix[1:], key))) if grouped else (*prefix, key)
        if isinstance(value, Permission):
            access[path] = value
        elif isinstance(value, Mapping):
            _flatten(value, path, access, owner, where)
        else:
            is_class = isinstance(value, type)
            described = f"the class {value.__name__}" if is_class else f"{type(value).__name__} {value!r}"
            call = f"{value.__name__}()" if isinstance(value, type) and issubclass(value, Permission) else "Read()"
            raise DeclarationError(
                f"`{owner}` maps `{dotted(path)}` to {described}, which is not a permission.",
                where=where,
                fix=f"use an instance of Read, Write or Append, e.g. `{_nested(path, call)}`",
            )


def _nested(path: Iterable[str], leaf: str = "Read()") -> str:
    text = leaf
    for key in reversed(list(path)):
        text = f'{{"{key}": {text}}}'
    return text


def line_to_add(path: StatePath, permission: Permission) -> str:
    """Return the mapping that the user must add to `stateaccess` for this permission."""
    return _nested(path, f"{type(recommended(path, permission)).__name__}()")


def recommended(path: StatePath, permission: Permission) -> Permission:
    """Return the permission to recommend for a use that needs `permission`.

    Callbacks set the flags of a step, and log values, in any order. `Write()` would conflict with others that do so.
    """
    return Append() if path == MONITORS or (path in STEP_FLAGS and writes(permission)) else permission


def _is_prefix(a: StatePath, b: StatePath) -> bool:
    return b[: len(a)] == a


def overlap(a: StatePath, b: StatePath) -> bool:
    """Return whether two paths share state: one is a prefix or an alias of the other, or one is `*`."""
    if a[0] == "*" or b[0] == "*" or _is_prefix(a, b) or _is_prefix(b, a):
        return True
    return (a[0], b[0]) in _ALIASES


def lookup(access: Access, path: StatePath) -> Permission | None:
    """Return the permission of a path or of its nearest prefix, or None if there is neither."""
    for length in range(len(path), 0, -1):
        permission = access.get(path[:length])
        if permission is not None:
            return permission
    return access.get(("*",))
