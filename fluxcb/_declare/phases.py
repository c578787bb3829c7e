"""Phases: what is being done, and the traced step that does it.

A phase owns `step(learner, emit)`, which is traced into one XLA program. A GAN, a VAE or an RL
update is a new phase with its own step; every callback works with it unchanged.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fluxcb._declare.events import (
    BackwardBegin,
    BackwardEnd,
    ComputeEnd,
    Event,
    ForwardBegin,
    LossBegin,
    TracedEvent,
    UpdateEnd,
)
from fluxcb._errors import DeclarationError, TraceError

__all__ = [
    "BUILTIN_PHASES",
    "AbstractTrainingPhase",
    "AbstractValidationPhase",
    "LossTrainingPhase",
    "LossValidationPhase",
    "Phase",
    "TrainingPhase",
    "ValidationPhase",
    "named_phase",
    "split_batch",
]

Emit = Callable[[Event], None]


class Phase:
    """What is being done with a data source: training, validation, or something of yours.

    Attributes:
        name: Key of the phase's data source (`data.<name>`) and of its history.
        trains: Whether its steps count in `progress.step` and its model runs in training mode.
        provides: The traced events that `step` emits, in order, each with the `step.*` names that exist from there
            on (`()` for none). ComputeEnd, and UpdateEnd where it trains, need not be named to be emitted.
    """

    name: ClassVar[str] = "phase"
    trains: ClassVar[bool] = False
    provides: ClassVar[Mapping[type[TracedEvent], tuple[str, ...]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for event, names in cls.provides.items():
            if not (isinstance(event, type) and issubclass(event, TracedEvent)) or isinstance(names, str):
                raise DeclarationError(
                    f"`{cls.__name__}.provides` must map traced events to tuples of step names, "
                    f"not {event!r} to {names!r}.",
                    where=f"{cls.__module__}.{cls.__qualname__}",
                    fix='write `provides = {LossBegin: ("outputs",), BackwardBegin: ("loss",)}`',
                )

    def step(self, learner: Any, emit: Emit) -> None:
        """Compute one step; traced. `learner` is the whole learner, unprotected, as tracers."""
        raise DeclarationError(
            f"`{type(self).__name__}` has no `step(self, learner, emit)`, so nothing can be run in it.",
            fix=f"derive `{type(self).__name__}` from TrainingPhase or ValidationPhase, or write its `step`",
        )

    # Phases are values: two equal ones share one compiled program.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class AbstractTrainingPhase(Phase):
    """Base of all phases that change the parameters."""

    name = "training"
    trains = True


class AbstractValidationPhase(Phase):
    """Base of all phases that only measure."""

    name = "validation"


@functools.cache
def named_phase(name: str) -> type[Phase]:
    """Return a phase class that has only a name, for metrics that are stored under a name that is not a phase's."""
    return type(name, (Phase,), {"name": name, "__module__": __name__})


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into `(xs, ys)`; a batch that is no pair is all input."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, None


class TrainingPhase(AbstractTrainingPhase):
    """Supervised training: forward, loss, gradients, update."""

    provides = {
        ForwardBegin: ("xs", "ys"),
        LossBegin: ("outputs",),
        BackwardBegin: ("loss",),
        BackwardEnd: ("grads",),
        UpdateEnd: ("updates",),
    }

    def step(self, learner: Any, emit: Emit) -> None:
        """Apply the model, differentiate the loss, update the parameters."""
        learner.step.xs, learner.step.ys = split_batch(learner.step.batch)
        emit(ForwardBegin())

        def loss(params: Any) -> Any:
            learner.step.outputs = learner.forward(params, learner.step.xs)
            emit(LossBegin())
            learner.step.loss = _required_loss(learner)(learner.step.outputs, learner.step.ys)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss, wrt="params")
        emit(BackwardEnd())
        learner.apply_updates()


class ValidationPhase(AbstractValidationPhase):
    """Supervised evaluation: forward and loss, nothing is changed."""

    provides = {ForwardBegin: ("xs", "ys"), LossBegin: ("outputs",), ComputeEnd: ("loss",)}

    def step(self, learner: Any, emit: Emit) -> None:
        """Apply the model and compute the loss."""
        learner.step.xs, learner.step.ys = split_batch(learner.step.batch)
        emit(ForwardBegin())
        learner.step.outputs = learner.forward(learner.params, learner.step.xs)
        emit(LossBegin())
        if learner.loss_fn is not None:
            learner.step.loss = learner.loss_fn(learner.step.outputs, learner.step.ys)


class LossTrainingPhase(TrainingPhase):
    """Training with a `loss_fn(params, batch, key)`: what `Learner.from_loss` uses for TrainingPhase."""

    provides = {ForwardBegin: (), BackwardBegin: ("loss", "aux"), BackwardEnd: ("grads",), UpdateEnd: ("updates",)}

    def step(self, learner: Any, emit: Emit) -> None:
        """Differentiate the loss function, update the parameters."""
        emit(ForwardBegin())

        def loss(params: Any) -> Any:
            _call_loss(learner, params)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss, wrt="params")
        emit(BackwardEnd())
        learner.apply_updates()


class LossValidationPhase(ValidationPhase):
    """Evaluation of a `loss_fn(params, batch, key)`: what `Learner.from_loss` uses for ValidationPhase."""

    provides = {ForwardBegin: (), ComputeEnd: ("loss", "aux")}

    def step(self, learner: Any, emit: Emit) -> None:
        """Compute the loss."""
        emit(ForwardBegin())
        _call_loss(learner, learner.params)


BUILTIN_PHASES = (TrainingPhase, ValidationPhase, LossTrainingPhase, LossValidationPhase)


def _call_loss(learner: Any, params: Any) -> None:
    result = _required_loss(learner)(params, learner.step.batch, learner.key)
    if not isinstance(result, tuple):
        learner.step.loss = result
    elif len(result) == 2:
        learner.step.loss, learner.step.aux = result
    else:
        raise TraceError(
            f"The loss function returned a tuple of {len(result)}; it returns the loss, or a pair `(loss, aux)`.",
            why="the first is differentiated, and the second becomes `step.aux`",
            fix='put what belongs to the loss into one pytree: `return loss, {"kl": kl, "norm": norm}`',
        )


def _required_loss(learner: Any) -> Any:
    """Return the loss function, or say that there is none."""
    if learner.loss_fn is None:
        raise TraceError(
            "This Learner has no loss function, and its phase calls one.",
            why="`loss_fn=None` is for phases that compute their losses themselves",
            fix="give the Learner a `loss_fn`, or `phases=` with a step of your own",
        )
    return learner.loss_fn
