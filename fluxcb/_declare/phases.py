"""Phases, which define the traced step for a data source.

A phase has a method `step(learner, emit)`, which is traced into one XLA program. To train a GAN, a VAE or an RL
agent, define a phase with its own step. All callbacks work with it unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from fluxcb._calls import Constructed, entry_point
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
from fluxcb._declare.losses import takes_model
from fluxcb._declare.phase_learner import StepLearner
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
    "defined_phase_names",
    "named_phase",
]

Emit = Callable[[Event], None]


class Phase(Constructed):
    """Base class of phases: training, validation, or a phase of your own.

    Attributes:
        name: Key of the phase's data source (`data.<name>`) and of its history.
        trains: Whether `progress.step` counts the steps of this phase, and the model runs in training mode.
        provides: The traced events that `step` emits, in order, each with the `step.*` names that exist from that event
            on (`()` for none). ComputeEnd is emitted even if it is not listed, and so is UpdateEnd if the phase trains.
        uses: The entries of `cbstate` that `step` reads or assigns, such as `("cbstate.target",)`. A callback's `init`
            creates them, as pytrees of JAX arrays.
    """

    name: ClassVar[str] = "phase"
    trains: ClassVar[bool] = False
    provides: ClassVar[Mapping[type[TracedEvent], tuple[str, ...]]] = {}
    uses: ClassVar[tuple[str, ...]] = ()

    @entry_point
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.uses, tuple) or any(not _names_an_entry(path) for path in cls.uses):
            raise DeclarationError(
                f"`{cls.__name__}.uses` must be a tuple of entries of `cbstate`, not {cls.uses!r}.",
                where=f"{cls.__module__}.{cls.__qualname__}",
                fix='write e.g. `uses = ("cbstate.target",)`',
            )
        for event, names in cls.provides.items():
            if not (isinstance(event, type) and issubclass(event, TracedEvent)) or isinstance(names, str):
                raise DeclarationError(
                    f"`{cls.__name__}.provides` must map traced events to tuples of step names, "
                    f"not {event!r} to {names!r}.",
                    where=f"{cls.__module__}.{cls.__qualname__}",
                    fix='write `provides = {LossBegin: ("outputs",), BackwardBegin: ("loss",)}`',
                )

    def step(self, learner: StepLearner, emit: Emit) -> None:
        """Compute one step. This method is traced. `learner` is the whole learner without protection, with tracers."""
        raise DeclarationError(
            f"`{type(self).__name__}` has no `step(self, learner, emit)`, so it has nothing to run.",
            fix=f"derive `{type(self).__name__}` from TrainingPhase or ValidationPhase, or write its `step`",
        )

    # Equal phases share one compiled program.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _names_an_entry(path: Any) -> bool:
    return isinstance(path, str) and path.count(".") == 1 and path.startswith("cbstate.") and path != "cbstate."


class AbstractTrainingPhase(Phase):
    """Base class of all phases that change the parameters."""

    name = "training"
    trains = True


class AbstractValidationPhase(Phase):
    """Base class of all phases that only compute outputs, losses and metrics."""

    name = "validation"


class _NameOnly(Phase):
    """Base class of the classes that `named_phase` returns."""


@functools.cache
def named_phase(name: str) -> type[Phase]:
    """Return a phase class that only has a name, for metrics that are stored under a name that is not a phase's."""
    return type(name, (_NameOnly,), {"name": name, "__module__": __name__})


def defined_phase_names(phase: type[Phase] = Phase) -> set[str]:
    """Return the names of a phase class and of its subclasses, except those that `named_phase` created."""
    derived = (cls for cls in phase.__subclasses__() if cls is not _NameOnly)
    return {phase.name}.union(*map(defined_phase_names, derived))


class TrainingPhase(AbstractTrainingPhase):
    """Supervised training: forward pass, loss, gradients, and parameter update."""

    provides = {
        ForwardBegin: ("xs", "ys"),
        LossBegin: ("outputs",),
        BackwardBegin: ("loss",),
        BackwardEnd: ("grads",),
        UpdateEnd: ("updates",),
    }

    def step(self, learner: StepLearner, emit: Emit) -> None:
        """Apply the model, differentiate the loss, and update the parameters."""
        learner.step.xs, learner.step.ys = learner.split(learner.step.batch)
        emit(ForwardBegin())

        def loss(params: Any) -> Any:
            learner.step.outputs = learner.forward(params, learner.step.xs)
            emit(LossBegin())
            learner.step.loss = _loss_of_outputs(learner, self)(learner.step.outputs, learner.step.ys)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss, wrt="params")
        emit(BackwardEnd())
        learner.apply_updates()


class ValidationPhase(AbstractValidationPhase):
    """Supervised evaluation: forward pass and loss, without changes to the state."""

    provides = {ForwardBegin: ("xs", "ys"), LossBegin: ("outputs",), ComputeEnd: ("loss",)}

    def step(self, learner: StepLearner, emit: Emit) -> None:
        """Apply the model and compute the loss."""
        learner.step.xs, learner.step.ys = learner.split(learner.step.batch)
        emit(ForwardBegin())
        learner.step.outputs = learner.forward(learner.params, learner.step.xs)
        emit(LossBegin())
        if learner.loss_fn is not None:
            learner.step.loss = _loss_of_outputs(learner, self)(learner.step.outputs, learner.step.ys)


# A loss function may return these in a dict `aux`, so that metrics of outputs and targets work with any loss function.
_NAMED_BY_AUX = ("outputs", "xs", "ys")


class LossTrainingPhase(TrainingPhase):
    """Training with a loss function of the batch, `loss_fn(model, batch)` or `loss_fn(params, batch)`.

    A Learner uses it in place of TrainingPhase if its loss function has one of these forms.
    """

    provides = {
        ForwardBegin: (),
        BackwardBegin: ("loss", "aux", *_NAMED_BY_AUX),
        BackwardEnd: ("grads",),
        UpdateEnd: ("updates",),
    }

    def step(self, learner: StepLearner, emit: Emit) -> None:
        """Differentiate the loss function, and update the parameters."""
        emit(ForwardBegin())

        def loss(params: Any) -> Any:
            _compute_loss(learner, params)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss, wrt="params")
        emit(BackwardEnd())
        learner.apply_updates()


class LossValidationPhase(ValidationPhase):
    """Evaluation of a loss function of the batch, `loss_fn(model, batch)` or `loss_fn(params, batch)`.

    A Learner uses it in place of ValidationPhase if its loss function has one of these forms.
    """

    provides = {ForwardBegin: (), ComputeEnd: ("loss", "aux", *_NAMED_BY_AUX)}

    def step(self, learner: StepLearner, emit: Emit) -> None:
        """Compute the loss."""
        emit(ForwardBegin())
        _compute_loss(learner, learner.params)


BUILTIN_PHASES = (TrainingPhase, ValidationPhase, LossTrainingPhase, LossValidationPhase)


def _compute_loss(learner: StepLearner, params: Any) -> None:
    _required_loss(learner)
    learner.step.loss, aux = learner.call_loss(params)
    if aux is None:
        return
    learner.step.aux = aux
    if isinstance(aux, Mapping):
        for name in _NAMED_BY_AUX:
            if name in aux:
                setattr(learner.step, name, aux[name])


def _loss_of_outputs(learner: StepLearner, phase: Phase) -> Any:
    """Return the loss function, or raise an error if it takes the model and the batch instead of outputs."""
    loss_fn = _required_loss(learner)
    if takes_model(loss_fn):
        base, name = "TrainingPhase" if phase.trains else "ValidationPhase", type(phase).__name__
        raise TraceError(
            f"`{name}` runs the step of `{base}`, which calls `loss_fn(outputs, ys)`, but the loss function of this "
            "Learner takes the model and the batch.",
            fix=f"derive `{name}` from `Loss{base}`: `class {name}(Loss{base})`",
        )
    return loss_fn


def _required_loss(learner: StepLearner) -> Any:
    """Return the loss function, or raise an error if there is none."""
    if learner.loss_fn is None:
        raise TraceError(
            "This Learner has no loss function, but its phase calls one.",
            why="`loss_fn=None` is for phases that compute their losses themselves",
            fix=[
                "pass a `loss_fn` to the Learner",
                "pass only phases with a `step` of your own, for a validation a subclass of `AbstractValidationPhase`",
            ],
        )
    return learner.loss_fn
