"""Warnings about a Learner, at the start of its first fit."""

from fluxcb._check.source_audit import Reader
from fluxcb._check.unassigned import unassigned
from fluxcb._run.changing_state import warn_about_frozen_state
from fluxcb._run.class_numbers import warn_about_class_numbers
from fluxcb._run.class_targets import warn_about_targets_without_class
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.phases_without_data import warn_about_phases_without_data
from fluxcb._run.wide_integers import warn_about_wide_integers
from fluxcb._tracebacks import warn_user

__all__ = ["warn_before_first_fit"]


def warn_before_first_fit(core: LearnerCore) -> None:
    """Warn about what would not be as the user means it, if the Learner has not trained yet."""
    if core.state.progress.step > 0:
        return  # a later fit would repeat the warnings of the first one
    warn_about_class_numbers(core)
    warn_about_targets_without_class(core)
    warn_about_wide_integers(core)
    warn_about_phases_without_data(core)
    _warn_of_unassigned(core)
    steps = map(core.traced, core.phases)
    warn_about_frozen_state(core.graph, [step for step in steps if step is not None])


def _warn_of_unassigned(core: LearnerCore) -> None:
    reader = Reader()
    for declared in core.graph.declared:
        for _, text in unassigned(declared, reader.read):
            warn_user(text, UserWarning)
