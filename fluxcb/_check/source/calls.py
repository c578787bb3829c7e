"""Calls: which function is called, and what it gets."""

from __future__ import annotations

import ast
import builtins
import functools
import os
import sysconfig
import types
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxcb._check.source.expressions import Expressions
from fluxcb._check.source.fields import fields_of
from fluxcb._check.source.folding import instance_of, length
from fluxcb._check.source.scope import Frame, Local
from fluxcb._check.source.text import find_source
from fluxcb._check.source.touches import How, Runs
from fluxcb._check.source.values import (
    UNKNOWN,
    Atom,
    Getter,
    Keywords,
    Many,
    Obj,
    Partial,
    Ref,
    Seq,
    Super,
    Value,
    carries,
    elements,
    members,
    ordered,
    parts,
    texts,
    union,
)

__all__ = ["Arguments", "Calls", "bound", "defaults_of", "titled", "unwrapped"]

# What these do with a protected learner touches nothing of it.
_LOOKING = (isinstance, issubclass, callable, id, repr, str, print, bool, hash)
_ITERATING = (list, tuple, set, frozenset, sorted, iter, next, reversed)
# What these do cannot be read.
_HIDING = {builtins.eval: "eval", builtins.exec: "exec", builtins.locals: "locals", builtins.vars: "vars"}

_INSTALLED = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass
class Arguments:
    """What a function is called with.

    Attributes:
        positional: By position.
        keywords: By name.
        more: Whether there may be others, from `*args` or `**kwargs` that are not known.
    """

    positional: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    more: bool = False

    def values(self) -> list[Value]:
        """Return all of them."""
        return [*self.positional, *self.keywords.values()]

    def before(self, *values: Value) -> Arguments:
        """Return these arguments with others in front."""
        return Arguments([*values, *self.positional], self.keywords, self.more)


class Calls(Expressions):
    """Evaluates calls: functions of the user's own are read with what they are given."""

    @abstractmethod
    def run(self, frame: Frame, names: Mapping[str, Value]) -> Value:
        """Read a function's body with what its parameters stand for; return what it may return."""

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return what a call may return."""
        function = self.evaluate(node.func, frame)
        arguments = self._arguments(node, frame)
        known = function if len(function) == 1 else frozenset()
        for atom in known:
            if isinstance(atom, Obj):
                special = self._built_in(atom.value, arguments, node, frame)
                if special is not None:
                    return special
        with self.at(Runs.SURELY if len(function) == 1 else Runs.MAYBE):
            return union([self.invoke(atom, arguments, node, frame) for atom in ordered(function)])

    def get(self, getter: Getter, node: ast.AST, frame: Frame) -> Value:
        """Return what a property may return."""
        return self._answer(getter.function, Arguments([frozenset((Obj(getter.owner),))]), node, frame)

    def _answer(self, function: types.FunctionType, arguments: Arguments, node: ast.AST, frame: Frame) -> Value:
        """Return what a method of the callback returns that gets no learner, and hence can touch nothing of one."""
        mark = self.journal.mark()
        found = self._read(function, arguments, node, frame)
        self.journal.take_back(mark)
        return UNKNOWN if found is None else found

    def _arguments(self, node: ast.Call, frame: Frame) -> Arguments:
        arguments = Arguments()
        for arg in node.args:
            if not isinstance(arg, ast.Starred):
                arguments.positional.append(self.evaluate(arg, frame))
                continue
            value = self.evaluate(arg.value, frame)
            [only] = value if len(value) == 1 else [None]
            if isinstance(only, Seq) and not arguments.more:
                arguments.positional += only.items
            else:
                members = elements(self.iterated(value, arg, frame))
                self.hand_on(members, f"passes {{}} to `{_called(node)}` by `*`", arg, frame)
                arguments.more = True
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            [only] = value if len(value) == 1 else [None]
            if keyword.arg is not None:
                arguments.keywords[keyword.arg] = value
            elif isinstance(only, Keywords):
                arguments.keywords.update(only.items)
            else:
                self.hand_on(value, f"passes {{}} to `{_called(node)}` by `**`", node, frame)
                arguments.more = True
        return arguments

    # -- functions --------------------------------------------------------------------------

    def invoke(self, function: Atom, arguments: Arguments, node: ast.AST, frame: Frame) -> Value:
        """Return what a function may return, and note what it touches."""
        if isinstance(function, Local):
            return self._read_local(function, arguments, frame)
        if isinstance(function, Partial):
            whole = Arguments(
                [*function.positional, *arguments.positional],
                {**dict(function.keywords), **arguments.keywords},
                arguments.more,
            )
            return self.invoke(function.function, whole, node, frame)
        if isinstance(function, Obj):
            found = self._invoke_object(function.value, arguments, node, frame)
            if found is not None:
                return found
        if isinstance(function, Ref) and not function.part:
            self.note(function, "calls", node, frame)
        for value in filter(carries, arguments.values()):
            self.hand_on(value, f"passes {{}} to `{_called(node)}`", node, frame)
        return UNKNOWN

    def _invoke_object(self, called: Any, arguments: Arguments, node: ast.AST, frame: Frame) -> Value | None:
        """Return what an object that exists returns when it is called, or None if that is not to be read."""
        function, arguments = unwrapped(called, arguments)
        if not any(map(carries, arguments.values())):
            mine = isinstance(called, types.MethodType) and called.__self__ is self.me
            mine = mine and isinstance(function, types.FunctionType)
            return self._answer(function, arguments, node, frame) if mine else UNKNOWN
        if isinstance(function, types.FunctionType):
            return self._read(function, arguments, node, frame) if self._is_own(function, arguments, frame) else None
        wrapped = fields_of(function).get("__wrapped__")
        if isinstance(wrapped, types.FunctionType) and not isinstance(function, type):
            with self.at(Runs.MAYBE):
                return self.invoke(Obj(wrapped), arguments, node, frame)
        return None

    def _is_own(self, function: types.FunctionType, arguments: Arguments, frame: Frame) -> bool:
        """Tell whether a function is the user's, not one of an installed library that has nothing to do with fluxcb."""
        for atom in arguments.positional[0] if arguments.positional else ():
            if isinstance(atom, Obj) and (atom.value is self.me or atom.value is type(self.me)):
                return True
        if _package(function) == _package(frame.function):
            return True
        return not function.__code__.co_filename.startswith(_INSTALLED)

    def _read(self, function: types.FunctionType, arguments: Arguments, node: ast.AST, frame: Frame) -> Value | None:
        text = find_source(function)
        if text is None:
            self.give_up(f"the source of `{titled(function)}` cannot be read", node, frame)
            return UNKNOWN
        inner = Frame(function, text, titled(function), text.node)
        return self._enter(inner, text.node.args, arguments, defaults_of(function, text.node.args), frame)

    def _read_local(self, function: Local, arguments: Arguments, frame: Frame) -> Value:
        home = function.frame
        home.called.add(function)
        inner = Frame(home.function, home.text, home.title, function.node, outer=home)
        found = self._enter(inner, function.node.args, arguments, home.defaults[function.node], frame)
        return UNKNOWN if found is None else found

    def _enter(
        self,
        inner: Frame,
        parameters: ast.arguments,
        arguments: Arguments,
        defaults: Mapping[str, Value],
        frame: Frame,
    ) -> Value | None:
        names = bound(parameters, arguments, defaults)
        if names is None:  # it would raise a TypeError
            return None
        with self.at(Runs.SURELY if frame.alive else Runs.NEVER):
            return self.run(inner, names)

    # -- functions of Python's own ------------------------------------------------------------

    def _built_in(self, function: Any, arguments: Arguments, node: ast.Call, frame: Frame) -> Value | None:
        """Return what a function of Python's own returns, or None if it is none of those that matter."""
        given = arguments.positional
        if arguments.more or type(function) not in (types.BuiltinFunctionType, type):
            return None
        if function is super:
            return self._super(given, frame)
        if function in _HIDING and (function is not vars or not given):
            self.give_up(f"calls `{_HIDING[function]}`", node, frame)
            return UNKNOWN
        owner = getattr(function, "__self__", None)
        if type(owner) is dict and not given:  # its items, keys or values: nothing else of it is called
            return frozenset((Seq(tuple(_known(member) for member in function())),))
        if not given:
            return None
        if function in (getattr, hasattr) and len(given) > 1:
            found = self.attribute_named(given[0], given[1], node, frame)
            default = union(given[2:])
            return UNKNOWN if function is hasattr else found | default
        if function is setattr and len(given) == 3:
            self.store(given[0], given[1], given[2], node, frame)
            return UNKNOWN
        if function is delattr and len(given) == 2:
            self.delete(given[0], given[1], "deletes", node, frame)
            return UNKNOWN
        if function is type and len(given) == 1:
            return frozenset(_type_of(atom) for atom in given[0])
        if function in (zip, enumerate):
            return self._side_by_side(function, given, node, frame)
        if function is isinstance and len(given) == 2:
            known = instance_of(given[0], given[1])
            if known is None and any(isinstance(atom, Ref) and len(atom.path) < 2 for atom in given[0]):
                self.doubt = Runs.MAYBE  # what it guards may be meant for other objects than handlers get
            return UNKNOWN if known is None else frozenset((Obj(known),))
        if function is len and len(given) == 1:
            size = length(given[0])
            return UNKNOWN if size is None else frozenset((Obj(size),))
        if function in _LOOKING:
            return UNKNOWN
        if function in _ITERATING and len(given) == 1:
            for value in arguments.keywords.values():  # sorted(..., key=...)
                self.hand_on(value, f"passes {{}} to `{_called(node)}`", node, frame)
            return frozenset((Many(elements(self.iterated(given[0], node, frame))),))
        if function is functools.partial:
            keywords = tuple(arguments.keywords.items())
            return frozenset(Partial(atom, tuple(given[1:]), keywords) for atom in given[0])
        return None

    def attribute_named(self, value: Value, key: Value, node: ast.AST, frame: Frame) -> Value:
        """Return what `getattr(value, key)` may be."""
        names = texts(key)
        if names is None:
            others = any(not isinstance(atom, Ref) for atom in value)
            return self.read_parts(value, key, node, frame) | (UNKNOWN if others else frozenset())
        with self.at(Runs.SURELY if len(names) == 1 else Runs.MAYBE):
            return union(self.attribute(value, name, node, frame) for name in names)

    def delete(self, base: Value, key: Value, how: How, node: ast.AST, frame: Frame) -> None:
        """Note that a part of something is deleted: an attribute (`deletes`) or an item (`drops`)."""
        for part, sure in parts(base, key):
            self.note(part, how, node, frame, sure=sure)

    def _side_by_side(self, function: Any, given: list[Value], node: ast.AST, frame: Frame) -> Value:
        """Return what `zip` or `enumerate` makes of its arguments."""
        iterated = [self.iterated(value, node, frame) for value in given]
        one_by_one = [members(value) for value in iterated]
        if function is enumerate:
            numbers = [frozenset((Obj(position),)) for position in range(len(one_by_one[0] or ()))]
            one_by_one = [numbers if len(given) == 1 else None, one_by_one[0]]
            iterated = [UNKNOWN, iterated[0]]
        if all(known is not None for known in one_by_one):
            rows = zip(*(known or () for known in one_by_one), strict=False)
            return frozenset((Seq(tuple(frozenset((Seq(row),)) for row in rows)),))
        return frozenset((Many(frozenset((Seq(tuple(map(elements, iterated))),))),))

    def _super(self, given: list[Value], frame: Frame) -> Value:
        root = frame
        while root.outer is not None:
            root = root.outer
        if len(given) == 2:
            [cls], [owner] = (value if len(value) == 1 else [None] for value in given)
        elif not given and isinstance(root.text.node, ast.FunctionDef):
            function = root.function
            free = function.__code__.co_freevars
            cells = dict(zip(free, function.__closure__ or (), strict=True))
            cls = Obj(cells["__class__"].cell_contents) if "__class__" in cells else None
            args = root.text.node.args
            first = next(iter([*args.posonlyargs, *args.args]), None)
            value = root.look_up(first.arg) if first is not None else UNKNOWN
            [owner] = value if len(value) == 1 else [None]
        else:
            return UNKNOWN
        if isinstance(cls, Obj) and isinstance(cls.value, type) and isinstance(owner, Obj):
            return frozenset((Super(cls.value, owner.value),))
        return UNKNOWN


def titled(function: types.FunctionType) -> str:
    """Return what messages call a function, `Class.method`."""
    return function.__qualname__.split("<locals>.")[-1]


def unwrapped(function: Any, arguments: Arguments) -> tuple[Any, Arguments]:
    """Return the function behind methods, `functools.partial` and objects that can be called, with all it gets."""
    while not isinstance(function, types.FunctionType | type):
        if isinstance(function, types.MethodType):
            arguments = arguments.before(frozenset((Obj(function.__self__),)))
            function = function.__func__
        elif isinstance(function, functools.partial):
            given = [frozenset((Obj(value),)) for value in function.args]
            keywords = {name: frozenset((Obj(value),)) for name, value in function.keywords.items()}
            arguments = Arguments([*given, *arguments.positional], {**keywords, **arguments.keywords}, arguments.more)
            function = function.func
        else:
            classes = type(function).__mro__
            method = next((vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)), None)
            if not isinstance(method, types.FunctionType):
                break
            function = types.MethodType(method, function)
    return function, arguments


def defaults_of(function: types.FunctionType, parameters: ast.arguments) -> dict[str, Value]:
    """Return what a function's parameters are if they are not given."""
    positional = [*parameters.posonlyargs, *parameters.args]
    values = function.__defaults__ or ()
    names = [arg.arg for arg in positional[len(positional) - len(values) :]]
    given = {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}
    return {name: frozenset((Obj(value),)) for name, value in given.items()}


def _known(member: Any) -> Value:
    if type(member) is tuple:  # a dict's item
        return frozenset((Seq(tuple(frozenset((Obj(part),)) for part in member)),))
    return frozenset((Obj(member),))


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").split(".")[0]


def _called(node: ast.AST) -> str:
    return f"{ast.unparse(node.func)}(...)" if isinstance(node, ast.Call) else ast.unparse(node)


def _type_of(atom: Atom) -> Atom:
    if isinstance(atom, Obj):
        return Obj(type(atom.value))
    [unknown] = UNKNOWN
    return unknown


def bound(parameters: ast.arguments, arguments: Arguments, defaults: Mapping[str, Value]) -> dict[str, Value] | None:
    """Return what each parameter stands for, or None if the arguments do not fit."""
    positional = [arg.arg for arg in (*parameters.posonlyargs, *parameters.args)]
    names = dict(zip(positional, arguments.positional, strict=False))
    extra = arguments.positional[len(positional) :]
    if parameters.vararg is not None:
        rest = frozenset((Seq(tuple(extra)),)) if not arguments.more else UNKNOWN
        if arguments.more and any(map(carries, extra)):
            return None
        names[parameters.vararg.arg] = rest
    elif extra:
        return None
    by_name = {*positional[len(parameters.posonlyargs) :], *(arg.arg for arg in parameters.kwonlyargs)}
    caught: dict[str, Value] = {}
    for name, value in arguments.keywords.items():
        if name in names:
            return None
        if name in by_name:
            names[name] = value
        elif parameters.kwarg is not None:
            caught[name] = value
        else:
            return None
    if parameters.kwarg is not None:
        if arguments.more and any(map(carries, caught.values())):
            return None
        names[parameters.kwarg.arg] = UNKNOWN if arguments.more else frozenset((Keywords(tuple(caught.items())),))
    for name in [*positional, *(arg.arg for arg in parameters.kwonlyargs)]:
        if name not in names:
            if arguments.more:
                names[name] = UNKNOWN
            elif name in defaults:
                names[name] = defaults[name]
            else:
                return None
    return names
