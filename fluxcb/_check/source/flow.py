"""Branches, loops and exceptions: what holds where several ways come together."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fluxcb._check.source.calls import Calls
from fluxcb._check.source.scope import Frame, Snapshot
from fluxcb._check.source.touches import Runs
from fluxcb._check.source.values import UNKNOWN, Obj, Seq, Value, elements, union
from fluxcb._errors import AccessError

__all__ = ["Flow"]


class Flow(Calls):
    """Reads the statements that decide which others run."""

    @abstractmethod
    def statements(self, body: Sequence[ast.stmt], frame: Frame) -> None:
        """Read statements, one after the other."""

    def _if(self, node: ast.If, frame: Frame) -> None:
        known, doubt = self.tested(node.test, frame)
        start = frame.snapshot()
        ends = []
        for branch, taken in ((node.body, known is not False), (node.orelse, known is not True)):
            frame.restore(Snapshot(start.names, start.alive and taken))
            with self.at(doubt):
                self.statements(branch, frame)
            ends.append(frame.snapshot())
        frame.restore(ends[0].joined(ends[1:]))

    # -- loops ------------------------------------------------------------------------------

    def _for(self, node: ast.For | ast.AsyncFor, frame: Frame) -> None:
        value = self.over(node.iter, frame)

        def turn(member: Value) -> None:
            self.assign(node.target, member, frame)
            self.statements(node.body, frame)

        def one_turn(member: Value) -> None:
            turn(member)
            _, back = frame.loops[-1]
            frame.restore(frame.snapshot().joined(back))
            back.clear()

        frame.loops.append(([], []))
        self.each(value, one_turn, lambda: self._repeat(lambda: turn(elements(value)), frame), frame)
        out, _ = frame.loops.pop()
        self.statements(node.orelse, frame)
        frame.restore(frame.snapshot().joined(out))

    _asyncfor = _for

    def _quietly(self, node: ast.expr, frame: Frame) -> Value:
        """Return what an expression stands for that has been noted already."""
        mark = self.journal.mark()
        value = self.evaluate(node, frame)
        self.journal.take_back(mark)
        return value

    def _while(self, node: ast.While, frame: Frame) -> None:
        ended: list[Snapshot] = []  # where the test says no

        def turn() -> None:
            known, doubt = self.tested(node.test, frame)
            if known is not True:
                ended.append(frame.snapshot())
            frame.alive = frame.alive and known is not False
            with self.at(doubt):
                self.statements(node.body, frame)

        frame.loops.append(([], []))
        self._repeat(turn, frame)
        out, _ = frame.loops.pop()
        frame.restore(Snapshot(frame.names, alive=False).joined(ended))
        self.statements(node.orelse, frame)
        frame.restore(frame.snapshot().joined(out))

    def _repeat(self, turn: Callable[[], None], frame: Frame) -> None:
        """Read what is done any number of times, until it leaves behind what it found."""
        start = frame.snapshot()
        _, back = frame.loops[-1]
        while True:
            mark, before = self.journal.mark(), frame.snapshot()
            turn()
            after = before.joined([frame.snapshot(), *back])
            back.clear()
            frame.restore(Snapshot(after.names, start.alive))
            if after.names == before.names:
                return
            self.journal.take_back(mark)

    def _break(self, node: ast.Break, frame: Frame) -> None:
        if frame.loops:
            frame.loops[-1][0].append(frame.snapshot())
        frame.alive = False

    def _continue(self, node: ast.Continue, frame: Frame) -> None:
        if frame.loops:
            frame.loops[-1][1].append(frame.snapshot())
        frame.alive = False

    # -- with, try, match ---------------------------------------------------------------------

    def _with(self, node: ast.With | ast.AsyncWith, frame: Frame) -> None:
        caught = False
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            self.hand_on(value, "enters {} by `with`", item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, UNKNOWN, frame)
            if isinstance(item.context_expr, ast.Call):  # contextlib.suppress, pytest.raises
                caught |= any(self._catches(arg, frame) for arg in item.context_expr.args)
        with self._watched(frame) as (start, assigned), self.at(Runs.MAYBE if caught else Runs.SURELY):
            self.statements(node.body, frame)
        if node.items:  # a context manager may swallow an exception raised anywhere inside
            frame.restore(frame.snapshot().joined([_wide(start, assigned)]))

    _asyncwith = _with

    def _catches(self, node: ast.expr, frame: Frame) -> bool:
        """Tell whether an expression names AccessError on purpose: it, or a base that is not every exception."""
        for atom in self._quietly(node, frame):
            if isinstance(atom, Seq) and isinstance(node, ast.Tuple):
                return any(self._catches(item, frame) for item in node.elts)
            if isinstance(atom, Obj) and type(atom.value) is type:
                return issubclass(AccessError, atom.value) and atom.value not in (Exception, BaseException, object)
        return False

    @contextmanager
    def _watched(self, frame: Frame) -> Iterator[tuple[Snapshot, dict[str, list[Value]]]]:
        """Collect what is assigned inside: an exception may leave from anywhere."""
        assigned: dict[str, list[Value]] = {}
        start = frame.snapshot()
        frame.watches.append(assigned)
        try:
            yield start, assigned
        finally:
            frame.watches.pop()

    def _try(self, node: ast.Try, frame: Frame) -> None:
        caught = any(handler.type is not None and self._catches(handler.type, frame) for handler in node.handlers)
        with self._watched(frame) as (start, assigned):
            with self.at(Runs.MAYBE if caught else Runs.SURELY):
                self.statements(node.body, frame)
            middle = frame.snapshot()
            raised = _wide(start, assigned)
            self.statements(node.orelse, frame)
            ends = [frame.snapshot()]
            for handler in node.handlers:
                frame.restore(raised)
                if handler.type is not None:
                    self.evaluate(handler.type, frame)
                if handler.name is not None:
                    frame.bind(handler.name, UNKNOWN)
                self.statements(handler.body, frame)
                ends.append(frame.snapshot())
        frame.restore(ends[0].joined(ends[1:]))
        if not node.finalbody:
            return
        normal = frame.snapshot()
        frame.restore(Snapshot(_wide(start, assigned).joined([middle, *ends]).names, start.alive))
        self.statements(node.finalbody, frame)
        if normal.alive:  # once more, for what holds behind it; what it touches has been noted
            frame.restore(normal)
            mark = self.journal.mark()
            self.statements(node.finalbody, frame)
            self.journal.take_back(mark)
        else:
            frame.alive = False

    _trystar = _try

    def _match(self, node: ast.Match, frame: Frame) -> None:
        subject = self.evaluate(node.subject, frame)
        start = frame.snapshot()
        ends = [start]
        for case in node.cases:
            frame.restore(start)
            self._pattern(case.pattern, subject, frame)
            if case.guard is not None:
                self.evaluate(case.guard, frame)
            self.statements(case.body, frame)
            ends.append(frame.snapshot())
        frame.restore(ends[0].joined(ends[1:]))

    def _pattern(self, pattern: ast.pattern, subject: Value, frame: Frame) -> None:
        plain = pattern.pattern if isinstance(pattern, ast.MatchAs) else pattern
        if plain is not None and not isinstance(plain, ast.MatchValue | ast.MatchSingleton):
            self.hand_on(subject, "matches {} with a pattern", pattern, frame)
        for part in ast.walk(pattern):
            if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name is not None:
                frame.bind(part.name, subject if part is pattern else UNKNOWN)
            elif isinstance(part, ast.MatchMapping) and part.rest is not None:
                frame.bind(part.rest, UNKNOWN)


def _wide(start: Snapshot, assigned: Mapping[str, list[Value]]) -> Snapshot:
    """Return what may hold where an exception leaves: any name may have any of its values."""
    names = dict(start.names)
    for name, values in assigned.items():
        names[name] = union([names.get(name, frozenset()), *values])
    return Snapshot(names, start.alive)
