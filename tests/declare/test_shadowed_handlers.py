"""Warnings about handlers of a subclass and of its base class of which only one runs at a moment."""

import warnings

import pytest

from fluxcb import Callback, on
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.events import EpochEnd, StepEnd, Trigger
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import testlearner


class Told(Callback):
    def __init__(self):
        self.told = []


class Base(Told):
    @on
    def base(self, event: StepEnd, phase: TrainingPhase, learner):
        self.told.append("base")


class Mixin(Told):
    @on
    def mixin(self, event: StepEnd, phase: TrainingPhase, learner):
        self.told.append("mixin")


def told_in_a_step(cls):
    callback = cls()
    testlearner(callback).fit(steps=1)
    return callback.told


def test_a_handler_that_replaces_an_inherited_one_of_another_name_is_a_warning():
    with pytest.warns(UserWarning, match="instead of") as caught:

        class Silent(Base):
            @on
            def own(self, event: StepEnd, phase: TrainingPhase, learner):
                self.told.append("own")

    assert [str(warning.message) for warning in caught] == [
        "At (StepEnd, TrainingPhase), `Silent` runs `Silent.own` instead of `Base.base`, because a callback has one "
        "handler at each moment. To run both, call `self.base(event, phase, learner)` in `own`. To replace it, rename "
        "`own` to `base`."
    ]
    assert caught[0].filename == __file__
    assert told_in_a_step(Silent) == ["own"]

    class CallsBoth(Base):
        @on
        def own(self, event: StepEnd, phase: TrainingPhase, learner):
            self.base(event, phase, learner)
            self.told.append("own")

    class Renamed(Base):
        @on
        def base(self, event: StepEnd, phase: TrainingPhase, learner):
            self.told.append("own")

    class Removes(Base):
        base = None

        @on
        def own(self, event: StepEnd, phase: TrainingPhase, learner):
            self.told.append("own")

    assert told_in_a_step(CallsBoth) == ["base", "own"]
    assert told_in_a_step(Renamed) == told_in_a_step(Removes) == ["own"]


def test_a_handler_for_more_moments_than_an_inherited_one_is_a_warning():
    with pytest.warns(UserWarning, match=r"runs `Base\.base` instead of `General\.own`.*`self\.base.* and `self\.own"):

        class General(Base):
            @on
            def own(self, event: StepEnd, phase: Phase, learner):
                self.told.append("own")

    assert told_in_a_step(General) == ["base", "own", "own"]  # both steps of the validation

    class Fixed(Base):
        @on
        def own(self, event: StepEnd, phase: Phase, learner):
            self.told.append("own")

        @on
        def both(self, event: StepEnd, phase: TrainingPhase, learner):
            self.base(event, phase, learner)
            self.own(event, phase, learner)

    assert told_in_a_step(Fixed) == ["base", "own", "own", "own"]


def test_two_base_classes_with_handlers_for_one_moment_are_a_warning_once():
    with pytest.warns(UserWarning, match=r"runs `Base\.base` instead of `Mixin\.mixin`"):

        class Joined(Base, Mixin): ...

    class Derived(Joined): ...

    class Both(Base, Mixin):
        @on
        def both(self, event: StepEnd, phase: TrainingPhase, learner):
            self.base(event, phase, learner)
            self.mixin(event, phase, learner)

    assert told_in_a_step(Derived) == ["base"]
    assert told_in_a_step(Both) == ["base", "mixin"]


@pytest.mark.parametrize(("cls", "event"), [(Metrics, EpochEnd), (Checkpointer, Trigger)])
def test_subclasses_of_built_ins_get_the_warning(cls, event):
    with pytest.warns(UserWarning, match=f"instead of `{cls.__name__}") as caught:

        class Announces(cls):
            @on(event, TrainingPhase)
            def announce(self, event, phase, learner): ...

    assert caught[0].filename == __file__


def test_a_class_that_chooses_its_handlers_gets_no_warning():
    with warnings.catch_warnings(action="error"):

        class Chooses(Base):
            @on
            def own(self, event: StepEnd, phase: TrainingPhase, learner):
                self.told.append("own")

            def handlers(self):
                return [handler for handler in super().handlers() if handler.name == "own"]

    assert told_in_a_step(Chooses) == ["own"]
