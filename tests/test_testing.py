"""`fluxcb.testing`: a callback that breaks a law fails, and the message names the law."""

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
    """Return the message of `check_callback` for a callback."""
    with pytest.raises(AssertionError) as raised:
        check_callback(make, **kwargs)
    return str(raised.value)


# -- the small Learner -------------------------------------------------------------------------------------------------


def test_testlearner_learns_line():
    learner = testlearner()
    learner.fit(100)
    np.testing.assert_allclose([learner.params["w"], learner.params["b"]], [3, -1], atol=1e-3)
    assert learner.hyperparams == {"learning_rate": float(np.float32(0.1))}


def test_testlearner_data_is_deterministic_with_requested_size():
    one, same = testlearner(), testlearner(batches=2, validation_batches=1, batch_size=8)
    training, validation = (one._state.data[name] for name in ("training", "validation"))
    assert (len(training), len(validation), training[0][0].shape) == (4, 2, (8, 1))
    np.testing.assert_array_equal(training[0][0], same._state.data["training"][0][0])
    assert (len(same._state.data["training"]), len(same._state.data["validation"])) == (2, 1)
    assert "validation" not in testlearner(validation_batches=0)._state.data
    assert testlearner(batch_size=3)._state.data["training"][0][1].shape == (3, 1)
    xs, ys = training[0]
    np.testing.assert_allclose(ys, 3 * xs - 1, rtol=1e-6)


def test_testlearner_is_not_collected_as_test():
    assert testlearner.__test__ is False


def test_importing_testing_module_does_not_import_jax():
    code = "import sys, fluxcb.testing; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_event_log_has_names_and_survives_checkpoint():
    log = EventLog()
    testlearner(log, batches=1, validation_batches=1).fit(1)
    assert log.names("validation") == ["EpochBegin", "StepBegin", "StepEnd", "EpochEnd"]
    other = EventLog()
    other.load_state_dict({"entries": [list(entry) for entry in log.state_dict()["entries"]]})
    assert other.entries == log.entries


def test_event_log_does_not_limit_windows():
    learner = testlearner(EventLog(), batches=40)
    learner.fit(1)
    plan = learner._core.engine.step_loop(learner.phases[0]).runner.plan
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


def test_assert_order():
    assert_order([Reads(), Writes()], BackwardEnd, TrainingPhase, [Writes, Reads])
    with pytest.raises(AssertionError) as raised:
        assert_order([Reads(), Writes()], BackwardEnd, TrainingPhase, [Reads, Writes])
    assert str(raised.value) == "At BackwardEnd x TrainingPhase the order is [Writes, Reads], not [Reads, Writes]."


def test_assert_valid_graph():
    assert assert_valid_graph([Reads(), Writes()]).order(BackwardEnd, TrainingPhase)
    with pytest.raises(AssertionError) as raised:
        assert_valid_graph([Writes(), OtherWrites()])
    assert str(raised.value).splitlines()[:2] == [
        "The callbacks do not fit together.",
        "ConflictError: Writes() and OtherWrites() both write `step.grads` and no order is declared.",
    ]


def test_assert_conflict():
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
def test_valid_callbacks_pass(make):
    check_callback(make)


class Undeclared(Callback):
    @on
    def read(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.params  # noqa: B018 - the read is the test


def test_undeclared_access_fails():
    lines = broken(Undeclared).splitlines()
    assert lines[:2] == [
        "Undeclared() breaks a law of callbacks.",
        "  Training fails without the default callbacks. AccessError: Undeclared() may not read `params`: "
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


def test_unused_declaration_fails():
    assert broken(DeclaresTooMuch) == (
        "DeclaresTooMuch() breaks a law of callbacks.\n"
        "  It declares Read() on `step.grads`, but never reads it in 2 epochs."
    )
    check_callback(DeclaresTooMuch, unused=["step.grads"])


def test_write_access_used_only_for_reading_fails():
    assert broken(OnlyReads) == (
        "OnlyReads() breaks 2 laws of callbacks.\n"
        "  It declares Read() on `step.grads`, but never reads it in 2 epochs.\n"
        "  It declares Write() on `params`, but only reads it; declare Read()."
    )


class ReadsOnTheHost(Callback):
    """Declare write access to values that are only read: copies of the parameters, and a writable list."""

    def stateaccess(self):
        return {"params": Write(), "cbstate": {"list": Write()}}

    def init(self, learner):
        if "list" not in learner.cbstate:
            learner.cbstate.list = []

    @on
    def read(self, event: FitEnd, phase: TrainingPhase, learner):
        learner.cbstate.list.append(float(learner.params["w"]))
        if event.outcome == "failed":
            learner.params = learner.params


def test_reading_copy_is_not_write():
    assert broken(ReadsOnTheHost) == (
        "ReadsOnTheHost() breaks a law of callbacks.\n"
        "  It declares Write() on `params`, but only reads it; declare Read()."
    )


class NeverWrites(Callback):
    def stateaccess(self):
        return {"step": {"loss": Append()}, "control": Append()}

    @on
    def idle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        if self.__dict__.get("enabled"):
            learner.step.loss = learner.step.loss


def test_unused_write_declaration_fails():
    assert broken(NeverWrites) == (
        "NeverWrites() breaks a law of callbacks.\n"
        "  It declares Append() on `step.loss`, but never uses it in 2 epochs."
    )


class Needs(Callback):
    def stateaccess(self):
        return {"cbstate": {"kept": Read()}}

    @on
    def read(self, event: FitEnd, phase: TrainingPhase, learner):
        len(learner.cbstate.kept)


def test_callback_that_needs_others():
    assert broken(Needs).splitlines()[1] == (
        "  Training fails without the default callbacks. "
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
    "  Its field `steps` changes during training (from 0 to 8), and `load_state_dict` does not restore it. "
    "Save it in `state_dict`, or store it in `learner.cbstate`."
)


def test_unsaved_fields_fail():
    assert broken(Counter) == f"Counter() breaks a law of callbacks.\n{FIELD}"
    check_callback(SavedCounter)
    check_callback(Counter, handles=["steps"])
    assert broken(HalfSavedCounter) == (
        "HalfSavedCounter() breaks 2 laws of callbacks.\n"
        f"  `load_state_dict(state_dict())` does not restore the values that `state_dict` returns.\n{FIELD}"
    )
    assert broken(UnloadableCounter).splitlines()[:2] == [
        "UnloadableCounter() breaks a law of callbacks.",
        "  Training fails after `load_state_dict(state_dict())`. DeclarationError: `UnloadableCounter` was given a "
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


def test_second_init_that_changes_state_fails():
    cure = 'create it only `if "losses" not in learner.cbstate`.'
    assert broken(Recreates) == (
        "Recreates() breaks a law of callbacks.\n"
        f"  A second call of `init` after training changes `cbstate.losses`; {cure}"
    )
    assert broken(Grows) == (
        f"Grows() breaks 2 laws of callbacks.\n  A second call of `init` changes `cbstate.losses`; {cure}\n"
        f"  A second call of `init` after training changes `cbstate.losses`; {cure}"
    )


class Numbered(Callback):
    """Compute a result that depends on the number of callbacks before it, which is not declared."""

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


def test_nondeterministic_training_fails():
    lines = broken(Numbered).splitlines()
    assert lines[0] == "Numbered() breaks 4 laws of callbacks."
    assert lines[1].startswith("  The train state differs when the callbacks list is reversed: ")
    assert lines[2].startswith("  The train state differs when the callbacks list is rotated: ")
    assert lines[3].startswith("  The train state differs when every step is a window of its own: ")
    assert lines[4].startswith("  The train state differs when three steps run in one call: ")
    assert "['params']['w']" in lines[1]


class Retraces(Callback):
    """Return a new schedule on each call, so that compiled programs never match."""

    def stateaccess(self):
        return {"data": {"training": Write()}}

    @on
    def change(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.data.training = [
            (xs[: -learner.progress.epoch], ys[: -learner.progress.epoch]) for xs, ys in learner.data.training
        ]


def test_retracing_fails():
    assert broken(Retraces, epochs=2) == (
        "Retraces() breaks a law of callbacks.\n"
        "  The step is traced or compiled again after the first epoch: {'traces': 2, 'compiles': 2} became "
        "{'traces': 3, 'compiles': 3}. Traced handlers must not depend on Python values that change."
    )


class Crowded(Callback):
    """Works alone, but not with the default callbacks."""

    def stateaccess(self):
        return {"cbstate": {"history": Write()}}

    def init(self, learner):
        if "history" not in learner.cbstate:
            learner.cbstate.history = {}

    @on
    def use(self, event: StepEnd, phase: Phase, learner):
        learner.cbstate.history[type(phase).name] = learner.progress.step


def test_conflict_with_default_callbacks_fails():
    lines = broken(Crowded).splitlines()
    assert lines[0] == "Crowded() breaks a law of callbacks."
    assert lines[1].startswith("  Training fails with the default callbacks. ")


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
