"""What the commands about callback sets do; each returns the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fluxcb._check.between import between, find
from fluxcb._check.graph import moment_name
from fluxcb._declare.dispatch import shown_path
from fluxcb._declare.events import TracedEvent
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._tools.project import Project, find_project
from fluxcb._tools.verifying import Verdict, graph_by_name, verify

if TYPE_CHECKING:
    from fluxcb._check.graph import CallbackGraph
    from fluxcb._declare.declared import Moment

__all__ = ["UsageError", "check", "events", "explain", "graph", "list_callbacks"]


T = TypeVar("T")


class UsageError(Exception):
    """What was asked for does not exist; says nothing about the set that was looked at."""


def check(names: Sequence[str], level: str | None, *, as_json: bool) -> int:
    """Check callback sets; 1 if one is not valid."""
    project = _asked(lambda: find_project(Path.cwd()))
    sets = tuple(names) or project.sets
    if not sets:
        raise _nothing(project)
    level = level or project.level
    verdicts = [verify(name, project.root, level) for name in sets]
    if as_json:
        _write_json(
            {"project": str(project.file or project.root), "level": level, "sets": [v.to_json() for v in verdicts]}
        )
    else:
        _write(f"{_source(project, named=bool(names))}, level {level}")
        width = max(len(name) for name in sets)
        for verdict in verdicts:
            _write(_verdict(verdict, width))
        failed = sum(1 for verdict in verdicts if verdict.problems)
        _write(f"\n{failed} of {_count(verdicts, 'set')} failed." if failed else f"\n{_count(verdicts, 'set')} valid.")
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def graph(
    name: str | None, form: str | None, event: str | None, phase: str | None, out: Path | None, *, as_json: bool
) -> int:
    """Draw a graph; 1 if the set is not valid, which is drawn all the same."""
    found = _graph(name)
    chosen = _asked(lambda: _moment(found, event, phase)) if event or phase else None
    if as_json:
        _write_json(_as_json(found))
    else:
        form = form or (_asked(lambda: _form_of(out)) if out is not None else "tree")
        text = found.render(form, event=chosen[0], phase=chosen[1]) if chosen else found.render(form)
        if out is None:
            _write(text.rstrip("\n"))
        else:
            out.write_text(text, encoding="utf-8")
            _write(f"wrote {out}")
    return _problems(found)


def explain(a: str, b: str, name: str | None, *, as_json: bool) -> int:
    """Tell how two callbacks stand to each other; 1 if the set is not valid."""
    found = _graph(name)
    one, other = _asked(lambda: (find(found, a), find(found, b)))
    text = _asked(lambda: between(found, one, other))
    if as_json:
        _write_json({"a": one.label, "b": other.label, "explanation": text.splitlines()})
    else:
        _write(text)
    pair = {one.position, other.position}
    clashing = any({clash.a.declared.position, clash.b.declared.position} == pair for clash in found.conflicts)
    return 1 if clashing else 0


def events(name: str | None, *, as_json: bool) -> int:
    """Show the moments, and who runs then."""
    found = _graph(name)
    if as_json:
        _write_json(_as_json(found)["moments"])
        return _problems(found)
    rows = [
        (
            event.__name__,
            phase.__name__,
            "traced" if issubclass(event, TracedEvent) else "host",
            _who(found, (event, phase)),
        )
        for event, phase in found.moments
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        head = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        _write(f"{head}  {row[3]}".rstrip())
    return _problems(found)


def list_callbacks(*, as_json: bool) -> int:
    """List the callbacks that come with fluxcb."""
    from dataclasses import asdict

    from fluxcb._tools.catalogue import listed

    if as_json:
        _write_json([asdict(callback) for callback in listed()])
        return 0
    for callback in listed():
        _write(f"{callback.shown}\n  {callback.what}")
        lines = (
            ("reads", ", ".join(callback.reads)),
            ("writes", ", ".join(callback.writes)),
            ("runs", "; ".join(callback.runs) or "only at construction"),
            ("cost", callback.cost),
            ("origin", callback.origin),
        )
        for title, text in lines:
            if text:
                _write(f"    {title:<7} {text}")
    return 0


# -- finding -----------------------------------------------------------------------------------


def _asked(call: Callable[[], T]) -> T:
    """Look something up that the user named."""
    try:
        return call()
    except DeclarationError as error:
        raise UsageError(str(error)) from error


def _graph(name: str | None) -> CallbackGraph:
    """Return the graph of the named set, or of the only one declared."""
    project = _asked(lambda: find_project(Path.cwd()))
    if name is None:
        if not project.sets:
            raise _nothing(project)
        name, *others = project.sets
        if others:
            raise UsageError(
                "\n  ".join([f"{_source(project, named=False)} declares several sets; name one of", *project.sets])
            )
    return graph_by_name(name, project.root)


def _nothing(project: Project) -> UsageError:
    if project.file is not None:
        where = f"{shown_path(str(project.file))} has no callback sets in [tool.fluxcb]"
    else:
        where = f"there is no pyproject.toml in {project.root} or above it"
    return UsageError(
        f"Nothing to look at: {where}, and no set was named.\n"
        '  fix:   add `[tool.fluxcb]` with `callbacks = ["pkg.train:callbacks"]`\n'
        "     or: name a set, e.g. `fluxcb check pkg.train:callbacks`"
    )


def _source(project: Project, *, named: bool) -> str:
    if named:
        return f"Sets as named, imported from {shown_path(str(project.root))}"
    return shown_path(str(project.file))


def _moment(found: CallbackGraph, event: str | None, phase: str | None) -> Moment:
    """Return the moment that names mean; without an event or a phase, the first that fits."""
    for moment in found.moments:
        if event in (None, moment[0].__name__) and phase in (None, moment[1].__name__, moment[1].name):
            return moment
    names = [moment_name(moment) for moment in found.moments]
    asked = " x ".join(filter(None, (event, phase)))
    raise DeclarationError(
        f"Nobody runs at {asked}.{did_you_mean(asked, names)}", fix=f"the moments are {', '.join(names) or 'none'}"
    )


def _form_of(out: Path) -> str:
    forms = {".svg": "svg", ".html": "html", ".dot": "dot", ".gv": "dot", ".mmd": "mermaid", ".txt": "tree"}
    if out.suffix not in forms:
        raise DeclarationError(
            f"The name {out} does not tell a format.", fix=f"end it in one of {', '.join(forms)}, or give --format"
        )
    return forms[out.suffix]


# -- telling -----------------------------------------------------------------------------------


def _verdict(verdict: Verdict, width: int) -> str:
    lines = []
    if verdict.problems:
        lines.append(f"{verdict.name:<{width}}  FAILED")
        lines.append(_indented(verdict.text()))
    else:
        graph = verdict.graph
        counts = f"{_count(graph.declared, 'callback')}, {_count(graph.edges, 'edge')}" if graph is not None else ""
        lines.append(f"{verdict.name:<{width}}  ok  {counts}")
    lines += [_indented(f"advice: {advice}") for advice in verdict.advice]
    lines += [_indented(f"not followed: {unclear}") for unclear in _grouped(verdict.unclear)]
    return "\n".join(lines)


def _grouped(texts: Sequence[str]) -> list[str]:
    """Return texts `label: rest` once for each rest: instances of one class have the same source."""
    labels: dict[str, list[str]] = {}
    for text in texts:
        label, _, rest = text.partition(": ")
        labels.setdefault(rest, []).append(label)
    return [f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {rest}" for rest, of in labels.items()]


def _problems(found: CallbackGraph) -> int:
    """Tell on standard error what is wrong with a set that was drawn."""
    for problem in found.problems:
        sys.stderr.write(f"{type(problem).__name__}: {problem}\n\n")
    return 1 if found.problems else 0


def _who(found: CallbackGraph, moment: Moment) -> str:
    return ", ".join(
        f"{handler.declared.label}{f' {list(handler.schedules)}' if handler.schedules else ''}"
        for handler in found.orders[moment]
    )


def _as_json(found: CallbackGraph) -> dict[str, Any]:
    return {
        "callbacks": [
            {"label": d.label, "class": f"{d.cls.__module__}.{d.cls.__qualname__}", "where": d.where}
            for d in found.declared
        ],
        "edges": [
            {
                "earlier": found.declared[i].label,
                "later": found.declared[j].label,
                "reasons": edge.reasons,
                "moments": [moment_name(moment) for moment in edge.moments],
            }
            for (i, j), edge in found.edges.items()
        ],
        "moments": [
            {
                "event": event.__name__,
                "phase": phase.__name__,
                "kind": "traced" if issubclass(event, TracedEvent) else "host",
                "handlers": [
                    {
                        "callback": handler.declared.label,
                        "handler": handler.name,
                        "due": [repr(schedule) for schedule in handler.schedules],
                        "where": handler.where,
                    }
                    for handler in found.orders[event, phase]
                ],
            }
            for event, phase in found.moments
        ],
        "problems": [f"{type(problem).__name__}: {problem}" for problem in found.problems],
    }


def _count(things: Any, what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _write_json(value: Any) -> None:
    _write(json.dumps(value, indent=1, ensure_ascii=False))
