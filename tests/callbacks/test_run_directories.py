"""The directories of savers: a directory holds one run, however it is named and whatever wraps the saver."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import CheckpointError, DeclarationError, Learner, every, throttle, when
from fluxcb.callbacks import Checkpointer, CustomCallback, MaxSaver, Metric, Metrics, MinSaver, PeriodicTrigger
from fluxcb.checkpoints import load_params
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.events import StepEnd, Trigger
from fluxcb.phases import TrainingPhase

ROOT = Path(__file__).resolve().parents[2]


def training(*callbacks, steps=4):
    """Return a Learner of four steps an epoch, whose parameter counts them."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=([np.zeros(1, np.float32)] * steps, [np.zeros(1, np.float32)]),
        callbacks=callbacks,
        default_callbacks=False,
    )


def steps_in(folder):
    for entry in entries_of(folder):
        assert float(load_params(entry.path)["w"]) == entry.step
    return [entry.step for entry in entries_of(folder)]


# --- one run to a directory -------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_unless_it_resumes(tmp_path):
    training(Checkpointer(tmp_path)).fit(1)
    second = training(Checkpointer(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        second.fit(1)
    assert str(raised.value) == (
        f"{tmp_path} contains checkpoints of another run.\n"
        "  why:   a directory can hold only one run: checkpoints are numbered by step, and old ones are deleted\n"
        "  fix:   continue that run: `learner.fit(..., resume=True)`\n"
        "     or: start a new run: use another directory, or delete this one"
    )
    assert (second.step, steps_in(tmp_path)) == (0, [0, 4])
    second.fit(2, resume=True)
    assert steps_in(tmp_path) == [0, 4, 8]


def test_a_program_with_resume_can_be_run_any_number_of_times(tmp_path):
    for _ in range(3):
        learner = training(Checkpointer(tmp_path))
        learner.fit(2, resume=True)
        assert (learner.step, steps_in(tmp_path)) == (8, [0, 4, 8])


def test_the_fix_of_a_best_saver_without_a_checkpointer_works(tmp_path):
    training(Metrics(), MinSaver(tmp_path)).fit(2)
    folder = tmp_path / "min-validation-loss"
    second = training(Metrics(), MinSaver(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        second.fit(1)
    assert str(raised.value) == (
        f"{folder} contains checkpoints of another run.\n"
        "  why:   a directory can hold only one run: checkpoints are numbered by step, and old ones are deleted\n"
        "  fix:   continue that run: if it has a `Checkpointer`, `learner.fit(..., resume=True)`; otherwise, "
        f"call `learner.restore({str(folder)!r})` before `fit`, with the argument "
        '`allow=("callbacks",)` if the list of callbacks has changed\n'
        "     or: start a new run: use another directory, or delete this one"
    )
    (call,) = re.findall(r"`(learner\.restore\([^`]*\))`", raised.value.fix[0])
    eval(call, {"learner": second})  # noqa: S307 - of the message's own text
    second.fit(1)
    assert (second.step, steps_in(folder)) == (12, [12])


@pytest.mark.filterwarnings("ignore:The run resumes:fluxcb.checkpoints.ResumeWarning")
def test_a_checkpointer_can_be_added_to_the_run_of_a_best_saver(tmp_path):
    training(Metrics(), MinSaver(tmp_path)).fit(2)
    folder = tmp_path / "min-validation-loss"
    second = training(Metrics(), MinSaver(tmp_path), Checkpointer(tmp_path))
    with pytest.raises(CheckpointError, match=re.escape('with the argument `allow=("callbacks",)`')):
        second.fit(1)
    second.restore(folder, allow=("callbacks",))
    second.fit(1)
    assert (second.step, steps_in(folder)) == (12, [12])
    shutil.rmtree(folder)
    training(Metrics(), MinSaver(tmp_path)).fit(1)
    training(Metrics(), MinSaver(tmp_path / "other")).fit(1)


def test_the_fix_for_resume_without_a_checkpointer_works(tmp_path, refused):
    learner = training(Metrics(), MinSaver(tmp_path))
    learner.fit(1)
    text = (
        "`fit(resume=True)` continues the run of a Checkpointer, and this Learner has none.\n"
        '  fix:   add `Checkpointer("runs/1")` to the callbacks\n'
        "     or: to continue from an existing checkpoint, call `learner.restore(path)` before `fit`"
    )
    second = training(Metrics(), MinSaver(tmp_path))
    with refused(CheckpointError, text):
        second.fit(2, resume=True)
    second.restore(tmp_path / "min-validation-loss")
    second.fit(2, resume=True)
    assert second.step == 8
    added = training(Checkpointer(tmp_path / "run"))
    added.fit(2, resume=True)
    assert added.step == 8


def test_two_concurrent_runs_are_refused_even_from_another_process(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from fluxcb.checkpoints.run_folder import RunFolder\n"
        "from pathlib import Path\n"
        "try: RunFolder(Path(sys.argv[1])).lock()\n"
        "except Exception as error: print(str(error))\n"
    )
    told = []

    def second(learner):
        if learner.progress.step == 1:
            with pytest.raises(CheckpointError) as raised:
                training(Checkpointer(tmp_path)).fit(1)
            told.append(str(raised.value))
            done = subprocess.run(
                [sys.executable, "-c", program, str(tmp_path), str(ROOT)], capture_output=True, text=True, check=True
            )
            told.append(done.stdout.strip())

    training(Checkpointer(tmp_path), CustomCallback(second, StepEnd, phase=TrainingPhase)).fit(1)
    within, elsewhere = told
    assert within == elsewhere
    first, *rest = within.splitlines()
    begins = f"Another run is writing checkpoints to {tmp_path}: process {os.getpid()} on "
    assert first.startswith(begins)
    assert rest == [
        "  why:   two runs in one directory would mix their checkpoints",
        "  fix:   use a separate directory for each run",
    ]
    assert steps_in(tmp_path) == [0, 4]


@pytest.mark.filterwarnings("ignore:`MaxSaver:UserWarning")
def test_savers_of_one_learner_have_separate_directories(tmp_path):
    savers = [Checkpointer(tmp_path / "often", steps=1), Checkpointer(tmp_path / "seldom", epochs=2)]
    learner = training(*savers, MinSaver(tmp_path / "often"), MaxSaver(tmp_path / "often", "loss"), Metrics())
    learner.fit(2)
    assert steps_in(tmp_path / "often") == [7, 8, 8]
    assert steps_in(tmp_path / "seldom") == [0, 8]
    # The loss of the validation is minus the parameter.
    assert steps_in(tmp_path / "often" / "min-validation-loss") == [8]
    assert steps_in(tmp_path / "often" / "max-validation-loss") == [4]


def test_two_savers_in_one_directory_are_an_error_at_construction(tmp_path):
    with pytest.raises(CheckpointError, match=r" write checkpoints to the same directory\."):
        training(Checkpointer(tmp_path, steps=1), Checkpointer(tmp_path, epochs=2))


def test_with_two_checkpointers_the_run_to_continue_must_be_named(tmp_path, refused):
    def made():
        return training(Checkpointer(tmp_path / "one"), Checkpointer(tmp_path / "two", steps=3))

    made().fit(1)
    learner = made()
    text = (
        "`fit(resume=True)` continues the run of a Checkpointer, and this Learner has 2.\n"
        "  fix:   keep one Checkpointer in the callbacks\n"
        "     or: to continue from an existing checkpoint, call `learner.restore(path)` before `fit`"
    )
    with refused(CheckpointError, text):
        learner.fit(2, resume=True)
    learner.restore(tmp_path / "two")
    learner.fit(2, resume=True)
    assert (learner.step, steps_in(tmp_path / "one"), steps_in(tmp_path / "two")[-1]) == (8, [0, 4, 8], 8)


# --- how it is named --------------------------------------------------------------------------------------------------


def test_a_relative_directory_is_resolved_at_construction(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    leave = CustomCallback(lambda learner: os.chdir(tmp_path / "there"), StepEnd, phase=TrainingPhase)
    training(Checkpointer("run", steps=2), leave).fit(1)
    assert steps_in(tmp_path / "here" / "run") == [2, 4, 4]  # of step 4 one in the epoch, and one behind it
    assert os.listdir(tmp_path / "there") == []


def test_a_symbolic_link_is_the_same_directory_as_its_target(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    training(Checkpointer(tmp_path / "link")).fit(1)
    assert steps_in(tmp_path / "real") == [0, 4]
    again = training(Checkpointer(tmp_path / "real"))
    again.fit(2, resume=True)
    assert again.step == 8
    with pytest.raises(CheckpointError, match=r" write checkpoints to the same directory\."):
        training(Checkpointer(tmp_path / "link"), Checkpointer(tmp_path / "real"))


def test_a_file_is_rejected_at_construction(tmp_path):
    (tmp_path / "file").touch()
    for make in (Checkpointer, lambda path: MinSaver(path, name="best")):
        with pytest.raises(DeclarationError, match=r"writes to a directory, but .*file is a file\."):
            make(tmp_path / "file")


@pytest.mark.parametrize("name", ["", None, 3, b"run"])
def test_a_value_that_is_not_a_path_is_rejected(name):
    with pytest.raises(DeclarationError, match=r"^`Checkpointer` takes a directory, not "):
        Checkpointer(name)


def test_directory_names_can_have_spaces_and_any_letters(tmp_path):
    folder = tmp_path / "my runs" / "größe = 2,5 学習"
    training(Checkpointer(folder)).fit(1)
    assert steps_in(folder) == [0, 4]


# --- who wraps it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapped", "steps"),
    [
        (lambda saver: every(saver, steps=3), [0, 3, 6, 8]),
        (lambda saver: every(saver, epochs=2), [0, 8]),
        (lambda saver: throttle(saver, Trigger, freq=2), [0, 8]),
        (lambda saver: PeriodicTrigger(saver, every_k_steps=3), [0, 3, 6, 8]),
        (lambda saver: PeriodicTrigger(saver, every_k_epochs=2), [0, 8]),
        (lambda saver: when(saver, lambda learner: learner.progress.epoch == 1), [0, 4, 8]),
        (lambda saver: every(saver, seconds=1e6), [0, 8]),
    ],
)
def test_wrappers_set_the_schedule_but_the_beginning_and_the_end_are_always_saved(tmp_path, wrapped, steps):
    def made():
        return training(wrapped(Checkpointer(tmp_path, keep_last=9)))

    made().fit(2)
    assert steps_in(tmp_path) == steps
    again = made()
    again.fit(3, resume=True)
    assert again.step == 12
    assert steps_in(tmp_path)[-1] == 12


# --- a directory without checkpoints ----------------------------------------------------------------------------------


def test_directory_that_contains_runs_is_an_error_that_names_them(tmp_path, refused):
    for number in (1, 2, 10):
        training(Checkpointer(tmp_path / str(number))).fit(1)
    newest = [str(tmp_path / number) for number in ("10", "2", "1")]
    text = (
        f"{tmp_path} is not the directory of a run, because it contains the runs '10' and '2' and '1'.\n"
        "  why:   the checkpoints in the directory of a run have numbers as their names, too\n"
        f"  fix:   use the directory of a run: {newest[0]!r}\n"
        f"     or: use the directory of a run: {newest[1]!r}\n"
        f"     or: use the directory of a run: {newest[2]!r}"
    )
    for call in (
        lambda: load_params(tmp_path),
        lambda: training().restore(tmp_path),
        lambda: training(Checkpointer(tmp_path)).fit(2, resume=True),
        lambda: training(Checkpointer(tmp_path)).fit(1),
    ):
        with refused(CheckpointError, text):
            call()
    for path in newest:
        load_params(path)


def test_saver_that_has_saved_nothing_is_named_in_the_error(tmp_path, refused):
    nan = Metric(lambda loss: loss * jnp.nan, "never", needs=("loss",))
    learner = training(MinSaver(tmp_path, "training/never"), Metrics(nan))
    learner.fit(1)
    folder = tmp_path / "min-training-never"
    text = (
        f"There is no checkpoint in {folder}: the saver of this directory has not saved any.\n"
        "  why:   a `Checkpointer` saves when a fit begins, and a `MinSaver` or `MaxSaver` after an epoch in which its "
        "metric is finite and better than before\n"
        "  fix:   train until it has saved a checkpoint\n"
        "     or: use the directory of another saver"
    )
    with refused(CheckpointError, text):
        learner.restore(folder)
