"""`{"cbstate": Write()}` covers every entry that the callback's `init` creates."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import fluxcb
from fluxcb import Callback, MissingStateError, Read, Write, on
from fluxcb.events import ComputeEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class OnHost(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": Write()}

    def init(self, learner: Any) -> None:
        if "steps" not in learner.cbstate:
            learner.cbstate.steps = []

    @on
    def note(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.cbstate.steps.append(learner.progress.step)


class InStep(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": Write()}

    def init(self, learner: Any) -> None:
        if "steps" not in learner.cbstate:
            learner.cbstate.steps = jnp.zeros((), jnp.int32)

    @on
    def count(self, event: ComputeEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.cbstate.steps = learner.cbstate.steps + 1


class Reads(Callback):
    def __init__(self, name: str = "steps") -> None:
        self.entry, self.seen = name, []

    def stateaccess(self) -> Any:
        return {"cbstate": {self.entry: Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        value = learner.cbstate[self.entry]
        self.seen.append(len(value) if isinstance(value, list) else int(value))

    def __repr__(self) -> str:
        return "Reads()"


@pytest.mark.parametrize("creator", [OnHost, InStep])
@pytest.mark.parametrize("turned", [False, True])
def test_reader_of_created_entry_runs_after_writer(creator: Any, turned: bool) -> None:
    reads = Reads()
    callbacks = [reads, creator()] if turned else [creator(), reads]
    fluxcb.check(callbacks, default_callbacks=False)
    testlearner(*callbacks).fit(1)
    assert reads.seen == [1, 2, 3, 4]


def test_entry_that_init_does_not_create_is_missing(refused: Any) -> None:
    where = fluxcb._declare.dispatch.source_of(Reads.stateaccess)
    with refused(
        MissingStateError,
        "Reads() declares `cbstate.step`, which no callback's `init` creates. Did you mean `steps`?\n"
        f"  where: Reads.stateaccess  {where}\n"
        "  why:   shared state must exist before the first handler runs\n"
        "  fix:   assign `learner.cbstate.step` in the `init` of OnHost()",
    ):
        testlearner(OnHost(), Reads("step"))


def test_wildcard_without_init_creates_nothing() -> None:
    class Writes(Callback):
        def stateaccess(self) -> Any:
            return {"cbstate": Write()}

    with pytest.raises(MissingStateError) as error:
        fluxcb.check([Writes(), Reads()], default_callbacks=False)
    assert error.value.what == "Reads() reads `cbstate.steps`, which no callback creates."
    assert error.value.fix[0] == "add `OnHost()` to the callbacks"
