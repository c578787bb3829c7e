"""learner.predict returns the outputs of the trained model in order, for every format of the data."""

import io
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fluxcb
from fluxcb import Callback, DataError, DeclarationError, Learner, MissingStateError, Read, on
from fluxcb.callbacks import ParameterEMA, ProgressBar, StochasticWeightAveraging
from fluxcb.data import ArrayLoader
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(10, 3)).astype(np.float32)
YS = (XS @ np.float32([[1], [2], [3]])).astype(np.float32)
W = np.float32([[1, 2], [0, 1], [2, 0]])
OUTPUTS = XS @ W
BATCHES = [(XS[:4], YS[:4]), (XS[4:8], YS[4:8]), (XS[8:], YS[8:])]


class Traces:
    """A linear model that counts how often it is traced."""

    def __init__(self):
        self.shapes = []

    def apply(self, params, xs):
        self.shapes.append(xs.shape)
        return xs @ params["w"]


def fixed(traces=None, **options):
    """Return a Learner whose model is `xs @ W`."""
    traces = traces or Traces()
    options = {"data": [(XS[:4], OUTPUTS[:4])], "default_callbacks": False, **options}
    learner = Learner(
        (lambda key, xs: {"w": jnp.asarray(W)}, traces.apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.0),
        **options,
    )
    traces.shapes.clear()
    return learner


class Pair(NamedTuple):
    xs: np.ndarray
    ys: np.ndarray


class Loader:
    """Yield batches in one buffer that is reused."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        buffer = np.empty((4, 3), np.float32)
        for xs, ys in self.batches:
            buffer[: len(xs)] = xs
            yield buffer[: len(xs)], ys
            buffer[:] = np.nan


FORMS = {
    "an array": XS,
    "an array on the device": jnp.asarray(XS),
    "inputs and targets": (XS, YS),
    "a named pair": Pair(XS, YS),
    "inputs without targets": (XS, None),
    "a tuple of the inputs": (XS,),
    "batches that are tuples of inputs": [(xs,) for xs, _ in BATCHES],
    "a list of batches": BATCHES,
    "a list of inputs": [xs for xs, _ in BATCHES],
    "batches that are lists": [list(batch) for batch in BATCHES],
    "a loader": ArrayLoader((XS, YS), 4, shuffle=False),
    "a loader of inputs": ArrayLoader(XS, 4, shuffle=False),
    "a loader on the device": ArrayLoader((XS, YS), 4, shuffle=False, device=True),
    "a placed loader": fluxcb.data.place(ArrayLoader((XS, YS), 4, shuffle=False), jax.devices()[0]),
    "a loader that reuses its buffer": Loader(BATCHES),
    "one batch": BATCHES[0],
    "one example": XS[:1],
}


@pytest.mark.parametrize("form", list(FORMS))
def test_every_data_format(form):
    outputs = fixed().predict(FORMS[form])
    assert type(outputs) is np.ndarray
    assert outputs.dtype == np.float32
    expected = {"one batch": OUTPUTS[:4], "one example": OUTPUTS[:1]}.get(form, OUTPUTS)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)


def test_iterator_is_read_once():
    np.testing.assert_allclose(fixed().predict(iter(BATCHES)), OUTPUTS, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 5, 10, 99])
def test_batch_size_does_not_change_outputs(size):
    np.testing.assert_allclose(fixed().predict(XS, batch_size=size), OUTPUTS, rtol=1e-5)


@pytest.mark.parametrize(
    ("data", "options", "shapes"),
    [
        (XS, {}, [(4, 3)]),  # as many as a training batch; the last two together with two of those before
        (XS, {"batch_size": 7}, [(7, 3)]),
        (XS, {"batch_size": 64}, [(10, 3)]),
        (BATCHES, {}, [(4, 3), (2, 3)]),
        ([*BATCHES, *BATCHES], {}, [(4, 3), (2, 3)]),
    ],
)
def test_model_is_compiled_once_per_shape(data, options, shapes):
    traces = Traces()
    learner = fixed(traces)
    for _ in range(3):
        learner.predict(data, **options)
    assert traces.shapes == shapes
    learner.fit(1)
    traces.shapes.clear()
    learner.predict(data, **options)
    assert traces.shapes == []


def test_default_batch_size_is_32_without_training_batch():
    traces = Traces()
    assert fixed(traces, data=None).predict(np.zeros((100, 3), np.float32)).shape == (100, 2)
    assert traces.shapes == [(32, 3)]


# -- inputs that are pytrees -------------------------------------------------------------------------------------------


def two_inputs(example):
    def apply(params, xs):
        one, two = (xs["a"], xs["b"]) if isinstance(xs, dict) else xs
        return {"sum": params["w"] * (one + two)}

    return Learner(
        (lambda key, xs: {"w": jnp.ones(())}, apply),
        lambda outputs, ys: jnp.mean(outputs["sum"]),
        optax.sgd(0.0),
        example_batch=example,
        default_callbacks=False,
    )


@pytest.mark.parametrize(
    ("example", "data"),
    [
        (((XS, XS), YS), (XS, 2 * XS)),
        (((XS, XS), YS), ((XS, 2 * XS), YS)),
        (((XS, XS), YS), [(XS[:5], 2 * XS[:5]), (XS[5:], 2 * XS[5:])]),
        (({"a": XS, "b": XS}, YS), {"a": XS, "b": 2 * XS}),
        (({"a": XS, "b": XS}, YS), ({"a": XS, "b": 2 * XS}, YS)),
        ({"a": XS, "b": XS}, [{"a": XS, "b": 2 * XS}]),
    ],
)
def test_inputs_are_distinguished_from_batches_by_structure(example, data):
    outputs = two_inputs(example).predict(data)
    assert list(outputs) == ["sum"]
    np.testing.assert_allclose(outputs["sum"], 3 * XS, rtol=1e-6)


# -- the model that predicts -------------------------------------------------------------------------------------------


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.second = eqx.nn.Linear(3, 8, key=key), eqx.nn.Linear(8, 1, key=key)
        self.norm, self.dropout = eqx.nn.BatchNorm(8, "batch", mode="batch"), eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.first(x), state)
        return self.second(self.dropout(x, key=key)), state


def pair_apply(params, xs, *, key, train):
    hidden = xs @ params["in"]
    return (hidden * jax.random.bernoulli(key, 0.5, hidden.shape) if train else hidden) @ params["out"]


MODELS = {
    "pair": lambda: (
        lambda key, xs: {"in": jax.random.normal(key, (3, 8)), "out": jax.random.normal(key, (8, 1))},
        pair_apply,
    ),
    "linen": LinenNet,
    "nnx": lambda: NNXNet(nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0)),
}
CALLS = {
    "pair": lambda model: model(XS),
    "linen": lambda model: model(XS, train=False),
    "nnx": lambda model: model(XS),
    "equinox": lambda model: jax.vmap(model[0], in_axes=(0, None), out_axes=(0, None))(XS, model[1])[0],
}


def loss_fn(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def assert_same(before, after):
    assert jax.tree.structure(before) == jax.tree.structure(after)

    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)

    jax.tree.map(same, before, after)


@pytest.mark.parametrize("kind", list(MODELS))
def test_predict_matches_model_and_does_not_change_training(kind):
    def made():
        return Learner(
            MODELS[kind](), loss_fn, optax.adam(0.01), data=(BATCHES, BATCHES), callbacks=[ParameterEMA(0.5)],
            default_callbacks=False,
        )  # fmt: skip

    learner, plain = made(), made()
    learner.fit(2)
    before = learner.state
    outputs = learner.predict(XS, batch_size=3)
    np.testing.assert_array_equal(learner.predict(XS, batch_size=3), outputs)
    assert_same(before, learner.state)
    np.testing.assert_allclose(outputs, CALLS[kind](learner.model), rtol=1e-4, atol=1e-5)
    learner.fit(1)
    plain.fit(3)
    assert_same(plain.state, learner.state)


@pytest.mark.parametrize("kind", list(MODELS))
def test_model_can_be_trained_in_other_learner(kind):
    def made(model):
        return Learner(model, loss_fn, optax.sgd(0.05), data=BATCHES[:2], default_callbacks=False)

    first = made(MODELS[kind]())
    first.fit(1)
    expected = [float(first.run_step(TrainingPhase(), batch)["loss"]) for batch in BATCHES[:2]]

    other = made(MODELS[kind]())
    other.fit(1)
    state = other.state
    other.set_model(other.model)
    other.state = {**other.state, "key": state["key"], "counters": state["counters"]}
    assert [float(other.run_step(TrainingPhase(), batch)["loss"]) for batch in BATCHES[:2]] == expected

    other = made(MODELS[kind]())
    other.fit(1)
    again = made(other.model)
    again.state = {**again.state, **{name: other.state[name] for name in ("key", "counters")}}
    assert [float(again.run_step(TrainingPhase(), batch)["loss"]) for batch in BATCHES[:2]] == expected


@pytest.mark.parametrize(
    ("callbacks", "average", "entry"),
    [
        ([ParameterEMA(0.5)], "validated", "ema"),
        ([ParameterEMA(0.5)], None, None),
        ([ParameterEMA(0.5, validate=False)], "validated", None),
        ([ParameterEMA(0.5, validate=False)], "ema", "ema"),
        ([StochasticWeightAveraging(1)], "validated", "swa"),
        ([ParameterEMA(0.5, validate=False), StochasticWeightAveraging(1)], "ema", "ema"),
    ],
)
def test_average_selects_parameters(callbacks, average, entry):
    learner = Learner(
        (lambda key, xs: {"w": jnp.zeros((3, 1))}, lambda params, xs: xs @ params["w"]),
        loss_fn, optax.sgd(0.1), data=BATCHES, callbacks=callbacks, default_callbacks=False,
    )  # fmt: skip
    learner.fit(2)
    params = learner.params if entry is None else learner.cbstate[entry]["params"]
    expected = XS @ np.asarray(params["w"])
    np.testing.assert_allclose(learner.predict(XS, average=average), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(learner.get_model(average=average)(XS), expected, rtol=1e-5, atol=1e-6)
    if average == "validated":
        np.testing.assert_allclose(learner.model(XS), expected, rtol=1e-5, atol=1e-6)


def test_unknown_average_raises(refused):
    with refused(
        DeclarationError,
        "`average` is 'ema', and no callback of this Learner keeps such an average.\n"
        "  fix:   write `average=None` for the parameters that are trained\n"
        "     or: add `ParameterEMA()`, which keeps `ema`",
    ):
        fixed().predict(XS, average="ema")
    with refused(
        DeclarationError,
        "`average` is 'swa', and no callback of this Learner keeps such an average.\n"
        "  fix:   write `average=None` for the parameters that are trained\n"
        "     or: add `StochasticWeightAveraging(start=1)`, which keeps `swa`",
    ):
        fixed().predict(XS, average="swa")
    assert fixed(callbacks=[StochasticWeightAveraging(start=1)]).predict(XS, average="swa").shape == (10, 2)
    learner = fixed(callbacks=[ParameterEMA(0.5)])
    with refused(
        DeclarationError,
        "`average` is 'emma', and no callback of this Learner keeps such an average. Did you mean `ema`?\n"
        "  why:   `cbstate` has `ema`\n"
        '  fix:   write `average="ema"`\n'
        "     or: write `average=None` for the parameters that are trained",
    ):
        learner.predict(XS, average="emma")
    assert learner.predict(XS, average="ema").shape == learner.predict(XS, average=None).shape == (10, 2)


def test_predict_uses_model_that_was_set():
    learner = fixed()
    learner.predict(XS)
    learner.set_model((lambda key, xs: {"w": jnp.asarray(2 * W)}, lambda params, xs: -xs @ params["w"]))
    np.testing.assert_allclose(learner.predict(XS), -2 * OUTPUTS, rtol=1e-5)


def test_sharded_parameters():
    devices = np.array(jax.devices()[:2])
    sharding = NamedSharding(Mesh(devices, ("model",)), PartitionSpec(None, "model"))
    learner = Learner(
        (lambda key, xs: {"w": jax.device_put(W, sharding)}, lambda params, xs: xs @ params["w"]),
        loss_fn, optax.sgd(0.1), data=[(XS[:4], OUTPUTS[:4])], default_callbacks=False,
    )  # fmt: skip
    learner.fit(1)
    expected = XS @ np.asarray(learner.params["w"])
    for data in (XS, jnp.asarray(XS), BATCHES):
        np.testing.assert_allclose(learner.predict(data), expected, rtol=1e-5)


def test_learner_with_custom_phase():
    class Own(AbstractTrainingPhase):
        def step(self, learner, emit):
            def loss(params):
                learner.step.loss = jnp.mean(learner.forward(params, learner.step.batch["inputs"]) ** 2)
                return learner.step.loss

            learner.step.grads = learner.grad(loss)
            learner.apply_updates()

    learner = Learner(
        (lambda key, xs: {"w": jnp.asarray(W)}, lambda params, xs: xs @ params["w"]),
        None, optax.sgd(0.0), data=[{"inputs": XS, "rest": YS}], phases=(Own(),), default_callbacks=False,
    )  # fmt: skip
    learner.fit(1)
    np.testing.assert_allclose(learner.predict(XS), OUTPUTS, rtol=1e-5)
    with pytest.raises(TypeError) as caught:  # the model is given the whole dict
        learner.predict({"inputs": XS, "rest": YS})
    assert caught.value.__notes__[-1] == (
        "raised by the model, when `learner.predict` applied it to batch 1: dict of float32[10, 3], float32[10, 1]; "
        "the Learner was built for inputs like dict of float32[10, 3], float32[10, 1]"
    )


class Predicts(Callback):
    def __init__(self, event):
        self.event, self.learner, self.outputs = event, None, []

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def at_step(self, event: StepEnd, phase: TrainingPhase, learner):
        if self.event is StepEnd:
            self.learner.predict(XS)

    @on
    def at_epoch(self, event: EpochEnd, phase: TrainingPhase, learner):
        if self.event is EpochEnd:
            self.outputs.append(self.learner.predict(XS))


def test_handler_may_predict_between_epochs_but_not_at_step():
    callback = Predicts(EpochEnd)
    callback.learner = fixed(callbacks=[callback])
    callback.learner.fit(2)
    np.testing.assert_allclose(callback.outputs, [OUTPUTS, OUTPUTS], rtol=1e-5)
    callback = Predicts(StepEnd)
    callback.learner = fixed(callbacks=[callback])
    with pytest.raises(DeclarationError) as caught:
        callback.learner.fit(1)
    assert caught.value.what == (
        "A step's handler reads `learner.predict(...)` from the Learner itself, not from its argument `learner`."
    )


# -- what cannot be meant ----------------------------------------------------------------------------------------------


def test_learner_without_model_raises(refused):
    learner = Learner.from_loss(
        {"w": jnp.ones(3)}, lambda params, batch, key: jnp.sum(params["w"] * batch), optax.sgd(0.1), data=[XS],
        default_callbacks=False,
    )  # fmt: skip
    with refused(
        DeclarationError,
        "This Learner has no model: it was built with `Learner.from_loss`.\n"
        "  fix:   apply your own function to `learner.params`",
    ):
        learner.predict(XS)


def test_learner_without_batch_raises():
    learner = Learner(LinenNet(), loss_fn, optax.sgd(0.1), default_callbacks=False)
    with pytest.raises(MissingStateError, match="The train state does not exist yet"):
        learner.predict(XS)


def test_shuffling_loader_raises(refused):
    with refused(
        DataError,
        "`data` of `learner.predict` is an `ArrayLoader` that shuffles.\n"
        "  why:   the outputs would be in random order, and not in the order of the arrays\n"
        "  fix:   pass the array of inputs: `learner.predict(xs)`\n"
        "     or: build the loader with `shuffle=False`",
    ):
        fixed().predict(fluxcb.data.map(lambda batch: batch, ArrayLoader((XS, YS), 4)))


def test_loader_that_drops_examples_raises(refused):
    with refused(
        DataError,
        "`data` of `learner.predict` is an `ArrayLoader` with `drop_last=True`.\n"
        "  why:   there would be no outputs for the examples of the last batch\n"
        "  fix:   pass the array of inputs: `learner.predict(xs)`\n"
        "     or: build the loader with `drop_last=False`",
    ):
        fixed().predict(ArrayLoader((XS, YS), 4, shuffle=False, drop_last=True))


@pytest.mark.parametrize(
    ("data", "shown"),
    [(None, "None"), (3.0, "3.0"), ("xs.npy", "'xs.npy'"), (object(), "of type `object`")],
)
def test_data_that_yields_no_batches_raises(data, shown, refused):
    with refused(
        DataError,
        "`data` of `learner.predict` must be an array, a batch, or an iterable of batches, "
        f"but it is {shown}.\n"
        "  fix:   pass arrays of inputs, a list of batches, or a loader",
    ):
        fixed().predict(data)


@pytest.mark.parametrize("data", [[], iter([])])
def test_empty_data_raises(data, refused):
    with refused(
        DataError,
        "`data` of `learner.predict` yields no batches.\n"
        "  fix:   check its length and filters; an iterator that is used up yields nothing the second time",
    ):
        fixed().predict(data)


WHY = "  why:   arrays are divided into batches along their first axes\n"


def test_data_without_examples_raises(refused):
    with refused(
        DataError,
        "`data` of `learner.predict` has no examples.\n"
        "  where: data is float32[0, 3]\n" + WHY + "  fix:   pass at least one example; check the filter or the slice "
        "that selected them",
    ):
        fixed().predict(np.zeros((0, 3), np.float32))
    assert fixed().predict(XS[0][None]).shape == (1, 2)


def test_data_with_a_scalar_raises(refused):
    with refused(
        DataError,
        "`data` of `learner.predict` has a scalar, which has no axis of examples.\n"
        "  where: data is float32[]\n" + WHY + "  fix:   pass arrays whose first axis is that of the examples",
    ):
        fixed().predict(np.float32(1))
    with refused(
        DataError,
        "`data` of `learner.predict` has a scalar, which has no axis of examples.\n"
        "  where: data['scale'] is float32[]\n"
        "         data['x'] is float32[10, 3]\n" + WHY + "  fix:   repeat it for each example: `np.full(10, value)`\n"
        "     or: if it is one value, write `[batch]` for one batch that is not divided",
    ):
        scaled().predict({"x": XS, "scale": np.float32(2)})


def test_inputs_of_different_lengths_raise(refused):
    with refused(
        DataError,
        "`data` of `learner.predict` has arrays with different numbers of examples along their first axes.\n"
        "  where: data['a'] is float32[10, 3]\n"
        "         data['b'] is float32[4, 3]\n"
        + WHY
        + "  fix:   pass arrays that describe the same examples, one entry for each example\n"
        "     or: if an array has no axis of examples, write `[batch]` for one batch that is not divided",
    ):
        fixed().predict({"a": XS, "b": XS[:4]})


def scaled():
    return Learner(
        (lambda key, xs: {"w": jnp.ones(())}, lambda params, xs: params["w"] * xs["x"] * xs["scale"]),
        lambda outputs, ys: outputs.mean(), optax.sgd(0.0), data=[{"x": XS, "scale": np.float32(1)}],
        default_callbacks=False,
    )  # fmt: skip


def test_batch_with_scalar_leaf_is_not_divided():
    learner = scaled()
    np.testing.assert_array_equal(learner.predict([{"x": XS, "scale": np.float32(2)}]), 2 * XS)


def test_dict_for_a_model_that_takes_a_part_of_it_shows_the_inputs_argument():
    batch = {"image": XS, "label": np.zeros(10, np.int32)}

    def learner(**kwargs):
        return Learner(
            (lambda key, xs: {"w": jnp.ones((3, 2))}, lambda params, xs: xs @ params["w"]),
            lambda model, batch: model(batch["image"]).mean(),
            optax.sgd(0.0),
            data=[batch],
            default_callbacks=False,
            **kwargs,
        )

    with pytest.raises(TypeError) as caught:
        learner().predict(batch)
    assert caught.value.__notes__[-2:] == [
        "raised by the model, when `learner.predict` applied it to batch 1: dict of float32[10, 3], int32[10]",
        "fix: the model got a dict. If it takes a part of a batch, give the Learner, for example, "
        "`inputs=lambda batch: batch['image']`, or pass only the inputs: `learner.predict(batch['image'])`",
    ]
    for outputs in (learner(inputs=lambda batch: batch["image"]).predict(batch), learner().predict(batch["image"])):
        np.testing.assert_array_equal(outputs, XS @ np.ones((3, 2), np.float32))


def test_pair_as_list_raises(refused):
    labels = np.zeros(10, np.int32)
    with refused(
        DataError,
        "Batch 2 of `data` of `learner.predict` is int32[10], and the first one is float32[10, 3].\n"
        "  why:   a list is interpreted as a list of batches\n"
        "  fix:   pass one batch as a tuple, `(xs, ys)`, or only its inputs, `xs`",
    ):
        fixed(data=None).predict([XS, labels])
    assert fixed().predict((XS, labels)).shape == fixed().predict(XS).shape


AXES = (
    "  why:   the first axis is that of the examples, and the others are those of one example\n"
    "  fix:   for a single example, add an axis: `learner.predict(x[None])`\n"
    "     or: for inputs and targets, write a tuple: `learner.predict((xs, ys))`"
)


@pytest.mark.parametrize(
    ("data", "what", "shown"),
    [
        (XS[0], "`data`", "float32[3]"),
        (list(XS), "Batch 1 of `data`", "float32[3]"),
        (XS[None], "`data`", "float32[1, 10, 3]"),
        ([XS, np.zeros(10, np.int32)], "Batch 2 of `data`", "int32[10]"),
    ],
)
def test_single_example_raises(data, what, shown, refused):
    with refused(
        DataError,
        f"{what} of `learner.predict` has the inputs {shown}, and the Learner was built for float32[4, 3].\n" + AXES,
    ):
        fixed().predict(data)


def test_non_array_raises(refused):
    with refused(
        DataError,
        "Batch 1 of `data` of `learner.predict` has a list of 3 numbers, which JAX cannot use as an array of "
        "numbers.\n"
        "  why:   JAX treats a list as a container, so each number in it would become a separate array\n"
        "  fix:   convert it to an array: `np.asarray(values)`\n"
        "     or: pass several batches as a list, `[batch1, batch2]`, and one batch as a tuple",
    ):
        fixed().predict([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(("size", "shown"), [(0, "0"), (2.5, "2.5"), (True, "True")])
def test_invalid_batch_size_raises(size, shown):
    with pytest.raises(DeclarationError) as caught:
        fixed().predict(XS, batch_size=size)
    assert caught.value.what == f"`batch_size` (examples) must be a whole number of at least 1, not {shown}."


def test_batch_size_for_batched_data_raises(refused):
    with refused(
        DeclarationError,
        "`batch_size` of `learner.predict` is only for arrays, but `data` is of type `list`.\n"
        "  why:   a loader or a list of batches already determines the batch size\n"
        "  fix:   leave out `batch_size`\n"
        "     or: pass the inputs as an array",
    ):
        fixed().predict(BATCHES, batch_size=4)


def test_outputs_without_examples_raise(refused):
    learner = Learner(
        (lambda key, xs: {"w": jnp.ones(())}, lambda params, xs: {"mean": params["w"] * xs.mean()}),
        lambda outputs, ys: outputs["mean"],
        optax.sgd(0.0), data=[XS], default_callbacks=False,
    )  # fmt: skip
    with refused(
        DeclarationError,
        "The model's output `outputs['mean']` is float32[] for a batch of 10 examples.\n"
        "  why:   `learner.predict` concatenates outputs along their first axis, which must be the examples\n"
        "  fix:   return outputs with the examples along the first axis, or apply `learner.model` to each batch",
    ):
        learner.predict(XS)


def test_outputs_of_different_shapes_raise(refused):
    learner = Learner(
        (lambda key, xs: {"w": jnp.ones(())}, lambda params, xs: params["w"] * xs),
        lambda outputs, ys: outputs.mean(), optax.sgd(0.0), data=[XS], default_callbacks=False,
    )  # fmt: skip
    with refused(
        DataError,
        "The outputs of batches have different shapes, apart from the number of examples: ((2,),) and ((3,),).\n"
        "  why:   `learner.predict` concatenates them\n"
        "  fix:   pad the batches to one shape, or call `learner.predict` for each batch",
    ):
        learner.predict([XS, XS[:, :2]])


# -- progress ----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, seconds):
        self.now, self.seconds = 100.0, seconds

    def __call__(self):
        self.now += self.seconds
        return self.now


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (0.001, []),
        (6.0, ["predict: 2/3 batches, 0 batches/s"]),
        (20.0, [f"predict: {n}/3 batches, 0 batches/s" for n in (1, 2, 3)]),
    ],
)
def test_long_prediction_prints_progress_lines(monkeypatch, seconds, lines):
    monkeypatch.setattr("fluxcb._run.batch_progress.monotonic", Clock(seconds))
    learner = fixed(callbacks=[ProgressBar(file := io.StringIO())])
    learner.predict(BATCHES)
    assert file.getvalue().splitlines() == lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_shows_temporary_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("fluxcb._run.batch_progress.monotonic", Clock(0.6))
    learner = fixed(callbacks=[ProgressBar(file := Terminal())])
    learner.predict(BATCHES)
    assert "predict" in file.getvalue()
    assert "2/3" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")  # the line is erased


def test_nothing_is_shown_without_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr("fluxcb._run.batch_progress.monotonic", Clock(20.0))
    fixed().predict(BATCHES)
    assert capsys.readouterr() == ("", "")


def test_inputs_that_are_integers_where_the_training_has_floats_are_a_warning():
    raw = np.arange(12, dtype=np.uint8).reshape(4, 3)
    scaled = (raw / np.float32(255)).astype(np.float32)
    text = (
        "{} has the inputs uint8[4, 3], and the training has float32[4, 3]. Prepare both in the same way: images that "
        "are scaled only for the training, for example, give wrong outputs. If the values are right, convert the dtype."
    )
    learner = fixed(data=[(scaled, OUTPUTS[:4])])
    for call, what in (
        (lambda: learner.predict(raw), "`data` of `learner.predict`"),
        (lambda: learner.predict([raw]), "Batch 1 of `data` of `learner.predict`"),
        (lambda: learner.evaluate((raw, OUTPUTS[:4])), "The data of ValidationPhase"),
        (lambda: fixed(data=([(scaled, OUTPUTS[:4])], [(raw, OUTPUTS[:4])])), "The data of ValidationPhase"),
    ):
        with pytest.warns(UserWarning, match="has the inputs") as caught:
            call()
        assert [str(warning.message) for warning in caught] == [text.format(what)]
    # Other dtypes of the same kind, and other targets.
    learner.predict(scaled.astype(np.float64))
    learner.evaluate((scaled.astype(np.float16), OUTPUTS[:4].astype(np.int32)))
