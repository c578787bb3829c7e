"""`RunLock`, `RunSaver` and `StoredCheckpoint`: the interface between the engine and callbacks that save a run.

The engine only uses these classes. Therefore, a custom saver supports `learner.fit(n, resume=True)` and `RewindFitting`
in the same way as `Checkpointer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fluxcb._calls import Constructed

if TYPE_CHECKING:
    from fluxcb._typing import PyTree
    from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["RunLock", "RunSaver", "StoredCheckpoint"]


# These are base classes instead of runtime-checkable Protocols, because a Protocol with `lock` and `unlock` would also
# match a callback that happens to have methods with these names.
class RunLock(Constructed, ABC):
    """Base class of callbacks that prevent other runs from writing to the same location.

    A fit calls `lock` before it restores a checkpoint and before any handler of FitBegin runs. If the same run is
    started twice, the second process is therefore refused before it can truncate logs or delete files.
    """

    @abstractmethod
    def lock(self) -> None:
        """Take the lock. If the lock is already held, this does nothing.

        Raises:
            CheckpointError: Another run has the lock.
        """

    @abstractmethod
    def unlock(self) -> None:
        """Release the lock after all handlers of FitEnd have run. If the lock is not held, this does nothing."""


class StoredCheckpoint(Constructed, ABC):
    """A complete, undamaged checkpoint that a saver has stored. `str` returns its location, for messages.

    A saver that can load a whole `Snapshot` can return a `LoadedCheckpoint` instead of defining a subclass.

    Attributes:
        step: Number of finished training steps.
        about: What the run consists of; see `Snapshot.about`.
    """

    step: int
    about: Mapping[str, Any]

    @abstractmethod
    def arrays(self) -> Mapping[str, Mapping[str, str]]:
        """Return the dtype and shape of the arrays of each tree by name, as text such as `float32[32, 10]`.

        The engine compares them with the arrays of the Learner before it calls `read`.
        """

    @abstractmethod
    def read(self, trees: Mapping[str, PyTree]) -> Snapshot:
        """Return the contents of the checkpoint.

        Args:
            trees: The trees of the Learner. The trees of the result have the same structure, but `cbstate` lacks the
                entries that the checkpoint does not have.

        Raises:
            CheckpointCorruptError: The checkpoint cannot be read.
        """


class RunSaver(Constructed, ABC):
    """Base class of callbacks whose checkpoints `fit(resume=True)` and `RewindFitting` restore.

    A Learner can resume and rewind if exactly one of its callbacks is a `RunSaver`. The callback requests snapshots in
    its handlers with `learner.snapshots.request(save)`.
    """

    @abstractmethod
    def stored_checkpoints(self, last_step: int | None = None) -> Iterable[StoredCheckpoint]:
        """Yield the complete, undamaged checkpoints, newest first, after all pending writes have finished.

        The engine only uses one or two of them, so a generator can verify each checkpoint when it is requested.

        Args:
            last_step: If not None, only yield checkpoints of this step or an earlier one.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """

    def newest_checkpoint(self) -> StoredCheckpoint | None:
        """Return the checkpoint from which a run resumes, or None if there are none.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged.
        """
        return next(iter(self.stored_checkpoints()), None)

    def resumed_from(self, checkpoint: StoredCheckpoint) -> None:  # not abstract, because most savers do not need it
        """Record that the run resumes from a checkpoint that `newest_checkpoint` returned."""

    @abstractmethod
    def discard_after(self, checkpoint: StoredCheckpoint) -> None:
        """Delete the checkpoints that are newer than this one, to which the run has rewound.

        If the run were killed before the next save, it would otherwise resume from an abandoned state.
        """
