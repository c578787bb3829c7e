"""The audit of order and windows: what they change is found, and not confused with anything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Append, Callback, NoConflict, Write, in_order, on
from fluxcb._tools.auditing import audit_learner
from fluxcb.callbacks import Recorder
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog, testlearner

# -- order -------------------------------------------------------------------------------------------------------------


class Places(Callback):
    """Multiply the gradients by its place among all that note theirs: Append() says that places do not matter."""

    def stateaccess(self):
        return {"step": {"grads": Write()}, "cbstate": {"places": Append()}}

    def init(self, learner):
        if "places" not in learner.cbstate:
            learner.cbstate.places = []
        learner.cbstate.places.append(type(self).__name__)
        self._place = len(learner.cbstate.places)

    @on(BackwardEnd, TrainingPhase, access={"step": {"grads": Write()}})
    def scale(self, event, phase, learner):
        learner.step.grads = jax.tree.map(lambda g: g * self._place, learner.step.grads)


class Notes(Callback):
    def stateaccess(self):
        return {"cbstate": {"places": Append()}}

    def init(self, learner):
        Places.init(self, learner)


ORDER_FIXES = (
    "  why:   what the callbacks compute hangs on their places in the list, and nothing declares that\n"
    "  fix:   state the order: `in_order(first, second)` or `runafter`\n"
    "     or: declare in `stateaccess` what they share, and keep it in `learner.cbstate`\n"
    "     or: give each callback of a class that draws random numbers a `name` of its own"
)


def test_a_result_that_hangs_on_the_order_of_the_list(audited, problems):
    problems(
        audited(Places, Notes),
        "CheckError: The train state after 2 steps is another one with the callbacks list turned round.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        f"{ORDER_FIXES}",
    )


def test_an_order_that_only_rotating_changes(audited, problems):
    # Turned round, the one in the middle stays there.
    problems(
        audited(Notes, Places, EventLog, EventLog, Notes),
        "CheckError: The train state after 2 steps is another one with the callbacks list rotated.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        f"{ORDER_FIXES}",
    )


class FirstWins(Callback):
    """Scale the gradients by what the first of its kind has put into `cbstate`, in the carry or on the host."""

    def __init__(self, scale, *, traced):
        self.scale, self.traced, self.name = scale, traced, f"wins {scale}"

    def stateaccess(self):
        return {"step": {"grads": Write()}, "cbstate": {"scale": Append()}}

    def resolveconflict(self, other):
        return NoConflict()

    def init(self, learner):
        if "scale" not in learner.cbstate:
            learner.cbstate.scale = jnp.float32(self.scale) if self.traced else self.scale
        self._seen = learner.cbstate.scale

    @on
    def multiply(self, event: BackwardEnd, phase: TrainingPhase, learner):
        scale = learner.cbstate.scale if self.traced else self._seen
        learner.step.grads = jax.tree.map(lambda g: g * scale, learner.step.grads)


@pytest.mark.parametrize("traced", [True, False])
def test_who_creates_shared_state_first_is_part_of_the_order(audited, traced):
    audit = audited(lambda: FirstWins(2.0, traced=traced), lambda: FirstWins(3.0, traced=traced))
    assert [problem.what for problem in audit.problems] == [
        "The train state after 2 steps is another one with the callbacks list turned round."
    ]
    assert audited(*[lambda: FirstWins(2.0, traced=traced)] * 2).problems == []


class Halves(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def change(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(self.changed, learner.step.grads)

    def changed(self, grad):
        return grad / 2


class Shifts(Halves):
    def changed(self, grad):
        return grad + 1


def test_a_stated_order_is_kept():
    assert audit_learner(lambda: testlearner(in_order(Places(), Notes()))).problems == []
    # The pair moves as a whole; only within it does order matter.
    assert audit_learner(lambda: testlearner(EventLog(), in_order(Halves(), Shifts()), Recorder())).problems == []


class Noise(Callback):
    """Add noise to the gradients; sums come in any order, but the keys are those of the first, and of the second."""

    def __init__(self, scale, name=None):
        self.scale, self.name = scale, name

    def stateaccess(self):
        return {"step": {"grads": Write()}}

    def resolveconflict(self, other):
        return NoConflict()

    @on
    def add(self, event: BackwardEnd, phase: TrainingPhase, learner):
        noise = jax.random.normal(learner.key) * self.scale
        learner.step.grads = {**learner.step.grads, "w": learner.step.grads["w"] + noise}


def test_two_of_one_class_that_draw_random_numbers_need_names(audited):
    assert len(audited(lambda: Noise(1.0), lambda: Noise(0.0)).problems) == 1
    assert audited(lambda: Noise(1.0, "loud"), lambda: Noise(0.0, "quiet")).problems == []


class AddsOne(Callback):
    """Set up twice, it does what it did a second time: another law, which order has nothing to do with."""

    def stateaccess(self):
        return {"params": Write()}

    def init(self, learner):
        learner.params = jax.tree.map(lambda p: p + 1, learner.params)


def test_an_init_that_does_not_like_a_second_time_is_not_taken_for_order(audited):
    assert audited(AddsOne, EventLog).problems == []


class FailsBehind(Callback):
    """Fails behind another callback, for a reason that nobody declares."""

    def stateaccess(self):
        return {"cbstate": {"places": Append()}}

    def init(self, learner):
        if "places" in learner.cbstate:
            raise RuntimeError("too late")  # too-late
        learner.cbstate.places = []


def test_a_set_that_another_order_breaks(audited, problems):
    problems(
        audited(FailsBehind, Notes),
        "CheckError: Building the Learner with the callbacks list turned round, which went well otherwise, raised "
        "RuntimeError: too late\n"
        "  where: init  <@too-late>\n"
        "         raised in the `init` of FailsBehind()",
    )


def test_a_training_that_differs_each_time_says_nothing_about_order(advice):
    draw = np.random.default_rng(0)  # goes on from Learner to Learner

    def make():
        xs = draw.normal(size=(2, 8, 1)).astype(np.float32)
        return testlearner(EventLog(), Recorder(), data=list(zip(xs, xs, strict=True)))

    advice(
        audit_learner(make),
        "The same training of 2 steps ends in another train state each time.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        "  why:   so nothing can be said about the order of the callbacks and about windows\n"
        "  fix:   seed what shuffles the data, and what initialises the model",
    )


# -- windows -----------------------------------------------------------------------------------------------------------


class Source:
    """Batches of a size that somebody may change meanwhile."""

    scale = 1.0

    def __iter__(self):
        for xs in np.linspace(1, 2, 24, dtype=np.float32).reshape(3, 8, 1):
            yield self.scale * xs, xs


class Shrinks(Callback):
    """Change the data source behind the Learner's back."""

    def __init__(self, source):
        self._source = [source]

    @on
    def shrink(self, event: StepEnd, phase: TrainingPhase, learner):
        self._source[0].scale /= 2


class ShrinksBySight(Shrinks):
    """The same, declared: windows wait for it."""

    def stateaccess(self):
        return {"data": {"training": Write()}}

    @on
    def shrink(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.data.training.scale /= 2


def shrinking(cls):
    def make():
        source = Source()
        return testlearner(cls(source), data=source)

    return audit_learner(make)


def test_a_result_that_hangs_on_windows(problems, no_clock):
    problems(
        shrinking(Shrinks),
        "CheckError: The train state after 3 steps is another one if 2 of them run in one window.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        "  why:   in a window the device is ahead of the handlers, which must not reach around their declarations\n"
        "  fix:   read and write through the handler's `learner` alone, and declare it in `stateaccess`",
    )
    assert shrinking(ShrinksBySight).problems == []


def test_the_learners_steps_run_in_windows_once_and_one_by_one_once(no_clock):
    learners = []

    def make():
        learners.append(testlearner(EventLog(), Recorder(), validation_batches=0))
        return learners[-1]

    assert audit_learner(make).problems == []
    ran = [
        (learner.step, learner._parts.engine.steps(learner.phases[0]).windows, len(learner.callbacks))
        for learner in learners
    ]
    # As it is; turned round, which for two is also rotated; one by one, beside a callback that may cancel; in windows.
    # EventLog saves its entries, so another one is built to restore them in.
    assert ran == [(2, 2, 2), (2, 2, 2), (0, 0, 2), (3, 3, 3), (3, 2, 2)]
