"""Resuming a run with a different arrangement of training phases raises an error."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner, ResumeError
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints.reading import resolve_checkpoint
from fluxcb.events import BackwardEnd
from fluxcb.phases import AbstractTrainingPhase, InTurn


class A(AbstractTrainingPhase):
    """Append the batch to `w` as a digit, so that `w` records the order of the steps."""

    name = "a"
    provides = {BackwardEnd: ("loss",)}

    def step(self, learner, emit):
        learner.step.loss = learner.params["w"]
        emit(BackwardEnd())
        learner.params = {"w": 10 * learner.params["w"] + learner.step.batch[0]}


class B(A):
    name = "b"


ARRANGEMENTS = {
    "[a, b]": lambda: [A(), B()],
    "[b, a]": lambda: [B(), A()],
    "[a]": lambda: [A()],
    "[InTurn(a, b)]": lambda: [InTurn(A(), B())],
    "[InTurn(b, a)]": lambda: [InTurn(B(), A())],
    "[InTurn(a, b, steps=(1, 2))]": lambda: [InTurn(A(), B(), steps=(1, 2))],
}


def learner_of(phases, *callbacks):
    return Learner.from_loss(
        {"w": jnp.float32(0)},
        None,
        optax.sgd(1.0),
        data={"a": [np.float32([1])] * 2, "b": [np.float32([2])] * 2},
        phases=phases,
        callbacks=callbacks,
        default_callbacks=False,
    )


@pytest.fixture(
    params=[("[a, b]", name) for name in ARRANGEMENTS if name not in ("[a, b]", "[a]")]
    + [
        ("[InTurn(a, b)]", "[a, b]"),
        ("[InTurn(a, b, steps=(1, 2))]", "[InTurn(a, b)]"),
    ],
    ids=" then ".join,
)
def change(request):
    return request.param


def differing(then, now, folder):
    return (
        f"{folder} is a checkpoint of a different run.\n"
        f"  where: phases: {then} became {now}\n"
        "  why:   a run that continued from it would match neither of the two runs\n"
        "  fix:   build the Learner as it was when the run began\n"
        f"     or: load only the parameters: `fluxcb.checkpoints.load_params({str(folder)!r})`"
    )


def test_changed_phases_raise(change, tmp_path, refused):
    then, now = change
    learner_of(ARRANGEMENTS[then](), Checkpointer(tmp_path)).fit(1)
    again = learner_of(ARRANGEMENTS[now](), Checkpointer(tmp_path))
    folder = resolve_checkpoint(tmp_path)[0]
    with refused(ResumeError, differing(then, now, folder)):
        again.restore(folder, allow=("callbacks", "data"))
    with refused(ResumeError, differing(then, now, folder)):
        again.fit(2, resume=True)
    assert again.step == 0
