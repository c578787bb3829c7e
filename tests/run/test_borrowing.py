"""`learner.borrow`, and the cost of `learner.run_step` in hand-written loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Callback, DeclarationError, Learner, on
from fluxcb.callbacks import CustomCallback
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

PHASE = TrainingPhase()
BATCH = np.ones(2, np.float32)


def learner(*callbacks, params=None, program=None):
    start = {"q": {"w": jnp.zeros(3), "b": jnp.zeros(2)}, "large": jnp.zeros(2000)} if params is None else params

    def loss(params, batch, key):
        return jnp.mean(batch) * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    return Learner.from_loss(
        start,
        loss,
        optax.trace(0.5),
        callbacks=callbacks,
        example_batch=BATCH,
        default_callbacks=False,
        program=program,
    )


@pytest.mark.parametrize("program", ["loop", "straight"])
def test_borrowed_arrays_are_valid_until_next_step(program):
    made = learner(program=program)
    made.run_step(PHASE, BATCH)
    for path in ("params", "opt_state"):
        borrowed = made.borrow(path)
        copies = jax.tree.leaves(jax.tree.map(np.asarray, getattr(made, path) if path == "params" else borrowed))
        for array, copy in zip(jax.tree.leaves(borrowed), copies, strict=True):
            np.testing.assert_array_equal(array, copy)
    kept = made.borrow("params")["q"]["w"]
    made.run_step(PHASE, BATCH)
    # JAX finds this in Python, or later in the runtime.
    with pytest.raises((RuntimeError, ValueError), match="has been deleted"):
        _ = kept + 1
    np.testing.assert_array_equal(made.borrow("params.q.w"), 1 + 1.5)
    np.testing.assert_array_equal(made.params["large"], np.full(2000, 2.5, np.float32))


def test_borrowed_container_is_copy():
    made = learner()
    made.borrow("params")["q"]["w"] = "gone"
    made.run_step(PHASE, BATCH)
    np.testing.assert_array_equal(made.params["q"]["w"], np.ones(3, np.float32))


def test_view_of_borrowed_array_keeps_values():
    made = learner()
    made.run_step(PHASE, BATCH)
    view = np.asarray(made.borrow("params.large"))
    made.run_step(PHASE, BATCH)
    np.testing.assert_array_equal(view, np.ones(2000, np.float32))
    np.testing.assert_array_equal(made.params["large"], np.full(2000, 2.5, np.float32))


WRITE = '  fix:   write e.g. `learner.borrow("params")`'


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "parms",
            "`learner.borrow` takes the path of a part of the train state, not 'parms'. Did you mean `params`?\n"
            f"  why:   the train state has params, model_state, opt_state\n{WRITE}",
        ),
        (
            None,
            "`learner.borrow` takes the path of a part of the train state, not None.\n"
            f"  why:   the train state has params, model_state, opt_state\n{WRITE}",
        ),
        (
            "params.lage",
            "`learner.borrow('params.lage')` does not name a part of `params`. Did you mean `large`?\n"
            '  why:   `params` has large, q\n  fix:   write `learner.borrow("params")`',
        ),
    ],
)
def test_unknown_path_raises(path, text, refused):
    with refused(DeclarationError, text):
        learner().borrow(path)


def test_borrowing_in_step_handler_raises(refused):
    box = []
    box.append(learner(CustomCallback(lambda seen: box[0].borrow("params"), StepEnd)))
    with refused(
        DeclarationError,
        "A step's handler reads `learner.borrow('params')` from the Learner itself, not from its argument `learner`.\n"
        "  why:   the device runs ahead of the handlers, so the train state is not that of the handler's step\n"
        "  fix:   declare it in `stateaccess`, and read it from the handler's argument",
    ):
        box[0].run_step(PHASE, BATCH)


# --- the cost of a step -----------------------------------------------------------------------------------------------


class Counts(Callback):
    """A host handler that reads no value from the device."""

    steps = 0

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        self.steps = learner.progress.step


def test_run_step_looks_up_program_once(monkeypatch):
    counts = Counts()
    made = learner(counts)
    made.run_step(PHASE, BATCH)
    programs, looked_up = made._core.engine.programs, []
    find = programs.step_program
    monkeypatch.setattr(programs, "step_program", lambda *args, **kwargs: looked_up.append(1) or find(*args, **kwargs))
    for _ in range(3):
        made.run_step(PHASE, BATCH)
    assert looked_up == []
    made.run_step(PHASE, np.ones(5, np.float32))
    assert looked_up == [1]
    assert (counts.steps, made.step) == (5, 5)


def test_run_step_does_not_wait_for_device(monkeypatch):
    waits = []
    made = learner(Counts())
    made.run_step(PHASE, BATCH)
    monkeypatch.setattr("fluxcb._run.window.Window.wait", lambda window: waits.append(1))
    reads = made._state.meter.reads
    made.run_step(PHASE, BATCH)
    made.borrow("params")
    assert waits == []
    assert made._state.meter.reads == reads
