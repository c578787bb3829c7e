"""From docstrings as the package writes them to reStructuredText that autodoc understands.

Docstrings have Google sections, code in single backticks, and no other markup. What reStructuredText would take for
markup, such as the `*` of `*criteria`, is escaped. The path of a page, such as docs/errors.md, becomes a link.
"""

from __future__ import annotations

import re
from typing import Any

# From a `>>>` to the next blank line; code that stays as it is.
_EXAMPLE = re.compile(r"^[ \t]*>>>.*(?:\n(?![ \t]*$).+)*", re.MULTILINE)
_CODE_OR_MARKUP = re.compile(
    r"(?<!`)`(?P<code>[^`]+)`(?!`)(?P<suffix>(?=\w))?|(?P<markup>\*|\||(?<=\w)_(?!\w))|\bdocs/(?P<page>[\w/-]+)\.md\b"
)
_LISTS = re.compile(r"^(?P<title>Access|Runs):\n(?P<body>(?:    .*\n?)+)", re.MULTILINE)
_RESULTS = re.compile(r"(?<=^Returns:\n)(?:    .*\n?)+", re.MULTILINE)


_COLON = "\N{RATIO}"
"""Stands for a colon while napoleon reads a docstring."""


def before_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert the lines of a docstring; autodoc calls this before napoleon reads the sections."""
    # Napoleon would read a type in front of a colon. The docstrings contain no types.
    text = _RESULTS.sub(lambda found: found.group().replace(":", _COLON), to_rst("\n".join(lines)))
    lines[:] = text.split("\n")
    if what == "property":
        lines[0] = lines[0].replace(":", _COLON)


def after_napoleon(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put the colons back; autodoc calls this after napoleon."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def to_rst(text: str) -> str:
    """Return a docstring as reStructuredText with Google sections."""
    text = _LISTS.sub(lambda found: f"{found['title']}:\n{_bulleted(found['body'])}", text)
    parts, end = [], 0
    for example in _EXAMPLE.finditer(text):
        parts += [_CODE_OR_MARKUP.sub(_escaped, text[end : example.start()]), example.group()]
        end = example.end()
    return "".join([*parts, _CODE_OR_MARKUP.sub(_escaped, text[end:])])


def _bulleted(body: str) -> str:
    """Return the lines of a section as a list; deeper lines continue an item."""
    return re.sub(
        r"^    (?=\S)", "    - ", re.sub(r"^ {5,}(?=\S)", "      ", body, flags=re.MULTILINE), flags=re.MULTILINE
    )


def _escaped(found: re.Match[str]) -> str:
    if found["markup"]:
        return "\\" + found["markup"]
    if found["page"]:
        return f":doc:`/{found['page']}`"
    # A letter after the closing backticks, as in the plural of a name, needs an escaped space.
    return f"``{found['code']}``" + ("\\ " if found["suffix"] is not None else "")
