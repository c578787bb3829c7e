"""Phases of one's own: two networks, more events, other gradients; existing callbacks work with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, Learner, Read, TraceError, Write, inject, on
from fluxcb.callbacks import ClipGradients, Metrics, ParameterEMA, Recorder
from fluxcb.events import (
    BackwardBegin,
    BackwardEnd,
    HostEvent,
    LossBegin,
    StepEnd,
    TracedEvent,
    UpdateEnd,
)
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner


def generate(g, noise):
    return noise * g["scale"] + g["shift"]


def judge(d, x):
    return d["a"] * x + d["b"] * x**2 + d["c"]


def loss_of_judge(d, real, fake):
    return jnp.mean(jax.nn.softplus(-judge(d, real))) + jnp.mean(jax.nn.softplus(judge(d, fake)))


def loss_of_generator(d, fake):
    return jnp.mean(jax.nn.softplus(-judge(d, fake)))


class GANPhase(AbstractTrainingPhase):
    provides = {
        LossBegin: ("noise", "fake"),
        BackwardBegin: ("loss", "g_loss"),
        BackwardEnd: ("grads",),
        UpdateEnd: ("updates",),
    }

    def step(self, learner, emit):
        noise = jax.random.normal(learner.key, learner.step.batch.shape)
        learner.step.noise = noise

        def d_loss(d):
            learner.step.fake = generate(learner.params["g"], noise)
            emit(LossBegin())
            learner.step.loss = loss_of_judge(d, learner.step.batch, learner.step.fake)
            emit(BackwardBegin())
            return learner.step.loss

        def g_loss(g):
            learner.step.g_loss = loss_of_generator(learner.params["d"], generate(g, noise))
            return learner.step.g_loss

        d_grads = learner.grad(d_loss, wrt="params.d")
        learner.step.grads = {"d": d_grads, "g": learner.grad(g_loss, wrt="params.g")}
        emit(BackwardEnd())
        learner.apply_updates()


class Keeps(Callback):
    """Keep values of every step."""

    def __init__(self, *names):
        self.names, self.kept = names, []

    def stateaccess(self):
        return {"step": {name: Read() for name in self.names}}

    @on
    def keep(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.kept.append({name: jax.tree.map(np.array, getattr(learner.step, name)) for name in self.names})


PARAMS = {
    "g": {"scale": jnp.float32(1), "shift": jnp.float32(0)},
    "d": {"a": jnp.float32(0), "b": jnp.float32(0), "c": jnp.float32(0)},
}


def real_batches(count):
    rng = np.random.default_rng(0)
    return [(0.5 * rng.normal(size=32) + 2).astype(np.float32) for _ in range(count)]


def gan(*callbacks, data=None, **kwargs):
    return Learner.from_loss(
        PARAMS,
        None,
        inject(optax.sgd, learning_rate=0.1),
        data={"training": data or real_batches(10)},
        phases=(GANPhase(),),
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def test_a_gan_trains_as_by_hand():
    keeps = Keeps("noise", "loss", "g_loss", "grads")
    learner = gan(keeps)
    learner.fit(2)
    params = PARAMS
    for real, kept in zip(real_batches(10) * 2, keeps.kept, strict=True):
        fake = generate(params["g"], kept["noise"])
        np.testing.assert_allclose(kept["loss"], loss_of_judge(params["d"], real, fake), rtol=1e-5)
        np.testing.assert_allclose(kept["g_loss"], loss_of_generator(params["d"], fake), rtol=1e-5)
        d = jax.grad(loss_of_judge)(params["d"], real, fake)
        g = jax.grad(lambda g, d, z: loss_of_generator(d, generate(g, z)))(params["g"], params["d"], kept["noise"])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), kept["grads"], {"d": d, "g": g}
        )
        params = jax.tree.map(lambda p, grad: p - 0.1 * grad, params, {"d": d, "g": g})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), learner.params, params)
    assert learner.compile_counts == {"traces": 1, "compiles": 1}


def test_a_gan_moves_what_it_makes_towards_the_data():
    learner = gan()
    learner.fit(30)
    assert float(learner.params["g"]["shift"]) == pytest.approx(2, abs=0.5)


def test_existing_callbacks_work_with_it():
    clip, ema, log = ClipGradients(0.01), ParameterEMA(0.5, validate=False), EventLog()
    learner = gan(Metrics(), Recorder(), clip, ema, log)
    learner.fit(1)
    assert log.names() == ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * 10, "EpochEnd", "Trigger", "FitEnd"]
    moved = optax.tree.norm(jax.tree.map(lambda a, b: a - b, learner.params, PARAMS))
    assert 0 < float(moved) <= 10 * 0.1 * 0.01 * (1 + 1e-5)
    assert learner.cbstate["history"]["training"].steps == 10


class AfterNoise(TracedEvent):
    def __init__(self, scale):
        self.scale = scale


class EmitsItsOwn(TrainingPhase):
    provides = {**TrainingPhase.provides, AfterNoise: ("noise",)}

    def step(self, learner, emit):
        learner.step.noise = jax.random.normal(learner.key, ())
        emit(AfterNoise(scale=3.0))
        super().step(learner, emit)


class HearsNoise(Callback):
    def stateaccess(self):
        return {"step": {"noise": Read(), "heard": Write()}}

    @on
    def hear(self, event: AfterNoise, phase: EmitsItsOwn, learner):
        learner.step.heard = event.scale * learner.step.noise


def test_a_traced_event_of_ones_own():
    keeps = Keeps("noise", "heard")
    learner = testlearner(HearsNoise(), keeps, phases=(EmitsItsOwn(), ValidationPhase()))
    learner.fit(1)
    assert len(keeps.kept) == 4
    for kept in keeps.kept:
        np.testing.assert_allclose(kept["heard"], 3 * kept["noise"], rtol=1e-6)


class Alternating(TrainingPhase):
    """A phase with a value: two equal ones share a program."""

    def __init__(self, factor):
        self.factor = factor

    def step(self, learner, emit):
        def loss(params):
            learner.step.outputs = learner.forward(params, learner.step.batch[0])
            emit(LossBegin())
            learner.step.loss = self.factor * learner.loss_fn(learner.step.outputs, learner.step.batch[1])
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


def test_phases_are_values():
    learner = testlearner(phases=(Alternating(1.0),), validation_batches=0)
    batch = learner._state.data["training"][0]
    one = float(learner.run_step(Alternating(1.0), batch)["loss"])
    counts = learner.compile_counts
    assert counts == {"traces": 1, "compiles": 1}
    learner.run_step(Alternating(1.0), batch)
    assert learner.compile_counts == counts
    other = testlearner(phases=(Alternating(2.0),), validation_batches=0)
    assert float(other.run_step(Alternating(2.0), batch)["loss"]) == pytest.approx(2 * one)
    learner.run_step(Alternating(2.0), batch)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}


class Frozen(TrainingPhase):
    """Trains `w` only, by differentiating with respect to a part."""

    def step(self, learner, emit):
        def loss(w):
            outputs = learner.forward({**learner.params, "w": w}, learner.step.batch[0])
            learner.step.loss = learner.loss_fn(outputs, learner.step.batch[1])
            return learner.step.loss

        learner.step.grads = {"w": learner.grad(loss, wrt="params.w"), "b": jnp.zeros(())}
        learner.apply_updates()


def test_a_part_of_the_parameters_can_be_trained():
    learner = testlearner(phases=(Frozen(),), validation_batches=0)
    learner.fit(3)
    assert float(learner.params["b"]) == 0
    assert float(learner.params["w"]) > 1


class Resets(HostEvent):
    pass


class Reacts(Callback):
    def stateaccess(self):
        return {"params": Write()}

    @on
    def reset(self, event: Resets, phase: Phase, learner):
        learner.params = jax.tree.map(lambda p: 0 * p, learner.params)


def test_a_host_event_of_ones_own_can_change_the_parameters():
    learner = testlearner(Reacts())
    learner.fit(1)
    assert float(learner.params["w"]) != 0
    learner.emit(Resets(), TrainingPhase())
    assert jax.tree.map(float, learner.params) == {"w": 0.0, "b": 0.0}
    learner.fit(1)


# -- what a phase may not do -------------------------------------------------------------------------------------------


def trace(step, **kwargs):
    """Return the error that a training phase with this step causes."""
    bad = type("Bad", (AbstractTrainingPhase,), {"step": step})
    with pytest.raises(TraceError) as raised:
        testlearner(phases=(bad(),), validation_batches=0, **kwargs)
    return str(raised.value)


TRANSFORMED = (
    "BackwardBegin is emitted inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did not open.\n"
    "  where: Bad.step\n"
    "  why:   what handlers write there would leak out of the transformation as tracers\n"
    '  fix:   differentiate with `learner.grad(function, wrt="params")`, and emit outside other transformations'
)


def in_grad(self, learner, emit):
    def loss(params):
        emit(BackwardBegin())
        return params["w"] ** 2

    learner.step.grads = jax.grad(loss)(learner.params)
    learner.apply_updates()


def in_vmap(self, learner, emit):
    def one(x):
        emit(BackwardBegin())
        return x

    jax.vmap(one)(learner.step.batch[0])


def in_scan(self, learner, emit):
    def body(carry, x):
        emit(BackwardBegin())
        return carry, x

    jax.lax.scan(body, 0, learner.step.batch[0])


def in_jit(self, learner, emit):
    @jax.jit
    def inner(x):
        emit(BackwardBegin())
        return x

    inner(learner.step.batch[0])


def in_vmap_in_grad(self, learner, emit):
    def loss(params):
        def one(x):
            emit(BackwardBegin())
            return x * params["w"]

        return jax.vmap(one)(learner.step.batch[0]).mean()

    learner.grad(loss)


@pytest.mark.parametrize("step", [in_grad, in_vmap, in_scan, in_jit, in_vmap_in_grad])
def test_emitting_inside_another_transformation_is_an_error(step):
    assert trace(step) == TRANSFORMED


def assigns_in_grad(self, learner, emit):
    def loss(params):
        learner.step.loss = params["w"] ** 2
        return learner.step.loss

    learner.step.grads = jax.grad(loss)(learner.params)
    learner.apply_updates()


def test_assigning_inside_another_transformation_is_an_error():
    assert trace(assigns_in_grad) == (
        "`Bad.step` assigns `step.loss` inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did not open.\n"
        "  why:   the value would leak out of the transformation as a tracer\n"
        '  fix:   differentiate with `learner.grad(function, wrt="params")`, or assign what comes out of it'
    )


def unassigned(self, learner, emit):
    learner.step.loss = learner.step.output.mean()


def wrong_wrt(self, learner, emit):
    learner.grad(lambda x: x, wrt="opt_state")


def unknown_wrt(self, learner, emit):
    learner.grad(lambda x: x, wrt="params.generator")


def updates_first(self, learner, emit):
    learner.apply_updates()


def half_the_grads(self, learner, emit):
    learner.step.grads = {"w": jnp.zeros(())}
    learner.apply_updates()


def emits_host(self, learner, emit):
    emit(StepEnd())


def unknown_part(self, learner, emit):
    learner.step.x = learner.parameters


def sets_key(self, learner, emit):
    learner.key = jax.random.key(0)


def reshapes(self, learner, emit):
    learner.params = {"w": jnp.zeros(3), "b": jnp.zeros(())}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (
            unassigned,
            "`Bad.step` reads `step.output` before it is assigned.\n"
            "  fix:   assign `learner.step.output` first; so far there is batch",
        ),
        (
            wrong_wrt,
            "`learner.grad(..., wrt='opt_state')` can differentiate with respect to `params` or a part of it.\n"
            '  fix:   write `wrt="params"` or e.g. `wrt="params.generator"`',
        ),
        (
            unknown_wrt,
            "`learner.grad(..., wrt='params.generator')` names no part of `params`, which has b, w.\n"
            '  fix:   write `wrt="params"` or e.g. `wrt="params.b"`',
        ),
        (
            updates_first,
            "`Bad.step` calls `learner.apply_updates()` before `step.grads` exists.\n"
            '  fix:   assign `learner.step.grads = learner.grad(loss, wrt="params")` first',
        ),
        (
            half_the_grads,
            "`step.grads` does not match `params` when the update is applied.\n"
            "  where: ['b'] is missing\n"
            "  fix:   differentiate with respect to the whole of `params`, or put the parts together again",
        ),
        (
            emits_host,
            "`Bad.step` emits StepEnd, which is no traced event.\n"
            "  why:   a step is traced once; host events happen between its calls\n"
            "  fix:   derive `StepEnd` from TracedEvent",
        ),
        (unknown_part, "`Bad.step` reads `learner.parameters`, which a step does not have. Did you mean `params`?"),
        (
            sets_key,
            "`Bad.step` assigns `learner.key`, which a step cannot change.\n"
            "  fix:   assign `learner.step.key` for a value of the step",
        ),
        (
            reshapes,
            "`Bad.step` changes the structure, shape or dtype of `params`: ['w']: float32[] became float32[3].\n"
            "  why:   the carry of a compiled step keeps its structure, shapes and dtypes\n"
            "  fix:   return what came in, e.g. with `.astype(old.dtype)`, or create it right in `init`",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_a_step_may_not_do(step, text):
    assert trace(step) == text


def test_a_model_step_without_a_model():
    class Forwards(AbstractTrainingPhase):
        def step(self, learner, emit):
            learner.forward(learner.params, learner.step.batch)

    with pytest.raises(TraceError) as raised:
        Learner.from_loss(
            {"w": jnp.zeros(())}, None, optax.sgd(1.0), data=[np.zeros(2, np.float32)], phases=(Forwards(),),
            default_callbacks=False,
        )  # fmt: skip
    assert str(raised.value) == (
        "`Forwards` calls `learner.forward`, but this Learner has no model.\n"
        "  why:   `Learner.from_loss` was given a loss function that applies the model itself\n"
        "  fix:   use `Learner(model, loss_fn, ...)`, or call `learner.loss_fn(params, batch, key)` in the step"
    )


def test_a_phase_without_a_step():
    from fluxcb import DeclarationError

    class Idle(AbstractTrainingPhase):
        pass

    with pytest.raises(DeclarationError) as raised:
        testlearner(phases=(Idle(),), validation_batches=0)
    assert str(raised.value) == (
        "`Idle` has no `step(self, learner, emit)`, so nothing can be run in it.\n"
        "  fix:   derive `Idle` from TrainingPhase or ValidationPhase, or write its `step`"
    )


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        (
            (TrainingPhase,),
            f"`phases` contains {TrainingPhase!r}, which is no phase instance.\n  fix:   write `TrainingPhase()`",
        ),
        (
            ("training",),
            "`phases` contains 'training', which is no phase instance.\n  fix:   e.g. `phases=(TrainingPhase(),)`",
        ),
    ],
)
def test_phases_that_are_none(phases, text):
    from fluxcb import DeclarationError

    with pytest.raises(DeclarationError) as raised:
        testlearner(phases=phases, validation_batches=0)
    assert str(raised.value) == text


def test_no_phase_trains():
    from fluxcb import DeclarationError

    learner = testlearner(phases=(ValidationPhase(),), data={"validation": testlearner()._state.data["validation"]})
    assert learner.run_epoch(ValidationPhase()) == 2
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    assert str(raised.value) == ("None of this Learner's phases trains.\n  fix:   give `phases=(TrainingPhase(), ...)`")
