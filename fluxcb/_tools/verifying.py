"""Verifying a callback set by name, as thoroughly as asked for: what `fluxcb check` and the pytest plugin both do."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._check.preflight import derive_graph
from fluxcb._check.source_audit import audit_source
from fluxcb._declare.dispatch import shown_path
from fluxcb._declare.phases import TrainingPhase, ValidationPhase
from fluxcb._errors import CheckError, FluxcbError
from fluxcb._tools.project import LEVELS
from fluxcb._tools.targets import Target, is_learner, load
from fluxcb.callbacks import with_defaults

if TYPE_CHECKING:
    from fluxcb._check.graph import CallbackGraph
    from fluxcb._run.learner import Learner

__all__ = ["Verdict", "graph_by_name", "verify"]

_LIBRARY = Path(__file__).resolve().parents[1]


@dataclass
class Verdict:
    """What was found about a callback set.

    Attributes:
        name: `module:name`.
        level: How thoroughly it was checked.
        problems: What is wrong with it.
        advice: What could be better, and is not wrong: permissions that nothing uses.
        unclear: Where the reading of the source could not follow what a handler does.
        graph: Its graph, or None if it did not come so far.
    """

    name: str
    level: str
    problems: list[FluxcbError] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    graph: CallbackGraph | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
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
        """Return the problems, the first one's first sentence first."""
        return "\n\n".join(f"{type(problem).__name__}: {problem}" for problem in self.problems)


def verify(name: str, root: Path, level: str) -> Verdict:
    """Verify a callback set.

    Args:
        name: `module:name`.
        root: The folder to import from.
        level: One of `LEVELS`; `graph` does no JAX work, unless the set is a Learner.
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
    return verdict


def graph_by_name(name: str, root: Path) -> CallbackGraph:
    """Return the graph of a callback set, with its `problems` if it has some.

    Raises:
        FluxcbError: It cannot be loaded, or a declaration is wrong by itself.
    """
    return _graph(load(name, root).get())


def _graph(value: Any) -> CallbackGraph:
    if is_learner(value):
        return value.callbacks.graph
    return derive_graph(with_defaults(value), (TrainingPhase, ValidationPhase))


def _look(target: Target, verdict: Verdict) -> None:
    graph = verdict.graph = _graph(target.get())
    source = audit_source(graph.declared)
    verdict.problems += [*graph.problems, *source.problems]
    verdict.advice += source.unused
    # What is unclear in the library's own callbacks is no user's to look at; its tests do.
    verdict.unclear += [text for text in source.unclear if f"  {shown_path(str(_LIBRARY))}" not in text]


def _try(target: Target, verdict: Verdict) -> None:
    """Dry-run the step; at level `audit` train two, and at level `resume` interrupt that everywhere, too."""
    if verdict.level == "trace":
        _learner(target)
        return
    from fluxcb._tools.auditing import audit_learner

    audit = audit_learner(lambda: _learner(target))
    verdict.problems += audit.problems
    verdict.advice += audit.advice
    if verdict.level == "resume" and not verdict.problems:
        from fluxcb._tools.resume_proof import audit_resume

        verdict.problems += audit_resume(lambda: _learner(target))


def _learner(target: Target) -> Learner:
    """Return a Learner of the set; a list of callbacks gets the toy one of `fluxcb.testing`."""
    value = target.get()
    if is_learner(value):
        return value
    from fluxcb._tools.copying import fresh_callbacks
    from fluxcb.testing import testlearner

    items = value if target.makes else fresh_callbacks(value)
    try:
        return testlearner(*items, default_callbacks=True)
    except FluxcbError as error:
        error.add_note(
            "This list of callbacks was tried on the small Learner of `fluxcb.testing.testlearner`. If it needs your "
            "own model and data, declare a function that returns your Learner instead."
        )
        raise


def _each(error: FluxcbError) -> list[FluxcbError]:
    return list(error.problems) if isinstance(error, CheckError) and error.problems else [error]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what callbacks print to themselves: the verdict is what is to be read."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
