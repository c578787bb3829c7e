"""Checks of callback instances: fields that hide methods, and constructors of base classes that did not run."""

import pytest

from fluxcb import Callback, DeclarationError, on
from fluxcb.callbacks import Checkpointer, CustomCallback, EarlyStopping, Metrics, ProxyCallback
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


@pytest.mark.parametrize(
    ("name", "value"),
    [("handlers", ["console"]), ("stateaccess", {}), ("state_dict", {}), ("runafter", ()), ("init", 0.1)],
)
def test_a_field_that_hides_a_method_is_an_error(name, value):
    class Hides(Callback):
        def __init__(self, field):
            setattr(self, field, value)

        @on
        def step(self, event: StepEnd, phase: TrainingPhase, learner): ...

    with pytest.raises(DeclarationError, match=f"has a field `{name}`, a {type(value).__name__}") as caught:
        testlearner(Hides(name))
    assert f"rename the field, e.g. to `self.my_{name}`" in str(caught.value)
    testlearner(Hides(f"my_{name}")).fit(1)


class Proxy(ProxyCallback):
    def __init__(self, callback):
        self.inner = callback

    @on(StepEnd)
    def step(self, event, phase, learner):
        self.forward(event, phase, learner)


class Measures(Metrics):
    def __init__(self):
        self.extra = 1


class Saves(Checkpointer):
    def __init__(self, folder):
        self.place = folder


class FixedProxy(Proxy):
    def __init__(self, callback):
        super(Proxy, self).__init__(callback)


@pytest.mark.parametrize(
    ("make", "base", "call"),
    [
        (
            lambda: Proxy(CustomCallback(lambda learner: None, StepEnd)),
            "ProxyCallback",
            "write `super().__init__(callback)`",
        ),
        (Measures, "Metrics", "call `super().__init__` in `Measures.__init__`, with the arguments of `Metrics`"),
        (lambda: Saves("r"), "Checkpointer", "write `super().__init__("),
    ],
)
def test_a_constructor_that_does_not_call_that_of_its_base_class_is_an_error(make, base, call):
    with pytest.raises(DeclarationError, match=f"does not call the constructor of its base class, `{base}`") as caught:
        testlearner(make())
    assert call in str(caught.value)


def test_a_constructor_that_calls_that_of_its_base_class_is_no_error(tmp_path):
    class Fixed(Checkpointer):
        def __init__(self, folder):
            super().__init__(folder)
            self.place = folder

    class Own(Callback):  # the base class of a user may have fields that the subclass does not need
        def __init__(self):
            self.own = 1

    class Derived(Own):
        def __init__(self):
            self.other = 1

        @on
        def step(self, event: StepEnd, phase: TrainingPhase, learner): ...

    testlearner(FixedProxy(CustomCallback(lambda learner: None, StepEnd)), Fixed(tmp_path), Derived()).fit(1)


class Forgetful(EarlyStopping):
    def state_dict(self):
        return {"seen": 1}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Remembering(EarlyStopping):
    def state_dict(self):
        return {**super().state_dict(), "seen": 1}

    def load_state_dict(self, state):
        self.seen = state.pop("seen")
        super().load_state_dict(state)


class Independent(Callback):
    def state_dict(self):
        return {"seen": 1}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    @on
    def step(self, event: StepEnd, phase: TrainingPhase, learner): ...


def test_a_subclass_that_does_not_save_the_state_of_its_base_class_is_a_warning():
    with pytest.warns(UserWarning, match="a resumed run loses") as caught:
        testlearner(Metrics(), Forgetful(3))
    assert [str(warning.message) for warning in caught] == [
        "`Forgetful.state_dict` does not call that of `EarlyStopping`, so a resumed run loses what `EarlyStopping` "
        "saves. Write `return {**super().state_dict(), ...}` in `Forgetful.state_dict`.",
        "`Forgetful.load_state_dict` does not call that of `EarlyStopping`, so a resumed run loses what "
        "`EarlyStopping` saves. Write `super().load_state_dict(state)` in `Forgetful.load_state_dict`.",
    ]


def test_a_class_that_saves_the_state_of_its_base_class_is_no_warning():
    testlearner(Metrics(), Remembering(3), Independent()).fit(1)
