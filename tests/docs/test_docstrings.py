"""Every `>>>` example in a docstring of the package runs.

The docstrings are read from the source, not from the imported objects: none is missed because a name was re-exported,
wrapped or generated, and collecting the tests imports nothing.
"""

import ast
import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fluxcb"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Docstring(NamedTuple):
    """A docstring, its location in the source, and the name that it documents."""

    module: str
    path: Path
    line: int
    owner: str
    text: str


def docstrings(package: Path) -> Iterator[Docstring]:
    """Yield the docstrings of modules, classes, functions and attributes below a package's folder."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for owner, node in _texts(tree, ()):
            yield Docstring(module, path, node.lineno, ".".join(owner), node.value)


def _texts(node: ast.AST, owner: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Constant]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield owner, child.value
        elif isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _texts(child, (*owner, child.name))
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _texts(child, owner)


def run(docstring: Docstring) -> str:
    """Run the examples in the namespace of their module, and return the failures as text."""
    names = dict(vars(importlib.import_module(docstring.module)))
    name = f"{docstring.module}.{docstring.owner}".rstrip(".")
    test = doctest.DocTestParser().get_doctest(docstring.text, names, name, str(docstring.path), docstring.line - 1)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=report.append)
    return "".join(report)


def refused(docstring: Docstring) -> str:
    """Return why an example in this docstring would never run, or an empty string."""
    where = f"{docstring.path}:{docstring.line}"
    if re.search(r"^\s*(```|~~~)\s*(python|py)", docstring.text, re.MULTILINE):
        return f"{where}: an example in a docstring is written with >>>, so that it runs; not as a Python fence"
    if re.search(r"#\s*doctest:.*\+SKIP", docstring.text):
        return f"{where}: an example that never runs belongs on a page of docs/, with its reason"
    return ""


@pytest.mark.parametrize(
    "docstring",
    [
        pytest.param(found, id=f"{found.path.relative_to(PACKAGE.parent).as_posix()}:{found.owner or 'module'}")
        for found in docstrings(PACKAGE)
        if ">>>" in found.text
    ],
)
def test_docstring_examples(docstring, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if failures := run(docstring):
        pytest.fail(failures, pytrace=False)


def test_every_example_runs():
    reasons = [reason for found in docstrings(PACKAGE) if (reason := refused(found))]
    assert not reasons, "\n".join(reasons)


# --- the reader of docstrings itself --------------------------------------------------------------------------------

SOURCE = '''
"""A module.

>>> double(2)
4
"""

FACTOR = 2
"""An attribute.

>>> FACTOR
3
"""

if True:
    def double(x):
        """Double.

        Example:
            >>> print("a", "b",
            ...       double(x=2))
            a   ... 4
        """
        not_a_docstring = "text"
        return FACTOR * x


class Outer:
    class Inner:
        def method(self):
            r"""Fail.

            >>> Outer.Inner().method()
            Traceback (most recent call last):
            ValueError: no
            >>> 1 / 0
            0
            """
            raise ValueError("no")
'''


@pytest.fixture
def found(tmp_path, monkeypatch) -> dict[str, Docstring]:
    package = tmp_path / "sample_of_docstrings"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return {f"{found.module}:{found.owner}:{found.line}": found for found in docstrings(package)}


def test_all_docstrings_are_found_with_their_lines(found):
    module = "sample_of_docstrings.inner"
    assert list(found) == [f"{module}::2", f"{module}::9", f"{module}:double:17", f"{module}:Outer.Inner.method:31"]


def test_example_failures_name_source_line(found):
    module, attribute, function, method = found.values()
    assert run(module) == run(function) == ""
    failure = run(attribute)
    assert re.search(
        r'inner\.py", line 11, in .*\nFailed example:\n    FACTOR\nExpected:\n    3\nGot:\n    2\n', failure
    )
    failure = run(method)
    assert failure.count("Failed example") == 1
    assert re.search(r'inner\.py", line 36, in sample_of_docstrings\.inner\.Outer\.Inner\.method', failure)


@pytest.mark.parametrize(
    "text", ["Do.\n\n    ```python\n    x\n    ```", "Do.\n\n    >>> x  # doctest: +ELLIPSIS, +SKIP"]
)
def test_examples_that_would_never_run_raise(text):
    found = Docstring("m", PACKAGE / "m.py", 3, "f", text)
    assert refused(found).startswith(f"{PACKAGE / 'm.py'}:3: an example ")
    assert not refused(found._replace(text="Do.\n\n    >>> x\n    ```\n    plain\n    ```"))
