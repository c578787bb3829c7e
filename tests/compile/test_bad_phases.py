"""Invalid phases and steps: complete messages."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner, TraceError
from fluxcb.callbacks import ClipGradients, StopOnNaNLoss
from fluxcb.events import BackwardBegin, BackwardEnd, StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


def trace(step, **kwargs):
    """Return the error that a training phase with this step raises."""
    bad = type("Bad", (AbstractTrainingPhase,), {"step": step})
    with pytest.raises(TraceError) as raised:
        testlearner(phases=(bad(),), validation_batches=0, **kwargs)
    return str(raised.value)


TRANSFORMED = (
    "BackwardBegin is emitted inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did not open.\n"
    "  where: Bad.step\n"
    "  why:   values that handlers write there would leak out of the transformation as tracers\n"
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
def test_emitting_inside_transformation_raises(step):
    assert trace(step) == TRANSFORMED


def assigns_in_grad(self, learner, emit):
    def loss(params):
        learner.step.loss = params["w"] ** 2
        return learner.step.loss

    learner.step.grads = jax.grad(loss)(learner.params)
    learner.apply_updates()


def test_assigning_inside_transformation_raises():
    assert trace(assigns_in_grad) == (
        "`Bad.step` assigns `step.loss` inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did not open.\n"
        "  why:   the value would leak out of the transformation as a tracer\n"
        '  fix:   differentiate with `learner.grad(function, wrt="params")`, or assign its result'
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


def emits_class(self, learner, emit):
    emit(BackwardEnd)


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
            "  fix:   assign `learner.step.output` first; so far, the step has batch",
        ),
        (
            wrong_wrt,
            "`learner.grad(..., wrt='opt_state')` can differentiate only with respect to `params` or a part of it.\n"
            '  fix:   write `wrt="params"` or e.g. `wrt="params.generator"`',
        ),
        (
            unknown_wrt,
            "`learner.grad(..., wrt='params.generator')` does not name a part of `params`, which has b, w.\n"
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
            "  fix:   differentiate with respect to all of `params`, or combine the gradients of the parts",
        ),
        (
            emits_host,
            "`Bad.step` emits StepEnd, which is not a traced event.\n"
            "  why:   a step is traced once, and host events happen between its calls\n"
            "  fix:   derive `StepEnd` from TracedEvent",
        ),
        (
            emits_class,
            "`Bad.step` emits the class `BackwardEnd`, not an instance of it.\n  fix:   write `emit(BackwardEnd())`",
        ),
        (unknown_part, "`Bad.step` reads `learner.parameters`, which a step does not have. Did you mean `params`?"),
        (
            sets_key,
            "`Bad.step` assigns `learner.key`, which a step cannot change.\n"
            "  fix:   assign `learner.step.key` for a value of the step",
        ),
        (
            reshapes,
            "`Bad.step` changes the structure, shape or dtype of `params`: ['w']: expected float32[], got float32[3].\n"
            "  why:   the structure, shapes and dtypes of the carry are fixed when the step is compiled\n"
            "  fix:   keep the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`, or create the "
            "value with the new ones in `init`",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_invalid_step_raises(step, text):
    assert trace(step) == text


def test_model_step_without_model_raises():
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


class Trains(AbstractTrainingPhase):
    provides: ClassVar = {BackwardBegin: ("loss",), BackwardEnd: ("grads",), UpdateEnd: ("updates",)}
    updates = True

    def step(self, learner, emit):
        def loss(params):
            learner.step.loss = (params["w"] - learner.step.batch.mean()) ** 2
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss, wrt="params")
        emit(BackwardEnd())
        if self.updates:
            learner.apply_updates()


class Forgets(Trains):
    provides: ClassVar = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}
    updates = False


def trained_by(phase, *callbacks):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        None,
        optax.sgd(0.5),
        data=[np.ones(2, np.float32)],
        phases=(phase,),
        callbacks=callbacks,
        default_callbacks=False,
    )


def test_training_phase_that_updates_nothing_is_a_warning():
    with pytest.warns(UserWarning, match="trains nothing") as caught:
        learner = trained_by(Forgets())
    assert str(caught[0].message) == (
        "`Forgets.step` changes neither `params` nor `opt_state`, so it trains nothing. Assign the gradients to "
        "`learner.step.grads`, call `emit(BackwardEnd())`, and then `learner.apply_updates()`."
    )
    learner.fit(1)
    assert float(learner.params["w"]) == 0.0
    learner = trained_by(Trains())
    learner.fit(1)
    assert float(learner.params["w"]) == 1.0  # 0 - 0.5 * 2 * (0 - 1)


class OnlyCounts(AbstractTrainingPhase):
    """Trains the state of the model only, as an estimation of batch statistics does."""

    def step(self, learner, emit):
        learner.model_state = {"count": learner.model_state["count"] + 1}


def test_phase_without_gradients_may_train_the_model_state_only():
    learner = Learner.from_loss(
        {"w": jnp.zeros(())},
        None,
        optax.sgd(0.5),
        data=[np.ones(2, np.float32)],
        phases=(OnlyCounts(),),
        model_state={"count": jnp.zeros(())},
        default_callbacks=False,
    )
    learner.fit(3)
    assert learner.model_state["count"] == 3


def assign_grads(learner):
    def loss(params):
        learner.step.loss = (params["w"] - learner.step.batch.mean()) ** 2
        return learner.step.loss

    learner.step.grads = learner.grad(loss)


class NeverEmits(Trains):
    def step(self, learner, emit):
        assign_grads(learner)
        learner.apply_updates()


class Undeclared(NeverEmits):
    provides: ClassVar = {BackwardBegin: ("loss",)}


class EmitsUndeclared(Undeclared):
    def step(self, learner, emit):
        assign_grads(learner)
        emit(BackwardEnd())
        learner.apply_updates()


def test_phase_that_does_not_emit_an_event_of_its_provides_is_a_warning():
    with pytest.warns(UserWarning, match="does not emit") as caught:
        trained_by(NeverEmits(), ClipGradients(1e-3), StopOnNaNLoss())
    assert [str(warning.message) for warning in caught] == [
        "`NeverEmits.step` does not emit BackwardEnd, which `NeverEmits.provides` lists, so fluxcb does not call "
        "ClipGradients(0.001).clip and StopOnNaNLoss().mark. Call `emit(BackwardEnd())` in `step`."
    ]
    trained_by(NeverEmits()).fit(1)  # no handler is left out
    learner = trained_by(Trains(), ClipGradients(1e-3), StopOnNaNLoss())
    learner.fit(1)
    assert float(learner.params["w"]) == pytest.approx(0.0005)


def test_guard_that_cannot_act_in_any_training_phase_is_a_warning():
    with pytest.warns(UserWarning, match="does not call") as caught:
        trained_by(Undeclared(), StopOnNaNLoss())
    assert [str(warning.message) for warning in caught] == [
        "fluxcb does not call StopOnNaNLoss().mark, because Undeclared does not emit BackwardEnd. Call "
        "`emit(BackwardEnd())` in the `step` of Undeclared, and add BackwardEnd to `provides`. Otherwise, a loss that "
        "is NaN or infinite does not end the fit."
    ]
    # Handlers run at an event that the phase emits but does not list, so there is no warning.
    learner = trained_by(EmitsUndeclared(), ClipGradients(1e-3), StopOnNaNLoss())
    learner.fit(1)
    assert float(learner.params["w"]) == pytest.approx(0.0005)


def test_phase_without_step_raises():
    from fluxcb import DeclarationError

    class Idle(AbstractTrainingPhase):
        pass

    with pytest.raises(DeclarationError) as raised:
        testlearner(phases=(Idle(),), validation_batches=0)
    assert str(raised.value) == (
        "`Idle` has no `step(self, learner, emit)`, so it has nothing to run.\n"
        "  fix:   derive `Idle` from TrainingPhase or ValidationPhase, or write its `step`"
    )


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        (
            (TrainingPhase,),
            f"`phases` contains {TrainingPhase!r}, which is not a phase instance.\n  fix:   write `TrainingPhase()`",
        ),
        (
            ("training",),
            "`phases` contains 'training', which is not a phase instance.\n"
            "  fix:   write e.g. `phases=(TrainingPhase(),)`",
        ),
    ],
)
def test_invalid_phases_raise(phases, text):
    from fluxcb import DeclarationError

    with pytest.raises(DeclarationError) as raised:
        testlearner(phases=phases, validation_batches=0)
    assert str(raised.value) == text


def test_fit_without_training_phase_raises():
    from fluxcb import DeclarationError

    learner = testlearner(phases=(ValidationPhase(),), data={"validation": testlearner()._state.data["validation"]})
    assert learner.run_epoch(ValidationPhase()) == 2
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    assert str(raised.value) == ("None of this Learner's phases trains.\n  fix:   pass `phases=(TrainingPhase(), ...)`")
