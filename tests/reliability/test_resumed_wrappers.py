"""Wrappers and logs have the same state with and without a resume."""

import io

import pytest

from fluxcb import Append, Callback, every, on, throttle, when
from fluxcb.callbacks import Checkpointer, EnableCallbackIf, Monitors, PeriodicCallback
from fluxcb.events import EpochBegin, EpochEnd, StepBegin, StepEnd, Trigger
from fluxcb.logging import ConsoleBackend, JSONLinesBackend
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner
from tests.reliability.interrupted import Interrupted


class Kept(Callback):
    """Record the moments of the training."""

    def __init__(self):
        self.kept = []

    def state_dict(self):
        return {"kept": list(self.kept)}

    def load_state_dict(self, state):
        self.kept = list(state["kept"])

    @on(EpochBegin | EpochEnd | StepBegin | StepEnd | Trigger, TrainingPhase)
    def keep(self, event, phase, learner):
        self.kept.append(f"{type(event).__name__} {learner.progress.step}")


def in_the_first_steps(learner):
    return learner.progress.step < 2


WRAPPED = {
    "when": (lambda: when(Kept(), in_the_first_steps), ["EpochBegin 0", "EpochEnd 3"]),
    "EnableCallbackIf": (lambda: EnableCallbackIf(Kept(), in_the_first_steps), ["EpochBegin 0", "EpochEnd 3"]),
    "when in every": (lambda: every(when(Kept(), in_the_first_steps), epochs=1), ["EpochBegin 0", "EpochEnd 3"]),
    "every": (lambda: every(Kept(), steps=2), ["EpochBegin 0", "EpochEnd 3", "EpochBegin 3", "EpochEnd 6"]),
    "throttle": (lambda: throttle(Kept(), EpochEnd, freq=2), ["EpochBegin 0", "EpochBegin 3", "EpochEnd 6"]),
    "PeriodicCallback": (lambda: PeriodicCallback(Kept(), every_k_epochs=2), ["EpochBegin 3", "EpochEnd 6"]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_resumed_wrapper_runs_at_same_moments(name, tmp_path):
    make, epochs = WRAPPED[name]

    def learner(run):
        return testlearner(make(), Checkpointer(run / "saved", steps=2), batches=3)

    training = Interrupted(learner, {"epochs": 2}, tmp_path)
    kept = training.expected["Kept.kept"]
    assert [moment for moment in kept if moment.startswith("Epoch")] == epochs
    for number, moment in enumerate(training.moments):
        if "training" in moment:
            assert training.killed_at(number) == [], moment
    assert training.preempted_at(training.moments.index("EpochEnd training 3")) == []


class Puts(Callback):
    """Log values at the end of each training and validation step."""

    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    @on(StepEnd)
    def put(self, event, phase, learner):
        learner.cbstate.monitors.put_scalar(f"{type(phase).name}/{learner.progress.step_in_epoch}", 1)


def test_save_keeps_log_record_of_its_step_complete(tmp_path):
    def learner(run, *saver):
        return testlearner(Monitors(JSONLinesBackend(run / "log.jsonl")), Puts(), *saver, batches=2)

    for name in ("without", "with"):
        (tmp_path / name).mkdir()
    learner(tmp_path / "without").fit(1)
    learner(tmp_path / "with", Checkpointer(tmp_path / "saved", steps=1)).fit(1)
    lines = {name: (tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("without", "with")}
    told = [line.partition('"time"')[2].partition(",")[2].strip() for line in lines["without"]]
    assert told == ['"training/1": 1.0}', '"training/2": 1.0, "validation/1": 1.0, "validation/2": 1.0}']
    assert [line.partition('"time"')[2].partition(",")[2].strip() for line in lines["with"]] == told


class Console(io.StringIO):
    """A console that also writes to a file, which has the same name in the next process of a run."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def write(self, text):
        with self.path.open("a") as file:
            return file.write(text)

    def __repr__(self):
        return "Console()"


def test_console_line_of_epoch_includes_values_from_before_interruption(tmp_path):
    def learner(run):
        monitors = Monitors(ConsoleBackend(file=Console(run / "log.txt")))
        return testlearner(monitors, Puts(), Checkpointer(run / "saved", steps=1), batches=3, validation_batches=0)

    training = Interrupted(learner, {"epochs": 1}, tmp_path)
    line = "epoch 1, step 3  training/1: 1  training/2: 1  training/3: 1\n"
    assert training.expected["log.txt"] == line
    assert training.killed_at(training.moments.index("StepBegin training 2")) == []
