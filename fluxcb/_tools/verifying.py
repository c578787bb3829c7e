"""Verification of a callback set by name, for `fluxcb check` and the pytest plugin."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._check.ordering import moment_name
from fluxcb._check.preflight import unchecked_graph
from fluxcb._check.source_audit import audit_source
from fluxcb._check.uncalled_handlers import uncalled_handlers
from fluxcb._declare.events import TracedEvent
from fluxcb._declare.phases import TrainingPhase, ValidationPhase
from fluxcb._declare.signatures import shown_path
from fluxcb._errors import CheckError, DeclarationError, FluxcbError
from fluxcb._run.check import is_learner
from fluxcb._tools.project import LEVELS
from fluxcb._tools.targets import Target, load
from fluxcb.callbacks import with_defaults

if TYPE_CHECKING:
    from fluxcb._check.graph import CallbackGraph
    from fluxcb._run.learner import Learner

__all__ = ["Verdict", "graph_by_name", "graph_to_json", "learner_by_name", "verify"]

_LIBRARY = Path(__file__).resolve().parents[1]


@dataclass
class Verdict:
    """The result of the verification of a callback set.

    Attributes:
        name: `module:name`.
        level: How thoroughly the set was checked.
        problems: The problems of the set.
        advice: Possible improvements, such as permissions that nothing uses, and what may have caused the problems.
        unclear: Places where the source check could not follow a handler.
        graph: The graph of the set, or None if it could not be built.
        in_testlearner: Whether the callbacks were tested with the model of `fluxcb.testing.testlearner`.
    """

    name: str
    level: str
    problems: list[FluxcbError] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    graph: CallbackGraph | None = None
    in_testlearner: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        declared = self.graph.declared if self.graph is not None else []
        return {
            "set": self.name,
            "level": self.level,
            "ok": not self.problems,
            "callbacks": [d.label for d in declared],
            "problems": [
                {"type": type(p).__name__, "what": p.what, "where": list(p.where), "why": p.why, "fix": list(p.fix)}
                for p in self.problems
            ],
            "advice": self.advice,
            "unclear": self.unclear,
        }

    def text(self) -> str:
        """Return the problems as text that begins with the first sentence of the first problem."""
        return "\n\n".join(f"{type(problem).__name__}: {problem}" for problem in self.problems)


def verify(name: str, root: Path, level: str) -> Verdict:
    """Verify a callback set.

    Args:
        name: `module:name`.
        root: The folder to import from.
        level: One of `LEVELS`. With `graph`, JAX is not used, unless the set is a Learner.
    """
    verdict = Verdict(name, level)
    try:
        target = load(name, root)
        _look(target, verdict)
        if not verdict.problems and LEVELS.index(level) >= LEVELS.index("trace"):
            with _silence():
                _try(target, verdict)
    except FluxcbError as error:
        verdict.problems += _each(error)
    if verdict.problems and verdict.in_testlearner:
        verdict.advice.insert(
            0,
            "this list of callbacks was tested with the small model of `fluxcb.testing.testlearner`, which has one "
            "output; if the callbacks need your model and data, name a function that returns your Learner",
        )
    return verdict


def graph_by_name(name: str, root: Path) -> CallbackGraph:
    """Return the graph of a callback set, including its `problems`.

    Raises:
        FluxcbError: The set cannot be loaded, or a single declaration is invalid.
    """
    return _graph(load(name, root).get())


def graph_to_json(found: CallbackGraph) -> dict[str, Any]:
    """Return a graph as plain data that `json.dumps` accepts."""
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


def learner_by_name(name: str, root: Path) -> Learner:
    """Return a Learner by name.

    Raises:
        FluxcbError: The set cannot be loaded, or it is a list of callbacks.
    """
    value = load(name, root).get()
    if not is_learner(value):
        raise DeclarationError(
            f"`{name}` is a list of callbacks, so it has no costs.",
            why="what a callback costs depends on the model and the batch",
            fix="name a Learner, or a function without required arguments that returns one",
        )
    return value


def _graph(value: Any) -> CallbackGraph:
    if is_learner(value):
        return value.callbacks.graph
    return unchecked_graph(with_defaults(value), (TrainingPhase, ValidationPhase))


def _look(target: Target, verdict: Verdict) -> None:
    graph = verdict.graph = _graph(target.get())
    source = audit_source(graph.declared)
    verdict.problems += [*graph.problems, *source.problems]
    verdict.advice += [*source.unused, *(text for _, text in uncalled_handlers(graph))]
    # Unclear places in fluxcb's own callbacks are omitted, because fluxcb's tests cover them.
    verdict.unclear += [text for text in source.unclear if f"  {shown_path(str(_LIBRARY))}" not in text]


def _try(target: Target, verdict: Verdict) -> None:
    """Trace the step. At level `audit`, also train two steps. At level `resume`, also interrupt them at every point."""
    if verdict.level == "trace":
        _learner(target, verdict)
        return
    from fluxcb._tools.auditing import audit_learner

    audit = audit_learner(lambda: _learner(target, verdict))
    verdict.problems += audit.problems
    verdict.advice += audit.advice
    if verdict.level == "resume" and not verdict.problems:
        from fluxcb._tools.resume_proof import audit_resume

        verdict.problems += audit_resume(lambda: _learner(target, verdict))


def _learner(target: Target, verdict: Verdict) -> Learner:
    """Return a Learner for the set. A list of callbacks gets the small Learner of `fluxcb.testing`."""
    value = target.get()
    if is_learner(value):
        return value
    from fluxcb._tools.copying import fresh_callbacks
    from fluxcb.testing import testlearner

    items = value if target.makes else fresh_callbacks(value)
    verdict.in_testlearner = True
    return testlearner(*items, default_callbacks=True)


def _each(error: FluxcbError) -> list[FluxcbError]:
    return list(error.problems) if isinstance(error, CheckError) and error.problems else [error]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what callbacks print, so that only the result is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
