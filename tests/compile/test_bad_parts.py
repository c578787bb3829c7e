"""Invalid losses, models, optimizers, keys and schedules: complete messages."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Callback,
    DeclarationError,
    Learner,
    MissingStateError,
    TraceError,
    Write,
    every,
    inject,
    on,
)
from fluxcb.events import ComputeEnd, StepBegin
from fluxcb.models import pair
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

XS = np.array([[1.0], [2.0]], np.float32)
YS = 3 * XS - 1


def at(function):
    return f"{os.path.relpath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def fails(error, *callbacks, **kwargs):
    """Return the message of the error that construction raises, and check that the callbacks can be used again."""
    with pytest.raises(error) as raised:
        testlearner(*callbacks, **kwargs)
    assert all(getattr(callback, "_fluxcb_owner", None) is None for callback in callbacks)
    return str(raised.value)


CARRY = (
    "  why:   the structure, shapes and dtypes of the carry are fixed when the step is compiled\n"
    "  fix:   keep the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`, or create the value "
    "with the new ones in `init`"
)


def learner_with(loss_fn, **kwargs):
    return Learner(
        (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs),
        loss_fn,
        optax.sgd(0.1),
        data=[(XS, YS)],
        default_callbacks=False,
        **kwargs,
    )


TUPLE = "return only the loss; a loss function `loss_fn(model, batch)` can also return `(loss, aux)`"


@pytest.mark.parametrize(
    ("loss_fn", "got", "fix"),
    [
        (lambda o, y: (o - y) ** 2, "float32[2, 1]", "take the mean over the batch: `jnp.mean(loss)`"),
        (lambda o, y: jnp.argmax(o), "int32[]", "return a real floating-point scalar"),
        (lambda o, y: jnp.mean(o) * 1j, "complex64[]", "return a real floating-point scalar"),
        (lambda o, y: None, "None", "return a real floating-point scalar"),
        (lambda o, y: 1.0, "float 1.0", "return a real floating-point scalar"),
        (lambda o, y: (jnp.mean(o), {}), "(float32[], {})", TUPLE),
        (lambda o, y: {"mse": jnp.mean(o)}, '{"mse": float32[]}', "return a real floating-point scalar"),
        (lambda o, y: str(o), "a str with the repr of a traced array", "return a real floating-point scalar"),
    ],
    ids=["vector", "integer", "complex", "none", "python", "tuple", "dict", "text"],
)
def test_non_numeric_loss_raises(loss_fn, got, fix):
    with pytest.raises(TraceError) as raised:
        learner_with(loss_fn)
    assert str(raised.value) == (
        f"The loss must be one real floating-point number, float[], but is {got}.\n"
        "  why:   training differentiates the loss, and only a real scalar has a gradient\n"
        f"  fix:   {fix}"
    )


def test_changing_shape_of_model_state_raises():
    def apply(params, state, xs):
        return params["w"] * xs, {"seen": jnp.append(state["seen"], 1.0)}

    with pytest.raises(TraceError) as raised:
        Learner(
            pair(lambda key, xs: ({"w": jnp.zeros(())}, {"seen": jnp.zeros(1)}), apply, stateful=True),
            lambda o, y: jnp.mean((o - y) ** 2),
            optax.sgd(0.1),
            data=[(XS, YS)],
            default_callbacks=False,
        )
    assert str(raised.value) == (
        "The model changes the shape of its own state in a step: ['seen']: expected float32[1], got float32[2].\n"
        + CARRY
    )


def test_optimizer_changing_dtype_raises():
    def update(updates, state, params=None):
        return updates, state.astype(jnp.float16)

    bad = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    assert fails(TraceError, optimizer=bad) == (
        "The optimizer changes the shape or dtype of the train state: "
        "['opt_state']: expected float32[], got float16[].\n" + CARRY
    )


class Schedules(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def put(self, event: StepBegin, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = 0.1


WHY_INJECTED = "  why:   only injected hyperparameters are arrays on the device, which can change without recompiling\n"


def test_hyperparameter_without_inject_raises():
    assert fails(MissingStateError, Schedules(), optimizer=optax.adam(0.1)) == (
        "Schedules() needs `hyperparams.learning_rate`, which this optimizer does not have.\n"
        f"  where: Schedules.stateaccess  {at(Schedules.stateaccess)}\n"
        + WHY_INJECTED
        + "  fix:   write `fluxcb.inject(optax.adam, learning_rate=1e-3)` instead of `optax.adam(...)`"
    )


class Sets(Callback):
    """Write the hyperparameter with the given name."""

    def __init__(self, name):
        self.name = name

    def stateaccess(self):
        return {"hyperparams": {self.name: Write()}}

    @on
    def set(self, event: StepBegin, phase: TrainingPhase, learner):
        setattr(learner.hyperparams, self.name, 0.1)


def own(learning_rate, b1=0.9):
    return optax.adam(learning_rate, b1)


def schedule(step):
    return 0.1


def declare(name):
    return f'add `{{"hyperparams": {{"{name}": Write()}}}}` to `stateaccess`'


def rename(name, meant):
    return f"write `learner.hyperparams.{meant}` instead of `learner.hyperparams.{name}`"


@pytest.mark.parametrize(
    ("name", "meant"), [("lr", "learning_rate"), ("beta1", "b1"), ("nesterv", "nesterov"), ("x", "")]
)
def test_unknown_argument_of_inject_raises(name, meant):
    with pytest.raises(DeclarationError) as raised:
        inject(optax.adam, **{"learning_rate": 0.1, name: 0.1})
    assert raised.value.what == f"`adam` has no argument `{name}`." + (f" Did you mean `{meant}`?" if meant else "")


# The optimizer, the hyperparameter that is wanted, what the message says after "does not have.", and the fix.
OPTIMIZERS = [
    (lambda: optax.sgd(0.1), "learning_rate", "", "write `{}` instead of `optax.sgd(...)`"),
    (lambda: optax.sgd(0.1, momentum=0.5, nesterov=True), "momentum", "", "write `{}` instead of `optax.sgd(...)`"),
    (lambda: optax.adamw(schedule), "weight_decay", "", "write `{}` instead of `optax.adamw(...)`"),
    (lambda: optax.adam(0.1, nesterov=True), "b1", "", "write `{}` instead of `optax.adam(...)`"),
    (
        lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        "learning_rate",
        "",
        "inside the optimizer, write `{}` instead of `optax.sgd(...)`",
    ),
    (
        lambda: optax.multi_transform({"all": optax.lion(0.1)}, {"w": "all", "b": "all"}),
        "learning_rate",
        "",
        "inside the optimizer, write `{}` instead of `optax.lion(...)`",
    ),
    (
        lambda: optax.chain(optax.adam(0.1), optax.sgd(0.1)),
        "learning_rate",
        "",
        "build the optimizer with `{}`, where `factory` makes it, e.g. `optax.adam`",
    ),
    (lambda: inject(optax.adam, learning_rate=0.1), "b2", " It has `learning_rate`.", "inject it as well: `{}`"),
    (lambda: inject(own, learning_rate=0.1), "b1", " It has `learning_rate`.", "inject it as well: `{}`"),
    (
        lambda: optax.sgd(0.1),
        "lr",
        " Did you mean `learning_rate`?",
        f"write `{{}}` instead of `optax.sgd(...)`, {rename('lr', 'learning_rate')}, and {declare('learning_rate')}",
    ),
    (
        lambda: inject(optax.adam, learning_rate=0.1),
        "lr",
        " It has `learning_rate`. Did you mean `learning_rate`?",
        f"{rename('lr', 'learning_rate')}, and {declare('learning_rate')}",
    ),
    (
        lambda: optax.adam(0.1),
        "beta1",
        " Did you mean `b1`?",
        f"write `{{}}` instead of `optax.adam(...)`, {rename('beta1', 'b1')}, and {declare('b1')}",
    ),
    (
        lambda: optax.sgd(0.1),
        "temperature",
        "",
        "use one of the names that it can have: `learning_rate`, `momentum`",
    ),
    (
        lambda: inject(lambda rate: optax.sgd(rate), rate=0.1),
        "learning_rate",
        " It has `rate`. Did you mean `rate`?",
        f"{rename('learning_rate', 'rate')}, and {declare('rate')}",
    ),
]


@pytest.mark.parametrize(("optimizer", "name", "says", "fix"), OPTIMIZERS)
def test_unknown_hyperparameter_raises_with_suggestion(optimizer, name, says, fix):
    made = {"w": jnp.zeros(()), "b": jnp.zeros(())}
    text = fails(MissingStateError, Sets(name), optimizer=optimizer())
    first, *_, last = text.splitlines()
    assert first == f"Sets() needs `hyperparams.{name}`, which this optimizer does not have.{says}"
    call = re.search(r"`(fluxcb\.inject\(.*?\))`", last)
    assert last == "  fix:   " + fix.replace("{}", call[1] if call else "")
    # The optimizer that the message writes has the hyperparameter that it names.
    meant = re.search(r'"hyperparams": \{"(\w+)"', last)
    wanted = meant[1] if meant else name
    if call:
        names = {"fluxcb": fluxcb, "optax": optax, "own": own, "factory": optax.adam}
        optimizer = lambda: eval(call[1], names)  # noqa: E731, S307 - of the message's own text
    if call or meant:
        assert wanted in optimizer().init(made).hyperparams
        testlearner(Sets(wanted), optimizer=optimizer()).fit(1)


def test_hyperparameter_with_own_schedule_raises():
    scheduled = inject(optax.sgd, learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    assert fails(MissingStateError, Schedules(), optimizer=scheduled) == (
        "Schedules() writes `hyperparams.learning_rate`, which an optax schedule inside the optimizer sets "
        "at each update.\n"
        f"  where: Schedules.stateaccess  {at(Schedules.stateaccess)}\n"
        "  why:   the next update would overwrite the written value\n"
        "  fix:   inject a number instead of the schedule: `fluxcb.inject(optax.sgd, learning_rate=1e-3)`"
    )


def test_writing_to_integer_hyperparameter_raises():
    def with_rate(rate):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)

    assert fails(MissingStateError, Schedules(), optimizer=with_rate(1)) == (
        "Schedules() writes `hyperparams.learning_rate`, which is an integer.\n"
        f"  where: Schedules.stateaccess  {at(Schedules.stateaccess)}\n"
        "  why:   written values would be rounded to integers, and 0.1 would become 0\n"
        "  fix:   begin with a float in the optimizer, e.g. `learning_rate=1.0` instead of `learning_rate=1`"
    )
    fixed = testlearner(Schedules(), optimizer=with_rate(1.0))
    fixed.fit(1)
    assert float(fixed.hyperparams["learning_rate"]) == np.float32(0.1)


def test_inject_makes_a_float_of_an_integer():
    learner = testlearner(Schedules(), optimizer=inject(optax.sgd, learning_rate=1))
    assert float(learner.hyperparams["learning_rate"]) == 1.0
    learner.fit(1)
    assert float(learner.hyperparams["learning_rate"]) == np.float32(0.1)


def test_duplicate_hyperparameter_raises():
    twice = optax.chain(inject(optax.sgd, learning_rate=0.1), inject(optax.sgd, learning_rate=0.1))
    assert fails(MissingStateError, Schedules(), optimizer=twice) == (
        "Schedules() needs `hyperparams.learning_rate`, which this optimizer has 2 times.\n"
        f"  where: Schedules.stateaccess  {at(Schedules.stateaccess)}\n"
        "  why:   the parts of an `optax.chain` have no names, so fluxcb cannot distinguish these hyperparameters\n"
        '  fix:   name the parts with `optax.named_chain(("first", ...), ("second", ...))`, and write '
        "`first.learning_rate`"
    )


@pytest.mark.parametrize(("key", "shown"), [("abc", "'abc'"), (1.5, "1.5"), (True, "True"), (None, "None")])
def test_invalid_key_raises(key, shown):
    assert fails(DeclarationError, key=key) == (
        f"`key` must be an int or one random key, not {shown}.\n  fix:   write `key=0` or `key=jax.random.key(0)`"
    )


def test_array_of_keys_raises():
    for key in (jax.random.split(jax.random.PRNGKey(0)), jax.random.split(jax.random.key(0))):
        assert fails(DeclarationError, key=key).startswith("`key` must be an int or one random key, not ")


def test_invalid_optimizer_raises():
    assert fails(DeclarationError, optimizer=0.1) == (
        "`optimizer` must be an optax optimizer, not 0.1.\n"
        "  fix:   write e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`"
    )


def test_unknown_program_raises():
    assert fails(DeclarationError, program="fast") == (
        "`program` is 'loop', 'straight' or None, not 'fast'.\n  fix:   leave it out: the model decides"
    )


def test_integer_parameter_raises():
    with pytest.raises(DeclarationError) as raised:
        Learner.from_loss({"w": jnp.zeros(()), "n": jnp.int32(3)}, lambda p, b, k: p["w"], optax.sgd(0.1))
    assert str(raised.value) == (
        "The parameter `params['n']` is int32[]; it must be floating-point.\n"
        "  why:   there is no gradient with respect to an integer\n"
        "  fix:   keep it in the model state, or in a closure of the model or the loss function"
    )


def test_missing_parameters_raise():
    with pytest.raises(DeclarationError) as raised:
        Learner.from_loss({}, lambda p, b, k: 0.0, optax.sgd(0.1))
    assert str(raised.value) == (
        "The model has no parameters.\n"
        "  fix:   check what its `init` returns\n"
        "     or: in a module of Flax NNX, put its arrays into `nnx.Param(...)`"
    )


# -- schedules ---------------------------------------------------------------------------------------------------------


class Adds(Callback):
    def stateaccess(self):
        return {"step": {"extra": Write()}}

    @on
    def add(self, event: ComputeEnd, phase: TrainingPhase, learner):
        learner.step.extra = jnp.zeros(())


def test_value_written_only_in_some_steps_raises():
    bad = every(Adds(), steps=2, traced=True)
    assert fails(TraceError, bad) == (
        "Adds() at EverySteps(steps=2) writes `step.extra` only at some steps, "
        "and nothing gives it a value at the others.\n"
        f"  where: Adds.add  {at(Adds.add)}\n"
        "  fix:   let a handler without a schedule write a default first, or drop `traced=True`"
    )


def test_time_schedule_or_predicate_on_traced_handler_raises():
    from fluxcb import throttle

    with pytest.raises(DeclarationError) as raised:
        every(Adds(), seconds=3, traced=True)
    assert str(raised.value) == (
        "Traced handlers of Adds() cannot be scheduled by EverySeconds(seconds=3).\n"
        "  why:   the compiled step has the step and epoch numbers, but cannot read a clock or call Python\n"
        "  fix:   use `steps=` or `epochs=` for traced handlers"
    )
    with pytest.raises(DeclarationError, match=r"^Traced handlers of Adds\(\) cannot be scheduled by EverySeconds"):
        throttle(Adds(), ComputeEnd, seconds=1)
