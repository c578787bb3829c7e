"""The number of steps and epochs of a fit after a restore within an epoch, a pause, a resume and a rewind."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, PauseFitting, RewindFitting, on
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import ResumeWarning
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import Phase, TrainingPhase

EPOCH = 5
"""Training batches."""


class Count(Callback):
    """Record the training steps, and the phase and number of each finished epoch."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[tuple[str, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {}  # a resumed run records from its start

    @on(StepEnd, TrainingPhase)
    def step(self, event, phase, learner):
        self.steps.append(learner.progress.step)

    @on(EpochEnd, Phase)
    def epoch(self, event, phase, learner):
        self.epochs.append((type(phase).name, learner.progress.epoch))


class Once(Callback):
    """Raise once, at the end of a training step."""

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self.error = step, error
        self.raised = False

    def stateaccess(self) -> dict[str, Any]:
        return {"control": Append()}

    @on(StepEnd, TrainingPhase)
    def look(self, event, phase, learner):
        if learner.progress.step == self.step and not self.raised:
            self.raised = True
            raise self.error


def made(folder: Path, *callbacks: Callback, **options: Any) -> fluxcb.Learner:
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1),
        data=([jnp.full(2, float(i)) for i in range(EPOCH)], [jnp.zeros(1)]),
        callbacks=[Count(), *callbacks, Checkpointer(folder, steps=1, keep_last=100)],
        default_callbacks=False,
        **options,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a run of two epochs with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("trained")
    made(folder).fit(2)
    return folder


def restored(trained: Path, tmp_path: Path, step: int, *callbacks: Callback, **options: Any) -> fluxcb.Learner:
    shutil.copytree(trained, tmp_path / "again")
    learner = made(tmp_path / "again", *callbacks, **options)
    learner.restore(tmp_path / "again" / str(step), allow=("callbacks",))
    return learner


@pytest.mark.parametrize("options", [{}, {"steps_per_call": 4}], ids=["auto", "windows"])
@pytest.mark.parametrize("steps", [1, 2, 3, 12])
@pytest.mark.parametrize("at", [3, 5, 7])
def test_steps_count_from_restored_step(trained, tmp_path, at, steps, options):
    learner = restored(trained, tmp_path, at, **options)
    learner.fit(steps=steps)
    assert learner.callbacks.get(Count).steps == list(range(at + 1, at + steps + 1))
    assert learner.step == at + steps


@pytest.mark.parametrize("at", [3, 7])
def test_epoch_length_counts_from_first_step_of_epoch(trained, tmp_path, at):
    learner = restored(trained, tmp_path, at)
    learner.fit(steps=6, steps_per_epoch=4)
    assert learner.step == at + 6
    began = at - at % EPOCH  # first step of the restored epoch, of which `at % EPOCH` steps are done
    first, epoch = began + 4, at // EPOCH + 1
    whole = [("training", epoch + i) for i in range(1 + -(-(at + 6 - first) // 4))]
    assert [e for e in learner.callbacks.get(Count).epochs if e[0] == "training"] == whole


@pytest.mark.parametrize(("at", "ends"), [(3, 10), (5, 10), (7, 15)])
def test_rest_of_restored_epoch_counts_as_first_epoch(trained, tmp_path, at, ends):
    """Step 5 is the last step of its epoch, but the checkpoint was written before the epoch ended."""
    learner = restored(trained, tmp_path, at)
    learner.fit(2)
    assert learner.step == ends
    first = (at - 1) // EPOCH + 1
    epochs = [(name, epoch) for epoch in (first, first + 1) for name in ("training", "validation")]
    assert learner.callbacks.get(Count).epochs == epochs


def test_steps_count_from_pause(tmp_path):
    learner = made(tmp_path, Once(3, PauseFitting("now")))
    learner.fit(2)
    assert (learner.step, learner.stop_reason) == (3, "now")
    learner.fit(steps=7)
    assert learner.step == 10
    assert learner.callbacks.get(Count).steps == list(range(1, 11))


@pytest.mark.parametrize("rest", [5, 12])
def test_resumed_fit_counts_from_its_start(trained, tmp_path, rest):
    """The fit started at step 7, within an epoch, and was paused after two steps."""
    paused = restored(trained, tmp_path, 7, Once(9, PauseFitting("now")))
    paused.fit(steps=rest)
    assert paused.step == 9
    resumed = made(tmp_path / "again", Once(9, PauseFitting("now")))
    resumed.callbacks.get(Once).raised = True
    resumed.fit(steps=rest, resume=True)
    assert resumed.step == 7 + rest
    assert resumed.callbacks.get(Count).steps == list(range(10, 7 + rest + 1))


@pytest.mark.parametrize("before", [8, 7, 6, 4], ids=lambda step: f"to {step}")
def test_rewound_fit_ends_at_original_end(trained, tmp_path, before):
    """The fit starts at step 7 and rewinds at step 9, also to steps before its start and in the previous epoch."""
    learner = restored(trained, tmp_path, 7, Once(9, RewindFitting("astray", before, 1)))
    with pytest.warns(ResumeWarning, match=rf"goes back from step 9 to the checkpoint .*/{before}(\.1)?: astray"):
        learner.fit(steps=6)
    assert learner.step == 13
    assert learner.callbacks.get(Count).steps == [8, 9, *range(before + 1, 14)]
