"""The gallery has one page per algorithm, with fewer than 40 lines of algorithm code."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

GALLERY = Path(__file__).resolve().parents[2] / "docs/gallery"
PAGES = sorted(page for page in GALLERY.glob("*.md") if page.name != "index.md")
ALGORITHMS = {"dqn", "distillation", "gan", "mixup", "moco", "sam", "transformer", "vae", "wgan"}
MARKED = re.compile(r"^<!-- algorithm -->\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SPEC = importlib.util.spec_from_file_location("make_gallery", GALLERY.parent / "images/make_gallery.py")
MAKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MAKER)


def algorithm(page: Path) -> list[str]:
    """Return the non-blank lines of the block that is marked as the algorithm."""
    text = page.read_text(encoding="utf-8")
    blocks = MARKED.findall(text)
    assert text.count("<!-- algorithm -->") == len(blocks) == 1, f"{page.name} must mark one ```python fence"
    return [line for line in blocks[0].splitlines() if line.strip()]


def test_every_algorithm_has_a_page():
    assert {page.stem for page in PAGES} == ALGORITHMS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_algorithm_has_fewer_than_40_lines(page):
    lines = algorithm(page)
    assert 0 < len(lines) < 40
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_prints_number_that_it_asserts(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- output -->" in text
    assert re.search(r"^ *assert ", text, re.MULTILINE)


def test_index_links_every_page():
    linked = re.findall(r"\]\((\w+)\.md\)", (GALLERY / "index.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(page.stem for page in PAGES)


def test_every_page_has_current_picture():
    assert MAKER.pages() == PAGES
    made_by = json.loads(MAKER.SOURCES.read_text(encoding="utf-8"))
    assert {page.stem: MAKER.checksum(page) for page in PAGES} == made_by, (
        "run `uv run --group integrations python docs/images/make_gallery.py`"
    )
    assert sorted(path.stem for path in MAKER.PICTURES.glob("*.png")) == sorted(made_by)
