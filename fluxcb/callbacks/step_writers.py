"""Who writes a value of the step: for callbacks whose place among these is always the same."""

from __future__ import annotations

from fluxcb._declare.access import lookup, normalise, writes
from fluxcb._declare.callback import Callback

__all__ = ["writes_step"]


def writes_step(callback: Callback, name: str) -> bool:
    """Tell whether a callback declares to write `step.<name>`."""
    access = normalise(callback.stateaccess(), owner=f"{type(callback).__name__}.stateaccess", where="")
    permission = lookup(access, ("step", name))
    return permission is not None and writes(permission)
