"""Custom phases: two networks, additional events, other gradients, and built-in callbacks with them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, Learner, Read, Write, inject, on
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
    """Keep the values of every step."""

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


def test_gan_matches_hand_written_loop():
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


def test_gan_generates_points_near_data():
    learner = gan()
    learner.fit(30)
    assert float(learner.params["g"]["shift"]) == pytest.approx(2, abs=0.5)


def test_built_in_callbacks_work_with_gan():
    clip, ema, log = ClipGradients(0.01), ParameterEMA(0.5, validate=False), EventLog()
    learner = gan(Metrics(), Recorder(), clip, ema, log)
    learner.fit(1)
    rest = ["EpochEnd", "Trigger", "FitStopping", "FitEnd"]
    assert log.names() == ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * 10, *rest]
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


def test_custom_traced_event():
    keeps = Keeps("noise", "heard")
    learner = testlearner(HearsNoise(), keeps, phases=(EmitsItsOwn(), ValidationPhase()))
    learner.fit(1)
    assert len(keeps.kept) == 4
    for kept in keeps.kept:
        np.testing.assert_allclose(kept["heard"], 3 * kept["noise"], rtol=1e-6)


class Alternating(TrainingPhase):
    """A phase with a value; two equal phases share a program."""

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


def test_equal_phases_share_program():
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
    """Train only `w`, by differentiating with respect to a part."""

    def step(self, learner, emit):
        def loss(w):
            outputs = learner.forward({**learner.params, "w": w}, learner.step.batch[0])
            learner.step.loss = learner.loss_fn(outputs, learner.step.batch[1])
            return learner.step.loss

        learner.step.grads = {"w": learner.grad(loss, wrt="params.w"), "b": jnp.zeros(())}
        learner.apply_updates()


def test_training_part_of_parameters():
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


def test_handler_of_custom_host_event_changes_parameters():
    learner = testlearner(Reacts())
    learner.fit(1)
    assert float(learner.params["w"]) != 0
    learner.emit(Resets(), TrainingPhase())
    assert jax.tree.map(float, learner.params) == {"w": 0.0, "b": 0.0}
    learner.fit(1)
