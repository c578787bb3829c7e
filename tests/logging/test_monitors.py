"""`Monitors` in a fit: when backends receive values, what survives failures, and the log of a resumed run."""

import errno
import gc
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fluxcb.logging
from fluxcb import Append, Callback, CancelFitting, CheckpointError, DeclarationError, MissingStateError, Read, on
from fluxcb.callbacks import Checkpointer, Metrics, Monitors
from fluxcb.events import EpochBegin, EpochEnd, FitBegin, FitEnd, StepBegin, StepEnd, Trigger
from fluxcb.logging import ConsoleBackend, CSVBackend, JSONLinesBackend, LoggerBackend, TensorBoardBackend, Value
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import check_callback, testlearner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ticking(monkeypatch):
    """Return a function that lets so many seconds pass whenever a schedule looks at the clock."""

    def ticking(seconds):
        times = itertools.count(0.0, seconds)
        monkeypatch.setattr("fluxcb._declare.schedules.time.monotonic", lambda: next(times))

    return ticking


class Puts(Callback):
    """Put what a table says: by event, and by step."""

    def __init__(self, table):
        self.table = table

    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    def put(self, event, learner):
        for name, value in self.table.get((type(event), learner.progress.step), {}).items():
            learner.cbstate.monitors.put_scalar(name, value)

    @on(FitBegin)
    def begin_fit(self, event, phase, learner):
        self.put(event, learner)

    @on(EpochBegin, TrainingPhase)
    def begin_epoch(self, event, phase, learner):
        self.put(event, learner)

    @on(StepBegin | StepEnd, TrainingPhase)
    def step(self, event, phase, learner):
        self.put(event, learner)

    @on(EpochEnd, TrainingPhase)
    def end_epoch(self, event, phase, learner):
        self.put(event, learner)

    @on(Trigger)
    def trigger(self, event, phase, learner):
        self.put(event, learner)

    @on(FitEnd)
    def end_fit(self, event, phase, learner):
        self.put(event, learner)


class LogLoss(Callback):
    """Put the loss of every step, and at each EpochEnd of the validation its mean."""

    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"monitors": Append(), "metrics_epoch": Read()}}

    @on(StepEnd, TrainingPhase, access={"step": {"loss": Read()}, "cbstate": {"monitors": Append()}})
    def step(self, event, phase, learner):
        learner.cbstate.monitors.put_scalar("loss", learner.step.loss)

    @on(EpochEnd, ValidationPhase, access={"cbstate": {"monitors": Append(), "metrics_epoch": Read()}})
    def epoch(self, event, phase, learner):
        learner.cbstate.monitors.put_scalar("validation/loss", learner.cbstate.metrics_epoch[phase].last("loss"))


class Fail(Callback):
    def __init__(self, step, error):
        self.step, self.error = step, error

    def stateaccess(self):
        return {"control": Append()}

    @on
    def fail(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == self.step:
            raise self.error


def lines(path):
    """Return the lines of a log without their times."""
    read = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "time"} for row in read]


# The example of tensorpack's JSONWriter, with its result (its `epoch_num` and `global_step` are ours): two epochs of
# three steps.
TABLE = {
    (FitBegin, 0): {"lr": 0.1},
    (StepEnd, 1): {"a": 1},
    (StepEnd, 3): {"a": 3},
    (Trigger, 3): {"b": 10},
    (StepEnd, 4): {"a": 4},
    (Trigger, 6): {"b": 20, "a": 4.5},
}
GOLDEN = [
    {"step": 0, "epoch": 0, "lr": 0.1},
    {"step": 1, "epoch": 1, "a": 1},
    {"step": 3, "epoch": 1, "a": 3, "b": 10},
    {"step": 4, "epoch": 2, "a": 4},
    {"step": 6, "epoch": 2, "b": 20, "a": 4.5},
]


@pytest.mark.parametrize("always_due", [True, False])
@pytest.mark.parametrize("monitors_first", [True, False])
def test_the_example_of_tensorpack_has_the_same_lines(tmp_path, ticking, always_due, monitors_first):
    if always_due:
        ticking(3.0)
    file = io.StringIO()
    monitors = Monitors(JSONLinesBackend(tmp_path / "log.jsonl"), ConsoleBackend(file=file))
    items = [monitors, Puts(TABLE)]
    learner = testlearner(*(items if monitors_first else items[::-1]), batches=3)
    learner.fit(2)
    assert lines(tmp_path / "log.jsonl") == GOLDEN
    assert file.getvalue().splitlines() == [
        "epoch 0, step 0  lr: 0.1",
        "epoch 1, step 3  a: 3  b: 10",
        "epoch 2, step 6  a: 4.5  b: 20",
    ]
    hub = learner.cbstate["monitors"]
    assert hub.history("a") == [(1, 1.0), (3, 3.0), (4, 4.0), (6, 4.5)]
    assert hub.names() == ["lr", "a", "b"]


def test_values_have_the_counters_of_their_moment(tmp_path):
    events = (FitBegin, EpochBegin, StepBegin, StepEnd, EpochEnd, Trigger, FitEnd)
    table = {(event, step): {event.__name__: step} for event in events for step in range(3)}
    testlearner(Monitors(JSONLinesBackend(tmp_path / "log.jsonl")), Puts(table), batches=1).fit(2)
    assert lines(tmp_path / "log.jsonl") == [
        {"step": 0, "epoch": 0, "FitBegin": 0},
        {"step": 0, "epoch": 1, "EpochBegin": 0, "StepBegin": 0},
        {"step": 1, "epoch": 1, "StepEnd": 1, "EpochEnd": 1, "Trigger": 1},
        {"step": 1, "epoch": 2, "EpochBegin": 1, "StepBegin": 1},
        {"step": 2, "epoch": 2, "StepEnd": 2, "EpochEnd": 2, "Trigger": 2},
        {"step": 2, "epoch": 2, "FitEnd": 2},
    ]


@pytest.mark.parametrize("error", [CancelFitting("enough"), RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("fail_first", [True, False])
def test_values_before_a_stop_are_written(tmp_path, error, fail_first):
    items = [Monitors(JSONLinesBackend(tmp_path / "log.jsonl")), Puts({(StepEnd, s): {"a": s} for s in range(9)})]
    fail = Fail(5, error)
    learner = testlearner(*([fail, *items] if fail_first else [*items, fail]), batches=3)
    if isinstance(error, CancelFitting):
        learner.fit(3)
    else:
        with pytest.raises(type(error)):
            learner.fit(3)
    # Who may cancel runs behind those who cannot, so step 5's value was put in either order.
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5]


def test_values_reach_the_file_while_an_epoch_runs(tmp_path, ticking, monkeypatch):
    seen = []

    class Look(Callback):
        def stateaccess(self):
            return {"cbstate": {"monitors": Read()}}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            seen.append(len((tmp_path / "log.jsonl").read_text().splitlines()))

    ticking(3.0)
    monkeypatch.setattr("fluxcb._run.program_runner.AHEAD", 1)
    monkeypatch.setattr("fluxcb._run.program_runner.LONGEST", 1)
    steps = Puts({(StepEnd, s): {"a": s} for s in range(50)})
    testlearner(Monitors(JSONLinesBackend(tmp_path / "log.jsonl")), steps, Look(), batches=40, steps_per_call=10).fit(1)
    assert seen[-1] >= 20
    assert len(lines(tmp_path / "log.jsonl")) == 40


def state_of(learner, monitors):
    return learner.state, monitors.state_dict()


@pytest.mark.parametrize("make", [JSONLinesBackend, CSVBackend])
@pytest.mark.parametrize("steps_per_call", [1, "auto"])
def test_the_log_of_a_resumed_run_equals_that_of_an_uninterrupted_run(tmp_path, make, steps_per_call):
    def built(path, *extra):
        monitors = Monitors(make(path))
        return testlearner(monitors, Metrics(), LogLoss(), *extra, steps_per_call=steps_per_call), monitors

    learner, monitors = built(tmp_path / "whole")
    for _ in range(4):
        learner.fit(1)
        whole_state = monitors.state_dict()

    learner, monitors = built(tmp_path / "parts")
    learner.fit(1)
    learner.fit(1)
    saved = state_of(learner, monitors)
    learner.callbacks.add(Fail(10, RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        learner.fit(2)
    monitors.close()
    with (tmp_path / "parts").open("a") as file:
        file.write('{"torn')

    learner, monitors = built(tmp_path / "parts")
    learner.state = saved[0]
    monitors.load_state_dict(saved[1])
    learner.fit(1)
    learner.fit(1)

    def without_times(path):
        if make is JSONLinesBackend:
            return lines(path)
        return [[cell for i, cell in enumerate(row.split(",")) if i != 2] for row in path.read_text().splitlines()]

    whole = without_times(tmp_path / "whole")
    assert without_times(tmp_path / "parts") == whole
    assert len(whole) == 16 + (make is CSVBackend)
    found = monitors.state_dict()["values"]
    assert [(name, v["steps"].tolist(), v["values"].tolist()) for name, v in found.items()] == [
        (name, v["steps"].tolist(), v["values"].tolist()) for name, v in whole_state["values"].items()
    ]
    assert len(found["loss"]["steps"]) == 16


def test_two_fits_share_a_log_even_after_close(tmp_path):
    monitors = Monitors(JSONLinesBackend(tmp_path / "log.jsonl"))
    learner = testlearner(monitors, Puts({(StepEnd, s): {"a": s} for s in range(99)}), batches=2)
    learner.fit(1)
    learner.fit(1)
    monitors.close()
    learner.fit(1)
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5, 6]


BACKENDS = {
    "log.jsonl": lambda folder: JSONLinesBackend(folder / "log.jsonl"),
    "log.csv": lambda folder: CSVBackend(folder / "log.csv"),
    "events": lambda folder: TensorBoardBackend(folder / "events"),
}


@pytest.fixture(params=BACKENDS)
def run(request, tmp_path):
    """Return a function that trains with a log in the same folder each time, and a function that lists the files."""
    if request.param == "events":
        pytest.importorskip("tensorboardX")

    def run(*callbacks, **fit):
        monitors = Monitors(BACKENDS[request.param](tmp_path))
        learner = testlearner(monitors, Puts({(StepEnd, s): {"a": s} for s in range(1, 99)}), *callbacks, batches=2)
        try:
            learner.fit(1, **fit)
        finally:
            monitors.close()
        return learner

    def files():
        found = sorted(path for path in tmp_path.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
        return {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in found}

    return run, files


def test_a_script_can_run_twice_and_keeps_both_logs(run):
    train, files = run
    train()
    [first] = files().values()
    train()
    after = files()
    assert len(after) == 2
    assert first in after.values()


def test_a_run_killed_before_its_first_checkpoint_can_be_started_again(run, tmp_path):
    train, files = run
    train()  # its log has values, and there is no checkpoint
    [killed] = files().values()
    learner = train(Checkpointer(tmp_path / "checkpoints"), resume=True)
    assert (learner.step, len(files())) == (2, 2)
    assert killed in files().values()


def test_a_run_that_cannot_begin_does_not_change_the_log(run, tmp_path):
    train, files = run
    train(Checkpointer(tmp_path / "checkpoints"))
    before = files()
    put = Puts({(FitBegin, 0): {"begin": 1}})
    put.name = "begin"
    with pytest.raises(CheckpointError, match="contains checkpoints of another run"):
        train(Checkpointer(tmp_path / "checkpoints"), put)
    assert files() == before


def test_a_rewind_removes_later_values_from_the_history(tmp_path):
    monitors = Monitors()
    learner = testlearner(monitors, Puts({(StepEnd, s): {"a": s} for s in range(99)}), batches=2)
    learner.fit(1)
    state = learner.state
    learner.fit(1)
    learner.state = state
    learner.fit(1)
    assert learner.cbstate["monitors"].history("a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


class Broken(LoggerBackend):
    loggables = (Value,)
    name = "Broken()"

    def log(self, name, loggable, *, step, epoch, seconds):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failing_backend_does_not_stop_the_training(tmp_path):
    monitors = Monitors(Broken(), JSONLinesBackend(tmp_path / "log.jsonl"))
    learner = testlearner(monitors, Puts(TABLE), batches=3)
    with pytest.warns(UserWarning, match=r"^Broken\(\) failed and is disabled for the rest of the fit") as caught:
        learner.fit(2)
    assert len(caught) == 1
    assert learner.step == 6
    assert lines(tmp_path / "log.jsonl") == GOLDEN


def test_hand_written_loops_also_log(tmp_path):
    monitors = Monitors(JSONLinesBackend(tmp_path / "log.jsonl"))
    learner = testlearner(monitors, Puts(TABLE), batches=3)
    for _ in range(2):
        learner.run_epoch(TrainingPhase())
        learner.trigger()
    assert lines(tmp_path / "log.jsonl") == GOLDEN[1:]


def test_the_last_values_of_a_hand_written_loop_are_written(tmp_path):
    monitors = Monitors(JSONLinesBackend(tmp_path / "log.jsonl"))
    learner = testlearner(monitors, Puts({(StepEnd, s): {"a": s} for s in range(9)}), batches=3)
    learner.run_epoch(TrainingPhase())
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [1, 2]
    monitors.close()
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [1, 2, 3]
    learner.run_epoch(TrainingPhase())
    backend = monitors.backends[0]
    del learner, monitors
    gc.collect()  # nothing else keeps the Learner alive
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert backend.state_dict() == {}  # it is closed


def test_two_monitors_are_an_error(tmp_path):
    one, other = Monitors(JSONLinesBackend("log.jsonl")), Monitors(ConsoleBackend())
    with pytest.raises(fluxcb.ConflictError) as error:
        fluxcb.check([one, other], default_callbacks=False)
    assert str(error.value) == (
        "The callbacks list contains more than one `Monitors`.\n"
        "  where: Monitors(JSONLinesBackend('log.jsonl'))\n"
        "         Monitors(ConsoleBackend())\n"
        "  why:   both would create `cbstate.monitors`, and callbacks can log to only one of them\n"
        "  fix:   pass all backends to one: `Monitors(JSONLinesBackend('log.jsonl'), ConsoleBackend())`"
    )
    fluxcb.check([Monitors(*one.backends, *other.backends)], default_callbacks=False)
    same = JSONLinesBackend(tmp_path / "log.jsonl")
    with pytest.raises(fluxcb.ConflictError) as error:
        testlearner(Monitors(same), Metrics(), Monitors(same))
    assert error.value.fix == (f"pass all backends to one: `Monitors({same!r})`",)


def test_another_callback_that_replaces_the_hub_is_an_error():
    class Replaces(Callback):
        def stateaccess(self):
            return {"cbstate": {"monitors": Append()}}

        def init(self, learner):
            learner.cbstate.monitors = {}

    with pytest.raises(DeclarationError) as error:
        testlearner(Monitors(), Replaces()).fit(1)
    assert str(error.value) == (
        "Another callback has replaced the `cbstate.monitors` that Monitors() created.\n"
        "  why:   the other callbacks log to the new one, so the backends would get no values\n"
        "  fix:   do not assign `learner.cbstate.monitors` in another callback"
    )


def test_a_replacement_keeps_the_logged_values(tmp_path):
    learner = testlearner(Monitors(), Puts({(StepEnd, s): {"a": s} for s in range(9)}), batches=2)
    learner.fit(1)
    learner.callbacks.replace(Monitors(JSONLinesBackend(tmp_path / "log.jsonl")))
    learner.fit(1)
    assert learner.cbstate["monitors"].history("a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert [row["step"] for row in lines(tmp_path / "log.jsonl")] == [3, 4]


def test_readers_run_after_writers_and_cannot_log():
    class Look(Callback):
        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"cbstate": {"monitors": Read()}}

        @on
        def look(self, event: Trigger, phase, learner):
            self.seen.append(learner.cbstate.monitors.latest("b"))
            with pytest.raises(fluxcb.AccessError, match=r"declares only to read `cbstate\.monitors`"):
                learner.cbstate.monitors.put_scalar("c", 1)

    look = Look()
    testlearner(look, Monitors(), Puts(TABLE), batches=3).fit(2)
    assert look.seen == [10.0, 20.0]


def test_a_name_that_was_never_logged_is_an_error():
    class Look(Callback):
        def stateaccess(self):
            return {"cbstate": {"monitors": Read()}}

        @on
        def look(self, event: Trigger, phase, learner):
            learner.cbstate.monitors.latest("bb")

    with pytest.raises(MissingStateError, match="Did you mean `b`"):
        testlearner(Look(), Monitors(), Puts(TABLE), batches=3).fit(1)


def test_readers_require_monitors():
    class Look(Callback):
        def stateaccess(self):
            return {"cbstate": {"monitors": Read()}}

        @on
        def look(self, event: Trigger, phase, learner): ...

    with pytest.raises(MissingStateError, match="add `Monitors\\(\\)` to the callbacks, which creates it"):
        testlearner(Look())


def test_it_passes_the_contract_test_with_backends(tmp_path):
    numbers = iter(range(99))
    check_callback(
        lambda: Monitors(JSONLinesBackend(tmp_path / f"{next(numbers)}.jsonl"), history=3),
        needs=[lambda: Puts({(StepEnd, s): {"a": s} for s in range(99)})],
        handles=["_group"],
    )


def test_it_does_not_shorten_windows_and_fetches_nothing():
    learner = testlearner(Monitors(ConsoleBackend(file=io.StringIO())), Puts(TABLE), batches=40)
    learner.fit(1)
    told = [line.split(maxsplit=2) for line in learner.explain_windows().splitlines()]
    assert [words[2] for words in told if words[:2] == ["ended", "by"]] == ["nothing", "nothing"]
    assert [words[1] for words in told if words[:1] == ["fetched"]] == ["nothing", "nothing"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Monitors("log.jsonl"), r"^`Monitors` takes backends, not 'log\.jsonl'\."),
        (lambda: Monitors(history=0), r"^The history of a name \(values\) must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_errors_at_once(make, message):
    with pytest.raises(DeclarationError, match=message):
        make()


TRAINING = """
import json, sys
import jax
jax.config.update("jax_compilation_cache_dir", None)
from fluxcb import Append, Callback, on
from fluxcb.callbacks import Monitors
from fluxcb.events import StepEnd
from fluxcb.logging import JSONLinesBackend
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

class Log(Callback):
    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("a", learner.progress.step)
        if learner.progress.step == 4000:
            print("running", flush=True)

testlearner(Monitors(JSONLinesBackend(sys.argv[1])), Log()).fit(10**6)
"""


def test_a_killed_training_leaves_whole_lines_without_a_gap(tmp_path):
    path = tmp_path / "log.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    backend = JSONLinesBackend(path)
    backend.open(resumes=True)
    backend.close()
    steps = [row["a"] for row in lines(path)]
    assert len(steps) > 3900
    assert steps == list(range(1, len(steps) + 1))
