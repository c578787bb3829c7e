"""The table of contents of the site, read from the lists of links in the index pages.

An index page lists its pages in bullets or in a table, under one heading per part. A long part has a heading per group
of pages as well. GitHub shows these lists as they are, and the site makes its navigation from them, so there is no
second list that could differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

DOCS = Path(__file__).resolve().parents[1]

# A bullet or a row of a table, with its continuation lines. Links in prose do not belong to the table of contents.
_ITEM = re.compile(r"^(?:- |\|).*(?:\n  .*)*", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<page>(?!\w+:)[^)#\s]+)\.md\)")
_HEADING = re.compile(r"^(?P<level>###?) (?P<text>.+)$", re.MULTILINE)


def parts(index: Path) -> dict[str, list[str]]:
    """Return the pages that an index page lists, by heading. A page is a path without `.md`, relative to the index.

    The heading of a group begins with that of its part, as in `How-to: validation`. Only pages in the folder of the
    index page, or below it, are listed: other links are cross-references. A page that is linked again belongs to the
    first part that links it.
    """
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for heading, body in _sections(index.read_text(encoding="utf-8")):
        for item in _ITEM.findall(body):
            for page in _LINK.findall(item):
                if page not in seen and ".." not in PurePosixPath(page).parts:
                    seen.add(page)
                    found.setdefault(heading, []).append(page)
    return found


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each section. The text before the first heading has the heading ""."""
    heading, part, start = "", "", 0
    for found in _HEADING.finditer(text):
        yield heading, text[start : found.start()]
        title, start = found["text"].strip(), found.end()
        part = title if found["level"] == "##" else part
        heading = title if found["level"] == "##" else f"{part}: {title[0].lower()}{title[1:]}"
    yield heading, text[start:]


def listed(index: Path) -> list[Path]:
    """Return the files that an index page lists, and those that an `index.md` among them lists."""
    pages: list[Path] = []
    for names in parts(index).values():
        for name in names:
            page = index.parent / f"{name}.md"
            pages.append(page)
            if page.name == "index.md" and page.is_file():
                pages += listed(page)
    return pages


def with_toctrees(source: str, index: Path) -> str:
    """Return the source of an index page with hidden `toctree` directives, from which Sphinx makes the navigation."""
    trees = [
        "\n".join(["```{toctree}", ":hidden:", *([f":caption: {heading}"] if heading else []), "", *pages, "```"])
        for heading, pages in parts(index).items()
    ]
    return "\n\n".join([source, *trees]) + "\n"
