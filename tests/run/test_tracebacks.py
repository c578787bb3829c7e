"""Tracebacks show the user's frames: the call of fluxcb, and the line that raised."""

import io
import os
import pdb
import subprocess
import sys
import traceback
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    AccessError,
    Append,
    Callback,
    CheckError,
    Learner,
    PauseFitting,
    Read,
    ThreadExecutor,
    TraceError,
    on,
)
from fluxcb._tracebacks import NOTE
from fluxcb.callbacks import ClipGradients, CustomCallback
from fluxcb.checkpoints import ResumeWarning
from fluxcb.events import BackwardEnd, EpochEnd, FitEnd, HostEvent, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

ROOT = Path(__file__).resolve().parents[2]


class TroubleError(Exception):
    pass


def trouble(learner):
    raise TroubleError("as planned")


def frames(error):
    """Return the functions of a traceback, outermost first; fail at any frame outside of this file."""
    entries = traceback.extract_tb(error.__traceback__)
    assert {entry.filename for entry in entries} <= {__file__}
    return [entry.name for entry in entries]


def raised(function, kind=TroubleError):
    try:
        function()
    except kind as error:
        return error
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("executor", [None, ThreadExecutor(2)], ids=["serial", "threads"])
def test_handler(executor):
    callbacks = [CustomCallback(trouble, StepEnd), CustomCallback(lambda learner: None, StepEnd)]
    learner = testlearner(*callbacks, executor=executor)
    assert frames(raised(lambda: learner.fit(1))) == ["raised", "<lambda>", "trouble"]


class Traced(Callback):
    def __init__(self, act):
        self.act = act

    def stateaccess(self):
        return {"step": {"grads": Read()}}

    @on
    def look(self, event: BackwardEnd, phase: TrainingPhase, learner):
        self.act(learner)


def learner_of(*callbacks, loss_fn=lambda outputs, ys: jnp.mean((outputs - ys) ** 2), data=None):
    xs = np.ones((4, 1), np.float32)
    model = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])
    data = data if data is not None else [(xs, xs)]
    return Learner(model, loss_fn, optax.sgd(0.1), data=data, callbacks=callbacks, default_callbacks=False)


def test_traced_handler():
    error = raised(lambda: learner_of(Traced(trouble)))
    assert frames(error) == ["raised", "<lambda>", "learner_of", "look", "trouble"]
    assert error.__notes__[0].startswith("while tracing Traced.look")


def test_traced_handler_that_needs_concrete_value():
    def decide(learner):
        if learner.step.grads["w"].sum() > 0:
            pass

    error = raised(lambda: learner_of(Traced(decide)), TraceError)
    assert frames(error) == ["raised", "<lambda>", "learner_of"]
    cause = traceback.extract_tb(error.__cause__.__traceback__)  # then a frame of JAX, which raised it
    assert [(entry.filename, entry.name) for entry in cause[:2]] == [(__file__, "look"), (__file__, "decide")]
    assert not any(entry.filename.startswith(str(ROOT / "fluxcb")) for entry in cause)


def test_loss_function():
    error = raised(lambda: learner_of(loss_fn=lambda outputs, ys: trouble(None)))
    assert frames(error) == ["raised", "<lambda>", "learner_of", "<lambda>", "trouble"]


def test_init():
    class Fails(Callback):
        def init(self, learner):
            trouble(learner)

    assert frames(raised(lambda: testlearner(Fails()))) == ["raised", "<lambda>", "init", "trouble"]
    learner = learner_of()
    assert frames(raised(lambda: learner.callbacks.add(Fails()))) == ["raised", "<lambda>", "init", "trouble"]


def test_data_source():
    class Source:
        def __iter__(self):
            yield np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)
            trouble(None)

    learner = learner_of(data=Source())
    assert frames(raised(lambda: learner.fit(1))) == ["raised", "<lambda>", "__iter__", "trouble"]


class Pauses(Callback):
    def stateaccess(self):
        return {"control": Append()}

    @on
    def pause(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == 1:
            raise PauseFitting


class OwnEvent(HostEvent):
    pass


BY_HAND = {
    "run_epoch": (StepEnd, lambda learner: learner.run_epoch(TrainingPhase())),
    "run_step": (StepEnd, lambda learner: learner.run_step(TrainingPhase(), learner._example)),
    "emit": (OwnEvent, lambda learner: learner.emit(OwnEvent(), TrainingPhase())),
    "trigger": (fluxcb.events.Trigger, lambda learner: learner.trigger()),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_manually_run_steps_and_epochs(name):
    event, call = BY_HAND[name]
    learner = learner_of(CustomCallback(trouble, event))
    learner._example = (np.ones((4, 1), np.float32),) * 2
    assert frames(raised(lambda: call(learner))) == ["raised", "<lambda>", "<lambda>", "trouble"]


def test_nested_call_keeps_frames_in_between():
    def validate(learner):
        outer[0].run_epoch(fluxcb.phases.ValidationPhase())

    callbacks = [
        CustomCallback(validate, EpochEnd, phase=TrainingPhase),
        CustomCallback(trouble, StepEnd, phase=fluxcb.phases.ValidationPhase),
    ]
    outer = [testlearner(*callbacks, validation_batches=1)]
    assert frames(raised(lambda: outer[0].fit(1))) == ["raised", "<lambda>", "validate", "trouble"]


def test_fluxcb_errors_show_call():
    clips = [ClipGradients(1.0), ClipGradients(2.0)]
    learner = learner_of()
    calls = [
        lambda: fluxcb.check(clips),
        lambda: learner.callbacks.set(clips),
        lambda: learner.callbacks.add(*clips),
        lambda: learner.fit(),
        lambda: learner.restore("nowhere"),
    ]
    for call in calls:
        assert frames(raised(call, fluxcb.FluxcbError)) == ["raised", "<lambda>"]
    assert frames(raised(lambda: learner_of(*clips), CheckError)) == ["raised", "<lambda>", "learner_of"]


def test_unknown_attribute_shows_line():
    error = raised(lambda: learner_of().events, AttributeError)
    assert frames(error) == ["raised", "<lambda>"]
    assert str(error) == "'Learner' object has no attribute 'events'"
    assert not hasattr(error, "__notes__")
    assert not hasattr(learner_of(), "events")


def test_access_error_shows_line_of_handler():
    learner = testlearner(CustomCallback(lambda learner: learner.params, StepEnd))
    assert frames(raised(lambda: learner.fit(1), AccessError)) == ["raised", "<lambda>", "<lambda>"]


def test_exception_group():
    learner = testlearner(CustomCallback(trouble, FitEnd), CustomCallback(trouble, FitEnd))
    error = raised(lambda: learner.fit(1), ExceptionGroup)
    assert frames(error) == ["raised", "<lambda>"]
    assert [frames(inner) for inner in error.exceptions] == [["trouble"], ["trouble"]]


def test_user_cause_and_context_are_kept():
    def fail(learner):
        try:
            trouble(learner)
        except TroubleError as error:
            raise KeyError("other") from error

    learner = testlearner(CustomCallback(fail, StepEnd))
    error = raised(lambda: learner.fit(1), KeyError)
    assert frames(error) == ["raised", "<lambda>", "fail"]
    assert frames(error.__cause__) == ["fail", "trouble"]
    assert error.__context__ is error.__cause__


def test_exception_object_is_unchanged():
    error = TroubleError("as planned")
    error.add_note("mine")

    def fail(learner):
        raise error

    learner = testlearner(CustomCallback(fail, StepEnd))
    assert raised(lambda: learner.fit(1)) is error
    assert error.__notes__[0] == "mine"
    assert len(error.__notes__) == 2


def test_unexpected_error_in_fluxcb_shows_its_line():
    """The message alone may not explain the error."""
    learner = testlearner(CustomCallback(lambda learner: None, StepEnd))
    learner._core.state.meter = None
    error = raised(lambda: learner.fit(1), AttributeError)
    entries = traceback.extract_tb(error.__traceback__)
    assert [entry.name for entry in entries] == ["raised", "<lambda>", "_fit"]
    assert entries[-1].filename == fluxcb._run.learner.__file__
    assert error.__notes__ == [NOTE]
    assert NOTE == "fluxcb removed its own frames from this traceback. Set FLUXCB_TRACEBACK=full to include them."


def test_full_traceback_on_request(monkeypatch):
    monkeypatch.setenv("FLUXCB_TRACEBACK", "full")
    learner = testlearner(CustomCallback(trouble, StepEnd))
    names = [entry.name for entry in traceback.extract_tb(raised(lambda: learner.fit(1)).__traceback__)]
    assert names[:2] == ["raised", "<lambda>"]
    assert names[-1] == "trouble"
    assert {"fit", "run_fit", "run_calls"} < set(names)


def test_debugger_stops_at_line_that_raised():
    def fail(learner):
        mine = 17
        raise TroubleError(f"at {mine}")

    learner = testlearner(CustomCallback(fail, StepEnd))
    error = raised(lambda: learner.fit(1))
    said = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p mine\nup\np learner\nquit\n"), stdout=said, nosigint=True, readrc=False)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
    assert "(Pdb) 17\n" in said.getvalue()
    assert "(Pdb) <Learner at epoch 1" in said.getvalue()


def test_warnings_show_line_that_called_fluxcb(tmp_path):
    class Forgets:
        def __iter__(self):
            return iter([(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))] * 2)

    def made():
        return learner_of(Pauses(), fluxcb.callbacks.Checkpointer(tmp_path), data=Forgets())

    def places(function):
        with pytest.warns(ResumeWarning) as caught:
            function()
        return [(warning.filename, warning.lineno - function.__code__.co_firstlineno) for warning in caught]

    made().fit(1)
    learner = made()
    assert places(lambda: learner.restore(tmp_path)) == [(__file__, 0)]
    learner = made()
    assert places(lambda: learner.fit(1, resume=True)) == [(__file__, 0)]


def test_warnings_of_callbacks_show_line_of_user(tmp_path):
    (tmp_path / "hyper.txt").write_text("nonsense")
    optimizer = fluxcb.inject(optax.sgd, learning_rate=0.1)
    setter = fluxcb.callbacks.HumanHyperParamSetter("learning_rate", tmp_path / "hyper.txt")
    learner = testlearner(setter, optimizer=optimizer)
    with pytest.warns(UserWarning, match="is skipped") as caught:
        learner.fit(1)  # this line
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# this line" in text)
    assert {(warning.filename, warning.lineno) for warning in caught} == {(__file__, line)}


def test_only_warn_user_issues_warnings():
    """A fixed stack level points into fluxcb's own files as soon as a caller is added."""
    files = [path for path in (ROOT / "fluxcb").rglob("*.py") if "warnings.warn" in path.read_text()]
    assert files == [ROOT / "fluxcb" / "_tracebacks.py"]


PROGRAM = """
from fluxcb import Callback, on
from fluxcb.events import StepEnd
from fluxcb.testing import testlearner

class Shows(Callback):
    @on
    def show(self, event: StepEnd, phase, learner):
        print("loss " + 3)

learner = testlearner(Shows())
learner.fit(1)
"""


def test_output_of_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stderr.splitlines() if not set(line) <= set(" ~^")]  # Python marks columns
    path = tmp_path / "program.py"
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 12, in <module>',
        "    learner.fit(1)",
        f'  File "{path}", line 9, in show',
        '    print("loss " + 3)',
        'TypeError: can only concatenate str (not "int") to str',
        "raised by Shows() in Shows.show  program.py:7, at StepEnd x TrainingPhase, epoch 1, step 1 (1 in this epoch)",
    ]


def test_classes_and_decorators_show_user_line():
    def misspelled():
        class Printer(Callback):
            def run_after(self):
                return ()

    def wrong_parameters():
        class Printer(Callback):
            @on
            def act(self, learner): ...

    def too_many():
        class Printer(Callback):
            @on(StepEnd, TrainingPhase, StepEnd)
            def act(self, event, phase, learner): ...

    for function in (misspelled, wrong_parameters, too_many):
        names = frames(raised(function, fluxcb.DeclarationError))
        assert names[:2] == ["raised", function.__name__]
        assert set(names[2:]) <= {"Printer"}  # the body of the class, which calls the decorator


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: fluxcb.data.ArrayLoader(np.ones(4), batch_size=0), fluxcb.DeclarationError),
        (lambda: fluxcb.inject(3, learning_rate=1.0), fluxcb.DeclarationError),
        (lambda: fluxcb.every(3, steps=2), fluxcb.DeclarationError),
        (lambda: fluxcb.in_order(), fluxcb.DeclarationError),
        (lambda: fluxcb.At[StepEnd], fluxcb.DeclarationError),
        (lambda: fluxcb.callbacks.EarlyStopping(), fluxcb.DeclarationError),
        (lambda: fluxcb.callbacks.Checkpointer(3), fluxcb.DeclarationError),
        (lambda: fluxcb.callbacks.Freeze.on.register(3), fluxcb.DeclarationError),
        (lambda: fluxcb.stopping.GL(-1), fluxcb.DeclarationError),
        (lambda: fluxcb.checkpoints.load_params("nowhere"), fluxcb.CheckpointError),
        (lambda: fluxcb.checkpoints.load_model("nowhere", None), fluxcb.DeclarationError),
        (lambda: testlearner().history.plot("accuracy"), fluxcb.DataError),
        (lambda: testlearner().history["loss"], KeyError),
        (lambda: testlearner().cbstate["loss"], KeyError),
        (lambda: testlearner().cbstate.loss, AttributeError),
        (lambda: testlearner().cbstate.__setitem__("x", 1.0), fluxcb.AccessError),
        (lambda: fluxcb.Learner.from_loss({}, lambda p, b, k: 0.0, optax.sgd(1.0)).model, fluxcb.DeclarationError),
    ],
)
def test_other_calls_show_user_line(call, kind):
    error = raised(call, kind)
    assert frames(error) == ["raised", "<lambda>"]
    assert not any(note == NOTE for note in getattr(error, "__notes__", ()))


def test_checkpointers_in_same_folder_raise_without_context(tmp_path):
    def build():
        return testlearner(fluxcb.callbacks.Checkpointer(tmp_path), fluxcb.callbacks.Checkpointer(tmp_path))

    error = raised(build, fluxcb.CheckpointError)
    saver = f"Checkpointer('{tmp_path}')"
    assert error.what == f"{saver} and {saver} write checkpoints to the same directory."
    assert (error.__cause__, error.__context__) == (None, None)
