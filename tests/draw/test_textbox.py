"""The width of text, and line breaking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxcb._draw.textbox import text_width, wrapped


def test_wide_characters_count_twice() -> None:
    assert text_width("ab", 10) == pytest.approx(2 * text_width("a", 10))
    assert text_width("日本", 10) == text_width("abcd", 10)
    assert text_width("e\u0301", 10) == text_width("e", 10)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], ("",)),
        (["one"], ("one",)),
        (["one", "two"], ("one two",)),
        (["one,", "two,", "three"], ("one, two,", "three")),
        (["ten_letter"], ("ten_letter",)),
        (["sixteen/letters_"], ("sixteen/", "letters_")),
        (["a\nb", "c\td"], ("a b c d",)),
        (["abcdefghijklm"], ("abcdefghij", "klm")),
        (["one", "two", "three", "four", "five"], ("one two", "three +2")),
    ],
)
def test_words_fill_lines(words: list[str], lines: tuple[str, ...]) -> None:
    assert wrapped(words, 10, 2, "+{}") == lines


@given(st.lists(st.text("ab,/. ", min_size=1, max_size=25), max_size=8), st.integers(6, 20), st.integers(1, 4))
def test_truncated_text_is_marked(words: list[str], cells: int, most: int) -> None:
    lines = wrapped(words, cells, most, "+{}")
    plain = "".join("".join(words).split())
    shown = "".join("".join(lines).split())
    assert len(lines) <= most
    if "+" in shown:
        kept, _, count = shown.partition("+")
        assert plain.startswith(kept)
        assert 0 < int(count) <= len(words)
    else:
        assert shown == plain
        assert all(len(line) <= cells for line in lines)
