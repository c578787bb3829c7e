"""Refusing a fit of several epochs whose data is a one-shot iterator, before its first step."""

from __future__ import annotations

from collections.abc import Iterator

from fluxcb._declare.access import overlap, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import EpochBegin
from fluxcb._declare.phases import Phase
from fluxcb._declare.turns import InTurn
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.stream_errors import used_up
from fluxcb.callbacks import CustomCallback, EarlyStopping, SkipNonFinite, StopOnNaNLoss

__all__ = ["refuse_repeated_iterators"]

# These cancel only after a complete epoch, or after a failure. All others that declare `control` may end any epoch.
_KEEP_EPOCHS = (EarlyStopping, SkipNonFinite, StopOnNaNLoss)


def refuse_repeated_iterators(core: LearnerCore, begun: int, epochs: int, steps_per_epoch: int | None) -> None:
    """Check that no phase of a fit reads a one-shot iterator to its end in more than one epoch.

    Args:
        core: The core of the Learner.
        begun: Number of epochs of the fit that have already begun, which is not 0 only if the fit resumes.
        epochs: Number of epochs of the fit.
        steps_per_epoch: Length of an epoch (steps), or None for one pass over the data.

    Raises:
        DataError: The data of a phase is used up after its first epoch.
    """
    for phase, passes in _passes(core, epochs - begun):
        trains = type(phase).trains
        # Epochs with a length continue the iterator. A validation is a complete pass in any case.
        if passes < 2 or (trains and steps_per_epoch is not None):
            continue
        stream = core.stream(phase)
        if stream.one_shot and not any(_may_spare(declared, phase) for declared in core.graph.declared):
            call = f"fit({epochs})" if steps_per_epoch is None else f"fit({epochs}, steps_per_epoch={steps_per_epoch})"
            raise used_up(stream.name, stream.source, call, f"fit({epochs}, steps_per_epoch=100)" if trains else None)


def _passes(core: LearnerCore, epochs: int) -> Iterator[tuple[Phase, int]]:
    """Yield the phases whose epochs end with their data, each with the number of its epochs that the fit runs.

    Args:
        core: The core of the Learner.
        epochs: Number of epochs that the fit begins, without the rest of an epoch in which a checkpoint was written.
    """
    at = core.state.fit.at
    # Within an epoch, the phases run in this order. The first phase of an `InTurn` bounds the epochs of all its phases.
    order = [group.phases if isinstance(group, InTurn) else (group,) for group in core.phase_set.training_groups()]
    order += [(phase,) for phase in core.phases if not type(phase).trains and type(phase).name in core.streams]
    rest = False
    for phases in order:
        rest = rest or (at is not None and at.phase in {type(phase).name for phase in phases})
        yield phases[0], epochs + rest


def _may_spare(declared: Declared, phase: Phase) -> bool:
    """Return whether a callback may end an epoch of a phase before its data ends, or assign other data."""
    data = ("data", type(phase).name)
    if any(writes(permission) and overlap(path, data) for path, permission in declared.access.items()):
        return True
    # A handler of EpochBegin may cancel the epoch without declaring `control`.
    begins = any(h.event is EpochBegin and issubclass(type(phase), h.phase) for h in declared.handlers)
    of_user = not declared.is_shipped or declared.cls is CustomCallback
    return (begins and of_user) or (("control",) in declared.access and declared.cls not in _KEEP_EPOCHS)
