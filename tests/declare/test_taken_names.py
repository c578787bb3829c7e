"""An entry of `cbstate` that a callback of the user and a callback of fluxcb both create is an error."""

import pytest

from fluxcb import Callback, DeclarationError, Write, on
from fluxcb.callbacks import CallbackFactory, LogMetrics, Metrics, Monitors, ParameterEMA, Recorder
from fluxcb.events import FitEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Creates(Callback):
    """Creates an entry, and writes it at the end of the fit."""

    def __init__(self, entry):
        self.entry = entry

    def stateaccess(self):
        return {"cbstate": {self.entry: Write()}}

    def init(self, learner):
        learner.cbstate[self.entry] = []

    @on
    def write(self, event: FitEnd, phase: TrainingPhase, learner):
        learner.cbstate[self.entry] = [*learner.cbstate[self.entry], 1]


@pytest.mark.parametrize(
    ("entry", "other"), [("history", Recorder), ("metrics_epoch", Metrics), ("ema", lambda: ParameterEMA(0.9))]
)
@pytest.mark.parametrize("first", [True, False])
def test_entry_of_callback_of_fluxcb_cannot_be_created(entry, other, first):
    own, theirs = Creates(entry), other()
    with pytest.raises(DeclarationError, match="assigns") as raised:
        testlearner(*((own, theirs) if first else (theirs, own)))
    assert raised.value.what == f"The `init` of {own!r} assigns `cbstate.{entry}`, which is an entry of {theirs!r}."
    assert raised.value.fix == (f"give the entry of {own!r} another name",)
    # The fix.
    learner = testlearner(Creates(f"my_{entry}"), other())
    learner.fit(1)
    assert learner.cbstate[f"my_{entry}"] == [1]


def test_entries_that_the_user_names_can_be_shared():
    def add(learner):
        learner.cbstate.notes = [*learner.cbstate.notes, 2]

    factory = CallbackFactory(trigger=add, access={"cbstate": {"notes": Write()}})
    learner = testlearner(Creates("notes"), factory)
    learner.fit(1)
    assert learner.cbstate["notes"] == [2, 1]


class OwnMonitors(Monitors):
    """A subclass creates the entry of its base class."""


def test_subclass_can_create_the_entry_of_its_base_class():
    learner = testlearner(Metrics(), OwnMonitors(), LogMetrics())
    learner.fit(1)
    assert "training/loss" in learner.cbstate["monitors"]
