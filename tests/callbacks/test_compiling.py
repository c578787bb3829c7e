"""`progress.compiled`, and what `ProgressBar` says before a step is compiled."""

import io
import re

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, PauseFitting, Read, on
from fluxcb._run import programs
from fluxcb.callbacks import Checkpointer, ClipGradients, CustomCallback, Metrics, MetricsPrinter, ProgressBar
from fluxcb.events import EpochBegin, FitBegin, StepEnd, Trigger
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from tests.changed_callbacks import changes_arguments


class Look(Callback):
    """Note `progress.compiled` when epochs begin."""

    def __init__(self):
        self.seen = []

    @on
    def look(self, event: EpochBegin, phase: Phase, learner):
        self.seen.append((type(phase).name, learner.progress.compiled))


class Pause(Callback):
    """Pause the fit at an event of a training step, or never."""

    def __init__(self, event=None, step=0):
        self.at = event, step

    def stateaccess(self):
        return {"control": Append()}

    @on
    def pause(self, event: StepEnd | Trigger, phase: TrainingPhase, learner):
        if (type(event), learner.progress.step) == self.at:
            raise PauseFitting("pause")


@pytest.fixture
def compilations(monkeypatch):
    """Return a function that records what another function returns whenever a program is about to be compiled."""

    def watch(look):
        seen, compile_program = [], programs.compile_program

        def observed(*args, **kwargs):
            seen.append(look())
            return compile_program(*args, **kwargs)

        monkeypatch.setattr(programs, "compile_program", observed)
        return seen

    return watch


def test_lines_say_so_and_are_flushed_before_it_begins(build, make_batches, tmp_path, compilations):
    with open(tmp_path / "lines.txt", "w") as file:
        seen = compilations((tmp_path / "lines.txt").read_text)
        data = (make_batches([2]), make_batches([2]))
        build([ProgressBar(file), Metrics(), MetricsPrinter(file)], data=data).fit(2)
    header = "epoch  train loss  valid loss      time\n"
    training, validation = (f"epoch 1/2 {name}: compiling the step\n" for name in ("training", "validation"))
    assert seen == [header + training, header + training + validation]
    text = (tmp_path / "lines.txt").read_text()
    assert text.startswith(header + training + validation + "    1  ")
    assert text.count("\n") == 5


def test_the_bar_says_so_before_it_begins(build, terminal, compilations):
    seen = compilations(terminal.getvalue)
    build([ProgressBar(terminal)]).fit(1)
    assert re.fullmatch(
        r"epoch 1/1 training .* 0/3 compiling +-:--:--", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", seen[0])
    )


def test_nothing_is_said_of_what_is_compiled_already(build, make_batches):
    file, look = io.StringIO(), Look()
    learner = build([look, ProgressBar(file)], data=(make_batches([2]), make_batches([2])))
    learner.fit(2)
    learner.fit(1)
    fits = [("training", False), ("validation", False), *[("training", True), ("validation", True)] * 2]
    assert look.seen == fits
    assert file.getvalue().count("compiling the step") == 2
    learner.callbacks.measure()  # plans the handlers again, and compiles nothing
    learner.fit(1)
    assert look.seen == [*fits, ("training", True), ("validation", True)]
    compiles = learner.compile_counts["compiles"]
    learner.callbacks.add(ClipGradients(1.0))
    learner.fit(1)
    assert look.seen[-2:] == [("training", False), ("validation", True)]
    assert learner.compile_counts["compiles"] == compiles + 1


def test_it_is_known_whether_a_host_handler_needs_another_program(build, make_batches):
    look = Look()
    learner = build([look], data=make_batches([2]))
    learner.fit(1)
    learner.callbacks.add(CustomCallback(lambda learner: None, StepEnd, access={"step": {"loss": Read()}}))
    learner.fit(1)  # fetches the loss, which nothing did before
    assert look.seen == [("training", False), ("training", False)]
    assert learner.compile_counts["compiles"] == 2
    learner.callbacks.add(CustomCallback(lambda learner: None, EpochBegin))
    learner.fit(1)
    assert look.seen[2:] == [("training", True)]
    assert learner.compile_counts["compiles"] == 2


def test_steps_run_by_hand_have_a_program_of_their_own(build, make_batches):
    look = Look()
    learner = build([look], data=make_batches([2]))
    learner.run_step(TrainingPhase(), make_batches([2])[0])
    learner.fit(1)
    assert look.seen == [("training", False)]
    assert learner.compile_counts["compiles"] == 2


def test_an_epoch_inside_another_does_not_change_what_is_known_of_it(build, make_batches):
    seen = []

    class Validate(Callback):
        def stateaccess(self):
            return {"params": Read(borrow=True)}

        @on
        def validate(self, event: StepEnd, phase: TrainingPhase, learner):
            seen.append(learner.progress.compiled)
            trained.run_epoch(ValidationPhase())
            seen.append(learner.progress.compiled)

    trained = build([Validate()], data={"training": make_batches([2, 2]), "validation": make_batches([2])})
    trained.run_epoch(ValidationPhase())
    trained.run_epoch(TrainingPhase())
    trained.run_epoch(TrainingPhase())
    assert seen == [False] * 4 + [True] * 4


def resumable(folder, *callbacks):
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=[jnp.ones(2)] * 4,
        callbacks=[*callbacks, Checkpointer(folder)],
        default_callbacks=False,
    )


@pytest.mark.parametrize(
    ("event", "step", "epoch"),
    [(StepEnd, 2, 1), (Trigger, 4, 2)],
    ids=["in an epoch", "between epochs"],
)
@changes_arguments("callbacks.Pause.event", "callbacks.Pause.step")
def test_a_resumed_fit_says_so_before_it_begins(tmp_path, compilations, event, step, epoch):
    begun = []

    def paused(file, *at):
        note = CustomCallback(lambda learner: begun.append(learner.progress.compiled), FitBegin, name="note")
        return resumable(tmp_path, Pause(*at), ProgressBar(file), note)

    paused(io.StringIO(), event, step).fit(2)
    learner = paused(file := io.StringIO())
    seen = compilations(file.getvalue)
    learner.fit(2, resume=True)
    first = f"epoch {epoch}/2 training: compiling the step"
    assert seen == [first + "\n"]
    assert begun == [True, epoch == 2]
    titles = [line.split(",")[0] for line in file.getvalue().splitlines()]
    assert titles == [first, *(f"epoch {number}/2 training: 4/4 steps" for number in range(epoch, 3))]


@changes_arguments("callbacks.Pause.event", "callbacks.Pause.step")
def test_a_resumed_fit_prints_the_header_first(tmp_path):
    def paused(file, *at):
        return resumable(tmp_path, Pause(*at), ProgressBar(file), Metrics(), MetricsPrinter(file))

    paused(io.StringIO(), StepEnd, 2).fit(2)
    paused(file := io.StringIO()).fit(2, resume=True)
    lines = file.getvalue().splitlines()
    assert lines[:3] == [
        "training resumes in epoch 1, step 2",
        "epoch  train loss      time",
        "epoch 1/2 training: compiling the step",
    ]
    assert lines[-1].split()[0] == "2"
