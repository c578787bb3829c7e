"""`learner.cbstate` in the step of a phase: target networks, and entries that the step updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, DeclarationError, Learner, MissingStateError, Read, TraceError, Write, every, on
from fluxcb.callbacks import Checkpointer, RunFunction
from fluxcb.events import BackwardBegin, BackwardEnd, ComputeEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase

RATE, DISCOUNT = 0.1, 0.9


def temporal_difference(params, target, batch):
    now, reward, then = batch
    wanted = reward + DISCOUNT * (target["w"] @ then + target["b"])
    return jnp.mean((params["w"] @ now + params["b"] - jax.lax.stop_gradient(wanted)) ** 2)


class Bootstrap(AbstractTrainingPhase):
    """One step of temporal-difference learning with a target network."""

    provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}
    uses = ("cbstate.target",)

    def step(self, learner, emit):
        def loss(params):
            learner.step.loss = temporal_difference(params, learner.cbstate.target, learner.step.batch)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


def update_target(learner):
    learner.cbstate.target = learner.params


def targets():
    access = {"params": Read(), "cbstate": {"target": Write()}}
    return RunFunction(update_target, run_before=False, init=update_target, access=access, name="target")


def batches(count=7):
    rng = np.random.default_rng(0)
    return [tuple(rng.normal(size=shape).astype(np.float32) for shape in ((3, 8), (8,), (3, 8))) for _ in range(count)]


def learner_of(*callbacks, phases=None, **kwargs):
    return Learner.from_loss(
        {"w": jnp.float32([0.1, 0.2, 0.3]), "b": jnp.float32(0)},
        None,
        optax.sgd(RATE),
        data=batches(),
        phases=phases or (Bootstrap(),),
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def by_hand(epochs, every_steps):
    params = target = {"w": jnp.float32([0.1, 0.2, 0.3]), "b": jnp.float32(0)}
    slopes = jax.jit(jax.grad(temporal_difference))
    for step, batch in enumerate(batches() * epochs, 1):
        params = jax.tree.map(lambda p, g: p - RATE * g, params, slopes(params, target, batch))
        if step % every_steps == 0:
            target = params
    return params, target


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_target_network_matches_hand_written_loop(steps_per_call):
    learner = learner_of(every(targets(), steps=3), steps_per_call=steps_per_call)
    learner.fit(3)
    params, target = by_hand(3, 3)
    close(learner.params, params)
    close(learner.cbstate.target, target)
    without = learner_of(every(targets(), steps=1000))
    without.fit(3)
    assert float(abs(without.params["w"] - learner.params["w"]).max()) > 1e-3
    assert learner.compile_counts["traces"] == 1


def test_run_with_target_network_resumes_exactly(tmp_path):
    def build():
        return learner_of(every(targets(), steps=3), Checkpointer(tmp_path))

    first = build()
    first.fit(2)
    again = build()
    again.fit(4, resume=True)
    whole = learner_of(every(targets(), steps=3))
    whole.fit(4)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again.params, whole.params))
    close(whole.cbstate.target, by_hand(4, 3)[1])


class Averaging(Bootstrap):
    """Update the target network in the step, by an exponential moving average."""

    def step(self, learner, emit):
        super().step(learner, emit)
        mixed = jax.tree.map(lambda t, p: 0.5 * t + 0.5 * p, learner.cbstate["target"], learner.params)
        learner.cbstate["target"] = mixed


def test_step_assigns_entry():
    learner = learner_of(targets_at_init(), phases=(Averaging(),))
    learner.fit(2)
    params = target = {"w": jnp.float32([0.1, 0.2, 0.3]), "b": jnp.float32(0)}
    for batch in batches() * 2:
        slopes = jax.grad(temporal_difference)(params, target, batch)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, slopes)
        target = jax.tree.map(lambda t, p: 0.5 * t + 0.5 * p, target, params)
    close(learner.params, params)
    close(learner.cbstate.target, target)


def targets_at_init():
    access = {"params": Read(), "cbstate": {"target": Write()}}
    return RunFunction(lambda learner: None, run_as_trigger=False, init=update_target, access=access, name="target")


class Sees(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"cbstate": {"target": Read()}}

    @on
    def look(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.seen.append(float(learner.cbstate.target["b"]))


def test_host_handlers_read_entry_of_their_step():
    sees = Sees()
    learner_of(targets_at_init(), sees, phases=(Averaging(),), steps_per_call=4).fit(1)
    one = Sees()
    learner_of(targets_at_init(), one, phases=(Averaging(),), steps_per_call=1).fit(1)
    assert sees.seen == one.seen
    assert len(set(sees.seen)) == 7


# -- errors ------------------------------------------------------------------------------------


class Undeclared(Bootstrap):
    uses = ()


def test_undeclared_entry_raises(refused):
    with refused(
        TraceError,
        "`Undeclared.step` uses `cbstate.target`, which is not in the carry.\n"
        "  why:   a step has only the entries of `cbstate` that its phase or a traced handler declares\n"
        '  fix:   write `uses = ("cbstate.target",)` in `Undeclared`, and pass the phase in `phases=`',
    ):
        learner_of(targets(), phases=(Undeclared(),))


def test_uncreated_entry_raises(refused):
    with refused(
        MissingStateError,
        "`Bootstrap` uses `cbstate.target`, which no callback's `init` creates.\n"
        f"  where: {__name__}.Bootstrap.uses\n"
        "  why:   the compiled step takes the entry as arrays, from its first call on\n"
        "  fix:   assign `learner.cbstate.target` in the `init` of a callback that declares to write it",
    ):
        learner_of()


class Creates(Callback):
    def __init__(self, value):
        self.value = value

    def stateaccess(self):
        return {"cbstate": {"target": Write()}}

    def init(self, learner):
        learner.cbstate.target = self.value


def test_entry_without_arrays_raises(refused):
    with refused(
        MissingStateError,
        "`Bootstrap` uses `cbstate.target`, which is not made of JAX arrays.\n"
        f"  where: {__name__}.Bootstrap.uses\n"
        "  why:   the compiled step takes the entry as arrays, from its first call on\n"
        "  fix:   create it as arrays: `learner.cbstate.target = jnp.zeros(...)`",
    ):
        learner_of(Creates([1, 2]))


class Misshapen(Bootstrap):
    def step(self, learner, emit):
        super().step(learner, emit)
        learner.cbstate.target = {**learner.cbstate.target, "b": jnp.zeros(2)}


def test_assignment_with_other_shape_raises(refused):
    with refused(
        TraceError,
        "`Misshapen.step` changes the structure, shape or dtype of `cbstate.target`: "
        "['b']: expected float32[], got float32[2].\n"
        "  why:   the structure, shapes and dtypes of the carry are fixed when the step is compiled\n"
        "  fix:   keep the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`, or create the value "
        "with the new ones in `init`",
    ):
        learner_of(targets(), phases=(Misshapen(),))


class Leaking(Bootstrap):
    def step(self, learner, emit):
        def leak(w):
            learner.cbstate.target = {**learner.cbstate.target, "w": w}
            return w.sum()

        jax.grad(leak)(learner.params["w"])


def test_assignment_inside_transformation_raises(refused):
    with refused(
        TraceError,
        "`Leaking.step` assigns `cbstate.target` inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did "
        "not open.\n"
        "  why:   the value would leak out of the transformation as a tracer\n"
        '  fix:   differentiate with `learner.grad(function, wrt="params")`, or assign its result',
    ):
        learner_of(targets(), phases=(Leaking(),))


@pytest.mark.parametrize("uses", ["cbstate.target", ("target",), ("cbstate.",), ("cbstate.a.b",), (1,)])
def test_invalid_uses_raises(uses, refused):
    with refused(
        DeclarationError,
        f"`Wrong.uses` must be a tuple of entries of `cbstate`, not {uses!r}.\n"
        f"  where: {__name__}.test_invalid_uses_raises.<locals>.Wrong\n"
        '  fix:   write e.g. `uses = ("cbstate.target",)`',
    ):
        type("Wrong", (Bootstrap,), {"uses": uses, "__qualname__": "test_invalid_uses_raises.<locals>.Wrong"})


class Scoring(AbstractValidationPhase):
    """Count the steps of the phase in an entry."""

    provides = {ComputeEnd: ("loss",)}
    uses = ("cbstate.target", "cbstate.count")

    def step(self, learner, emit):
        learner.step.loss = temporal_difference(learner.params, learner.cbstate.target, learner.step.batch)
        learner.cbstate.count += 1


class Counts(Callback):
    def stateaccess(self):
        return {"cbstate": {"count": Write()}}

    def init(self, learner):
        learner.cbstate.count = jnp.zeros((), jnp.int32)


def test_non_training_phase_updates_entry():
    learner = learner_of(targets(), Counts(), phases=(Bootstrap(), Scoring()))
    learner.data = {"validation": batches(2)}
    learner.fit(3)
    assert int(learner.cbstate.count) == 6
