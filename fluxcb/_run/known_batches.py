"""Batches that checks of the data may read, because reading them does not change what a data source returns."""

from __future__ import annotations

from typing import Any

from fluxcb._declare.phases import Phase
from fluxcb._run.learner_core import LearnerCore
from fluxcb.data.loader import ArrayLoader

__all__ = ["known_batch"]


def known_batch(core: LearnerCore, phase: Phase) -> Any:
    """Return examples of a phase as one batch, or None if its source has not been read.

    They are all examples of an `ArrayLoader`, the first batch of a list, or the batch that was pulled from another
    source to find the shapes of the step. No batch is pulled here.
    """
    source, stream = core.state.data[type(phase).name], core.streams[type(phase).name]
    if isinstance(source, ArrayLoader):
        return source._arrays
    if isinstance(source, list | tuple) and source:
        return source[0]
    return stream.peek() if stream.has_buffered else None
