"""Fields of callbacks that change during training and are not saved: a resumed run names them in a warning."""

import random
import re
import warnings
from typing import ClassVar

import numpy as np
import pytest

from fluxcb import Callback, on
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import ResumeWarning
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Changing(Callback):
    """Applies a function to its field at each step."""

    def __init__(self, change, value=None, unit="s"):
        self.change, self.value, self.unit = change, value, unit
        self.steps = 0

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.value = self.change(self.value)


class Counting(Changing):
    """Changes a second field as well."""

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.value, self.steps = self.change(self.value), self.steps + 1


class Saving(Changing):
    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class SavingNothing(Changing):
    def state_dict(self):
        return {}


def more(value):
    return value + 1


def appended(values):
    return [*values, 1.0]


def learner(folder, callback):
    return testlearner(callback, Checkpointer(folder), batches=2)


def notes_after(folder, make, resumed=None, **how):
    """Return the ResumeWarnings of a run that is resumed with new objects."""
    learner(folder, make()).fit(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner(folder, (resumed or make)()).fit(2, resume=True, **how)
    assert all(warning.category is ResumeWarning for warning in caught)
    return [str(warning.message).partition(" with differences:")[2].strip() for warning in caught]


def drawn(generator):
    generator.random()
    return generator


def filled(array):
    array[0] += 1
    return array


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (more, lambda: 0),
        (more, lambda: np.float32(0)),
        (lambda text: text + "x", lambda: ""),
        (appended, list),
        (lambda pairs: [*pairs, (1, object())], list),
        (lambda counts: {**counts, "a": counts.get("a", 0) + 1}, dict),
        (lambda names: names | {"a"}, set),
        (filled, lambda: np.zeros(2)),
        (drawn, lambda: np.random.default_rng(0)),
        (drawn, lambda: random.Random(0)),
    ],
    ids=["int", "scalar", "str", "list", "pairs", "dict", "set", "array", "generator", "Random"],
)
def test_changed_field_is_named(tmp_path, change, first):
    made = notes_after(tmp_path, lambda: Changing(change, first()))
    assert made == [
        "callbacks.Changing: the field `value` starts from the initial value, because `Changing` has no `state_dict`"
    ]


class OfClass(Callback):
    """The initial values of the fields are in the class."""

    count = 0
    seen: ClassVar[list[int]] = []
    limit = 10

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.count += 1
        self.seen.append(self.count)


def test_changed_fields_of_the_class_are_named(tmp_path):
    def make():
        OfClass.seen.clear()  # as in a new process
        return OfClass()

    assert notes_after(tmp_path, make) == [
        "callbacks.OfClass: the fields `count`, `seen` start from their initial values, because `OfClass` has no "
        "`state_dict`"
    ]


def test_several_fields_are_named(tmp_path):
    assert notes_after(tmp_path, lambda: Counting(more, 0)) == [
        "callbacks.Counting: the fields `value`, `steps` start from their initial values, because `Counting` has no "
        "`state_dict`"
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Saving(more, 0),
        lambda: SavingNothing(more, 0),
        lambda: Changing(lambda value: value, 0),
        lambda: Changing(lambda names: {*list(names)[::-1]}, {str(number) for number in range(20)}),
        lambda: Changing(lambda value: object()),
    ],
    ids=["saved", "nothing to save", "unchanged", "set in another order", "object"],
)
def test_other_fields_are_not_named(tmp_path, make):
    assert notes_after(tmp_path, make) == []


def test_allowed_callback_is_not_named(tmp_path):
    assert notes_after(tmp_path, lambda: Changing(more, 0), allow=("callbacks",)) == []


def test_field_of_changed_argument_is_reported_once(tmp_path):
    [note] = notes_after(tmp_path, lambda: Changing(more, 0), lambda: Changing(more, 0, unit="ms"))
    named, change = note.split("\n", 1)
    assert named.startswith("callbacks.Changing: the field `value` starts from the initial value")
    assert re.search(r"callbacks\.Changing\.unit.*'s'.*'ms'", change)


class Twice(Changing):
    """A field depends on an argument, and training does not change it."""

    def __init__(self, count):
        super().__init__(lambda value: value)
        self.twice = [2 * count]


def test_field_that_depends_on_changed_argument_is_not_named(tmp_path):
    [note] = notes_after(tmp_path, lambda: Twice(1), lambda: Twice(2))
    assert "starts from" not in note
    assert re.search(r"callbacks\.Twice\.count +1 +2", note)


def test_run_that_continues_in_its_process_keeps_its_fields(tmp_path):
    callback = Changing(more, 0)
    continued = learner(tmp_path, callback)
    continued.fit(1)
    continued.fit(2, resume=True)
    assert callback.value == 4
