"""`Interpreter`: reads functions, statement by statement."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._check.source.calls import Arguments, bound, defaults_of, titled, unwrapped
from fluxcb._check.source.flow import Flow
from fluxcb._check.source.scope import Frame, Local
from fluxcb._check.source.text import attribute_name, find_source
from fluxcb._check.source.touches import Runs
from fluxcb._check.source.values import UNKNOWN, Obj, Value, named, union
from fluxcb._declare.dispatch import source_of

__all__ = ["Interpreter"]

_CALLS = 1000  # in one handler, all helpers included
_DEEP = 12


class Interpreter(Flow):
    """Reads a function, with what it is called with.

    Args:
        me: The callback whose handler is read, or None.
    """

    def __init__(self, me: Any) -> None:
        super().__init__(me)
        self._active: dict[Any, tuple[list[Value], list[bool]]] = {}
        self._calls = 0

    def read(self, function: Any, arguments: Arguments) -> None:
        """Read a function that is called with these arguments."""
        function, arguments = unwrapped(function, arguments)
        if not isinstance(function, types.FunctionType):
            self.journal.give_up(f"`{type(function).__name__}` is no function whose source can be read", "")
            return
        text = find_source(function)
        names = bound(text.node.args, arguments, defaults_of(function, text.node.args)) if text is not None else None
        if text is None or names is None:
            self.journal.give_up(f"the source of `{titled(function)}` cannot be read", source_of(function))
            return
        start = self.journal.mark()
        try:
            self.run(Frame(function, text, titled(function), text.node), names)
        except RecursionError:  # an expression of a thousand parts
            self.journal.take_back(start)
            self.journal.give_up(f"`{titled(function)}` is nested too deep to be followed", source_of(function))

    def run(self, frame: Frame, names: Mapping[str, Value]) -> Value:
        """Read a function's body with what its parameters stand for; return what it may return."""
        key = (frame.node, frame.outer, tuple(names.values()))
        if key in self._active:  # it calls itself: what it returned so far is looked at again below
            returned, again = self._active[key]
            again.append(True)
            return union(returned)
        self._calls += 1
        if self._calls > _CALLS or len(self._active) >= _DEEP:
            self.give_up(f"calls `{frame.title}` too deep or too often to be followed", frame.node, frame)
            return UNKNOWN
        returned: list[Value] = []
        again: list[bool] = []
        self._active[key] = (returned, again)
        outside = self.branching, self.doubt
        self.branching, self.doubt = 0, Runs.SURELY
        try:
            while True:
                mark = self.journal.mark()
                inner = Frame(frame.function, frame.text, frame.title, frame.node, frame.outer)
                self._run_once(inner, names)
                found = union(inner.returned)
                if not again or found <= union(returned):
                    return found or UNKNOWN
                self.journal.take_back(mark)
                returned.append(found)
                again.clear()
        finally:
            self.branching, self.doubt = outside
            del self._active[key]

    def _run_once(self, frame: Frame, names: Mapping[str, Value]) -> None:
        for name, value in names.items():
            frame.bind(attribute_name(name, frame.text.class_name), value)
        if isinstance(frame.node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.statements(frame.node.body, frame)
        elif isinstance(frame.node, ast.Lambda):
            frame.returned.append(self.evaluate(frame.node.body, frame))
        if frame.alive and not isinstance(frame.node, ast.Lambda):
            frame.returned.append(frozenset((Obj(None),)))
        self._inner_functions(frame)

    def _inner_functions(self, frame: Frame) -> None:
        """Read the functions defined inside that somebody else calls, or nobody: with names as they ever were."""
        frame.running, frame.alive = False, True
        read: set[Local] = set()
        while pending := [
            f for f in frame.defined if f not in read and (f in frame.handed_on or f not in frame.called)
        ]:
            for function in pending:
                read.add(function)
                with self.at(frame.handed_on.get(function, Runs.NEVER)):
                    self.call_unknown(function)

    def call_unknown(self, function: Local) -> None:
        """Call a function with arguments that nobody knows."""
        args, home = function.node.args, function.frame
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        unknown = {arg.arg: UNKNOWN for arg in named if arg is not None}
        inner = Frame(home.function, home.text, home.title, function.node, home)
        self.hand_on(self.run(inner, unknown), "returns {} to who knows whom", function.node, home)

    # -- statements -------------------------------------------------------------------------

    def statements(self, body: Sequence[ast.stmt], frame: Frame) -> None:
        """Read statements, one after the other."""
        for statement in body:
            getattr(self, f"_{type(statement).__name__.lower()}", self._other)(statement, frame)

    def _other(self, node: ast.stmt, frame: Frame) -> None:
        self.evaluate(node, frame)

    def _expr(self, node: ast.Expr, frame: Frame) -> None:
        self.evaluate(node.value, frame)

    def _global(self, node: ast.stmt, frame: Frame) -> None:
        """Do nothing: names know it already."""

    _nonlocal = _pass = _global

    def _assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)

    def _annassign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame)

    def _augassign(self, node: ast.AugAssign, frame: Frame) -> None:
        target = node.target
        if isinstance(target, ast.Name):
            old = frame.look_up(target.id)
            self.use(old | self.evaluate(node.value, frame), node, frame)
            self.assign(target, UNKNOWN, frame)
            return
        base = self.evaluate(target.value, frame)
        if isinstance(target, ast.Attribute):
            key = named(attribute_name(target.attr, frame.text.class_name))
        else:
            key = self.evaluate(target.slice, frame)
        self.attribute_named(base, key, target, frame)
        self.use(self.evaluate(node.value, frame), node, frame)
        self.store(base, key, UNKNOWN, target, frame)

    def _delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            self._delete_target(target, frame)

    def _delete_target(self, target: ast.expr, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.bind(target.id, UNKNOWN)
        elif isinstance(target, ast.Attribute):
            key = named(attribute_name(target.attr, frame.text.class_name))
            self.delete(self.evaluate(target.value, frame), key, "deletes", target, frame)
        elif isinstance(target, ast.Subscript):
            base = self.evaluate(target.value, frame)
            self.delete(base, self.evaluate(target.slice, frame), "drops", target, frame)
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._delete_target(part, frame)

    def _return(self, node: ast.Return, frame: Frame) -> None:
        frame.returned.append(self.evaluate(node.value, frame))
        frame.alive = False

    def _raise(self, node: ast.Raise, frame: Frame) -> None:
        for part in (node.exc, node.cause):
            if part is not None:
                self.use(self.evaluate(part, frame), node, frame)
        frame.alive = False

    def _assert(self, node: ast.Assert, frame: Frame) -> None:
        self.evaluate(node.test, frame)
        if node.msg is not None:
            with self.perhaps():
                self.evaluate(node.msg, frame)

    # -- definitions and imports -----------------------------------------------------------------

    def _functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        value = self.defined(node, frame)
        if node.decorator_list:
            for decorator in node.decorator_list:
                self.evaluate(decorator, frame)
            self.hand_on(value, "", node, frame)
            value = UNKNOWN
        if not frame.bind(node.name, value):
            self.hand_on(value, "", node, frame)

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, frame: Frame) -> None:
        for part in (*node.bases, *(keyword.value for keyword in node.keywords), *node.decorator_list):
            self.hand_on(self.evaluate(part, frame), f"passes {{}} to the class `{node.name}`", node, frame)
        inner = Frame(frame.function, frame.text, frame.title, node, frame)
        inner.alive = frame.alive
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):  # methods do not see the class's names
                self.hand_on(self.defined(statement, frame), "", statement, frame)
            else:
                self.statements([statement], inner)
        for name, value in inner.names.items():
            self.hand_on(value, f"keeps {{}} in `{node.name}.{name}`", node, frame)
        frame.bind(node.name, UNKNOWN)

    def _import(self, node: ast.Import, frame: Frame) -> None:
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            module = sys.modules.get(whole)
            frame.bind(alias.asname or whole, UNKNOWN if module is None else frozenset((Obj(module),)))

    def _importfrom(self, node: ast.ImportFrom, frame: Frame) -> None:
        package = frame.function.__globals__.get("__package__") or ""
        base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package if node.level else ""
        name = ".".join(part for part in (base, node.module) if part)
        module = sys.modules.get(name)  # nothing is imported to be read
        for alias in node.names:
            found = vars(module).get(alias.name) if isinstance(module, types.ModuleType) else None
            frame.bind(alias.asname or alias.name, UNKNOWN if found is None else frozenset((Obj(found),)))
