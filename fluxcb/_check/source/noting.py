"""Noting what is found, and how sure it is."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fluxcb._check.source.scope import Frame, Local
from fluxcb._check.source.touches import How, Journal, Runs, Touch
from fluxcb._check.source.values import Keywords, Many, Partial, Ref, Seq, Value, ordered
from fluxcb._declare.dispatch import shown_path

__all__ = ["Noting"]


class Noting(ABC):
    """Keeps the journal of a reading.

    Args:
        me: The callback whose handler is read, or None.

    Attributes:
        asked: The callback's own fields that the reading depends on, with their values.
        turns: How often the loops around this point are read, each member for itself.
        doubt: How sure what a test guards can be, as far as the test has been read.
        branching: Above 0 within a part of an expression that may not be evaluated.
    """

    def __init__(self, me: Any) -> None:
        self.me = me
        self.asked: dict[str, Any] = {}
        self.journal = Journal()
        self.branching = 0
        self.turns = 1
        self.doubt = Runs.SURELY
        self._level = Runs.SURELY

    @abstractmethod
    def call_unknown(self, function: Local) -> None:
        """Call a function with arguments that nobody knows."""

    def where(self, node: ast.AST, frame: Frame) -> str:
        """Return `Class.method  file:line`."""
        line = getattr(node, "end_lineno" if isinstance(node, ast.Attribute) else "lineno", 0)
        return f"{frame.title}  {shown_path(frame.function.__code__.co_filename)}:{line}"

    def note(self, ref: Ref, how: How, node: ast.AST, frame: Frame, *, sure: bool = True, note: str = "") -> None:
        """Note that a place is touched."""
        runs = Runs.NEVER if not frame.alive else max(self._level, Runs.SURELY if sure else Runs.MAYBE)
        self.journal.note(Touch(ref.path, how, self.where(node, frame), ref.part, runs, note))

    def give_up(self, what: str, node: ast.AST, frame: Frame) -> None:
        """Note that something cannot be followed."""
        if frame.alive and self._level is not Runs.NEVER:
            self.journal.give_up(what, self.where(node, frame))

    @contextmanager
    def at(self, level: Runs) -> Iterator[None]:
        """Read something that is at most as sure as this."""
        before, self._level = self._level, max(self._level, level)
        try:
            yield
        finally:
            self._level = before

    @contextmanager
    def perhaps(self) -> Iterator[None]:
        """Evaluate a part of an expression that may be skipped."""
        self.branching += 1
        try:
            yield
        finally:
            self.branching -= 1

    def hand_on(self, value: Value, note: str, node: ast.AST, frame: Frame) -> None:
        """Note that a value goes where it is not followed."""
        for atom in ordered(value):
            if isinstance(atom, Ref):
                if not atom.part:
                    sure = len(value) == 1
                    self.note(atom, "passes", node, frame, sure=sure, note=note)
            elif isinstance(atom, Seq):
                for item in atom.items:
                    self.hand_on(item, note, node, frame)
            elif isinstance(atom, Many):
                self.hand_on(atom.item, note, node, frame)
            elif isinstance(atom, Partial):
                for item in (*atom.positional, *(v for _, v in atom.keywords)):
                    self.hand_on(item, note, node, frame)
                self.hand_on(frozenset((atom.function,)), note, node, frame)
            elif isinstance(atom, Keywords):
                for _, item in atom.items:
                    self.hand_on(item, note, node, frame)
            elif isinstance(atom, Local):
                self._offer(atom, frame)

    def _offer(self, function: Local, frame: Frame) -> None:
        """Note that others may call a function that is defined here."""
        if frame.alive and self._level is not Runs.NEVER:
            home = function.frame
            home.handed_on[function] = min(self._level, home.handed_on.get(function, self._level))
            if not home.running:
                self.call_unknown(function)

    def use(self, value: Value, node: ast.AST, frame: Frame) -> None:
        """Note a use that makes something new of a value: places in it are lost sight of."""
        inside = frozenset(atom for atom in value if not isinstance(atom, Ref))
        self.hand_on(inside, "makes something new of {}", node, frame)
