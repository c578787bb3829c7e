"""The source reader, compared with the protected learner on generated handlers."""

from __future__ import annotations

import functools
import itertools
import linecache
import opcode
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fluxcb import Append, Callback, Read, Write, on
from fluxcb._check.source.access_rules import NAMESPACES
from fluxcb._check.source_audit import Reader, audit_source
from fluxcb._compile import protect
from fluxcb._compile.protect import make_proxy
from fluxcb._declare.declared import declare
from fluxcb._errors import AccessError
from fluxcb.events import StepEnd

# --- what generated handlers are made of ------------------------------------------------------------------------------

VARIABLES = ["a", "b"]
HELPERS = """
def first(x, y=None):
    return x

def pick(x, y):
    if flip():
        return x
    return y

def look(x):
    x.loss

def call(function, *args, **kwargs):
    return function(*args, **kwargs)

def wrapping(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@wrapping
def wrapped(x):
    return x

def part(x, y):
    return y

def maker(x):
    return lambda: x

def again(x, n=2):
    if n == 0:
        return x
    return again(x, n - 1)
"""

names = st.sampled_from(["step", "cbstate", "params", "loss", "aux", "log", "w", "model", "progress", "nothing"])
ONCE = ["c", "d", "e"]  # each statement that assigns one of them may be the only one
variables = st.sampled_from([*VARIABLES, *ONCE, "learner"])
accesses = st.dictionaries(
    st.sampled_from([("step", "loss"), ("step", "aux"), ("cbstate", "log"), ("params",), ("params", "w"), ("step",)]),
    st.sampled_from([Read(), Write(), Append()]),
    max_size=3,
)


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return an access as a nested mapping; for a path and a part of it, only the path."""
    whole = {path: permission for path, permission in flat.items() if path[:-1] not in flat}
    tree: dict[str, Any] = {}
    for path, permission in whole.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = permission
    return tree


chains = st.tuples(variables, st.lists(st.tuples(names, st.booleans()), max_size=3)).map(
    lambda chain: chain[0] + "".join(f'["{name}"]' if item else f".{name}" for name, item in chain[1])
)
below = st.tuples(chains, names).map(lambda pair: f"{pair[0]}.{pair[1]}")
values = st.one_of(
    chains,
    chains.map(lambda c: f"first({c})"),
    chains.map(lambda c: f"first(y=0, x={c})"),
    chains.map(lambda c: f"self.same({c})"),
    chains.map(lambda c: f"super(type(self), self).same({c})"),
    chains.map(lambda c: f"again({c})"),
    chains.map(lambda c: f"(lambda x: x)({c})"),
    st.tuples(chains, names).map(lambda p: f'getattr({p[0]}, "{p[1]}")'),
    chains.map(lambda c: f"call(first, {c})"),
    chains.map(lambda c: f"call(first, y=1, **dict(x={c}))"),
    chains.map(lambda c: f"call(first, x={c})"),
    chains.map(lambda c: f"wrapped({c})"),
    chains.map(lambda c: f"maker({c})()"),
    chains.map(lambda c: f"partial(part, 1)({c})"),
    chains.map(lambda c: f"self.property_({c})"),
    st.tuples(variables, variables).map(lambda p: f"pick({p[0]}, {p[1]})"),
    st.tuples(variables, variables).map(lambda p: f"{p[0]} if flip() else {p[1]}"),
    st.tuples(chains, variables).map(lambda p: f"({p[0]}, {p[1]})[1]"),
    st.just("None"),
    st.just("(1, 2)"),
)


def block(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def bodies(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    return st.one_of(
        inner.map(lambda body: ["if flip():", *block(body)]),
        st.tuples(inner, inner).map(lambda p: ["if flip():", *block(p[0]), "else:", *block(p[1])]),
        st.tuples(inner, inner).map(lambda p: ["if self.yes:", *block(p[0]), "else:", *block(p[1])]),
        inner.map(lambda body: ["for i in range(2):", *block(body)]),
        st.tuples(inner, inner).map(
            lambda p: ["while flip():", *block(p[0]), "    if flip():", "        break", *block(p[1])]
        ),
        inner.map(lambda body: ["for a in (learner.step, learner.cbstate):", *block(body)]),
        st.tuples(inner, inner).map(lambda p: ["try:", *block(p[0]), "finally:", *block(p[1])]),
        st.tuples(inner, inner).map(lambda p: ["try:", *block(p[0]), "except AccessError:", *block(p[1])]),
        st.tuples(inner, inner).map(lambda p: ["try:", *block(p[0]), "except TypeError:", *block(p[1])]),
        inner.map(lambda body: ["def inner(x):", *block(body), "    return x", "b = inner(a)"]),
        inner.map(lambda body: ["def inner():", "    nonlocal a", *block(body), "inner()"]),
        inner.map(lambda body: ["with open_context() as b:", *block(body)]),
    )


simple = st.one_of(
    st.tuples(st.sampled_from([*VARIABLES, *ONCE]), values).map(lambda p: [f"{p[0]} = {p[1]}"]),
    st.tuples(st.sampled_from(ONCE), chains, names).map(lambda p: [f"{p[0]} = {p[1]}", f"{p[0]}.{p[2]}"]),
    st.tuples(chains, chains).map(lambda p: [f"a, b = {p[0]}, {p[1]}"]),
    chains.map(lambda c: [f"a, b = {c}"]),
    chains.map(lambda c: [f"if (a := {c}):", "    pass"]),
    below.map(lambda c: [f"{c} = 1"]),
    below.map(lambda c: [f"{c} += 1"]),
    st.tuples(chains, names).map(lambda p: [f'{p[0]}["{p[1]}"] = a']),
    below.map(lambda c: [f"del {c}"]),
    chains.map(lambda c: [f"look({c})"]),
    st.tuples(chains, names).map(lambda p: [f'setattr({p[0]}, "{p[1]}", 1)']),
    st.tuples(chains, names).map(lambda p: [f'"{p[1]}" in {p[0]}']),
    chains.map(lambda c: [f"[n for n in {c}]"]),
    chains.map(lambda c: [f"unread({c})"]),
    chains.map(lambda c: [f"self.kept = {c}"]),
    st.just(["return"]),
    chains.map(lambda c: [f"list(map(lambda _: {c}, (1, 2)))"]),
    chains.map(lambda c: [f"list({c} for _ in (1, 2))"]),
    chains.map(lambda c: [f"f = lambda: {c}", "b = f()"]),
    st.tuples(chains, chains).map(
        lambda p: [f"match {p[0]}:", "    case None:", "        a = 1", "    case b:", f"        a = {p[1]}"]
    ),
    st.tuples(chains, names).map(lambda p: [f'for n in ("{p[1]}",):', f"    {p[0]}[n]"]),
    st.tuples(chains, names, names).map(lambda p: [f'for n in ["{p[1]}", "{p[2]}"]:', f"    b = getattr({p[0]}, n)"]),
    st.tuples(chains, chains).map(lambda p: [f"for n, a in zip((1, 2), ({p[0]}, {p[1]})):", "    a.loss"]),
    values.map(lambda v: [v]),
)
statements = st.recursive(
    st.lists(simple, min_size=1, max_size=3).map(lambda parts: list(itertools.chain.from_iterable(parts))),
    lambda inner: st.lists(bodies(inner), min_size=1, max_size=2).map(
        lambda ps: list(itertools.chain.from_iterable(ps))
    ),
    max_leaves=6,
)


# --- running them ----------------------------------------------------------------------------------------------------


class Thing:
    """A value of the state that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Thing()

    def __getitem__(self, name: object) -> Any:
        return Thing()

    def __setitem__(self, name: object, value: object) -> None: ...

    def __delattr__(self, name: str) -> None: ...

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter((Thing(), Thing()))

    def __add__(self, other: object) -> Any:
        return Thing()


class Touched:
    """A backend that records all accesses."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, tuple[str, ...]]] = set()

    def read(self, path: tuple[str, ...], permission: Any) -> Any:
        self.seen.add(("reads", path))
        return Thing()

    def reader(self, path: tuple[str, ...], permission: Any) -> Callable[[Any], Any]:
        return lambda view: self.read(path, permission)

    def write(self, path: tuple[str, ...], value: Any, permission: Any) -> None:
        self.seen.add(("writes", path))

    def names(self, path: tuple[str, ...]) -> Iterator[str]:
        return iter(("loss", "log"))


WORK = {opcode.opmap[name] for name in opcode.opmap if "ATTR" in name or "SUBSCR" in name or "CALL" in name}


class Outcomes:
    """Which lines raised AccessError, and which accessed state and completed without it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.finished: set[int] = set()
        self.refused: set[int] = set()
        self._working: dict[Any, int] = {}

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != self.file:
            return None
        frame.f_trace_opcodes = True
        if event == "exception":
            if issubclass(arg[0], AccessError):
                self.refused.add(frame.f_lineno)
            self._working.pop(frame, None)  # what raised anything was not finished
        elif event == "opcode":
            # Cleaning up behind an exception counts as a line, too, but touches nothing.
            if frame.f_code.co_code[frame.f_lasti] in WORK:
                self._working[frame] = frame.f_lineno
        elif frame in self._working:  # a new line, or the end
            self.finished.add(self._working.pop(frame))
        return self


class Context:
    def __enter__(self) -> int:
        return 1

    def __exit__(self, *_: object) -> None: ...


_counter = itertools.count()


def build(body: list[str], access: dict[str, Any], choose: Callable[[], bool]) -> tuple[Any, str, str]:
    """Return a callback with this handler, the name of its file, and its text."""
    file = f"<generated {next(_counter)}>"
    lines = [
        *HELPERS.splitlines(),
        "class Base(Callback):",
        "    def same(self, x):",
        "        return x",
        "    @property",
        "    def property_(self):",
        "        return first",
        "",
        "class Generated(Base):",
        "    yes = True",
        "    def stateaccess(self):",
        "        return ACCESS",
        "",
        "    @on",
        "    def handle(self, event: StepEnd, phase, learner):",
        "        a = b = None",
        *(f"        {line}" for line in body),
    ]
    text = "\n".join(lines) + "\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = {
        "Callback": Callback,
        "on": on,
        "StepEnd": StepEnd,
        "ACCESS": access,
        "AccessError": AccessError,
        "flip": choose,
        "unread": max,
        "open_context": Context,
        "partial": functools.partial,
        "__name__": "generated",
    }
    exec(compile(text, file, "exec"), scope)
    return scope["Generated"](), file, text


@settings(max_examples=400)
@given(statements, accesses, st.integers(0, 2**32))
def test_source_audit_matches_protected_learner(body: list[str], flat: dict[tuple[str, ...], Any], seed: int) -> None:
    chance = random.Random(seed)
    turns = 0

    def flip() -> bool:
        nonlocal turns
        turns += 1
        return chance.random() < (0.5 if turns < 30 else 0.1)

    callback, file, text = build(body, nested(flat), flip)
    [declared], _ = declare([callback])
    audit = audit_source([declared])
    handler = declared.handler(StepEnd, next(iter(callback.handlers())).phase)
    assert handler is not None
    reading = Reader().read(handler.function, before=2, me=callback)
    # A helper's line may be refused in one call and granted in another: what is said of it is that of the first.
    places = [line for problem in audit.problems for line in problem.where if line.startswith("Generated.handle  ")]
    surely = {int(place.rsplit(":", 1)[1]) for place in places}
    shown = f"{text}\n{declared.access}\n{audit.problems}\n{audit.unclear}"
    refused: set[int] = set()
    for _ in range(8):
        turns = 0
        backend, outcomes = Touched(), Outcomes(file)
        proxy = make_proxy(declared.access, backend, declared=declared, where="here")
        sys.settrace(outcomes)
        try:
            handler.function(StepEnd(), None, proxy)  # pyright: ignore[reportArgumentType]
        except Exception:  # values of all kinds are used in all ways
            pass
        finally:
            sys.settrace(None)
        assert not surely & outcomes.finished, f"no AccessError at {surely & outcomes.finished}\n{shown}"
        refused |= outcomes.refused
        if not audit.unclear:
            for how, path in backend.seen:
                assert any(covers(touch, how, path) for touch in reading.touches), f"{how} {path} not found\n{shown}"
    if not audit.unclear and not audit.problems:
        assert not refused, f"AccessError at {refused}\n{shown}"
    linecache.cache.pop(file)


def covers(touch: Any, how: str, path: tuple[str, ...]) -> bool:
    if how == "writes" and touch.how != "writes":
        return False
    return touch.path[: len(path)] == path or (touch.part and path[: len(touch.path)] == touch.path)


def test_both_agree_on_names_with_parts() -> None:
    assert NAMESPACES == protect.NAMESPACES
