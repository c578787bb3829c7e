"""`step.skip` and `step.hold` in phases that update the parameters themselves, and `learner.update`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, DeclarationError, Learner, Read, TraceError, Write, inject, on
from fluxcb.callbacks import AccumulateGradients, ParameterEMA, SkipNonFinite, StopOnNaNLoss
from fluxcb.events import BackwardBegin, BackwardEnd, StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import testlearner

PROVIDES = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}


def phase(step, provides=PROVIDES):
    return type("Bad", (AbstractTrainingPhase,), {"step": step, "provides": provides})()


def slope(learner, emit):
    """Return the gradient of `w * mean(batch)`."""

    def loss(params):
        learner.step.loss = jnp.mean(params["w"] * learner.step.batch)
        emit(BackwardBegin())
        return learner.step.loss

    return learner.grad(loss)


def by_hand(self, learner, emit):
    learner.step.grads = slope(learner, emit)
    emit(BackwardEnd())
    updates, learner.opt_state = learner.optimizer.update(learner.step.grads, learner.opt_state, learner.params)
    learner.params = optax.apply_updates(learner.params, updates)


def by_hand_with_event(self, learner, emit):
    by_hand(self, learner, emit)
    emit(UpdateEnd())


def by_update(self, learner, emit):
    learner.step.grads = slope(learner, emit)
    emit(BackwardEnd())
    learner.update(learner.step.grads)


def before_handlers(self, learner, emit):
    """Update first, and emit BackwardEnd afterwards."""
    learner.step.grads = slope(learner, emit)
    learner.update(learner.step.grads)
    emit(BackwardEnd())


STEPS = [by_hand, by_hand_with_event, by_update]


def trained(step, batches, *callbacks, optimizer=None, **kwargs):
    """Return a Learner with loss `w * mean(batch)` that was trained for one epoch from w = 0."""
    learner = Learner.from_loss(
        {"w": jnp.zeros(())},
        None,
        optimizer or optax.sgd(1.0),
        data=[np.full(2, value, np.float32) for value in batches],
        phases=(phase(step),),
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )
    with warnings.catch_warnings(action="ignore"):
        learner.fit(1)
    return learner


class UpdateEnds(Callback):
    """Count UpdateEnd in the carry, and keep the parameters that its handlers read."""

    def stateaccess(self):
        return {"params": Read(), "cbstate": {"seen": Write()}}

    def init(self, learner):
        learner.cbstate.seen = {"count": jnp.zeros((), jnp.int32), "params": learner.params}

    @on
    def count(self, event: UpdateEnd, phase: AbstractTrainingPhase, learner):
        learner.cbstate.seen = {"count": learner.cbstate.seen["count"] + 1, "params": learner.params}


# -- skip and hold -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
def test_accumulated_gradients_give_one_update(step):
    learner = trained(step, [-1] * 4, AccumulateGradients(4), UpdateEnds())
    assert float(learner.params["w"]) == 1.0  # four times -1, averaged, at a rate of 1
    assert learner.cbstate["seen"]["count"] == 4
    assert float(learner.cbstate["seen"]["params"]["w"]) == 1.0


def test_averages_ignore_skipped_updates():
    expected = 0.5 * (0.5 * 0 + 0.5 * 1) + 0.5 * 2
    for step in STEPS:
        learner = trained(step, [-1, -1, np.nan], SkipNonFinite(), ParameterEMA(0.5, validate=False))
        assert float(learner.params["w"]) == 2.0
        assert float(learner.cbstate["ema"]["params"]["w"]) == expected


@pytest.mark.parametrize("step", [*STEPS, before_handlers])
@pytest.mark.parametrize("callback", [StopOnNaNLoss, SkipNonFinite])
def test_non_finite_step_changes_nothing(step, callback):
    learner = trained(step, [-1, -1, np.nan], callback(), optimizer=optax.adam(1.0))
    good = trained(step, [-1, -1], callback(), optimizer=optax.adam(1.0))
    assert jax.tree.map(float, learner.params) == jax.tree.map(float, good.params)
    assert jax.tree.map(float, learner.state["opt_state"]) == jax.tree.map(float, good.state["opt_state"])


class Sets(Callback):
    """Set a flag at every step."""

    def __init__(self, flag):
        self.flag = flag

    def stateaccess(self):
        return {"step": {self.flag: Append()}}

    @on  # sets
    def set(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        setattr(learner.step, self.flag, jnp.bool_(True))


class Counts(AbstractTrainingPhase):
    """A model that counts its steps in every part of the train state."""

    provides = PROVIDES

    def step(self, learner, emit):
        learner.step.loss = learner.step.batch.mean()
        learner.model_state = {"seen": learner.model_state["seen"] + 1}
        emit(BackwardEnd())
        learner.params = {"w": learner.params["w"] + 1}
        learner.opt_state = jax.tree.map(lambda x: x + 1, learner.opt_state)


@pytest.mark.parametrize(("flag", "expected"), [(None, (3, 3, 3)), ("hold", (0, 0, 3)), ("skip", (0, 0, 0))])
def test_hold_keeps_params_and_opt_state_and_skip_also_model_state(flag, expected):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.seen = nnx.Param(jnp.zeros(())), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, xs):
            return xs * self.w.value

    learner = Learner(
        Model(),
        None,
        optax.scale_by_schedule(lambda count: 1.0),
        data=[np.ones(2, np.float32)] * 3,
        phases=(Counts(),),
        callbacks=[Sets(flag)] if flag else [],
        default_callbacks=False,
    )
    learner.fit(1)
    state = learner.state
    assert tuple(float(jax.tree.leaves(state[n])[0]) for n in ("params", "opt_state", "model_state")) == expected
    assert learner.step == 3


def moves_and_returns(self, learner, emit):
    """Take the gradient at temporarily replaced parameters."""
    here = learner.params
    learner.params = {"w": here["w"] + 1}
    learner.step.grads = slope(learner, emit)
    learner.params = here
    emit(BackwardEnd())
    learner.apply_updates()


def test_temporarily_replaced_parameters():
    learner = trained(moves_and_returns, [-1, -1, np.nan], SkipNonFinite(), UpdateEnds())
    assert float(learner.params["w"]) == 2.0
    assert learner.cbstate["seen"]["count"] == 3


def selects(learner):
    (phase,) = learner._core.phases
    step, carry = learner._core.traced(phase), learner._core.state.train.carry
    return str(jax.make_jaxpr(step.computing(()))(carry, step.batch_spec)).count("select_n")


@pytest.mark.parametrize("step", [*STEPS, moves_and_returns])
def test_flags_add_one_select_per_array_only_if_written(step):
    assert selects(trained(step, [1])) == 0
    assert selects(trained(step, [1], Sets("skip"))) == 1  # `w`; plain gradient descent has no state
    assert selects(trained(step, [1], Sets("skip"), Sets("hold"))) == 1


class Doubles(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on  # doubles
    def double(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda g: 2 * g, learner.step.grads)


def keeps_a_variable(self, learner, emit):
    learner.step.grads = grads = slope(learner, emit)
    emit(BackwardEnd())
    learner.update(grads)


def test_ignoring_replaced_gradients_raises(refused):
    with refused(
        TraceError,
        "`Bad.step` does not use the gradients that Doubles() has replaced at BackwardEnd.\n"
        "  where: Bad.step\n"
        "         Doubles.double  <@doubles>\n"
        "  why:   the value that the handler wrote to `step.grads` would be lost\n"
        "  fix:   read `learner.step.grads` after BackwardEnd, and update with it: "
        "`learner.update(learner.step.grads)`\n"
        "     or: call `learner.apply_updates()`, which reads it",
    ):
        trained(keeps_a_variable, [-1], Doubles())
    assert float(trained(keeps_a_variable, [-1]).params["w"]) == 1
    assert float(trained(by_update, [-1], Doubles()).params["w"]) == 2


def judged_too_late(self, learner, emit):
    learner.step.grads = slope(learner, emit)
    learner.apply_updates()
    emit(BackwardEnd())


def test_flag_written_after_last_update_raises(refused):
    with refused(
        TraceError,
        "`Bad.step` emits BackwardEnd after its last update, too late for `step.skip`, which Sets() writes.\n"
        "  where: Bad.step\n"
        "         Sets.set  <@sets>\n"
        "  why:   handlers of UpdateEnd have already seen the new parameters\n"
        "  fix:   emit BackwardEnd before the parameters are updated",
    ):
        trained(judged_too_late, [-1], Sets("skip"))
    assert float(trained(judged_too_late, [-1]).params["w"]) == 1
    assert float(trained(before_handlers, [-1], Sets("skip")).params["w"]) == 0


# -- several optimizers ------------------------------------------------------------------------------------------------

PARAMS = {"d": {"a": jnp.float32(0.5), "b": jnp.float32(-0.5)}, "g": jnp.float32(0.25)}
ADAMS = {"d": optax.adam(0.1), "g": optax.adam(0.02, b1=0.5)}


def d_loss(d, g, real):
    return jnp.mean(jax.nn.softplus(-(d["a"] * real + d["b"])) + jax.nn.softplus(d["a"] * g * real + d["b"]))


def g_loss(g, d, real):
    return jnp.mean(jax.nn.softplus(-(d["a"] * g * real + d["b"])))


class Together(AbstractTrainingPhase):
    """Compute both gradients at the same parameters, and then apply both updates."""

    provides = {BackwardEnd: ("loss", "grads"), UpdateEnd: ("updates",)}

    def step(self, learner, emit):
        real, params = learner.step.batch, learner.params
        learner.step.loss = d_loss(params["d"], params["g"], real)
        learner.step.grads = {
            "d": learner.grad(lambda d: d_loss(d, params["g"], real), wrt="params.d"),
            "g": learner.grad(lambda g: g_loss(g, params["d"], real), wrt="params.g"),
        }
        emit(BackwardEnd())
        self.update(learner)

    def update(self, learner):
        learner.update(learner.step.grads["d"], wrt="params.d", optimizer="d")
        learner.update(learner.step.grads["g"], wrt="params.g", optimizer="g")


class Applied(Together):
    def update(self, learner):
        learner.apply_updates()


class ByHand(Together):
    """Compute the updates directly with Optax."""

    def update(self, learner):
        grads, params, state = learner.step.grads, learner.params, learner.opt_state
        for part, tx in ADAMS.items():
            updates, new = tx.update(grads[part], state[part], params[part])
            state = {**state, part: new}
            params = {**params, part: optax.apply_updates(params[part], updates)}
        learner.params, learner.opt_state = params, state
        assert set(learner.optimizer) == {"d", "g"}


class InTurn(AbstractTrainingPhase):
    """Update the discriminator first; the generator uses the updated discriminator."""

    provides = {BackwardBegin: ("loss",), UpdateEnd: ("updates",)}

    def step(self, learner, emit):
        real = learner.step.batch

        def loss_of_d(d):
            learner.step.loss = d_loss(d, learner.params["g"], real)
            emit(BackwardBegin())
            return learner.step.loss

        learner.update(learner.grad(loss_of_d, wrt="params.d"), wrt="params.d", optimizer="d")
        d = learner.params["d"]
        gradient = learner.grad(lambda g: g_loss(g, d, real), wrt="params.g")
        learner.update(gradient, wrt="params.g", optimizer="g")


def gan(phase, *callbacks, data=None, optimizer=None, **kwargs):
    rng = np.random.default_rng(0)
    return Learner.from_loss(
        PARAMS,
        None,
        ADAMS if optimizer is None else optimizer,
        data=data or [rng.normal(2, 0.5, 4).astype(np.float32) for _ in range(6)],
        phases=(phase,),
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def optax_loop(batches, in_turn=False):
    """Return the parameters of a GAN after a hand-written Optax loop with two Adam optimizers."""
    params, states = PARAMS, {name: tx.init(PARAMS[name]) for name, tx in ADAMS.items()}

    def updated(params, part, grads):
        updates, states[part] = ADAMS[part].update(grads, states[part], params[part])
        return {**params, part: optax.apply_updates(params[part], updates)}

    for real in batches:
        before = params
        params = updated(params, "d", jax.grad(d_loss)(before["d"], before["g"], real))
        judge = params["d"] if in_turn else before["d"]
        params = updated(params, "g", jax.grad(g_loss)(before["g"], judge, real))
    return params


def assert_close(actual, expected):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5), actual, expected)


@pytest.mark.parametrize("phase", [Together(), Applied(), ByHand(), InTurn()])
def test_gan_with_two_optimizers_matches_optax_loop(phase):
    learner = gan(phase, UpdateEnds())
    learner.fit(2)
    expected = optax_loop(learner._state.data["training"] * 2, in_turn=isinstance(phase, InTurn))
    assert_close(learner.params, expected)
    assert sorted(learner.state["opt_state"]) == ["d", "g"]
    assert jax.tree.leaves(learner.state["opt_state"]["g"])[0] == 12  # Adam's count
    assert learner.cbstate["seen"]["count"] == 12  # one UpdateEnd in each step, after the last update
    assert_close(learner.cbstate["seen"]["params"], expected)


class Keeps(Callback):
    def __init__(self):
        self.kept = []

    def stateaccess(self):
        return {"step": {"updates": Read()}}

    @on
    def keep(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.kept.append(jax.tree.map(float, dict(learner.step.updates)))


def test_updates_are_named_after_optimizers():
    keeps = Keeps()
    learner = gan(Together(), keeps, data=[np.ones(4, np.float32)])
    learner.fit(1)
    (updates,) = keeps.kept
    assert sorted(updates) == ["d", "g"]
    assert_close(jax.tree.map(jnp.add, PARAMS, updates), learner.params)


@pytest.mark.parametrize("phase", [Together(), Applied(), ByHand()])
@pytest.mark.parametrize("callback", [StopOnNaNLoss, SkipNonFinite])
def test_gan_with_nan_loss_keeps_finite_parameters(phase, callback):
    good = [np.full(4, 2, np.float32)] * 2
    learner = gan(phase, callback(), data=[*good, np.full(4, np.nan, np.float32)])
    with warnings.catch_warnings(action="ignore"):
        learner.fit(1)
    assert_close(learner.params, optax_loop(good))


@pytest.mark.parametrize("phase", [Together(), Applied()])
def test_gradients_accumulate_over_parts(phase):
    rng = np.random.default_rng(1)
    batches = [rng.normal(2, 0.5, 4).astype(np.float32) for _ in range(4)]
    learner = gan(phase, AccumulateGradients(2), data=batches)
    learner.fit(1)
    assert_close(learner.params, optax_loop([np.concatenate(batches[:2]), np.concatenate(batches[2:])]))


class PartAfterPart(AbstractTrainingPhase):
    provides = {BackwardEnd: ("grads",)}

    def step(self, learner, emit):
        for part in "dg":
            loss = (lambda d: d["a"] ** 2) if part == "d" else (lambda g: g**2)
            learner.step.grads = learner.grad(loss, wrt=f"params.{part}")
            emit(BackwardEnd())
            learner.update(learner.step.grads, wrt=f"params.{part}", optimizer=part)


def test_accumulating_gradients_of_one_part_raises(refused):
    with refused(
        TraceError,
        "AccumulateGradients(2) got gradients of only some of the parameters from `PartAfterPart`.\n"
        "  why:   it sums the gradients of all parameters, once per step\n"
        "  fix:   in the step of the phase, assign the gradients of all parts to `learner.step.grads`, with the "
        "structure of `params`, and emit BackwardEnd once",
    ):
        gan(PartAfterPart(), AccumulateGradients(2))


@pytest.mark.parametrize("phase", [Together(), InTurn()])
def test_windows_match_single_steps_bit_for_bit(phase):
    runs = []
    for steps in (1, 4):
        learner = gan(phase, ParameterEMA(0.9, validate=False), steps_per_call=steps)
        learner.fit(2)
        runs.append(jax.tree.map(np.asarray, (learner.params, learner.state["opt_state"], dict(learner.cbstate))))
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_resumed_gan_matches_uninterrupted_gan_bit_for_bit(tmp_path):
    from fluxcb.callbacks import Checkpointer

    whole = gan(Together(), Checkpointer(tmp_path / "whole"))
    whole.fit(4)
    gan(Together(), Checkpointer(tmp_path / "halves")).fit(2)
    resumed = gan(Together(), Checkpointer(tmp_path / "halves"))
    resumed.fit(4, resume=True)
    assert resumed.step == whole.step == 24
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, resumed.state[name], whole.state[name])


def test_two_injected_learning_rates():
    rates = {name: inject(optax.sgd, learning_rate=rate) for name, rate in (("d", 0.1), ("g", 0.2))}
    learner = gan(Together(), optimizer=rates, data=[np.ones(4, np.float32)])
    learner.fit(1)
    real = np.ones(4, np.float32)
    slope = jax.grad(g_loss)(PARAMS["g"], PARAMS["d"], real)
    assert_close(learner.params["g"], PARAMS["g"] - 0.2 * slope)


def test_optimizer_with_other_name_updates_all_parameters():
    def two_rates(self, learner, emit):
        def loss(params):
            return params["d"]["a"] ** 2 + params["g"] ** 2

        learner.update(learner.grad(loss), optimizer="warm")
        learner.update(learner.grad(loss), optimizer="fine")

    learner = gan(phase(two_rates), optimizer={"warm": optax.sgd(0.25), "fine": optax.sgd(0.125)})
    learner.fit(steps=1)
    factor = (1 - 2 * 0.25) * (1 - 2 * 0.125)
    assert_close(learner.params, {"d": {"a": 0.5 * factor, "b": -0.5}, "g": 0.25 * factor})


def test_optimizers_of_nested_parts():
    def two_depths(self, learner, emit):
        def loss(d):
            return d["a"] ** 2 + d["b"] ** 2

        grads = learner.grad(loss, wrt="params.d")
        learner.update(grads["a"], wrt="params.d.a", optimizer="d.a")
        learner.update(grads["b"], wrt="params.d.b", optimizer="d.b")

    learner = gan(phase(two_depths), optimizer={"d.a": optax.sgd(0.25), "d.b": optax.sgd(0.125)})
    learner.fit(steps=1)
    assert_close(learner.params["d"], {"a": 0.5 * 0.5, "b": -0.5 * 0.75})


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            {"d": optax.sgd(0.1), "g": 0.1},
            "`optimizer['g']` must be an optax optimizer, not 0.1.\n"
            "  fix:   write e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
        ),
        (
            {},
            "`optimizer` must map names to optax optimizers, not be {}.\n"
            '  fix:   e.g. `optimizer={"generator": optax.adam(1e-4), "discriminator": optax.adam(4e-4)}`',
        ),
        (
            {**ADAMS, "e": optax.sgd(0.1)},
            "The optimizer 'e' is not used by any phase.\n"
            "  why:   it would never update the parameters that it owns\n"
            "  fix:   call `learner.update(grads, optimizer='e')` in the step of a phase, and list this phase in "
            "`phases=`\n"
            "     or: remove 'e' from `optimizer=`",
        ),
    ],
)
def test_invalid_optimizers_raise(refused, optimizer, text):
    with refused(DeclarationError, text):
        gan(Together(), optimizer=optimizer)


def calling(**kwargs):
    def step(self, learner, emit):
        learner.step.grads = learner.grad(lambda params: params["d"]["a"] + params["d"]["b"] + params["g"])
        grads = learner.step.grads["d"] if kwargs.get("wrt") == "params.d" else learner.step.grads
        learner.update(grads, **kwargs)

    return step


@pytest.mark.parametrize(
    ("optimizer", "kwargs", "text"),
    [
        (
            ADAMS,
            {"wrt": "params.d"},
            "`Bad.step` calls `learner.update` without `optimizer=`, and the optimizers of this Learner are 'd' and "
            "'g'.\n"
            "  fix:   write e.g. `learner.update(grads, wrt='params.d', optimizer='d')`",
        ),
        (
            ADAMS,
            {"wrt": "params.d", "optimizer": "dd"},
            "`Bad.step` calls `learner.update` with `optimizer='dd'`, and the optimizers of this Learner are 'd' and "
            "'g'.\n"
            "  fix:   write e.g. `learner.update(grads, wrt='params.d', optimizer='d')`\n"
            "     or: rename the optimizer 'd' of the Learner to 'dd'",
        ),
        (
            ADAMS,
            {"wrt": "params.d", "optimizer": "e"},
            "`Bad.step` calls `learner.update` with `optimizer='e'`, and the optimizers of this Learner are 'd' and "
            "'g'.\n"
            "  fix:   write e.g. `learner.update(grads, wrt='params.d', optimizer='d')`",
        ),
        (
            ADAMS,
            {"wrt": "params.d", "optimizer": "g"},
            "`Bad.step` calls `learner.update` for `params.d` with the optimizer 'g', which owns `params.g`.\n"
            "  why:   an optimizer named after a part of `params` owns this part, and an optimizer with any other "
            "name owns all of them\n"
            '  fix:   write `wrt="params.g"`\n'
            "     or: use the optimizer 'd'",
        ),
        (
            {"x": optax.sgd(0.1)},
            {"wrt": "params.d"},
            "`Bad.step` calls `learner.update` for `params.d` with the optimizer 'x', which owns all of `params`.\n"
            "  why:   an optimizer named after a part of `params` owns this part, and an optimizer with any other "
            "name owns all of them\n"
            '  fix:   write `wrt="params"`\n'
            "     or: name an optimizer 'd'",
        ),
        (
            optax.sgd(0.1),
            {"wrt": "params.d"},
            "`Bad.step` calls `learner.update` for `params.d`, but the only optimizer of this Learner owns all of "
            "`params`.\n"
            "  why:   an optimizer keeps its state for the parameters that it was initialized with\n"
            '  fix:   give the Learner `optimizer={"d": ...}`, and write '
            '`learner.update(grads, wrt="params.d", optimizer="d")`',
        ),
        (
            optax.sgd(0.1),
            {"optimizer": "d"},
            "`Bad.step` calls `learner.update` with `optimizer='d'`, but the optimizer of this Learner has no name.\n"
            "  fix:   leave `optimizer=` out, or give the Learner `optimizer={'d': ...}`",
        ),
        (
            {"d": optax.scale(-0.1)},
            {"wrt": "params.d", "optimizer": "d", "momentum": 0.9},
            "`learner.update(..., momentum=...)` passes an argument that the optimizer does not take.\n"
            "  where: Bad.step\n"
            "  why:   only `value`, `grad`, `value_fn`, `grad_fn` may be passed to every optimizer\n"
            "  fix:   leave `momentum` out, or use an optimizer whose `update` takes it",
        ),
    ],
)
def test_invalid_updates_raise(refused, optimizer, kwargs, text):
    with refused(TraceError, text):
        gan(phase(calling(**kwargs)), optimizer=optimizer)


def test_suggested_fixes_work():
    learner = gan(phase(calling(wrt="params.d", optimizer="d")), optimizer={"d": optax.sgd(0.125)})
    learner.fit(steps=1)
    assert_close(learner.params, {**PARAMS, "d": {"a": 0.5 - 0.125, "b": -0.5 - 0.125}})


def of_a_part(self, learner, emit):
    learner.update(learner.grad(lambda d: d["a"] ** 2, wrt="params.d"))


def test_gradients_with_other_structure_raise(refused):
    with refused(
        TraceError,
        "The gradients that `Bad.step` gives to `learner.update` do not match `params`.\n"
        "  where: ['d']['a'] is missing\n"
        "         ['d']['b'] is missing\n"
        "         ['g'] is missing\n"
        "         ['a'] is new: float32[]\n"
        "         ['b'] is new: float32[]\n"
        '  fix:   differentiate with respect to it: `learner.grad(loss, wrt="params")`',
    ):
        gan(phase(of_a_part), optimizer=optax.sgd(0.1))


def in_a_gradient(self, learner, emit):
    def loss(params):
        learner.update(learner.grad(lambda p: p["g"] ** 2))
        return params["g"]

    learner.step.grads = learner.grad(loss)


def test_update_inside_gradient_raises(refused):
    with refused(
        TraceError,
        "`Bad.step` updates the parameters inside a gradient or another JAX transformation.\n"
        "  why:   the new parameters would leak out of the transformation as tracers\n"
        "  fix:   take the gradient first, and pass the result to `learner.update`",
    ):
        gan(phase(in_a_gradient), optimizer=optax.sgd(0.1))


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (
            {"d": optax.sgd(0.1)},
            "`Applied.step` calls `learner.apply_updates()`, and no optimizer owns `params.g`.\n"
            "  why:   the gradients of this part would be ignored\n"
            '  fix:   add an optimizer for it, e.g. `"g": optax.set_to_zero()` to keep it constant',
        ),
        (
            {"all": optax.sgd(0.1), "g": optax.sgd(0.1)},
            "`Applied.step` calls `learner.apply_updates()`, and the optimizers 'all' and 'g' both own `params.g`.\n"
            "  why:   `params` has no part 'all', so this optimizer owns all of it\n"
            "  fix:   name 'all' after the part that it updates: 'd' or 'g'\n"
            "     or: call `learner.update(grads, wrt=..., optimizer=...)` in a phase of your own",
        ),
    ],
)
def test_ambiguous_apply_updates_raises(refused, optimizer, text):
    with refused(TraceError, text):
        gan(Applied(), optimizer=optimizer)


def test_part_with_set_to_zero_stays_unchanged():
    learner = gan(Applied(), optimizer={"d": optax.sgd(0.1), "g": optax.set_to_zero()})
    learner.fit(1)
    assert float(learner.params["g"]) == 0.25
    assert float(learner.params["d"]["a"]) != 0.5


def test_html_of_learner_with_several_optimizers():
    assert "d: adam; g: adam" in gan(Together())._repr_mimebundle_()["text/html"]


# -- gradients of each example -----------------------------------------------------------------------------------------


def per_example(self, learner, emit):
    xs, ys = learner.step.batch

    def loss(params, x, y):
        return jnp.mean((params["w"] * x + params["b"] - y) ** 2)

    learner.step.grads = jax.vmap(jax.grad(loss), (None, 0, 0))(learner.params, xs, ys)
    emit(BackwardEnd())
    learner.apply_updates()


def test_per_example_gradients():
    noiseless = optax.contrib.differentially_private_aggregate(0.5, 0.0, key=0)
    learner = testlearner(phases=(phase(per_example),), optimizer=optax.chain(noiseless, optax.sgd(0.1)), batches=1)
    learner.fit(1)
    (xs, ys), *_ = learner._state.data["training"]
    residual = -ys  # from w = b = 0
    grads = np.stack([(2 * residual * xs)[:, 0], (2 * residual)[:, 0]])
    clipped = grads / np.maximum(1, np.linalg.norm(grads, axis=0) / 0.5)
    w, b = -0.1 * clipped.mean(axis=1)
    assert_close(learner.params, {"w": w, "b": b})


def test_per_example_gradients_with_unsuitable_optimizer_raise(refused):
    with refused(
        TraceError,
        "The optimizer returns updates that do not match `params`.\n"
        "  where: ['b']: float32[] gets an update of float32[8]\n"
        "         ['w']: float32[] gets an update of float32[8]\n"
        "  why:   `optax.apply_updates` adds them to the parameters\n"
        "  fix:   give the optimizer gradients of the parameters' shapes, or begin it with a transformation that "
        "combines them, such as `optax.contrib.differentially_private_aggregate`",
    ):
        testlearner(phases=(phase(per_example),), validation_batches=0)
