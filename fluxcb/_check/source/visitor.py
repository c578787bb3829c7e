"""Analysis of functions that take a learner: which state they use, found in their source without running them.

`Visitor` follows direct uses (`learner.step.loss`), names that are assigned once, methods of the callback, and
functions of the user. All other code that receives a part of the learner is recorded as `passes`. Conditions on fields
that the callback never changes are evaluated with the values of the fields, so branches for other options are ignored.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fluxcb._check.source.constants import Constants
from fluxcb._check.source.frame import (
    Frame,
    Ref,
    Value,
    below,
    bound_names,
    may_catch,
    package,
    titled,
)
from fluxcb._check.source.text import find_source
from fluxcb._check.source.touches import How, Reading, Runs, Touch
from fluxcb._declare.access import MONITORS
from fluxcb._declare.signatures import shown_path
from fluxcb._declare.state import MAPPING_METHODS, MONITOR_METHODS

__all__ = ["Visitor"]

_LOOKING = (isinstance, issubclass, callable, id, repr, str, print, bool, hash, type)
_ITERATING = (list, tuple, set, frozenset, sorted, iter, next, reversed, len, enumerate, any, all)
_HIDING = (eval, exec, locals, vars)
# Nodes that compute a new value from their parts.
_COMPUTING = (ast.BinOp, ast.UnaryOp, ast.JoinedStr, ast.FormattedValue, ast.Slice, ast.Assert)
_NOTES: dict[type[ast.AST], str] = dict.fromkeys((ast.List, ast.Tuple, ast.Set, ast.Dict), "puts {} into a container")
_NOTES[ast.Yield] = "yields {}"
_MANY = 500  # maximum number of calls that are followed in one analysis
_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class Visitor:
    """Analyzes one function and the functions that it calls.

    Args:
        me: The callback to which the function belongs.

    Attributes:
        constants: The known fields of the callback.
    """

    def __init__(self, me: Any) -> None:
        self.constants = Constants(me)
        self._touches: dict[Touch, Runs] = {}
        self._unclear: list[str] = []
        self._frames: list[Frame] = []
        self._level = Runs.SURELY
        self._calls = 0

    def read(self, function: Callable[..., Any], before: int) -> Reading:
        """Return the state that a function uses. The learner is preceded by `before` arguments."""
        plain, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
        learner = (Ref(()),)
        if not isinstance(plain, types.FunctionType):
            self._unclear.append(f"`{type(plain).__name__}` is not a function whose source can be read")
        else:
            first = [] if owner is None else [()]
            self._enter(plain, [*first, *[()] * before, learner], {}, owner)
        touches = tuple(replace(touch, runs=runs) for touch, runs in self._touches.items())
        return Reading(touches, tuple(dict.fromkeys(self._unclear)))

    # -- notes ----------------------------------------------------------------------------------

    def _where(self, node: ast.AST) -> str:
        function = self._frames[-1].function
        line = getattr(node, "end_lineno" if isinstance(node, ast.Attribute) else "lineno", 0)
        return f"{titled(function)}  {shown_path(function.__code__.co_filename)}:{line}"

    def _note(self, value: Value, how: How, node: ast.AST, note: str = "") -> None:
        for ref in value:
            runs = max(self._level, Runs.SURELY if len(value) == 1 else Runs.MAYBE)
            touch = Touch(ref.path, how, self._where(node), ref.part, Runs.SURELY, note)
            self._touches[touch] = min(runs, self._touches.get(touch, runs))

    def _pass_on(self, value: Value, note: str, node: ast.AST) -> None:
        """Record that a value is passed to code that is not followed."""
        self._note(tuple(ref for ref in value if not ref.part), "passes", node, note)

    def _give_up(self, what: str, node: ast.AST) -> None:
        if self._level is not Runs.NEVER:
            self._unclear.append(f"{what}  {self._where(node)}")

    @contextmanager
    def _at(self, level: Runs) -> Iterator[None]:
        before, self._level = self._level, max(self._level, level)
        try:
            yield
        finally:
            self._level = before

    # -- functions ------------------------------------------------------------------------------

    def _enter(
        self, function: types.FunctionType, given: Sequence[Value], named: Mapping[str, Value], owner: Any
    ) -> Value | None:
        """Analyze a function that is called with some arguments.

        Returns:
            The places that the function may return, or None if the arguments do not match its signature.
        """
        text, self._calls = find_source(function), self._calls + 1
        if text is None or self._calls > _MANY:
            code = function.__code__
            what = f"the source of `{titled(function)}` cannot be read" if text is None else "calls too many functions"
            self._unclear.append(f"{what}  {shown_path(code.co_filename)}:{code.co_firstlineno}")
            return ()
        arguments = text.node.args
        positional = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
        names = dict(zip(positional, given, strict=False))
        extra = [*given[len(positional) :], *(v for name, v in named.items() if name in names)]
        by_name = {*positional[len(arguments.posonlyargs) :], *(arg.arg for arg in arguments.kwonlyargs)}
        extra += [value for name, value in named.items() if name not in by_name]
        if any(extra):  # a part of the learner in `*args` or `**kwargs`, or the same parameter twice
            return None
        names |= {name: value for name, value in named.items() if name in by_name}
        bound = Counter(bound_names(text.node))
        owner_name = positional[0] if owner is not None and positional else None
        frame = Frame(function, text, bound, {}, owner, owner_name)
        self._frames.append(frame)
        try:
            for name, value in names.items():
                self._bind(name, value, text.node)
            if isinstance(text.node, ast.Lambda):
                frame.returned += self._value(text.node.body)
            else:
                self._block(text.node.body)
        except RecursionError:
            self._give_up("is nested too deeply for the analysis", text.node)
        finally:
            self._frames.pop()
        return tuple(dict.fromkeys(frame.returned))

    def _bind(self, name: str, value: Value, node: ast.AST) -> None:
        frame = self._frames[-1]
        if not value:
            return
        if frame.bound[name] == 1 and name not in frame.text.rebound:
            frame.places[name] = value
        else:
            self._pass_on(value, f"assigns {{}} to `{name}`, which is assigned more than once", node)

    # -- statements -----------------------------------------------------------------------------

    def _block(self, statements: Iterable[ast.stmt]) -> Runs:
        """Analyze statements. Return whether the statements after them run."""
        reached = Runs.SURELY
        for statement in statements:
            with self._at(reached):
                reached = max(reached, self._statement(statement))
        return reached

    def _statement(self, node: ast.stmt) -> Runs:
        match node:
            case ast.Return(value=value):
                found = () if value is None else self._value(value)
                self._frames[-1].returned += found if self._level is not Runs.NEVER else ()
                return Runs.NEVER
            case ast.Raise() | ast.Break() | ast.Continue():
                self._values(node)
                return Runs.NEVER
            case ast.If(test=test, body=body, orelse=orelse):
                self._value(test)
                branches_taken = self.constants.branches_taken(self._frames[-1], test)
                after = [self._branch(part, level) for part, level in zip((body, orelse), branches_taken, strict=True)]
                if after == [Runs.SURELY, Runs.SURELY]:
                    return Runs.SURELY
                return min(map(max, branches_taken, after))
            case ast.While(test=test, body=body, orelse=orelse):
                self._value(test)
                self._branch(body, self.constants.branches_taken(self._frames[-1], test)[0])
                self._block(orelse)
            case ast.For(target=target, iter=iterable):
                self._iterate(self._value(iterable), iterable)
                self._store(target, (), node)
                if isinstance(iterable, ast.Tuple | ast.List) and isinstance(target, ast.Name):
                    self._frames[-1].members[target.id] = iterable.elts
                optional = self.constants.mentions_owner(self._frames[-1], iterable)
                self._branch(node.body, Runs.MAYBE if optional else Runs.SURELY)
                self._block(node.orelse)
            case ast.With(items=items, body=body):
                for item in items:
                    self._pass_on(self._value(item.context_expr), "uses {} in a `with` statement", item.context_expr)
                    if item.optional_vars is not None:
                        self._store(item.optional_vars, (), node)
                self._branch(body, Runs.MAYBE)  # a context manager can suppress the error
            case ast.Try():
                return self._try(node)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value, node)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._assign(target, value, node)
            case ast.AugAssign(target=target, value=value):
                self._pass_on(self._value(value), "creates a new object from {}", node)
                self._value(target)
                self._store(target, (), node)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Attribute | ast.Subscript):
                        how: How = "deletes" if isinstance(target, ast.Attribute) else "drops"
                        self._note(self._target(target), how, node)
            case ast.Match(subject=subject, cases=cases):
                self._pass_on(self._value(subject), "matches {}", node)
                for case in cases:
                    self._values(case)
                    self._block(case.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                for part in (*node.decorator_list, *getattr(getattr(node, "args", None), "defaults", ())):
                    self._pass_on(self._value(part), "uses {} in a definition", node)
                outer, self._frames[-1].returned = self._frames[-1].returned, []
                self._branch(node.body, Runs.MAYBE)  # an inner function may never be called
                self._pass_on(tuple(self._frames[-1].returned), "returns {} from a function in it", node)
                self._frames[-1].returned = outer
            case ast.Expr(value=value):
                self._value(value)
            case ast.AsyncFor() | ast.AsyncWith() | ast.TryStar():
                self._give_up("uses `async` or `except*`", node)
            case _:
                self._values(node)
        return Runs.SURELY

    def _branch(self, body: Iterable[ast.stmt], level: Runs) -> Runs:
        with self._at(level):
            return self._block(body)

    def _try(self, node: ast.Try) -> Runs:
        caught = any(may_catch(self._frames[-1], handler.type) for handler in node.handlers)
        after = [self._branch([*node.body, *node.orelse], Runs.MAYBE if caught else Runs.SURELY)]
        after += [self._block(handler.body) for handler in node.handlers]
        return max(self._block(node.finalbody), min(after))

    def _assign(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        match target, value:
            case ast.Tuple(elts=to) | ast.List(elts=to), ast.Tuple(elts=of) | ast.List(elts=of) if len(to) == len(
                of
            ) and not any(isinstance(part, ast.Starred) for part in (*to, *of)):
                for part, value_of_part in zip(to, of, strict=True):
                    self._assign(part, value_of_part, node)
            case _:
                self._store(target, self._value(value), node)

    def _store(self, target: ast.expr, value: Value, node: ast.AST) -> None:
        """Record an assignment of a value to a target."""
        if isinstance(target, ast.Name):
            self._bind(target.id, value, node)
            return
        if isinstance(target, ast.Attribute | ast.Subscript):
            self._note(self._target(target), "writes", target)
            note = f"stores {{}} in `{ast.unparse(target)}`"
        else:
            for part in ast.iter_child_nodes(target):
                if isinstance(part, ast.expr):
                    self._store(part, (), node)
            note = "unpacks {}"
            self._iterate(value, node)
        self._pass_on(value, note, node)

    def _target(self, target: ast.Attribute | ast.Subscript) -> Value:
        """Return the place that an assignment or a deletion changes."""
        base = self._value(target.value)
        if isinstance(target, ast.Attribute):
            return below(base, [target.attr])
        self._value(target.slice)
        return below(base, self._keys(target.slice))

    # -- expressions ----------------------------------------------------------------------------

    def _values(self, node: ast.AST) -> None:
        """Analyze the expressions in a node of an unknown type."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                value = self._value(child)
                if not isinstance(node, _COMPUTING):
                    self._pass_on(value, _NOTES.get(type(node), "creates a new object from {}"), child)
            elif isinstance(child, ast.keyword | ast.pattern):
                self._values(child)

    def _value(self, node: ast.expr) -> Value:
        """Record the state that an expression uses, and return the places to which it may refer."""
        match node:
            case ast.Name(id=name):
                return self._frames[-1].places.get(name, ())
            case ast.Constant():
                return ()
            case ast.Attribute(value=base, attr=name):
                return self._part(self._value(base), [name], node)
            case ast.Subscript(value=base, slice=key):
                value = self._value(base)
                self._value(key)
                return self._part(value, self._keys(key), node)
            case ast.Call():
                return self._call(node)
            case ast.NamedExpr(target=target, value=value):
                found = self._value(value)
                self._store(target, found, node)
                return found
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._value(test)
                found = []
                levels = self.constants.branches_taken(self._frames[-1], test)
                for part, level in zip((body, orelse), levels, strict=True):
                    with self._at(level):
                        value = self._value(part)
                        found += value if level is not Runs.NEVER else ()
                return tuple(dict.fromkeys(found))
            case ast.BoolOp(op=op, values=parts):
                return self._all(parts, ends_with=isinstance(op, ast.Or))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                self._value(left)
                for before, op, after in zip([left, *comparators], ops, comparators, strict=False):
                    found = self._value(after)
                    if isinstance(op, ast.In | ast.NotIn):
                        self._note(below(found, self._keys(before)), "lists", node)
                return ()
            case ast.Lambda(args=arguments, body=body):
                for part in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
                    self._pass_on(self._value(part), "uses {} in a definition", node)
                with self._at(Runs.MAYBE):
                    self._pass_on(self._value(body), "returns {} from a function in it", node)
                return ()
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for generator in node.generators:
                    self._iterate(self._value(generator.iter), generator.iter)
                    for condition in generator.ifs:
                        self._value(condition)
                for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                    with self._at(Runs.MAYBE if isinstance(node, ast.GeneratorExp) else Runs.SURELY):
                        self._pass_on(self._value(part), _NOTES[ast.List], part)
                return ()
            case ast.Await(value=value) | ast.Starred(value=value):
                return self._value(value)
        self._values(node)
        return ()

    def _all(self, parts: Sequence[ast.expr], *, ends_with: bool) -> Value:
        """Analyze the operands of `or` (which ends with a true one) or `and`."""
        found: list[Ref] = []
        reached = Runs.SURELY
        for part in parts:
            with self._at(reached):
                value = self._value(part)
            found += value if reached is not Runs.NEVER else ()
            reached = max(reached, self.constants.branches_taken(self._frames[-1], part)[1 if ends_with else 0])
        return tuple(dict.fromkeys(found))

    def _part(self, base: Value, names: list[str | None], node: ast.expr) -> Value:
        """Record that a part of a value is read, and return it."""
        found = below(base, names)
        self._note(found, "reads", node)
        return found

    def _keys(self, key: ast.expr) -> list[str | None]:
        """Return the names that a subscript may have. None is an unknown name."""
        frame, keys = self._frames[-1], [key]
        if isinstance(key, ast.Name) and frame.bound[key.id] == 1:
            keys = frame.members.get(key.id, keys)
        known = [self.constants.constant(frame, part) for part in keys]
        return [part[0] if part is not None and isinstance(part[0], str) else None for part in known]

    def _iterate(self, value: Value, node: ast.AST) -> None:
        self._note(below(value, [None]), "lists", node)

    # -- calls ----------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Value:
        func, called = node.func, ()
        if isinstance(func, ast.Attribute) and func.attr in MONITOR_METHODS and node.args:
            hub = tuple(ref for ref in self._value(func.value) if ref.path == MONITORS and not ref.part)
            # `monitors.put_scalar("loss", x)` uses `monitors["loss"]`.
            called = below(self._part(hub, self._keys(node.args[0]), node), [func.attr])
        called = called or self._value(func)
        self._note(tuple(ref for ref in called if not ref.part), "calls", node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in MAPPING_METHODS:
            mapping = tuple(Ref(ref.path[:-1]) for ref in called if not ref.part)
            if node.func.attr == "get" and node.args:
                self._part(mapping, self._keys(node.args[0]), node)
            else:
                self._iterate(mapping, node)
        given = [self._value(argument) for argument in node.args]
        named = {keyword.arg: self._value(keyword.value) for keyword in node.keywords}
        spread = None in named or any(isinstance(argument, ast.Starred) for argument in node.args)
        function, owner = (None, None) if called else self.constants.called_function(self._frames[-1], node.func)
        if (
            isinstance(function, types.BuiltinFunctionType)
            and function in _HIDING
            and (function is not vars or not given)
        ):
            self._give_up(f"calls `{function.__name__}`", node)
        found = None
        if not any((*given, *named.values())):
            found = ()
        elif isinstance(function, types.BuiltinFunctionType | type) and not spread:
            found = self._built_in(function, given, node)
        elif isinstance(function, types.FunctionType) and not spread:
            found = self._follow(function, owner, given, named, node)
        if found is not None:
            return found
        for value in (*given, *named.values()):
            self._pass_on(value, f"passes {{}} to `{ast.unparse(node.func)}(...)`", node)
        return ()

    def _follow(
        self, function: types.FunctionType, owner: Any, given: list[Value], named: dict[Any, Value], node: ast.Call
    ) -> Value | None:
        """Analyze a function that is called. Return None if it belongs to another library."""
        file = function.__code__.co_filename
        if owner is None and file.startswith(_INSTALLED) and package(function) != package(self._frames[-1].function):
            return None
        if any(frame.function.__code__ is function.__code__ and frame.owner is owner for frame in self._frames):
            self._give_up(f"calls `{titled(function)}`, which calls itself", node)
            return ()
        return self._enter(function, [*([()] if owner is not None else []), *given], named, owner)

    def _built_in(self, function: Any, given: list[Value], node: ast.Call) -> Value | None:
        """Return the result of a function of Python, or None if it is unknown how it uses its arguments."""
        if function in _LOOKING:
            return ()
        if function in _ITERATING and len(given) == 1 and not node.keywords:
            self._iterate(given[0], node)
            return ()
        if function in (getattr, hasattr, setattr, delattr) and len(given) > 1:
            place = below(given[0], self._keys(node.args[1]))
            for value in given[2:]:
                self._pass_on(value, "passes {} to `" + function.__name__ + "`", node)
            hows: dict[Any, How] = {setattr: "writes", delattr: "deletes"}
            self._note(place, hows.get(function, "reads"), node)
            return place if function is getattr else ()
        return None
