"""The writers of a path in replayed steps: `learner.replay(..., lineage=...)`."""

import json
import math
from typing import Any

import jax.numpy as jnp
import pytest

from fluxcb import Append, Callback, DeclarationError, Read, Write, in_order, on
from fluxcb.callbacks import Checkpointer, ClipGradients, Metrics
from fluxcb.events import BackwardEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

MARK = 2.0  # the first input of the batch that `DividesByZero` spoils


class DividesByZero(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write(), "batch": Read(), "skip": Append()}}

    @on
    def divide(self, event: BackwardEnd, phase: TrainingPhase, learner):
        is_marked = learner.step.batch[0][0, 0] == MARK
        learner.step.grads = {name: grad / jnp.where(is_marked, 0, 1) for name, grad in learner.step.grads.items()}
        learner.step.skip = is_marked


def batches():
    """Return the batches of `testlearner`, of which the fourth one is marked."""
    data = [(xs.copy(), ys.copy()) for xs, ys in testlearner().data["training"]]
    data[3][0][0, 0] = MARK
    return data


def make(folder):
    return testlearner(
        Metrics(),
        in_order(ClipGradients(1.0), DividesByZero()),
        Checkpointer(folder, steps=6, keep_last=9),
        data=(batches(), None),
        exact_observers=True,
    )


def computed(steps):
    """Return the parameters before each step, and the norm of its gradients, computed in Python."""
    w = b = 0.0
    found = {}
    for step in range(1, steps + 1):
        xs, ys = (part.astype(float).ravel() for part in batches()[(step - 1) % 4])
        errors = w * xs + b - ys
        grads = (2 * errors * xs).mean(), (2 * errors).mean()
        norm = math.hypot(*grads)
        found[step] = (w, b), norm
        if step % 4:  # `DividesByZero` skips the marked batch
            w, b = (value - 0.1 * grad * min(1, 1 / norm) for value, grad in zip((w, b), grads, strict=True))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lineage") / "run"
    make(folder).fit(3)
    return folder


def test_writers_in_order_with_norms_before_and_after(run):
    norms = {step: norm for step, (_, norm) in computed(8).items()}
    replay = make(run).replay(run, steps=(7, 8), lineage="step.grads")
    assert replay.identical
    lineage = replay.lineage
    assert lineage is not None
    assert [(w.step, w.writer, w.event, w.changed, w.finite) for w in lineage.writes] == [
        (7, "TrainingPhase.step", "before BackwardEnd", True, True),
        (7, "ClipGradients.clip", "BackwardEnd", True, True),
        (7, "DividesByZero.divide", "BackwardEnd", False, True),
        (8, "TrainingPhase.step", "before BackwardEnd", True, True),
        (8, "ClipGradients.clip", "BackwardEnd", True, True),
        (8, "DividesByZero.divide", "BackwardEnd", True, False),
    ]
    assert min(norms[7], norms[8]) > 1  # so that both are clipped
    expected = [(None, norms[7]), (norms[7], 1), (1, 1), (None, norms[8]), (norms[8], 1), (1, math.inf)]
    for write, (before, after) in zip(lineage.writes, expected, strict=True):
        assert write.before == (None if before is None else pytest.approx(before, rel=1e-5))
        assert write.after == pytest.approx(after, rel=1e-5)
    assert lineage.first_non_finite == lineage.writes[-1]
    assert json.loads(json.dumps(lineage.to_dicts(), allow_nan=False))[-1]["after"] == "inf"
    assert str(replay).splitlines()[-1] == (
        "The first value that was not finite: step 8, after DividesByZero.divide (BackwardEnd)."
    )


def test_skipped_update_leaves_parameters_unchanged(run):
    states = {step: math.hypot(*params) for step, (params, _) in computed(9).items()}
    lineage = make(run).replay(run, steps=(7, 8), lineage="params").lineage
    assert lineage is not None
    last = {write.step: write for write in lineage.writes}
    assert last[7].before == pytest.approx(states[7], rel=1e-5)
    assert last[7].after == pytest.approx(states[8], rel=1e-5)
    assert states[8] == states[9]
    assert all(write.after == pytest.approx(states[9], rel=1e-5) for write in lineage.writes if write.step == 8)
    assert lineage.first_non_finite is None
    assert str(lineage).splitlines()[-1] == "All values were finite."


def test_unusable_paths_are_refused(run):
    lineage: Any
    for lineage in ("grads", "step", "step..loss", "", 5, "hyperparams.learning_rate"):
        with pytest.raises(DeclarationError) as raised:
            make(run).replay(run, steps=(7, 8), lineage=lineage)
        assert str(raised.value).splitlines()[0] == f"`lineage` of `replay` is a path of state, not {lineage!r}."
    learner = make(run)
    names = list(learner.callbacks)
    with pytest.raises(DeclarationError) as raised:
        learner.replay(run, steps=(7, 8), lineage="step.gradients")
    assert str(raised.value).splitlines()[0] == (
        "`lineage` of `replay` is `step.gradients`, which no training step of this Learner writes."
    )
    assert list(learner.callbacks) == names
    assert learner.callbacks.disabled == ()
