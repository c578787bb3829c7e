"""Profiler: the profile contains exactly the requested steps."""

import gzip
import json
import os
import re
import threading
from pathlib import Path

import jax
import pytest

from fluxcb import Append, Callback, ConflictError, DeclarationError, Read, in_order, on
from fluxcb.callbacks import Profiler
from fluxcb.events import StepBegin, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def profiles(folder):
    return sorted(Path(folder).rglob("perfetto_trace.json.gz"))


def spans(file):
    """Return the spans of a profile: name, and arguments."""
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert "metadata" not in trace  # Perfetto does not take it
    return [(event["name"], event.get("args", {})) for event in trace["traceEvents"] if event.get("ph") == "X"]


def calls(file):
    """Return how often a compiled step, or window of steps, was run on CPU."""
    executed = [name for name, _ in spans(file) if name == "ThunkExecutor::Execute (wait for completion)"]
    # Counters that are set run a program, too.
    counters = [args for _, args in spans(file) if args.get("hlo_module") == "jit_convert_element_type"]
    return len(executed) - len(counters)


on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the names of spans are those of JAX on CPU")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


@on_cpu
@pytest.mark.parametrize(("first", "last"), [(1, 3), (10, 20), (7, 7), (38, 41), (79, 80)])
def test_the_profile_has_exactly_the_requested_steps(first, last, tmp_path):
    # One call of a program per step, up to 32 of them dispatched ahead: more would be seen if nothing waited.
    learner = testlearner(Profiler(tmp_path, (first, last)), batches=40, validation_batches=0, steps_per_call=1)
    learner.fit(2)
    (file,) = profiles(tmp_path)
    assert calls(file) == last - first + 1


@on_cpu
def test_windows_end_at_the_first_and_the_last_step(tmp_path, no_clock):
    class Windows(Callback):
        """Marks each step in the profile, where its handlers run."""

        @on
        def mark(self, event: StepEnd, phase: TrainingPhase, learner):
            with jax.profiler.TraceAnnotation(f"step {learner.progress.step}"):
                pass

    learner = testlearner(Profiler(tmp_path, (10, 21)), Windows(), batches=40, steps_per_call=8)
    learner.fit(1)
    (file,) = profiles(tmp_path)
    # Step 10 alone, because its StepBegin was waited for; then 8 steps; then 3.
    assert calls(file) == 3
    found = sorted(int(name[5:]) for name, _ in spans(file) if re.fullmatch(r"step \d+", name))
    assert found in ([*range(10, 21)], [*range(10, 22)])  # its own StepEnd may come before or after the mark's


@on_cpu
def test_the_profile_of_epochs_includes_the_validation_between_them(tmp_path):
    learner = testlearner(Profiler(tmp_path, epochs=(2, 3)), batches=4, validation_batches=2, steps_per_call=1)
    learner.fit(4)
    (file,) = profiles(tmp_path)
    assert calls(file) == 4 + 2 + 4


def test_the_profiler_does_not_change_the_training(tmp_path):
    plain, profiled = testlearner(batches=12), testlearner(Profiler(tmp_path, (3, 7)), batches=12)
    plain.fit(2)
    profiled.fit(2)
    assert plain.params == profiled.params


@on_cpu
def test_a_fit_that_ends_earlier_ends_the_profile(tmp_path):
    learner = testlearner(Profiler(tmp_path, (3, 100)), validation_batches=0, steps_per_call=1)
    learner.fit(1)
    (file,) = profiles(tmp_path)
    assert calls(file) == 2
    assert learner.cbstate["profiler"] is None
    learner.fit(1)  # its first step is over
    assert len(profiles(tmp_path)) == 1


class Fails(Callback):
    def __init__(self, step):
        self.step = step

    def stateaccess(self):
        return {"control": Append()}

    @on
    def fail(self, event: StepBegin, phase: TrainingPhase, learner):
        if learner.progress.step == self.step:
            raise RuntimeError("no")


@pytest.mark.parametrize(
    ("options", "end"), [({"steps": (9, 12)}, "step 8"), ({"epochs": (3, 3)}, "epoch 2")], ids=["steps", "epochs"]
)
def test_fit_that_ends_before_the_range_warns(options, end, tmp_path):
    profiler = Profiler(tmp_path, **options)
    learner = testlearner(profiler, batches=4)
    with pytest.warns(UserWarning, match="has recorded nothing") as caught:
        learner.fit(2)
    (warning,) = caught
    assert str(warning.message) == f"{profiler!r} has recorded nothing, because the fit ended after {end}."
    assert warning.filename == __file__
    assert profiles(tmp_path) == []
    learner.fit(1)  # the range is counted over the whole training
    assert len(profiles(tmp_path)) == 1


def test_an_error_ends_the_profile(tmp_path):
    learner = testlearner(Profiler(tmp_path, (1, 100)), Fails(3))
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(1)
    assert len(profiles(tmp_path)) == 1
    assert learner.cbstate["profiler"] is None


def test_other_callbacks_see_the_active_profile(tmp_path):
    class Sees(Callback):
        chief_only = True  # as the Profiler is

        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"cbstate": {"profiler": Read()}, "control": Append()}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            self.seen.append(learner.cbstate.profiler)

    sees = Sees()
    testlearner(sees, Profiler(tmp_path, (2, 3)), steps_per_call=1).fit(1)
    assert sees.seen == [None, str(tmp_path), None, None]


def test_two_profilers_conflict(tmp_path):
    with pytest.raises(ConflictError, match=r"both keep their values in `cbstate\.profiler`"):
        testlearner(Profiler(tmp_path / "a", (1, 2)), Profiler(tmp_path / "b", (3, 4)))


def test_two_profilers_one_after_the_other(tmp_path):
    both = in_order(Profiler(tmp_path / "a", (1, 2)), Profiler(tmp_path / "b", (3, 4)))
    testlearner(both).fit(1)
    assert [len(profiles(tmp_path / name)) for name in "ab"] == [1, 1]


def test_two_profilers_at_one_time(tmp_path, refused):
    text = (
        f"Profiler('b', steps=(2, 3)) cannot begin while another profile is being recorded ({tmp_path / 'a'}).\n"
        "  why:   JAX records one profile at a time\n"
        "  fix:   choose steps or epochs that do not overlap\n"
        "     or: remove one of the two"
    )
    learner = testlearner(in_order(Profiler(tmp_path / "a", (1, 4)), Profiler(tmp_path / "b", (2, 3))))
    with refused(DeclarationError, text):
        learner.fit(1)
    assert [len(profiles(tmp_path / name)) for name in "ab"] == [1, 0]


def test_another_active_profiler_is_an_error(tmp_path, refused):
    text = (
        "Profiler('b', steps=(2, 3)) cannot begin while another profile is being recorded (another profiler in "
        "this process).\n"
        "  why:   JAX records one profile at a time\n"
        "  fix:   choose steps or epochs that do not overlap\n"
        "     or: remove one of the two"
    )
    learner = testlearner(Profiler(tmp_path / "b", (2, 3)))
    with jax.profiler.trace(tmp_path / "a"), refused(DeclarationError, text):
        learner.fit(1)
    assert profiles(tmp_path) == []


def test_a_profile_that_cannot_be_written_does_not_end_the_training(tmp_path, monkeypatch):
    stop = jax.profiler.stop_trace

    def full():
        stop()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    learner = testlearner(Profiler(tmp_path, (2, 3)))
    text = f"Profiler('{tmp_path.name}', steps=(2, 3)) could not write the profile: OSError: [Errno 28] No space"
    with pytest.warns(UserWarning, match=re.escape(text)):
        learner.fit(1)
    monkeypatch.undo()
    assert learner.step == 4


def test_no_thread_or_profile_is_left(tmp_path):
    learner = testlearner(Profiler(tmp_path / "first", (2, 3)))
    learner.fit(1)
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    learner = testlearner(Profiler(tmp_path / "second", (2, 3)))
    learner.fit(1)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            ("p",),
            {},
            "`Profiler` takes exactly one of `steps` and `epochs`.\n"
            "  fix:   write e.g. `Profiler('profile', steps=(100, 120))`",
        ),
        (
            ("p", (1, 2)),
            {"epochs": (1, 2)},
            "`Profiler` takes exactly one of `steps` and `epochs`.\n"
            "  fix:   write e.g. `Profiler('profile', steps=(100, 120))`",
        ),
        (
            ("p", 10),
            {},
            "`steps` of `Profiler` must be a pair of the first and the last one, not 10.\n"
            "  fix:   write e.g. `steps=(10, 20)`",
        ),
        (
            ("p",),
            {"epochs": "ab"},
            "`epochs` of `Profiler` must be a pair of the first and the last one, not 'ab'.\n"
            "  fix:   write e.g. `epochs=(10, 20)`",
        ),
        (
            ("p", (20, 10)),
            {},
            "The first of the `steps` of `Profiler` is after the last: (20, 10).\n  fix:   write `steps=(10, 20)`",
        ),
        (
            ("p", (0, 10)),
            {},
            "Each of `steps` of `Profiler` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (("", (1, 2)), {}, "`Profiler` takes a path, not ''.\n  fix:   write e.g. \"runs/1/log.jsonl\""),
    ],
)
def test_profiler_rejects_invalid_arguments(arguments, options, text, refused):
    with refused(DeclarationError, text):
        Profiler(*arguments, **options)


def test_a_file_instead_of_a_folder_is_rejected(tmp_path, refused):
    (tmp_path / "file").touch()
    text = (
        f"`Profiler` cannot write to {tmp_path}/file: {tmp_path}/file is a file.\n"
        "  why:   without this check, training would fail at its beginning or later\n"
        "  fix:   name a folder that you may write to"
    )
    with refused(DeclarationError, text):
        Profiler(tmp_path / "file", (1, 2))
