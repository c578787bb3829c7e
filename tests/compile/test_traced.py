"""Traced handlers: the values that they read, the effect of their writes, and the number of traces and compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, Learner, Read, Write, on
from fluxcb.events import (
    BackwardBegin,
    BackwardEnd,
    ComputeEnd,
    FitBegin,
    ForwardBegin,
    LossBegin,
    StepBegin,
    StepEnd,
    UpdateEnd,
)
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb.testing import EventLog, testlearner

XS = np.array([[1.0], [2.0]], np.float32)
YS = 3 * XS - 1


def one_step(*callbacks, rate=0.1):
    """Return w and b after one step from 0 on the inputs 1 and 2."""
    learner = testlearner(*callbacks, data=[(XS, YS)], learning_rate=rate)
    learner.fit(1)
    return float(learner.params["w"]), float(learner.params["b"]), learner


def made(event, access, function, phase=AbstractTrainingPhase):
    """Return a callback with one traced handler."""

    class Made(Callback):
        def stateaccess(self):
            return access

        @on(event, phase)
        def handle(self, event, phase, learner):
            function(learner)

    return Made()


# By hand: at w = b = 0 the errors are -2 and -5, so dL/dw = mean(2 e x) = -12, dL/db = mean(2 e) = -7.
DW, DB = -12.0, -7.0


def test_step_matches_formula():
    w, b, _ = one_step()
    np.testing.assert_allclose([w, b], [-0.1 * DW, -0.1 * DB], rtol=1e-6)


def test_changed_loss_changes_gradients():
    def penalise(learner):
        learner.step.loss = 3 * learner.step.loss + learner.params["w"]

    w, b, _ = one_step(made(BackwardBegin, {"step": {"loss": Write()}, "params": Read()}, penalise))
    np.testing.assert_allclose([w, b], [-0.1 * (3 * DW + 1), -0.1 * 3 * DB], rtol=1e-6)


def test_changed_outputs_change_gradients():
    def double(learner):
        learner.step.outputs = 2 * learner.step.outputs

    w, b, _ = one_step(made(LossBegin, {"step": {"outputs": Write()}}, double))
    np.testing.assert_allclose([w, b], [-0.1 * 2 * DW, -0.1 * 2 * DB], rtol=1e-6)


def test_changed_inputs_and_targets_change_gradients():
    def shift(learner):
        learner.step.xs = learner.step.xs - 1
        learner.step.ys = jnp.zeros_like(learner.step.ys) + 1

    w, b, _ = one_step(made(ForwardBegin, {"step": {"xs": Write(), "ys": Write()}}, shift))
    # errors -1, -1 at inputs 0, 1
    np.testing.assert_allclose([w, b], [0.1 * 1, 0.1 * 2], rtol=1e-6)


def test_changed_gradients_change_update():
    def halve(learner):
        learner.step.grads = {"w": learner.step.grads["w"] / 2, "b": jnp.zeros_like(learner.step.grads["b"])}

    w, b, _ = one_step(made(BackwardEnd, {"step": {"grads": Write()}}, halve))
    np.testing.assert_allclose([w, b], [-0.1 * DW / 2, 0], rtol=1e-6)


def test_changed_params_after_update():
    def clip(learner):
        learner.params = jax.tree.map(lambda p: jnp.clip(p, -1, 1), learner.params)

    w, b, _ = one_step(made(UpdateEnd, {"params": Write()}, clip))
    np.testing.assert_allclose([w, b], [1.0, 0.7], rtol=1e-6)


def test_single_parameter_can_be_written_by_path():
    def zero(learner):
        learner.params.b = 0.0

    w, b, _ = one_step(made(UpdateEnd, {"params": {"b": Write()}}, zero))
    np.testing.assert_allclose([w, b], [1.2, 0], rtol=1e-6)


def test_each_event_provides_documented_values():
    """LossBegin: old params and outputs; BackwardBegin: also the loss; BackwardEnd: grads; UpdateEnd: new params."""

    class Looks(Callback):
        def stateaccess(self):
            names = ("at_loss", "at_backward", "at_grads", "at_update", "at_end")
            return {
                "params": Read(),
                "step": {
                    **{n: Read() for n in ("outputs", "loss", "grads", "updates")},
                    **dict.fromkeys(names, Write()),
                },
            }

        @on
        def loss(self, event: LossBegin, phase: TrainingPhase, learner):
            learner.step.at_loss = learner.params["w"], learner.step.outputs.sum()

        @on
        def backward(self, event: BackwardBegin, phase: TrainingPhase, learner):
            learner.step.at_backward = learner.params["w"], learner.step.loss

        @on
        def grads(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.at_grads = learner.params["w"], learner.step.grads["w"]

        @on
        def update(self, event: UpdateEnd, phase: TrainingPhase, learner):
            learner.step.at_update = learner.params["w"], learner.step.updates["w"]

        @on
        def end(self, event: ComputeEnd, phase: TrainingPhase, learner):
            learner.step.at_end = learner.params["w"], learner.step.loss

    class Fetches(Callback):
        seen = None

        def stateaccess(self):
            return {"step": {n: Read() for n in ("at_loss", "at_backward", "at_grads", "at_update", "at_end")}}

        @on
        def keep(self, event: StepEnd, phase: TrainingPhase, learner):
            step = learner.step
            self.seen = [step.at_loss, step.at_backward, step.at_grads, step.at_update, step.at_end]

    fetches = Fetches()
    one_step(Looks(), fetches)
    expected = [(0, 0), (0, (4 + 25) / 2), (0, DW), (1.2, 1.2), (1.2, 14.5)]
    np.testing.assert_allclose(fetches.seen, expected, rtol=1e-6)


# -- step.skip and step.stop -------------------------------------------------------------------------------------------


class Skips(Callback):
    """Skip the steps with these numbers (from 0)."""

    def __init__(self, *steps):
        self.steps = steps

    def stateaccess(self):
        return {"step": {"skip": Append()}}

    @on
    def skip(self, event: ForwardBegin, phase: TrainingPhase, learner):
        learner.step.skip = jnp.isin(learner.progress.step, jnp.array(self.steps))


class CountsUpdates(Callback):
    def stateaccess(self):
        return {"cbstate": {"updates": Write()}}

    def init(self, learner):
        if "updates" not in learner.cbstate:
            learner.cbstate.updates = jnp.int32(0)

    @on
    def count(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.cbstate.updates = learner.cbstate.updates + 1


def stateful_learner(*callbacks):
    """Return a Learner with Adam whose model counts its applications."""
    from fluxcb.models import pair

    def init(key, xs):
        return {"w": jnp.zeros(())}, {"applied": jnp.int32(0)}

    def apply(params, state, xs):
        return params["w"] * xs, {"applied": state["applied"] + 1}

    return Learner(
        pair(init, apply, stateful=True),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.adam(0.1),
        data=[(XS, YS)] * 5,
        callbacks=callbacks,
        default_callbacks=False,
    )


def test_skipped_step_keeps_train_state_and_is_counted():
    log = EventLog()
    learner = stateful_learner(Skips(1, 3), CountsUpdates(), log)
    learner.fit(1)
    # The same program, because XLA may round differently in a program without `step.skip`.
    reference = stateful_learner(Skips(99, 99), CountsUpdates(), EventLog())
    reference.fit(steps=3)
    for name in ("params", "opt_state", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, learner.state[name], reference.state[name])
    assert int(learner.state["model_state"]["applied"]) == 3
    assert learner.step == int(learner.state["counters"][0]) == 5  # progress advances
    assert int(learner.cbstate["updates"]) == 5  # UpdateEnd still runs
    assert log.names().count("StepEnd") == 5


def test_two_skips_are_combined_with_or():
    learner = testlearner(Skips(0), Skips(2), batches=4)
    learner.fit(1)
    reference = testlearner(data=testlearner()._state.data["training"][1::2])
    reference.fit(1)
    np.testing.assert_array_equal(learner.params["w"], reference.params["w"])


class Stops(Callback):
    def __init__(self, step):
        self.step = step

    def stateaccess(self):
        return {"step": {"stop": Append()}}

    @on
    def stop(self, event: BackwardBegin, phase: TrainingPhase, learner):
        learner.step.stop = learner.progress.step == self.step


def test_unhandled_stop_only_ends_window():
    log = EventLog()
    learner, reference = testlearner(Stops(4), log, batches=12), testlearner(batches=12)
    learner.fit(1)
    reference.fit(1)
    assert log.names("training").count("StepEnd") == 12
    assert learner.step == 12
    np.testing.assert_array_equal(learner.params["w"], reference.params["w"])


# -- carried state, keys, hyperparameters ------------------------------------------------------------------------------


class Sum(Callback):
    """Sum the losses on the device, and read the sum at the end of the epoch."""

    def __init__(self):
        self.sums = []

    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"sum": Write()}}

    def init(self, learner):
        if "sum" not in learner.cbstate:
            learner.cbstate.sum = {"total": jnp.zeros(()), "count": jnp.int32(0)}

    @on
    def add(self, event: ComputeEnd, phase: Phase, learner):
        held = learner.cbstate.sum
        learner.cbstate.sum = {"total": held["total"] + learner.step.loss, "count": held["count"] + 1}

    @on(FitBegin, access={"cbstate": {"sum": Read()}})
    def read(self, event, phase, learner):
        self.sums.append(jax.tree.map(float, learner.cbstate.sum))


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def keep(self, event: StepEnd, phase: Phase, learner):
        self.losses.append(float(learner.step.loss))


def test_cbstate_is_carried_through_training_and_validation():
    sums, losses = Sum(), Losses()
    learner = testlearner(sums, losses)
    learner.fit(2)
    assert set(learner.state["cbstate"]) == {"sum"}
    np.testing.assert_allclose(learner.cbstate["sum"]["total"], np.sum(losses.losses), rtol=1e-5)
    assert int(learner.cbstate["sum"]["count"]) == len(losses.losses) == 2 * (4 + 2)
    learner.fit(1)
    assert [s["count"] for s in sums.sums] == [0, 12]


class Draws(Callback):
    """Assign a random number in each step, and keep it."""

    def __init__(self, name=None):
        self.name = name
        self.drawn = []

    def stateaccess(self):
        return {"step": {self._step_name(): Write()}}

    def _step_name(self):
        return f"drawn_{self.name}"

    @on
    def draw(self, event: BackwardEnd | ComputeEnd, phase: TrainingPhase, learner):
        setattr(learner.step, self._step_name(), jax.random.uniform(learner.key))

    @on(StepEnd, TrainingPhase)
    def keep(self, event, phase, learner):
        self.drawn.append(float(getattr(learner.step, self._step_name())))


def drawn(*names, key=0):
    callbacks = [Draws(name) for name in names]
    testlearner(*callbacks, batches=5, key=key).fit(2)
    return [callback.drawn for callback in callbacks]


def test_keys_depend_only_on_step_and_callback():
    (alone,) = drawn("a")
    assert len(set(alone)) == 10
    one, other = drawn("a", "b")
    assert one == alone
    assert not set(one) & set(other)
    assert drawn("b", "a") == [other, one]
    assert drawn("a", key=1)[0] != alone


class DrawsInValidation(Callback):
    def __init__(self):
        self.drawn = []

    def stateaccess(self):
        return {"step": {"noise": Write()}}

    @on
    def draw(self, event: ComputeEnd, phase: Phase, learner):
        learner.step.noise = jax.random.uniform(learner.key)

    @on(StepEnd)
    def keep(self, event, phase, learner):
        self.drawn.append((type(phase).name, float(learner.step.noise)))


def test_validation_keys_differ_by_step_and_from_training():
    draws = DrawsInValidation()
    testlearner(draws, batches=3, validation_batches=3).fit(2)
    assert len({value for _, value in draws.drawn}) == 12


class Decays(Callback):
    """Halve the learning rate on the device after every step."""

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def decay(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = learner.hyperparams.learning_rate / 2


def test_hyperparameter_changes_without_recompilation():
    learner = testlearner(Decays(), batches=3, validation_batches=0, learning_rate=0.4)
    w = b = np.float32(0)
    for number, (xs, ys) in enumerate(learner._state.data["training"]):
        error = w * xs + b - ys
        rate = np.float32(0.4 / 2**number)
        w, b = w - rate * np.mean(2 * error * xs), b - rate * np.mean(2 * error)
    learner.fit(1)
    np.testing.assert_allclose([learner.params["w"], learner.params["b"]], [w, b], rtol=1e-5)
    np.testing.assert_allclose(learner.hyperparams["learning_rate"], 0.4 / 8, rtol=1e-6)
    assert learner.compile_counts == {"traces": 1, "compiles": 1}


class SetsRate(Callback):
    def __init__(self):
        self.rates = []

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def put(self, event: StepBegin, phase: TrainingPhase, learner):
        self.rates.append(float(learner.hyperparams.learning_rate))
        learner.hyperparams.learning_rate = 0.1 / (learner.progress.step + 1)


def test_host_handler_sets_hyperparameter_without_recompilation():
    rates = SetsRate()
    learner = testlearner(rates, batches=4, validation_batches=0)
    learner.fit(1)
    np.testing.assert_allclose(rates.rates, [0.1, 0.1, 0.05, 0.1 / 3], rtol=1e-6)
    assert learner.compile_counts == {"traces": 1, "compiles": 1}


# -- how often ---------------------------------------------------------------------------------------------------------


def test_one_trace_and_compilation_per_phase():
    learner = testlearner(Sum())
    assert learner.compile_counts == {"traces": 2, "compiles": 0}  # the dry run is the trace
    learner.fit(3)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}


def test_host_handler_adds_no_trace():
    learner = testlearner(Sum())
    learner.fit(1)
    learner.callbacks.add(EventLog())
    learner.fit(1)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}  # it fetches nothing
    learner.callbacks.add(Losses())
    learner.fit(1)
    assert learner.compile_counts == {"traces": 2, "compiles": 4}  # the loss leaves both phases' programs now


def test_traced_handler_adds_one_trace():
    learner = testlearner(Sum())
    learner.fit(1)
    learner.callbacks.add(Decays())  # training only
    assert learner.compile_counts == {"traces": 3, "compiles": 2}
    learner.fit(2)
    assert learner.compile_counts == {"traces": 3, "compiles": 3}
    learner.callbacks.remove(Decays)
    learner.fit(1)
    assert learner.compile_counts["traces"] == 4


def test_list_order_adds_no_trace():
    learner = testlearner(Sum(), Decays(), CountsUpdates())
    learner.fit(1)
    counts = learner.compile_counts
    learner.callbacks.set(list(learner.callbacks)[::-1])
    learner.fit(1)
    assert learner.compile_counts == counts


def jaxpr_computing(names, key):
    """Return the jaxpr of a step that computes only some of its values, as text, the values, and the step."""

    class Noisy(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read(), "noise": Write()}}

        @on(BackwardEnd, AbstractTrainingPhase)
        def tell(self, event, phase, learner):
            learner.step.noise = jnp.cosh(learner.step.loss)
            jax.debug.callback(lambda loss: None, learner.step.loss)

    def apply(params, xs):
        return xs * params["w"]

    def apply_with_key(params, xs, key):
        return apply(params, xs) + jax.random.normal(key, xs.shape)

    learner = Learner(
        (lambda key, xs: {"w": jnp.ones(())}, apply_with_key if key else apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(XS, YS)],
        callbacks=[Noisy()],
        default_callbacks=False,
        key=3,
    )
    step, carry = learner._core.traced(learner.phases[0]), learner._state.train.carry
    run = step.computing(names)
    return str(jax.make_jaxpr(run)(carry, (XS, YS))), run(carry, (XS, YS))[1], step


def test_unused_computations_are_removed():
    text, values, step = jaxpr_computing(("loss",), key=False)
    assert values.keys() == {"loss"}
    assert {"loss", "noise", "outputs", "grads"} <= step.step_specs.keys()
    assert not {"cosh", "random_fold_in"} & set(text.replace("[", " ").split())
    assert "debug_callback" in text  # an effect is needed by itself

    text, every, _ = jaxpr_computing(tuple(step.step_specs), key=False)
    assert "cosh" in text.split()
    assert every.keys() == step.step_specs.keys()
    assert every["loss"] == values["loss"] == np.mean((XS - YS) ** 2)
    assert every["noise"] == jnp.cosh(every["loss"])
    assert "random_fold_in" in jaxpr_computing((), key=True)[0]


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, np.float32(0.5)),
        (1, np.int32(1)),
        (True, np.True_),
        ([1.0, 2.0], [np.float32(1), np.float32(2)]),
        ({"a": 1.0}, {"a": np.float32(1)}),
    ],
    ids=str,
)
def test_python_numbers_are_step_values(value, expected, steps_per_call):
    seen = []

    class Weight(Callback):
        def stateaccess(self):
            return {"step": {"weight": Write()}}

        @on
        def put(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.weight = value

        @on
        def show(self, event: StepEnd, phase: TrainingPhase, learner):
            seen.append(learner.step.weight)

    testlearner(Weight(), batches=2, steps_per_call=steps_per_call).fit(1)
    assert seen == [expected] * 2
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(value)] for value in (*seen, expected)]
    assert dtypes == [dtypes[-1]] * 3
