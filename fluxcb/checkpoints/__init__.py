"""Checkpoints on disk: functions that read them without a Learner, and base classes for custom savers.

`fluxcb.callbacks.Checkpointer` writes checkpoints; `learner.fit(n, resume=True)` and `learner.restore(path)` continue
from them. Importing this package does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "LoadedCheckpoint": "fluxcb.checkpoints.reading",
    "ResumeWarning": "fluxcb.checkpoints.run_folder",
    "RunLock": "fluxcb.checkpoints.savers",
    "RunSaver": "fluxcb.checkpoints.savers",
    "Snapshot": "fluxcb.checkpoints.snapshot",
    "StoredCheckpoint": "fluxcb.checkpoints.savers",
    "load_model": "fluxcb.checkpoints.loading",
    "load_model_state": "fluxcb.checkpoints.loading",
    "load_params": "fluxcb.checkpoints.loading",
}

__all__ = [
    "LoadedCheckpoint",
    "ResumeWarning",
    "RunLock",
    "RunSaver",
    "Snapshot",
    "StoredCheckpoint",
    "load_model",
    "load_model_state",
    "load_params",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fluxcb.checkpoints' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from fluxcb.checkpoints.loading import load_model, load_model_state, load_params
    from fluxcb.checkpoints.reading import LoadedCheckpoint
    from fluxcb.checkpoints.run_folder import ResumeWarning
    from fluxcb.checkpoints.savers import RunLock, RunSaver, StoredCheckpoint
    from fluxcb.checkpoints.snapshot import Snapshot
