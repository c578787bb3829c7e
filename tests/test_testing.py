"""The kit itself: each law, broken, is found, and named."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Append, Callback, Read, Write, on
from fluxcb.events import BackwardEnd, EpochEnd, FitEnd, StepBegin, StepEnd, UpdateEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import EventLog, assert_conflict, assert_order, assert_valid_graph, check_callback, testlearner

ROOT = Path(__file__).resolve().parents[1]


def broken(make, **kwargs):
    """Return what `check_callback` says about a callback."""
    with pytest.raises(AssertionError) as raised:
        check_callback(make, **kwargs)
    return str(raised.value)


# -- the small Learner -------------------------------------------------------------------------------------------------


def test_it_learns_the_line():
    learner = testlearner()
    learner.fit(100)
    np.testing.assert_allclose([learner.params["w"], learner.params["b"]], [3, -1], atol=1e-3)
    assert learner.hyperparams == {"learning_rate": float(np.float32(0.1))}


def test_its_data_are_the_same_each_time_and_sized_as_asked():
    one, same = testlearner(), testlearner(batches=2, validation_batches=1, batch_size=8)
    training, validation = (one._state.data[name] for name in ("training", "validation"))
    assert (len(training), len(validation), training[0][0].shape) == (4, 2, (8, 1))
    np.testing.assert_array_equal(training[0][0], same._state.data["training"][0][0])
    assert (len(same._state.data["training"]), len(same._state.data["validation"])) == (2, 1)
    assert "validation" not in testlearner(validation_batches=0)._state.data
    assert testlearner(batch_size=3)._state.data["training"][0][1].shape == (3, 1)
    xs, ys = training[0]
    np.testing.assert_allclose(ys, 3 * xs - 1, rtol=1e-6)


def test_it_is_not_collected_as_a_test():
    assert testlearner.__test__ is False


def test_importing_the_kit_does_not_import_jax():
    code = "import sys, fluxcb.testing; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_log_has_names_and_survives_a_checkpoint():
    log = EventLog()
    testlearner(log, batches=1, validation_batches=1).fit(1)
    assert log.names("validation") == ["EpochBegin", "StepBegin", "StepEnd", "EpochEnd"]
    other = EventLog()
    other.load_state_dict({"entries": [list(entry) for entry in log.state_dict()["entries"]]})
    assert other.entries == log.entries


def test_the_log_bounds_no_window():
    learner = testlearner(EventLog(), batches=40)
    learner.fit(1)
    plan = learner._parts.engine.steps(learner.phases[0]).caller.plan
    assert plan.bounds == ()
    assert (list(plan.fetch.each), list(plan.fetch.last)) == ([], [])


# -- sets --------------------------------------------------------------------------------------------------------------


class Writes(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def write(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = learner.step.grads


class Reads(Callback):
    def stateaccess(self):
        return {"step": {"grads": Read()}}

    @on
    def read(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads  # noqa: B018 - the read is the test


class OtherWrites(Writes):
    pass


def test_order():
    assert_order([Reads(), Writes()], BackwardEnd, TrainingPhase, [Writes, Reads])
    with pytest.raises(AssertionError) as raised:
        assert_order([Reads(), Writes()], BackwardEnd, TrainingPhase, [Reads, Writes])
    assert str(raised.value) == "At BackwardEnd x TrainingPhase the order is [Writes, Reads], not [Reads, Writes]."


def test_validity():
    assert assert_valid_graph([Reads(), Writes()]).order(BackwardEnd, TrainingPhase)
    with pytest.raises(AssertionError) as raised:
        assert_valid_graph([Writes(), OtherWrites()])
    assert str(raised.value).splitlines()[:2] == [
        "The callbacks do not fit together.",
        "ConflictError: Writes() and OtherWrites() both write `step.grads` and no order is declared.",
    ]


def test_conflicts():
    error = assert_conflict([Writes(), OtherWrites(), Reads()], "step.grads")
    assert error.what == "Writes() and OtherWrites() both write `step.grads` and no order is declared."
    with pytest.raises(AssertionError) as raised:
        assert_conflict([Writes(), Reads()], "step.grads")
    assert str(raised.value) == "No two callbacks conflict about `step.grads`; no problem was found"
    with pytest.raises(AssertionError) as raised:
        assert_conflict([Writes(), OtherWrites()], "params")
    assert str(raised.value).splitlines()[0] == (
        "No two callbacks conflict about `params`; ConflictError: Writes() and OtherWrites() both write `step.grads` "
        "and no order is declared."
    )


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [EventLog, Writes, Reads])
def test_good_callbacks_pass(make):
    check_callback(make)


class Undeclared(Callback):
    @on
    def read(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.params  # noqa: B018 - the read is the test


def test_what_is_not_declared():
    lines = broken(Undeclared).splitlines()
    assert lines[:2] == [
        "Undeclared() breaks a law of callbacks.",
        "  It does not train without the default callbacks. AccessError: Undeclared() may not read `params`: "
        "its `stateaccess` does not declare it.",
    ]


class DeclaresTooMuch(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read(), "grads": Read()}, "cbstate": {"kept": Write()}, "params": Write()}

    def init(self, learner):
        if "kept" not in learner.cbstate:
            learner.cbstate.kept = []

    @on(StepEnd, TrainingPhase, access={"step": {"loss": Read()}, "cbstate": {"kept": Write()}})
    def keep(self, event, phase, learner):
        learner.cbstate.kept.append(float(learner.step.loss))

    @on(FitEnd, TrainingPhase, access={"params": Write()})
    def look(self, event, phase, learner):
        learner.params = learner.params


class OnlyReads(DeclaresTooMuch):
    @on(FitEnd, TrainingPhase, access={"params": Read()})
    def look(self, event, phase, learner):
        learner.params  # noqa: B018 - the read is the test


def test_what_is_declared_and_not_touched():
    assert broken(DeclaresTooMuch) == (
        "DeclaresTooMuch() breaks a law of callbacks.\n"
        "  It declares Read() on `step.grads`, and never reads it in 2 epochs."
    )
    check_callback(DeclaresTooMuch, unused=["step.grads"])


def test_what_is_declared_to_be_written_and_only_read():
    assert broken(OnlyReads) == (
        "OnlyReads() breaks 2 laws of callbacks.\n"
        "  It declares Read() on `step.grads`, and never reads it in 2 epochs.\n"
        "  It declares Write() on `params`, and only reads it; declare Read()."
    )


class ReadsOnTheHost(Callback):
    """Declares to write what it only reads: copies of the parameters, but a list in which it can write."""

    def stateaccess(self):
        return {"params": Write(), "cbstate": {"list": Write()}}

    def init(self, learner):
        if "list" not in learner.cbstate:
            learner.cbstate.list = []

    @on
    def read(self, event: FitEnd, phase: TrainingPhase, learner):
        learner.cbstate.list.append(float(learner.params["w"]))


def test_a_copy_that_is_read_is_not_taken_for_written():
    assert broken(ReadsOnTheHost) == (
        "ReadsOnTheHost() breaks a law of callbacks.\n"
        "  It declares Write() on `params`, and only reads it; declare Read()."
    )


class NeverWrites(Callback):
    def stateaccess(self):
        return {"step": {"loss": Append()}, "control": Append()}

    @on
    def idle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        pass


def test_what_is_declared_to_be_written_and_never_touched():
    assert broken(NeverWrites) == (
        "NeverWrites() breaks a law of callbacks.\n"
        "  It declares Append() on `step.loss`, and never touches it in 2 epochs."
    )


class Needs(Callback):
    def stateaccess(self):
        return {"cbstate": {"kept": Read()}}

    @on
    def read(self, event: FitEnd, phase: TrainingPhase, learner):
        len(learner.cbstate.kept)


def test_company():
    assert broken(Needs).splitlines()[1] == (
        "  It does not train without the default callbacks. "
        "MissingStateError: Needs() reads `cbstate.kept`, which no callback creates."
    )
    check_callback(Needs, needs=[DeclaresTooMuch])


class Counter(Callback):
    def __init__(self):
        self.steps = 0

    @on
    def count(self, event: StepBegin, phase: TrainingPhase, learner):
        self.steps += 1


class SavedCounter(Counter):
    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class HalfSavedCounter(SavedCounter):
    def load_state_dict(self, state):
        pass


class UnloadableCounter(Counter):
    def state_dict(self):
        return {"steps": self.steps}


FIELD = (
    "  Its field `steps` changes during training (from 0 to 8), and is not restored by `load_state_dict`. "
    "Save it in `state_dict`, or put it into `learner.cbstate`."
)


def test_fields_that_change():
    assert broken(Counter) == f"Counter() breaks a law of callbacks.\n{FIELD}"
    check_callback(SavedCounter)
    check_callback(Counter, handles=["steps"])
    assert broken(HalfSavedCounter) == (
        "HalfSavedCounter() breaks 2 laws of callbacks.\n"
        f"  `load_state_dict(state_dict())` does not bring back what `state_dict` gave.\n{FIELD}"
    )
    assert broken(UnloadableCounter).splitlines()[:2] == [
        "UnloadableCounter() breaks a law of callbacks.",
        "  It does not train after `load_state_dict(state_dict())`. DeclarationError: `UnloadableCounter` was given a "
        "saved state but has no `load_state_dict`.",
    ]


class Recreates(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"losses": Write()}}

    def init(self, learner):
        learner.cbstate.losses = []

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.losses.append(float(learner.step.loss))


class Grows(Recreates):
    def init(self, learner):
        if "losses" not in learner.cbstate:
            learner.cbstate.losses = []
        learner.cbstate.losses.append(0.0)


def test_init_twice():
    cure = 'create it only `if "losses" not in learner.cbstate`.'
    assert broken(Recreates) == (
        "Recreates() breaks a law of callbacks.\n"
        f"  `init` run a second time after training changes `cbstate.losses`; {cure}"
    )
    assert broken(Grows) == (
        f"Grows() breaks 2 laws of callbacks.\n  `init` run a second time changes `cbstate.losses`; {cure}\n"
        f"  `init` run a second time after training changes `cbstate.losses`; {cure}"
    )


class Numbered(Callback):
    """What it computes hangs on how many callbacks stand before it, and on nothing declared."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.number = type(self).made

    def __repr__(self):
        return "Numbered()"

    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def scale(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda g: g * self.number, learner.step.grads)


def test_training_that_differs_from_run_to_run():
    lines = broken(Numbered).splitlines()
    assert lines[0] == "Numbered() breaks 4 laws of callbacks."
    assert lines[1].startswith("  The train state differs when the callbacks list is turned round: ")
    assert lines[2].startswith("  The train state differs when the callbacks list is rotated: ")
    assert lines[3].startswith("  The train state differs when every step is a window of its own: ")
    assert lines[4].startswith("  The train state differs when three steps run in one call: ")
    assert "['params']['w']" in lines[1]


class Retraces(Callback):
    """Asks for another schedule each time it is asked, so its programs never fit."""

    def stateaccess(self):
        return {"data": {"training": Write()}}

    @on
    def change(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.data.training = [
            (xs[: -learner.progress.epoch], ys[: -learner.progress.epoch]) for xs, ys in learner.data.training
        ]


def test_a_step_that_is_traced_again():
    assert broken(Retraces, epochs=2) == (
        "Retraces() breaks a law of callbacks.\n"
        "  After the first epoch the step is traced or compiled again: {'traces': 2, 'compiles': 2} became "
        "{'traces': 3, 'compiles': 3}. Traced handlers must not depend on what changes in Python."
    )


class Crowded(Callback):
    """Works alone, but not beside the default callbacks."""

    def stateaccess(self):
        return {"cbstate": {"history": Write()}}

    def init(self, learner):
        if "history" not in learner.cbstate:
            learner.cbstate.history = {}

    @on
    def use(self, event: StepEnd, phase: Phase, learner):
        learner.cbstate.history[type(phase).name] = learner.progress.step


def test_a_callback_that_does_not_fit_beside_the_defaults():
    lines = broken(Crowded).splitlines()
    assert lines[0] == "Crowded() breaks a law of callbacks."
    assert lines[1].startswith("  It does not train beside the default callbacks. ")


class Carried(Callback):
    def stateaccess(self):
        return {"cbstate": {"sum": Write()}, "step": {"updates": Read()}}

    def init(self, learner):
        if "sum" not in learner.cbstate:
            learner.cbstate.sum = jnp.zeros(())

    @on
    def add(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.cbstate.sum = learner.cbstate.sum + learner.step.updates["w"]


def test_carried_state_passes():
    check_callback(Carried)
