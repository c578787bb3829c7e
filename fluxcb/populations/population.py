"""`Population`: several Learners that train in one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, overload

from fluxcb._calls import Constructed, entry_point
from fluxcb._run.fit_loop import FitLength
from fluxcb._run.history import History
from fluxcb._run.interrupts import caught_interrupts
from fluxcb._run.learner import Learner
from fluxcb.populations.members import (
    check_members,
    check_outputs,
    make_members,
    member_arguments,
    member_label,
)
from fluxcb.populations.meeting import Meeting
from fluxcb.populations.session import Session

__all__ = ["Population"]


class Population(Constructed):
    """Train several Learners of the same structure in one compiled program."""

    def __init__(
        self,
        learner_factory: Callable[..., Learner],
        *,
        callbacks: Sequence[Any] = (),
        default_callbacks: bool = True,
        **keywords: Any,
    ) -> None:
        self._arguments = member_arguments(learner_factory, keywords)
        self._labels = [member_label(index, own) for index, own in enumerate(self._arguments)]
        self._members = make_members(learner_factory, self._arguments)
        self._meeting = Meeting()
        check_outputs(self._members, self._labels)
        check_members([learner._core for learner in self._members], self._labels)

    @property
    def members(self) -> tuple[Learner, ...]:
        """The Learners of the members."""
        return tuple(self._members)

    @property
    def arguments(self) -> tuple[Mapping[str, Any], ...]:
        """The keyword arguments with which the factory built each member."""
        return tuple(self._arguments)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> Learner:
        return self._members[index]

    def __iter__(self) -> Iterator[Learner]:
        return iter(self._members)

    @entry_point
    def fit(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        resume: bool = False,
        allow: Collection[str] = (),
    ) -> list[History]:
        FitLength(epochs, steps, steps_per_epoch)
        for learner in self._members:
            core = learner._core
            core.ensure_built(core.phase_set.training()[0])
        session = Session(self._members, self._labels, self._meeting)

        def fit(learner: Learner) -> None:
            learner.fit(epochs, steps=steps, steps_per_epoch=steps_per_epoch, resume=resume, allow=allow)

        with caught_interrupts() as interrupt:
            errors = session.run(fit, interrupt)
        self.session = session
        failed = [(index, error) for index, error in enumerate(errors) if error is not None]
        for index, error in failed:
            error.add_note(f"raised in {self._labels[index]}")
            raise error
        return [learner.history for learner in self._members]
