"""Values of the step that a callback adds: read before they are written, and callbacks that are not in the list."""

from __future__ import annotations

from typing import Any

import pytest

import fluxcb
from fluxcb import Append, Callback, MissingStateError, Read, UnknownStateError, Write, in_order, on
from fluxcb.callbacks import CheckNumerics
from fluxcb.events import BackwardEnd, StepEnd, UpdateEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Adds(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"loss": Read(), "doubled_loss": Write()}}

    @on  # adds
    def double(self, event: BackwardEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.step.doubled_loss = 2 * learner.step.loss


class Skips(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"doubled_loss": Read(), "skip": Append()}}

    @on  # skips
    def skip(self, event: BackwardEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.step.skip = learner.step.doubled_loss > 1e9


class Shows(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"doubled_loss": Read()}}

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        assert float(learner.step.doubled_loss) > 0


class AddsLater(Adds):
    """Write the value at a later event, too."""

    @on
    def again(self, event: UpdateEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.step.doubled_loss = 2 * learner.step.loss


class Numbers(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"finite_grads": Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        assert learner.step.finite_grads.all()


def test_in_order_that_puts_the_reader_before_the_writer_is_an_error(refused: Any) -> None:
    with refused(
        MissingStateError,
        "Skips() reads `step.doubled_loss` before Adds() writes it.\n"
        "  where: Skips.skip  <@skips>\n"
        "         Adds.double  <@adds>\n"
        "  why:   `in_order` or `runafter` states this order, and the value does not exist before it is written\n"
        "  fix:   state the other order: put them in the list as `in_order(Adds(), Skips())`",
    ):
        fluxcb.check([in_order(Skips(), Adds())])
    testlearner(in_order(Adds(), Skips())).fit(1)


@pytest.mark.parametrize("callbacks", [(Skips(), Adds()), (Shows(), Adds()), (Adds(), Shows(), Skips())])
def test_other_orders_are_right(callbacks: Any) -> None:
    fluxcb.check(callbacks)


def test_value_that_another_handler_may_have_written_before_is_not_judged() -> None:
    fluxcb.check([in_order(Skips(), AddsLater())])


def test_callback_that_would_write_the_value_is_named() -> None:
    with pytest.raises(UnknownStateError, match=r"fix:   add `Adds\(\)` to the callbacks$"):
        fluxcb.check([Shows()])
    testlearner(Shows(), Adds()).fit(1)


def test_callback_of_the_library_that_would_write_the_value_is_named() -> None:
    with pytest.raises(UnknownStateError, match=r"add `CheckNumerics\(\)` to the callbacks, which writes it$"):
        fluxcb.check([Numbers()])
    testlearner(Numbers(), CheckNumerics()).fit(1)
