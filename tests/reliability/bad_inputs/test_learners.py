"""Invalid arguments of a Learner: model, parameters, loss, optimizer, phases, sizes, and the list of callbacks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import DataError, DeclarationError, Learner, ThreadExecutor, TraceError, every
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog

NO_ARRAY = "{} has {}, which JAX cannot use as an array of numbers."
BATCH = np.zeros(4, np.float32)
INIT, APPLY = lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs


def mean(params, batch, key):
    return jnp.mean((params["w"] - batch) ** 2)


def mse(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


async def coroutine(params, batch, key):
    return jnp.mean(params["w"])


def generator(params, batch, key):
    yield jnp.mean(params["w"])


def learner(log, model=(INIT, APPLY), loss_fn=mse, optimizer=None, **given):
    given = {"data": [(BATCH, BATCH)], "callbacks": [log], "default_callbacks": False, **given}
    Learner(model, loss_fn, optax.sgd(0.1) if optimizer is None else optimizer, **given)


def from_loss(log, params=None, loss_fn=mean, optimizer=None, **given):
    params = {"w": jnp.zeros(())} if params is None else params
    given = {"data": [BATCH], "callbacks": [log], "default_callbacks": False, **given}
    Learner.from_loss(params, loss_fn, optax.sgd(0.1) if optimizer is None else optimizer, **given)


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (5, "`model` is of type `int`, which fluxcb cannot train."),
        ("mlp", "`model` is of type `str`, which fluxcb cannot train."),
        (dict, "`model` is the class `dict`, not an instance of it."),
        ((INIT,), "`model` is a tuple (function), which fluxcb cannot train."),
        ((INIT, APPLY, 1), "`model` is a tuple (function, function, int), which fluxcb cannot train."),
        ((lambda key: {}, APPLY), "`init` of a model pair takes (key), and is called as `init(key, xs)`."),
        ((INIT, lambda params: 0), "`apply` of a model pair takes (params), and is called as `apply(params, xs)`."),
        ((lambda key, xs: None, APPLY), "The model has no parameters."),
        ((lambda key, xs: {"w": "a"}, APPLY), NO_ARRAY.format("`params`", "str 'a' at `params['w']`")),
    ],
)
def test_invalid_models_raise(model, first, refuses):
    refuses(lambda log: learner(log, model), DeclarationError, first)


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        (object(), "an object of type `object`"),
        ("abc", "str 'abc'"),
        ({1.0, 2.0}, "set {1.0, 2.0}"),
        (lambda: 1, "an object of type `function`"),
        ({"w": "x"}, "str 'x' at `params['w']`"),
        ({"w": [1.0, "a"]}, "str 'a' at `params['w'][1]`"),
        ({"a.b": {"c/d": object()}}, "an object of type `object` at `params['a.b']['c/d']`"),
        ({"w": 2**70}, "int 1180591620717411303424 at `params['w']`"),
        ({"w": np.zeros(2, ">f4")}, ">f4[2] at `params['w']`"),
        ({"w": np.array(["a"])}, "<U1[1] at `params['w']`"),
        ({"w": np.array([None, 1])}, "object[2] at `params['w']`"),
    ],
    ids=[
        *["object", "text", "set", "function", "leaf-text", "list", "deep", "huge", "byte-order", "texts", "objects"],
    ],
)
def test_params_that_are_not_arrays_raise(params, shown, refuses):
    refuses(lambda log: from_loss(log, params), DeclarationError, NO_ARRAY.format("`params`", shown))


def test_deleted_params_raise(refuses):
    x = jnp.zeros(3)
    x.delete()
    shown = "an array that has been deleted (float32[3]) at `params['w']`"
    refuses(lambda log: from_loss(log, {"w": x}), DeclarationError, NO_ARRAY.format("`params`", shown))


@pytest.mark.parametrize(
    ("leaf", "first"),
    [
        (True, "The parameter `params['w']` is bool[]; it must be floating-point."),
        (3, "The parameter `params['w']` is int32[]; it must be floating-point."),
        (np.uint8(3), "The parameter `params['w']` is uint8[]; it must be floating-point."),
        (jax.random.key(0), "The parameter `params['w']` is key<fry>[]; it must be floating-point."),
    ],
    ids=["bool", "int", "uint8", "key"],
)
def test_params_without_gradient_raise(leaf, first, refuses):
    refuses(lambda log: from_loss(log, {"w": leaf}), DeclarationError, first)


def test_params_with_unsortable_names_raise(refuses):
    given = {"a": jnp.zeros(()), 1: jnp.zeros(())}
    refuses(lambda log: from_loss(log, given), DeclarationError, "`params` has a dict whose keys cannot be sorted.")


@pytest.mark.parametrize(
    ("loss_fn", "first"),
    [
        (5, "`loss_fn` must be a function, not int 5."),
        ("mse", "`loss_fn` must be a function, not str 'mse'."),
        (jnp.zeros(2), "`loss_fn` must be a function, not ArrayImpl Array([0., 0.], dtype=float32)."),
        (coroutine, "`loss_fn` is a coroutine function; it must return the loss."),
        (generator, "`loss_fn` is a generator function; it must return the loss."),
        (
            lambda params: jnp.mean(params["w"]),
            "`loss_fn` takes (params), and is called as `loss_fn(params, batch, key)`.",
        ),
    ],
    ids=["number", "name", "array", "coroutine", "generator", "arguments"],
)
@pytest.mark.parametrize("data", [[BATCH], None], ids=["data", "no-data"])
def test_losses_that_cannot_be_called_raise(loss_fn, first, data, refuses):
    refuses(lambda log: from_loss(log, loss_fn=loss_fn, data=data), DeclarationError, first)


def test_loss_of_outputs_with_batch_raises(refuses):
    first = "`loss_fn` takes (params, batch, key), and is called as `loss_fn(outputs, ys)`."
    refuses(lambda log: learner(log, loss_fn=mean), DeclarationError, first)


CONSTANT = "The loss does not depend on `params`."
PAIR = "The loss function returned a tuple of {}; it must return the loss or a pair `(loss, aux)`."


@pytest.mark.parametrize(
    ("loss_fn", "first"),
    [
        (lambda p, b, k: jnp.float32(1), CONSTANT),
        (lambda p, b, k: jnp.mean(b), CONSTANT),
        (lambda p, b, k: jnp.mean(p["w"] > b, dtype=jnp.float32), CONSTANT),
        (lambda p, b, k: jax.lax.stop_gradient(jnp.mean(p["w"] - b)), CONSTANT),
        (lambda p, b, k: (p["w"],), PAIR.format(1)),
        (lambda p, b, k: (p["w"], 1, 2), PAIR.format(3)),
        (lambda p, b, k: (p["w"], "x"), NO_ARRAY.format("`step.aux`", "str 'x'")),
        (
            lambda p, b, k: (p["w"], {"f": mean}),
            NO_ARRAY.format("`step.aux`", "an object of type `function` at `step.aux['f']`"),
        ),
        (
            lambda p, b, k: p["w"] if p["w"] > 0 else -p["w"],
            "`LossTrainingPhase.step` needs a value in Python: "
            "Attempted boolean conversion of traced array with shape bool[].",
        ),
        (
            lambda p, b, k: np.asarray(p["w"]).mean(),
            "`LossTrainingPhase.step` needs a value in Python: "
            "The numpy.ndarray conversion method __array__() was called on traced array with shape float32[]",
        ),
        (None, "This Learner has no loss function, but its phase calls one."),
    ],
    ids=["constant", "batch", "comparison", "stop", "one", "three", "aux", "function", "branch", "numpy", "none"],
)
def test_losses_that_cannot_be_differentiated_raise(loss_fn, first, refuses):
    refuses(lambda log: from_loss(log, loss_fn=loss_fn), TraceError, first)


WHOLE = "`{}` must be a whole number of at least 1, not {!r}."


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"optimizer": "adam"}, "`optimizer` must be an optax optimizer, not 'adam'."),
        ({"key": 2**70}, f"`key` must be a seed of at most 64 bits, not {2**70}."),
        ({"key": np.float32(3)}, "`key` must be an int or one random key, not np.float32(3.0)."),
        ({"key": np.bool_(True)}, "`key` must be an int or one random key, not np.True_."),
        ({"phases": 5}, "`phases` must be a list of phase instances, not 5."),
        ({"phases": "training"}, "`phases` must be a list of phase instances, not 'training'."),
        ({"phases": TrainingPhase()}, "`phases` must be a list of phase instances, not TrainingPhase()."),
        ({"phases": [5]}, "`phases` contains 5, which is not a phase instance."),
        ({"executor": ThreadExecutor}, "`executor` must be an executor, not the class `ThreadExecutor`."),
        ({"executor": "thread"}, "`executor` must be an executor, not 'thread'."),
        ({"program": 5}, "`program` is 'loop', 'straight' or None, not 5."),
        ({"steps_per_call": "fast"}, "`steps_per_call` is a number of steps or 'auto', not 'fast'."),
        *(({"steps_per_call": x}, WHOLE.format("steps_per_call", x)) for x in (0, 1.5, True, None)),
        *(({"window_bytes": x}, WHOLE.format("window_bytes", x)) for x in (0, -1, "1M", float("nan"))),
    ],
    ids=str,
)
def test_invalid_settings_raise(given, first, refuses):
    refuses(lambda log: from_loss(log, **given), DeclarationError, first)


LISTED = "The callbacks list contains {}, which is not a callback instance."


@pytest.mark.parametrize(
    ("items", "first"),
    [
        (lambda log: 5, "`callbacks` must be a list of callback instances, not 5."),
        (lambda log: None, "`callbacks` must be a list of callback instances, not None."),
        (lambda log: log, "`callbacks` must be a list of callback instances, not EventLog()."),
        (lambda log: "abc", LISTED.format("'a'")),
        (
            lambda log: {"log": log},
            "`callbacks` must be a list of callback instances, not {'log': EventLog()}.",
        ),
        (lambda log: [log, 5], LISTED.format("5")),
        (lambda log: [log, EventLog], LISTED.format("the class `EventLog`")),
        (lambda log: [[log]], LISTED.format("[EventLog()]")),
        (lambda log: [print, log], LISTED.format("<built-in function print>")),
        (
            lambda log: [log, log],
            "The callback EventLog() appears twice in the list; first as EventLog() at position 0.",
        ),
        (
            lambda log: [log, every(log, steps=2)],
            "The callback EventLog() at EverySteps(steps=2) appears twice in the list; "
            "first as EventLog() at position 0.",
        ),
    ],
)
def test_invalid_callbacks_raise(items, first, refuses):
    refuses(lambda log: from_loss(log, callbacks=items(log)), DeclarationError, first)


@pytest.mark.parametrize("make", [learner, functools.partial(from_loss, loss_fn=mean)], ids=["model", "loss"])
@pytest.mark.parametrize(
    ("batch", "shown"), [("abc", "str 'abc'"), ([["a"]], "str 'a' at `example_batch[0][0]`")], ids=["text", "texts"]
)
def test_invalid_example_batches_raise(make, batch, shown, refuses):
    refuses(lambda log: make(log, data=None, example_batch=batch), DataError, NO_ARRAY.format("`example_batch`", shown))
