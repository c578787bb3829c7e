"""Members that end before the others: their state stays as it is, and errors and signals end all of them."""

import os
import signal
import threading

import jax
import numpy as np
import pytest

import fluxcb
from fluxcb import Callback, CancelFitting, DeclarationError, Population, on
from fluxcb.callbacks import EarlyStopping, Metrics, StopOnNaNLoss
from fluxcb.events import EpochEnd, FitEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.populations import SuccessiveHalving, joint_runner
from fluxcb.testing import testlearner


class StopAt(Callback):
    """Cancel the fit at the end of an epoch, and remember the parameters at FitEnd."""

    def __init__(self, epoch):
        self.epoch, self.at_end = epoch, None

    def stateaccess(self):
        return {"progress": fluxcb.Read(), "params": fluxcb.Read()}

    @on(EpochEnd, TrainingPhase)
    def stop(self, event, phase, learner):
        if learner.progress.epoch == self.epoch:
            raise CancelFitting(f"epoch {self.epoch}")

    @on(FitEnd)
    def end(self, event, phase, learner):
        self.at_end = jax.tree.map(np.array, learner.params)


def test_stopped_member_is_frozen_while_others_train():
    members = Population(lambda epoch: testlearner(Metrics(), StopAt(epoch)), epoch=[3, 1, 2], default_callbacks=False)
    histories = members.fit(4)
    assert [history.stop_reason for history in histories] == ["epoch 3", "epoch 1", "epoch 2"]
    assert [history.step for history in histories] == [12, 4, 8]
    for member, epochs in zip(members, (3, 1, 2), strict=True):
        jax.tree.map(np.testing.assert_array_equal, member.params, member.callbacks.get(StopAt).at_end)
        alone = testlearner()
        alone.fit(epochs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), member.params, alone.params)


def test_members_at_different_epochs_cannot_be_compared_in_another_fit():
    def make(learning_rate):
        return testlearner(Metrics(), learning_rate=learning_rate)

    halving = SuccessiveHalving("loss")
    members = Population(make, learning_rate=[0.1, 0.01], callbacks=[halving], default_callbacks=False)
    members.fit(2)
    with pytest.raises(DeclarationError) as caught:
        members.fit(2)
    assert str(caught.value) == (
        "`fit` would train all members, but member 1 (learning_rate=0.01) is at epoch 1, and member 0 "
        "(learning_rate=0.1) is at epoch 2.\n"
        "  why:   SuccessiveHalving('validation/loss', eta=2, epochs=1) compares members at the same epoch\n"
        "  fix:   train one member further, e.g. `population[0].fit(5)`; `population.best()` returns the number of the "
        "best one\n"
        "     or: build a new `Population`, and train it for all epochs in one `fit`"
    )
    members[members.best()].fit(5)
    assert [member.epoch for member in members] == [7, 1]
    # Without a callback that compares them, members need not be at the same epoch.
    free = Population(make, learning_rate=[0.1, 0.01])
    free[1].fit(1)
    assert [history.epoch for history in free.fit(2)] == [2, 3]


def test_nan_of_one_member_stops_only_this_member():
    def make(learning_rate):
        return testlearner(Metrics(), StopOnNaNLoss(), learning_rate=learning_rate, batches=10)

    members = Population(make, learning_rate=[0.1, 1e30, 0.2], default_callbacks=False)
    with pytest.warns(RuntimeWarning, match="Training stopped") as caught:
        histories = members.fit(2)
    line = test_nan_of_one_member_stops_only_this_member.__code__.co_firstlineno + 6
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, line)}
    expected = [make(rate) for rate in (0.1, 1e30, 0.2)]
    with pytest.warns(RuntimeWarning, match="Training stopped"):
        [alone.fit(2) for alone in expected]
    assert [m.stop_reason for m in members] == [e.stop_reason for e in expected]
    assert [h.step for h in histories] == [e.step for e in expected] == [20, 2, 20]
    for member, alone in zip(members, expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), member.params, alone.params)


@pytest.mark.parametrize("stops", [[1, 1, 5, 1, 5, 2], [1, 5, 1, 2]], ids=str)
def test_removed_rows_change_no_bit(stops, monkeypatch):
    """Members that have ended leave the joint arrays if that pays off, down to one member."""

    def train():
        members = Population(
            lambda epoch, key: testlearner(Metrics(), StopAt(epoch), learning_rate=0.05 + 0.01 * key),
            epoch=stops,
            key=range(len(stops)),
            default_callbacks=False,
        )
        members.fit(6)
        return members

    kept = train()
    monkeypatch.setattr(joint_runner, "_COMPILE_FLOPS", 0)
    removed = train()
    assert removed.compile_counts["compiles"] > kept.compile_counts["compiles"]
    for one, other in zip(kept, removed, strict=True):
        assert one.step == other.step
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_early_stopping_is_per_member():
    def make(learning_rate):
        return testlearner(Metrics(), EarlyStopping(1), learning_rate=learning_rate)

    rates = [0.1, 0.0, 0.05]  # the second member does not improve
    members = Population(make, learning_rate=rates, default_callbacks=False)
    histories = members.fit(5)
    for history, rate in zip(histories, rates, strict=True):
        expected = make(rate).fit(5)
        assert (history.epoch, history.stop_reason) == (expected.epoch, expected.stop_reason)
    assert histories[1].epoch == 2


class FailAt(Callback):
    """Raise an error after a step."""

    def __init__(self, step):
        self.step, self.ended = step, False

    def stateaccess(self):
        return {"progress": fluxcb.Read()}

    @on(StepEnd, TrainingPhase)
    def fail(self, event, phase, learner):
        if learner.progress.step == self.step:
            raise ValueError("out of paper")

    @on(FitEnd)
    def end(self, event, phase, learner):
        self.ended = True


def test_error_of_one_member_ends_all_with_note():
    members = Population(lambda step: testlearner(FailAt(step)), step=[0, 2, 0], default_callbacks=False)
    with pytest.raises(ValueError, match="out of paper") as caught:
        members.fit(3)
    assert caught.value.__notes__[-1] == "raised in member 1 (step=2); the other members have stopped"
    assert all(member.callbacks.get(FailAt).ended for member in members)
    assert members[0].stop_reason == "member 1 (step=2) failed: ValueError: out of paper"
    assert all(0 < member.step < 12 for member in members)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fluxcb member")]


class SignalAt(Callback):
    """Send a signal to this process after a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def stateaccess(self):
        return {"progress": fluxcb.Read()}

    @on(StepEnd, TrainingPhase)
    def send(self, event, phase, learner):
        if learner.progress.step == self.step:
            os.kill(os.getpid(), self.number)


def test_ctrl_c_ends_all_members_at_the_same_step():
    members = Population(
        lambda step: testlearner(SignalAt(step, signal.SIGINT)), step=[0, 6, 0], default_callbacks=False
    )
    with pytest.raises(KeyboardInterrupt):
        members.fit(50)
    steps = [member.step for member in members]
    assert len(set(steps)) == 1
    assert 6 <= steps[0] < 200
    assert {member.stop_reason for member in members} == {"KeyboardInterrupt"}


def test_sigterm_returns():
    members = Population(lambda step: testlearner(SignalAt(step, signal.SIGTERM)), step=[6, 0], default_callbacks=False)
    with pytest.warns(RuntimeWarning, match="SIGTERM ended the fit"):
        histories = members.fit(50)
    assert {history.stop_reason for history in histories} == {"preempted"}
    assert len({history.step for history in histories}) == 1
