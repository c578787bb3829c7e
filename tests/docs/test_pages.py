"""Every Python fence of README.md and docs/ runs, page by page, in order.

The fences of a page share one namespace, and the functions `test_...` in them run after the last fence. If a page
leaves files in its working directory, it runs there a second time: always the first pages that users read, and all
others with `FLUXCB_LONG`.
Two comments control the fences, each on its own line:

    <!-- not run: REASON -->    before a ```python fence that does not run
    <!-- output -->             before a ```text fence with the output of the ```python fence above (`...`: any text)
"""

import inspect
import io
import linecache
import os
import re
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from doctest import DONT_ACCEPT_BLANKLINE, DONT_ACCEPT_TRUE_FOR_1, ELLIPSIS, REPORT_NDIFF, OutputChecker
from doctest import Example as DoctestExample
from pathlib import Path
from textwrap import dedent
from types import FunctionType, ModuleType

import pytest

from fluxcb.testing import EventLog, assert_valid_graph, testlearner

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST_PAGES = {
    PAGES[0],
    *(ROOT / "docs" / name for name in ("getting-started.md", "how-to/save-and-resume.md", "how-to/keep-the-best.md")),
}

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
QUOTED_FENCE = re.compile(r"^\s*>[\s>]*(```|~~~)")
COMMENT = re.compile(r"^\s*<!--\s*(?P<text>(not run|output)\b.*)$")
NOT_RUN = re.compile(r"^not run:\s*(?P<reason>\S.*?)\s*-->\s*$")
OUTPUT = re.compile(r"^output\s*-->\s*$")
# These render as Python too; a fence that is spelt this way would never run, and nobody would notice.
OTHER_SPELLINGS = {"py", "py3", "python3", "pycon", "ipython", "ipython3", "{.python}", "{python}"}


# The fixtures of the pytest plugin, for the tests on the pages.
FIXTURES = {
    "fluxcb_check": lambda: assert_valid_graph,
    "fluxcb_learner": lambda: testlearner,
    "fluxcb_events": EventLog,
}


class PageError(Exception):
    """A page does not follow the format in the docstring of this module."""


@dataclass
class Example:
    """One Python fence; `line` is its first line of code, counted from 1."""

    line: int
    code: str
    runs: bool
    output: str | None = None


def parse(text: str) -> list[Example]:
    examples: list[Example] = []
    lines = text.splitlines()
    pending: tuple[str, int] | None = None  # the comment that the next fence must answer, and its line
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if QUOTED_FENCE.match(line):
            raise PageError(f"line {number}: a fence inside a quotation is not read; take it out of the quotation")
        if comment := COMMENT.match(line):
            if pending:
                raise PageError(f"line {pending[1]}: this comment is not followed by its fence")
            pending = (comment["text"], number)
            continue
        fence = FENCE.match(line)
        if not fence:
            if pending and line.strip():
                raise PageError(f"line {pending[1]}: this comment is not followed by its fence")
            continue
        first = number + 1
        closing = re.compile(rf"^\s*{fence['marks'][0]}{{{len(fence['marks'])},}}\s*$")
        body = []
        while number < len(lines) and not closing.match(lines[number]):
            body.append(lines[number])
            number += 1
        if number == len(lines):
            raise PageError(f"line {first - 1}: this fence is never closed")
        number += 1
        language = (fence["info"].split() or [""])[0]
        _add(examples, language, first, dedent("\n".join(body)), pending)
        pending = None
    if pending:
        raise PageError(f"line {pending[1]}: this comment is not followed by its fence")
    return examples


def _add(examples: list[Example], language: str, line: int, body: str, pending: tuple[str, int] | None) -> None:
    if language.lower() in OTHER_SPELLINGS:
        raise PageError(f"line {line - 1}: write ```python instead of ```{language}, or the fence never runs")
    comment, where = pending or ("", line)
    if language == "python":
        if comment and not NOT_RUN.match(comment):
            raise PageError(f"line {where}: before a ```python fence only `<!-- not run: REASON -->` may stand")
        examples.append(Example(line, body, runs=not comment))
    elif comment:
        if language != "text" or not OUTPUT.match(comment):
            raise PageError(f"line {where}: `<!-- output -->` stands before ```text, `not run` before ```python")
        if not examples or not examples[-1].runs or examples[-1].output is not None:
            raise PageError(f"line {where}: there is no ```python fence above that runs and has no output yet")
        examples[-1].output = body


def run_page(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [example for example in parse(path.read_text(encoding="utf-8")) if example.runs]
    # A real module, whose source is the page with everything but the code left blank: classes pickle, annotations
    # resolve, `inspect` finds sources, and tracebacks and fluxcb's own messages show the lines of the page.
    module = ModuleType("page_" + re.sub(r"\W", "_", path.stem))
    module.__file__ = str(path)
    source: list[str] = []
    for example in examples:
        source += ["\n"] * (example.line - 1 - len(source))
        source += [line + "\n" for line in example.code.split("\n")]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(linecache.cache, str(path), (len("".join(source)), None, source, str(path)))
    for example in examples:
        code = compile("\n" * (example.line - 1) + example.code, str(path), "exec", dont_inherit=True)
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, module.__dict__)
        if example.output is not None and (complaint := differs(example.output, printed.getvalue())):
            pytest.fail(f"{path}:{example.line} prints something else.\n{complaint}", pytrace=False)
    for name, function in list(vars(module).items()):
        if name.startswith("test_") and isinstance(function, FunctionType):
            function(**{fixture: FIXTURES[fixture]() for fixture in inspect.signature(function).parameters})


def differs(expected: str, printed: str) -> str:
    """Return the differences, or an empty string. `...` matches anything, and trailing blanks are ignored."""
    flags = ELLIPSIS | DONT_ACCEPT_TRUE_FOR_1 | DONT_ACCEPT_BLANKLINE | REPORT_NDIFF
    want, got = ("\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n" for text in (expected, printed))
    if OutputChecker().check_output(want, got, flags):
        return ""
    return OutputChecker().output_difference(DoctestExample("", want), got, flags)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_page(path, tmp_path, monkeypatch):
    folder, temporary = tmp_path / "work", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(folder)
    run_page(path, monkeypatch)
    twice = path in FIRST_PAGES or "FLUXCB_LONG" in os.environ
    if twice and any(folder.iterdir()):  # what the first run leaves must not be in the way of a second one
        monkeypatch.chdir(folder)
        run_page(path, monkeypatch)


# --- the reader of pages itself -------------------------------------------------------------------------------------


def page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some-page.md"
    # In the texts below ''' stands for the marks of a fence: this file stays readable as a fence itself.
    path.write_text(dedent(text).replace("'''", "```"), encoding="utf-8")
    return path


def test_fences_share_namespace_and_outputs_are_compared(tmp_path, monkeypatch):
    text = """
        # Title
        '''python
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: "int"
        print("seconds:", 0.123)
        '''
        which prints
        <!-- output -->
        '''text
        seconds: ...
        '''
        '''bash
        exit 1
        '''
        1. in a list

            '''python title="b.py"
            import inspect, pickle
            assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
            print(inspect.getsource(Point), end="")
            '''

            <!-- output -->

            '''text
            @dataclass
            class Point:
                x: "int"
            '''
        <!-- not run: it would format the disk -->
        '''python
        raise SystemExit
        '''
        """
    run_page(page(tmp_path, text), monkeypatch)
    assert "page_some_page" in sys.modules
    monkeypatch.undo()
    assert "page_some_page" not in sys.modules


def test_failing_example_shows_line_of_page(tmp_path, monkeypatch):
    path = page(tmp_path, "text\n'''python\nx = 1\n\nx / 0\n'''\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(path, monkeypatch)
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1, str(last.statement)) == (str(path), 5, "x / 0")


def test_unexpected_output_fails(tmp_path, monkeypatch):
    path = page(tmp_path, "'''python\nprint(1)\n'''\n<!-- output -->\n'''text\nTrue\n'''\n")
    with pytest.raises(
        pytest.fail.Exception, match=r"page\.md:2 prints something else\.\nDifferences .*\n    - True\n    \+ 1"
    ):
        run_page(path, monkeypatch)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a", "a\n", True),
        ("a   \nb", "a\nb   \n\n", True),
        ("loss ... at 3", "loss 0.25 at 3\n", True),
        ("a\n...\nz", "a\nb\nc\nz\n", True),
        ("", "", True),
        ("a", "a b", False),
        ("a  b", "a b", False),
        ("1", "True", False),
        ("<BLANKLINE>", "\n", False),
    ],
)
def test_output_comparison(expected, printed, same):
    assert (differs(expected, printed) == "") is same


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("'''python\nx\n", "line 1: this fence is never closed"),
        ("<!-- not run -->\n'''python\nx\n'''", "line 1: before a ```python fence only `<!-- not run: REASON -->`"),
        ("<!-- not run: -->\n'''python\nx\n'''", "line 1: before a ```python fence only `<!-- not run: REASON -->`"),
        ("<!-- not run: slow\n-->\n'''python\nx\n'''", "line 1: this comment is not followed by its fence"),
        ("<!-- not run: slow -->\nprose\n'''python\nx\n'''", "line 1: this comment is not followed by its fence"),
        ("<!-- output -->\n<!-- output -->\n", "line 1: this comment is not followed by its fence"),
        ("a\n<!-- output -->", "line 2: this comment is not followed by its fence"),
        ("<!-- output -->\n'''python\nx\n'''", "line 1: before a ```python fence only `<!-- not run: REASON -->`"),
        ("<!-- output -->\n'''text\nx\n'''", "line 1: there is no ```python fence above"),
        ("<!-- output -->\n'''bash\nx\n'''", "line 1: `<!-- output -->` stands before ```text"),
        ("<!-- not run: slow -->\n'''text\nx\n'''", "line 1: `<!-- output -->` stands before ```text"),
        ("a\n'''py\nx\n'''", "line 2: write ```python instead of ```py, or the fence never runs"),
        ("> '''python\n> x\n> '''", "line 1: a fence inside a quotation is not read"),
    ],
)
def test_malformed_pages_raise(tmp_path, text, message):
    with pytest.raises(PageError, match=re.escape(message)):
        parse(page(tmp_path, text).read_text())


def test_nested_fences_are_not_run():
    assert parse("````markdown\n```python\nx\n```\n````\n") == []
    assert parse("~~~markdown\n```python\nx\n```\n~~~\n") == []
