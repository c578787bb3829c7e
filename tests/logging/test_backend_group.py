import errno
import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from fluxcb import Append, Callback, DeclarationError, on
from fluxcb._declare.extras import library
from fluxcb.callbacks import Monitors
from fluxcb.events import StepEnd
from fluxcb.logging import CSVBackend, Image, JSONLinesBackend, Loggable, LoggerBackend, Text, Value, log_to
from fluxcb.logging.backend_group import BackendGroup
from fluxcb.logging.hub import Put
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Notes(LoggerBackend):
    """Note what is called; fail where told to."""

    loggables = (Value,)

    def __init__(self, name, failing=(), error=None):
        self.name = name
        self.calls = []
        self.failing = failing
        self.error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def note(self, what, *args):
        self.calls.append((what, *args))
        if what in self.failing:
            raise self.error

    def open(self, *, resumes):
        self.note("open", resumes)

    def log(self, name, loggable, *, step, epoch, seconds):
        self.note("log", name, loggable.data, step, epoch, seconds)

    def flush(self):
        self.note("flush")

    def end_epoch(self, epoch):
        self.note("end_epoch", epoch)

    def close(self):
        self.note("close")

    def state_dict(self):
        self.note("state_dict")
        return {"calls": len(self.calls)}

    def load_state_dict(self, state):
        self.note("load_state_dict", state)


A = Put("a", Value(1.0), 3, 1, 9.0)


def test_each_backend_gets_everything_of_its_kinds_in_order():
    one, two = Notes("one"), Notes("two")
    group = BackendGroup([one, two])
    group.open(resumes=False)
    group.open(resumes=False)
    with pytest.warns(UserWarning, match="^`note` is a Text, which no backend takes: one, two"):
        group.send([A, Put("note", Text("x"), 3, 1, 9.5), Put("b", Value(2.0), 4, 1, 10.0)])
    group.send([])
    group.end_epoch(1)
    group.end_epoch(1)  # the fit's end: nothing came since
    group.close()
    group.close()
    assert one.calls == two.calls
    assert one.calls == [
        ("open", False),
        ("log", "a", 1.0, 3, 1, 9.0),
        ("log", "b", 2.0, 4, 1, 10.0),
        ("flush",),
        ("end_epoch", 1),
        ("state_dict",),
        ("close",),
    ]


@pytest.mark.parametrize("failing", ["open", "log", "flush", "end_epoch", "state_dict", "close"])
def test_a_backend_that_fails_warns_once_and_the_other_goes_on(failing):
    bad, good = Notes("bad", {failing, "close"}), Notes("good")
    group = BackendGroup([bad, good])

    def run():
        group.open(resumes=False)
        for _ in range(2):
            group.send([A])
            group.end_epoch(1)
            group.state_dict()
        group.close()

    with pytest.warns(UserWarning, match="^bad failed") as caught:
        run()
    assert [str(warning.message) for warning in caught] == [
        "bad failed and is disabled for the rest of the fit: OSError: [Errno 28] No space left on device"
    ]
    assert len(good.calls) == 1 + 2 * 4 + 2
    after = bad.calls[[call[0] for call in bad.calls].index(failing) + 1 :]
    assert after == ([] if failing == "close" else [("close",)])  # nothing more is asked of it than to let go


def test_what_the_user_has_to_decide_is_an_error():
    bad = Notes("bad", {"open"}, DeclarationError("There is a log already."))
    good = Notes("good")
    group = BackendGroup([good, bad])
    for _ in range(2):
        with pytest.raises(DeclarationError, match="There is a log already"):
            group.open(resumes=False)
    bad.failing = ()
    group.open(resumes=False)
    assert good.calls == [("open", False)]
    assert bad.calls == [("open", False)] * 3


def test_interrupts_fly_through():
    group = BackendGroup([Notes("bad", {"log"}, KeyboardInterrupt())])
    group.open(resumes=False)
    with pytest.raises(KeyboardInterrupt):
        group.send([A])


def test_opened_again_it_goes_on():
    notes = Notes("notes")
    group = BackendGroup([notes])
    group.open(resumes=False)
    group.close()
    assert group.state_dict() == {"notes": {"calls": 2}}
    group.open(resumes=False)
    assert notes.calls == [("open", False), ("state_dict",), ("close",), ("open", True)]


def test_states_go_to_the_backends_of_the_same_name():
    notes, new = Notes("notes"), Notes("new")
    group = BackendGroup([notes, new])
    group.load_state_dict({"notes": {"calls": 7}, "gone": {"calls": 9}})
    assert group.state_dict() == {"notes": {"calls": 7}, "gone": {"calls": 9}}
    group.open(resumes=False)
    assert notes.calls == [("load_state_dict", {"calls": 7}), ("open", True)]
    assert new.calls == [("load_state_dict", {}), ("open", True)]


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        (
            ["log.jsonl"],
            "`Monitors` takes backends, not 'log.jsonl'.\n"
            '  fix:   write e.g. `Monitors(JSONLinesBackend("log.jsonl"))`',
        ),
        (
            [Notes],
            "`Monitors` takes backends, not the class Notes.\n"
            '  fix:   write e.g. `Monitors(JSONLinesBackend("log.jsonl"))`',
        ),
        (
            [Notes("a"), Notes("a")],
            "Two backends are called a.\n"
            "  why:   they would write to the same place, and their states are stored by name\n"
            "  fix:   remove one of them, or give it another place",
        ),
    ],
)
def test_what_are_no_backends_is_refused(backends, message):
    with pytest.raises(DeclarationError) as error:
        BackendGroup(backends)
    assert str(error.value) == message


def test_backends_of_one_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeclarationError) as error:
        BackendGroup([JSONLinesBackend("log"), CSVBackend(tmp_path / "folder" / ".." / "log")])
    assert str(error.value) == (
        f"JSONLinesBackend('log') and CSVBackend('{tmp_path}/folder/../log') write to the same place, "
        f"{tmp_path.resolve()}/log.\n"
        "  why:   each of them would damage what the other has written\n"
        "  fix:   use another path for one of them"
    )
    BackendGroup([JSONLinesBackend("log.jsonl"), CSVBackend("log.csv")])


def test_log_to_logs_to_those_that_take_it(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 5.0)
    one, two = Notes("one"), Notes("two")
    log_to([one, two], "a", Value(1), step=3)
    log_to(one, "b", Value(2), step=4, epoch=2)
    log_to(one, "note", Text("x"), step=4)
    assert one.calls == [("log", "a", 1.0, 3, 0, 5.0), ("log", "b", 2.0, 4, 2, 5.0)]
    assert two.calls == [("log", "a", 1.0, 3, 0, 5.0)]
    with pytest.raises(
        DeclarationError, match=r"^`log_to` logs a Value, Text, Image or another loggable, not float 1\.0"
    ):
        log_to(one, "a", 1.0, step=1)
    with pytest.raises(
        DeclarationError,
        match=r"^`log_to` logs to backends, but 3 is not a backend\.\n  fix:   write e\.g\. `JSON",
    ):
        log_to([one, 3], "a", Value(1), step=1)


def test_with_opens_and_closes():
    notes = Notes("notes")
    with notes as backend:
        assert backend is notes
    assert notes.calls == [("open", False), ("flush",), ("close",)]


def test_only_log_must_be_defined():
    class Last(LoggerBackend):
        loggables = (Image, Value)
        name = "last"

        def log(self, name, loggable, *, step, epoch, seconds):
            self.seen = name

    group = BackendGroup([backend := Last()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group.open(resumes=False)
        group.send([A])
        group.end_epoch(1)
        group.load_state_dict(group.state_dict())
    assert backend.seen == "a"
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (LoggerBackend,), {})()


def test_a_library_that_is_missing_is_an_error_with_the_command(monkeypatch):
    with pytest.raises(DeclarationError) as error:
        library("no_such_library.part", extra="wandb", owner="WandbBackend")
    assert str(error.value) == (
        "`WandbBackend` needs the package `no_such_library`, which is not installed.\n"
        "  fix:   `pip install 'fluxcb[wandb]'`"
    )


def test_a_library_that_misses_another_says_so(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        library("half_there", extra="wandb", owner="WandbBackend")


# -- values that no backend takes --------------------------------------------------------------------------------------


class Images(Callback):
    """Log an image after each step."""

    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_image("im", np.zeros((4, 4, 3), np.uint8))
        learner.cbstate.monitors.put_scalar("a", 1.0)


def test_image_that_no_backend_takes_is_reported_once(tmp_path):
    one, two = JSONLinesBackend(tmp_path / "x.jsonl"), CSVBackend(tmp_path / "x.csv")
    learner = testlearner(Images(), Monitors(one, two), batches=3)
    with pytest.warns(UserWarning, match="no backend takes") as caught:
        learner.fit(2)
    assert [str(warning.message) for warning in caught] == [
        f"`im` is an Image, which no backend takes: {one.name}, {two.name}. Values of this type are not written.\n"
        "  fix:   add a backend that takes them to `Monitors`: `TensorBoardBackend`, `CometBackend`, `MLflowBackend` "
        "or `WandbBackend`"
    ]
    learner.fit(1)  # without another warning, which would be an error


class ImageBackend(Notes):
    loggables = (Image,)


def test_one_backend_that_takes_images_is_enough(tmp_path):
    images = ImageBackend("images")
    learner = testlearner(Images(), Monitors(JSONLinesBackend(tmp_path / "x.jsonl"), images), batches=3)
    learner.fit(1)  # warnings are errors
    assert [name for what, name, *_ in (call for call in images.calls if call[0] == "log")] == ["im"] * 3


def test_without_backends_nothing_is_reported():
    testlearner(Images(), Monitors(), batches=3).fit(1)


def test_type_of_value_that_only_own_backends_can_take():
    class Video(Loggable):
        pass

    group = BackendGroup([Notes("one")])
    group.open(resumes=False)
    with pytest.warns(UserWarning, match="with Video in its `loggables`$"):
        group.send([Put("clip", Video(), 1, 1, 0.0)])


def test_processes_that_open_no_backend_report_nothing(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    group = BackendGroup([Notes("one")])
    group.open(resumes=False)
    group.send([Put("text", Text("a"), 1, 1, 0.0)])


def test_a_moved_log_keeps_its_saved_position(tmp_path):
    """A backend is named by its path, which differs if the run was moved, or if the program spells it otherwise."""

    def group(path):
        return BackendGroup([JSONLinesBackend(path)])

    def log(group, steps):
        group.send([Put("loss", Value(float(step)), step, 1, 0.0) for step in steps])

    first = group(tmp_path / "a" / "log.jsonl")
    first.open(resumes=False)
    log(first, [1, 2])
    saved = first.state_dict()
    log(first, [3])
    first.close()
    (tmp_path / "a").rename(tmp_path / "b")
    again = group(tmp_path / "b" / "log.jsonl")
    again.load_state_dict(saved)
    again.open(resumes=True)
    log(again, [3, 4])
    again.close()
    lines = (tmp_path / "b" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


LOOP = """
import sys
import numpy as np
from fluxcb.callbacks import Checkpointer, LogMetrics, Metrics, Monitors
from fluxcb.logging import CSVBackend
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

learner = testlearner(Metrics(), LogMetrics(), Monitors(CSVBackend("log.csv")), Checkpointer("run"))
if sys.argv[1] == "restore":
    learner.restore("run/4")
for _ in range(int(sys.argv[2])):
    learner.run_step(TrainingPhase(), (np.ones((8, 1), np.float32), np.ones((8, 1), np.float32)))
if sys.argv[1] == "fit":
    learner.fit(2)
"""


@pytest.mark.long
def test_values_of_a_short_loop_are_in_the_log_after_the_program(tmp_path):
    log = tmp_path / "log.csv"

    def run(*arguments):
        subprocess.run([sys.executable, "-c", LOOP, *arguments], cwd=tmp_path, check=True)
        return log.read_text() if log.exists() else ""

    assert [line.partition(",")[0] for line in run("loop", "3").splitlines()] == ["step", "1", "2", "3"]
    log.unlink()
    whole = run("fit", "0")
    # A program that restores an earlier checkpoint and trains nothing leaves the log of the run as it is.
    assert run("restore", "0") == whole != ""
