"""The site is complete: every page is in the table of contents, every link works, and every name is documented.

Sphinx checks the links and the table of contents again when it builds the site. These tests do not need it.
"""

import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import fluxcb
from fluxcb._tools import pytest_plugin

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "_build" not in path.parts]
ON_GITHUB = "https://github.com/fluxcb/fluxcb/blob/main/"


def script(path: Path):
    """Import a file of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the reference --------------------------------------------------------------------------------------------------


def documented(folder: Path) -> list[str]:
    """Return the full paths of the names in the `{api}` fences of all pages in a folder."""
    return [
        f"{module}.{name}"
        for page in sorted(folder.glob("*.md"))
        for module, names in re.findall(r"^```\{api\} ([\w.]+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for name in names.split()
    ]


def public_names() -> list[str]:
    """Return the full paths of all public names, except modules."""
    names = [f"fluxcb.{name}" for name in fluxcb.__all__ if name not in fluxcb._MODULES]
    for module in (f"fluxcb.{name}" for name in fluxcb._MODULES):
        names += [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    return names


def test_every_public_name_has_one_api_entry():
    expected, found = Counter(public_names()), Counter(documented(API))
    missing, wrong = expected - found, found - expected
    assert not missing, f"add to a page of docs/reference/api: {sorted(missing)}"
    assert not wrong, f"twice, or not public: {sorted(wrong)}"


def test_names_in_api_fences_are_found(tmp_path):
    (tmp_path / "a.md").write_text("# A\n\n```{api} p\nf\nC\n```\n\n```text\nno\n```\n\n```{api} p.q\ng\n```\n")
    assert documented(tmp_path) == ["p.f", "p.C", "p.q.g"]


@pytest.mark.parametrize("page", ["callbacks.md", "api/callbacks.md"])
def test_callback_pages_are_current(page):
    maker = script(DOCS / "reference/make_callbacks.py")
    page = DOCS / "reference" / page
    assert page.read_text(encoding="utf-8") == maker.made(page), "run `python docs/reference/make_callbacks.py`"


def test_command_line_page_is_current():
    maker = script(DOCS / "reference/make_command_line.py")
    text = maker.PAGE.read_text(encoding="utf-8")
    assert text == maker.page(), "run `python docs/reference/make_command_line.py`"


def test_pytest_plugin_page_lists_options_and_fixtures():
    class Parser:
        options = []

        def getgroup(self, name):
            return self

        def addoption(self, name, **kwargs):
            self.options.append(name)

    pytest_plugin.pytest_addoption(Parser())
    source = Path(pytest_plugin.__file__).read_text(encoding="utf-8")
    fixtures = re.findall(r"^@pytest\.fixture\ndef (\w+)\(", source, re.MULTILINE)
    page = (DOCS / "reference/pytest-plugin.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)", page, re.MULTILINE)
    assert [name for name in [*Parser.options, *fixtures] if name not in rows] == []
    assert fixtures


# --- the table of contents ------------------------------------------------------------------------------------------


def test_every_page_is_in_toc_once():
    pages = script(DOCS / "_site/contents.py").listed(DOCS / "index.md")
    expected = [page for page in PAGES if page != DOCS / "index.md"]
    assert sorted(page.relative_to(DOCS).as_posix() for page in pages) == [
        page.relative_to(DOCS).as_posix() for page in expected
    ], "list the page in docs/index.md, or in the index.md of its folder"


def test_how_to_pages_have_at_most_150_lines():
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "docs" / "how-to").glob("*.md")}
    assert {name: length for name, length in lengths.items() if length > 150} == {}


def test_toc_sections_are_in_order():
    parts = script(DOCS / "_site/contents.py").parts(DOCS / "index.md")
    assert list(parts) == [
        "Start",
        "Concepts",
        "How-to: data and trained models",
        "How-to: training",
        "How-to: validation",
        "How-to: checkpoints",
        "How-to: watch a run",
        "How-to: callbacks",
        "How-to: custom training steps and loops",
        "Migrating",
        "Gallery",
        "Reference",
        "Project",
    ]


INDEX = """# Title

See [prose](prose.md).

- [first](first.md): before any heading, again [first](first.md#part)
- text
  [continued](sub/continued.md) and [other](../other.md)

## Part

| [row](row.md) | [web](https://example.org/web.md) |

- [first](first.md), [second](second.md#anchor)

### Group

- [more](more/index.md)
"""


def test_toc_is_read_from_lists_and_tables(tmp_path):
    contents = script(DOCS / "_site/contents.py")
    (tmp_path / "more").mkdir()
    (tmp_path / "index.md").write_text(INDEX)
    (tmp_path / "more/index.md").write_text("# More\n\n- [page](page.md)\n")
    assert contents.parts(tmp_path / "index.md") == {
        "": ["first", "sub/continued"],
        "Part": ["row"],
        "Part: group": ["more/index"],
    }
    assert contents.listed(tmp_path / "index.md") == [
        tmp_path / "first.md",
        tmp_path / "sub/continued.md",
        tmp_path / "row.md",
        tmp_path / "more/index.md",
        tmp_path / "more/page.md",
    ]
    assert contents.with_toctrees("# More\n", tmp_path / "more/index.md") == (
        "# More\n\n\n```{toctree}\n:hidden:\n\npage\n```\n"
    )


# --- links ----------------------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^(?P<marks>`{3,}|~{3,}).*?^(?P=marks)[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^()\s]+(?:\([^()\s]*\))?)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *#*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates for the headings of a page."""
    counts: Counter[str] = Counter()
    found = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return found


def links(text: str) -> list[str]:
    """Return the targets of the links of a page, without code."""
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


def broken(page: Path) -> list[str]:
    """Return the links of a page whose target file or heading does not exist."""
    text = page.read_text(encoding="utf-8")
    complaints = []
    for target in links(text):
        if target.startswith(ON_GITHUB):
            path, _, anchor = target.removeprefix(ON_GITHUB).partition("#")
            file = ROOT / path
        elif re.match(r"\w+:", target):
            continue
        else:
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
        if not file.exists():
            complaints.append(f"{target}: there is no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            complaints.append(f"{target}: {file.name} has no such heading")
    return complaints


def test_every_link_has_target_file_and_heading():
    complaints = [f"{page.relative_to(ROOT)}: {text}" for page in [ROOT / "README.md", *PAGES] for text in broken(page)]
    assert not complaints, "\n".join(complaints)


def test_broken_links_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# The *b* `Page`\n\n## Part\n\n## Part\n\n```text\n# not a heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# A, [b](b.md)!\n\n[1](b.md#the-b-page) [2](b.md#part-1) [3](b.md#part-2) [4](gone.md) `[5](code.md)`\n"
        "[6](#a-b) [7](#nowhere) [8](https://example.org/x) [9](b.md#not-a-heading)\n"
        f"[10]({ON_GITHUB}README.md) [11]({ON_GITHUB}docs/gone.md)\n\n```text\n[12](code.md)\n```\n"
    )
    assert broken(page) == [
        "b.md#part-2: b.md has no such heading",
        "gone.md: there is no such file",
        "#nowhere: a.md has no such heading",
        "b.md#not-a-heading: b.md has no such heading",
        f"{ON_GITHUB}docs/gone.md: there is no such file",
    ]


# --- the summary of the measurements --------------------------------------------------------------------------------


def test_benchmark_summary_is_current():
    maker = script(DOCS / "images/make_performance.py")
    outdated = [path.name for path, text in maker.made().items() if path.read_text(encoding="utf-8") != text]
    assert outdated == [], "run `python docs/images/make_performance.py`"


def test_numbers_in_tables_are_parsed():
    maker = script(DOCS / "images/make_performance.py")
    text = "### A\n\n| | us | ratio |\n|---|--:|--:|\n| by hand | 61.4 (59 to 62) | 1 |\n| x | 2 | |\n\n### B\n"
    assert maker.tables(text) == {"A": {"by hand": {"us": 61.4, "ratio": 1.0}, "x": {"us": 2.0}}}


# --- the page that compares two programs ----------------------------------------------------------------------------


def test_line_counts_of_converted_loop_match_page():
    page = (DOCS / "from-a-hand-written-loop.md").read_text(encoding="utf-8")
    programs = re.findall(r"^<!-- (?:before|after) -->\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    counts = [str(sum(bool(line.strip()) for line in program.splitlines())) for program in programs]
    found = re.search(r"hand-written program has (\d+) lines and the one with fluxcb has (\d+)", page)
    assert list(found.groups()) == counts


# --- docstrings -----------------------------------------------------------------------------------------------------

DOCSTRING = """Return `a_` of
`Name`s, 2 * 3, x_ and a|b; ``code`` stays, `over
two lines` too.

Args:
    *criteria: Some (see docs/concepts/windows.md).

Access:
    step.loss: Read.
        In training.
    *: Write.

Example:
    >>> 2 * 3  # `x`
    6 *

After *it*.
"""
CONVERTED = r"""Return ``a_`` of
``Name``\ s, 2 \* 3, x\_ and a\|b; ``code`` stays, ``over
two lines`` too.

Args:
    \*criteria: Some (see :doc:`/concepts/windows`).

Access:
    - step.loss: Read.
      In training.
    - \*: Write.

Example:
    >>> 2 * 3  # `x`
    6 *

After \*it\*.
"""


def test_docstrings_are_converted_for_sphinx():
    assert script(DOCS / "_site/docstrings.py").to_rst(DOCSTRING) == CONVERTED


def test_no_type_is_read_from_the_description_of_a_result():
    module = script(DOCS / "_site/docstrings.py")
    lines = ["Do: it.", "", "Returns:", "    The arrays: a dict.", "", "Raises:", "    ValueError: Never."]
    module.before_napoleon(None, "function", "f", None, None, converted := list(lines))
    assert converted == [*lines[:3], lines[3].replace(":", module._COLON), *lines[4:]]
    module.after_napoleon(None, "function", "f", None, None, converted)
    assert converted == lines


# --- notebooks ------------------------------------------------------------------------------------------------------

PAGE_WITH_CODE = """# Title

Text.

<!-- algorithm -->

```python
x = 1

y = x
```

<!-- output -->

```text
1
```

```python
figure.savefig("a.png")
```

![alt](../images/gallery/a.png)
"""


def test_page_becomes_notebook():
    cells = script(DOCS / "_site/notebooks.py").notebook(PAGE_WITH_CODE)["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == [
        ("markdown", "# Title\n\nText."),
        ("code", "x = 1\n\ny = x"),
        ("markdown", "```text\n1\n```"),
        ("code", 'figure.savefig("a.png")'),
    ]


def test_page_links_its_notebook():
    text = script(DOCS / "_site/notebooks.py").with_download("# Title\n\nText.\n", "a")
    assert text == '# Title\n\n<p><a href="a.ipynb" download>Download this page as a notebook</a></p>\n\nText.\n'
