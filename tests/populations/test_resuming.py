"""A population that was killed continues where it would have been, bit for bit."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import jax
import numpy as np
import pytest

from fluxcb import CheckpointError, Population
from fluxcb.callbacks import Checkpointer, Metrics, StopOnNaNLoss
from fluxcb.populations import PopulationBasedTraining, SuccessiveHalving
from fluxcb.testing import testlearner

RATES = [0.001, 0.01, 0.1, 0.03]

PROGRAM = """
import os, signal, sys
import fluxcb
from fluxcb import Callback, Population, on
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.populations import PopulationBasedTraining, SuccessiveHalving
from fluxcb.testing import testlearner

class KillAt(Callback):
    def __init__(self, step):
        self.kill_at = step
    def stateaccess(self):
        return {"progress": fluxcb.Read()}
    @on(StepEnd, TrainingPhase)
    def kill(self, event, phase, learner):
        if learner.progress.step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

def make(learning_rate, member):
    at = int(sys.argv[2]) if member == 1 else -1
    return testlearner(Metrics(), Checkpointer(f"{sys.argv[1]}/{member}"), KillAt(at), learning_rate=learning_rate)

CALLBACKS = [PopulationBasedTraining("loss", ["learning_rate"], key=3), SuccessiveHalving("loss", epochs=3)]
population = Population(make, learning_rate=[0.001, 0.01, 0.1, 0.03], callbacks=CALLBACKS, default_callbacks=False)
population.fit(6, resume=True)
for member in population:
    print(member.step, member.stop_reason, float(member.params["w"]).hex(), float(member.params["b"]).hex())
print(population.callbacks[0].decisions, population.callbacks[1].rungs)
"""


def run(folder, kill_at):
    path = Path(folder).parent / "program.py"
    path.write_text(dedent(PROGRAM))
    return subprocess.run([sys.executable, str(path), str(folder), str(kill_at)], capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 9, 14, 21])
def test_killed_population_resumes_exactly(tmp_path, step):
    whole = run(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    killed = run(tmp_path / "killed", step)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run(tmp_path / "killed", -1)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout


def population(folder, *callbacks, rates=RATES, **options):
    def make(learning_rate, member):
        return testlearner(
            Metrics(), StopOnNaNLoss(), Checkpointer(folder / str(member), **options), learning_rate=learning_rate
        )

    return Population(make, learning_rate=rates, callbacks=callbacks, default_callbacks=False)


def test_members_resume_from_newest_common_step(tmp_path):
    """A process that is killed while the members save leaves some of them without the newest checkpoint."""
    callbacks = [PopulationBasedTraining("loss", ["learning_rate"], fraction=0.5)]
    whole = population(tmp_path / "whole", *callbacks)
    whole.fit(4)
    population(tmp_path / "killed", *callbacks).fit(3)
    for member in (1, 3):
        shutil.rmtree(tmp_path / "killed" / str(member) / "12")  # step 12 is the end of epoch 3
    resumed = population(tmp_path / "killed", *callbacks)
    histories = resumed.fit(4, resume=True)
    assert [history.step for history in histories] == [16] * 4
    assert resumed.callbacks[0].decisions == whole.callbacks[0].decisions
    for one, other in zip(whole, resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_member_without_common_step_is_named(tmp_path):
    population(tmp_path, rates=RATES[:2], keep_last=1).fit(2)
    shutil.rmtree(tmp_path / "1" / "8")
    population(tmp_path / "other", rates=RATES[:2], keep_last=1).fit(1)
    shutil.copytree(tmp_path / "other" / "1" / "4", tmp_path / "1" / "4")
    with pytest.raises(CheckpointError) as caught:
        population(tmp_path, rates=RATES[:2], keep_last=1).fit(3, resume=True)
    assert str(caught.value) == (
        "Member 0 (learning_rate=0.001) has no checkpoint of step 4, from which the population would resume.\n"
        "  why:   all members continue from the newest step that each of them has saved\n"
        "  fix:   let every member save at the same steps, and keep several checkpoints: "
        "`Checkpointer(..., keep_last=3)`"
    )


def test_member_without_any_checkpoint_is_named(tmp_path):
    population(tmp_path, rates=RATES[:2]).fit(2)
    with pytest.raises(CheckpointError) as caught:
        population(tmp_path, rates=RATES[:3]).fit(3, resume=True)
    assert str(caught.value) == (
        "Member 2 (learning_rate=0.1) has no checkpoint, but member 0 (learning_rate=0.001) has one of step 8.\n"
        "  why:   all members resume from the same step, so the others would begin again and replace their "
        "checkpoints\n"
        "  fix:   build the population with the members of the saved run, and restore the folders of their "
        "checkpoints\n"
        "     or: begin a new run with other folders"
    )
    resumed = population(tmp_path, rates=RATES[:2])
    resumed.fit(3, resume=True)
    whole = population(tmp_path / "whole", rates=RATES[:2])
    whole.fit(3)
    for one, other in zip(whole, resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_members_begin_again_if_run_was_killed_while_beginning_was_saved(tmp_path):
    population(tmp_path, rates=RATES[:2]).fit(1)
    shutil.rmtree(tmp_path / "0" / "4")
    shutil.rmtree(tmp_path / "1")
    histories = population(tmp_path, rates=RATES[:2]).fit(2, resume=True)
    assert [history.epoch for history in histories] == [2, 2]


def test_member_that_was_stopped_by_nan_stays_stopped(tmp_path):
    rates = [0.01, 1e30, 0.1]
    with pytest.warns(RuntimeWarning, match="Training stopped"):
        histories = population(tmp_path, rates=rates).fit(5)
    reason = histories[1].stop_reason
    assert histories[1].step < histories[0].step == 20
    resumed = population(tmp_path, rates=rates)
    later = resumed.fit(6, resume=True)
    assert [history.epoch for history in later] == [6, histories[1].epoch, 6]
    assert later[1].stop_reason == reason


def test_stopped_members_stay_stopped_after_resume(tmp_path):
    population(tmp_path, SuccessiveHalving("loss")).fit(3)
    resumed = population(tmp_path, SuccessiveHalving("loss"))
    histories = resumed.fit(5, resume=True)
    assert [history.epoch for history in histories] == [1, 1, 5, 2]
    assert [rung["epoch"] for rung in resumed.callbacks[0].rungs] == [1, 2, 4]


def test_resume_needs_one_checkpointer_per_member():
    members = Population(
        lambda learning_rate: testlearner(learning_rate=learning_rate),
        learning_rate=[0.1, 0.2],
        default_callbacks=False,
    )
    with pytest.raises(CheckpointError) as caught:
        members.fit(1, resume=True)
    assert str(caught.value) == (
        "`fit(resume=True)` continues the run of a Checkpointer, and member 0 (learning_rate=0.1) has none.\n"
        "  fix:   add one to the Learner that the factory returns, with a path of its own: "
        '`Checkpointer(f"runs/{member}")`'
    )


def test_checkpoint_of_member_restores_in_learner_alone(tmp_path):
    members = population(tmp_path, rates=RATES[:2])
    members.fit(1)
    alone = testlearner(Metrics(), StopOnNaNLoss(), Checkpointer(tmp_path / "alone"), learning_rate=RATES[1])
    alone.restore(tmp_path / "1", allow=("callbacks",))
    jax.tree.map(np.testing.assert_array_equal, alone.params, members[1].params)
    members.fit(1)
    alone.fit(1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), alone.params, members[1].params)
