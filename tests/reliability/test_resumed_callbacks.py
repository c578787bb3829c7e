"""Every public callback ends with the same state after a kill or SIGTERM and a resume."""

import sys

import pytest

import fluxcb.callbacks as library
from fluxcb import Append, Read
from fluxcb._declare.callback import unwrap
from fluxcb.testing import testlearner
from tests.contract.every_callback import HOW, FakeGPU, found, max_saver, noted
from tests.reliability.interrupted import Interrupted

# What holds readings of clocks and of machines, and may differ.
READINGS = {
    "ControlFile": {"what is in the file": ["ControlFile._commands"]},
    "EstimatedTimeLeft": {"the seconds of each epoch": ["callbacks['EstimatedTimeLeft']['seconds'][", ".seconds"]},
    "HostMemoryTracker": {"the memory of the machine": ["(GB)']['values']", "Monitors._hub"]},
    "ThroughputTracker": {"steps per second": ["(steps/sec)']['values']", "['taken']", "._taken", "Monitors._hub"]},
}

# Those that are made otherwise than in the other tests over all callbacks: what they write has to be the run's.
OF_A_RUN = {
    "BadSteps": lambda run: library.BadSteps(run / "saved"),
    "Checkpointer": lambda run: library.Checkpointer(run / "saved", steps=3),
    "ControlFile": lambda run: library.ControlFile(run / "saved"),
    "DumpArrays": lambda run: library.DumpArrays(["step.loss", "params"], run / "dumped", keep=2),
    "DumpImages": lambda run: library.DumpImages("step.outputs", run / "dumped", keep=1),
    "HumanHyperParamSetter": lambda run: library.HumanHyperParamSetter(library.LearningRate, by_hand(run)),
    "MaxSaver": lambda run: max_saver(run / "saved"),
    "MinSaver": lambda run: library.MinSaver(run / "saved"),
    "ModelSaver": lambda run: library.ModelSaver(run / "saved"),
    "Profiler": lambda run: library.Profiler(run / "profile", steps=(2, 3)),
    # Without `before_train`, which says that it runs again when a fit is resumed.
    "CallbackFactory": lambda run: library.CallbackFactory(
        trigger=noted, access={"params": Read(), "cbstate": {"losses": Append()}}
    ),
}


def by_hand(run):
    file = run / "hyper.txt"
    file.write_text("learning_rate: 0.05")
    return file


def maker(name):
    """Return a function that creates a Learner for a run directory, with a callback and its requirements."""
    how = HOW.get(name, {})
    make = OF_A_RUN.get(name, lambda run: how.get("make", getattr(library, name))())
    learner = how.get("learner", testlearner)

    def made(run):
        callbacks = [make(run), *(needed() for needed in how.get("needs", ()))]
        if not any(isinstance(unwrap(callback), library.Checkpointer) for callback in callbacks):
            callbacks.append(library.Checkpointer(run / "saved", steps=3))
        return learner(*callbacks, default_callbacks=False)

    return made


@pytest.mark.parametrize("name", found())
def test_callback_resumes_exactly(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeGPU)
    between = "StepBegin training 3"
    training = Interrupted(maker(name), {"epochs": 2}, tmp_path, lambda number, moment: moment == between)
    moments = training.moments
    differs = {f"killed at {between}": training.killed_at(moments.index(between))}
    for moment in ("StepEnd training 4", "Trigger training 4"):
        differs[f"SIGTERM at {moment}"] = training.preempted_at(moments.index(moment))
    readings = [part for parts in READINGS.get(name, {}).values() for part in parts]
    for where, lines in differs.items():
        assert [line for line in lines if not any(part in line.split(": ")[0] for part in readings)] == [], where


def test_exceptions_name_public_callbacks():
    assert {*READINGS, *OF_A_RUN} <= set(found())
