"""`learner.callbacks.disable` and `enable`, and the wrapper `switchable`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, DeclarationError, Handler, Predicate, Read, ThreadExecutor, Write, every, on, switchable
from fluxcb.callbacks import Checkpointer, ClipGradients, Metrics, ParameterEMA, Recorder, StopOnNaNLoss
from fluxcb.events import BackwardEnd, EpochBegin, EpochEnd, FitBegin, FitEnd, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
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

    def state_dict(self):
        return {}  # a resumed run records from its start

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


# -- during a fit ----------------------------------------------------------------------------------

STEPS = 4  # of an epoch of `testlearner`


class Log(Callback):
    """Record the events."""

    def __init__(self):
        self.events = []

    def state_dict(self):
        return {}  # a resumed run records from its start

    @on
    def log(
        self,
        event: FitBegin | EpochBegin | StepEnd | EpochEnd | Trigger | FitEnd,
        phase: AbstractTrainingPhase,
        learner,
    ):
        self.events.append(type(event).__name__)


class Switches(Callback):
    """Disable or enable a callback at the end of given steps."""

    def __init__(self, actions):
        self.actions = actions

    def stateaccess(self):
        return {"callbacks": Read()}

    @on
    def switch(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step in self.actions:
            verb, *names = self.actions[learner.progress.step]
            getattr(learner.callbacks, verb)(*names)


@pytest.mark.parametrize("executor", [None, ThreadExecutor(2)], ids=["serial", "threads"])
@pytest.mark.parametrize("window", [1, 3])
def test_callback_disabled_during_a_fit_misses_whole_epochs_and_gets_fit_end(window, executor):
    log = Log()
    actions = {2: ("disable", "Log"), 2 * STEPS + 1: ("enable", "Log")}
    learner = testlearner(log, Switches(actions), steps_per_call=window, executor=executor)
    learner.fit(4)
    epoch = ["EpochBegin", *["StepEnd"] * STEPS, "EpochEnd", "Trigger"]
    assert log.events == ["FitBegin", *epoch, *epoch, "FitEnd"]  # of epochs 1 and 4
    log.events.clear()
    learner.callbacks.get(Switches).actions = {4 * STEPS + 1: ("disable", "Log")}
    learner.fit(3)
    assert log.events == ["FitBegin", *epoch, "FitEnd"]
    assert learner.callbacks.disabled == ("Log",)
    log.events.clear()
    learner.fit(1)
    assert log.events == []


def test_traced_callback_is_switched_between_epochs_and_nothing_is_compiled():
    switches = Switches({1: ("disable", "ClipGradients"), STEPS + 3: ("enable", "ClipGradients")})
    learner = testlearner(switchable(ClipGradients(0.5)), switches)
    batches = list(learner.data["training"])
    learner.fit(3)
    expected = {"w": jnp.zeros(()), "b": jnp.zeros(())}
    for limit in (0.5, np.inf, 0.5):
        expected = clipped_descent(expected, batches, limit)
    for name in expected:
        np.testing.assert_allclose(learner.params[name], expected[name], rtol=1e-5)
    between = testlearner(switchable(ClipGradients(0.5)), Switches({}))
    for verb in ("enable", "disable", "enable"):
        getattr(between.callbacks, verb)("ClipGradients")
        between.fit(1)
    assert bits(learner.params) == bits(between.params)
    assert learner.compile_counts == between.compile_counts


@pytest.mark.parametrize("killed", [2, STEPS, STEPS + 1, STEPS + 3, 2 * STEPS + 1])
def test_killed_run_switches_at_the_same_epoch(tmp_path, killed):
    class KilledError(Exception):
        pass

    class Kills(Callback):
        @on
        def kill(self, event: StepEnd, phase: TrainingPhase, learner):
            if kills and learner.progress.step == killed:
                raise KilledError

    def program(*saver):
        log = Log()
        switches = Switches({1: ("disable", "ClipGradients", "Log"), STEPS + 2: ("enable", "ClipGradients")})
        return testlearner(switchable(ClipGradients(0.5)), log, switches, *saver), log

    straight, expected = program(Kills(), Checkpointer(tmp_path / "straight", steps=1))
    kills = False
    straight.fit(3)
    kills = True
    with pytest.raises(KilledError):
        program(Kills(), Checkpointer(tmp_path / "killed", steps=1))[0].fit(3)
    kills = False
    resumed, log = program(Kills(), Checkpointer(tmp_path / "killed", steps=1))
    resumed.fit(3, resume=True)
    assert bits(resumed.params) == bits(straight.params)
    assert resumed.callbacks.disabled == straight.callbacks.disabled == ("Log",)
    # The last checkpoint is that of the step before the kill.
    seen = [event for event in log.events if event == "StepEnd"]
    assert len(seen) == max(0, STEPS - (killed - 1))
    assert expected.events.count("StepEnd") == STEPS


def test_error_in_a_fit_applies_requested_switches():
    class Fails(Callback):
        @on
        def fail(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 2:
                raise ValueError("broken")

    log = Log()
    learner = testlearner(log, Switches({1: ("disable", "Log")}), Fails())
    with pytest.raises(ValueError, match="broken"):
        learner.fit(1)
    assert learner.callbacks.disabled == ("Log",)
    assert log.events[-1] == "FitEnd"


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


def test_switching_in_an_epoch_outside_a_fit_raises():
    class Switches(Callback):
        @on
        def switch(self, event: StepEnd, phase: TrainingPhase, learner):
            owner.callbacks.disable("Switches")

    owner = testlearner(Switches())
    with pytest.raises(DeclarationError) as raised:
        owner.run_epoch(TrainingPhase())
    assert str(raised.value) == (
        "`learner.callbacks.disable` was called in an epoch that `learner.run_epoch` runs.\n"
        "  why:   a callback would miss the EpochEnd of the epoch whose EpochBegin it has seen\n"
        "  fix:   call it after the epoch, or train with `learner.fit`"
    )


def test_callback_that_missed_fit_begin_cannot_be_enabled_during_the_fit():
    log = Log()
    learner = testlearner(log, Switches({1: ("enable", "Log")}))
    learner.callbacks.disable("Log")
    with pytest.raises(DeclarationError) as raised:
        learner.fit(2)
    assert raised.value.what == "Log() cannot be enabled in this fit, because it was disabled at FitBegin."
    assert log.events == []
    learner.callbacks.enable("Log")
    learner.fit(1)
    assert log.events == ["FitBegin", "EpochBegin", *["StepEnd"] * STEPS, "EpochEnd", "Trigger", "FitEnd"]


def test_switchable_without_a_callback_raises():
    with pytest.raises(DeclarationError) as raised:
        switchable(ClipGradients)
    assert str(raised.value).endswith("fix:   pass e.g. `switchable(ClipGradients(1.0))`")
