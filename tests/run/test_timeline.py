"""`learner.callbacks.trace(path)` writes the timeline in Chrome's Trace Event Format."""

import gzip
import itertools
import json
import os
from array import array
from collections import Counter

import numpy as np
import pytest

from fluxcb import Append, Callback, CancelFitting, DeclarationError, EverySteps, Read, on
from fluxcb._run import trace_file
from fluxcb._run.trace_file import Kind, save
from fluxcb.callbacks import Metrics, Recorder, StopOnNaNLoss
from fluxcb.events import EpochEnd, FitBegin, StepBegin, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner

PHASES = {"training": "TrainingPhase", "validation": "ValidationPhase"}


pytestmark = pytest.mark.usefixtures("no_clock")


class Looks(Callback):
    """Read the loss every 5th step, and the parameters at the end of the epoch."""

    def stateaccess(self):
        return {"step": {"loss": Read()}, "params": Read()}

    @on(StepEnd, TrainingPhase, access={"step": {"loss": Read()}}, when=EverySteps(5))
    def look(self, event, phase, learner):
        float(learner.step.loss)

    @on(EpochEnd, TrainingPhase, access={"params": Read()})
    def end(self, event, phase, learner):
        float(learner.params["w"])


class Validates(Callback):
    """Run an epoch of validation inside a handler."""

    def stateaccess(self):
        return {"params": Read(borrow=True)}

    @on(StepEnd, TrainingPhase, when=EverySteps(10))
    def validate(self, event, phase, learner):
        self.learner.run_epoch(ValidationPhase())


class Raises(Callback):
    """Raise an error at the third step."""

    def __init__(self, error):
        self.error = error

    def stateaccess(self):
        return {"control": Append()}

    @on
    def fail(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == 3:
            raise self.error


def parse(path):
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return json.loads(text)


def trace(path, learner, *fits, **options):
    with learner.callbacks.trace(path, **options):
        for fit in fits:
            learner.fit(**fit)
    return parse(path)["traceEvents"]


def spans(events, category=None, *, track="host"):
    number = {"host": 1, "device": 2}[track]
    return [e for e in events if e["ph"] == "X" and e["tid"] == number and category in (None, e["cat"])]


def nanoseconds(event):
    began = round(event["ts"] * 1000)
    return began, began + round(event["dur"] * 1000)


def ancestors(events):
    """Return each host span with the names of its enclosing spans, outermost first; partly overlapping spans fail."""
    found, open_spans = [], []
    for span in spans(events):
        began, ended = nanoseconds(span)
        while open_spans and nanoseconds(open_spans[-1])[1] <= began:
            open_spans.pop()
        assert not open_spans or ended <= nanoseconds(open_spans[-1])[1], (open_spans[-1], span)
        found.append((span, [outer["name"] for outer in open_spans]))
        open_spans.append(span)
    return found


def window_of(event):
    return event["args"]["phase"], event["args"]["first_step"], event["args"]["steps"]


# -- the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_handler_spans_match_calls_in_order(tmp_path, steps_per_call):
    log = EventLog()
    learner = testlearner(log, Metrics(), batches=25, steps_per_call=steps_per_call)
    events = trace(tmp_path / "trace.json", learner, {"epochs": 2})
    calls = [e["args"] for e in spans(events, "handler") if e["name"] == "EventLog.record"]
    assert [(c["event"], c["phase"], c["step"], c["epoch"], c["step_in_epoch"]) for c in calls] == [
        (event, PHASES[phase], *counters) for event, phase, *counters in log.entries
    ]
    assert {c["callback"] for c in calls} == {"EventLog()"}
    assert len(log.entries) == 2 * (2 * (25 + 2) + 4 + 1) + 3  # steps; begin and end of epochs, trigger; of the fit


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_host_spans_are_nested(tmp_path, steps_per_call):
    validates, log = Validates(), EventLog()
    learner = testlearner(Metrics(), validates, log, batches=30, steps_per_call=steps_per_call)
    validates.learner = learner
    events = trace(tmp_path / "trace.json", learner, {"epochs": 2}, {"epochs": 1})
    around = ancestors(events)
    in_training = ["fit", "epoch of TrainingPhase", "replay handlers"]
    inside = [*in_training, "Validates.validate", "epoch of ValidationPhase"]
    found = Counter(tuple(outer) for span, outer in around if span["args"].get("event") in ("StepBegin", "StepEnd"))
    assert found == {
        tuple(in_training): 3 * 30 * 2 + 9,  # begin and end, and the validating handler
        (*inside, "replay handlers"): 9 * 2 * 2,  # a validation at each 10th step, of two steps
        ("fit", "epoch of ValidationPhase", "replay handlers"): 3 * 2 * 2,
    }
    assert [e["args"] for e in spans(events, "fit")] == [
        {"epoch": 2, "step": 60, "step_in_epoch": 30},
        {"epoch": 3, "step": 90, "step_in_epoch": 30},
    ]
    training = [e for e in spans(events, "epoch") if e["args"]["phase"] == "TrainingPhase"]
    assert [(e["args"]["epoch"], e["args"]["step"]) for e in training] == [(1, 30), (2, 60), (3, 90)]


def test_handlers_are_named_by_class_and_numbered(tmp_path):
    class Named(Callback):
        def __init__(self, name):
            self.name = name

        def __repr__(self):
            return f"named {self.name}"

        @on
        def begin(self, event: FitBegin, phase, learner):
            pass

    events = trace(tmp_path / "trace.json", testlearner(Named("a.b"), Named("c")), {"steps": 1})
    begin = {"event": "FitBegin", "phase": "TrainingPhase", "epoch": 0, "step": 0, "step_in_epoch": 0}
    assert [(e["name"], e["args"]) for e in spans(events, "handler")] == [
        ("Named.begin", {**begin, "callback": "named a.b"}),
        ("Named.begin", {**begin, "callback": "named c"}),
    ]


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_each_device_read_has_span_with_handler(tmp_path, steps_per_call):
    learner = testlearner(Looks(), batches=25, validation_batches=0, steps_per_call=steps_per_call)
    before = learner._state.meter.reads
    events = trace(tmp_path / "trace.json", learner, {"epochs": 2})
    reads = [e for e in events if e.get("cat") == "fetch"]
    assert len(reads) == learner._state.meter.reads - before
    by = Counter((e["ph"], e["name"], e["args"]["by"]) for e in reads)
    assert by.pop(("i", "read params", "Looks.end")) == 2
    in_windows = by.pop(("X", "fetch step values", "the engine"), 0)
    in_handlers = by.pop(("X", "fetch step values", "Looks.look"), 0)
    assert not by
    # The engine looks into the rows of a window itself to see how far it came, and handlers find them fetched.
    assert (in_windows > 0, in_handlers > 0) == ((False, True) if steps_per_call == 1 else (True, False))
    around = {tuple(outer[-1:]) for span, outer in ancestors(events) if span["cat"] == "fetch"}
    assert around == {("Looks.look",) if steps_per_call == 1 else ("wait for the device",)}


def test_compiling_and_tracing_are_within_dispatch(tmp_path):
    batches = [(np.ones((size, 1), np.float32), np.ones((size, 1), np.float32)) for size in (8, 8, 8, 4)]
    learner = testlearner(data=batches, steps_per_call=1)
    before = learner.compile_counts
    events = trace(tmp_path / "trace.json", learner, {"epochs": 2})
    after = learner.compile_counts
    found = Counter((span["name"], outer[-1]) for span, outer in ancestors(events) if span["cat"] == "compile")
    # The step was traced for batches of 8 when the Learner was built; that for a batch of 4 comes while it runs.
    assert found == {
        ("trace the step of TrainingPhase", "dispatch"): 1,
        ("compile the step of TrainingPhase", "dispatch"): 2,
    }
    assert (after["traces"] - before["traces"], after["compiles"] - before["compiles"]) == (1, 2)
    compiles = [e["args"] for e in spans(events, "compile") if e["name"].startswith("compile")]
    assert [(c["program"], c["steps_per_call"]) for c in compiles] == [("loop", 1)] * 2


def test_batches_are_read_before_dispatch(tmp_path):
    events = trace(tmp_path / "trace.json", testlearner(batches=20, steps_per_call=1), {"epochs": 1})
    own = [e for e in spans(events) if e["cat"] in ("data", "dispatch")]
    pulled = 0
    for event in own:
        if event["cat"] == "data":
            pulled = event["args"]["batches"]
        else:
            assert pulled == event["args"]["steps"]
    assert Counter(e["args"]["source"] for e in own if e["cat"] == "data").keys() == {
        "data.training",
        "data.validation",
    }


# -- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 10])
def test_device_track_shows_program_and_steps(tmp_path, steps_per_call):
    learner = testlearner(EventLog(), batches=25, steps_per_call=steps_per_call)
    events = trace(tmp_path / "trace.json", learner, {"epochs": 2})
    windows = spans(events, track="device")
    steps = [
        (span["args"]["epoch"], span["args"]["first_step"] + i)
        for span in windows
        for i in range(span["args"]["steps"])
        if span["args"]["phase"] == "TrainingPhase"
    ]
    assert steps == [(1 + (step > 25), step) for step in range(1, 51)]
    programs = Counter((e["name"], e["args"]["program"], e["args"]["steps_per_call"]) for e in windows)
    names = {("TrainingPhase: single steps", "loop", 1), ("ValidationPhase: single steps", "loop", 1)}
    if steps_per_call == 10:
        names.add(("TrainingPhase: window", "loop", 10))
    assert names <= programs.keys() <= names | {("ValidationPhase: window", "loop", 10)}
    times = [nanoseconds(e) for e in windows]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    # The device has had its window when its handlers run.
    assert [window_of(e) for e in windows] == [window_of(e) for e in spans(events, "replay")]
    assert [window_of(e) for e in windows] == [window_of(e) for e in spans(events, "dispatch")]
    for window, replay in zip(windows, spans(events, "replay"), strict=True):
        assert nanoseconds(window)[1] <= nanoseconds(replay)[0]
    if steps_per_call == 10:  # the next was dispatched before the handlers of one ran
        order = [e["cat"] for e in spans(events) if e["args"].get("phase") == "TrainingPhase" and "steps" in e["args"]]
        assert "dispatch dispatch wait replay" in " ".join(order)


def test_handlers_are_within_replay_of_their_step(tmp_path):
    learner = testlearner(EventLog(), batches=25, validation_batches=0, steps_per_call=10)
    events = trace(tmp_path / "trace.json", learner, {"epochs": 1})
    at = {"StepBegin": 1, "StepEnd": 0}  # finished steps are counted, and the step at hand is one more at its begin
    seen = []
    for span in spans(events, "replay"):
        began, ended = nanoseconds(span)
        inside = [e for e in spans(events, "handler") if began <= nanoseconds(e)[0] <= ended]
        steps = [e["args"]["step"] + at[e["args"]["event"]] for e in inside]
        first = span["args"]["first_step"]
        assert steps == [first + i for i in range(span["args"]["steps"]) for _ in range(2)]
        seen += steps
    assert seen == [step for step in range(1, 26) for _ in range(2)]


def test_arrows_connect_dispatch_device_and_handlers(tmp_path):
    validates = Validates()
    learner = testlearner(validates, EventLog(), batches=25, steps_per_call=10)
    validates.learner = learner
    events = trace(tmp_path / "trace.json", learner, {"epochs": 1})
    arrows = {}
    for position, event in enumerate(events):
        if event["ph"] in "stf":
            # Viewers bind an arrow to the span that began last on its track at that time.
            spans_before = [e for e in events[:position] if e["ph"] == "X" and e["tid"] == event["tid"]]
            assert spans_before[-1]["ts"] == event["ts"]
            arrows.setdefault(event["id"], []).append((event["ph"], spans_before[-1]))
    assert len(arrows) == len(spans(events, track="device")) > 5
    for ends in arrows.values():
        assert [letter for letter, _ in ends] == ["s", "t", "f"]
        assert [span["cat"] for _, span in ends] == ["dispatch", "device", "replay"]
        assert len({window_of(span) for _, span in ends}) == 1


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
def test_steps_stopped_by_traced_handler_are_not_on_device_track(tmp_path):
    batches = [
        (np.full((8, 1), np.nan if i == 17 else 1.0, np.float32), np.ones((8, 1), np.float32)) for i in range(40)
    ]
    learner = testlearner(StopOnNaNLoss(), EventLog(), data=batches, steps_per_call=10)
    events = trace(tmp_path / "trace.json", learner, {"epochs": 2})
    ran = [
        span["args"]["first_step"] + i for span in spans(events, track="device") for i in range(span["args"]["steps"])
    ]
    assert ran == list(range(1, 19)) == list(range(1, learner.step + 1))
    raised = [e for e in events if e.get("cat") == "raised"]
    assert [(e["ph"], e["name"], e["args"]["by"], e["args"]["step"]) for e in raised] == [
        ("i", "CancelFitting", "StopOnNaNLoss.cancel", 18)
    ]


# -- the file ------------------------------------------------------------------------------------


def test_trace_event_format(tmp_path):
    kinds = [
        Kind("X", 1, 'a "span"', "outer", {"who": "ä"}, ("n",)),
        Kind("i", 1, "now", "mark", {}, ("a", "b", "c")),
        Kind("s", 1, "window", "window", {}, ("window",)),
        Kind("f", 2, "window", "window", {}, ("window",)),
        Kind("X", 1, "inner", "inner", {}, ()),
    ]
    rows = array("d")
    for row in [
        (3, 10.25, 10.25, 7, 0, 0),
        (1, 10.25, 10.25, 1, 2, 3),
        (4, 10.0, 10.5, 0, 0, 0),  # inner, and as long as the outer one, which is recorded when it ends
        (0, 10.0, 10.5, 2**40, 0, 0),
        (2, 10.0, 10.0, 7, 0, 0),
    ]:
        rows.extend(row)
    path = tmp_path / "trace.json"
    save(path, kinds, rows, origin=9.999998, tracks={1: "host"}, dropped=3)
    assert path.read_text() == (
        '{"displayTimeUnit":"ms","otherData":{"dropped_events":3},"traceEvents":[\n'
        '{"name":"process_name","ph":"M","pid":1,"args":{"name":"fluxcb"}},\n'
        '{"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"host"}},\n'
        '{"name":"thread_sort_index","ph":"M","pid":1,"tid":1,"args":{"sort_index":1}},\n'
        '{"name":"a \\"span\\"","cat":"outer","ph":"X","pid":1,"tid":1,"ts":2.000,"dur":500000.000,'
        '"args":{"who":"\\u00e4","n":1099511627776}},\n'
        '{"name":"inner","cat":"inner","ph":"X","pid":1,"tid":1,"ts":2.000,"dur":500000.000,"args":{}},\n'
        '{"name":"window","cat":"window","ph":"s","pid":1,"tid":1,"ts":2.000,"id":7},\n'
        '{"name":"now","cat":"mark","ph":"i","pid":1,"tid":1,"s":"t","ts":250002.000,"args":{"a":1,"b":2,"c":3}},\n'
        '{"name":"window","cat":"window","ph":"f","pid":1,"tid":2,"bp":"e","ts":250002.000,"id":7}\n'
        "]}\n"
    )


def test_times_are_microseconds_since_start_and_tracks_have_names(tmp_path):
    events = trace(tmp_path / "trace.json", testlearner(EventLog()), {"epochs": 1})
    named = [(e["name"], e.get("tid"), e["args"]) for e in events if e["ph"] == "M"]
    assert named == [
        ("process_name", None, {"name": "fluxcb"}),
        ("thread_name", 1, {"name": "host"}),
        ("thread_sort_index", 1, {"sort_index": 1}),
        ("thread_name", 2, {"name": "device"}),
        ("thread_sort_index", 2, {"sort_index": 2}),
    ]
    times = [e["ts"] for e in events if e["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] >= 0
    (fit,) = spans(events, "fit")
    assert all(fit["ts"] <= t <= fit["ts"] + fit["dur"] for t in times)


def test_empty_timeline_is_written(tmp_path):
    events = trace(tmp_path / "trace.json", testlearner())
    assert {e["ph"] for e in events} == {"M"}


def test_gz_path_is_compressed(tmp_path):
    log = EventLog()
    events = trace(tmp_path / "trace.json.gz", testlearner(log), {"epochs": 1})
    assert len(spans(events, "handler")) == len(log.entries)
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert os.listdir(tmp_path) == ["trace.json.gz"]


@pytest.mark.parametrize("error", [ZeroDivisionError("0"), KeyboardInterrupt(), CancelFitting("enough")])
def test_timeline_is_written_after_error(tmp_path, error):
    path, log = tmp_path / "trace.json", EventLog()
    learner = testlearner(log, Raises(error), batches=9)
    path.write_text("what was there before")
    if isinstance(error, CancelFitting):
        events = trace(path, learner, {"epochs": 2})
    else:
        with pytest.raises(type(error)):
            trace(path, learner, {"epochs": 2})
        events = parse(path)["traceEvents"]
    assert os.listdir(tmp_path) == ["trace.json"]
    ancestors(events)
    assert sum(e["name"] == "EventLog.record" for e in spans(events)) == len(log.entries)
    raised = [e for e in events if e.get("cat") == "raised"]
    assert [(e["name"], e["args"]["by"], e["args"]["step"]) for e in raised] == [
        (type(error).__name__, "Raises.fail", 3)
    ]
    assert len(spans(events, "fit")) == len(spans(events, "epoch")) == 1
    assert_off(learner)


def test_timeline_is_written_after_ctrl_c(tmp_path):
    class Presses(Callback):
        @on
        def press(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 3:  # what the signal's handler does; tests/run/test_interrupts.py presses it
                pressed._core.engine.emitter.interrupt.requested = True

    learner = pressed = testlearner(Presses(), batches=50)
    with pytest.raises(KeyboardInterrupt):
        trace(tmp_path / "trace.json", learner, {"epochs": 2})
    events = parse(tmp_path / "trace.json")["traceEvents"]
    assert len([e for e in spans(events) if e["name"] == "Presses.press"]) == learner.step < 100
    assert_off(learner)


def test_failed_write_keeps_old_file_and_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "trace.json"
    path.write_text("what was there before")
    monkeypatch.setattr(trace_file.os, "replace", full)
    learner = testlearner(Raises(ZeroDivisionError("0")))
    with pytest.raises(ZeroDivisionError) as raised:
        trace(path, learner, {"epochs": 1})
    assert raised.value.__notes__[-1] == ("and the trace could not be written: [Errno 28] No space left on device")
    learner.callbacks.set([])
    with pytest.raises(OSError, match="No space left on device"):
        trace(path, learner, {"epochs": 1})
    assert os.listdir(tmp_path) == ["trace.json"]
    assert path.read_text() == "what was there before"
    assert_off(learner)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/trace.json", "No such file or directory"),
        ("file/trace.json", "Not a directory"),
        ("folder", "it is a folder"),
    ],
)
def test_unwritable_path_raises_before_training(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    log = EventLog()
    learner = testlearner(log)
    with pytest.raises(DeclarationError) as raised:
        trace(name, learner, {"epochs": 1})
    assert str(raised.value) == (
        f"The trace cannot be written to `{name}`: {reason}.\n"
        "  why:   the file is written when the `with` block ends, after all of the training\n"
        '  fix:   name a file in a folder that exists and may be written to, such as "trace.json" or "trace.json.gz"'
    )
    assert (log.entries, sorted(os.listdir(tmp_path))) == ([], ["file", "folder"])
    assert_off(learner)


def test_dropped_events_are_counted(tmp_path):
    path, log = tmp_path / "trace.json", EventLog()
    learner = testlearner(log, batches=50, steps_per_call=10)
    whole = trace(path, learner, {"epochs": 1})
    assert parse(path)["otherData"] == {"dropped_events": 0}
    log.entries.clear()
    events = trace(path, learner, {"epochs": 2}, max_events=40)
    dropped = parse(path)["otherData"]["dropped_events"]
    marks = [e for e in events if e.get("cat") == "trace"]
    assert [(e["ph"], e["name"]) for e in marks] == [
        ("i", "max_events=40 is reached: only fits, epochs and compilations from here on")
    ]
    kept = [e for e in events if e["ph"] != "M" and e["cat"] not in ("fit", "epoch", "compile", "trace")]
    assert len(kept) == 40
    handlers = [e["args"]["step"] for e in kept if e["cat"] == "handler"]
    assert handlers == [step for _, _, step, *_ in log.entries][: len(handlers)]
    assert len(log.entries) - len(handlers) < dropped < 2 * len(whole)
    assert [len(spans(events, category)) for category in ("fit", "epoch")] == [1, 4]
    ancestors(events)
    with pytest.raises(DeclarationError, match="`max_events` of `trace`"):
        trace(path, learner, max_events=0)


# -- turning it on and off -----------------------------------------------------------------------


def assert_off(learner):
    """Assert that tracing is off, and that windows run as before."""
    engine = learner._core.engine
    assert learner._state.meter.timeline is None
    for phase in learner.phases:
        for event in (FitBegin, StepBegin, StepEnd, EpochEnd):
            for call in engine.programs.plan.calls(event, type(phase)):
                assert call.function == call.handler.function
        assert engine.step_loop(phase)._spans is None


def test_tracing_changes_no_result_and_compiles_nothing(tmp_path):
    plain, traced = (testlearner(Metrics(), Recorder(), StopOnNaNLoss(), Looks(), batches=40) for _ in range(2))
    for learner in (plain, traced):
        learner.fit(1)
    counts = traced.compile_counts
    plain.fit(2)
    trace(tmp_path / "trace.json", traced, {"epochs": 2})
    assert traced.compile_counts == counts
    assert_off(traced)
    for learner in (plain, traced):
        learner.fit(1)
    assert traced.compile_counts == counts
    for name in ("w", "b"):
        np.testing.assert_array_equal(plain.params[name], traced.params[name])
    assert plain.cbstate["metrics_step"] == traced.cbstate["metrics_step"]
    assert plain.cbstate["metrics_epoch"] == traced.cbstate["metrics_epoch"]


def test_measuring_and_tracing_can_be_combined(tmp_path):
    log = EventLog()
    learner = testlearner(log, Looks(), batches=20, validation_batches=0)

    def calls():
        rows = {(row.handler, row.moment): row for row in learner.callbacks.timings()}
        look = rows["Looks().look", "StepEnd x TrainingPhase"]
        return rows["EventLog().record", "StepEnd x TrainingPhase"].calls, look.calls

    learner.callbacks.measure()
    learner.fit(1)
    with learner.callbacks.trace(tmp_path / "trace.json"):
        learner.fit(1)
        assert calls() == (40, 8)
        learner.callbacks.measure()  # from zero
        learner.fit(1)
        assert calls() == (20, 4)
        learner.callbacks.measure(False)
        learner.fit(1)
    assert calls() == (20, 4)
    events = parse(tmp_path / "trace.json")["traceEvents"]
    assert Counter(e["name"] for e in spans(events, "handler") if e["args"]["event"] == "StepEnd") == {
        "EventLog.record": 60,
        "Looks.look": 12,
    }
    assert_off(learner)
    learner.callbacks.measure()
    with learner.callbacks.trace(tmp_path / "trace.json"):
        learner.fit(1)
    learner.fit(1)  # measured still
    assert calls() == (40, 8)


def test_callbacks_replaced_during_trace_are_recorded(tmp_path):
    learner = testlearner(EventLog(), batches=3, validation_batches=0)
    with learner.callbacks.trace(tmp_path / "trace.json"):
        learner.fit(1)
        learner.callbacks.set([Looks(), log := EventLog()])
        learner.fit(1)
    events = parse(tmp_path / "trace.json")["traceEvents"]
    names = Counter(e["name"] for e in spans(events, "handler"))
    assert names == {"EventLog.record": 2 * len(log.entries), "Looks.look": 1, "Looks.end": 1}
    assert_off(learner)


def test_learner_without_batch_can_be_traced(tmp_path):
    log = EventLog()
    learner = testlearner(log, data=None)
    with learner.callbacks.trace(tmp_path / "trace.json"):
        learner.run_step(TrainingPhase(), (np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)))
    events = parse(tmp_path / "trace.json")["traceEvents"]
    assert [e["args"]["event"] for e in spans(events, "handler")] == ["StepBegin", "StepEnd"]
    assert [window_of(e) for e in spans(events, track="device")] == [("TrainingPhase", 1, 1)]
    assert [e["name"] for e in spans(events, "compile")] == [
        "trace the step of TrainingPhase",
        "compile the step of TrainingPhase",
    ]
    assert_off(learner)


def test_second_trace_raises_and_two_learners_are_independent(tmp_path):
    learner, other = testlearner(log := EventLog()), testlearner(EventLog(), batches=1)
    with learner.callbacks.trace(tmp_path / "trace.json"):
        with pytest.raises(DeclarationError) as raised:
            trace(tmp_path / "second.json", learner)
        trace(tmp_path / "other.json", other, {"epochs": 1})
        learner.fit(1)
    assert str(raised.value) == (
        "This Learner is already being traced.\n"
        "  why:   a Learner has one timeline\n"
        "  fix:   leave the other `with learner.callbacks.trace(...)` first"
    )
    assert sorted(os.listdir(tmp_path)) == ["other.json", "trace.json"]
    events = parse(tmp_path / "trace.json")["traceEvents"]
    assert len(spans(events, "handler")) == len(log.entries)
    assert_off(learner)


def test_tracing_during_fit_raises(tmp_path):
    class Traces(Callback):
        @on
        def start(self, event: EpochEnd, phase: TrainingPhase, _):
            with learner.callbacks.trace(tmp_path / "trace.json"):
                pass

    learner = testlearner(Traces())
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    assert str(raised.value) == (
        "Tracing cannot be turned on or off while the Learner is fitting.\n"
        "  why:   the plan of a running fit is fixed\n"
        "  fix:   enter `learner.callbacks.trace(...)` before `fit`"
    )
    assert os.listdir(tmp_path) == []


def test_timeline_is_written_after_data_source_error(tmp_path):
    class Fails:
        def __iter__(self):
            for _ in range(5):
                yield np.ones((8, 1), np.float32), np.ones((8, 1), np.float32)
            raise OSError("the disk is gone")

    learner = testlearner(log := EventLog(), data=Fails(), steps_per_call=2)
    with pytest.raises(OSError, match="the disk is gone"):
        trace(tmp_path / "trace.json", learner, {"epochs": 1})
    events = parse(tmp_path / "trace.json")["traceEvents"]
    ancestors(events)
    assert learner.step == 5 == sum(e["args"]["steps"] for e in spans(events, track="device"))
    assert len(spans(events, "handler")) == len(log.entries)
