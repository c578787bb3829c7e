"""Warnings about handlers and metrics for phases that `fit` does not run, because they have no data."""

from __future__ import annotations

from fluxcb._declare.access import overlap, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.phases import Phase, ValidationPhase
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user

__all__ = ["warn_about_phases_without_data"]


def warn_about_phases_without_data(core: LearnerCore) -> None:
    """Warn about handlers and metrics of the user that `fit` never runs, because their phases have no data.

    A Learner is checked when it begins to fit, and not when it is constructed. Until then, data can still be assigned.
    """
    missing = _missing(core)
    for declared in core.graph.declared:
        names = {phase.name for phase in _phases(core) for h in declared.handlers if issubclass(phase, h.phase)}
        # A handler of a base class runs if any phase of this class has data.
        if not declared.is_shipped and names and names <= missing:
            _warn(f"`fit` calls no handler of {declared.label}: its handlers are", names)
        for metric, phases in _metrics(declared, core).items():
            if phases <= missing:
                _warn(f"`fit` does not compute `{metric}` of {declared.label}: it is", phases)


def _missing(core: LearnerCore) -> set[str]:
    """Return the names of the phases that get no data in a fit."""
    missing = {phase.name for phase in _phases(core)} - {*core.streams}
    # `InferenceRunner` computes the metrics of such a phase itself, from data of its own.
    missing -= {phase.name for declared in core.graph.declared for phase in declared.callback.metric_phases()}
    for declared in core.graph.declared:
        # A callback may assign the data of a phase while the fit runs.
        written = [path for path, permission in declared.access.items() if writes(permission)]
        missing -= {name for name in missing if any(overlap(path, ("data", name)) for path in written)}
    return missing


def _phases(core: LearnerCore) -> list[type[Phase]]:
    return [type(phase) for phase in core.phases]


def _metrics(declared: Declared, core: LearnerCore) -> dict[str, set[str]]:
    """Return the metrics of a callback, each with the names of its phases."""
    found: dict[str, set[str]] = {}
    for phase in _phases(core):
        for metric in declared.callback.provided_metrics(phase) or ():
            found.setdefault(metric, set()).add(phase.name)
    return found


def _warn(what: str, names: set[str]) -> None:
    data = ", ".join(f'"{name}": batches' for name in sorted(names))
    # A pair has no place for the data of another phase.
    give = "data=(training, validation)" if names == {ValidationPhase.name} else f'data={{"training": ..., {data}}}'
    warn_user(
        f"{what} for {' and '.join(sorted(names))}, and the Learner has no data for it. Pass the data to the Learner: "
        f"`{give}`.",
        UserWarning,
    )
