"""Updates computed from a selected state of the optimizer: the results are correct, and nothing is computed twice."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, Learner, Read, Write, on
from fluxcb._compile.traced_update import update_with_selection
from fluxcb.callbacks import SkipNonFinite, StopOnNaNLoss
from fluxcb.events import BackwardEnd, UpdateEnd
from fluxcb.phases import TrainingPhase

START = {"w": np.full((48, 32), 0.02, np.float32), "b": np.zeros(32, np.float32)}
GOOD = [np.full((2, 48), value, np.float32) for value in (0.5, -1.0, 0.25)]
BAD = np.full((2, 48), np.nan, np.float32)

OPTIMIZERS = {
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "clipped adamw with a schedule": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    ),
    "adafactor": optax.adafactor(0.1),
    "two steps per update": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "line search": optax.lbfgs(),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1) ** 2)


def fitted(optimizer, data, *callbacks, program=None):
    learner = Learner.from_loss(
        START, loss_fn, optimizer, data=data, callbacks=callbacks, default_callbacks=False, program=program
    )
    learner.fit(1)
    return learner


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@each_optimizer
def test_skipped_steps_leave_an_optax_loop_without_them(optimizer):
    params, state = START, optimizer.init(START)
    extra = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    for batch in GOOD:
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        more = {"value": value, "grad": grads, "value_fn": lambda p, x=batch: loss_fn(p, x)} if extra else {}
        updates, state = optimizer.update(grads, state, params, **more)
        params = optax.apply_updates(params, updates)
    learner = fitted(optimizer, [BAD, GOOD[0], BAD, BAD, *GOOD[1:], BAD], SkipNonFinite())
    for ours, theirs in ((learner.params, params), (learner.opt_state, state)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


@pytest.mark.parametrize("keeps", [True, False])
def test_state_and_updates_agree_with_the_selection(keeps):
    optimizer = OPTIMIZERS["amsgrad"]
    state = optimizer.init(START)
    grads = jax.grad(loss_fn)(START, GOOD[0])

    def update(*arguments):
        return update_with_selection(optimizer.update, lambda old, new: old if keeps else new, *arguments)

    updates, new = jax.jit(update)(grads, state, START)
    expected_updates, expected_state = jax.jit(optimizer.update)(grads, state, START)
    assert same(new, state if keeps else expected_state)
    if not keeps:
        assert same(updates, expected_updates)


def test_updates_are_computed_from_the_selected_state():
    m, v = 0.3, 0.04
    params = {"w": jnp.ones(3)}
    optimizer = optax.adam(0.1, b1=0.8, b2=0.9)
    initial: Any = optimizer.init(params)
    adam, rest = initial
    state = jax.tree.map(
        jnp.asarray, (adam._replace(count=2, mu={"w": jnp.full(3, m)}, nu={"w": jnp.full(3, v)}), rest)
    )
    updates, _ = update_with_selection(optimizer.update, lambda old, new: old, params, state, params)
    expected = -0.1 * (m / (1 - 0.8**2)) / (np.sqrt(v / (1 - 0.9**2)) + 1e-8)
    np.testing.assert_allclose(updates["w"], np.full(3, expected), rtol=1e-6)


def test_state_that_is_an_input_a_constant_or_shared_is_selected():
    def update(grads, state, params):
        doubled = jax.tree.map(lambda g: 2 * g, grads)
        return doubled, {"params": params, "one": jnp.float32(1), "a": doubled, "b": doubled, "same": state["same"]}

    start = {name: np.float32(at) for at, name in enumerate(("params", "one", "a", "b", "same"), start=5)}

    def selected(flag):
        return update_with_selection(
            update, lambda old, new: jnp.where(flag, old, new), jnp.ones(()), start, jnp.zeros(())
        )

    assert same(jax.jit(selected)(True)[1], start)
    assert jax.jit(selected)(False) == (2, {"params": 0, "one": 1, "a": 2, "b": 2, "same": 9})


# -- cost --------------------------------------------------------------------------------------------------------------


def multiplications(learner):
    """Return how many multiplications of arrays like `w` the compiled step has."""
    (program,) = learner._core.engine.programs.compiled
    return len(re.findall(r"= f32\[48,32\]\S* multiply\(", program.call.as_text()))


@pytest.mark.parametrize("program", ["loop", "straight"])
@pytest.mark.parametrize("name", ["adam", "amsgrad", "clipped adamw with a schedule"])
def test_flags_compute_no_state_twice(name, program):
    plain, guarded = (
        fitted(OPTIMIZERS[name], GOOD[:1], *callbacks, program=program) for callbacks in ([], [StopOnNaNLoss()])
    )
    assert multiplications(plain) == multiplications(guarded) > 0


def test_line_search_runs_once():
    def loops(*callbacks):
        learner = Learner.from_loss(START, loss_fn, optax.lbfgs(), data=GOOD, callbacks=callbacks)
        step = learner._core.traced(learner._core.phases[0])
        assert step is not None
        return str(step.jaxpr).count(" while[")

    assert loops() == loops(SkipNonFinite()) > 0


def test_effects_of_an_optimizer_happen_once_per_step():
    seen = []

    def update(updates, state, params=None):
        state = state + 1
        jax.debug.callback(lambda count: seen.append(int(count)), state)
        return jax.tree.map(lambda u: -0.1 * u * state, updates), state

    counting = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    learner = fitted(counting, GOOD, StopOnNaNLoss())
    jax.effects_barrier()
    assert seen == [1, 2, 3]
    assert int(learner.opt_state) == 3


# -- what handlers see -------------------------------------------------------------------------------------------------


class Holds(Callback):
    """Hold every step, and keep what handlers see of the update."""

    def stateaccess(self):
        return {"step": {"hold": Append(), "updates": Read()}, "cbstate": {"seen": Write()}}

    def init(self, learner):
        learner.cbstate.seen = jax.tree.map(jnp.ones_like, START)

    @on
    def hold(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.hold = jnp.bool_(True)

    @on
    def keep(self, event: UpdateEnd, phase: TrainingPhase, learner):
        learner.cbstate.seen = learner.step.updates


def test_updates_of_a_held_step_are_zero():
    optimizer = OPTIMIZERS["adam"]
    learner = fitted(optimizer, GOOD[:1], Holds())
    zeros = jax.tree.map(np.zeros_like, START)
    assert same(learner.cbstate["seen"], zeros)
    assert same(learner.params, START)
    assert same(learner.opt_state, optimizer.init(START))
