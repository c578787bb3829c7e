"""The gallery keeps what its index says: one page per algorithm, and less than 40 lines of it."""

import re
from pathlib import Path

import pytest

GALLERY = Path(__file__).resolve().parents[2] / "docs/gallery"
PAGES = sorted(page for page in GALLERY.glob("*.md") if page.name != "index.md")
ALGORITHMS = {"dqn", "distillation", "gan", "mixup", "moco", "sam", "transformer", "vae", "wgan"}
MARKED = re.compile(r"^<!-- algorithm -->\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def algorithm(page: Path) -> list[str]:
    """Return the lines of the block that is marked as the algorithm, without blank ones."""
    text = page.read_text(encoding="utf-8")
    blocks = MARKED.findall(text)
    assert text.count("<!-- algorithm -->") == len(blocks) == 1, f"{page.name} must mark one ```python fence"
    return [line for line in blocks[0].splitlines() if line.strip()]


def test_every_algorithm_has_a_page():
    assert {page.stem for page in PAGES} == ALGORITHMS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_algorithm_has_less_than_40_lines(page):
    lines = algorithm(page)
    assert 0 < len(lines) < 40
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_shows_a_number_that_it_checks(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- output -->" in text
    assert re.search(r"^ *assert ", text, re.MULTILINE)


def test_the_index_links_every_page():
    linked = re.findall(r"\]\((\w+)\.md\)", (GALLERY / "index.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(page.stem for page in PAGES)
