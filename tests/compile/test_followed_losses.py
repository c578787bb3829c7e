"""A handler that writes `step.loss` changes the parameters, or raises an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Read, TraceError, Write, every, on
from fluxcb.events import BackwardBegin, BackwardEnd, ComputeEnd, ForwardBegin, LossBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class Doubles(Callback):
    def stateaccess(self):
        return {"step": {"loss": Write()}}

    @on  # double
    def double(self, event: BackwardBegin, phase, learner):
        learner.step.loss = 2 * learner.step.loss


class Replaces(Callback):
    """Replace the loss with one that does not depend on the parameters."""

    def stateaccess(self):
        return {"step": {"loss": Write()}}

    @on
    def replace(self, event: BackwardBegin, phase, learner):
        learner.step.loss = jnp.float32(7)


def square(params):
    return (params["w"] - 3) ** 2


def phase(step):
    return type("Bad", (AbstractTrainingPhase,), {"step": step, "provides": {BackwardBegin: ("loss",)}})()


def trained(step, *callbacks):
    """Return `w` after one step from w = 0 with learning rate 0.1."""
    learner = testlearner(*callbacks, phases=(phase(step),), validation_batches=0, batches=1)
    learner.fit(1)
    return float(learner.params["w"])


def returns_step_loss(self, learner, emit):
    def loss(params):
        learner.step.loss = square(params)
        emit(BackwardBegin())
        return learner.step.loss

    learner.step.grads = learner.grad(loss)
    learner.apply_updates()


def returns_more_than_it(self, learner, emit):
    def loss(params):
        learner.step.loss = square(params)
        emit(BackwardBegin())
        return jax.lax.cond(learner.step.loss > 0, lambda x: x, lambda x: -x, learner.step.loss) + params["w"]

    learner.step.grads = learner.grad(loss)
    learner.apply_updates()


def emits_in_two_gradients(self, learner, emit):
    def part(name):
        def loss(x):
            learner.step.loss = square({"w": x}) if name == "w" else x**2
            emit(BackwardBegin())
            return learner.step.loss

        return learner.grad(loss, wrt=f"params.{name}")

    learner.step.grads = {"w": part("w"), "b": part("b")}
    learner.apply_updates()


def in_a_gradient_of_a_gradient(self, learner, emit):
    def slope(params):
        def loss(params):
            learner.step.loss = square(params)
            emit(BackwardBegin())
            return learner.step.loss

        return learner.grad(loss)["w"]

    learner.step.grads = learner.grad(slope)
    learner.apply_updates()


@pytest.mark.parametrize(
    ("step", "alone", "doubled"),
    [
        # From w = 0, the gradient of (w - 3)^2 is -6, and of its double -12.
        (returns_step_loss, 0.6, 1.2),
        # One more, by the summand w.
        (returns_more_than_it, 0.5, 1.1),
        (emits_in_two_gradients, 0.6, 1.2),
    ],
)
def test_replaced_loss_changes_gradient(step, alone, doubled):
    assert trained(step) == pytest.approx(alone, rel=1e-6)
    assert trained(step, Doubles()) == pytest.approx(doubled, rel=1e-6)
    assert trained(step, every(Doubles(), steps=1, traced=True)) == pytest.approx(doubled, rel=1e-6)


def test_constant_loss_raises():
    assert trained(returns_more_than_it, Replaces()) == pytest.approx(-0.1, rel=1e-6)  # the summand w
    with pytest.raises(TraceError, match=r"^The loss does not depend on `params`\."):
        trained(returns_step_loss, Replaces())


def returns_its_own(self, learner, emit):
    def loss(params):
        value = square(params)
        learner.step.loss = value
        emit(BackwardBegin())
        return value

    learner.step.grads = learner.grad(loss)
    learner.apply_updates()


def reads_it_and_returns_its_own(self, learner, emit):
    def loss(params):
        value = square(params)
        learner.step.loss = value
        emit(BackwardBegin())
        learner.step.total = learner.step.loss + 1
        return value + params["w"] ** 2

    learner.step.grads = learner.grad(loss)
    learner.apply_updates()


def emits_in_another_gradient(self, learner, emit):
    def first(w):
        learner.step.loss = square({"w": w})
        return learner.step.loss

    def second(b):
        emit(BackwardBegin())
        return b**2

    learner.step.grads = {"w": learner.grad(first, wrt="params.w"), "b": learner.grad(second, wrt="params.b")}
    learner.apply_updates()


@pytest.mark.parametrize("step", [returns_its_own, reads_it_and_returns_its_own, emits_in_another_gradient])
def test_gradient_of_other_value_raises(refused, step):
    with refused(
        TraceError,
        "`Bad.step` takes a gradient that does not depend on the loss that Doubles() has replaced.\n"
        "  where: Bad.step\n"
        "         Doubles.double  <@double>\n"
        "  why:   the value that the handler wrote to `step.loss` at BackwardBegin would be lost\n"
        "  fix:   emit BackwardBegin in the function that is given to `learner.grad`, "
        "and return `learner.step.loss` from it\n"
        "     or: combine several losses into one sum; use `jax.lax.stop_gradient` to keep a loss from changing a part",
    ):
        trained(step, Doubles())
    assert trained(step) == pytest.approx(0.6, rel=1e-6)  # nobody replaces it


def emits_after_its_gradient(self, learner, emit):
    learner.step.grads = jax.grad(square)(learner.params)
    learner.step.loss = square(learner.params)
    emit(BackwardBegin())
    learner.apply_updates()


def emits_before_its_gradient(self, learner, emit):
    learner.step.loss = square(learner.params)
    emit(BackwardBegin())
    learner.step.grads = learner.grad(square)
    learner.apply_updates()


@pytest.mark.parametrize("step", [emits_after_its_gradient, emits_before_its_gradient])
def test_loss_replaced_outside_gradient_raises(refused, step):
    with refused(
        TraceError,
        "`Bad.step` emits BackwardBegin outside of its gradient, and does not use the loss that Doubles() has "
        "replaced.\n"
        "  where: Bad.step\n"
        "         Doubles.double  <@double>\n"
        "  why:   the value that the handler wrote to `step.loss` would be lost\n"
        "  fix:   emit BackwardBegin in the function that is given to `learner.grad`, "
        "and return `learner.step.loss` from it\n"
        "     or: without `learner.grad`: compute the update from `learner.step.loss`, read after BackwardBegin",
    ):
        trained(step, Doubles())
    assert trained(step) == pytest.approx(0.6, rel=1e-6)


def evolves(self, learner, emit):
    """Weight a random direction by its loss: a gradient estimate without a gradient."""
    moved = {**learner.params, "w": learner.params["w"] + 1.0}
    learner.step.loss = square(moved)
    emit(BackwardBegin())
    learner.step.grads = {"w": learner.step.loss, "b": jnp.float32(0)}
    learner.apply_updates()


def test_step_without_gradient_may_use_loss_freely():
    assert trained(evolves) == pytest.approx(-0.4, rel=1e-6)  # (0 + 1 - 3)^2 = 4
    assert trained(evolves, Doubles()) == pytest.approx(-0.8, rel=1e-6)


def test_second_derivatives():
    assert trained(in_a_gradient_of_a_gradient) == pytest.approx(-0.2, rel=1e-6)  # the slope of 2 (w - 3) is 2
    assert trained(in_a_gradient_of_a_gradient, Doubles()) == pytest.approx(-0.4, rel=1e-6)


class Twice(Callback):
    """Ignore the current loss and assign another one."""

    def stateaccess(self):
        return {"step": {"loss": Write()}, "params": Read()}

    def runafter(self):
        return (Doubles,)

    @on
    def twice(self, event: BackwardBegin, phase, learner):
        learner.step.loss = 2 * square(learner.params)


def test_handler_may_overwrite_earlier_loss():
    assert trained(returns_step_loss, Twice(), Doubles()) == pytest.approx(1.2, rel=1e-6)


class Measures(ValidationPhase):
    """A validation phase that emits BackwardBegin without computing a gradient."""

    provides = {ForwardBegin: ("xs", "ys"), LossBegin: ("outputs",), BackwardBegin: ("loss",), ComputeEnd: ()}

    def step(self, learner, emit):
        super().step(learner, emit)
        emit(BackwardBegin())


class Keeps(Callback):
    def __init__(self):
        self.kept = []

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def keep(self, event: StepEnd, phase: ValidationPhase, learner):
        self.kept.append(float(learner.step.loss))


def test_validation_shows_replaced_loss():
    plain, doubled = Keeps(), Keeps()
    testlearner(plain, phases=(TrainingPhase(), ValidationPhase())).run_epoch(ValidationPhase())
    testlearner(doubled, Doubles(), phases=(TrainingPhase(), Measures())).run_epoch(Measures())
    assert len(plain.kept) == 2
    np.testing.assert_allclose(doubled.kept, 2 * np.array(plain.kept), rtol=1e-6)


# -- inputs --------------------------------------------------------------------------------------


class Zeros(Callback):
    """Replace an input of the step by zeros, at ForwardBegin."""

    def __init__(self, name):
        self.name = name

    def stateaccess(self):
        return {"step": {self.name: Write()}}

    @on
    def clear(self, event: ForwardBegin, phase: AbstractTrainingPhase, learner):
        learner.step[self.name] = jax.tree.map(jnp.zeros_like, learner.step[self.name])

    def __repr__(self):
        return f"Zeros({self.name!r})"


class ReadsBeforeEvent(TrainingPhase):
    def step(self, learner, emit):
        learner.step.xs, learner.step.ys = xs, ys = learner.split(learner.step.batch)
        emit(ForwardBegin())

        def loss(params):
            learner.step.outputs = learner.forward(params, xs)
            emit(LossBegin())
            learner.step.loss = learner.loss_fn(learner.step.outputs, ys)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


def slope(phase, *callbacks):
    """Return `w` after one step from w = b = 0. The inputs are the only factor of its gradient that differs."""
    learner = testlearner(*callbacks, phases=(phase,), validation_batches=0, batches=1)
    learner.fit(1)
    return float(learner.params["w"])


@pytest.mark.parametrize(
    ("phase", "name", "advice"),
    [
        (TrainingPhase(), "batch", "Write `step.xs` instead."),
        (ReadsBeforeEvent(), "xs", "Read `learner.step.xs` after ForwardBegin."),
    ],
)
def test_input_that_phase_does_not_read_again_is_a_warning(phase, name, advice):
    with pytest.warns(UserWarning, match="replaces") as caught:
        unchanged = slope(phase, Zeros(name))
    assert [str(warning.message) for warning in caught] == [
        f"Zeros({name!r}) replaces `step.{name}` at ForwardBegin, but `{type(phase).__name__}.step` does not read it "
        f"after this event, so the model gets the old value. {advice}"
    ]
    assert unchanged == slope(phase) != 0


def test_input_that_phase_reads_again_is_used():
    assert slope(TrainingPhase(), Zeros("xs")) == 0
    xs, ys = np.ones((4, 1), np.float32), np.ones(4, np.float32)

    def loss_fn(params, batch):
        return jnp.mean((params["w"] * batch[0][:, 0] - batch[1]) ** 2)

    def trained_from_loss(*callbacks):
        learner = fluxcb.Learner.from_loss(
            {"w": jnp.zeros(())}, loss_fn, optax.sgd(0.5), data=[(xs, ys)], callbacks=callbacks
        )
        learner.fit(1)
        return float(learner.params["w"])

    assert trained_from_loss(Zeros("batch")) == 0  # d/dw mean((0 w - 0)^2)
    assert trained_from_loss() == 1  # 0 - 0.5 * -2
