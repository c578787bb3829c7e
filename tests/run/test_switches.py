"""`learner.callbacks.disable` and `enable`, and the wrapper `switchable`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, DeclarationError, Handler, Predicate, Read, Write, every, on, switchable
from fluxcb.callbacks import Checkpointer, ClipGradients, Metrics, ParameterEMA, Recorder, StopOnNaNLoss
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def clipped_descent(params, batches, limit, rate=0.1):
    """Train the model of `testlearner` in plain JAX, with gradients clipped to a global norm."""

    def loss(params, batch):
        return jnp.mean((params["w"] * batch[0] + params["b"] - batch[1]) ** 2)

    for batch in batches:
        grads = jax.grad(loss)(params, batch)
        norm = np.sqrt(sum(float(leaf) ** 2 for leaf in jax.tree.leaves(grads)))
        scale = min(1.0, limit / norm)
        params = jax.tree.map(lambda p, g, scale=scale: p - rate * scale * g, params, grads)
    return params


class Watches(Callback):
    def __init__(self):
        self.norms = []

    def stateaccess(self):
        return {"step": {"grads": Read()}}

    @on
    def note(self, event: StepEnd, phase: TrainingPhase, learner):
        self.norms.append(float(abs(learner.step.grads["w"])))


class Counts(Callback):
    def stateaccess(self):
        return {"cbstate": {"count": Write()}}

    def init(self, learner):
        if "count" not in learner.cbstate:
            learner.cbstate.count = jnp.zeros((), jnp.int32)

    @on
    def count(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.cbstate.count += 1


class Shows(Callback):
    def stateaccess(self):
        return {"cbstate": {"count": Read()}}

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        int(learner.cbstate.count)


# -- what runs -----------------------------------------------------------------------------------


def test_disabled_traced_callback_agrees_with_hand_written_loop():
    learner = testlearner(switchable(ClipGradients(0.5)))
    batches = list(learner.data["training"])
    expected = {"w": jnp.zeros(()), "b": jnp.zeros(())}
    counts = []
    for limit in (0.5, np.inf, 0.5):
        (learner.callbacks.disable if limit == np.inf else learner.callbacks.enable)("ClipGradients")
        learner.fit(1)
        expected = clipped_descent(expected, batches, limit)
        counts.append(learner.compile_counts)
        for name in expected:
            np.testing.assert_allclose(learner.params[name], expected[name], rtol=1e-5)
    assert counts[0] == counts[1] == counts[2]


def test_disabled_host_callback_does_not_run_and_changes_no_bit():
    def train(*, disable):
        watches = Watches()
        learner = testlearner(watches, switchable(ParameterEMA()))
        learner.fit(1)
        if disable:
            learner.callbacks.disable("Watches", "ParameterEMA")
        compiled = learner.compile_counts
        learner.fit(2)
        assert learner.compile_counts == compiled
        return learner, watches

    (one, seen), (other, unseen) = train(disable=False), train(disable=True)
    assert (len(seen.norms), len(unseen.norms)) == (12, 4)
    assert bits(one.params) == bits(other.params)
    assert bits(one.cbstate["ema"]) != bits(other.cbstate["ema"])


def test_disabled_callback_leaves_its_state_as_it_was():
    learner = testlearner(switchable(Counts()))
    learner.fit(1)
    learner.callbacks.disable("Counts")
    learner.fit(1)
    assert int(learner.cbstate["count"]) == 4
    learner.callbacks.enable("Counts")
    learner.fit(1)
    assert int(learner.cbstate["count"]) == 8


def test_switch_and_schedule_of_traced_handler_are_combined():
    learner = testlearner(every(switchable(Counts()), steps=2, traced=True))
    learner.fit(1)
    learner.callbacks.disable("Counts")
    learner.fit(1)
    assert int(learner.cbstate["count"]) == 2


def test_predicate_of_disabled_callback_is_not_called():
    class Asks(Callback):
        calls = 0

        def ask(self, learner):
            type(self).calls += 1
            return True

        def handlers(self):
            return [Handler(StepEnd, TrainingPhase, "look", when=Predicate(self.ask))]

        def look(self, event, phase, learner):
            pass

    learner = testlearner(Asks())
    learner.callbacks.disable("Asks")
    learner.fit(1)
    assert Asks.calls == 0


def test_metrics_that_create_step_values_can_be_switched():
    learner = testlearner(switchable(Metrics()))
    learner.callbacks.disable("Metrics")
    assert list(learner.fit(1)) == []
    learner.callbacks.enable("Metrics")
    history, straight = learner.fit(1), testlearner(switchable(Metrics())).fit(2)
    assert history["training/loss"] == straight["training/loss"][1:]


def test_second_callback_of_a_name_is_switched_alone():
    learner = testlearner(Watches(), Watches())
    learner.callbacks.disable("Watches#2")
    learner.fit(1)
    assert [len(callback.norms) for callback in learner.callbacks] == [4, 0]


def test_validation_uses_no_average_of_a_disabled_callback():
    learner = testlearner(switchable(ParameterEMA()))
    learner.fit(1)
    xs = jnp.ones((1, 1))
    average = learner.cbstate["ema"]["params"]
    np.testing.assert_allclose(learner.predict(xs), [[average["w"] + average["b"]]], rtol=1e-6)
    learner.callbacks.disable("ParameterEMA")
    np.testing.assert_allclose(learner.predict(xs), [[learner.params["w"] + learner.params["b"]]], rtol=1e-6)


def test_callbacks_stay_disabled_when_others_are_added_and_removed():
    first, second = Watches(), Watches()
    learner = testlearner(first, second, switchable(Counts()))
    learner.callbacks.disable("Watches#2", "Counts")
    learner.callbacks.remove(first)
    learner.callbacks.add(Recorder())
    assert learner.callbacks.disabled == ("Watches", "Counts")
    learner.fit(1)
    assert second.norms == []
    assert int(learner.cbstate["count"]) == 0
    with pytest.raises(DeclarationError, match=r"Counts\(\)\) cannot be disabled: Shows\(\) reads `cbstate.count`"):
        learner.callbacks.add(Shows())
    learner.fit(1)
    assert int(learner.cbstate["count"]) == 0


# -- checkpoints -----------------------------------------------------------------------------------


def test_switches_survive_a_checkpoint(tmp_path):
    def make(*saver):
        return testlearner(switchable(ClipGradients(0.5)), Watches(), *saver)

    first = make(Checkpointer(tmp_path))
    first.fit(1)
    first.callbacks.disable("ClipGradients", "Watches")
    first.fit(1)
    resumed = make(Checkpointer(tmp_path))
    resumed.fit(2, resume=True)  # counted from the beginning of the second fit
    assert resumed.callbacks.disabled == ("ClipGradients", "Watches")
    assert resumed.callbacks.get(Watches).norms == []
    straight = make()
    straight.fit(1)
    straight.callbacks.disable("ClipGradients")
    straight.fit(2)
    assert bits(resumed.params) == bits(straight.params)


def test_restoring_a_checkpoint_enables_what_was_enabled(tmp_path):
    learner = testlearner(switchable(ClipGradients(0.5)), Checkpointer(tmp_path))
    learner.fit(1)
    learner.callbacks.disable("ClipGradients")
    learner.restore(tmp_path)
    assert learner.callbacks.disabled == ()
    before = learner.params
    learner.fit(1)
    expected = clipped_descent(before, list(learner.data["training"]), 0.5)
    np.testing.assert_allclose(learner.params["w"], expected["w"], rtol=1e-5)


# -- errors -----------------------------------------------------------------------------------


def fails(learner, *names, verb="disable"):
    before = learner.callbacks.disabled
    with pytest.raises(DeclarationError) as raised:
        getattr(learner.callbacks, verb)(*names)
    assert learner.callbacks.disabled == before
    return str(raised.value)


def test_unknown_name_raises():
    learner = testlearner(Watches(), Recorder())
    assert fails(learner, "Recoder") == (
        "`learner.callbacks.disable` takes names of callbacks, and 'Recoder' is not the name of a callback."
        " Did you mean `Recorder`?\n"
        '  fix:   pass some of these names: "Watches", "Recorder"'
    )
    assert "and no name was passed." in fails(learner)


def test_traced_callback_without_switch_raises_and_wrapping_it_helps():
    message = fails(testlearner(StopOnNaNLoss()), "StopOnNaNLoss")
    assert message.splitlines()[0] == (
        "StopOnNaNLoss() cannot be disabled, because the compiled step contains its handlers."
    )
    assert message.endswith("fix:   write `switchable(StopOnNaNLoss(...))` in the list of callbacks")
    testlearner(switchable(StopOnNaNLoss())).callbacks.disable("StopOnNaNLoss")


def test_reader_of_a_disabled_callback_is_named_and_both_fixes_work():
    learner = testlearner(switchable(Counts()), Shows())
    message = fails(learner, "Counts")
    assert message.splitlines()[0] == (
        "switchable(Counts()) cannot be disabled: Shows() reads `cbstate.count`, which no enabled callback writes."
    )
    assert message.endswith('fix:   disable all of them: `learner.callbacks.disable("Counts", "Shows")`')
    learner.callbacks.disable("Counts", "Shows")
    message = fails(learner, "Shows", verb="enable")
    assert message.endswith('or: enable switchable(Counts()) first: `learner.callbacks.enable("Counts")`')
    learner.callbacks.enable("Counts")
    learner.callbacks.enable("Shows")
    assert learner.callbacks.disabled == ()


def test_switching_in_a_handler_raises():
    class Switches(Callback):
        @on
        def switch(self, event: StepEnd, phase: TrainingPhase, learner):
            owner.callbacks.disable("Switches")

    owner = testlearner(Switches())
    with pytest.raises(
        DeclarationError, match=r"`learner\.callbacks\.disable` was called while this Learner is fitting"
    ):
        owner.fit(1)


def test_switchable_without_a_callback_raises():
    with pytest.raises(DeclarationError) as raised:
        switchable(ClipGradients)
    assert str(raised.value).endswith("fix:   pass e.g. `switchable(ClipGradients(1.0))`")
