"""The source reader finds the paths that handlers access, how they access them, and what it cannot follow."""

from __future__ import annotations

import functools
import itertools
import linecache
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from fluxcb import Callback
from fluxcb._check.source.touches import Reading, Runs, Touch
from fluxcb._check.source_audit import Reader

_numbers = itertools.count()


@pytest.fixture
def read() -> Iterator[Any]:
    """`read(body)` returns what the source reader finds in a handler with this body; `around` adds surrounding code."""
    files = []

    def make(body: str, *, around: str = "", methods: str = "", fields: dict[str, Any] | None = None) -> Reading:
        file = f"<read {next(_numbers)}>"
        files.append(file)
        text = textwrap.dedent(around) + "\nclass C(Base):\n" + textwrap.indent(textwrap.dedent(methods), "    ")
        text += "\n    def handle(self, event, phase, learner):\n" + textwrap.indent(textwrap.dedent(body), "        ")
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names: dict[str, Any] = {"Base": Base, "__name__": "read_by_a_test", "functools": functools}
        exec(compile(text, file, "exec"), names)
        instance = names["C"]()
        vars(instance).update(fields or {})
        return Reader().read(instance.handle, before=2, me=instance)

    yield make
    for file in files:
        linecache.cache.pop(file, None)


class Base(Callback):
    def touch(self, part: Any) -> None:
        part.inherited  # noqa: B018

    @classmethod
    def of_class(cls, part: Any) -> None:
        part.by_class  # noqa: B018


def told(reading: Reading) -> list[str]:
    """Return the accesses as text, in order, without those that are only prefixes of others on their line."""
    touches = reading.touches

    def on_the_way(touch: Touch) -> bool:
        if any(t.how == "calls" and (t.path, t.where) == (touch.path, touch.where) for t in touches):
            return touch.how == "reads"
        longer = (
            t for t in touches if t is not touch and t.where == touch.where and t.path[: len(touch.path)] == touch.path
        )
        return touch.how == "reads" and not touch.part and any(len(t.path) > len(touch.path) or t.part for t in longer)

    kinds = {Runs.SURELY: "", Runs.MAYBE: " (maybe)", Runs.NEVER: " (never)"}
    return [
        f"{t.how} {'.'.join(t.path) or 'learner'}{'.?' if t.part else ''}{kinds[t.runs]}"
        for t in touches
        if not on_the_way(t)
    ]


def places(reading: Reading) -> list[str]:
    return [touch.where for touch in reading.touches]


# --- expressions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("learner.step.loss", ["reads step.loss"]),
        ("print(learner.step.loss.mean())", ["calls step.loss.mean"]),
        ('learner["step"]["loss"]', ["reads step.loss"]),
        ('learner.params["dense"]["w"]', ["reads params.dense.w"]),
        ("learner.step.batch[0]", ["reads step.batch.?"]),
        ("learner.step.batch[1:]", ["reads step.batch.?"]),
        ("learner.cbstate[event]", ["reads cbstate.?"]),
        ('getattr(learner.step, "loss")', ["reads step.loss"]),
        ('getattr(learner.step, "loss", 0)', ["reads step.loss"]),
        ('hasattr(learner.step, "loss")', ["reads step.loss"]),
        ("getattr(learner.step, event)", ["reads step.?"]),
        ('setattr(learner.step, "loss", 1)', ["writes step.loss"]),
        ("setattr(learner.step, event, 1)", ["writes step.?"]),
        ('delattr(learner.step, "loss")', ["deletes step.loss"]),
        ("del learner.step.loss", ["deletes step.loss"]),
        ('del learner.cbstate["x"], learner.step.loss', ["drops cbstate.x", "deletes step.loss"]),
        ("learner.step.loss = 1", ["writes step.loss"]),
        ("learner.step.loss: float = 1", ["writes step.loss"]),
        ('learner.cbstate["x"] = 1', ["writes cbstate.x"]),
        ("learner.cbstate[event] = 1", ["writes cbstate.?"]),
        ('learner.params["w"] = 1', ["writes params.w"]),
        ("learner.cbstate.log.steps += 1", ["reads cbstate.log.steps", "writes cbstate.log.steps"]),
        ('learner.hyperparams["lr"] *= 2', ["reads hyperparams.lr", "writes hyperparams.lr"]),
        ("learner.step.a, learner.step.b = 1, 2", ["writes step.a", "writes step.b"]),
        ('"skip" in learner.step', ["lists step.skip"]),
        ('"skip" not in learner.step', ["lists step.skip"]),
        ("event in learner.cbstate", ["lists cbstate.?"]),
        ("for name in learner.data: pass", ["lists data.?"]),
        ("list(learner.cbstate)", ["lists cbstate.?"]),
        ("f'{learner.step.loss:.4f}'", ["reads step.loss"]),
        ("[learner.step.loss for _ in range(3)]", ["reads step.loss", "passes step.loss"]),
        (
            "{k: learner.step.loss for k in phase if learner.step.skip}",
            ["reads step.skip", "reads step.loss", "passes step.loss"],
        ),
        ("1 if learner.step.a else learner.step.b", ["reads step.a", "reads step.b"]),
        ("learner.step.a and learner.step.b", ["reads step.a", "reads step.b"]),
        ("assert learner.step.a, learner.step.b", ["reads step.a", "reads step.b"]),
        ("return learner.step.a", ["reads step.a"]),
        ("raise ValueError(learner.step.a)", ["reads step.a", "passes step.a"]),
        ("isinstance(learner.params, dict)", ["reads params"]),
        (
            "learner.cbstate.history.append(learner.step.loss)",
            ["calls cbstate.history.append", "reads step.loss", "passes step.loss"],
        ),
    ],
)
def test_expressions_and_targets(read: Any, body: str, expected: list[str]) -> None:
    reading = read(body)
    assert told(reading) == expected
    assert reading.unclear == ()


def test_location_is_line_within_long_expression(read: Any) -> None:
    reading = read("print(\n    1,\n    learner\n    .step\n    .loss,\n)")
    lines = [int(place.rsplit(":", 1)[1]) for place in places(reading) if place]
    assert [line - lines[0] for line in lines[:2]] == [0, 1]  # `.step`, and `.loss` a line below
    assert all(place.startswith("C.handle  <read ") for place in places(reading))


def test_learner_is_last_parameter_with_any_name(read: Any) -> None:
    instance = Named()
    assert told(Reader().read(instance.handle, before=2, me=instance)) == ["reads step.loss"]


class Named(Callback):
    def handle(self, when: Any, where: Any, l: Any) -> None:  # noqa: E741
        l.step.loss  # noqa: B018


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("s = learner.step\ns.loss", ["reads step", "reads step.loss"]),
        ("s = t = learner.step\nt.loss", ["reads step", "reads step.loss"]),
        ("a, b = learner.step, learner.cbstate\nb.x", ["reads step", "reads cbstate", "reads cbstate.x"]),
        ("[a, b] = (1, learner.step)\nb.x", ["reads step", "reads step.x"]),
        ("(a, (b, c)) = 1, (2, learner.step)\nc.x", ["reads step", "reads step.x"]),
        ("if (s := learner.step) is not None:\n    s.loss", ["reads step", "reads step.loss"]),
        ("s = learner.step or event\ns.loss", ["reads step", "reads step.loss"]),
        (
            "s = learner.step if event else learner.cbstate\ns.x",
            ["reads step", "reads cbstate", "reads step.x (maybe)", "reads cbstate.x (maybe)"],
        ),
        ('for n in ("a", "b"):\n    learner.step[n]', ["reads step.a (maybe)", "reads step.b (maybe)"]),
        ('for n in ["a"]:\n    getattr(learner.step, n)', ["reads step.a"]),
        ("for n in phase:\n    getattr(learner.step, n)", ["reads step.?"]),
        ("match event:\n    case 1: learner.step.a\n    case _: learner.step.b", ["reads step.a", "reads step.b"]),
        ("import os\nlearner.step.loss", ["reads step.loss"]),
        ("with event as e:\n    learner.step.loss", ["reads step.loss (maybe)"]),
        (
            "try:\n    s = learner.step\n    s.a\nfinally:\n    learner.step.b",
            ["reads step", "reads step.a", "reads step.b"],
        ),
        ("learner = event\nlearner.step.loss", ["passes learner"]),
        ("s = learner.step\ns = 1\ns.loss", ["reads step", "passes step"]),
        ("s = learner.step\ndel s", ["reads step", "passes step"]),
        ("def inner(s): pass\ns = learner.step", ["reads step", "passes step"]),
    ],
)
def test_names_assigned_once_are_followed(read: Any, body: str, expected: list[str]) -> None:
    reading = read(body)
    assert told(reading) == expected
    assert reading.unclear == ()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if False:\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.no:\n    learner.step.x\nelse:\n    learner.step.y", ["reads step.x (never)", "reads step.y"]),
        ("if not self.no:\n    return\nlearner.step.x", ["reads step.x (never)"]),
        ("if event:\n    return\nlearner.step.x", ["reads step.x"]),
        ("if event:\n    return\nelse:\n    raise ValueError\nlearner.step.x", ["reads step.x (never)"]),
        ("return\nlearner.step.x", ["reads step.x (never)"]),
        ("raise ValueError\nlearner.step.x", ["reads step.x (never)"]),
        ("self.no and learner.step.x", ["reads step.x (never)"]),
        ("self.no or learner.step.x", ["reads step.x"]),
        ("learner.step.x if self.no else learner.step.y", ["reads step.x (never)", "reads step.y"]),
        ('if self.mode == "b" and event:\n    learner.step.x', ["reads step.x (never)"]),
        ("if self.nothing is not None:\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.names is not None:\n    learner.step.x", ["reads step.x"]),
        ("while self.no:\n    learner.step.x", ["reads step.x (never)"]),
        # What the callback may never reach is not sure.
        ("if self.names:\n    learner.step.x", ["reads step.x (maybe)"]),
        ("if not self.names:\n    return\nlearner.step.x", ["reads step.x (maybe)"]),
        ("if self.turn:\n    learner.step.x", ["reads step.x (maybe)"]),  # a method assigns it
        ("if self.wants('x'):\n    learner.step.x", ["reads step.x (maybe)"]),
        ("for n in self.names:\n    learner.step.x", ["reads step.x (maybe)"]),
        ("if isinstance(learner, phase):\n    learner.fit", ["reads fit (maybe)"]),
        ("def inner():\n    learner.step.x", ["reads step.x (maybe)"]),
        ("f = lambda: learner.step.x", ["reads step.x (maybe)", "passes step.x (maybe)"]),
    ],
)
def test_unreachable_lines_are_skipped(read: Any, body: str, expected: list[str]) -> None:
    methods = """
        def wants(self, name):
            return name in self.names

        def toggle(self):
            self.turn = not self.turn
    """
    fields = {"no": False, "mode": "a", "names": ("y",), "nothing": None, "turn": False}
    reading = read(body, methods=methods, fields=fields)
    assert told(reading) == expected
    assert reading.unclear == ()


@pytest.mark.parametrize(
    ("caught", "expected"),
    [
        ("AccessError", "reads step.x (maybe)"),
        ("(ValueError, AccessError)", "reads step.x (maybe)"),
        ("RuntimeError", "reads step.x (maybe)"),
        ("Exception", "reads step.x (maybe)"),
        ("unknown", "reads step.x (maybe)"),
        ("ValueError", "reads step.x"),
        ("(ValueError, KeyError)", "reads step.x"),
    ],
)
def test_caught_error_does_not_end_block(read: Any, caught: str, expected: str) -> None:
    body = f"try:\n    learner.step.x\nexcept {caught}:\n    pass"
    assert told(read(body, around="from fluxcb import AccessError")) == [expected]


# --- functions --------------------------------------------------------------------------------------------------------

METHODS = """
    key = "by_key"

    def helper(self, l):
        l.step.helped

    def part(self, s, name="default"):
        s[name]

    def same(self, l):
        return l

    def touch(self, part):
        super().touch(part)
        part.own

    @staticmethod
    def static(l):
        l.step.static

    def __secret(self, l):
        l.step.secret
"""
AROUND = """
def outside(l):
    l.step.outside

KEY = "constant"
CHANGING = "x"

def change():
    global CHANGING
    CHANGING = "y"
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("self.helper(learner)", ["reads step.helped"]),
        ("self.helper(l=learner)", ["reads step.helped"]),
        ("self.part(learner.step)", ["reads step", "reads step.?"]),
        ("self.same(learner).step.loss", ["reads step.loss"]),
        ("self.touch(learner.step)", ["reads step", "reads step.inherited", "reads step.own"]),
        ("self.static(learner)", ["reads step.static"]),
        ("self.__secret(learner)", ["reads step.secret"]),
        ("outside(learner)", ["reads step.outside"]),
        ("self.fn(learner)", ["reads step.field"]),
        ("self.object.show(learner)", ["reads step.shown"]),
        ("learner.step[self.key]", ["reads step.by_key"]),
        ("learner.step[KEY]", ["reads step.constant"]),
        ("learner.step[CHANGING]", ["reads step.?"]),
    ],
)
def test_function_calls_are_followed(read: Any, body: str, expected: list[str]) -> None:
    fields = {"fn": lambda l: l.step.field, "object": Shows()}  # noqa: E741
    reading = read(body, methods=METHODS, around=AROUND, fields=fields)
    assert told(reading) == expected
    assert reading.unclear == ()


class Shows:
    def show(self, l: Any) -> None:  # noqa: E741
        l.step.shown  # noqa: B018


# --- what is not followed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "how", "note"),
    [
        ("max(learner, 1)", "passes learner", "passes {} to `max(...)`"),
        ("event.show(learner.step)", "passes step", "passes {} to `event.show(...)`"),
        ("event(*[1], key=learner)", "passes learner", "passes {} to `event(...)`"),
        ("f = self.touch\nf(learner)", "passes learner", "passes {} to `f(...)`"),
        ("def inner(l): pass\ninner(learner)", "passes learner", "passes {} to `inner(...)`"),
        ("(lambda l: l)(learner)", "passes learner", "passes {} to `lambda l: l(...)`"),
        ("self.of_class(learner)", "passes learner", "passes {} to `self.of_class(...)`"),
        ("self.kept = learner.step", "passes step", "stores {} in `self.kept`"),
        ("event['x'] = learner", "passes learner", "stores {} in `event['x']`"),
        ("learner.cbstate.me = learner", "passes learner", "stores {} in `learner.cbstate.me`"),
        ("x = [learner.step]", "passes step", "puts {} into a container"),
        ("x = {'a': learner.step}", "passes step", "puts {} into a container"),
        ("x = (1, *event, learner.step)", "passes step", "puts {} into a container"),
        ("x = [learner for _ in event]", "passes learner", "puts {} into a container"),
        ("yield learner.step", "passes step", "yields {}"),
        ("list(map(lambda v: learner, phase))", "passes learner", "returns {} from a function in it"),
        ("global kept\nkept = learner.step", "passes step", "assigns {} to `kept`, which is assigned more than once"),
        ("a, b = learner.step", "passes step", "unpacks {}"),
        ("with learner.step as s:\n    s.x", "passes step", "uses {} in a `with` statement"),
        ("match learner.step:\n    case {'x': y}: pass", "passes step", "matches {}"),
    ],
)
def test_escaping_learner_is_unclear(read: Any, body: str, how: str, note: str) -> None:
    reading = read(body)
    found = [(f"{t.how} {'.'.join(t.path) or 'learner'}", t.note) for t in reading.touches if t.how == "passes"]
    assert (how, note) in found


@pytest.mark.parametrize(
    ("body", "unclear"),
    [
        ("eval('learner.step.x')", "calls `eval`  C.handle  <read "),
        ("exec('learner.step.x')", "calls `exec`  C.handle  <read "),
        ("locals()['learner']", "calls `locals`  C.handle  <read "),
        ("unreadable(learner)", "the source of `unreadable` cannot be read  <string>:1"),
        ("again(learner)", "calls `again`, which calls itself  again  <read "),
        ("f0(learner)", "calls too many functions  <read "),
        ("x = " + " + ".join(["learner.step.x"] * 950), "is nested too deeply for the analysis  C.handle  <read "),
    ],
)
def test_unreadable_functions_are_unclear(read: Any, body: str, unclear: str) -> None:
    around = 'names = {}\nexec("def unreadable(l): l.step.x", names)\nunreadable = names["unreadable"]\n'
    around += "def again(l):\n    again(l)\n"
    around += (
        "".join(f"def f{n}(l):\n    f{n + 1}(l)\n    f{n + 1}(l)\n" for n in range(20)) + "def f20(l):\n    l.step"
    )
    text = read(body, around=around).unclear[0]
    assert text.startswith(unclear)


def test_handler_without_source_is_unclear() -> None:
    names: dict[str, Any] = {}
    exec("def handle(self, event, phase, learner): learner.step.x", names)
    assert Reader().read(names["handle"], before=3, me=None).unclear == (
        "the source of `handle` cannot be read  <string>:1",
    )
    assert Reader().read(print, before=0, me=None).unclear == (
        "`builtin_function_or_method` is not a function whose source can be read",
    )


def test_modified_source_file_is_unclear(read: Any, tmp_path: Any) -> None:
    path = tmp_path / "changed.py"
    path.write_text("def handle(self, event, phase, learner):\n    learner.step.x\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert told(Reader().read(names["handle"], before=3, me=None)) == ["reads step.x"]
    path.write_text("def handle(self, event, phase, learner):\n    learner.step.other\n")
    linecache.checkcache(str(path))
    [unclear] = Reader().read(names["handle"], before=3, me=None).unclear
    assert unclear.startswith("the source of `handle` cannot be read")


def test_lambdas_on_one_line_are_distinguished() -> None:
    first, second = (lambda l: l.step.a), (lambda l: l.step.b)  # noqa: E741
    assert told(Reader().read(first, before=0, me=None)) == ["reads step.a"]
    assert told(Reader().read(second, before=0, me=None)) == ["reads step.b"]


def test_result_is_cached_by_used_fields() -> None:
    reader = Reader()
    a, b, c = Keyed("a"), Keyed("b"), Keyed("a")
    readings = [reader.read(k.handle, before=2, me=k) for k in (a, b, c)]
    assert [told(r) for r in readings] == [["reads step.a"], ["reads step.b"], ["reads step.a"]]
    assert readings[0] is readings[2]


class Keyed(Callback):
    def __init__(self, key: str) -> None:
        self.key = key

    def handle(self, event: Any, phase: Any, learner: Any) -> None:
        learner.step[self.key]
