"""The fix for an undeclared access of a host handler to state that does not exist at its moment."""

from fluxcb._declare.access import Permission, Write, writes
from fluxcb._declare.declared import Declared
from fluxcb._declare.state import PROVIDERS
from fluxcb._run.state import HostState
from fluxcb._typing import StatePath

__all__ = ["undeclared_fix"]


def undeclared_fix(declared: Declared, path: StatePath, permission: Permission, state: HostState) -> str:
    """Return the complete fix for an undeclared access if its declaration alone is not sufficient, otherwise "".

    Without it, the user would declare the path and get the next error.

    Args:
        declared: The callback.
        path: The path that it uses in a host handler.
        permission: The permission that the access needs.
        state: The state.
    """
    declare = declared.how_to_declare(path, permission)
    if path[0] == "hyperparams":
        return state.train.hyperparams.undeclared_fix(path[1], permission, declared)
    if path[0] == "step" and not writes(permission):
        window = state.moment.window
        exists = window is not None and (window.computed or path[1] == "batch")
        return "" if exists else f"handle StepEnd instead, and {declare}"
    if path[0] == "cbstate" and len(path) == 2 and not _exists(path[1], state):
        if path[1] in PROVIDERS:
            return f"add `{PROVIDERS[path[1]]}()` to the callbacks, which creates it, and {declare}"
        declare = declared.how_to_declare(path, Write())
        return f"for a value of your own, create `learner.cbstate.{path[1]}` in `init`, and {declare}"
    return ""


def _exists(entry: str, state: HostState) -> bool:
    return entry in state.cbstate or state.train.in_carry(entry)
