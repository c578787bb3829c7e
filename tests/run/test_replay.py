"""`learner.replay` and `fluxcb replay`."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, CheckpointError, DeclarationError, Read, ResumeError, Write, on
from fluxcb._tools.cli import main
from fluxcb.callbacks import (
    Checkpointer,
    ClipGradients,
    EarlyStopping,
    Metrics,
    MetricsPrinter,
    ProcessArrays,
    StopOnNaNLoss,
    Traces,
)
from fluxcb.events import BackwardEnd, StepEnd, Trigger
from fluxcb.phases import TrainingPhase
from fluxcb.stopping import NumberLimit
from fluxcb.testing import testlearner

MODULE = """
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.testing import testlearner

def make_learner():
    return testlearner(Metrics(), Checkpointer("run", steps=6, keep_last=9), exact_observers=True)
"""


def make(folder, *callbacks, period="steps", **kwargs):
    saver = Checkpointer(folder, **({"steps": 6} if period == "steps" else {"epochs": 2}), keep_last=99)
    return testlearner(Metrics(), StopOnNaNLoss(), saver, *callbacks, exact_observers=True, **kwargs)


def appending(values):
    """Return a callback that appends the gradient of `w` before each step."""
    return ProcessArrays("step.grads", lambda grads: values.append(float(grads["w"])))


def recorded(folder, *callbacks, **kwargs):
    """Train six epochs of four steps, and return the loss of each step and the gradients of `w` before it."""
    gradients = []
    history = make(folder, appending(gradients), *callbacks, **kwargs).fit(6)
    return dict(history.per_step["training"]["loss"]), dict(enumerate(gradients, 1))


class CountsOnDevice(Callback):
    def stateaccess(self):
        return {"step": {"grads": Read()}, "cbstate": {"norms": Write()}}

    def init(self, learner):
        if "norms" not in learner.cbstate:
            learner.cbstate.norms = jnp.zeros(())

    @on
    def add(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.cbstate.norms += jnp.abs(learner.step.grads["w"])

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner):
        self.total = float(learner.cbstate.norms)


# -- replays -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "steps", "compared"),
    [("steps", (8, 11), "12"), ("epochs", (14, 15), "16"), ("steps", (1, 1), "6"), ("epochs", (20, 24), "24")],
)
def test_replay_is_identical_and_observers_see_the_recorded_steps(tmp_path, period, steps, compared):
    # The callback that records the gradients is part of the run, and is silent in the replay.
    losses, gradients = recorded(tmp_path / "run", period=period)
    before = sorted((tmp_path / "run").rglob("*"))
    seen, silent = [], []
    counts = CountsOnDevice()
    learner = make(tmp_path / "run", appending(silent), period=period)
    replay = learner.replay(tmp_path / "run", steps=steps, callbacks=[appending(seen), counts])
    numbers = range(steps[0], steps[1] + 1)
    assert replay.identical
    assert replay.compared == tmp_path / "run" / compared
    assert replay.losses == tuple((step, losses[step]) for step in numbers)
    assert seen == [gradients[step] for step in numbers]
    np.testing.assert_allclose(counts.total, sum(abs(gradients[step]) for step in numbers), rtol=1e-5)
    assert silent == []
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert len(learner.callbacks) == 4
    assert learner.callbacks.disabled == ()
    assert str(replay) == (
        f"Replayed steps {steps[0]} to {steps[1]} from the checkpoint {replay.began}.\n"
        f"The losses and the state at {replay.compared} are the same, bit for bit."
    )


def test_observers_with_step_values_of_their_own(tmp_path):
    recorded(tmp_path / "run")
    traces = Traces({"square": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}})
    learner = make(tmp_path / "run", appending([]))
    assert learner.replay(tmp_path / "run", steps=(7, 8), callbacks=[traces]).identical


def test_steps_after_the_last_checkpoint_are_not_compared(tmp_path):
    losses, _ = recorded(tmp_path / "run")
    for path in (tmp_path / "run").glob("24*"):
        shutil.rmtree(path)
    learner = make(tmp_path / "run", appending([]))
    replay = learner.replay(tmp_path / "run", steps=(21, 22))
    assert (replay.identical, replay.compared) == (None, None)
    assert replay.losses == ((21, losses[21]), (22, losses[22]))
    assert learner.step == 22
    assert ("Nothing was compared: the newest checkpoint is of step 18. The run may have ended before step 22.") in str(
        replay
    )


def test_replay_from_the_beginning_needs_a_new_learner(tmp_path):
    make(tmp_path / "run").fit(6)
    for path in ("0", "6"):
        shutil.rmtree(tmp_path / "run" / path)
    learner = make(tmp_path / "run")
    assert learner.replay(tmp_path / "run", steps=(2, 3)).began is None
    assert learner.step == 12
    with pytest.raises(CheckpointError) as raised:
        learner.replay(tmp_path / "run", steps=(2, 3))
    assert str(raised.value).splitlines()[0] == f"There is no checkpoint before step 2 in {tmp_path / 'run'}."


def test_changed_data_is_reported(tmp_path):
    make(tmp_path / "run").fit(4)
    data = list(testlearner().data["training"])
    data[1] = (data[1][0], data[1][1] + 1)  # steps 2, 6, 10
    learner = make(tmp_path / "run", data=(data, list(testlearner().data["validation"])))
    replay = learner.replay(tmp_path / "run", steps=(9, 10))
    assert replay.identical is False
    assert replay.differences[0].startswith("training/loss of step 10 was ")
    assert any(line.startswith("params.w differs by up to ") for line in replay.differences)
    assert str(replay).splitlines()[1] == f"{len(replay.differences)} differences from {tmp_path / 'run' / '12'}:"


# -- errors ------------------------------------------------------------------------------------


def refused(error, folder, *callbacks, steps=(7, 8), learner=None):
    learner = learner or make(folder)
    with pytest.raises(error) as raised:
        learner.replay(folder, steps=steps, callbacks=callbacks)
    assert learner.step == 0
    assert learner.callbacks.disabled == ()
    return str(raised.value)


def test_observers_that_write_are_refused_before_anything_runs(tmp_path):
    class Overwrites(Callback):
        def stateaccess(self):
            return {"cbstate": {"metrics_epoch": Write()}}

        @on
        def write(self, event: Trigger, phase: TrainingPhase, learner):
            learner.cbstate.metrics_epoch = None

    make(tmp_path).fit(2)
    message = refused(DeclarationError, tmp_path, MetricsPrinter(), ClipGradients(1.0))
    assert message.splitlines()[0] == "ClipGradients(1.0) cannot observe a replay, because it may write `step.grads`."
    assert message.endswith("  fix:   declare `Read()` for `step.grads`\n     or: leave the callback out of `replay`")
    assert "may write `cbstate.metrics_epoch`" in refused(DeclarationError, tmp_path, Overwrites())
    assert "may write `step.skip`" in refused(DeclarationError, tmp_path, StopOnNaNLoss())


def test_bad_steps_and_runs_raise(tmp_path):
    make(tmp_path / "run").fit(2)
    for steps in ((8, 7), (0, 3), 5, (1.0, 2), "12"):
        message = refused(DeclarationError, tmp_path / "run", steps=steps)
        assert message.splitlines()[0] == (
            f"`steps` of `replay` is a pair of step numbers (first, last), not {steps!r}."
        )
    assert f"There is no checkpoint in {tmp_path / 'none'}, so there is no run to replay." in refused(
        CheckpointError, tmp_path / "none"
    )
    other = testlearner(Metrics(), Checkpointer(tmp_path / "run"))
    assert "is a checkpoint of a different run" in refused(ResumeError, tmp_path / "run", learner=other)


def test_steps_after_the_end_of_a_stopped_run_raise(tmp_path):
    make(tmp_path, EarlyStopping(NumberLimit(2))).fit(6)
    message = refused(CheckpointError, tmp_path, steps=(7, 9), learner=make(tmp_path, EarlyStopping(NumberLimit(2))))
    assert message == (
        f"The run in {tmp_path} has no step 9, because it ended at step 8.\n"
        "  why:   it was stopped: validation/loss: 2 epochs with a value (limit 2)\n"
        "  fix:   replay earlier steps, e.g. `steps=(7, 8)`"
    )
    assert make(tmp_path, EarlyStopping(NumberLimit(2))).replay(tmp_path, steps=(7, 8)).identical


def test_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "replayed_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import replayed_module  # pyright: ignore[reportMissingImports]  # written above

    replayed_module.make_learner().fit(3)
    arguments = ["replay", "run", "--steps", "7:8", "--learner", "replayed_module:make_learner"]
    assert main([*arguments, "--watch", "step.grads", "params", "--save", "out"]) == 0
    out = capsys.readouterr().out
    assert "are the same, bit for bit." in out
    assert out.endswith("The values are in out.\n")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "arrays-00000007.npz",
        "arrays-00000008.npz",
    ]
    assert sorted(np.load(tmp_path / "out" / "arrays-00000007.npz")) == [
        "params.b",
        "params.w",
        "step.grads.b",
        "step.grads.w",
    ]
    assert main([*arguments, "--lineage", "step.grads"]) == 0
    assert "Writes to `step.grads`, with the norms before and after each:" in capsys.readouterr().out
    assert main([*arguments, "--watch", "params"]) == 0
    assert capsys.readouterr().out.count("params") >= 2
    assert main([*arguments, "--save", "out"]) == 2
    assert "`--save` has no values to write." in capsys.readouterr().err
