"""Render a timeline as a self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from itertools import groupby

from fluxcb._draw.drawing import Arc, Timeline
from fluxcb._draw.svg import to_svg
from fluxcb._draw.textbox import escaped

__all__ = ["to_page"]

_HEADINGS = {"order": "after", "cycle": "in a cycle with", "conflict": "in conflict with", "data": "reads from"}


def to_page(timeline: Timeline) -> str:
    """Return an HTML page with the picture of a timeline, and with the details of each moment below it."""
    style = (files("fluxcb._draw") / "page.css").read_text(encoding="utf-8")
    arcs_of: dict[int, list[Arc]] = {}
    for arc in timeline.arcs:
        arcs_of.setdefault(arc.later, []).append(arc)
        if arc.kind == "conflict":
            arcs_of.setdefault(arc.earlier, []).append(arc)
    moments = groupby(range(len(timeline.rows)), key=lambda i: timeline.rows[i].moment)
    problems = "".join(f'<pre class="problem">{escaped(problem)}</pre>\n' for problem in timeline.problems)
    details = "".join(part for moment, rows in moments for part in _moment(timeline, moment, list(rows), arcs_of))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escaped(timeline.title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escaped(timeline.title)}</h1>
<p>Handlers run from top to bottom. Point to a row or a line to highlight it and to see its details.</p>
{problems}<div class="picture">
{to_svg(timeline)}</div>
<h2>Details</h2>
{details}</body>
</html>
"""


def _moment(timeline: Timeline, moment: str, rows: list[int], arcs_of: dict[int, list[Arc]]) -> Iterable[str]:
    count = f"{len(rows)} {'handler' if moment else 'callback'}{'' if len(rows) == 1 else 's'}"
    yield f"<details>\n<summary>{escaped(moment or 'At no moment')} <small>{count}</small></summary>\n"
    for i in rows:
        row = timeline.rows[i]
        yield f"<h3>{escaped(row.callback)}{escaped(f'.{row.handler}' if row.handler else '')}</h3>\n<dl>\n"
        for name, lines in row.details:
            yield _entry(name, lines)
        for kind, name in _HEADINGS.items():
            arcs = [arc for arc in arcs_of.get(i, ()) if arc.kind == kind]
            others = (timeline.rows[arc.earlier if arc.later == i else arc.later].callback for arc in arcs)
            lines = [f"{other}: {arc.why}" for other, arc in zip(others, arcs, strict=True)]
            yield _entry(name, lines) if lines else ""
        yield "</dl>\n"
    yield "</details>\n"


def _entry(name: str, lines: Iterable[str]) -> str:
    return f"<dt>{escaped(name)}</dt>{''.join(f'<dd>{escaped(line)}</dd>' for line in lines)}\n"
