"""Extra arguments of optimizers (`value`, `grad`, `value_fn`, `grad_fn`), compared with Optax loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, Learner, Read, TraceError, Write, on
from fluxcb.callbacks import ClipGradients
from fluxcb.events import BackwardBegin, BackwardEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import testlearner

UPHILL = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
SAM = optax.contrib.sam(optax.sgd(0.1), UPHILL, opaque_mode=True)
START = {"w": jnp.zeros(()), "b": jnp.zeros(())}


def error_of(params, batch):
    xs, ys = batch
    return jnp.mean((params["w"] * xs + params["b"] - ys) ** 2)


def nothing(loss, value, grads):
    return {}


def value(loss, value, grads):
    return {"value": value}


def line_search(loss, value, grads):
    return {"value": value, "grad": grads, "value_fn": loss}


def gradient(loss, value, grads):
    return {"grad_fn": lambda params, step: jax.grad(loss)(params)}


def optax_loop(optimizer, extra, batches):
    """Return the parameters that the optimizer reaches in a hand-written Optax loop."""
    params, state = START, optimizer.init(START)
    for batch in batches:

        def loss(params, batch=batch):
            return error_of(params, batch)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params, **extra(loss, value, grads))
        params = optax.apply_updates(params, updates)
    return params


OPTIMIZERS = {
    "lbfgs": (optax.lbfgs(), line_search),
    "lbfgs in a wrapper": (optax.masked(optax.lbfgs(), {"w": True, "b": True}), line_search),
    "backtracking": (
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=10)),
        line_search,
    ),
    "sam": (SAM, gradient),
    "sam of three steps": (optax.contrib.sam(optax.adam(0.1), UPHILL, sync_period=3, opaque_mode=True), gradient),
    "sam step by step": (optax.contrib.sam(optax.sgd(0.1), UPHILL), nothing),
    "sam in a chain": (optax.chain(optax.clip_by_global_norm(1.0), SAM), gradient),
    "plateau": (optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), value),
    "polyak": (optax.polyak_sgd(), value),
    "momo": (optax.contrib.momo(), value),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_match_optax_loop(name):
    optimizer, extra = OPTIMIZERS[name]
    learner = testlearner(optimizer=optimizer, validation_batches=0, default_callbacks=True)
    learner.fit(2)
    expected = optax_loop(optimizer, extra, learner._state.data["training"] * 2)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4), learner.params, expected)


@pytest.mark.parametrize("name", ["lbfgs", "sam"])
def test_optimizers_match_optax_loop_from_loss(name):
    optimizer, extra = OPTIMIZERS[name]
    data = testlearner()._state.data["training"]
    learner = Learner.from_loss(
        START, lambda params, batch, key: error_of(params, batch), optimizer, data=data, default_callbacks=False
    )
    learner.fit(2)
    expected = optax_loop(optimizer, extra, data * 2)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4), learner.params, expected)


class Counts(Callback):
    """Count in Python how often a handler is traced."""

    def __init__(self):
        self.count = 0

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def see(self, event: BackwardBegin, phase: TrainingPhase, learner):
        self.count += 1


@pytest.mark.parametrize("name", ["lbfgs", "sam of three steps"])
def test_events_are_emitted_once(name):
    counts = Counts()
    testlearner(counts, optimizer=OPTIMIZERS[name][0])
    assert counts.count == 1


class Keeps(Callback):
    def stateaccess(self):
        return {"step": {"aux": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.aux = float(learner.step.aux)


def test_value_fn_uses_same_random_key():
    """The minimum of a parabola is random, and both gradients of SAM use the same minimum."""

    def loss(params, batch, key):
        drawn = jax.random.normal(key, ())
        return (params["w"] - drawn) ** 2, drawn

    keeps = Keeps()
    learner = Learner.from_loss(
        {"w": jnp.zeros(())}, loss, SAM, data=[np.zeros(2, np.float32)], callbacks=[keeps], default_callbacks=False
    )
    learner.fit(1)
    # From w = 0, the worst point nearby is 0.1 away from the minimum, and the rate is 0.1.
    assert float(learner.params["w"]) == pytest.approx(0.2 * (keeps.aux + 0.1 * np.sign(keeps.aux)), rel=1e-5)


@pytest.mark.parametrize("steps", [1, 4])
def test_windows_do_not_change_result(steps):
    learner = testlearner(optimizer=optax.lbfgs(), validation_batches=0, steps_per_call=steps)
    learner.fit(2)
    other = testlearner(optimizer=optax.lbfgs(), validation_batches=0, steps_per_call=2)
    other.fit(2)
    jax.tree.map(np.testing.assert_array_equal, learner.params, other.params)


class Parts(AbstractTrainingPhase):
    """Minimize over each part in turn, with line searches."""

    provides = {BackwardBegin: ("loss",)}

    def step(self, learner, emit):
        for part in "bw":

            def loss(value, part=part):
                learner.step.loss = error_of({**learner.params, part: value}, learner.step.batch)
                return learner.step.loss

            learner.update(learner.grad(loss, wrt=f"params.{part}"), wrt=f"params.{part}", optimizer=part)


def test_line_search_of_each_part():
    learner = testlearner(
        phases=(Parts(),), optimizer={part: optax.lbfgs() for part in "bw"}, batches=1, validation_batches=0
    )
    learner.fit(20)
    assert float(learner.params["w"]) == pytest.approx(3, abs=1e-3)
    assert float(learner.params["b"]) == pytest.approx(-1, abs=1e-3)


def test_lookahead_matches_optax():
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)
    data = testlearner()._state.data["training"]
    learner = Learner.from_loss(
        optax.LookaheadParams.init_synced(START),
        lambda params, batch, key: error_of(params.fast, batch),
        optimizer,
        data=data,
        default_callbacks=False,
    )
    learner.fit(2)
    params = optax.LookaheadParams.init_synced(START)
    state = optimizer.init(params)
    for batch in data * 2:
        updates, state = optimizer.update(jax.grad(error_of)(params.fast, batch), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5), learner.params, params)


def test_lookahead_without_lookahead_params_raises(refused):
    with refused(
        TraceError,
        "`optax.lookahead` needs its own parameters, `optax.LookaheadParams`.\n"
        "  why:   it keeps a fast and a slow copy of the parameters, and the gradients are those of the fast one\n"
        "  fix:   build the Learner with `Learner.from_loss(optax.LookaheadParams.init_synced(params), loss_fn, ...)`, "
        "where `loss_fn(params, batch, key)` computes the loss of `params.fast`",
    ):
        testlearner(optimizer=optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5))


# -- what stays an error -----------------------------------------------------------------------------------------------


def phase(step):
    return type("Bad", (AbstractTrainingPhase,), {"step": step, "provides": {BackwardEnd: ("grads",)}})()


def plain_gradient(self, learner, emit):
    learner.update(jax.grad(error_of)(learner.params, learner.step.batch))


def gives_all(self, learner, emit):
    batch = learner.step.batch

    def loss(params):
        return error_of(params, batch)

    value, grads = jax.value_and_grad(loss)(learner.params)
    learner.update(grads, value=value, value_fn=loss, grad_fn=lambda params, step: jax.grad(loss)(params))


@pytest.mark.parametrize(
    ("optimizer", "name", "first"),
    [
        (optax.polyak_sgd(), "value", "assign `learner.step.loss` before the update"),
        (
            SAM,
            "grad_fn",
            'take the gradient once, with `learner.grad(loss, wrt="params")`; fluxcb then passes its gradient as '
            "`grad_fn`",
        ),
        (
            optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=10)),
            "value",
            "assign `learner.step.loss` before the update",
        ),
    ],
)
def test_missing_extra_argument_raises(refused, optimizer, name, first):
    with refused(
        TraceError,
        f"The optimizer needs `{name}`, and the phase does not provide it.\n"
        "  where: Bad.step\n"
        f"  why:   its `update` takes `{name}` as an extra argument\n"
        f"  fix:   {first}\n"
        f"     or: pass it: `learner.update(grads, {name}=...)`",
    ):
        testlearner(phases=(phase(plain_gradient),), optimizer=optimizer)
    learner = testlearner(phases=(phase(gives_all),), optimizer=optimizer, validation_batches=0)
    learner.fit(1)
    assert np.isfinite(float(learner.params["w"]))


def test_parts_with_contradictory_arguments_raise(refused):
    optimizer = optax.chain(SAM, optax.contrib.reduce_on_plateau(patience=1))
    with refused(
        TraceError,
        "One part of the optimizer needs `value`, and another part does not accept it.\n"
        "  where: TrainingPhase.step\n"
        "  why:   `optax.chain` passes the same extra arguments to all of its parts\n"
        "  fix:   combine parts that take the same extra arguments, or leave one of the two out",
    ):
        testlearner(optimizer=optimizer)


def test_wrapper_without_extra_arguments_raises(refused):
    with refused(
        TraceError,
        "A part of the optimizer needs `grad_fn`, and the transformation around it does not take extra arguments.\n"
        "  where: TrainingPhase.step\n"
        "  why:   only an `optax.GradientTransformationExtraArgs` gets extra arguments\n"
        "  fix:   write `optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)`, where `optimizer` "
        "is, e.g., an `optax.MultiSteps`",
    ):
        testlearner(optimizer=optax.MultiSteps(SAM, 2))
    optimizer = optax.MultiSteps(SAM, 2)
    fixed = optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
    learner = testlearner(optimizer=fixed, validation_batches=0)
    learner.fit(2)
    expected = optax_loop(fixed, gradient, learner._state.data["training"] * 2)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4), learner.params, expected)


class Doubles(Callback):
    def stateaccess(self):
        return {"step": {"loss": Write()}}

    @on  # doubles
    def double(self, event: BackwardBegin, phase: TrainingPhase, learner):
        learner.step.loss = 2 * learner.step.loss


def test_handler_changing_loss_raises(refused):
    with refused(
        TraceError,
        "The optimizer computes the loss of the batch again, without the changes that Doubles() makes to the loss.\n"
        "  where: TrainingPhase.step\n"
        "         Doubles.double  <@doubles>\n"
        "  why:   `value_fn` and `grad_fn` call the loss without emitting events\n"
        "  fix:   remove Doubles(), and move its computation to the loss function\n"
        "     or: use an optimizer that needs neither `value_fn` nor `grad_fn`",
    ):
        testlearner(Doubles(), optimizer=SAM)


def test_handler_changing_gradients_raises():
    with pytest.raises(TraceError) as raised:
        testlearner(ClipGradients(1.0), optimizer=SAM)
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "The optimizer computes the loss of the batch again, without the changes that ClipGradients(1.0) makes to "
        "the gradients."
    )
    assert lines[-2:] == [
        "  fix:   remove ClipGradients(1.0), and move its computation to the optimizer if an `optax.chain` can do it",
        "     or: use an optimizer that needs neither `value_fn` nor `grad_fn`",
    ]


def several_gradients(self, learner, emit):
    def loss(params, half):
        xs, ys = learner.step.batch
        return error_of(params, (xs[half::2], ys[half::2]))

    halves = [learner.grad(lambda params, half=half: loss(params, half)) for half in (0, 1)]
    learner.update(jax.tree.map(lambda a, b: (a + b) / 2, *halves))


def test_several_gradients_provide_no_value_fn():
    with pytest.raises(TraceError) as raised:
        testlearner(phases=(phase(several_gradients),), optimizer=SAM)
    assert str(raised.value).splitlines()[0] == "The optimizer needs `grad_fn`, and the phase does not provide it."
