"""Texts that a REPL and a notebook display as they are, instead of quoted and escaped."""

from __future__ import annotations

from html import escape

__all__ = ["ShownMermaid", "ShownPage", "ShownSvg", "ShownText"]


class ShownText(str):
    """A string whose `repr` is its own text, so that a REPL displays its lines.

    It is an ordinary string in every other way: `print`, `==`, hashing and string methods work as usual.
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
    """The source of an HTML page, which a notebook displays in a frame of its own."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # A frame, because the page's style sheet and scripts must not affect the notebook.
        return f'<iframe srcdoc="{escape(str(self))}" style="width:100%;height:640px;border:0"></iframe>'
