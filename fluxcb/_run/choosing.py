"""Which engine runs a Learner."""

from __future__ import annotations

from typing import Any

import jax

from fluxcb._errors import DeclarationError
from fluxcb._run.engine import Engine
from fluxcb._run.executors import Executor, SerialExecutor
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostState
from fluxcb._run.threaded import SharedState, ThreadedEngine

__all__ = ["choose_engine"]


def choose_engine(executor: Any, programs: Programs, **parts: Any) -> Engine:
    """Return an engine with a new state.

    Args:
        executor: What the user gave; None for the default.
        programs: The compiled programs.
        **parts: What `HostState` takes.

    Raises:
        DeclarationError: `executor` is no executor.
    """
    executor = SerialExecutor() if executor is None else executor
    if not isinstance(executor, Executor):
        shown = f"the class `{executor.__name__}`" if isinstance(executor, type) else repr(executor)
        raise DeclarationError(
            f"`executor` must be an executor, not {shown}.", fix="e.g. `executor=fluxcb.ThreadExecutor(4)`"
        )
    serial = isinstance(executor, SerialExecutor)
    if jax.process_count() == 1:
        if serial:
            return Engine(HostState(**parts), programs)
        return ThreadedEngine(SharedState(**parts), programs, executor)
    from fluxcb._run.processes import AgreeingEngine, AgreeingThreadedEngine

    if serial:
        return AgreeingEngine(HostState(**parts), programs)
    return AgreeingThreadedEngine(SharedState(**parts), programs, executor)
