"""The tables in the documentation match the code."""

import ast
import re
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb import Callback, Learner, Read, on
from fluxcb._declare import state
from fluxcb._declare.events import BUILTIN_EVENTS
from fluxcb.events import HostEvent, StepEnd, TracedEvent

ROOT = Path(__file__).resolve().parents[2]
EVENTS = ROOT / "docs/reference/events.md"
ACCESS = ROOT / "docs/reference/state-paths.md"
CHECKPOINTS = ROOT / "docs/reference/checkpoints.md"
ENGINE_ONLY = {"skip", "stop"}


def table(page: Path, name: str) -> list[list[str]]:
    """Return the rows, without the header, of the table below `<!-- table: name -->`."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"<!-- table: {name} -->\n")
    assert found, f"{page.name} has no table {name}"
    lines = rest.lstrip("\n").splitlines()
    rows = lines[2 : next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def code(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


class Watcher(Callback):
    """Keep the step names that exist at each event of each phase, and the order of the events."""

    def __init__(self):
        self.names: dict[tuple[str, type], set[str]] = {}
        self.order: list[type] = []

    def stateaccess(self):
        return {"step": Read()}

    def _see(self, event, phase, learner):
        self.names[phase.name, type(event)] = set(learner.step) - ENGINE_ONLY
        if phase.name == "training":
            self.order.append(type(event))

    @on(HostEvent)
    def host(self, event, phase, learner):
        self._see(event, phase, learner)

    @on(TracedEvent)
    def traced(self, event, phase, learner):
        self._see(event, phase, learner)


@pytest.fixture(scope="module")
def seen() -> Watcher:
    watcher = Watcher()
    xs = jnp.ones((4, 1))
    learner = Learner(
        (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=([(xs, xs)], [(xs, xs)]),
        callbacks=[watcher],
        default_callbacks=False,
    )
    learner.fit(1)
    return watcher


def new_names(seen: Watcher, phase: str) -> dict[type, str]:
    """Return the expected table cells for each event of a phase."""
    have: set[str] = set()
    cells: dict[type, str] = {}
    order = {"batch": 0, "xs": 1, "ys": 2}
    for event in BUILTIN_EVENTS:
        if (phase, event) not in seen.names:
            cells[event] = "not emitted" if issubclass(event, TracedEvent) else ""
            continue
        names = seen.names[phase, event]
        fresh = sorted(names - have, key=lambda name: (order.get(name, 9), name))
        cells[event] = "all" if event is StepEnd else code(fresh)
        # The batch that StepBegin shows is on the host; the step has its own.
        have |= names if issubclass(event, TracedEvent) else set()
    return cells


def test_table_of_events(seen):
    training, validation = new_names(seen, "training"), new_names(seen, "validation")
    expected = [
        [f"`{e.__name__}`", "traced" if issubclass(e, TracedEvent) else "host", training[e], validation[e]]
        for e in BUILTIN_EVENTS
    ]
    assert [[row[0], row[1], row[3], row[4]] for row in table(EVENTS, "events")] == expected


def test_events_are_listed_in_order_of_emission(seen):
    # Tracing happens when the Learner is built, so traced events are seen before the host's.
    traced = [event for event in seen.order if issubclass(event, TracedEvent)]
    host = [event for event in seen.order if issubclass(event, HostEvent)]
    rows = [row[0].strip("`") for row in table(EVENTS, "events")]
    assert [e.__name__ for e in traced] == [n for n in rows if n in {e.__name__ for e in traced}]
    assert [e.__name__ for e in host] == [n for n in rows if n in {e.__name__ for e in host}]


def test_table_of_writable_paths():
    rows = {row[0]: row[1] for row in table(EVENTS, "writable")}
    expected = {}
    for path in state._WRITABLE:
        events = state.writable_at(tuple(path.split(".")))
        expected[f"`{path}`"] = code(e.__name__ for e in events) or "never"
    expected["`step.stop`, `hyperparams.*`, `cbstate.*`, other `step.*`"] = "any"
    assert rows == expected
    anywhere = [("step", "stop"), ("hyperparams", "rate"), ("cbstate", "ema"), ("step", "of_mine")]
    assert [state.writable_at(path) for path in anywhere] == [None] * 4


@pytest.mark.parametrize(
    ("name", "prefix", "known"),
    [
        ("paths", "", state.FIRST_LEVEL),
        ("step", "step.", state.ENGINE_STEP_NAMES),
        ("progress", "progress.", state.PROGRESS),
    ],
)
def test_tables_of_state_paths(name, prefix, known):
    assert table(ACCESS, name) == [[f"`{prefix}{path}`", what] for path, what in known.items()]


def test_table_of_cancels():
    from fluxcb._declare import control

    rows = [line for line in control.__doc__.splitlines() if line.startswith("|")]
    expected = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    assert table(ROOT / "docs/reference/cancelling.md", "cancel") == expected


def test_every_error_is_public_and_has_section():
    from fluxcb import _errors

    names = [name for name in _errors.__all__ if name.endswith("Error")]
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert [name for name in names if getattr(fluxcb, name, None) is not getattr(_errors, name)] == []
    sections = re.findall(r"^## (\w+Error)$", page, re.MULTILINE)
    assert sorted(sections) == sorted(name for name in names if name != "FluxcbError")  # the base of them all


def test_documented_error_hierarchy_matches_module():
    from fluxcb import _errors

    tree = re.search(r"```\nFluxcbError\n(.*?)```", _errors.__doc__, re.DOTALL)[1]
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    listed = re.search(r"<!-- tree of errors -->\n\n(.*?)\n\n", page, re.DOTALL)[1]
    # Both indent by two characters per level. Compare (depth, name, text).
    in_module = [
        (len(indent), *rest) for indent, *rest in re.findall(r"^([├│└ ]+)(\w+Error) +(.+)$", tree, re.MULTILINE)
    ]
    on_page = [
        (len(indent), *rest) for indent, *rest in re.findall(r"^( *- )\[(\w+)\]\(#\w+\): (.+)$", listed, re.MULTILINE)
    ]
    assert on_page == in_module
    names = [name for name in fluxcb.__all__ if name.endswith("Error") and name != "FluxcbError"]
    headings = re.findall(r"^## (\w+Error)$", page, re.MULTILINE)
    assert sorted(headings) == sorted(names)


def test_architecture_lists_every_file():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    stages = ("_declare", "_check", "_compile", "_run")
    files = [path for stage in stages for path in (ROOT / "fluxcb" / stage).glob("*.py") if path.stem != "__init__"]
    named = set(re.findall(r"`(?:\w+/)?(\w+\.py)`", page))
    assert [path.name for path in files if path.name not in named] == []
    assert [name for name in named if not list((ROOT / "fluxcb").rglob(name)) and not list(ROOT.rglob(name))] == []


def test_reading_path_of_architecture_is_short():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split("## Reading path\n")[1].split("\n## ")[0]
    files = [ROOT / "fluxcb" / name for name in re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)]
    assert len(files) >= 10
    assert [file for file in files if not file.is_file()] == []
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= 2700


def test_every_checkpoint_guarantee_names_existing_tests():
    rows = table(CHECKPOINTS, "promises")
    assert rows
    for promise, tests in rows:
        for group in tests.split("; "):
            found = re.fullmatch(r"((?:`test_\w+`, )*`test_\w+`) in `(tests/[\w/]+\.py)`", group)
            assert found, f"{promise}: {group}"
            tree = ast.parse((ROOT / found[2]).read_text(encoding="utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert set(re.findall(r"\w+", found[1])) - defined == set(), promise
