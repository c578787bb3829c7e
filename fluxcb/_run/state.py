"""The state of a Learner on the host, as one object per owner."""

from __future__ import annotations

from typing import Any

from fluxcb._compile.lent_values import LentValues
from fluxcb._run.fit_record import FitRecord
from fluxcb._run.meter import Meter
from fluxcb._run.moment import Moment
from fluxcb._run.progress import Progress
from fluxcb._run.train_state import TrainState

__all__ = ["HostState"]


class HostState:
    """The objects that hold a Learner's state.

    Args:
        model: The model, or None if a loss function does everything.
        loss_fn: The loss function.
        optimizer: The optimizer, or several by name.
        train: The train state.
        meter: Counts reads of the device, and measures handlers on request.
        lent: Values that handlers get.

    Attributes:
        model: The model; `LearnerCore` replaces it by one without arrays.
        loss_fn: See the argument.
        optimizer: See the argument.
        train: See the argument.
        meter: See the argument.
        progress: The counters.
        fit: The record of the current fit.
        moment: What handlers may see while they run.
        cbstate: Shared state that is not in the carry. Handlers write it.
        data: The data sources by the name of their phase. `LearnerCore.set_data` writes it.
    """

    def __init__(
        self,
        *,
        model: Any,
        loss_fn: Any,
        optimizer: Any,
        train: TrainState,
        meter: Meter | None = None,
        lent: LentValues | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.train = train
        # `make_engine` passes objects of other classes if handlers run on threads.
        self.meter = meter if meter is not None else Meter()
        self.progress = Progress()
        self.fit = FitRecord()
        self.moment = Moment(lent if lent is not None else LentValues())
        self.cbstate: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
