"""The commands for callback sets. Each returns its exit code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fluxcb._check.explain_pair import explain_pair, find_callback
from fluxcb._check.ordering import moment_name
from fluxcb._declare.events import TracedEvent
from fluxcb._declare.signatures import shown_path
from fluxcb._errors import DeclarationError, did_you_mean, nearest
from fluxcb._terminal import escape_block
from fluxcb._tools.line_filling import filled, line_width
from fluxcb._tools.project import Project, find_project
from fluxcb._tools.verifying import Verdict, graph_by_name, graph_to_json, learner_by_name, verify

if TYPE_CHECKING:
    from fluxcb._check.graph import CallbackGraph
    from fluxcb._declare.declared import Moment
    from fluxcb._run.learner import Learner

__all__ = ["UsageError", "ablate", "check", "events", "explain", "graph", "list_callbacks", "replay"]


T = TypeVar("T")

_SET_NAME = re.compile(r"[\w.]+:[\w.]+")  # `module:name`; the name of a callback has no colon, or has brackets as well


class UsageError(Exception):
    """The user named something that does not exist. This is not a problem of a callback set."""


def check(names: Sequence[str], level: str | None, *, as_json: bool) -> int:
    """Check callback sets. Return 1 if one is invalid."""
    project = _with_usage_errors(lambda: find_project(Path.cwd()))
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
    name: str | None,
    form: str | None,
    event: str | None,
    phase: str | None,
    out: Path | None,
    *,
    costs: bool,
    as_json: bool,
) -> int:
    """Draw a graph. Return 1 if the set is invalid, in which case it is drawn as well."""
    found = _learner(name).callbacks.graph if costs else _graph(name)
    chosen = _with_usage_errors(lambda: _moment(found, event, phase)) if event or phase else None
    if as_json:
        _write_json(graph_to_json(found))
    else:
        form = form or (_with_usage_errors(lambda: _form_of(out)) if out is not None else "tree")
        shown_event, shown_phase = chosen or (None, None)
        text = _with_usage_errors(lambda: found.render(form, event=shown_event, phase=shown_phase, costs=costs))
        if out is None:
            _write(text.rstrip("\n"))
        else:
            out.write_text(text, encoding="utf-8")
            _write(f"wrote {out}")
    return _problems(found)


def explain(a: str | None, b: str | None, name: str | None, *, costs: bool, as_json: bool) -> int:
    """Explain the order of two callbacks, or of all callbacks if `b` is None. Return 1 if the set is invalid.

    Args:
        a: A callback. If `b` is None, the name of the set, or None for the only set.
        b: Another callback, or None.
        name: The name of the set, or None for the only set.
        costs: Whether to show what the callbacks of a Learner cost, instead of their order.
        as_json: Whether to print JSON.
    """
    if costs and b is not None:
        raise UsageError(
            "`fluxcb explain --costs` shows the costs of a whole set, not of two callbacks.\n"
            "  fix:   leave the callbacks out: `fluxcb explain --costs pkg.train:make_learner`"
        )
    if costs:
        return _explain_costs(a, as_json=as_json)
    if a is None or b is None:
        return _explain_all(a, as_json=as_json)
    # `explain ClipGradients pkg.train:callbacks` has a set in place of the second callback.
    if name is None and _SET_NAME.fullmatch(b):
        raise UsageError(
            f"`fluxcb explain {a} {b}` names one callback and a callback set, and a second callback is missing.\n"
            f"  fix:   name another callback: `fluxcb explain {a} OTHER {b}`\n"
            f"     or: explain the order of all callbacks: `fluxcb explain {b}`"
        )
    found = _graph(name)
    one, other = _with_usage_errors(lambda: (find_callback(found, a), find_callback(found, b)))
    text = _with_usage_errors(lambda: explain_pair(found, one, other))
    if as_json:
        _write_json({"a": one.label, "b": other.label, "explanation": text.splitlines()})
    else:
        _write(text)
    pair = {one.position, other.position}
    clashing = any({clash.a.declared.position, clash.b.declared.position} == pair for clash in found.conflicts)
    return 1 if clashing else 0


def _explain_costs(name: str | None, *, as_json: bool) -> int:
    learner = _learner(name)
    if as_json:
        from fluxcb._run.costs import learner_costs

        _write_json(learner_costs(learner._core).to_json())
    else:
        _write(learner.explain(costs=True))
    return 0


def _explain_all(name: str | None, *, as_json: bool) -> int:
    if name is not None and ":" not in name:
        sets = _with_usage_errors(lambda: find_project(Path.cwd())).sets
        example = nearest(name, sets) or next(iter(sets), "pkg.train:callbacks")
        raise UsageError(
            f"`fluxcb explain {name}` names neither a callback set nor two callbacks.\n"
            f"  fix:   explain the order of all callbacks: `fluxcb explain {example}`\n"
            f"     or: name another callback: `fluxcb explain {name} OTHER`"
        )
    found = _graph(name)
    text = found.explain()
    if as_json:
        _write_json({"explanation": text.splitlines()})
    else:
        _write(text.rstrip("\n"))
    return _problems(found)


def events(name: str | None, *, as_json: bool) -> int:
    """Show the moments, and the callbacks that run at each moment."""
    found = _graph(name)
    if as_json:
        _write_json(graph_to_json(found)["moments"])
        return _problems(found)
    rows = [
        (
            event.__name__,
            phase.__name__,
            "traced" if issubclass(event, TracedEvent) else "host",
            _handler_words(found, (event, phase)),
        )
        for event, phase in found.moments
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        head = "  ".join(f"{cell:<{width}}" for cell, width in zip(row[:3], widths, strict=True))
        _write_filled(f"{head}  ", row[3])
    return _problems(found)


def list_callbacks(*, as_json: bool) -> int:
    """List the callbacks that fluxcb provides."""
    from dataclasses import asdict

    from fluxcb._tools.catalogue import listed

    if as_json:
        _write_json([asdict(callback) for callback in listed()])
        return 0
    for callback in listed():
        _write(callback.shown)
        _write_filled("  ", callback.what.split())
        lines = (
            ("reads", ", ".join(callback.reads)),
            ("writes", ", ".join(callback.writes)),
            ("runs", "; ".join(callback.runs) or "only at construction"),
            ("cost", callback.cost),
            ("origin", callback.origin),
        )
        for title, text in lines:
            if text:
                _write_filled(f"    {title:<7} ", text.split())
    return 0


def ablate(
    name: str,
    callbacks: Sequence[str],
    epochs: int | None,
    steps: int | None,
    seeds: Sequence[int] | None,
    *,
    as_json: bool,
) -> int:
    """Train with and without callbacks, and print the differences."""
    from fluxcb._tools.ablation import ablate as ablated

    result = ablated(_maker(name), callbacks or None, epochs=epochs, steps=steps, seeds=seeds)
    if as_json:
        _write_json(result.to_dicts())
    else:
        _write(str(result))
    return 0


def replay(
    run: Path,
    steps: tuple[int, int],
    name: str | None,
    watch: Sequence[str],
    save: Path | None,
    lineage: str | None = None,
) -> int:
    """Replay steps of a run. Return 1 if the replay differs from the run."""
    from fluxcb._declare.wrappers import every
    from fluxcb.callbacks import DumpArrays, PrintArrays

    if save is not None and not watch:
        raise UsageError("`--save` has no values to write.\n  fix:   name them, e.g. `--watch step.grads`")
    observers: list[Any] = []
    if watch:
        observer = PrintArrays(watch) if save is None else DumpArrays(watch, save)
        # Without a value of the step, these callbacks run at Trigger.
        of_step = any(value.split(".")[0] == "step" for value in watch)
        observers.append(observer if of_step else every(observer, steps=1))
    learner = _maker(name or _only_set(_LEARNER_OPTION))()
    result = learner.replay(run, steps=steps, callbacks=observers, lineage=lineage)
    _write(str(result))
    _name_folder(save)
    return 1 if result.differences else 0


def replay_bad_step(run: Path, step: int, name: str | None, watch: Sequence[str], save: Path | None) -> int:
    """Replay a skipped step of a run. Return 1 if the replay differs from the record."""
    from fluxcb.callbacks import DumpArrays, PrintArrays

    observers: list[Any] = [PrintArrays(watch)] if watch and save is None else []
    if save is not None:
        observers.append(DumpArrays(list(dict.fromkeys(("step.batch", "step.grads", *watch))), save))
    result = _maker(name or _only_set(_LEARNER_OPTION))().replay(run, bad_step=step, callbacks=observers)
    _write(str(result))
    _name_folder(save)
    return 0 if result.identical else 1


def _name_folder(save: Path | None) -> None:
    if save is not None:
        _write(f"The values are in {save}.")


# -- finding -----------------------------------------------------------------------------------


def _with_usage_errors(call: Callable[[], T]) -> T:
    """Call a function that looks up a name that the user passed, and turn its errors into UsageError."""
    try:
        return call()
    except DeclarationError as error:
        raise UsageError(str(error)) from error


def _maker(name: str) -> Callable[..., Any]:
    """Return the function `module:name` that builds Learners."""
    from fluxcb._tools.targets import load

    project = _with_usage_errors(lambda: find_project(Path.cwd()))
    target = load(name, project.root)
    if not target.makes:
        raise UsageError(
            f"`{name}` is not a function.\n  fix:   name a function without required arguments that builds a Learner"
        )
    return target.get


def _graph(name: str | None) -> CallbackGraph:
    """Return the graph of the named set, or of the only declared set."""
    return graph_by_name(*_found(name))


def _learner(name: str | None) -> Learner:
    """Return the Learner of the named set, or of the only declared set."""
    return learner_by_name(*_found(name))


def _found(name: str | None) -> tuple[str, Path]:
    """Return the name of a set, and the folder to import it from."""
    project = _with_usage_errors(lambda: find_project(Path.cwd()))
    return name or _only_set(), project.root


_CHECK = "fluxcb check pkg.train:callbacks"
_LEARNER_OPTION = "--learner pkg.train:make_learner"


def _only_set(naming: str = _CHECK) -> str:
    """Return the name of the only declared set.

    Args:
        naming: An example of a command or option that names a set, for the error message.
    """
    project = _with_usage_errors(lambda: find_project(Path.cwd()))
    if not project.sets:
        raise _nothing(project, naming)
    name, *others = project.sets
    if others:
        raise UsageError(
            "\n  ".join([f"{_source(project, named=False)} declares several sets; name one of", *project.sets])
        )
    return name


def _nothing(project: Project, naming: str = _CHECK) -> UsageError:
    if project.file is not None:
        where = f"{shown_path(str(project.file))} has no callback sets in [tool.fluxcb]"
    else:
        where = f"there is no pyproject.toml in {project.root} or above it"
    return UsageError(
        f"No callback set was found: {where}, and no set was named.\n"
        '  fix:   add `[tool.fluxcb]` with `callbacks = ["pkg.train:callbacks"]`\n'
        f"     or: name a set, e.g. `{naming}`"
    )


def _source(project: Project, *, named: bool) -> str:
    if named:
        return f"Sets as named, imported from {shown_path(str(project.root))}"
    return shown_path(str(project.file))


def _moment(found: CallbackGraph, event: str | None, phase: str | None) -> Moment:
    """Return the moment with these names. Without an event or a phase, return the first moment that matches."""
    for moment in found.moments:
        if event in (None, moment[0].__name__) and phase in (None, moment[1].__name__, moment[1].name):
            return moment
    names = [moment_name(moment) for moment in found.moments]
    events = [moment[0].__name__ for moment in found.moments]
    phases = [name for moment in found.moments for name in (moment[1].__name__, moment[1].name)]
    requested = " x ".join(filter(None, (event, phase)))
    near = [
        did_you_mean(name, known) for name, known in ((event, events), (phase, phases)) if name and name not in known
    ]
    raise DeclarationError(
        f"No callback runs at {requested}.{''.join(near)}", fix=f"name one of the moments: {', '.join(names) or 'none'}"
    )


def _form_of(out: Path) -> str:
    forms = {".svg": "svg", ".html": "html", ".dot": "dot", ".gv": "dot", ".mmd": "mermaid", ".txt": "tree"}
    if out.suffix not in forms:
        raise DeclarationError(
            f"The file name {out} does not determine a format.",
            fix=f"use one of the extensions {', '.join(forms)}, or pass --format",
        )
    return forms[out.suffix]


# -- printing ----------------------------------------------------------------------------------


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
    """Return texts `label: rest`, merged if the rest is the same, because instances of one class share their source."""
    labels: dict[str, list[str]] = {}
    for text in texts:
        label, _, rest = text.partition(": ")
        labels.setdefault(rest, []).append(label)
    return [f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {rest}" for rest, of in labels.items()]


def _problems(found: CallbackGraph) -> int:
    """Print the problems of a set that was drawn to standard error."""
    for problem in found.problems:
        sys.stderr.write(escape_block(f"{type(problem).__name__}: {problem}\n\n"))
    return 1 if found.problems else 0


def _handler_words(found: CallbackGraph, moment: Moment) -> list[str]:
    """Return the callbacks of a moment, separated by commas. Lines may break before the schedules of one."""
    words = [[h.declared.label, *([str(list(h.schedules))] if h.schedules else [])] for h in found.orders[moment]]
    for entry in words[:-1]:
        entry[-1] += ","
    return [word for entry in words for word in entry]


def _count(things: Any, what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _write(text: str) -> None:
    sys.stdout.write(f"{escape_block(text)}\n")


def _write_filled(head: str, words: Sequence[str]) -> None:
    for line in filled(head, words, line_width()):
        _write(line)


def _write_json(value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    # JSON has no `\x9b`, so the escapes must be those of JSON.
    _write(text if escape_block(text) == text else json.dumps(value, indent=1))
