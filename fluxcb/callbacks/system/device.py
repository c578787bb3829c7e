"""`ToDevice`: train on a given device or sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.shardings import automatic_placement
from fluxcb.data import place

__all__ = ["ToDevice"]


class ToDevice(Callback):
    """Place the train state and all batches on a device or a sharding.

    The callback moves the state when the Learner is built, and wraps the data sources so that they transfer batches
    ahead of time. To replicate the state and split the batches, pass a separate sharding as `batches`.

    Args:
        placement: A `jax.Device` or a `jax.sharding.Sharding` for params, model_state and opt_state.
        batches: The placement of batches; the same as that of the state by default.

    Access:
        params: Write.
        model_state: Write.
        opt_state: Write.
        data: Write.

    Runs:
        Only in `init`.

    Cost:
        None per step, apart from the transfer of batches, which the data source starts ahead of time.

    Raises:
        DeclarationError: `placement` is not a device or a sharding.

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
        """Return the declared access; see the class docstring."""
        return {"params": Write(), "model_state": Write(), "opt_state": Write(), "data": Write()}

    def init(self, learner: LearnerView) -> None:
        """Move the state, and wrap the data sources."""
        import jax

        place((), self.placement)  # raises an error of fluxcb if the placement is invalid, before `device_put` does
        placement, batches = automatic_placement(self.placement), automatic_placement(self.batches)
        learner.params = jax.device_put(learner.params, placement)
        learner.model_state = jax.device_put(learner.model_state, placement)
        learner.opt_state = jax.device_put(learner.opt_state, placement)
        for name in list(learner.data):
            source = learner.data[name]
            placed = place(source, batches)
            if placed is not source:  # replacing a source would restart it
                learner.data[name] = placed

    def __repr__(self) -> str:
        return f"ToDevice({self.placement})"
