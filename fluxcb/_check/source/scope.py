"""The names of one call while source is read: what each may stand for, here and at any time."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluxcb._check.source.text import FunctionNode, SourceText
from fluxcb._check.source.touches import Runs
from fluxcb._check.source.values import UNKNOWN, Obj, Value, union

__all__ = ["Frame", "Local", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Local:
    """A function or lambda that is defined while the handler runs, and sees its names."""

    node: FunctionNode
    frame: Frame


@dataclass(frozen=True)
class Snapshot:
    """What names stood for at one point, and whether that point is reached."""

    names: dict[str, Value]
    alive: bool

    def joined(self, others: list[Snapshot]) -> Snapshot:
        """Return what holds where several ways come together; those that end before do not count."""
        every = [self, *others]
        ways = [way for way in every if way.alive] or every
        names = dict.fromkeys(name for way in ways for name in way.names)
        return Snapshot(
            {name: union(way.names[name] for way in ways if name in way.names) for name in names},
            any(way.alive for way in every),
        )


@dataclass(eq=False)
class Frame:
    """One call of a function, or of one that is defined within it.

    Attributes:
        function: The function that exists, in which all this happens.
        text: Where that one stands.
        title: What messages call it, e.g. `Recorder.count_step`.
        node: What is being read: the function's own definition, or one inside.
        outer: The call that a function defined inside sees the names of.
        names: What each name stands for here.
        ever: What each name stands for at any time.
        alive: Whether this point is reached.
        running: Whether the call is still going on.
        returned: What it may return.
        defined: Functions defined here.
        called: Those that were called where that is read.
        handed_on: Those that others may call, with arguments that nobody knows, and how sure that is.
        defaults: For each of them, what its parameters are if they are not given.
        loops: For each loop around this point, the ways out of it and those to its head.
        watches: For each `try` around this point, what was assigned inside.
    """

    function: Any  # a types.FunctionType, which pyright takes for a descriptor
    text: SourceText
    title: str
    node: ast.AST
    outer: Frame | None = None
    names: dict[str, Value] = field(default_factory=dict)
    ever: dict[str, Value] = field(default_factory=dict)
    alive: bool = True
    running: bool = True
    returned: list[Value] = field(default_factory=list)
    defined: dict[Local, None] = field(default_factory=dict)
    called: set[Local] = field(default_factory=set)
    handed_on: dict[Local, Runs] = field(default_factory=dict)
    defaults: dict[FunctionNode, dict[str, Value]] = field(default_factory=dict)
    loops: list[tuple[list[Snapshot], list[Snapshot]]] = field(default_factory=list)
    watches: list[dict[str, list[Value]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = _names_of(self.node)
        self.own, self.module_wide, self.shared = names.own, names.module_wide, names.shared
        self.elsewhere = names.module_wide | names.outer

    def snapshot(self) -> Snapshot:
        """Return what holds at this point."""
        return Snapshot(dict(self.names), self.alive)

    def restore(self, point: Snapshot) -> None:
        """Go on from another point."""
        self.names, self.alive = dict(point.names), point.alive

    def bind(self, name: str, value: Value, *, maybe: bool = False) -> bool:
        """Let a name stand for a value; false if it is no name of this call."""
        if name in self.elsewhere:
            return False
        if maybe:
            value = value | self.names.get(name, UNKNOWN)
        self.names[name] = value
        self.ever[name] = self.ever.get(name, frozenset()) | value
        for watch in self.watches:
            watch.setdefault(name, []).append(value)
        return True

    def look_up(self, name: str) -> Value:
        """Return what a name may stand for."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.module_wide:
                break
            if name in frame.own and name not in frame.elsewhere:
                value = frame.names.get(name) if frame.running else frame.ever.get(name)
                # Who shares the name with an inner function that assigns it knows nothing for certain.
                return (value or UNKNOWN) | (UNKNOWN if name in frame.shared else frozenset())
            frame = frame.outer
        return self._global(name)

    def _global(self, name: str) -> Value:
        if name in self.text.rebound:
            return UNKNOWN
        free = self.function.__code__.co_freevars
        if name in free and self.function.__closure__ is not None:
            try:
                return frozenset((Obj(self.function.__closure__[free.index(name)].cell_contents),))
            except ValueError:  # not assigned yet
                return UNKNOWN
        for names in (self.function.__globals__, vars(builtins)):
            if name in names:
                return frozenset((Obj(names[name]),))
        return UNKNOWN


class _Names(NamedTuple):
    """The names of a function: those it assigns, those it declares to live elsewhere, and those inner ones assign."""

    own: frozenset[str]
    module_wide: frozenset[str]
    outer: frozenset[str]
    shared: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _names_of(node: ast.AST) -> _Names:
    own: set[str] = set()
    module_wide: set[str] = set()
    outer: set[str] = set()
    shared: set[str] = set()
    if isinstance(node, FunctionNode):
        args = node.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        own.update(arg.arg for arg in named if arg is not None)
    for part in _inside(node):
        own.update(_assigned_by(part))
        if isinstance(part, ast.Global):
            module_wide.update(part.names)
        elif isinstance(part, ast.Nonlocal):
            outer.update(part.names)
        elif isinstance(part, FunctionNode | ast.ClassDef):
            shared.update(n for inner in ast.walk(part) if isinstance(inner, ast.Nonlocal) for n in inner.names)
    return _Names(frozenset(own), frozenset(module_wide), frozenset(outer), frozenset(shared))


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own body: not those of functions and classes inside."""
    body: Any = getattr(node, "body", [])
    pending = list(body) if isinstance(body, list) else [body]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += part.decorator_list
        elif isinstance(part, ast.Lambda):
            pending += [d for d in (*part.args.defaults, *part.args.kw_defaults) if d is not None]
        else:
            pending += ast.iter_child_nodes(part)


def _assigned_by(part: ast.AST) -> list[str]:
    if isinstance(part, ast.Name):
        return [part.id] if isinstance(part.ctx, ast.Store | ast.Del) else []
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [part.name]
    if isinstance(part, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [part.name] if part.name else []
    if isinstance(part, ast.MatchMapping):
        return [part.rest] if part.rest else []
    if isinstance(part, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in part.names]
    return []
