"""Two callbacks that log under the same name: a warning, issued once per name, that names both."""

import copy
import pickle
import re
import warnings

import pytest

from fluxcb import Append, Callback, ThreadExecutor, Write, every, in_order, on
from fluxcb.callbacks import Monitors
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.logging import MonitorHub, Value
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Puts(Callback):
    """Put a value under some names at each step, twice."""

    def __init__(self, label, *names, access=None):
        self.label, self.names = label, names
        self.access = access or {"cbstate": {"monitors": Append()}}

    def stateaccess(self):
        return self.access

    @on
    def put(self, event: StepEnd, phase: TrainingPhase, learner):
        for name in self.names * 2:
            learner.cbstate.monitors.put_scalar(name, learner.progress.step)

    def __repr__(self):
        return f"Puts({self.label!r})"


class PutsLater(Puts):
    @on
    def put(self, event: EpochEnd, phase: TrainingPhase, learner):
        for name in self.names:
            learner.cbstate.monitors.put(name, Value(0.5))


def warned(learner, epochs=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(epochs)
    return [str(warning.message) for warning in caught]


def told(name, one, other):
    return (
        f"Two callbacks log `{name}`: {one} and {other}. The log mixes the values of both under this name. "
        "Give the values of one of them another name."
    )


def test_each_name_warns_once():
    learner = testlearner(Monitors(), Puts("a", "x", "y", "z"), Puts("b", "y", "x"), batches=3)
    assert warned(learner, 2) == [told("y", "Puts('a')", "Puts('b')"), told("x", "Puts('a')", "Puts('b')")]
    values = learner.cbstate["monitors"].history("x")
    assert values == [(step, float(step)) for step in range(1, 7) for _ in range(4)]  # nothing is lost


def test_a_single_callback_can_log_a_name_repeatedly():
    assert warned(testlearner(Monitors(), Puts("a", "x"), Puts("b", "y"))) == []


def test_two_instances_with_the_same_label_at_different_moments():
    learner = testlearner(
        Monitors(), Puts("a", "x"), PutsLater("a", "x"), Puts("a", "y"), every(Puts("a", "y"), steps=2)
    )
    assert warned(learner) == [
        told("y", "Puts('a') #3", "Puts('a') at EverySteps(steps=2)"),
        told("x", "Puts('a')", "Puts('a') #2"),
    ]


def test_access_to_the_whole_of_the_shared_state():
    learner = testlearner(Monitors(), in_order(Puts("a", "x"), Puts("b", "x", access={"cbstate": Write()})))
    assert warned(learner) == [told("x", "Puts('a')", "Puts('b')")]


def test_callbacks_on_threads_are_distinguished():
    callbacks = [Puts(str(number), f"x{number}", "shared") for number in range(2)]
    learner = testlearner(Monitors(), *callbacks, executor=ThreadExecutor(2))
    (text,) = warned(learner)
    assert re.fullmatch(re.escape(told("shared", "_", "_")).replace("_", r"Puts\('[01]'\)"), text)


def test_a_replacement_callback_can_use_the_same_names():
    learner = testlearner(Monitors(), Puts("a", "x"))
    assert warned(learner) == []
    learner.callbacks.replace(Puts("b", "x"))
    assert warned(learner) == []
    assert len(learner.cbstate["monitors"].history("x")) == 16


def test_values_logged_outside_callbacks_do_not_warn():
    learner = testlearner(Monitors(), Puts("a", "x"))
    hub = learner.cbstate["monitors"]
    hub.put_scalar("x", 1)
    assert warned(learner) == []
    hub.put_scalar("x", 1)


def test_the_view_of_a_hub_is_recognized_as_the_hub():
    hub = MonitorHub()
    used = hub.used_by("Puts('a')")
    used.follow(lambda: (3, 1))
    used.put_scalar("x", 0.5)
    assert isinstance(used, MonitorHub)
    assert used == hub
    assert hub.history("x") == used.history("x") == [(3, 0.5)]
    assert used.pending is hub.pending
    for other in (copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert type(other) is MonitorHub
        assert other == hub
        other.put_scalar("x", 1)
    assert hub.history("x") == [(3, 0.5)]
    with pytest.warns(UserWarning, match="^Two callbacks log `x`: Puts\\('a'\\) and other. "):
        hub.used_by("other").put_scalar("x", 1)
