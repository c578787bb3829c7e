"""`learner.callbacks.measure()` and `timings()`: calls, times and device reads of each handler."""

import io

import numpy as np
import pytest
from rich.console import Console

from fluxcb import Callback, DeclarationError, EverySteps, Read, on
from fluxcb._run import meter
from fluxcb.callbacks import Metrics, Recorder, StopOnNaNLoss
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog, testlearner


class Looks(Callback):
    """Read the loss every 5th step, and the parameters at the end of the epoch."""

    def stateaccess(self):
        return {"step": {"loss": Read()}, "params": Read()}

    @on(StepEnd, TrainingPhase, access={"step": {"loss": Read()}}, when=EverySteps(5))
    def look(self, event, phase, learner):
        float(learner.step.loss)
        float(learner.step.loss)

    @on(EpochEnd, TrainingPhase, access={"params": Read()})
    def end(self, event, phase, learner):
        float(learner.params["w"])


def rows(learner):
    return {(row.handler, row.moment): row for row in learner.callbacks.timings()}


def test_timings_count_calls_time_and_reads(monkeypatch):
    clock = iter(range(1_000_000))
    learner = testlearner(Looks(), EventLog(), batches=20, validation_batches=2, steps_per_call=10)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("fluxcb._run.program_runner.WINDOW_SECONDS", 0.1)  # by this clock, each step is a window
    learner.callbacks.measure()
    learner.fit(2)
    found = rows(learner)
    look = found["Looks().look", "StepEnd x TrainingPhase"]
    assert (look.calls, look.seconds >= 8, look.mean >= 1) == (8, True, True)
    # One read for each window with a due step, however often the handler looks.
    assert 1 <= look.syncs <= 8
    assert dict(look.reads) == {"step values": look.syncs}
    end = found["Looks().end", "EpochEnd x TrainingPhase"]
    assert (end.calls, end.syncs, dict(end.reads)) == (2, 2, {"params": 2})
    assert found["EventLog().record", "StepEnd x ValidationPhase"].calls == 4
    assert found["EventLog().record", "StepEnd x TrainingPhase"].syncs == 0


def test_measure_restarts_from_zero_and_can_be_stopped():
    learner = testlearner(EventLog(), batches=4, validation_batches=0)
    learner.callbacks.measure()
    learner.fit(1)
    learner.callbacks.measure()
    learner.fit(2)
    assert rows(learner)["EventLog().record", "StepEnd x TrainingPhase"].calls == 8
    learner.callbacks.measure(False)
    learner.fit(3)
    assert rows(learner)["EventLog().record", "StepEnd x TrainingPhase"].calls == 8


def test_measuring_changes_no_result_and_compiles_nothing():
    plain, measured = (testlearner(Metrics(), Recorder(), StopOnNaNLoss(), batches=40) for _ in range(2))
    for learner in (plain, measured):
        learner.fit(1)
    measured.callbacks.measure()
    counts = measured.compile_counts
    for learner in (plain, measured):
        learner.fit(2)
    assert measured.compile_counts == counts
    for name in ("w", "b"):
        np.testing.assert_array_equal(plain.params[name], measured.params[name])
    assert plain.cbstate["metrics_step"] == measured.cbstate["metrics_step"]


def test_default_callbacks_read_per_epoch_but_not_per_step(no_clock):
    learner = testlearner(Metrics(), Recorder(), StopOnNaNLoss(), batches=600, validation_batches=0, steps_per_call=100)
    learner.callbacks.measure()
    learner.fit(1)
    found = rows(learner)
    assert found["Metrics().fetch_step_values", "StepEnd x TrainingPhase"].syncs == 2  # at steps 256 and 512
    assert found["Metrics().end_epoch", "EpochEnd x TrainingPhase"].syncs == 1
    assert found["StopOnNaNLoss().cancel", "StepEnd x TrainingPhase"].syncs == 0
    windows = learner._core.engine.step_loop(learner.phases[0]).windows
    assert found["the engine", "between the steps"].syncs <= windows < 60


def test_table_shows_measurements():
    learner = testlearner(Looks(), batches=10, validation_batches=0)
    learner.callbacks.measure()
    learner.fit(1)
    console = Console(file=(file := io.StringIO()), width=120)
    console.print(learner.callbacks.timings())
    lines = file.getvalue().splitlines()
    assert [word.strip() for word in lines[2].split("  ") if word.strip()] == [
        *("handler", "moment", "calls", "total (ms)", "mean (us)", "syncs", "read from the device")
    ]
    assert any(line.split()[:5] == ["Looks().look", "StepEnd", "x", "TrainingPhase", "2"] for line in lines)
    assert str(learner.callbacks.timings()) == file.getvalue().rstrip("\n")


def test_timings_without_measurement_or_during_fit_raise():
    learner = testlearner(EventLog(), batches=2)
    with pytest.raises(DeclarationError) as raised:
        learner.callbacks.timings()
    assert str(raised.value) == (
        "Nothing has been measured.\n"
        "  why:   measuring takes time at each call, so it is off by default\n"
        "  fix:   call `learner.callbacks.measure()` before `fit`"
    )

    class Measures(Callback):
        @on
        def start(self, event: StepEnd, phase: TrainingPhase, _):
            learner.callbacks.measure()

    learner = testlearner(Measures(), batches=2)
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    assert str(raised.value).startswith("Measuring cannot be turned on or off while the Learner is fitting.")


def test_raising_handler_is_counted_and_engine_recovers():
    class Fails(Callback):
        @on
        def fail(self, event: StepEnd, phase: TrainingPhase, learner):
            raise ZeroDivisionError

    learner = testlearner(Fails(), batches=2)
    learner.callbacks.measure()
    with pytest.raises(ZeroDivisionError):
        learner.fit(1)
    assert rows(learner)["Fails().fail", "StepEnd x TrainingPhase"].calls == 1
    assert learner._state.meter._current.handler == "the engine"
