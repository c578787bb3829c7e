"""Averages of the parameters: which average validation uses, and where its arrays are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import placed_as
from fluxcb._declare.callback import unwrap
from fluxcb._declare.events import EpochBegin
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._run.state import HostState
from fluxcb._typing import PyTree

__all__ = ["average_in", "averages_by_name", "params_with", "restart_averages", "validated_average"]

_ADD = {
    "ema": "add `ParameterEMA()`, which keeps `ema`",
    "swa": "add `StochasticWeightAveraging(start=1)`, which keeps `swa`",
}
"""How to add each average that a callback of the library keeps."""


def average_in(graph: CallbackGraph, phase: type[Phase]) -> str | None:
    """Return the average that callbacks use instead of the parameters in an epoch of a phase, or None.

    If several callbacks replace the parameters, the last one to run decides. Schedules of these callbacks are ignored.
    """
    # Callbacks declare their average, so the engine does not depend on any averaging callback.
    declared = [h.declared for h in graph.handlers(EpochBegin, phase) if not h.declared.disabled]
    names = [unwrap(d.callback).validates_with for d in declared]
    # The parameters of the last callback in the order stay in place during validation.
    return next((name for name in reversed(names) if name is not None), None)


def averages_by_name(graph: CallbackGraph, phases: Iterable[Phase]) -> dict[str, str | None]:
    """Return the averages used by validation phases and by callbacks that compute their own statistics, by name."""
    found = {type(phase).name: average_in(graph, type(phase)) for phase in phases if not type(phase).trains}
    for declared in graph.declared:
        if not declared.disabled:
            found |= unwrap(declared.callback).measured_with
    return found


def validated_average(graph: CallbackGraph, phases: Iterable[Phase]) -> str | None:
    """Return the average used by the first phase that does not train, or None."""
    return next((average_in(graph, type(phase)) for phase in phases if not type(phase).trains), None)


def params_with(state: HostState, average: str | None) -> PyTree:
    """Return the live arrays of the parameters, or of an average of them.

    Raises:
        DeclarationError: There is no such average.
    """
    carry = state.train.carry
    if average is None:
        return carry["params"]
    # An average is in the carry if a traced handler updates it, and on the host otherwise.
    entries = {**state.cbstate, **carry["cbstate"]}
    entry = entries.get(average) if isinstance(average, str) else None  # the user's argument may be unhashable
    if not isinstance(entry, Mapping) or "params" not in entry:
        known = [name for name, value in entries.items() if isinstance(value, Mapping) and "params" in value]
        raise DeclarationError(
            f"`average` is {average!r}, and no callback of this Learner keeps such an average."
            f"{did_you_mean(str(average), known)}",
            why=f"`cbstate` has {', '.join(f'`{name}`' for name in known)}" if known else "",
            fix=["write `average=None` for the parameters that are trained", _ADD.get(str(average), _ADD["ema"])]
            if not known
            else [f'write `average="{known[0]}"`', "write `average=None` for the parameters that are trained"],
        )
    return entry["params"]


def restart_averages(graph: CallbackGraph, state: HostState) -> None:
    """Restart all averages of the parameters at the current parameters, after the user has assigned these."""
    carry = state.train.carry
    for declared in graph.declared:
        name = unwrap(declared.callback).parameter_average
        entry = carry["cbstate"].get(name)
        if name is None or not isinstance(entry, Mapping) or "params" not in entry:
            continue
        params = jax.tree.map(lambda e, p: jnp.astype(p, e.dtype), entry["params"], carry["params"])
        # The weight of the next update follows from the counts, so they restart as well.
        new = {**jax.tree.map(jnp.zeros_like, dict(entry)), "params": params}
        # With the placement of the old entry, because another one would compile the step again.
        state.train.replace(("cbstate", name), placed_as(entry, new))
