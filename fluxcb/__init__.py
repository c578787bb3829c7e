"""fluxcb: a callback engine for JAX training loops.

Callbacks declare the state that they read and write. From these declarations, fluxcb verifies that a set of callbacks
works together, orders the callbacks, compiles traced handlers into the step, and transfers only declared values from
the device. Names are loaded when they are first used, so importing fluxcb and checking a graph do not import JAX.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# In the order of the story: declare, check, compile, run. One public path per name.
_HOMES = {
    "Append": "fluxcb._declare.access",
    "Read": "fluxcb._declare.access",
    "Write": "fluxcb._declare.access",
    "Callback": "fluxcb._declare.callback",
    "Handler": "fluxcb._declare.handlers",
    "on": "fluxcb._declare.handlers",
    "LearnerView": "fluxcb._declare.learner_view",
    "every": "fluxcb._declare.wrappers",
    "switchable": "fluxcb._declare.wrappers",
    "throttle": "fluxcb._declare.wrappers",
    "when": "fluxcb._declare.wrappers",
    "AtWindowEnds": "fluxcb._declare.schedules",
    "EveryEpochs": "fluxcb._declare.schedules",
    "EverySeconds": "fluxcb._declare.schedules",
    "EverySteps": "fluxcb._declare.schedules",
    "Predicate": "fluxcb._declare.schedules",
    "Schedule": "fluxcb._declare.schedules",
    "NoConflict": "fluxcb._declare.resolution",
    "NotDefined": "fluxcb._declare.resolution",
    "RunFirst": "fluxcb._declare.resolution",
    "Unresolvable": "fluxcb._declare.resolution",
    "in_order": "fluxcb._declare.resolution",
    "resolveconflict": "fluxcb._declare.resolution",
    "CancelEpoch": "fluxcb._declare.control",
    "CancelFitting": "fluxcb._declare.control",
    "CancelStep": "fluxcb._declare.control",
    "PauseFitting": "fluxcb._declare.control",
    "RewindFitting": "fluxcb._declare.control",
    "At": "fluxcb._declare.dispatch",
    "collective": "fluxcb._declare.collectives",
    "check": "fluxcb._run.check",
    "Sharding": "fluxcb._declare.shardings",
    "fsdp": "fluxcb._declare.shardings",
    "mesh": "fluxcb._declare.shardings",
    "DaskExecutor": "fluxcb._run.executors",
    "Executor": "fluxcb._run.executors",
    "SerialExecutor": "fluxcb._run.executors",
    "ThreadExecutor": "fluxcb._run.executors",
    "inject": "fluxcb._compile.hyperparams",
    "History": "fluxcb._run.history",
    "Lineage": "fluxcb._run.lineage",
    "PathWrite": "fluxcb._run.lineage",
    "Replay": "fluxcb._run.replay",
    "BadStep": "fluxcb._run.bad_step_replay",
    "Learner": "fluxcb._run.learner",
    "Population": "fluxcb.populations.population",
    "callbacks_as_hook": "fluxcb._run.callbacks_as_hook",
    "Ablation": "fluxcb._tools.ablation",
    "Effect": "fluxcb._tools.ablation",
    "ablate": "fluxcb._tools.ablation",
    "AccessError": "fluxcb._errors",
    "AmbiguityError": "fluxcb._errors",
    "CheckError": "fluxcb._errors",
    "CheckpointCorruptError": "fluxcb._errors",
    "CheckpointError": "fluxcb._errors",
    "ConflictError": "fluxcb._errors",
    "CycleError": "fluxcb._errors",
    "DataError": "fluxcb._errors",
    "DeclarationError": "fluxcb._errors",
    "FluxcbError": "fluxcb._errors",
    "MissingStateError": "fluxcb._errors",
    "PeerError": "fluxcb._errors",
    "ResumeError": "fluxcb._errors",
    "StateLostError": "fluxcb._errors",
    "TraceError": "fluxcb._errors",
    "UndeclaredAccessError": "fluxcb._errors",
    "UnknownStateError": "fluxcb._errors",
}
_MODULES = (
    "callbacks",
    "checkpoints",
    "data",
    "events",
    "logging",
    "models",
    "phases",
    "plots",
    "populations",
    "stopping",
    "testing",
)

__all__ = sorted([*_HOMES, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]  # one list, not two

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fluxcb.{name}")
    else:
        raise AttributeError(f"module 'fluxcb' has no attribute {name!r}{_place(name)}")
    globals()[name] = value
    return value


def _place(name: str) -> str:
    """Return a hint for a name that is in a submodule, such as `fluxcb.Metrics`."""
    # Not for `__wrapped__` and the like, which tools look up in every object.
    modules = () if name.startswith("_") else _MODULES
    places = (module for module in modules if name in importlib.import_module(f"fluxcb.{module}").__all__)
    place = next(places, None)
    return f". Write `fluxcb.{place}.{name}`." if place else ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if TYPE_CHECKING:
    from fluxcb import (
        callbacks,
        checkpoints,
        data,
        events,
        logging,
        models,
        phases,
        plots,
        populations,
        stopping,
        testing,
    )
    from fluxcb._compile.hyperparams import inject
    from fluxcb._declare.access import Append, Read, Write
    from fluxcb._declare.callback import Callback
    from fluxcb._declare.collectives import collective
    from fluxcb._declare.control import CancelEpoch, CancelFitting, CancelStep, PauseFitting, RewindFitting
    from fluxcb._declare.dispatch import At
    from fluxcb._declare.handlers import Handler, on
    from fluxcb._declare.learner_view import LearnerView
    from fluxcb._declare.resolution import (
        NoConflict,
        NotDefined,
        RunFirst,
        Unresolvable,
        in_order,
        resolveconflict,
    )
    from fluxcb._declare.schedules import AtWindowEnds, EveryEpochs, EverySeconds, EverySteps, Predicate, Schedule
    from fluxcb._declare.shardings import Sharding, fsdp, mesh
    from fluxcb._declare.wrappers import every, switchable, throttle, when
    from fluxcb._errors import (
        AccessError,
        AmbiguityError,
        CheckError,
        CheckpointCorruptError,
        CheckpointError,
        ConflictError,
        CycleError,
        DataError,
        DeclarationError,
        FluxcbError,
        MissingStateError,
        PeerError,
        ResumeError,
        StateLostError,
        TraceError,
        UndeclaredAccessError,
        UnknownStateError,
    )
    from fluxcb._run.bad_step_replay import BadStep
    from fluxcb._run.callbacks_as_hook import callbacks_as_hook
    from fluxcb._run.check import check
    from fluxcb._run.executors import DaskExecutor, Executor, SerialExecutor, ThreadExecutor
    from fluxcb._run.history import History
    from fluxcb._run.learner import Learner
    from fluxcb._run.lineage import Lineage, PathWrite
    from fluxcb._run.replay import Replay
    from fluxcb._tools.ablation import Ablation, Effect, ablate
    from fluxcb.populations.population import Population
