"""Which callbacks write a step value, for callbacks that always run before or after them."""

from __future__ import annotations

from fluxcb._declare.access import lookup, normalise, writes
from fluxcb._declare.callback import Callback

__all__ = ["writes_step"]


def writes_step(callback: Callback, name: str) -> bool:
    """Return whether a callback declares that it writes `step.<name>`."""
    access = normalise(callback.stateaccess(), owner=f"{type(callback).__name__}.stateaccess", where="")
    permission = lookup(access, ("step", name))
    return permission is not None and writes(permission)
