"""`ToDevice`: train on another device, or on several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb.data import place

__all__ = ["ToDevice"]


class ToDevice(Callback):
    """Put the train state on a device, and every batch there before its step needs it.

    It acts when a Learner is built; nothing runs per step. With a sharding, give one for the batches if they are to be
    split while the state is replicated.

    Args:
        placement: A `jax.Device` or a `jax.sharding.Sharding` for params, model_state and opt_state.
        batches: Where batches go; as the state by default.

    Access:
        params: Write.
        model_state: Write.
        opt_state: Write.
        data: Write.

    Runs:
        Nowhere: only in `init`.

    Cost:
        None per step, but the transfer of batches, which the data source makes ahead.

    Raises:
        DeclarationError: `placement` is no device or sharding.

    Example:
        >>> import jax
        >>> from fluxcb.callbacks import ToDevice
        >>> ToDevice(jax.devices()[0])
        ToDevice(...)

    Source:
        FluxTraining.jl, `ToDevice` and `ToGPU`.
    """

    def __init__(self, placement: Any, *, batches: Any = None) -> None:
        self.placement = placement
        self.batches = placement if batches is None else batches

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"params": Write(), "model_state": Write(), "opt_state": Write(), "data": Write()}

    def init(self, learner: Any) -> None:
        """Move the state, and wrap the data sources."""
        import jax

        place((), self.placement)  # names what is wrong with it, in words of ours
        learner.params = jax.device_put(learner.params, self.placement)
        learner.model_state = jax.device_put(learner.model_state, self.placement)
        learner.opt_state = jax.device_put(learner.opt_state, self.placement)
        for name in list(learner.data):
            source = learner.data[name]
            placed = place(source, self.batches)
            if placed is not source:  # exchanging a source begins it anew
                learner.data[name] = placed

    def __repr__(self) -> str:
        return f"ToDevice({self.placement})"
