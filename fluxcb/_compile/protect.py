"""The proxy through which a handler uses the Learner. Its class, and those of its parts, are generated.

Allowed paths are plain attributes. Every other name raises an AccessError that shows the line to
add. AccessError is not an AttributeError, which `hasattr` would suppress. Names that begin with an
underscore raise AttributeError as usual, so that copying and inspection work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from fluxcb._compile.access_refusals import NAMESPACES, Refusal, RefusingBackend
from fluxcb._declare.access import Access, Permission, Read, Write, dotted, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import BUILTIN_PHASES, Phase
from fluxcb._declare.state import (
    ENGINE_STEP_NAMES,
    FIRST_LEVEL,
    MAPPING_METHODS,
    PROGRESS,
    step_names,
)
from fluxcb._errors import AccessError, DeclarationError, FluxcbError
from fluxcb._typing import StatePath

__all__ = ["Backend", "make_proxy"]

_PROGRESS = {name: Read() for name in PROGRESS}  # every handler may read these
_CHANGING = (("step",), ("cbstate",), ("hyperparams",), ("data",))


class Backend(RefusingBackend, Protocol):
    """The target of a proxy's reads and writes: the host's state, or the state that is being traced."""

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return the value at a path."""
        ...

    def reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return a function of the view that reads a path, with as much of the work as possible done in advance."""
        ...

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Replace the value at a path."""
        ...

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names that exist below a path."""
        ...

    def hub(self, path: StatePath) -> Any:
        """Return the shared object at a path if it has named parts (`cbstate_part`), otherwise None."""
        ...


class _View:
    """A part of the Learner in the form that one handler may use. Its own parts are created on first use."""

    __slots__ = ("_backend", "_label", "_where")

    _path: StatePath = ()
    _parts: Mapping[str, Callable[[], _View]] = {}
    _writable: dict[str, tuple[StatePath, Permission]] = {}
    _readable: frozenset[str] = frozenset()
    _open: Permission | None = None
    _declared: Declared
    _in_init = False

    _backend: Backend
    _label: str
    _where: str

    def __init__(self, backend: Backend, label: str, where: str) -> None:
        # The class overrides `__setattr__`.
        for name, value in (("_backend", backend), ("_label", label), ("_where", where)):
            object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise an error; `copy` and `pickle` both call this method."""
        shown = dotted(("learner", *self._path))
        raise DeclarationError(
            f"`{shown}`, as {self._label} sees it, can be neither copied nor pickled.",
            where=self._where,
            why="it only gives access to the state, and has no values of its own",
            fix="copy single values, e.g. `copy.deepcopy(learner.params)`",
        )

    def __getattr__(self, name: str) -> Any:  # only called for names without a property or slot
        if name in self._parts:
            view = self._parts[name]()
            # The slot keeps the part, so `__getattr__` is not called for it again.
            if name in type(self).__slots__:
                object.__setattr__(self, name, view)
            return view
        if name.startswith("_"):
            raise AttributeError(name)
        # An entry can have the name of a method, such as `cbstate.items`. If it is declared, it is a property.
        if self._path and name in MAPPING_METHODS and not (self._open is not None and name in self):
            return functools.partial(_View._get if name == "get" else getattr(Mapping, name), self)
        if self._open is not None:
            return self._backend.read((*self._path, name), self._open)
        # A handler may declare only single parts of a hub. Its methods on the whole, such as `put_scalar("loss", ...)`,
        # then work for these parts.
        hub = self._backend.hub(self._path) if self._path[:1] == ("cbstate",) and len(self._path) > 1 else None
        if hub is not None and hasattr(type(hub), name):
            return self._method(hub, name)
        raise self._refused(name, Read() if hub is None else self._granted())

    def _method(self, hub: Any, method: str) -> Callable[..., Any]:
        """Return a method of a hub whose first argument names a part, limited to the declared parts."""
        # Only the hub knows which of its methods take the name of a part as their first argument.
        permission = getattr(hub, "by_name", {}).get(method)
        if permission is None:
            raise AccessError(
                f"{self._label} uses `{dotted((*self._path, method))}`, "
                f"and its {self._declared.access_owner} declares only parts of `{dotted(self._path)}`.",
                where=self._where,
                why="declared access determines order, conflicts and device-to-host transfers",
                fix=[
                    f"use a declared part: `learner.{dotted(self._path)}[{min(self._readable)!r}]`",
                    f"declare the whole: {self._declared.how_to_declare(self._path, self._granted())}",
                ],
            )

        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            if name not in self._readable:
                raise self._refused(name, permission)
            return getattr(self[name], method)(*args, **kwargs)

        return call

    def _granted(self) -> Permission:
        """Return the permission on a part, preferably a permission to write."""
        return next((permission for _, permission in self._writable.values()), Read())

    def __setattr__(self, name: str, value: Any) -> None:
        known = self._writable.get(name)
        # A permission on a whole namespace also includes names that do not exist yet.
        if known is None and self._open is not None and writes(self._open):
            known = ((*self._path, name), self._open)
        if known is None:
            raise self._refused(name, Write())
        self._backend.write(known[0], value, known[1])

    def __delattr__(self, name: str) -> None:
        raise AccessError(
            f"{self._label} deletes `{dotted((*self._path, name))}`; state of the Learner cannot be deleted.",
            where=self._where,
            fix="assign a new value instead",
        )

    def __getitem__(self, name: str | Phase | type[Phase]) -> Any:
        return getattr(self, _key(name))

    def __setitem__(self, name: str | Phase | type[Phase], value: Any) -> None:
        setattr(self, _key(name), value)

    def __delitem__(self, name: str | Phase | type[Phase]) -> None:
        delattr(self, _key(name))

    def __contains__(self, name: str | Phase | type[Phase]) -> bool:
        return _key(name) in set(self._names())

    def __iter__(self) -> Iterator[str]:
        # Without the names that the handler may not read, so that `dict(part)` is no error.
        return iter(name for name in self._names() if name in self._readable or self._open)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __dir__(self) -> list[str]:
        return sorted([*self, *(MAPPING_METHODS if self._path else ())])

    def _get(self, name: str | Phase | type[Phase], default: Any = None) -> Any:
        """Return a part, or the default if the part is declared but does not exist."""
        declared = self._open is not None or _key(name) in self._readable
        return default if declared and name not in self else self[name]

    def _names(self) -> Iterable[str]:
        # Only the content of these changes. For all others, return the names that the handler may use.
        if self._path in _CHANGING or self._path[:1] == ("cbstate",):
            return self._backend.names(self._path)
        return sorted(self._readable)

    def _refused(self, name: str, needed: Permission) -> FluxcbError:
        """Return the error for an access that the handler may not make."""
        return Refusal(
            (*self._path, name),
            needed,
            backend=self._backend,
            declared=self._declared,
            where=self._where,
            readable=self._readable,
            writable=frozenset(self._writable),
            existing=frozenset(self._known()),
            in_init=self._in_init,
        ).error()

    def _refuse_number(self, other: Any) -> Any:
        """Refuse to be a number, which `learner.step` is outside handlers. Any other comparison is that of objects."""
        if self._path != ("step",) or not isinstance(other, int | float):
            return NotImplemented
        raise AccessError(
            f"{self._label} uses `learner.step` as a number.",
            where=self._where,
            why="in a handler, `learner.step` holds the values of the step",
            fix="write `learner.progress.step`",
        )

    def __eq__(self, other: object) -> bool:
        if self._path and isinstance(other, Mapping):
            return {name: self[name] for name in self} == other
        return self._refuse_number(other)

    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __floordiv__ = __add__ = __sub__ = _refuse_number
    __hash__ = object.__hash__  # Python would remove it, because the class defines `__eq__`

    def _known(self) -> set[str]:
        """Return the names that are known to exist here, including those that the handler may not access."""
        # Suggestions include undeclared names, because a missing declaration is as common as a typo.
        known = {*self._readable, *self._writable}
        if not self._path:
            return {*known, *FIRST_LEVEL} - {"*"}
        if self._path == ("step",):
            known |= {*ENGINE_STEP_NAMES, *step_names(BUILTIN_PHASES)}
        return known | set(self._names())

    def __repr__(self) -> str:
        inside, declared = dotted(self._path) or "learner", ", ".join(sorted(self._readable)) or "nothing"
        return f"<{inside} as {self._label} may see it: {declared if self._open is None else 'everything'}>"


def _key(name: Any) -> Any:
    """Return the name of a part. State that is kept by phase can also be looked up with a phase class or instance."""
    if isinstance(name, Phase) or (isinstance(name, type) and issubclass(name, Phase)):
        return name.name
    if isinstance(name, str):
        return name
    raise AccessError(
        f"The parts of a learner have names, and {name!r} is not a name.", fix='write e.g. `learner.step["loss"]`'
    )


def make_proxy(access: Access, backend: Backend, *, declared: Declared, where: str, in_init: bool = False) -> Any:
    """Return a protected learner for one handler.

    Args:
        access: The access of the handler.
        backend: The target of its reads and writes.
        declared: The callback.
        where: The location of the access declaration.
        in_init: Whether the learner is for `init` instead of a handler.
    """
    tree: dict[str, Any] = {}
    for path, permission in access.items():
        # `control` has no value. Without an attribute, a read raises the error that explains the permission.
        if path == ("control",):
            continue
        _plant(tree, path, permission)
    tree["progress"] = _PROGRESS
    tree.setdefault("key", Read())  # a key of the handler's own, which needs no declaration
    if "*" not in tree:
        for name in NAMESPACES:  # empty ones, so that a refusal names the part that was wanted, not the whole
            tree.setdefault(name, {})
    return _make_view((), tree, backend, declared, where, in_init)


def _plant(tree: dict[str, Any], path: StatePath, permission: Permission) -> None:
    node = tree
    for name in path[:-1]:
        node = node.setdefault(name, {})
        if isinstance(node, Permission):  # the whole is already allowed
            return
    node[path[-1]] = permission


def _make_view(
    path: StatePath,
    tree: dict[str, Any],
    backend: Backend,
    declared: Declared,
    where: str,
    in_init: bool,
    everything: Permission | None = None,
) -> _View:
    inherited = everything
    everything = tree.get("*") if not path else everything
    if everything is not None and not path:
        tree = {
            **{name: everything for name in FIRST_LEVEL if name not in ("*", "control")},
            **{k: v for k, v in tree.items() if k != "*"},
        }
    attributes: dict[str, Any] = {}
    writable: dict[str, tuple[StatePath, Permission]] = {}
    parts: dict[str, Callable[[], _View]] = {}
    readable: list[str] = []
    for name, node in tree.items():
        below = (*path, name)
        # A property per declared path: reading it costs no lookup of permissions.
        # A permission on a whole namespace is not a value, but a part that accepts every name.
        if isinstance(node, Permission) and (path or name not in NAMESPACES):
            attributes[name] = property(backend.reader(below, node))
            if writes(node):
                writable[name] = (below, node)
            readable.append(name)
            continue
        if isinstance(node, Permission):
            inside, opened = {}, node
        else:
            # Counters belong to the engine, even for a handler that may write everything.
            inside, opened = node, everything if name != "progress" else None
        # Views are generated on first use, because most handlers use few of the namespaces.
        parts[name] = functools.partial(_make_view, below, inside, backend, declared, where, in_init, opened)
        if inside or opened is not None:
            readable.append(name)
    # Each slot keeps a part after its first use, so that later accesses are plain attribute lookups.
    namespace = {
        # A slot must be an identifier, and Python changes names that begin with two underscores.
        # Parts with other names are created at each use.
        "__slots__": tuple(part for part in parts if part.isidentifier() and not part.startswith("__")),
        "_path": path,
        "_parts": parts,
        "_writable": writable,
        "_readable": frozenset(readable),
        "_open": inherited,
        "_declared": declared,
        "_in_init": in_init,
        **attributes,
    }
    name = "Protected" + "".join(part.title() for part in path or ("learner",))
    # The annotation `learner: LearnerView` is true at run time too, for libraries that check annotations.
    bases = (_View,) if path else (_View, LearnerView)
    return type(name, bases, namespace)(backend, declared.label, where)
