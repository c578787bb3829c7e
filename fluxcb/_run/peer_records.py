"""What a process of a training publishes for the others, and the errors about other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluxcb._errors import PeerError

__all__ = ["CONNECTION_WORDS", "Record", "different_steps", "ended", "silent"]

# Words in the errors of collectives whose peer is gone, on CPU (gloo), GPU (NCCL) and TPU.
# `onnection` matches "Connection" and "connection".
CONNECTION_WORDS = ("Gloo", "gloo", "NCCL", "UNAVAILABLE", "onnection", "DEADLINE_EXCEEDED", "ABORTED")


@dataclass(frozen=True)
class Record:
    """The record that a process publishes for the others.

    Attributes:
        ended: Why it does not take part any longer, or an empty string.
        relayed: The other arguments of the PeerError, if `ended` is the failure of another process.
        done: Whether it has finished the session, so that it writes no more heartbeats.
        marks: How many marks it has set; see `Peers.mark`.
        mark: The last of them.
        at: Position of the last mark: how many steps and agreements the process had begun.
        stop: Position at which it learned that the fit is to be stopped, or None.
        signal: The signal that stops the fit: 1 raises KeyboardInterrupt, 2 returns as after SIGTERM.
    """

    ended: str = ""
    relayed: dict[str, Any] | None = None
    done: bool = False
    marks: int = 0
    mark: str = ""
    at: int = 0
    stop: int | None = None
    signal: int = 0


def ended(process: int, record: Record) -> PeerError:
    """Return the error for a process that has reported its end, or that of another process."""
    # The process that reports a relayed failure has not caused it, so the message names the original failure.
    if (relayed := record.relayed) is not None:
        where = [*relayed["where"], f"reported by process {process}"]
        return PeerError(record.ended, where=where, why=relayed["why"], fix=relayed["fix"])
    return PeerError(
        f"Process {process} failed: {record.ended}",
        why="if one process of a run fails, all processes stop",
        fix=f"see the traceback of process {process}",
    )


def silent(process: int, seconds: float) -> PeerError:
    """Return the error for a process without heartbeats."""
    return PeerError(
        f"Process {process} has not responded for {seconds:.0f} s.",
        why="it was killed or stopped, its machine is down, or the network is down",
        fix=[
            f"see the output of process {process}, then start all processes again with `fit(resume=True)`",
            "if it was only slow, give the Learner a longer `peer_timeout`",
        ],
    )


def different_steps(process: int, here: str, other: int, there: str) -> PeerError:
    """Return the error for two processes that are at different places in the program."""
    return PeerError(
        f"Process {process} and process {other} do not run the same steps.",
        where=[f"process {process}: {here}", f"process {other}: {there}"],
        why="each step is computed by all processes, with batches of the same shape on each",
        fix="pass the same number of batches, of the same shapes, to all processes",
    )
