"""The audit finds results that depend on the list order or on windows, and nothing else."""

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
    """Multiply the gradients by the position of the callback, although it declares Append(), which ignores order."""

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
    "  why:   the results of the callbacks depend on their order in the list, and nothing declares this order\n"
    "  fix:   declare the order with `in_order(first, second)` or `runafter`\n"
    "     or: keep shared state in `learner.cbstate`, and declare it in `stateaccess`\n"
    "     or: if several callbacks of one class draw random numbers, give each its own `name`"
)


def test_result_that_depends_on_list_order_is_reported(audited, problems):
    problems(
        audited(Places, Notes),
        "CheckError: The train state after 2 steps differs with the callbacks list reversed.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        f"{ORDER_FIXES}",
    )


def test_order_changed_only_by_rotation_is_reported(audited, problems):
    # Turned round, the one in the middle stays there.
    problems(
        audited(Notes, Places, EventLog, EventLog, Notes),
        "CheckError: The train state after 2 steps differs with the callbacks list rotated.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        f"{ORDER_FIXES}",
    )


class FirstWins(Callback):
    """Scale the gradients by the value that the first instance has put into `cbstate`, in the carry or on the host."""

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
def test_creation_order_of_shared_state_is_part_of_order(audited, traced):
    audit = audited(lambda: FirstWins(2.0, traced=traced), lambda: FirstWins(3.0, traced=traced))
    assert [problem.what for problem in audit.problems] == [
        "The train state after 2 steps differs with the callbacks list reversed."
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


def test_declared_order_is_kept():
    assert audit_learner(lambda: testlearner(in_order(Places(), Notes()))).problems == []
    # The pair moves as a whole; only within it does order matter.
    assert audit_learner(lambda: testlearner(EventLog(), in_order(Halves(), Shifts()), Recorder())).problems == []


class Noise(Callback):
    """Add noise to the gradients. The order of the sums does not matter, but the order of the keys does."""

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


def test_two_random_instances_of_one_class_need_names(audited):
    assert len(audited(lambda: Noise(1.0), lambda: Noise(0.0)).problems) == 1
    assert audited(lambda: Noise(1.0, "loud"), lambda: Noise(0.0, "quiet")).problems == []


class AddsOne(Callback):
    """Run differently after a second `init`, which violates another law but does not depend on order."""

    def stateaccess(self):
        return {"params": Write()}

    def init(self, learner):
        learner.params = jax.tree.map(lambda p: p + 1, learner.params)


def test_failing_second_init_is_not_reported_as_order(audited):
    assert audited(AddsOne, EventLog).problems == []


class FailsBehind(Callback):
    """Fail after another callback for an undeclared reason."""

    def stateaccess(self):
        return {"cbstate": {"places": Append()}}

    def init(self, learner):
        if "places" in learner.cbstate:
            raise RuntimeError("too late")  # too-late
        learner.cbstate.places = []


def test_error_in_other_order_is_reported(audited, problems):
    problems(
        audited(FailsBehind, Notes),
        "CheckError: Building the Learner with the callbacks list reversed, which succeeded otherwise, raised "
        "RuntimeError: too late\n"
        "  where: init  <@too-late>\n"
        "         raised in the `init` of FailsBehind()",
    )


def test_nondeterministic_training_is_not_reported_as_order(advice):
    draw = np.random.default_rng(0)  # goes on from Learner to Learner

    def make():
        xs = draw.normal(size=(2, 8, 1)).astype(np.float32)
        return testlearner(EventLog(), Recorder(), data=list(zip(xs, xs, strict=True)))

    advice(
        audit_learner(make),
        "The same training of 2 steps ends with a different train state each time.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        "  why:   the audit therefore cannot check the order of the callbacks and the windows\n"
        "  fix:   seed the shuffling of the data and the initialization of the model",
    )


# -- windows -----------------------------------------------------------------------------------------------------------


class Source:
    """Yield batches whose size may change during the pass."""

    scale = 1.0

    def __iter__(self):
        for xs in np.linspace(1, 2, 24, dtype=np.float32).reshape(3, 8, 1):
            yield self.scale * xs, xs


class Shrinks(Callback):
    """Change the data source without declaring it."""

    def __init__(self, source):
        self._source = [source]

    @on
    def shrink(self, event: StepEnd, phase: TrainingPhase, learner):
        self._source[0].scale /= 2


class ShrinksBySight(Shrinks):
    """Change the data source with a declaration, so that windows wait."""

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


def test_result_that_depends_on_windows_is_reported(problems, no_clock):
    problems(
        shrinking(Shrinks),
        "CheckError: The train state after 3 steps differs if 2 of them run in one window.\n"
        "  where: ['params']['b'], ['params']['w']\n"
        "  why:   the device runs ahead of the handlers in a window, so undeclared access uses the state of another "
        "step\n"
        "  fix:   use only the handler's `learner` to read and write state, and declare the access in `stateaccess`",
    )
    assert shrinking(ShrinksBySight).problems == []


def test_steps_run_once_in_windows_and_once_individually(no_clock):
    learners = []

    def make():
        learners.append(testlearner(EventLog(), Recorder(), validation_batches=0))
        return learners[-1]

    assert audit_learner(make).problems == []
    ran = [
        (learner.step, learner._core.engine.step_loop(learner.phases[0]).windows, len(learner.callbacks))
        for learner in learners
    ]
    # As it is; turned round, which for two is also rotated; one by one, beside a callback that may cancel; in windows.
    # EventLog saves its entries, so another one is built to restore them in.
    assert ran == [(2, 2, 2), (2, 2, 2), (0, 0, 2), (3, 3, 3), (3, 2, 2)]
