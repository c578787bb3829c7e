"""Several drawings as one HTML page that stands alone: choose one, and click on what it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from fluxcb._draw.drawing import Drawing
from fluxcb._draw.svg import WORDS, to_svg

__all__ = ["to_page"]


def to_page(drawings: Mapping[str, Drawing]) -> str:
    """Return drawings as an HTML page without any reference to another file.

    Args:
        drawings: One or more drawings, by the names under which the page's select box offers them; the first is shown
            first.
    """
    here = files("fluxcb._draw")
    title = next(iter(drawings.values())).title
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(drawings))
    templates = "\n".join(
        f'<template id="drawing-{i}">{to_svg(drawing)}</template>' for i, drawing in enumerate(drawings.values())
    )
    # In a script element, "<" could end it; as an escape it means the same to JSON.
    data = json.dumps([_as_json(drawing) for drawing in drawings.values()]).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{(here / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>Callback graph</h1>
<label>Moment <select id="moment" autocomplete="off">{options}</select></label>
<span><button type="button" id="out" aria-label="zoom out">&minus;</button>
<button type="button" id="in" aria-label="zoom in">+</button>
<button type="button" id="fit">fit</button></span>
<span id="hint">Click a box or an edge for details; Tab and Enter do, too. Drag to move, Ctrl and wheel to zoom.</span>
</header>
<main id="stage"></main>
<aside id="panel" aria-live="polite"></aside>
{templates}
<script type="application/json" id="drawings">{data}</script>
<script>
{(here / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _as_json(drawing: Drawing) -> dict[str, Any]:
    number = {node.key: i for i, node in enumerate(drawing.nodes)}
    return {
        "title": drawing.title,
        "problems": drawing.problems,
        "nodes": [{"title": n.title, "where": WORDS[n.kind], "details": n.details} for n in drawing.nodes],
        "links": [
            {
                "earlier": number[link.earlier],
                "later": number[link.later],
                "label": link.label,
                "reasons": link.reasons,
                "moments": link.moments,
                "kind": link.kind,
                "implied": link.implied,
            }
            for link in drawing.links
        ],
    }
