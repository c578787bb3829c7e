"""Pulling the batches of a window from a stream, and returning those that no step has used."""

from __future__ import annotations

import time

from fluxcb._interruptions import is_interruption
from fluxcb._run.batch_stream import BatchStream
from fluxcb._typing import Batch

__all__ = ["expected_steps", "pull_batches", "return_batches"]


def pull_batches(stream: BatchStream, length: int, continues_stream: bool, *, seconds: float) -> list[Batch]:
    """Pull the batches of a window: `length` of them, or as many as arrive within some seconds (s).

    Raises:
        Exception: An error of the source, if no batch precedes it; otherwise it is stored and raised later.
    """
    batches: list[Batch] = []
    # Before the first pull, because the positions of all steps in this window are counted from the mark.
    stream.mark()
    until = time.perf_counter() + seconds
    try:
        while len(batches) < length:
            batch = stream.next(continues_stream=continues_stream)
            if batch is None:
                break
            batches.append(batch)
            # A slow source must not keep the device idle, or delay a signal.
            if time.perf_counter() > until:
                break
    except BaseException as error:
        if is_interruption(error):
            # The pass may continue in a later fit, which must not miss these batches.
            stream.push_back(batches)
            raise
        if not batches:
            raise
        stream.fail_later(error)
    return batches


def return_batches(stream: BatchStream | None, batches: list[Batch]) -> None:
    """Put batches that were not consumed back, except those of a single step outside an epoch."""
    if stream is not None and batches:
        stream.push_back(batches)


def expected_steps(stream: BatchStream, limit: int | None, continues_stream: bool) -> int:
    """Return the expected number of steps of an epoch, or 0 if it is unknown."""
    length = stream.batches or 0
    # Such an epoch can need several passes over the data, so the length of one pass is no limit.
    if continues_stream and limit is not None:
        return limit
    return min(length, limit) if limit is not None and length else length or limit or 0
