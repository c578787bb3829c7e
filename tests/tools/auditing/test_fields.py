"""The audit of callback fields finds state that is not saved, and ignores other fields."""

import io
import sys
import threading
import time

import numpy as np
import pytest

from fluxcb import Callback, Read, every, in_order, on
from fluxcb._tools.auditing import audit_learner
from fluxcb._tools.copying import fresh_callbacks
from fluxcb.events import FitBegin, FitEnd, StepEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import EventLog, testlearner

RESUMED = "a run that resumes from a checkpoint would differ from an uninterrupted run"


# -- fields ------------------------------------------------------------------------------------------------------------


class Counter(Callback):
    def __init__(self):  # counter
        self.steps = 0

    @on
    def count(self, event: StepEnd, phase: TrainingPhase, learner):
        self.steps += 1


class SavedCounter(Counter):
    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):  # saved-counter
        self.steps = state["steps"]


class HalfSavedCounter(SavedCounter):
    def load_state_dict(self, state):  # half-saved-counter
        pass


class UnloadableCounter(SavedCounter):
    def load_state_dict(self, state):
        raise TypeError("version 2 needed")  # unloadable-counter


class Keeps(Callback):
    """Keep plain data of all kinds, and a class attribute."""

    best = None

    def __init__(self):  # keeps
        self.losses = []
        self.mean = np.zeros(2)

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.losses.append(int(learner.progress.step))
        self.mean = self.mean + 1
        self.best = float(learner.step.loss) > 0


@pytest.mark.parametrize("wrap", [lambda callback: callback, lambda callback: every(callback, steps=1)])
def test_unsaved_field_is_reported(audited, problems, wrap):
    label = repr(wrap(Counter()))
    problems(
        audited(lambda: wrap(Counter())),
        f"CheckError: {label} changes its field `steps` during training (from 0 to 2), and does not save it.\n"
        "  where: Counter.__init__  <@counter>\n"
        f"  why:   {RESUMED}\n"
        "  fix:   return it from `state_dict`, and assign it in `load_state_dict`\n"
        "     or: keep it in `learner.cbstate`",
    )


def test_saved_field_is_accepted(audited):
    assert audited(SavedCounter).problems == []


def test_incomplete_load_state_dict_is_reported(audited, problems):
    problems(
        audited(HalfSavedCounter),
        "CheckError: `load_state_dict` of HalfSavedCounter() does not restore the values that its `state_dict` "
        "returns.\n"
        "  where: HalfSavedCounter.load_state_dict  <@half-saved-counter>\n"
        f"  why:   {RESUMED}\n"
        "  fix:   assign all values that `state_dict` returns",
        "CheckError: HalfSavedCounter() changes its field `steps` during training (from 0 to 2), and does not save "
        "it.\n"
        "  where: HalfSavedCounter.load_state_dict  <@half-saved-counter>\n"
        f"  why:   {RESUMED}\n"
        "  fix:   return it from `state_dict`, and assign it in `load_state_dict`\n"
        "     or: keep it in `learner.cbstate`",
    )
    problems(
        audited(UnloadableCounter),
        "CheckError: `load_state_dict(state_dict())` of UnloadableCounter() raised TypeError: version 2 needed\n"
        "  where: load_state_dict  <@unloadable-counter>",
    )


def test_all_kinds_of_plain_data_are_state(audited):
    changes = "Keeps() changes its field `{}` during training (from {} to {}), and does not save it."
    assert [problem.what for problem in audited(Keeps).problems] == [
        changes.format("losses", "[]", "[1, 2]"),
        changes.format("mean", "array([0., 0.])", "array([2., 2.])"),
        changes.format("best", "None", "True"),
    ]


class Table:
    """Compare element by element and have no truth value, like tables and tensors of other libraries."""

    dtype = "theirs"

    def __eq__(self, other):
        return np.ones(2, bool)

    __hash__ = None


class Meter:
    """A user object whose contents are not inspected."""

    def __init__(self):
        self.value = 0


class Objects(Callback):
    def __init__(self):
        self.table, self.meter = Table(), Meter()

    @on
    def fill(self, event: StepEnd, phase: TrainingPhase, learner):
        self.table = Table()
        self.meter.value += 1


def test_objects_are_not_inspected():
    assert audit_learner(lambda: testlearner(Objects())).problems == []


class Handles(Callback):
    """Keep changing fields that are not state: clocks, a file, a lock, and objects that hold them."""

    def __init__(self):
        self.began = 0.0
        self.ended = 0
        self.lock = None
        self.file = None
        self.timer = None

    @on
    def begin(self, event: FitBegin, phase: Phase, learner):
        self.began = time.perf_counter()
        self.unique = [time.time_ns()]
        self.lock, self.file, self.timer = threading.Lock(), io.StringIO(), threading.Timer(1e9, print)

    @on
    def end(self, event: FitEnd, phase: Phase, learner):
        self.ended = time.time_ns()


def test_clocks_files_and_locks_are_not_state(audited):
    assert audited(Handles).problems == []


# -- copies ------------------------------------------------------------------------------------------------------------


def test_copying_list_does_not_change_it():
    shared = {"hits": []}
    first, second = Counter(), Keeps()
    first.shared = second.shared = shared
    items = [in_order(first, every(second, steps=1)), EventLog()]
    learner = testlearner(*items)  # the originals belong to it

    audit = audit_learner(lambda: testlearner(*fresh_callbacks(items)))
    assert [problem.what.split(" during")[0] for problem in audit.problems] == [
        "Counter() changes its field `steps`",
        *(f"Keeps() at EverySteps(steps=1) changes its field `{name}`" for name in ("losses", "mean", "best")),
    ]
    assert (learner.step, first.steps, second.losses, second.best) == (0, 0, [], None)

    group, log = fresh_callbacks(items)
    one, other = group
    assert [type(c) for c in (one, other.callback, log)] == [Counter, Keeps, EventLog]
    assert one.shared is other.callback.shared
    assert one.shared is not shared
    assert one.shared == shared


def test_uncopyable_fields_are_shared():
    callback = Counter()
    callback.open = [sys.stdout, {"lock": threading.Lock()}]
    callback.pair = (callback, np.zeros(2))
    (copied,) = fresh_callbacks([callback])
    assert copied.open is not callback.open
    assert copied.open[0] is callback.open[0]
    assert copied.open[1] is not callback.open[1]
    assert copied.open[1]["lock"] is callback.open[1]["lock"]
    assert copied.pair[0] is copied
    assert copied.pair[1] is not callback.pair[1]
