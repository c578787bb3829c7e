"""What host handlers can read while they run: the step, how far the device is, and the containers lent to them."""

from __future__ import annotations

from typing import Any

import jax

from fluxcb._declare.access import dotted
from fluxcb._errors import AccessError
from fluxcb._run.window import Window
from fluxcb._typing import PyTree, StatePath

__all__ = ["LentContainers", "Moment"]


class LentContainers:
    """The containers that the running handler received as copies of parts of the state.

    `HostBackend` adds them, and the engine verifies them after each handler. The containers are plain pytrees, because
    `jax.tree.map` does not accept a read-only mapping next to a dict. A write into a container therefore cannot be
    refused immediately. It is detected afterwards, at the cost of one flatten per read.

    Attributes:
        entries: The reader's label, the path, the container, and its leaves and structure. An empty list costs the
            engine one truth test per handler.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[str, StatePath, PyTree, list[Any], Any]] = []

    def lend(self, label: str, value: PyTree, path: StatePath) -> PyTree:
        """Return a value in new containers; a single array is returned as it is."""
        leaves, structure = jax.tree.flatten(value)
        if len(leaves) == 1 and leaves[0] is value:
            return value
        fresh = jax.tree.unflatten(structure, leaves)
        self.entries.append((label, path, fresh, leaves, structure))
        return fresh

    def forget(self) -> None:
        """Forget the containers."""
        self.entries = []

    def verify(self) -> None:
        """Check the containers for changes, which would have no effect, and forget them.

        Raises:
            AccessError: One was changed.
        """
        # Forgotten first, so that one mistake is reported once.
        entries, self.entries = self.entries, []
        for label, path, fresh, leaves, structure in entries:
            now, now_structure = jax.tree.flatten(fresh)
            # Identity is enough, because arrays are immutable and a write replaces a leaf.
            if now_structure == structure and all(a is b for a, b in zip(now, leaves, strict=True)):
                continue
            raise AccessError(
                f"{label} writes into the container that it read from `{dotted(path)}`.",
                why="reading returns a copy, so the change would be lost",
                fix=f"declare Write(), change a copy, and assign it: `learner.{dotted(path)} = copy`",
            )


class Moment:
    """The moment at which host handlers run.

    `StepLoop` sets it around the handlers of a step. `run_epoch` saves and restores it for an epoch that runs inside a
    handler.

    Args:
        lent: Containers that handlers get.

    Attributes:
        window: The window with the values of the step whose handlers run; None between two steps.
        batch_size: Number of examples in the batch of that step; 0 between two steps.
        ahead: Whether the device has already run later steps, so that the train state is not that of the handler's
            step.
        inside_window: Whether later steps of the same window follow. Clocks are not read there, because all steps of a
            window are replayed at the same time.
        lent: See the argument.
    """

    def __init__(self, lent: LentContainers) -> None:
        self.window: Window | None = None
        self.batch_size = 0
        self.ahead = self.inside_window = False
        self.lent = lent

    def end_step(self) -> None:
        """Reset the moment, because no handler of a step runs any more."""
        self.window, self.batch_size, self.ahead, self.inside_window = None, 0, False, False
