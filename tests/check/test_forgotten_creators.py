"""A missing entry of `cbstate`: misspelled names, and the user's callback that would create it."""

from __future__ import annotations

from typing import Any

import pytest

import fluxcb
from fluxcb import Callback, MissingStateError, Read, Write, on
from fluxcb._check.forgotten_creators import misspelled
from fluxcb._declare.state import PROVIDERS
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class CreatesTail(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"loss_tail": Write()}}

    def init(self, learner: Any) -> None:
        learner.cbstate.loss_tail = []


class CreatesNoise(Callback):
    """Create an entry by its name as a string, with an argument that is required."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def stateaccess(self) -> Any:
        return {"cbstate": {"gn_ema": Write()}}

    def init(self, learner: Any) -> None:
        learner.cbstate["gn_ema"] = 0.0


class CreatesUndeclared(Callback):
    """Create an entry that is not declared."""

    def init(self, learner: Any) -> None:
        learner.cbstate.worst = 0.0


class Uses(Callback):
    def __init__(self, name: str) -> None:
        self.entry = name

    def stateaccess(self) -> Any:
        return {"cbstate": {self.entry: Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        assert self.entry in learner.cbstate

    def __repr__(self) -> str:
        return "Uses()"


class UsesTail(Uses):
    """Mention the entry in `stateaccess` only, so adding it would not create the entry."""

    def stateaccess(self) -> Any:
        return {"cbstate": {"loss_tail": Read()}}


def missing(*callbacks: Callback) -> MissingStateError:
    with pytest.raises(MissingStateError) as raised:
        fluxcb.check(callbacks, default_callbacks=False)
    return raised.value


@pytest.mark.parametrize(
    ("entry", "shown", "make"),
    [
        ("loss_tail", "CreatesTail()", CreatesTail),
        ("gn_ema", "CreatesNoise(decay=1.0)", lambda: CreatesNoise(decay=1.0)),
    ],
)
def test_forgotten_callback_of_the_user_is_the_first_fix(entry: str, shown: str, make: Any) -> None:
    where = fluxcb._declare.dispatch.source_of(Uses.stateaccess)
    assert str(missing(Uses(entry))) == (
        f"Uses() reads `cbstate.{entry}`, which no callback creates.\n"
        f"  where: Uses.stateaccess  {where}\n"
        "  why:   it would fail at the first handler that reads it\n"
        f"  fix:   add `{shown}` to the callbacks\n"
        f"     or: add a callback that declares `Write()` on `cbstate.{entry}` and creates it in its `init`"
    )
    testlearner(Uses(entry), make()).fit(1)


def test_class_in_a_function_is_suggested_only_there() -> None:
    class CreatesLocal(Callback):
        def stateaccess(self) -> Any:
            return {"cbstate": {"local_entry": Write()}}

        def init(self, learner: Any) -> None:
            learner.cbstate.local_entry = 0

    class UsesLocal(Uses): ...

    assert missing(UsesLocal("local_entry")).fix[0] == "add `CreatesLocal()` to the callbacks"
    assert missing(Uses("local_entry")).fix[0].startswith("add a callback that declares")


def test_class_that_is_in_the_list_or_only_reads_is_not_suggested() -> None:
    class Renamed(CreatesTail):
        def stateaccess(self) -> Any:
            return {}

    assert not [fix for fix in missing(Uses("loss_tail"), Renamed()).fix if "CreatesTail" in fix or "UsesTail" in fix]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("loss_scal", "loss_scale"), ("metrics_epch", "metrics_epoch"), ("histroy", "history"), ("eam", "ema")),
        *(("loss_tail", ""), ("gn_ema", ""), ("steps", ""), ("summary", "")),
    ],
)
def test_nearest_name_is_a_typo_of_one_or_two_letters(name: str, meant: str) -> None:
    assert misspelled(name, list(PROVIDERS)) == meant


def test_callback_in_the_list_that_creates_the_entry_without_declaring_it_is_named() -> None:
    fix = r"fix:   declare `Write\(\)` on `cbstate.worst` in `CreatesUndeclared.stateaccess`, because "
    with pytest.raises(MissingStateError, match=f"{fix}`CreatesUndeclared.init` creates it$"):
        fluxcb.check([CreatesUndeclared(), Uses("worst")])
