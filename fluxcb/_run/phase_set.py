"""The phases of a Learner, in the form in which the Learner runs them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from fluxcb._declare.phases import LossTrainingPhase, LossValidationPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb._declare.signatures import accepts, source_of
from fluxcb._declare.turns import InTurn, flat
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.arguments import as_list_of_phases
from fluxcb._run.validate_callbacks import refuse_shared_names
from fluxcb._traced_values import shapes

__all__ = ["PhaseSet"]

# Exact classes: a subclass of `TrainingPhase` has its own step and is never replaced.
_OF_LOSS = {TrainingPhase: LossTrainingPhase(), ValidationPhase: LossValidationPhase()}


def _refuse_outputs_step(phase: Phase) -> None:
    """Raise an error for a subclass of a default phase whose step calls `loss_fn(outputs, ys)`.

    Raises:
        DeclarationError: The subclass inherits this step.
    """
    for cls, of_loss in _OF_LOSS.items():
        # A subclass with its own `step` can call a loss function of any form.
        if type(phase) is not cls and isinstance(phase, cls) and type(phase).step is cls.step:
            name, base = type(phase).__name__, type(of_loss).__name__
            raise DeclarationError(
                f"`{name}` inherits the step of `{cls.__name__}`, which calls `loss_fn(outputs, ys)`, and the loss "
                "function of this Learner gets the batch.",
                where=f"{type(phase).__module__}.{type(phase).__qualname__}",
                fix=f"derive it from the phase for such loss functions: `class {name}(fluxcb.phases.{base}):`",
            )


class PhaseSet:
    """The phases of a Learner.

    Args:
        given: The user's phases, or None for training and validation.
        of_batch: Whether the loss function receives the batch, and not the outputs of the model. The default phases are
            then replaced by the phases for such a loss function, so that users need to know only one name for each.

    Attributes:
        groups: The phases in order; an `InTurn` is one element.
        phases: The phases in order.

    Raises:
        DeclarationError: An element is not a phase instance, its `step` does not take `(learner, emit)`, or two phases
            have the same name.
    """

    def __init__(self, given: Iterable[Phase | InTurn] | None, *, of_batch: bool) -> None:
        self._of_batch = of_batch
        groups = tuple(as_list_of_phases(given)) if given is not None else (TrainingPhase(), ValidationPhase())
        for phase in flat(groups):
            if not isinstance(phase, Phase):
                raise DeclarationError(
                    f"`phases` contains {phase!r}, which is not a phase instance.",
                    fix=f"write `{phase.__name__}()`"
                    if isinstance(phase, type)
                    else "write e.g. `phases=(TrainingPhase(),)`",
                )
            if of_batch:
                _refuse_outputs_step(phase)
            if not accepts(phase.step, 2):
                raise DeclarationError(
                    f"`{type(phase).__qualname__}.step` takes {inspect.signature(phase.step)}, and is called as "
                    "`step(learner, emit)`.",
                    where=source_of(type(phase).step),
                    fix="write `def step(self, learner, emit):`",
                )
        # Names select data, metrics, and positions in checkpoints, so they must be unique.
        refuse_shared_names(flat(groups))
        self.groups: tuple[Phase | InTurn, ...] = tuple(
            InTurn(*map(self._as_run, group.phases), steps=group.steps)
            if isinstance(group, InTurn)
            else self._as_run(group)
            for group in groups
        )
        self.phases: tuple[Phase, ...] = flat(self.groups)

    def _as_run(self, phase: Phase) -> Phase:
        return _OF_LOSS.get(type(phase), phase) if self._of_batch else phase

    def resolve(self, phase: Any, *, measures: bool = False) -> Phase:
        """Return the form in which this Learner runs a phase that the user passed to a method.

        Args:
            phase: The phase.
            measures: Whether the method takes only phases that do not train.

        Raises:
            DeclarationError: It is not a phase instance.
        """
        if not isinstance(phase, Phase):
            shown = f"The class `{phase.__name__}`" if isinstance(phase, type) else repr(phase)
            shown = shown if len(shown) <= 100 else shapes(phase)  # arrays of a batch are too long
            example = self._meant(phase, measures)
            raise DeclarationError(f"{shown} is not a phase instance.", fix=f"pass an instance, e.g. `{example}`")
        # Users pass `TrainingPhase()`, also if the Learner runs the phase for its loss function instead.
        return self._as_run(phase)

    def _meant(self, phase: Any, measures: bool) -> str:
        """Return the code that creates the phase whose class or name the user passed, or another phase."""
        if isinstance(phase, InTurn):
            return repr(phase.phases[0])
        found = phase if isinstance(phase, type) and issubclass(phase, Phase) else None
        if isinstance(phase, str):
            found = next((type(own) for own in self.phases if type(own).name == phase), None)
        # Users know only the names of the phases that this Learner replaced.
        found = next((own for own, run in _OF_LOSS.items() if type(run) is found), found)
        if found is None or (measures and found.trains):
            found = ValidationPhase
        return f"{'fluxcb.phases.' * found.__module__.startswith('fluxcb.')}{found.__name__}()"

    @property
    def in_turn(self) -> tuple[tuple[str, ...], ...]:
        """The names of the alternating phases, a tuple for each `InTurn`."""
        return tuple(group.names for group in self.groups if isinstance(group, InTurn))

    def training(self) -> tuple[Phase, ...]:
        """Return the phases that train.

        Raises:
            DeclarationError: No phase trains.
        """
        if found := tuple(phase for phase in self.phases if type(phase).trains):
            return found
        raise DeclarationError("None of this Learner's phases trains.", fix="pass `phases=(TrainingPhase(), ...)`")

    def training_groups(self) -> tuple[Phase | InTurn, ...]:
        """Return the phases that train; an `InTurn` is one element."""
        # `InTurn` accepts only phases that train.
        return tuple(group for group in self.groups if isinstance(group, InTurn) or type(group).trains)

    def missing_data(self, phase: Phase) -> DataError:
        """Return the error for a phase that is to run and has no data."""
        name = type(phase).name
        # The example includes training data, without which the Learner could be built but not trained.
        training = "" if type(phase).trains else '"training": ..., '
        give = f'pass `data={{{training}"{name}": batches}}` to the Learner'
        leave = f"if only `run_step` runs it, leave `{phase!r}` out of `phases`"
        # A phase of an `InTurn` cannot be left out.
        optional = phase in self.groups and any(type(p).trains and p != phase for p in self.phases)
        return DataError(
            f"There is no data for {type(phase).__name__}: `data.{name}` is not set.",
            fix=[give, leave] if optional else give,
        )

    def schedule(self) -> list[str]:
        """Return the training phases in the order in which an epoch of `fit` runs them; an `InTurn` counts as one."""
        groups = self.training_groups()
        return [group.description if isinstance(group, InTurn) else type(group).name for group in groups]
