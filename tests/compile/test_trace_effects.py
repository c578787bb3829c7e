"""Effects of traced handlers that happen once, while the step is traced."""

import datetime
import functools
import math
import random
import re
import time
import types
import warnings
from time import perf_counter
from typing import ClassVar

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Read, TraceError, Write, on
from fluxcb.callbacks import ClipGradients, LearningRate, Metric, Metrics, Scheduler
from fluxcb.events import BackwardBegin, BackwardEnd, ComputeEnd, EpochEnd, ForwardBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import testlearner


@pytest.mark.parametrize("draw", [np.random.normal, random.random])
def test_random_numbers_outside_jax_are_a_warning(draw, monkeypatch):
    class Noise(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase)
        def add(self, event, phase, learner):
            noise = draw()
            learner.step.grads = jax.tree.map(lambda g: g + noise, learner.step.grads)

    monkeypatch.setattr("threading.active_count", lambda: 1)
    text = (
        "The traced handler Noise().add drew random numbers outside JAX. They are drawn once, while the step is "
        "traced, so every step uses the same numbers. Use `learner.key`, e.g. `jax.random.normal(learner.key, shape)`."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        testlearner(Noise())
    # Another thread may have drawn the numbers.
    monkeypatch.setattr("threading.active_count", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testlearner(Noise())


def test_clocks_in_traced_handlers_are_a_warning():
    class Stamp(Callback):
        @on(ForwardBegin, TrainingPhase)
        def module(self, event, phase, learner):
            self.first = time.time()

        @on(BackwardEnd, TrainingPhase)
        def function(self, event, phase, learner):
            self.second = perf_counter()

        @on(ComputeEnd, TrainingPhase)
        def method(self, event, phase, learner):
            self.third = datetime.datetime.now()

    with pytest.warns(UserWarning, match="gets the same time") as caught:
        testlearner(Stamp())
    assert [str(warning.message) for warning in caught] == [
        f"The traced handler Stamp().{name} uses `{clock}`. It is called once, while the step is traced, so every step "
        "gets the same time. Read the clock in a host handler, for example of StepEnd."
        for name, clock in (
            ("module", "time.time"),
            ("function", "perf_counter"),
            ("method", "datetime.datetime.now"),
        )
    ]


def test_clocks_that_are_read_at_each_step_give_no_warning():
    times = []

    class Stamp(Callback):
        @on(BackwardEnd, TrainingPhase)
        def traced(self, event, phase, learner):
            time.sleep(0)
            jax.debug.callback(lambda: times.append(time.time()))

        @on(StepEnd, TrainingPhase)
        def host(self, event, phase, learner):
            times.append(time.time())

    testlearner(Stamp()).fit(1)
    jax.effects_barrier()
    assert len(times) == 8


@pytest.mark.parametrize("first_in_class", [True, False])
def test_counting_in_a_field_is_a_warning(first_in_class):
    class Counts(Callback):
        count = 0
        unknown = math.nan

        def __init__(self):
            if not first_in_class:
                self.count = 0

        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on(BackwardEnd, TrainingPhase)
        def add(self, event, phase, learner):
            self.count += 1

    text = (
        "The traced handler Counts().add changed `self.count`. The change happens once, while the step is traced, and "
        "not at each step. Keep the value in `learner.cbstate`, or change `self.count` in a host handler."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        testlearner(Counts())


def test_host_handlers_may_do_both():
    class Counts(Callback):
        def __init__(self):
            self.count = 0

        @on(StepEnd, TrainingPhase)
        def add(self, event, phase, learner):
            self.count += round(random.random()) * 0 + 1

    counts = Counts()
    testlearner(counts).fit(1)
    assert counts.count == 4


class Scales(Callback):
    """Multiply the gradients by a number that a host handler sets to 0 after the first epoch."""

    def __init__(self):
        self.scale, self.epochs = 1.0, 0

    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on(BackwardEnd, TrainingPhase)
    def apply(self, event, phase, learner):
        learner.step.grads = jax.tree.map(lambda g: g * self.scale, learner.step.grads)

    @on(EpochEnd, TrainingPhase, access={})
    def end(self, event, phase, learner):
        self.scale, self.epochs = 0.0, self.epochs + 1


class ScalesByState(Callback):
    """The same with the number in the state."""

    def init(self, learner):
        learner.cbstate.scale = jnp.float32(1)

    def stateaccess(self):
        return {"step": {"grads": Write()}, "cbstate": {"scale": Write()}}

    @on(BackwardEnd, TrainingPhase)
    def apply(self, event, phase, learner):
        learner.step.grads = jax.tree.map(lambda g: g * learner.cbstate.scale, learner.step.grads)

    @on(EpochEnd, TrainingPhase, access={"cbstate": {"scale": Write()}})
    def end(self, event, phase, learner):
        learner.cbstate.scale = jnp.float32(0)


class ScalesInMethod(Scales):
    """The same with a method that the traced handler uses."""

    @on(BackwardEnd, TrainingPhase)
    def apply(self, event, phase, learner):
        learner.step.grads = jax.tree.map(self.scaled, learner.step.grads)

    def scaled(self, gradient):
        return gradient * self.scale


class KeepsLoss(Callback):
    """Host fields with the names of parts of the learner that a traced handler uses."""

    def __init__(self):
        self.loss, self.step = math.inf, 0

    def stateaccess(self):
        return {"step": {"loss": Read(), "twice": Write()}}

    @on(ComputeEnd, TrainingPhase)
    def double(self, event, phase, learner):
        learner.step.twice = 2 * learner.step.loss

    @on(StepEnd, TrainingPhase)
    def last(self, event, phase, learner):
        self.loss, self.step = float(learner.step.loss), learner.progress.step


def moves(learner):
    before = float(learner.params["w"])
    learner.fit(1)
    return float(learner.params["w"]) != before


@pytest.mark.parametrize("cls", [Scales, ScalesInMethod])
def test_a_field_that_changes_after_a_traced_handler_used_it_is_a_warning_once(cls):
    learner, label = testlearner(cls()), f"{cls.__name__}()"
    text = (
        f"`self.scale` of {label} has changed from 1.0 to 0.0, but the traced handler {label}.apply still uses 1.0, "
        "which is a constant of the compiled step. Keep the value in an entry of `learner.cbstate`: traced handlers "
        "read it at each step."
    )
    with pytest.warns(UserWarning, match=r"self\.scale") as caught:
        assert moves(learner)
    assert [str(warning.message) for warning in caught] == [text]
    assert moves(learner)  # the compiled step still multiplies by 1
    by_state = testlearner(ScalesByState())
    assert moves(by_state)
    assert not moves(by_state)


class Weighted(AbstractTrainingPhase):
    """Multiply the loss by a number that a callback or the user can set."""

    provides: ClassVar = {BackwardEnd: ("loss", "grads")}

    def __init__(self):
        self.weight, self.traces, self.seen = 1.0, 0, []

    def step(self, learner, emit):
        self.traces += 1
        self.seen.append(learner.step.batch[0].shape)

        def loss(params):
            learner.step.loss = self.weight * (params["w"] - 1) ** 2
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


class WeightedByState(Weighted):
    uses = ("cbstate.scale",)

    def step(self, learner, emit):
        learner.step.grads = learner.grad(lambda params: learner.cbstate.scale * (params["w"] - 1) ** 2)
        emit(BackwardEnd())
        learner.apply_updates()


class SetsScale(ScalesByState):
    apply = None

    @on(EpochEnd, AbstractTrainingPhase, access={"cbstate": {"scale": Write()}})
    def end(self, event, phase, learner):
        learner.cbstate.scale = jnp.float32(0)


def test_a_field_of_a_phase_that_changes_after_its_step_used_it_is_a_warning_once():
    phase = Weighted()
    learner = testlearner(phases=(phase,))
    assert moves(learner)
    phase.weight = 0.0
    with pytest.warns(UserWarning, match=r"self\.weight") as caught:
        assert moves(learner)
    assert [str(warning.message) for warning in caught] == [
        "`self.weight` of Weighted() has changed from 1.0 to 0.0, but `Weighted.step` still uses 1.0, which is a "
        "constant of the compiled step. Keep the value in an entry of `learner.cbstate` that the `init` of a callback "
        "creates, and name the entry in `Weighted.uses`: the step reads it each time."
    ]
    assert moves(learner)
    by_state = testlearner(SetsScale(), phases=(WeightedByState(),))
    assert moves(by_state)
    assert not moves(by_state)


def test_fields_that_the_step_of_a_phase_changes_itself_give_no_warning():
    phase = Weighted()
    learner = testlearner(phases=(phase,))
    before = phase.traces
    learner.fit(1)
    learner.run_step(phase, (np.ones((2, 1), np.float32),) * 2)
    learner.fit(1)
    assert phase.traces > before


def test_a_field_that_changes_between_construction_and_fit_is_a_warning():
    class Plain(Scales):
        end = None

    callback = Plain()
    learner = testlearner(callback)
    callback.scale = 0.5
    with pytest.warns(UserWarning, match="has changed from 1.0 to 0.5"):
        learner.fit(1)


def test_a_host_field_with_the_name_of_a_step_value_gives_no_warning():
    callback = KeepsLoss()
    testlearner(callback).fit(1)
    assert callback.step == 4
    assert math.isfinite(callback.loss)


class Settings:
    def __init__(self):
        self.scale = 1.0
        self.unused = 0


def changed_array(weights):
    weights["scale"] = weights["scale"] * 0  # a new array


def changed_in_place(weights):
    weights["scale"][...] = 0


def changed_object(settings):
    settings.scale = 0.0


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (lambda: {"scale": np.ones(2)}, lambda field: field["scale"][0], changed_array),
        (lambda: {"scale": np.ones(2)}, lambda field: field["scale"][0], changed_in_place),
        (lambda: {"scale": jnp.ones(2)}, lambda field: field["scale"][0], changed_array),
        (lambda: {"scale": [1.0, {"more": 2.0}]}, lambda field: field["scale"][0], lambda f: f["scale"][1].clear()),
        (lambda: {"scale": {1.0}}, lambda field: next(iter(field["scale"])), lambda field: field["scale"].clear()),
        (Settings, lambda field: field.scale, changed_object),
    ],
)
def test_changes_inside_fields_are_a_warning(make, read, change):
    class Scaled(Callback):
        def __init__(self):
            self.settings = make()

        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase)
        def apply(self, event, phase, learner):
            scale = self.settings.scale if isinstance(self.settings, Settings) else read(self.settings)
            learner.step.grads = jax.tree.map(lambda g: g * scale, learner.step.grads)

        @on(EpochEnd, TrainingPhase, access={})
        def end(self, event, phase, learner):
            change(self.settings)

    text = (
        "`self.settings` of Scaled() has changed, but the traced handler Scaled().apply still uses the earlier value, "
        "which is a constant of the compiled step. Keep the value in an entry of `learner.cbstate`: traced handlers "
        "read it at each step."
    )
    with pytest.warns(UserWarning, match=r"self\.settings") as caught:
        assert moves(testlearner(Scaled()))
    assert [str(warning.message) for warning in caught] == [text]


def test_other_changes_of_objects_in_fields_are_no_warning():
    class Scaled(Callback):
        def __init__(self):
            self.settings = Settings()
            self.factors = jnp.ones(2)
            self.cache = {}

        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase)
        def apply(self, event, phase, learner):
            self.cache["traced"] = True
            scale = self.settings.scale * self.factors[0]
            learner.step.grads = jax.tree.map(lambda g: g * scale, learner.step.grads)

        @on(EpochEnd, TrainingPhase, access={})
        def end(self, event, phase, learner):
            self.settings.unused += 1
            self.cache["host"] = self.cache["traced"]  # a container that grows
            self.factors = jnp.ones(2)  # another array with the same values

    assert moves(testlearner(Scaled()))


@pytest.mark.parametrize(
    ("before", "after", "warns"), [(10, 20, False), (999, 1004, False), (2000, 2005, False), (2000, 1500, True)]
)
def test_list_of_any_length_may_grow_but_not_shrink(before, after, warns):
    class Scaled(Callback):
        def __init__(self):
            self.values = [1.0] * before

        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase)
        def apply(self, event, phase, learner):
            learner.step.grads = jax.tree.map(lambda g: g * self.values[0], learner.step.grads)

        @on(EpochEnd, TrainingPhase, access={})
        def end(self, event, phase, learner):
            self.values = [1.0] * after

    learner = testlearner(Scaled())
    if not warns:
        assert moves(learner)
        return
    with pytest.warns(UserWarning, match=r"^`self\.values` of Scaled\(\) has changed"):
        assert moves(learner)


def test_a_generator_of_the_callback_is_a_warning():
    class Noise(Callback):
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase)
        def add(self, event, phase, learner):
            noise = self.rng.normal()
            learner.step.grads = jax.tree.map(lambda g: g + noise, learner.step.grads)

    with pytest.warns(UserWarning, match=r"Noise\(\)\.add drew random numbers outside JAX"):
        testlearner(Noise())


def test_a_list_that_grows_while_the_step_is_traced_is_a_warning():
    class Seen(Callback):
        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on(ComputeEnd, TrainingPhase)
        def see(self, event, phase, learner):
            self.seen.append("step")

    with pytest.warns(UserWarning, match=r"Seen\(\)\.see changed `self\.seen`"):
        testlearner(Seen())


@pytest.mark.parametrize("nested", [list, dict, Settings])
def test_a_traced_value_inside_a_field_is_an_error(nested):
    class Keeps(Callback):
        def __init__(self):
            self.kept = {"inner": [nested()]}

        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on(ComputeEnd, TrainingPhase)
        def keep(self, event, phase, learner):
            inner = self.kept["inner"][0]
            if isinstance(inner, list):
                inner.append(learner.step.loss)
            elif isinstance(inner, dict):
                inner["loss"] = learner.step.loss
            else:
                inner.loss = learner.step.loss

    with pytest.raises(TraceError, match=r"Keeps\(\) stores a traced value in `self\.kept`"):
        testlearner(Keeps())


# -- variables -----------------------------------------------------------------------------------

WEIGHT = 1.0


def weighted(value):
    return WEIGHT * value


class LossOptions:
    weight = 1.0


def global_variable(monkeypatch):
    def loss(outputs, ys):
        return WEIGHT * jnp.mean((outputs - ys) ** 2)

    return loss, lambda: monkeypatch.setitem(globals(), "WEIGHT", 0.0), "The variable `WEIGHT`", (1.0, 0.0)


def variable_of_called_function(monkeypatch):
    def loss(outputs, ys):
        return weighted(jnp.mean((outputs - ys) ** 2))

    return loss, lambda: monkeypatch.setitem(globals(), "WEIGHT", 0.0), "A variable of the function `weighted`", None


def variable_of_enclosing_function(monkeypatch):
    weight = 1.0

    def loss(outputs, ys):
        return weight * jnp.mean((outputs - ys) ** 2)

    def change():
        nonlocal weight
        weight = 0.0

    return loss, change, "The variable `weight`", (1.0, 0.0)


def entry_of_dict(monkeypatch):
    weights = {"mse": 1.0}

    def loss(outputs, ys, scale):
        return scale * weights["mse"] * jnp.mean((outputs - ys) ** 2)

    return functools.partial(loss, scale=1.0), lambda: weights.update(mse=0.0), "The variable `weights`", None


def attribute_of_object(monkeypatch):
    settings = LossOptions()

    def loss(outputs, ys):
        return settings.weight * jnp.mean((outputs - ys) ** 2)

    return loss, lambda: setattr(settings, "weight", 0.0), "The variable `settings`", None


def attribute_of_class(monkeypatch):
    class Inherits(LossOptions):
        pass

    def loss(outputs, ys):
        return Inherits.weight * jnp.mean((outputs - ys) ** 2)

    return loss, lambda: monkeypatch.setattr(LossOptions, "weight", 0.0), "The variable `Inherits`", None


def attribute_of_module(monkeypatch):
    settings = types.ModuleType("settings")
    settings.weight = 1.0

    def loss(outputs, ys):
        return settings.weight * jnp.mean((outputs - ys) ** 2)

    return loss, lambda: setattr(settings, "weight", 0.0), "The variable `settings`", None


class Teacher:
    def __init__(self):
        self.rate = 1.0

    def __call__(self, value):
        return self.scaled(value)

    def scaled(self, value):
        return self.factor * value

    @property
    def factor(self):
        return 2 * self.rate

    def decay(self):
        self.rate = 0.0


def field_of_called_object(monkeypatch):
    teacher = Teacher()

    def loss(outputs, ys):
        return jnp.mean((outputs - teacher(ys)) ** 2)

    return loss, teacher.decay, "The variable `teacher`", None


def field_of_method_of_object(monkeypatch):
    teacher = Teacher()

    def loss(outputs, ys):
        return jnp.mean((outputs - teacher.scaled(ys)) ** 2)

    return loss, teacher.decay, "The variable `teacher`", None


def field_of_property_of_object(monkeypatch):
    teacher = Teacher()

    def loss(outputs, ys):
        return teacher.factor * jnp.mean((outputs - ys) ** 2)

    return loss, teacher.decay, "The variable `teacher`", None


def variable_of_nnx(monkeypatch):
    variable = flax.nnx.Variable(jnp.ones(()))

    def loss(outputs, ys):
        return variable[...] * jnp.mean((outputs - ys) ** 2)

    def change():
        variable[...] = jnp.zeros(())

    return loss, change, "The variable `variable`", None


def array_of_nnx_module(monkeypatch):
    teacher = flax.nnx.Linear(1, 1, rngs=flax.nnx.Rngs(0))

    def loss(outputs, ys):
        return jnp.mean((outputs - teacher(ys[:, None])[:, 0]) ** 2)

    def change():
        flax.nnx.update(teacher, {"bias": jnp.ones(1)})

    return loss, change, "The variable `teacher`", None


class Agent:
    def __init__(self):
        self.weight, self.unused = 1.0, 1.0

    def loss(self, outputs, ys):
        return self.scaled(jnp.mean((outputs - ys) ** 2))

    def scaled(self, value):
        return self.weight * value

    def decay(self):
        self.weight = self.unused = 0.0


def attribute_of_own_object(monkeypatch):
    agent = Agent()
    return agent.loss, agent.decay, "`self.weight` of Agent", (1.0, 0.0)


class CalledLoss(Agent):
    def __call__(self, outputs, ys):
        return self.loss(outputs, ys)


def attribute_of_called_object(monkeypatch):
    loss = CalledLoss()
    return loss, loss.decay, "`self.weight` of CalledLoss", (1.0, 0.0)


@pytest.mark.parametrize(
    "make",
    [
        attribute_of_called_object,
        attribute_of_class,
        field_of_called_object,
        field_of_method_of_object,
        field_of_property_of_object,
        variable_of_nnx,
        array_of_nnx_module,
        attribute_of_module,
        global_variable,
        variable_of_called_function,
        variable_of_enclosing_function,
        entry_of_dict,
        attribute_of_object,
        attribute_of_own_object,
    ],
)
def test_variable_that_changes_after_loss_function_used_it_is_a_warning_once(make, monkeypatch):
    loss, change, what, values = make(monkeypatch)
    xs = np.linspace(-1, 1, 8, dtype=np.float32)
    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)

    def learner(data):
        return fluxcb.Learner(model, loss, optax.sgd(0.1), data=data, default_callbacks=False)

    trained = learner([(xs, 3 * xs)])
    assert moves(trained)
    change()
    with pytest.warns(UserWarning, match="has changed") as caught:
        assert moves(trained)
    before = "has changed" if values is None else f"has changed from {values[0]} to {values[1]}"
    used = "the earlier value" if values is None else values[0]
    assert [str(warning.message) for warning in caught] == [
        f"{what} {before}, but the loss function still uses {used}, which is a constant of the compiled step. To "
        "change the value at the end of epochs, change it at EpochEnd, and pass it in the batch, for example with "
        "`fluxcb.data.map`. To change it at steps, keep it in an entry of `learner.cbstate`, and read the entry in the "
        "step of a phase, which names it in `uses`."
    ]
    assert moves(trained)
    # The suggested fix.
    weight = 1.0
    passed = fluxcb.Learner(
        model,
        lambda outputs, ys: jnp.mean(ys[1] * (outputs - ys[0]) ** 2),
        optax.sgd(0.1),
        data=fluxcb.data.map(lambda batch: (batch[0], (batch[1], np.float32(weight))), [(xs, 3 * xs)]),
        default_callbacks=False,
    )
    assert moves(passed)
    weight = 0.0
    assert not moves(passed)


class CallCounter:
    def __init__(self):
        self.count = 0

    def add(self, value):
        self.count += 1


def test_object_whose_method_jax_calls_at_each_step_is_no_warning():
    counter = CallCounter()

    def loss(outputs, ys):
        jax.debug.callback(counter.add, outputs[0])
        return jnp.mean((outputs - ys) ** 2)

    xs = np.linspace(-1, 1, 8, dtype=np.float32)
    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
    learner = fluxcb.Learner(model, loss, optax.sgd(0.1), data=[(xs, 3 * xs)] * 2, default_callbacks=False)
    for _ in range(2):
        learner.fit(1)
    jax.effects_barrier()
    assert counter.count == 4


def changed_apply(setting):
    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: setting["weight"] * params["w"] * xs)
    return {"model": model}, "`apply` of the model"


def changed_inputs(setting):
    return {"inputs": lambda batch: setting["weight"] * batch[0], "targets": lambda batch: batch[1]}, "`inputs=`"


def changed_targets(setting):
    return {"inputs": lambda batch: batch[0], "targets": lambda batch: setting["weight"] * batch[1]}, "`targets=`"


def changed_weights(setting):
    def weights(batch):
        return setting["weight"] * jnp.ones_like(batch[1])

    metric = Metric(lambda outputs, ys: outputs - ys, name="bias", weight=weights)
    return {"callbacks": [Metrics(metric)]}, "the function `weights` of Metrics(bias)"


@pytest.mark.parametrize("make", [changed_apply, changed_inputs, changed_targets, changed_weights])
def test_variable_of_other_functions_that_changes_is_a_warning_once(make):
    setting = {"weight": 1.0}
    options, reader = make(setting)
    xs = np.linspace(-1, 1, 8, dtype=np.float32)
    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
    learner = fluxcb.Learner(
        options.pop("model", model),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(xs, 3 * xs)],
        default_callbacks=False,
        **options,
    )
    learner.fit(1)
    setting["weight"] = 0.5
    text = f"^The variable `setting` has changed, but {re.escape(reader)} still"
    with pytest.warns(UserWarning, match=text) as caught:
        learner.fit(1)
    assert len(caught) == 1
    learner.fit(1)


class ScalesByProperty(Callback):
    def __init__(self):
        self.epoch = 0

    @property
    def scale(self):
        return 2.0**self.epoch

    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def multiply(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda leaf: self.scale * leaf, learner.step.grads)

    @on
    def count(self, event: EpochEnd, phase: TrainingPhase, learner):
        self.epoch += 1


def test_field_behind_a_property_of_a_traced_handler_is_a_warning():
    with pytest.warns(UserWarning, match=r"^`self\.epoch` of ScalesByProperty\(\) has changed from 0 to 1"):
        testlearner(ScalesByProperty()).fit(2)


def test_variable_that_changes_in_a_loop_of_single_steps_is_a_warning_once():
    agent, batch = Agent(), (np.ones(8, np.float32), np.ones(8, np.float32))
    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
    learner = fluxcb.Learner(model, agent.loss, optax.sgd(0.1), example_batch=batch, default_callbacks=False)
    for _ in range(5):  # looked for at steps 1, 2, 4, 8, ...
        learner.run_step(TrainingPhase(), batch)
    agent.decay()
    for _ in range(2):
        learner.run_step(TrainingPhase(), batch)
    with pytest.warns(UserWarning, match=r"^`self\.weight` of Agent has changed from 1\.0 to 0\.0") as caught:
        learner.run_step(TrainingPhase(), batch)
    assert len(caught) == 1
    for _ in range(10):
        learner.run_step(TrainingPhase(), batch)


def test_field_that_changes_during_a_fit_is_a_warning_at_an_epoch_that_is_a_power_of_two_or_at_the_end():
    class Halves(Callback):
        def __init__(self, at):
            self.at, self.scale = at, 1.0

        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, AbstractTrainingPhase)
        def apply(self, event, phase, learner):
            learner.step.grads = jax.tree.map(lambda g: self.scale * g, learner.step.grads)

        @on(EpochEnd, AbstractTrainingPhase, access={})
        def change(self, event, phase, learner):
            if learner.progress.epoch == self.at:
                self.scale = 0.5

    for at, expected in ((1, 1), (3, 4), (5, 7)):
        halves, seen = Halves(at), []
        learner = testlearner(halves)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *_, learner=learner, seen=seen: seen.append(learner.epoch)
            learner.fit(7)
        assert seen == [expected]


def test_variable_that_changes_after_traced_handler_used_it_is_a_warning():
    rate = 0.1
    learner = testlearner(Scheduler({LearningRate: lambda step: rate / (1 + step)}))
    assert moves(learner)
    rate = 0.0
    with pytest.warns(
        UserWarning, match=r"^`self\.schedules` of Scheduler\(learning_rate\) has changed, but the traced"
    ):
        assert moves(learner)


def test_changed_field_of_a_callback_of_fluxcb_is_a_warning_whose_fix_works():
    clip = ClipGradients(1.0)
    learner = testlearner(clip)
    learner.fit(1)
    clip.max_norm = 0.0
    replace = r"Replace the callback: `learner\.callbacks\.replace\(ClipGradients\(\.\.\.\)\)`\.$"
    with pytest.warns(UserWarning, match=r"^`self\.max_norm` of ClipGradients\(.*" + replace):
        assert moves(learner)
    learner.callbacks.replace(ClipGradients(1e-30))
    before = np.asarray(learner.params["w"])
    learner.fit(1)
    np.testing.assert_array_equal(np.asarray(learner.params["w"]), before)


def test_variables_that_stay_or_that_tracing_changes_give_no_warning():
    cache, large = {}, np.zeros(1 << 19, np.float32)

    def loss(outputs, ys):
        cache[outputs.shape] = "traced"
        return jnp.mean((outputs - ys) ** 2) + large[0]

    xs = np.linspace(-1, 1, 8, dtype=np.float32)
    model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
    learner = fluxcb.Learner(model, loss, optax.sgd(0.1), data=[(xs, 3 * xs)], default_callbacks=False)
    assert moves(learner)
    learner.data = [(xs[:4], 3 * xs[:4])]
    assert moves(learner)
    assert len(cache) > 1


# -- the loss function and the model -------------------------------------------------------------

DRAWN = (
    "{} drew random numbers outside JAX. They are drawn once, while the step is traced, so every step uses the same "
    "numbers. Use `jax.random` with the random key that a parameter `key` receives, or with `self.make_rng` in a Linen "
    "module."
)
CONSTANT = (
    "The step of TrainingPhase creates a random key from a constant, as `jax.random.key(0)` does, so every step draws "
    "the same numbers. In the loss function, use the key that a parameter `key` receives, and in a traced handler "
    "`learner.key`. If the same numbers are intended, draw them before the training."
)
INPUTS = np.linspace(-1, 1, 8, dtype=np.float32)


def linear(key, xs):
    return {"w": jnp.zeros(())}


def times(params, xs):
    return params["w"] * xs


def mse(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def losses_of(loss_fn=mse, apply=times, **options):
    """Return the losses of 3 steps that change nothing."""
    data = [(INPUTS, 3 * INPUTS)] * 3
    options = {"callbacks": [Metrics()], "default_callbacks": False, **options}
    learner = fluxcb.Learner((linear, apply), loss_fn, optax.sgd(0.0), data=data, **options)
    return [value for _, value in learner.fit(1).per_step["training"]["loss"]]


def noisy_apply(params, xs):
    return times(params, xs) + np.random.normal()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_fn": lambda outputs, ys: mse(outputs + np.random.normal(), ys)}, DRAWN.format("The loss function")),
        ({"loss_fn": lambda outputs, ys: mse(outputs + random.random(), ys)}, DRAWN.format("The loss function")),
        (
            {"loss_fn": lambda model, batch: mse(model(batch[0]) + np.random.normal(), batch[1])},
            DRAWN.format("The loss function"),
        ),
        ({"apply": noisy_apply}, DRAWN.format("The model")),
        ({"loss_fn": lambda outputs, ys: mse(outputs + jax.random.normal(jax.random.key(0)), ys)}, CONSTANT),
        ({"loss_fn": lambda outputs, ys: mse(outputs + jax.random.normal(jax.random.PRNGKey(0)), ys)}, CONSTANT),
        (
            {"loss_fn": lambda outputs, ys: mse(outputs, ys) + 0 * time.time()},
            "The loss function uses `time.time`. It is called once, while the step is traced, so every step gets the "
            "same time. To use the time, pass it in the batch, for example with `fluxcb.data.map`.",
        ),
    ],
)
def test_values_of_a_loss_function_or_model_that_stay_the_same_are_a_warning(options, text):
    with pytest.warns(UserWarning, match=r"every step|same numbers") as caught:
        losses = losses_of(**options)
    assert {str(warning.message) for warning in caught} == {text}
    assert len(set(losses)) == 1


def test_constant_key_in_traced_handler_is_a_warning_whose_fix_works():
    class Noise(Callback):
        def __init__(self, own):
            self.own = own

        def stateaccess(self):
            return {"step": {"loss": Write()}}

        @on(BackwardBegin, TrainingPhase)
        def add(self, event, phase, learner):
            learner.step.loss += jax.random.normal(learner.key if self.own else jax.random.key(0))

    with pytest.warns(UserWarning, match="constant") as caught:
        assert len(set(losses_of(callbacks=[Metrics(), Noise(own=False)]))) == 1
    assert [str(warning.message) for warning in caught] == [CONSTANT]
    assert len(set(losses_of(callbacks=[Metrics(), Noise(own=True)]))) == 3


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_loss_function_that_splits_a_key_of_its_own_is_an_error_whose_fix_works(make_key):
    key = make_key(0)

    def splits(outputs, ys):
        nonlocal key
        key, own = jax.random.split(key)
        return mse(outputs + jax.random.normal(own), ys)

    with pytest.raises(TraceError) as caught:
        losses_of(splits)
    assert str(caught.value) == (
        "The loss function has stored a random key of the traced step in the variable `key`.\n"
        "  why:   the loss function runs once, while the step is traced, and the key exists only then\n"
        "  fix:   take the key of the step as a parameter: `def loss_fn(model, batch, *, key):`, or "
        "`def loss_fn(params, batch, key):` for `Learner.from_loss`"
    )
    losses_of(lambda model, batch, *, key: mse(model(batch[0]) + jax.random.normal(key), batch[1]))


def test_random_numbers_from_the_key_give_no_warning():
    def with_key(model, batch, *, key):
        return mse(model(batch[0]), batch[1]) + jax.random.normal(key)

    assert len(set(losses_of(with_key))) == 3


def test_unused_key_of_a_recurrent_layer_is_no_warning():
    class Recurrent(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, xs):
            return flax.linen.Dense(1)(flax.linen.RNN(flax.linen.GRUCell(4))(xs))

    class OwnKey(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, xs):
            return flax.linen.Dense(1)(xs) + jax.random.normal(jax.random.key(0))

    def learner(model):
        batch = np.ones((2, 3, 1), np.float32)
        return fluxcb.Learner(model, mse, optax.sgd(0.1), data=[(batch, batch)], default_callbacks=False)

    learner(Recurrent()).fit(1)  # a warning would be an error here
    with pytest.warns(UserWarning, match=f"^{re.escape(CONSTANT)}$"):
        learner(OwnKey()).fit(1)


def from_loss(loss, *callbacks):
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        loss,
        optax.sgd(0.1),
        data=[np.ones(2, np.float32)] * 4,
        callbacks=callbacks,
        default_callbacks=False,
    )


COUNTED = (
    " changed the variable `calls`. The change happens once, while the step is traced, and not at each step. Change it "
    "in a host handler, for example of StepEnd."
)


def counting(*, changes):
    """Return a function of the parameters and the batch, or of the loss, that counts its calls if `changes` is true."""
    calls = 0

    def called(*args):
        nonlocal calls
        calls += changes
        return jnp.mean(args[0]["w"] * args[1]) if len(args) > 1 else args[0]

    return called


def test_counter_in_loss_function_is_a_warning():
    with pytest.warns(UserWarning, match=f"^{re.escape('The loss function' + COUNTED)}$"):
        from_loss(counting(changes=1))
    from_loss(counting(changes=0))


def loss(params, batch):
    return jnp.mean(params["w"] * batch)


def test_counter_in_metric_function_is_a_warning():
    def learner(changes):
        called = counting(changes=changes)
        metric = fluxcb.callbacks.Metric(lambda loss: called(loss), "count", needs=("loss",))
        direct = fluxcb.callbacks.Metric(called, "direct", needs=("loss",))
        return from_loss(loss, Metrics(metric, direct))

    # The other metric only calls the function that counts, whose variables are not looked at.
    with pytest.warns(UserWarning, match=f"^{re.escape('The function `called` of Metrics(count, direct)' + COUNTED)}$"):
        learner(1)
    learner(0)


def test_counter_in_traced_handler_is_a_warning():
    class Count(Callback):
        @on(ForwardBegin, TrainingPhase)
        def count(self, event, phase, learner):
            global handled
            handled += 1

    with pytest.warns(UserWarning, match="^" + re.escape("The traced handler Count().count changed the variable")):
        testlearner(Count())


@pytest.mark.parametrize("change", [lambda seen: seen.append(1), lambda seen: seen.__setitem__(0, seen[0] + 1)])
def test_list_that_a_traced_handler_changes_is_a_warning(change):
    seen, kept = [0], [0]

    class Collect(Callback):
        @on(ForwardBegin, TrainingPhase)
        def collect(self, event, phase, learner):
            change(seen)
            len(kept)

    text = COUNTED.replace("calls", "seen")
    with pytest.warns(UserWarning, match=f"^{re.escape('The traced handler Collect().collect' + text)}$"):
        testlearner(Collect())


def test_list_that_a_host_handler_changes_is_no_warning():
    seen = []

    class Collect(Callback):
        @on(StepEnd, TrainingPhase)
        def collect(self, event, phase, learner):
            seen.append(learner.progress.step)

        def stateaccess(self):
            return {"progress": fluxcb.Read()}

    testlearner(Collect()).fit(1)
    assert seen == [1, 2, 3, 4]


handled = 0
limit = 0.5


def above(loss):
    return jnp.float32(loss > limit)


def test_changed_variable_of_metric_function_is_a_warning(monkeypatch):
    def metrics():
        return Metrics(fluxcb.callbacks.Metric(above, "above", needs=("loss",)))

    learner = from_loss(loss, metrics())
    learner.fit(1)
    monkeypatch.setitem(globals(), "limit", 0.55)
    text = (
        "The variable `limit` has changed from 0.5 to 0.55, but the function `above` of Metrics(above) still uses 0.5, "
        "which is a constant of the compiled step. Replace the callback: `learner.callbacks.replace(Metrics(...))`."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        learner.fit(1)
    learner.callbacks.replace(metrics())
    # The losses are 1.0, 0.9, ... in float32.
    assert learner.fit(1)["training/above"] == [1.0, 0.25, 0.0]
