"""Imports inside the package go one way, heavy modules are imported lazily, and no file contains a machine path."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fluxcb"

# What each file or folder at the top of the package may import of the others. A folder's own files are always allowed.
SHARED = frozenset(
    {
        "_attributes",
        "_calls",
        "_errors",
        "_importing",
        "_interruptions",
        "_keyword_fixes",
        "_memory",
        "_paths",
        "_step_arguments",
        "_terminal",
        "_traced_values",
        "_tracebacks",
        "_typing",
    }
)
DECLARE = SHARED | {"_declare"}
CHECK = DECLARE | {"_check"}
COMPILE = CHECK | {"_compile"}
ANYTHING = None  # but never the façade: its names have homes, and it imports those homes
MAY_IMPORT: dict[str, Set[str] | None] = {
    # the stages, in reading order
    "_terminal": frozenset(),
    "_errors": frozenset({"_terminal"}),
    "_importing": frozenset({"_errors"}),
    "_typing": frozenset(),
    "_paths": frozenset(),
    "_step_arguments": frozenset(),
    "_memory": frozenset(),
    "_attributes": frozenset(),
    "_interruptions": frozenset(),
    "_tracebacks": frozenset({"_errors"}),
    "_traced_values": frozenset({"_errors"}),
    "_keyword_fixes": frozenset(),
    "_calls": frozenset({"_errors", "_keyword_fixes", "_tracebacks"}),
    "_declare": SHARED,
    "_draw": SHARED,
    "_check": DECLARE | {"_draw"},
    "_compile": CHECK,
    "_run": COMPILE | {"callbacks", "checkpoints", "data", "models", "plots"},  # callbacks: see KNOWS_THE_LIBRARY
    # the library is written against what a third party has: declarations, never the engine
    "callbacks": DECLARE | {"checkpoints", "data", "logging", "models", "plots", "stopping"},
    "checkpoints": SHARED | {"models"},  # `load_model` returns one
    "data": DECLARE,
    "logging": DECLARE,
    "models": SHARED,
    "plots": DECLARE,
    "stopping": SHARED,
    # public names, gathered
    "__init__": ANYTHING,
    "__main__": frozenset({"_tools"}),
    "events": frozenset({"_declare"}),
    "phases": frozenset({"_declare"}),
    # trains several Learners at once, with the parts of the engine and the library
    "populations": DECLARE | {"_compile", "_run", "callbacks", "checkpoints", "logging", "plots"},
    # tools for users and their tests
    "testing": ANYTHING,
    "_tools": ANYTHING,
}

# The engine drives callbacks without knowing the library of callbacks. Only these files import it, with these reasons.
KNOWS_THE_LIBRARY = {
    "_run.batch_progress": "`predict` and `evaluate` show their progress on the console of the Learner's ProgressBar",
    "_run.changing_state": "warnings about frozen or averaged parameters whose model state the training changes",
    "_run.check": "`fluxcb.check` adds the default callbacks, as the Learner does",
    "_run.class_numbers": "a warning about metrics of `Metrics` that count targets that the loss leaves out",
    "_run.class_targets": "a warning about targets without a class for `accuracy` and similar metrics",
    "_run.data_metrics": "`learner.evaluate(metrics=...)` takes the metrics of `Metrics`",
    "_run.declared_parts": "parts of shared state that is kept by phase are found in a `ByPhase`",
    "_run.ended_schedules": "a warning about a `Scheduler` that ended at 0 before the last half of a fit",
    "_run.inference_checks": "an error for a statistic of an `InferenceRunner` that does not exist",
    "_run.learner": "the Learner adds the default callbacks",
    "_run.preempted": "`FitSummary` prints that SIGTERM has ended the fit, so there is no warning about it then",
    "_run.repeated_iterators": "callbacks that declare `control`, but never end an epoch that goes well",
    "_run.validate_callbacks": "warnings about a `Monitors` without values, and none about the default StopOnNaNLoss",
}


# --- reading imports ------------------------------------------------------------------------------------------------


class Import(NamedTuple):
    """An import between two modules of the package, as dotted names without the package name."""

    path: Path
    line: int
    importer: str
    target: str
    when: str  # "import" of the importer, "call" of a function in it, or "check" of types


def modules(package: Path) -> dict[str, Path]:
    """Return the modules in the folder of a package by dotted name; the package itself is `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports(package: Path) -> list[Import]:
    known = modules(package)
    found = []
    for importer, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node, when in _walk(tree, when="import"):
            targets = _targets(node, package.name, importer, path, known)
            found += [Import(path, node.lineno, importer, target, when) for target in targets]
    return found


def _walk(node: ast.AST, *, when: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield nodes that may be imports, and when they run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom | ast.Call):
            yield child, when
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from _walk(ast.Module(child.body, []), when="check")
            yield from _walk(ast.Module(child.orelse, []), when=when)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, when="call" if later and when == "import" else when)


def _targets(node: ast.AST, name: str, importer: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    # The package that a relative import starts from, with the package's own name.
    here = [name] if importer == "__init__" else [name, *importer.split(".")]
    if path.name != "__init__.py":
        here = here[:-1]

    def nearest(dotted: str) -> Iterator[str]:
        parts = dotted.split(".")
        if parts[0] != name:
            return
        while len(parts) > 1 and ".".join(parts[1:]) not in known:
            parts.pop()
        yield ".".join(parts[1:]) or "__init__"

    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from nearest(alias.name)
    elif isinstance(node, ast.ImportFrom):
        base = here[: len(here) - node.level + 1] if node.level else []
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            yield from nearest(".".join([*base, alias.name]))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        dots = len(text) - len(text.lstrip("."))
        base = here[: len(here) - dots + 1] if dots else []
        yield from nearest(".".join([*base, *text.lstrip(".").split(".")]))


# --- the rules ------------------------------------------------------------------------------------------------------


def against_the_layers(package: Path, may_import: Mapping[str, Set[str] | None]) -> list[str]:
    complaints = [
        f"{package.name}/{top} has no place in the layers: say in MAY_IMPORT what it may import"
        for top in sorted({name.split(".")[0] for name in modules(package)} - set(may_import))
    ]
    for found in imports(package):
        importer, target = found.importer.split(".")[0], found.target.split(".")[0]
        if importer not in may_import or importer == target:
            continue
        where = f"{package.name}/{found.path.relative_to(package).as_posix()}:{found.line}"
        allowed = may_import[importer]
        if target == "__init__":
            complaints.append(f"{where} imports the façade `{package.name}`: import the name from its home")
        elif allowed is not ANYTHING and target not in allowed:
            names = ", ".join(sorted(allowed)) or "nothing else"
            complaints.append(f"{where} imports {found.target}: {importer} may import {names}")
    return complaints


def cycles(package: Path) -> list[list[str]]:
    # An import in a function hides a cycle from Python, but not from a reader. One for type checkers runs nowhere.
    graph = networkx.DiGraph((found.importer, found.target) for found in imports(package) if found.when != "check")
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1] + [
        [name] for name in networkx.nodes_with_selfloops(graph)
    ]


MACHINE = re.compile(r"(?<![\w.])/(?:tmp|work|root|farm|home)/[\w.-]+")
TEXTS = {"", ".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}


def machine_paths(root: Path, places: tuple[str, ...]) -> list[str]:
    """Return `file:line: path` for every machine-specific path in the text files at these places."""
    found = []
    for place in places:
        files = [root / place] if (root / place).is_file() else sorted((root / place).rglob("*"))
        for path in files:
            if not path.is_file() or path.suffix not in TEXTS or "__pycache__" in path.parts:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                found += [f"{path.relative_to(root).as_posix()}:{number}: {hit}" for hit in MACHINE.findall(line)]
    return found


def loaded_by(code: str, folder: Path, root: Path = ROOT) -> set[str]:
    """Run the code in a new interpreter that can import modules in `root`; return the loaded top-level modules."""
    script = folder / "probe.py"  # a file, so that classes have sources, as a user's have
    script.write_text(dedent(code) + "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))\n")
    run = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()
    return {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


JAX = {"jax", "jaxlib", "optax", "orbax", "flax", "equinox", "grain"}
HEAVY = JAX | {"networkx", "numpy", "rich", "pytest"}
USERS_CALLBACK = """
    import fluxcb
    from fluxcb import Callback, Read, Write, on
    from fluxcb.events import BackwardEnd, StepEnd
    from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

    class LossPrinter(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on
        def print_loss(self, event: StepEnd, phase: TrainingPhase, learner) -> None:
            print(learner.step.loss)

    class Halve(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on
        def halve(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner) -> None:
            learner.step.grads = learner.step.grads / 2

    fluxcb.check([LossPrinter(), Halve()])
"""


def test_imports_go_one_way():
    complaints = against_the_layers(PACKAGE, MAY_IMPORT)
    assert not complaints, "\n".join(complaints)


def test_engine_does_not_import_library():
    importers = {
        found.importer
        for found in imports(PACKAGE)
        if found.importer.startswith("_run") and found.target.split(".")[0] == "callbacks"
    }
    assert importers == set(KNOWS_THE_LIBRARY)


def test_no_import_cycles():
    assert cycles(PACKAGE) == []


def test_no_file_contains_machine_path():
    places = (".ci", ".gitignore", "README.md", "benchmarks", "docs", "fluxcb", "pyproject.toml", "tests")
    found = machine_paths(ROOT, places)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        pytest.param("import fluxcb", HEAVY, id="import fluxcb"),
        pytest.param("import fluxcb.events, fluxcb.phases", HEAVY, id="events and phases"),
        pytest.param("from fluxcb import LearnerView", HEAVY, id="the type of the learner"),
        pytest.param(
            "import fluxcb._check.preflight, fluxcb._check.pictures, fluxcb._draw.page",
            JAX | {"rich"},
            id="the checker",
        ),
        pytest.param("import fluxcb._tools.cli", JAX, id="the command line"),
        pytest.param("import fluxcb.data", JAX, id="data"),
        pytest.param("import fluxcb.plots", HEAVY | {"matplotlib"}, id="plots"),
        pytest.param(USERS_CALLBACK, JAX, id="checking a user's callbacks"),
        pytest.param(
            "import fluxcb\nfrom fluxcb.callbacks import Metrics, Recorder\nfluxcb.check([Metrics(), Recorder()])",
            JAX,
            id="checking built-in callbacks",
        ),
        pytest.param(
            "from fluxcb.testing import testlearner\ntestlearner().fit(1)", {"networkx", "orbax"}, id="training"
        ),
    ],
)
def test_no_heavy_imports_at_import_time(code, unwanted, tmp_path):
    assert loaded_by(code, tmp_path) & unwanted == set()


# --- the rules themselves, on small packages ------------------------------------------------------------------------

SAMPLE = {
    "__init__.py": "from sample._low import a",
    "_low.py": "import math\nimport os.path",
    "_mid/__init__.py": "from . import one\nfrom .. import _low",
    "_mid/one.py": "from .two import x\nfrom sample._low import a",
    "_mid/two.py": "import samples_of_another\ndef f():\n    import sample._low\n"
    "if TYPE_CHECKING:\n    from sample._mid.one import y",
    "_top.py": "import sample._mid.two as two",
}
SAMPLE_LAYERS = {"__init__": ANYTHING, "_low": set(), "_mid": {"_low"}, "_top": {"_mid"}}


@pytest.fixture
def sample(tmp_path):
    """Return a function that writes the sample package with some changed files, and returns its folder."""

    def write(changes: Mapping[str, str] | None = None) -> Path:
        for name, text in {**SAMPLE, **(changes or {})}.items():
            path = tmp_path / "sample" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return tmp_path / "sample"

    return write


def test_imports_are_parsed_with_targets(sample):
    assert [tuple(found)[1:] for found in imports(sample())] == [
        (1, "__init__", "_low", "import"),
        (1, "_mid", "_mid.one", "import"),
        (2, "_mid", "_low", "import"),
        (1, "_mid.one", "_mid.two", "import"),
        (2, "_mid.one", "_low", "import"),
        (3, "_mid.two", "_low", "call"),
        (5, "_mid.two", "_mid.one", "check"),
        (1, "_top", "_mid.two", "import"),
    ]


def test_valid_package_passes(sample):
    assert against_the_layers(sample(), SAMPLE_LAYERS) == []
    assert cycles(sample()) == []


@pytest.mark.parametrize(
    "code",
    [
        "import sample._top",
        "from sample import _top",
        "from sample._top import x",
        "from .. import _top",
        "from .._top import x as y",
        "def f():\n    from sample._top import x",
        "class C:\n    def f(self):\n        import sample._top",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample._top import x",
        "try:\n    import sample._top\nexcept ImportError:\n    pass",
        "import importlib\nx = importlib.import_module('sample._top')",
        "from importlib import import_module\nf = lambda: import_module('.._top', __package__)",
    ],
)
def test_import_of_later_layer_is_found_in_any_form(sample, code):
    [complaint] = against_the_layers(sample({"_mid/two.py": code}), SAMPLE_LAYERS)
    assert re.fullmatch(r"sample/_mid/two\.py:\d imports _top: _mid may import _low", complaint)


@pytest.mark.parametrize(
    "code", ["import sample", "from sample import Name", "from .. import Name", "from sample import *"]
)
def test_import_of_facade_is_found(sample, code):
    assert against_the_layers(sample({"_mid/two.py": code}), SAMPLE_LAYERS) == [
        "sample/_mid/two.py:1 imports the façade `sample`: import the name from its home"
    ]


def test_new_file_must_be_assigned_to_layer(sample):
    assert against_the_layers(sample({"_new/x.py": ""}), SAMPLE_LAYERS) == [
        "sample/_new has no place in the layers: say in MAY_IMPORT what it may import"
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sample._mid.one", [["_mid.one", "_mid.two"]]),
        ("class C:\n    from .one import x", [["_mid.one", "_mid.two"]]),
        ("if __debug__:\n    from sample._mid import one", [["_mid.one", "_mid.two"]]),
        ("from sample._mid import name", [["_mid", "_mid.one", "_mid.two"]]),
        ("import sample._mid.two", [["_mid.two"]]),
        ("def f():\n    import sample._mid.one", [["_mid.one", "_mid.two"]]),
        ("import typing\nif typing.TYPE_CHECKING:\n    import sample._mid.one", []),
    ],
)
def test_cycles_include_only_executed_imports(sample, code, expected):
    assert cycles(sample({"_mid/two.py": code})) == expected


def test_probe_reports_imported_modules(sample, tmp_path):
    package = sample({"_low.py": "a = 1\ndef f():\n    import jax", "_mid/two.py": "x = 1"})
    clean = loaded_by("import sample", tmp_path, root=package.parent)
    assert "sample" in clean
    assert not clean & HEAVY
    assert {"jax", "jaxlib", "numpy"} <= loaded_by("import sample._low as s; s.f()", tmp_path, root=package.parent)


def test_probe_fails_if_code_fails(tmp_path):
    with pytest.raises(AssertionError, match="no_such_module"):
        loaded_by("import no_such_module", tmp_path)


def test_machine_paths_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("see\n`/{0}/run.log` or ./{0}/x, https://x/{0}/y, /{0}".format("tmp"))
    (tmp_path / "docs" / "b.npz").write_text("/{}/x".format("tmp"))
    (tmp_path / "README").write_text("/{}/somebody".format("home"))
    assert machine_paths(tmp_path, ("README", "docs", "absent")) == [
        "README:1: /{}/somebody".format("home"),
        "docs/a.md:2: /{}/run.log".format("tmp"),
    ]
