"""The proxy through which a handler uses the Learner. Its class, and those of its parts, are generated.

Allowed paths are plain attributes. Every other name raises an AccessError that shows the line to
add. AccessError is not an AttributeError, which `hasattr` would suppress. Names that begin with an
underscore raise AttributeError as usual, so that copying and inspection work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from fluxcb._compile.optimizers import nearest_hyperparameter
from fluxcb._declare.access import Access, Append, Permission, Read, Write, code_reading, dotted, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import BUILTIN_PHASES, Phase
from fluxcb._declare.state import (
    ALIASES,
    COUNTER_ALIASES,
    ENGINE_STEP_NAMES,
    FIRST_LEVEL,
    MAPPING_METHODS,
    PROGRESS,
    UNDECLARED,
    step_names,
)
from fluxcb._errors import AccessError, DeclarationError, FluxcbError, nearest
from fluxcb._typing import StatePath

__all__ = ["Backend", "make_proxy"]

# First-level names that have parts. A permission on such a name includes all of its parts.
NAMESPACES = ("step", "cbstate", "hyperparams", "progress", "data")

_PROGRESS = {name: Read() for name in PROGRESS}  # every handler may read these
_COUNTERS = (*COUNTER_ALIASES, *(name for name in PROGRESS if name != "step"))
_STOPS = ("stop", "stop_training", "should_stop", "stop_reason")
_METHODS = ("evaluate", "predict", "fit", "run_epoch", "run_step", "replay", "save", "restore")
_MISSING = "uses `learner.{}`, which handlers do not have."
_CHANGING = (("step",), ("cbstate",), ("hyperparams",), ("data",))


class Backend(Protocol):
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

    def refused_write(self, path: StatePath) -> FluxcbError | None:
        """Return the error for a write that would also be refused after it is declared, otherwise None."""
        ...

    def undeclared_fix(self, path: StatePath, permission: Permission) -> str:
        """Return the complete fix for an undeclared access if its declaration alone is not sufficient, otherwise ""."""
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
    _how_to_declare: Callable[[StatePath, Permission], str]
    _access_owner: str = ""
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
                f"and its {self._access_owner} declares only parts of `{dotted(self._path)}`.",
                where=self._where,
                why="declared access determines order, conflicts and device-to-host transfers",
                fix=[
                    f"use a declared part: `learner.{dotted(self._path)}[{min(self._readable)!r}]`",
                    f"declare the whole: {self._how_to_declare(self._path, self._granted())}",
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
        path = (*self._path, name)
        if path == ("control",):
            return AccessError(
                f"{self._label} {'writes' if isinstance(needed, Write) else 'reads'} `control`, "
                "which is a permission and has no value.",
                where=self._where,
                why='`"control": Append()` lets host handlers of StepBegin and StepEnd raise a Cancel',
                fix=[
                    "raise CancelStep, CancelEpoch or CancelFitting in a host handler",
                    "write `learner.step.skip` or `learner.step.stop` in a traced handler",
                ],
            )
        if isinstance(needed, Write) and path[0] in UNDECLARED:
            return AccessError(
                f"{self._label} writes `{dotted(path)}`, which only the engine may write.",
                where=self._where,
                fix="keep your own counts in `learner.cbstate`",
            )
        if self._path == ("progress",):
            return self._unknown_counter(name)
        writing = writes(needed)
        # Declaring a write that the backend refuses anyway would lead to the next error.
        if writing and (error := self._backend.refused_write(path)) is not None:
            return error
        verb = {Write: "write", Append: "append to"}.get(type(needed), "read")
        known = sorted(self._known(), key=lambda name: (name not in self._readable, name))  # declared names first
        near = nearest_hyperparameter if self._path == ("hyperparams",) else nearest
        suggestion = near(name, known) if name not in known else ""
        what = f"may not {verb} `{dotted(path)}`: its {self._access_owner} does not declare it."
        fix: str | list[str] = self._how_to_declare(path, needed)
        if not self._path and name in (*ALIASES, *_COUNTERS, *_METHODS, *_STOPS, "log", "state"):
            what, fix = self._elsewhere(name, needed)
        elif suggestion:
            what += f" Did you mean `{suggestion}`?"
            suggested_path = (*self._path, suggestion)
            fix = f"write `{code_reading(suggested_path)}` instead of `{code_reading(path)}`"
            part = not self._path and suggestion in NAMESPACES  # permissions are declared for parts of a namespace
            if not (suggestion in self._writable if writing else suggestion in self._readable or part):
                fix += f", and {self._how_to_declare(suggested_path, needed)}"
            if self._path == ("cbstate", "monitors"):  # its entries have any name
                fix = [fix, self._how_to_declare(path, needed)]
        elif self._path and name in ("setdefault", "update", "pop"):
            entry = code_reading((*self._path, "x"))
            fix = f'assign each entry, e.g. `if "x" not in {code_reading(self._path)}: {entry} = 0`'
        elif not self._path and name not in FIRST_LEVEL:
            what = f"{'writes' if writing else 'reads'} `{name}`, which is not part of the state."
            declare = self._how_to_declare(("cbstate", name), Write())
            fix = f"for a value of your own, create `learner.cbstate.{name}` in `init`, and {declare}"
        elif self._path == ("step",) and name not in known and not writing:
            fix = self._unknown_step_value(name, known)
        # `init` runs before all shared state exists.
        elif not self._in_init and (complete := self._backend.undeclared_fix(path, needed)):
            fix = complete
        elif writing and name in self._readable:
            what = f"declares only Read() on `{dotted(path)}`, but writes it."
        return AccessError(
            f"{self._label} {what}",
            where=self._where,
            why="declared access determines order, conflicts and device-to-host transfers",
            fix=fix,
        )

    def _unknown_counter(self, name: str) -> AccessError:
        meant = COUNTER_ALIASES.get(name) or nearest(name, PROGRESS)
        hint = f" Did you mean `{meant}`?" if meant else ""
        return AccessError(
            f"{self._label} reads `progress.{name}`, which is not a counter.{hint}",
            where=self._where,
            why=f"`learner.progress` has {', '.join(PROGRESS)}",
            fix=f"write `learner.progress.{meant}` instead of `learner.progress.{name}`"
            if meant
            else "read one of these",
        )

    def _unknown_step_value(self, name: str, known: Iterable[str]) -> list[str]:
        """Return the fixes for a step value that may be a mistake, or may be written by another callback."""
        declare = self._how_to_declare(("step", name), Read())
        meant = COUNTER_ALIASES.get(name)
        fixes = [f"if a phase or another callback provides it, {declare}"]
        if meant:
            return [f"write `learner.progress.{meant}` instead of `learner.step.{name}`", *fixes]
        return [*fixes, f"otherwise read and declare one of {', '.join(sorted(known))}"]

    def _elsewhere(self, name: str, needed: Permission) -> tuple[str, str | list[str]]:
        """Return what is wrong with a name that the learner of a handler does not have, and how to mend it."""
        if name in _METHODS:
            return _MISSING.format(name), [
                f"call `learner.{name}` after `fit`",
                "measure on other data during the training with `InferenceRunner`",
            ]
        if name == "stop_reason" and not writes(needed):
            return "reads `stop_reason`, which is not part of the state.", "read `event.reason` in a handler of FitEnd"
        if name in _STOPS:  # as in Keras and Lightning
            control = self._how_to_declare(("control",), Append())
            what = f"writes `{name}`, which is not part of the state." if writes(needed) else _MISSING.format(name)
            return what, f'to end the fit, write `raise CancelFitting("reason")` in a host handler, and {control}'
        if name == "log":
            path: StatePath = ("cbstate", "monitors")
            declare = self._how_to_declare(path, Append())
            return _MISSING.format(name), f'write `learner.cbstate.monitors.put_scalar("name", value)`, and {declare}'
        if name == "state":
            return _MISSING.format(name), "name the part, such as `learner.params` or `learner.opt_state`"
        path = ALIASES.get(name) or ("progress", COUNTER_ALIASES.get(name, name))
        if path[0] == "progress" and writes(needed):
            return f"writes `{name}`, which only the engine may write.", "keep your own counts in `learner.cbstate`"
        if writes(needed) and (error := self._backend.refused_write(path)) is not None:
            return f"writes `{name}`, which is not part of the state.", list(error.fix)
        what = f"{'writes' if writes(needed) else 'reads'} `{name}`, which is not part of the state."
        declare = "" if path[0] == "progress" else f", and {self._how_to_declare(path, needed)}"
        return what, f"write `{code_reading(path)}` instead of `learner.{name}`{declare}"

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
    __hash__ = object.__hash__

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
        if path == ("control",):
            continue
        _plant(tree, path, permission)
    tree["progress"] = _PROGRESS
    tree.setdefault("key", Read())
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
        "__slots__": tuple(part for part in parts if part.isidentifier() and not part.startswith("__")),
        "_path": path,
        "_parts": parts,
        "_writable": writable,
        "_readable": frozenset(readable),
        "_open": inherited,
        "_how_to_declare": staticmethod(declared.how_to_declare),
        "_access_owner": declared.access_owner,
        "_in_init": in_init,
        **attributes,
    }
    name = "Protected" + "".join(part.title() for part in path or ("learner",))
    # The annotation `learner: LearnerView` is true at run time too, for libraries that check annotations.
    bases = (_View,) if path else (_View, LearnerView)
    return type(name, bases, namespace)(backend, declared.label, where)
