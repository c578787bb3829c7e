"""What is read out of the source of handlers: places, how they are touched, and what cannot be followed."""

from __future__ import annotations

import functools
import itertools
import linecache
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from fluxcb import Callback
from fluxcb._check.source.reader import Reader
from fluxcb._check.source.touches import Reading, Runs, Touch
from fluxcb._check.source.values import Obj

_numbers = itertools.count()


@pytest.fixture
def read() -> Iterator[Any]:
    """`read(body)` returns what is read out of a handler with this body; names may be given that it sees."""
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
    """Return the touches as text, in order, without those that are only on the way to others of their line."""
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
        ('"skip" in learner.step', ["asks step.skip"]),
        ('"skip" not in learner.step', ["asks step.skip"]),
        ("event in learner.cbstate", ["asks cbstate.?"]),
        ("for name in learner.data: pass", ["asks data.?"]),
        ("list(learner.cbstate)", ["asks cbstate.?"]),
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
            ["reads step.loss", "calls cbstate.history.append", "passes step.loss"],
        ),
    ],
)
def test_expressions_and_targets(read: Any, body: str, expected: list[str]) -> None:
    reading = read(body)
    assert told(reading) == expected
    assert reading.unclear == ()


def test_the_place_is_that_of_the_line_within_a_long_expression(read: Any) -> None:
    reading = read("print(\n    1,\n    learner\n    .step\n    .loss,\n)")
    lines = [int(place.rsplit(":", 1)[1]) for place in places(reading) if place]
    assert [line - lines[0] for line in lines[:2]] == [0, 1]  # `.step`, and `.loss` a line below
    assert all(place.startswith("C.handle  <read ") for place in places(reading))


def test_the_learner_is_the_last_parameter_whatever_it_is_called(read: Any) -> None:
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
        ("s = learner.step\ns = 1\ns.loss", ["reads step"]),
        ("learner = event\nlearner.step.loss", []),
        ("s = learner.step\ndel s\ns.loss", ["reads step"]),
        ("pair = (learner.step, 1)\npair[0].loss", ["reads step", "reads step.loss"]),
        ("s = learner.step or event\ns.loss", ["reads step", "reads step.loss (maybe)"]),
        (
            "s = learner.step if event else learner.cbstate\ns.x",
            ["reads step", "reads cbstate", "reads cbstate.x (maybe)", "reads step.x (maybe)"],
        ),
        ("s = event\nif phase:\n    s = learner.step\ns.loss", ["reads step", "reads step.loss (maybe)"]),
        (
            "if phase:\n    s = learner.step\nelse:\n    s = learner.step\ns.loss",
            ["reads step", "reads step", "reads step.loss"],
        ),
        ("if phase:\n    s = 1\n    return\nelse:\n    s = learner.step\ns.loss", ["reads step", "reads step.loss"]),
        ("s = learner.step\nfor _ in range(3):\n    s.loss\n    s = event", ["reads step", "reads step.loss (maybe)"]),
        ("s = learner\nwhile event:\n    s = s.step", [f"reads {'.'.join(['step'] * 8)}.? (maybe)"]),
        (
            "while True:\n    s = learner.step\n    if event: break\n    s = 1\ns.loss",
            ["reads step", "reads step.loss"],
        ),
        (
            "for s in (learner.step, learner.cbstate):\n    s.x",
            ["reads step", "reads cbstate", "reads step.x (maybe)", "reads cbstate.x (maybe)"],
        ),
        ('for n in ("a", "b"):\n    learner.step[n]', ["reads step.a (maybe)", "reads step.b (maybe)"]),
        ('for n in ["a"]:\n    getattr(learner.step, n)', ["reads step.a"]),
        ("for n in phase:\n    getattr(learner.step, n)", ["reads step.?"]),
        ("for n, s in zip(phase, (learner.step,)):\n    s.x", ["reads step", "reads step.x"]),
        ("for i, s in enumerate((learner.step,)):\n    s.x", ["reads step", "reads step.x"]),
        ("match event:\n    case 1: learner.step.a\n    case _: learner.step.b", ["reads step.a", "reads step.b"]),
        ("match learner.step:\n    case s: s.a", ["reads step", "reads step.a"]),
        ("import os\nlearner.step.loss", ["reads step.loss"]),
        ("with event as e:\n    learner.step.loss", ["reads step.loss"]),
        ("try:\n    s = learner.step\nexcept ValueError:\n    s = 1\ns.x", ["reads step", "reads step.x (maybe)"]),
        (
            "try:\n    s = learner.step\n    s.a\nfinally:\n    learner.step.b",
            ["reads step", "reads step.a", "reads step.b"],
        ),
    ],
)
def test_names_that_stand_for_places(read: Any, body: str, expected: list[str]) -> None:
    reading = read(body)
    assert told(reading) == expected
    assert reading.unclear == ()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("if False:\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.no:\n    learner.step.x\nelse:\n    learner.step.y", ["reads step.x (never)", "reads step.y"]),
        ("if not self.no:\n    return\nlearner.step.x", ["reads step.x (never)"]),
        ("return\nlearner.step.x", ["reads step.x (never)"]),
        ("raise ValueError\nlearner.step.x", ["reads step.x (never)"]),
        ("self.no and learner.step.x", ["reads step.x (never)"]),
        ("self.no or learner.step.x", ["reads step.x"]),
        ("learner.step.x if self.no else learner.step.y", ["reads step.x (never)", "reads step.y"]),
        ('if self.mode == "b" or self.size > 3:\n    learner.step.x', ["reads step.x (never)"]),
        ('if "loss" in self.names:\n    learner.step.x', ["reads step.x (never)"]),
        ('if self.mode in ["b", "c"]:\n    learner.step.x', ["reads step.x (never)"]),
        ("if self.nothing is not None:\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.names:\n    learner.step.x", ["reads step.x"]),
        ("if len(self.names) > 1:\n    learner.step.x", ["reads step.x (never)"]),
        ("if isinstance(self.mode, (int, float)):\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.wants('x'):\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.quiet:\n    learner.step.x", ["reads step.x (never)"]),
        ("if self.turn:\n    learner.step.x", ["reads step.x"]),  # assigned by a method: it may become true
        ("while self.no:\n    learner.step.x", ["reads step.x (never)"]),
        ("if isinstance(learner, Callback):\n    learner.fit", ["reads fit (never)"]),  # handlers get no such thing
        ("if isinstance(learner, phase):\n    learner.fit", ["reads fit (maybe)"]),
    ],
)
def test_lines_that_this_callback_does_not_reach(read: Any, body: str, expected: list[str]) -> None:
    methods = """
        @property
        def quiet(self):
            return self.no

        def wants(self, name):
            return name in self.names

        def toggle(self):
            self.turn = not self.turn
    """
    fields = {"no": False, "mode": "a", "size": 3, "names": ("y",), "nothing": None, "turn": False}
    reading = read(body, methods=methods, fields=fields, around="from fluxcb import Callback")
    assert told(reading) == expected
    assert reading.unclear == ()


@pytest.mark.parametrize(
    ("caught", "expected"),
    [
        ("AccessError", "reads step.x (maybe)"),
        ("(ValueError, AccessError)", "reads step.x (maybe)"),
        ("RuntimeError", "reads step.x (maybe)"),
        ("ValueError", "reads step.x"),
        ("Exception", "reads step.x"),  # it is raised all the same, and lost
    ],
)
def test_who_catches_the_error_on_purpose_is_not_sure_to_meet_it(read: Any, caught: str, expected: str) -> None:
    around = "import contextlib\nfrom fluxcb import AccessError"
    assert told(read(f"try:\n    learner.step.x\nexcept {caught}:\n    pass", around=around)) == [expected]
    if not caught.startswith("("):
        assert told(read(f"with contextlib.suppress({caught}):\n    learner.step.x", around=around)) == [expected]


# --- functions --------------------------------------------------------------------------------------------------------

METHODS = """
    key = "by_key"
    plain = 3

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

    @classmethod
    def of_class(cls, part):
        super().of_class(part)
        cls.static(part)

    @property
    def chosen(self):
        return self.helper

    def __secret(self, l):
        l.step.secret

    def many(self, *args, **kwargs):
        args[0].step.first
        kwargs["other"].step.second

    def passing(self, *args, **kwargs):
        return self.many(*args, **kwargs)

    def down(self, l, n):
        if n == 0:
            l.step.bottom
            return l
        return self.down(l, n - 1)

    @functools.lru_cache
    def cached(self, l):
        l.step.cached

    bound = functools.partialmethod(part, name="bound")
"""
EACH = ["reads step.cbstate (maybe)", "reads step.sure", "reads step.x (maybe)"]
AROUND = """
from collections.abc import Mapping

def outside(l):
    l.step.outside

def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@wrapping
def wrapped(l):
    l.step.wrapped

KEY = "constant"
PATH = ("cbstate", "x")
CHANGING = "x"

def change():
    global CHANGING
    CHANGING = "y"

class Callable:
    def __call__(self, l):
        l.step.called

call = Callable()
fixed = functools.partial(lambda a, l: l.step.fixed, 1)
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("self.helper(learner)", ["reads step.helped"]),
        ("self.helper(l=learner)", ["reads step.helped"]),
        ("C.helper(self, learner)", ["reads step.helped"]),
        ("type(self).helper(self, learner)", ["reads step.helped"]),
        ("f = self.helper\nf(learner)", ["reads step.helped"]),
        ('getattr(self, "helper")(learner)', ["reads step.helped"]),
        ("self.chosen(learner)", ["reads step.helped"]),
        ("self.part(learner.step)", ["reads step", "reads step.default"]),
        ('self.part(learner.cbstate, name="x")', ["reads cbstate", "reads cbstate.x"]),
        ("self.bound(learner.step)", ["reads step", "reads step.bound"]),
        ("self.same(learner).step.loss", ["reads step.loss"]),
        ("self.touch(learner.step)", ["reads step", "reads step.inherited", "reads step.own"]),
        ("self.static(learner)", ["reads step.static"]),
        ("self.of_class(learner)", ["reads by_class", "reads step.static"]),
        ("self.__secret(learner)", ["reads step.secret"]),
        ("self.many(learner, other=learner)", ["reads step.first", "reads step.second"]),
        ("self.passing(learner, other=learner)", ["reads step.first", "reads step.second"]),
        ("self.down(learner, 3).step.top", ["reads step.bottom", "reads step.top"]),
        ("self.cached(learner)", ["reads step.cached (maybe)"]),
        ("outside(learner)", ["reads step.outside"]),
        ("wrapped(learner)", ["reads step.wrapped"]),
        ("call(learner)", ["reads step.called"]),
        ("fixed(learner)", ["reads step.fixed"]),
        ("functools.partial(outside, learner)()", ["reads step.outside"]),
        ("(lambda l: l.step.inner)(learner)", ["reads step.inner"]),
        ("def inner(l):\n    l.step.inner\ninner(learner)", ["reads step.inner"]),
        ("def inner():\n    learner.step.inner\ninner()", ["reads step.inner"]),
        ("def inner():\n    learner.step.inner", ["reads step.inner (never)"]),
        ("s = learner.step\nf = lambda: s.x\ns = 1\nf()", ["reads step"]),
        ("s = learner.step\nlist(map(lambda _: s.x, phase))", ["reads step", "reads step.x"]),
        ("s = learner.step\nlist(map(lambda _: s.x, phase))\ns = 1", ["reads step", "reads step.x (maybe)"]),
        ("sorted(phase, key=lambda v: learner.step.x)", ["reads step.x", "passes step.x"]),
        ("class Inner:\n    def f(self):\n        learner.step.x", ["reads step.x"]),
        ("learner.step[self.key]", ["reads step.by_key"]),
        ("learner.step[KEY]", ["reads step.constant"]),
        ('learner.step[f"by_{self.plain}"]', ["reads step.by_3"]),
        ('learner.step["by_" + KEY]', ["reads step.by_constant"]),
        (
            "s = learner\nfor n in PATH:\n    s = getattr(s, n)\ns.end",
            ["reads cbstate.x (maybe)", "reads cbstate.x.end"],
        ),
        (
            "s = learner\nfor i, n in enumerate(PATH):\n    if isinstance(s, dict | Mapping): s[i]\n    s = s[n]",
            ["reads learner.? (never)", "reads cbstate.? (never)", "reads cbstate.x (maybe)"],
        ),
        ("for n in PATH:\n    learner.step[n]\n    learner.step.sure", EACH),
        (
            "[learner.step[n] for n in PATH if learner.step.sure]",
            ["reads step.sure"] + [f"{how} step.{n} (maybe)" for n in ("cbstate", "x") for how in ("reads", "passes")],
        ),
        ("learner.step[CHANGING]", ["reads step.?"]),
        ("self.fn(learner)", ["reads step.field"]),
        ("for n in self.names:\n    learner.step[n]", ["reads step.n1 (maybe)", "reads step.n2 (maybe)"]),
        ("for n, v in self.table.items():\n    learner.cbstate[n] = v", ["writes cbstate.t"]),
        ("for n in self.grown:\n    learner.step[n]\nself.grown.append(1)", ["reads step.?"]),
    ],
)
def test_functions_are_followed(read: Any, body: str, expected: list[str]) -> None:
    fields = {"fn": lambda l: l.step.field, "names": ["n1", "n2"], "table": {"t": 1}, "grown": ["g"]}  # noqa: E741
    reading = read(body, methods=METHODS, around=AROUND, fields=fields)
    if "map(" in body:
        assert told(reading)[: len(expected)] == expected
    else:
        assert told(reading) == expected
    assert reading.unclear == ()


# --- what cannot be followed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "how", "note"),
    [
        ("max(learner, 1)", "passes learner", "passes {} to `max(...)`"),
        ("event.show(learner.step)", "passes step", "passes {} to `event.show(...)`"),
        ("event(*[1], key=learner)", "passes learner", "passes {} to `event(...)`"),
        ("self.kept = learner.step", "passes step", "keeps {} in `self.kept`"),
        ("event['x'] = learner", "passes learner", "keeps {} in `event['x']`"),
        ("learner.cbstate.me = learner", "passes learner", "keeps {} in `learner.cbstate.me`"),
        ("x = [learner.step]", "passes step", "puts {} into a container"),
        ("x = {'a': learner.step}", "passes step", "puts {} into a container"),
        ("x = (1, *event, learner.step)", "passes step", "puts {} into a container"),
        ("x = [s for s in (learner.step,)]", "passes step", "puts {} into a container"),
        ("yield learner.step", "passes step", "yields {}"),
        ("list(map(lambda v: learner, phase))", "passes learner", "returns {} to who knows whom"),
        ("global kept\nkept = learner.step", "passes step", "keeps {} in `kept` of elsewhere"),
        ("with learner.step as s:\n    s.x", "passes step", "enters {} by `with`"),
        ("(learner.step,) + event", "passes step", "makes something new of {}"),
        ("match learner.step:\n    case {'x': y}: pass", "passes step", "matches {} with a pattern"),
    ],
)
def test_where_the_learner_goes_out_of_sight(read: Any, body: str, how: str, note: str) -> None:
    reading = read(body)
    found = [(f"{t.how} {'.'.join(t.path) or 'learner'}", t.note) for t in reading.touches if t.how == "passes"]
    assert (how, note) in found


@pytest.mark.parametrize(
    ("body", "unclear"),
    [
        ("eval('learner.step.x')", "calls `eval`"),
        ("exec('learner.step.x')", "calls `exec`"),
        ("locals()['learner']", "calls `locals`"),
        ("unreadable(learner)", "the source of `unreadable` cannot be read"),
    ],
)
def test_what_no_source_shows(read: Any, body: str, unclear: str) -> None:
    around = 'names = {}\nexec("def unreadable(l): l.step.x", names)\nunreadable = names["unreadable"]'
    [text] = read(body, around=around).unclear
    assert text.startswith(f"{unclear}  C.handle  <read ")


def test_a_handler_without_a_source_is_unclear() -> None:
    names: dict[str, Any] = {}
    exec("def handle(self, event, phase, learner): learner.step.x", names)
    assert Reader().read(names["handle"], before=3, me=None).unclear == (
        "the source of `handle` cannot be read  <string>:1",
    )
    assert Reader().read(print, before=0, me=None).unclear == (
        "`builtin_function_or_method` is no function whose source can be read  ",
    )


def test_a_file_that_has_changed_since_is_not_believed(read: Any, tmp_path: Any) -> None:
    path = tmp_path / "changed.py"
    path.write_text("def handle(self, event, phase, learner):\n    learner.step.x\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert told(Reader().read(names["handle"], before=3, me=None)) == ["reads step.x"]
    path.write_text("def handle(self, event, phase, learner):\n    learner.step.other\n")
    linecache.checkcache(str(path))
    [unclear] = Reader().read(names["handle"], before=3, me=None).unclear
    assert unclear.startswith("the source of `handle` cannot be read")


def test_lambdas_of_one_line_are_told_apart() -> None:
    first, second = (lambda l: l.step.a), (lambda l: l.step.b)  # noqa: E741
    assert told(Reader().read(first, before=0, me=None)) == ["reads step.a"]
    assert told(Reader().read(second, before=0, me=None)) == ["reads step.b"]


def test_functions_that_call_each_other_for_ever_are_given_up(read: Any) -> None:
    around = "\n".join(f"def f{n}(l):\n    f{n + 1}(l)" for n in range(40)) + "\ndef f40(l):\n    l.step.x"
    [text] = read("f0(learner)", around=around).unclear
    assert text.startswith("calls `f")
    assert "too deep or too often to be followed" in text


def test_an_expression_of_a_thousand_parts_is_given_up(read: Any) -> None:
    [text] = read("x = " + " + ".join(["learner.step.x"] * 950)).unclear
    assert text.startswith("`C.handle` is nested too deep to be followed  <read ")


def test_what_is_read_depends_on_the_fields_that_were_asked_for() -> None:
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


def test_objects_are_compared_by_value_if_plain_else_by_identity() -> None:
    assert Obj(1) != Obj(True)
    assert Obj("a") == Obj("".join(["a"]))
    assert Obj([]) != Obj([])
