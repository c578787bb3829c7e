"""`StepSetup`, the inputs of a step in addition to the carry and the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.lineage import LineageProbe
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import Event
from fluxcb._typing import LossFn, ModelAdapter

__all__ = ["StepSetup"]


@dataclass(frozen=True, eq=False)
class StepSetup:
    """The inputs of a step in addition to the carry and the batch.

    Attributes:
        model: The model's adapter, or None if the loss function calls the model.
        loss_fn: The user's loss function.
        optimizer: The optimizer, or `NamedOptimizers`.
        hyperparams: The positions of its hyperparameters.
        key_impl: The random key's implementation. The carry holds the key's raw words, because JAX wraps a typed key
            again in Python at each call (2 us).
        handlers: Returns the traced handlers of an event, in plan order.
        split: Splits a batch into inputs and targets.
        switches: Names of the callbacks whose traced handlers can be switched off, in the order of their flags, which
            are the last words of the carry's `counters`.
        lineage: Measures the writes to a path in training steps, or None.
        records_skips: Whether training steps record which callbacks write `step.skip`, in `step.skips`.
    """

    model: ModelAdapter | None
    loss_fn: LossFn | None
    optimizer: Any
    hyperparams: HyperparamIndex
    key_impl: Any
    handlers: Callable[[type[Event]], tuple[BoundHandler, ...]]
    # The default splits a pair into inputs and targets.
    split: BatchParts = field(default_factory=BatchParts)
    switches: tuple[str, ...] = ()
    lineage: LineageProbe | None = None
    records_skips: bool = False
