"""Checkpoints on disk: reading one without a Learner.

`fluxcb.callbacks.Checkpointer` writes them; `learner.fit(n, resume=True)` and `learner.restore(path)` go on from them.
Importing this package does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "ResumeWarning": "fluxcb.checkpoints.run_folder",
    "load_model": "fluxcb.checkpoints.loading",
    "load_model_state": "fluxcb.checkpoints.loading",
    "load_params": "fluxcb.checkpoints.loading",
}

__all__ = ["ResumeWarning", "load_model", "load_model_state", "load_params"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fluxcb.checkpoints' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


if TYPE_CHECKING:
    from fluxcb.checkpoints.loading import load_model, load_model_state, load_params
    from fluxcb.checkpoints.run_folder import ResumeWarning
