"""Expressions: what each may stand for, and what evaluating it touches."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Sequence

from fluxcb._check.source.folding import compared, either, joined_texts, length
from fluxcb._check.source.noting import Noting
from fluxcb._check.source.scope import Frame, Local
from fluxcb._check.source.text import FunctionNode, attribute_name
from fluxcb._check.source.touches import Runs
from fluxcb._check.source.values import (
    UNKNOWN,
    Fixed,
    Getter,
    Keywords,
    Obj,
    Ref,
    Seq,
    Super,
    Value,
    attribute_of,
    carries,
    constant,
    elements,
    inherited,
    item,
    members,
    named,
    ordered,
    parts,
    texts,
    truth,
    union,
)

__all__ = ["Expressions"]

_TURNS = 36  # of loops within loops whose members are read one by one


class Expressions(Noting):
    """Evaluates expressions of one function's source, and of those it calls."""

    @abstractmethod
    def call(self, node: ast.Call, frame: Frame) -> Value:
        """Return what a call may return."""

    @abstractmethod
    def get(self, getter: Getter, node: ast.AST, frame: Frame) -> Value:
        """Return what a property may return."""

    # -- expressions ------------------------------------------------------------------------

    def evaluate(self, node: ast.AST | None, frame: Frame) -> Value:
        """Return what an expression may stand for, and note what it touches."""
        if node is None:
            return frozenset((Obj(None),))
        evaluator = getattr(self, f"_{type(node).__name__.lower()}", None)
        if evaluator is not None:
            return evaluator(node, frame)
        for child in ast.iter_child_nodes(node):  # arithmetic, slices, f-strings: what they make is no place
            if isinstance(child, ast.expr | ast.keyword):
                self.use(self.evaluate(child, frame), node, frame)
        return UNKNOWN

    def _keyword(self, node: ast.keyword, frame: Frame) -> Value:
        return self.evaluate(node.value, frame)

    def _constant(self, node: ast.Constant, frame: Frame) -> Value:
        return frozenset((Obj(node.value),))

    def _name(self, node: ast.Name, frame: Frame) -> Value:
        return frame.look_up(attribute_name(node.id, frame.text.class_name))

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        return self.attribute(value, attribute_name(node.attr, frame.text.class_name), node, frame)

    def attribute(self, value: Value, name: str, node: ast.AST, frame: Frame) -> Value:
        """Return what an attribute of a value may be."""
        found = [self.read_parts(value, named(name), node, frame)]
        for atom in ordered(value):
            if isinstance(atom, Ref):
                continue
            known = None
            self.use(frozenset((atom,)), node, frame)
            if isinstance(atom, Fixed) and type(atom.value) is dict and name in ("items", "keys", "values"):
                known = Obj(getattr(atom.value, name))
            elif isinstance(atom, Obj):
                known = attribute_of(atom.value, name, self.me, self.asked)
            elif isinstance(atom, Super):
                known = inherited(name, atom.after, atom.owner)
            if isinstance(known, Getter):
                found.append(self.get(known, node, frame) if known.owner is self.me else UNKNOWN)
            else:
                found.append(UNKNOWN if known is None else frozenset((known,)))
        return union(found) or UNKNOWN

    def read_parts(self, base: Value, key: Value, node: ast.AST, frame: Frame) -> Value:
        """Return the parts by this name, or one of these, of the places that a base may be; they are read."""
        places = parts(base, key)
        for part, sure in places:
            self.note(part, "reads", node, frame, sure=sure)
        return frozenset(part for part, _ in places)

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        key = self.evaluate(node.slice, frame)
        self.hand_on(key, "uses {} as an index", node, frame)
        found = [self.read_parts(value, key, node, frame)]
        position = constant(key, int)
        for atom in value:
            if isinstance(atom, Ref):
                continue
            if isinstance(atom, Seq) and position is not None and -len(atom.items) <= position < len(atom.items):
                found.append(atom.items[position])
            elif isinstance(atom, Fixed) or (isinstance(atom, Obj) and type(atom.value) is tuple):
                known = item(atom.value, key)
                found.append(UNKNOWN if known is None else frozenset((known,)))
            elif isinstance(atom, Keywords):
                found += [item for name, item in atom.items if name in (texts(key) or [name])]
            elif isinstance(atom, Seq) and not isinstance(node.slice, ast.Slice):
                found.append(elements(frozenset((atom,))))
            else:
                self.use(frozenset((atom,)), node, frame)
                found.append(UNKNOWN)
        return union(found) or UNKNOWN

    def _joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Value:
        pieces = [self.evaluate(part, frame) for part in node.values]
        return joined_texts(pieces) or UNKNOWN

    def _formattedvalue(self, node: ast.FormattedValue, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        self.use(value, node, frame)
        if node.format_spec is not None:
            self.evaluate(node.format_spec, frame)
        return value if node.conversion == -1 and node.format_spec is None and not _places(value) else UNKNOWN

    def _binop(self, node: ast.BinOp, frame: Frame) -> Value:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        if isinstance(node.op, ast.Add) and texts(left) and texts(right):
            return joined_texts([left, right]) or UNKNOWN
        classes = either(left, right) if isinstance(node.op, ast.BitOr) else None
        if classes is not None:
            return classes
        self.use(left | right, node, frame)
        return UNKNOWN

    def _tuple(self, node: ast.Tuple, frame: Frame) -> Value:
        if any(isinstance(item, ast.Starred) for item in node.elts):
            return self._collected(node.elts, node, frame)
        return frozenset((Seq(tuple(self.evaluate(item, frame) for item in node.elts)),))

    def _collected(self, items: Sequence[ast.AST | None], node: ast.AST, frame: Frame) -> Value:
        for part in items:
            if part is not None:
                self.hand_on(self.evaluate(part, frame), "puts {} into a container", node, frame)
        return UNKNOWN

    def _list(self, node: ast.List, frame: Frame) -> Value:
        return self._collected(node.elts, node, frame)

    def _set(self, node: ast.Set, frame: Frame) -> Value:
        return self._collected(node.elts, node, frame)

    def _dict(self, node: ast.Dict, frame: Frame) -> Value:
        return self._collected([*node.keys, *node.values], node, frame)

    def _starred(self, node: ast.Starred, frame: Frame) -> Value:
        return elements(self.iterated(self.evaluate(node.value, frame), node, frame))

    def over(self, node: ast.expr, frame: Frame) -> Value:
        """Return what an expression stands for that is iterated over."""
        if isinstance(node, ast.List | ast.Set) and not any(isinstance(item, ast.Starred) for item in node.elts):
            return frozenset((Seq(tuple(self.evaluate(item, frame) for item in node.elts)),))
        return self.iterated(self.evaluate(node, frame), node, frame)

    def iterated(self, value: Value, node: ast.AST, frame: Frame) -> Value:
        """Return a value that is iterated over: places give their names, or what a value in them consists of."""
        for atom in value:
            if isinstance(atom, Ref) and not atom.part:
                self.note(Ref(atom.path, True), "asks", node, frame, sure=len(value) == 1)
        return value

    def _namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Value:
        value = self.evaluate(node.value, frame)
        if not frame.bind(node.target.id, value, maybe=self.branching > 0):
            self.hand_on(value, f"keeps {{}} in `{node.target.id}` of elsewhere", node, frame)
        return value

    def _lambda(self, node: ast.Lambda, frame: Frame) -> Value:
        return self.defined(node, frame)

    def defined(self, node: FunctionNode, frame: Frame) -> Value:
        """Return a function that is defined here."""
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        given = list(zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True))
        given += [(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default]
        frame.defaults[node] = {arg.arg: self.evaluate(default, frame) for arg, default in given}
        function = Local(node, frame)
        frame.defined[function] = None
        return frozenset((function,))

    # -- expressions of which a part may be skipped ------------------------------------------

    def _boolop(self, node: ast.BoolOp, frame: Frame) -> Value:
        stops = isinstance(node.op, ast.Or)
        found: list[Value] = []
        value = self.evaluate(node.values[0], frame)
        for operand in node.values[1:]:
            known = truth(value)
            if known is stops:
                self._unreached(operand, frame)
                continue
            if known is None:
                found.append(value)
                with self.perhaps(), self.at(self.doubt):
                    value = self.evaluate(operand, frame)
            else:
                value = self.evaluate(operand, frame)
        return union([*found, value])

    def tested(self, node: ast.AST, frame: Frame) -> tuple[bool | None, Runs]:
        """Return the answer of a test, if it is known, and how sure what it guards can be."""
        before, self.doubt = self.doubt, Runs.SURELY
        known = truth(self.evaluate(node, frame))
        doubt, self.doubt = self.doubt, before
        return known, doubt

    def _unreached(self, node: ast.AST, frame: Frame) -> None:
        with self.at(Runs.NEVER), self.perhaps():
            self.evaluate(node, frame)

    def _ifexp(self, node: ast.IfExp, frame: Frame) -> Value:
        known, doubt = self.tested(node.test, frame)
        if known is not None:
            self._unreached(node.orelse if known else node.body, frame)
            return self.evaluate(node.body if known else node.orelse, frame)
        with self.perhaps(), self.at(doubt):
            return self.evaluate(node.body, frame) | self.evaluate(node.orelse, frame)

    def _unaryop(self, node: ast.UnaryOp, frame: Frame) -> Value:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return UNKNOWN if known is None else frozenset((Obj(not known),))
        number = constant(value, int)
        return frozenset((Obj(-number),)) if isinstance(node.op, ast.USub) and number is not None else UNKNOWN

    def _compare(self, node: ast.Compare, frame: Frame) -> Value:
        left, answers = self.evaluate(node.left, frame), []
        for op, comparator in zip(node.ops, node.comparators, strict=True):
            among = isinstance(op, ast.In | ast.NotIn)
            with self.perhaps():  # all but the first may be skipped
                written_out = among and isinstance(comparator, ast.List | ast.Set)
                right = self.over(comparator, frame) if written_out else self.evaluate(comparator, frame)
            if among:
                self._asks(left, right, node, frame)
            answers.append(compared(op, left, right))
            left = right
        known = answers[0] if len(answers) == 1 else None
        return UNKNOWN if known is None else frozenset((Obj(known),))

    def _asks(self, left: Value, right: Value, node: ast.AST, frame: Frame) -> None:
        for part, sure in parts(right, left):
            self.note(part, "asks", node, frame, sure=sure)

    # -- comprehensions, generators ------------------------------------------------------------

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, frame: Frame) -> Value:
        return self._comprehended(node.generators, [node.elt], node, frame)

    _setcomp = _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp, frame: Frame) -> Value:
        return self._comprehended(node.generators, [node.key, node.value], node, frame)

    def _comprehended(
        self, generators: Sequence[ast.comprehension], made: Sequence[ast.expr], node: ast.AST, frame: Frame
    ) -> Value:
        names = {n.id for g in generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        before = {name: frame.names[name] for name in names if name in frame.names}

        def made_each() -> None:
            with self.perhaps():
                for part in made:
                    self.hand_on(self.evaluate(part, frame), "puts {} into a container", node, frame)

        self._turns(list(generators), made_each, frame)
        for name in names:
            frame.names.pop(name, None)
        frame.names.update(before)
        return UNKNOWN

    def _turns(self, generators: list[ast.comprehension], inside: Callable[[], None], frame: Frame) -> None:
        if not generators:
            inside()
            return
        first, *others = generators
        value = self.over(first.iter, frame)

        def turn(member: Value) -> None:
            self.assign(first.target, member, frame)
            for test in first.ifs:
                self.evaluate(test, frame)
            self._turns(others, inside, frame)

        self.each(value, turn, lambda: turn(elements(value)), frame)

    def each(self, value: Value, turn: Callable[[Value], None], anyhow: Callable[[], None], frame: Frame) -> None:
        """Read something that is done with each member: one by one where they are known.

        Args:
            value: What is iterated over.
            turn: Reads it for one member.
            anyhow: Reads it for whatever the members may be. What that finds sure, is; the rest hangs on the member.
            frame: The call it is in.
        """
        mark = self.journal.mark()
        with self.at(Runs.NEVER if length(value) == 0 else Runs.SURELY):
            one_by_one = members(value)
            if not one_by_one or self.turns * len(one_by_one) > _TURNS:
                anyhow()
                return
            outside, self.turns = self.turns, self.turns * len(one_by_one)
            start, returned = frame.snapshot(), len(frame.returned)
            anyhow()
            sure = self.journal.surely(mark)
            self.journal.take_back(mark)
            frame.restore(start)
            del frame.returned[returned:]
            for member in one_by_one:
                turn(member)
            self.journal.soften(mark, sure)
            self.turns = outside

    def _yield(self, node: ast.Yield | ast.YieldFrom, frame: Frame) -> Value:
        self.hand_on(self.evaluate(node.value, frame), "yields {}", node, frame)
        return UNKNOWN

    _yieldfrom = _yield

    def _call(self, node: ast.Call, frame: Frame) -> Value:
        return self.call(node, frame)

    # -- targets ----------------------------------------------------------------------------

    def assign(self, target: ast.AST, value: Value, frame: Frame) -> None:
        """Let a target stand for a value."""
        if isinstance(target, ast.Name):
            name = attribute_name(target.id, frame.text.class_name)
            if not frame.bind(name, value, maybe=self.branching > 0):
                self.hand_on(value, f"keeps {{}} in `{name}` of elsewhere", target, frame)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target.elts, value, target, frame)
        elif isinstance(target, ast.Starred):
            self.hand_on(value, "puts {} into a container", target, frame)
            self.assign(target.value, UNKNOWN, frame)
        elif isinstance(target, ast.Attribute):
            name = attribute_name(target.attr, frame.text.class_name)
            self.store(self.evaluate(target.value, frame), named(name), value, target, frame)
        elif isinstance(target, ast.Subscript):
            base, key = self.evaluate(target.value, frame), self.evaluate(target.slice, frame)
            self.store(base, key, value, target, frame)

    def store(self, base: Value, key: Value, value: Value, node: ast.AST, frame: Frame) -> None:
        """Note that a part of something is assigned."""
        for part, sure in parts(base, key):
            self.note(part, "writes", node, frame, sure=sure)
        if carries(value):
            self.hand_on(value, f"keeps {{}} in `{ast.unparse(node)}`", node, frame)

    def _unpack(self, targets: Sequence[ast.expr], value: Value, node: ast.AST, frame: Frame) -> None:
        starred = any(isinstance(target, ast.Starred) for target in targets)
        known = [atom.items for atom in value if isinstance(atom, Seq) and len(atom.items) == len(targets)]
        if known and len(known) == len(value) and not starred:
            members = [union(items) for items in zip(*known, strict=True)]
        else:
            members = [elements(self.iterated(value, node, frame))] * len(targets)
        for target, member in zip(targets, members, strict=True):
            self.assign(target, member, frame)


def _places(value: Value) -> bool:
    return any(isinstance(atom, Ref) for atom in value)
