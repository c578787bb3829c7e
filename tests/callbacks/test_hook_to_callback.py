"""HookToCallback: functions of the step number, objects with methods, and the arguments of their calls."""

import numpy as np
import pytest

from fluxcb import DeclarationError, every
from fluxcb.callbacks import HookToCallback
from fluxcb.testing import testlearner


class Hook:
    """Has all methods, and notes each call."""

    def __init__(self):
        self.calls = []

    def before_training(self):
        self.calls.append("begin")

    def after_step(self, step, values=None):
        self.calls.append((step, values))

    def after_epoch(self, epoch):
        self.calls.append(f"epoch {epoch}")

    def after_training(self):
        self.calls.append("end")


class Action:
    """Acts as CLU's periodic actions do: called at every step, in order, with an `int`; acts at some of them."""

    def __init__(self, every_steps):
        self.every_steps, self.last, self.acted = every_steps, None, []

    def __call__(self, step, t=None):
        if type(step) is not int or (self.last is not None and step != self.last + 1):
            raise ValueError(f"step {step!r} after {self.last!r}")
        self.last = step
        if step % self.every_steps == 0:
            self.acted.append(step)
            return True
        return False


@pytest.mark.parametrize("steps_per_call", [1, 3, "auto"])
def test_the_order_of_calls(steps_per_call):
    hook = Hook()
    testlearner(HookToCallback(hook), batches=2, validation_batches=3, steps_per_call=steps_per_call).fit(2)
    assert hook.calls == [
        "begin",
        *((1, None), (2, None), "epoch 1"),
        *((3, None), (4, None), "epoch 2"),
        "end",
    ]


def test_after_training_is_called_after_an_error():
    class Fails(Hook):
        def after_step(self, step):
            super().after_step(step)
            raise OSError("disk full")

    hook = Fails()
    with pytest.raises(OSError, match="disk full"):
        testlearner(HookToCallback(hook), batches=2).fit(2)
    assert hook.calls == ["begin", (1, None), "end"]


@pytest.mark.parametrize("steps_per_call", [1, 4, "auto"])
def test_a_periodic_action_sees_every_step_even_after_a_resume(steps_per_call):
    first = testlearner(batches=5)
    first.fit(1)
    action = Action(3)
    learner = testlearner(HookToCallback(action), batches=5, steps_per_call=steps_per_call)
    learner.state = first.state
    learner.fit(2)  # steps 6 to 15
    assert action.acted == [6, 9, 12, 15]
    assert action.last == 15


def test_a_function_can_have_a_period():
    steps = []
    testlearner(every(HookToCallback(steps.append), steps=3), batches=4).fit(2)
    assert steps == [3, 6]


def test_values_are_those_of_the_step():
    got = []
    hook = HookToCallback(lambda step, values: got.append((step, values)), values=["loss", "updates"])
    xs = np.array([[1.0], [-1.0]], np.float32)
    learner = testlearner(hook, data=[(xs, 3 * xs - 1)], learning_rate=0.1)
    learner.fit(1)
    ((step, values),) = got
    assert step == 1
    # At w = b = 0: the mean of 2^2 and 4^2, and -0.1 times the gradient (dw = -2 mean(x y), db = -2 mean(y)).
    assert values["loss"] == 10.0
    assert values["updates"]["w"] == pytest.approx(0.6)
    assert values["updates"]["b"] == pytest.approx(-0.2)


def test_the_name_is_that_of_the_hook():
    def report(step): ...

    assert repr(HookToCallback(report)) == "HookToCallback(report)"
    assert repr(HookToCallback(Action(2))) == "HookToCallback(Action)"
    assert repr(HookToCallback(Action(2), name="action")) == "HookToCallback(action)"


class NoStep:
    def before_training(self): ...

    def __repr__(self):
        return "NoStep()"


class WrongEpoch:
    def after_epoch(self): ...


METHODS = "`before_training`, `after_step`, `after_epoch`, `after_training`"


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: HookToCallback(3),
            "`HookToCallback` requires a function of the step number, or an object with methods, not 3.\n"
            f"  why:   a hook is callable or has one of {METHODS}\n"
            "  fix:   write e.g. `HookToCallback(lambda step: ...)`",
        ),
        (
            lambda: HookToCallback(Action),
            f"`HookToCallback` requires a function of the step number, or an object with methods, not {Action!r}.\n"
            f"  why:   a hook is callable or has one of {METHODS}\n"
            "  fix:   pass an instance: `HookToCallback(Action(...))`",
        ),
        (
            lambda: HookToCallback(print, "loss"),
            "`values` of `HookToCallback` must be a list of names, not 'loss'.\n"
            '  fix:   write e.g. `values=["loss"]`',
        ),
        (
            lambda: HookToCallback(print, 3),
            '`values` of `HookToCallback` must be a list of names, not 3.\n  fix:   write e.g. `values=["loss"]`',
        ),
        (
            lambda: HookToCallback(NoStep(), ["loss"]),
            "The hook NoStep() cannot receive `values`, because it is not callable and has no `after_step`.\n"
            "  fix:   remove `values=`, or define a method `after_step(self, step, values)`",
        ),
        (
            lambda: HookToCallback(lambda step: None, ["loss"]),
            "The hook `<lambda>` cannot be called as `<lambda>(step, values)`.\n"
            "  why:   `HookToCallback` calls the hook with these arguments\n"
            "  fix:   wrap the hook in a function that takes `(step, values)`",
        ),
        (
            lambda: HookToCallback(lambda: None),
            "The hook `<lambda>` cannot be called as `<lambda>(step)`.\n"
            "  why:   `HookToCallback` calls the hook with these arguments\n"
            "  fix:   wrap the hook in a function that takes `(step)`",
        ),
        (
            lambda: HookToCallback(WrongEpoch()),
            "The hook `WrongEpoch.after_epoch` cannot be called as `WrongEpoch.after_epoch(epoch)`.\n"
            "  why:   `HookToCallback` calls the hook with these arguments\n"
            "  fix:   wrap the hook in a function that takes `(epoch)`",
        ),
    ],
)
def test_invalid_hooks_are_rejected(build, text, refused):
    with refused(DeclarationError, text):
        build()
