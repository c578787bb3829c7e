"""Warnings about callbacks that only have handlers for phases that `fit` does not run, because they have no data."""

from __future__ import annotations

from fluxcb._declare.access import overlap, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.phases import ValidationPhase
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user

__all__ = ["warn_about_phases_without_data"]


def warn_about_phases_without_data(core: LearnerCore) -> None:
    """Warn about each callback of the user for which `fit` calls nothing, because its phases have no data.

    A Learner is checked when it begins to fit, and not when it is constructed. Until then, data can still be assigned.
    """
    missing = {type(phase).name for phase in core.phases} - {*core.streams}
    missing -= {phase.name for declared in core.graph.declared for phase in declared.callback.metric_phases()}
    for declared in core.graph.declared:
        # A callback may assign the data of a phase while the fit runs.
        written = [path for path, permission in declared.access.items() if writes(permission)]
        missing -= {name for name in missing if any(overlap(path, ("data", name)) for path in written)}
    for declared in core.graph.declared:
        names = _phases(declared, core)
        if declared.is_shipped or not names or not names <= missing:
            continue
        shown = " and ".join(sorted(names))
        data = ", ".join(f'"{name}": batches' for name in sorted(names))
        give = "data=(training, validation)" if names == {ValidationPhase.name} else f'data={{"training": ..., {data}}}'
        warn_user(
            f"`fit` calls no handler of {declared.label}: its handlers are for {shown}, and the Learner has no data "
            f"for it. Pass the data to the Learner: `{give}`.",
            UserWarning,
        )


def _phases(declared: Declared, core: LearnerCore) -> set[str]:
    """Return the names of the phases of the Learner for which a callback has handlers."""
    classes = [type(phase) for phase in core.phases]
    return {cls.name for cls in classes for entry in declared.handlers if issubclass(cls, entry.phase)}
