"""Escaping of text that a terminal may show, so that control characters in it do not reach the terminal."""

from __future__ import annotations

import re

__all__ = ["escape_block", "escape_line"]

# The control characters C0, DEL and C1, the line separators of Unicode, and surrogates, which no terminal encoding has.
_UNSAFE = "\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
_IN_LINE = re.compile(f"[{_UNSAFE}]")
_IN_BLOCK = re.compile(f"(?!\n)[{_UNSAFE}]")


def escape_line(text: str) -> str:
    r"""Return a text as one line, with escapes such as `\x1b` and `\n` in place of control characters and line breaks.

    Names and texts come from files that other people wrote, for example checkpoints and logs. A control character in
    one of them could set the title of the terminal, clear its screen, or type into it.

    Args:
        text: The text.
    """
    return _IN_LINE.sub(_escaped, text)


def escape_block(text: str) -> str:
    """Return a text like `escape_line`, but keep its line feeds.

    Args:
        text: The text.
    """
    return _IN_BLOCK.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
