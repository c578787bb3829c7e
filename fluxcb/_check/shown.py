"""Strings that a REPL and a notebook display unchanged, without quotes and escapes."""

from __future__ import annotations

from html import escape

__all__ = ["ShownMermaid", "ShownPage", "ShownSvg", "ShownText"]


class ShownText(str):
    """A string whose `repr` is its own text, so that a REPL displays its lines.

    In all other respects it is an ordinary string: `print`, `==`, hashing and string methods work as usual.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class ShownSvg(ShownText):
    """The source of an SVG image, which a notebook displays as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


class ShownMermaid(ShownText):
    """The source of a Mermaid diagram, which a notebook displays as a picture if it supports Mermaid."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/vnd.mermaid": str(self)}


class ShownPage(ShownText):
    """The source of an HTML page, which a notebook displays in a separate frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # A frame keeps the style sheet of the page from affecting the notebook.
        return f'<iframe srcdoc="{escape(str(self))}" style="width:100%;height:640px;border:0"></iframe>'
