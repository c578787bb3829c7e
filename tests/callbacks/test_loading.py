"""load_params, load_model and load_model_state: which parameters they load, and that models are ready for inference."""

import logging
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fluxcb import CheckpointError, Learner, ResumeError, every
from fluxcb.callbacks import (
    Checkpointer,
    InferenceRunner,
    MaxSaver,
    Metrics,
    MinSaver,
    ParameterEMA,
    ScalarStats,
    StochasticWeightAveraging,
)
from fluxcb.checkpoints import load_model, load_model_state, load_params
from fluxcb.phases import AbstractValidationPhase, TrainingPhase

# Each training step adds 1 to `w`, so that after step n the parameters are n and the EMA of decay 1/2 is
# n - 1 + 2**-n.
ZEROS, ONES = np.zeros(1, np.float32), np.ones(1, np.float32)


LARGEST_LOSS = pytest.mark.filterwarnings("ignore:`MaxSaver:UserWarning")


def ema_after(n):
    return n - 1 + 2.0**-n


def loss(params, batch, key):
    return jnp.mean(jnp.where(batch > 0, params["w"], -params["w"]))


def counting(*callbacks, phases=None, validation=True):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        loss,
        optax.sgd(1.0),
        data=([ZEROS] * 2, [ONES]) if validation else [ZEROS] * 2,
        callbacks=callbacks,
        default_callbacks=False,
        phases=phases,
    )


def w(params):
    return float(params["w"])


# -- which parameters are loaded ---------------------------------------------------------------------------------------


@LARGEST_LOSS
def test_the_best_value_and_the_parameters_belong_to_the_same_weights(tmp_path):
    learner = counting(Metrics(), ParameterEMA(0.5), MaxSaver(tmp_path, "loss"))
    learner.fit(2)
    best = tmp_path / "max-validation-loss"
    step, value = learner.callbacks.get(MaxSaver).best
    assert (step, value) == (4, ema_after(4))  # the loss of validation is `w`
    assert w(load_params(best)) == value
    assert w(load_params(best, average="ema")) == value
    assert w(load_params(best, average=None)) == 4


@pytest.mark.parametrize(
    ("callbacks", "expected", "averages"),
    [
        ((), 4.0, {}),
        ((ParameterEMA(0.5, validate=False),), 4.0, {"ema": ema_after(4)}),
        ((StochasticWeightAveraging(2),), 3.0, {"swa": 3.0}),  # the mean of 2, 3 and 4
        ((StochasticWeightAveraging(2), ParameterEMA(0.5, validate=False)), 3.0, {"swa": 3.0, "ema": ema_after(4)}),
        ((every(ParameterEMA(0.5), epochs=1),), ema_after(4), {}),
    ],
)
def test_the_default_follows_what_validation_measured(tmp_path, callbacks, expected, averages):
    counting(Checkpointer(tmp_path), *callbacks).fit(2)
    assert w(load_params(tmp_path)) == expected
    assert w(load_params(tmp_path, average=None)) == 4
    assert {name: w(load_params(tmp_path, average=name)) for name in averages} == averages


@LARGEST_LOSS
@pytest.mark.parametrize("average", [None, "ema"])
def test_a_saver_that_watches_a_runner_records_what_the_runner_measured(tmp_path, average):
    runner = InferenceRunner([ONES], ScalarStats("loss"), name="test", average=average)
    validates = average is None  # the opposite of the runner
    saver = MaxSaver(tmp_path, "test/loss")
    counting(runner, ParameterEMA(0.5, validate=validates), saver).fit(2)
    assert saver.best == (4, ema_after(4) if average else 4)
    assert w(load_params(tmp_path / "max-test-loss")) == saver.best[1]


def test_a_saver_that_watches_the_training_records_the_trained_parameters(tmp_path):
    counting(Metrics(), ParameterEMA(0.5), MinSaver(tmp_path, "training/loss")).fit(2)
    assert w(load_params(tmp_path / "min-training-loss")) == 4


class TestPhase(AbstractValidationPhase):
    __test__ = False
    name = "test"

    def step(self, learner, emit):
        learner.step.loss = learner.params["w"]


def test_the_record_is_that_of_the_first_phase_that_does_not_train(tmp_path):
    counting(Checkpointer(tmp_path), ParameterEMA(0.5), phases=(TrainingPhase(), TestPhase()), validation=False).fit(2)
    assert w(load_params(tmp_path)) == ema_after(4)


def test_a_learner_that_only_trains_measures_no_average(tmp_path):
    counting(Checkpointer(tmp_path), ParameterEMA(0.5), phases=(TrainingPhase(),), validation=False).fit(2)
    assert w(load_params(tmp_path)) == 4
    assert w(load_params(tmp_path, average="ema")) == ema_after(4)


def test_a_missing_average_is_an_error(tmp_path, refused):
    counting(Checkpointer(tmp_path), ParameterEMA(0.5)).fit(1)
    with refused(
        CheckpointError,
        f"The checkpoint {tmp_path / '2'} has no average 'emma' of the parameters. Did you mean `ema`?\n"
        "  why:   its averages are 'ema'\n"
        '  fix:   write `average="ema"`\n'
        "     or: write `average=None` to load the trained parameters",
    ):
        load_params(tmp_path, average="emma")
    assert w(load_params(tmp_path, average="ema")) == ema_after(2)
    assert w(load_params(tmp_path, average=None)) == 2


def test_a_checkpoint_without_averages_is_an_error(tmp_path, refused):
    counting(Checkpointer(tmp_path)).fit(1)
    with refused(
        CheckpointError,
        f"The checkpoint {tmp_path / '2'} has no average 'ema' of the parameters.\n"
        "  why:   it has no averages\n"
        "  fix:   write `average=None` to load the trained parameters",
    ):
        load_params(tmp_path, average="ema")


@pytest.mark.parametrize("params", [jnp.ones(2), [jnp.ones(2), (jnp.zeros(1), {"a.b": jnp.ones(())})]])
def test_averages_have_the_containers_of_the_parameters(tmp_path, params):
    def total(params, batch, key):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) + 0 * jnp.sum(batch)

    learner = Learner.from_loss(
        params, total, optax.sgd(1.0), data=[ZEROS], callbacks=[Checkpointer(tmp_path), ParameterEMA(0.5)]
    )
    learner.fit(1)
    average = learner.cbstate["ema"]["params"]
    assert not np.array_equal(jax.tree.leaves(average)[0], jax.tree.leaves(learner.params)[0])
    for found in (load_params(tmp_path), load_params(tmp_path, like=params)):
        for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(average), strict=True):
            np.testing.assert_array_equal(leaf, expected)
    assert jax.tree.structure(load_params(tmp_path, like=params)) == jax.tree.structure(params)


# -- load_model --------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(4, 16, 4)).astype(np.float32)
YS = XS.sum(-1, keepdims=True)
BATCHES = list(zip(XS, YS, strict=True))


class NNXNet(nnx.Module):
    def __init__(self, seed, width=8):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(4, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.second = eqx.nn.Linear(4, 8, key=key), eqx.nn.Linear(8, 1, key=key)
        self.norm, self.dropout = eqx.nn.BatchNorm(8, "batch", mode="batch"), eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.first(x), state)
        return self.second(self.dropout(x, key=key)), state


def pair_apply(params, xs, *, key, train):
    hidden = xs @ params[0]["in"]
    return (hidden * jax.random.bernoulli(key, 0.5, hidden.shape) if train else hidden) @ params[1]


MODELS = {
    "nnx": NNXNet,
    "linen": lambda seed: LinenNet(),
    "equinox": lambda seed: eqx.nn.make_with_state(EquinoxNet)(jax.random.key(seed)),
    "pair": lambda seed: (
        lambda key, xs: ({"in": 0.1 * jax.random.normal(key, (4, 8))}, 0.1 * jax.random.normal(key, (8, 1))),
        pair_apply,
    ),
}
CALLS = {
    "nnx": lambda model, xs: model(xs),
    "linen": lambda model, xs: model(xs, train=False),
    "equinox": lambda model, xs: jax.vmap(model[0], in_axes=(0, None), out_axes=(0, None))(xs, model[1])[0],
    "pair": lambda model, xs: model(xs),
}


def mean_squares(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


@pytest.fixture(params=list(MODELS))
def kind(request):
    return request.param


def test_a_model_is_loaded_ready_for_inference(tmp_path, kind):
    callbacks = [Metrics(), ParameterEMA(0.5), MinSaver(tmp_path)]
    learner = Learner(
        MODELS[kind](0), mean_squares, optax.adam(0.05), data=(BATCHES, BATCHES[:1]), callbacks=callbacks,
        default_callbacks=False,
    )  # fmt: skip
    learner.fit(2)
    folder = tmp_path / "min-validation-loss"
    xs, ys = BATCHES[0]
    outputs = CALLS[kind](load_model(folder, MODELS[kind](1)), xs)
    np.testing.assert_allclose(mean_squares(outputs, ys), learner.callbacks.get(MinSaver).best[1], rtol=1e-4)
    raw = CALLS[kind](load_model(folder, MODELS[kind](1), average=None), xs)
    assert not np.allclose(raw, outputs, rtol=1e-3)
    np.testing.assert_array_equal(CALLS[kind](load_model(folder, MODELS[kind](1), average="ema"), xs), outputs)


def test_a_loaded_model_can_be_trained_again(tmp_path, kind):
    def made(model, **options):
        return Learner(model, mean_squares, optax.sgd(0.05), data=BATCHES, default_callbacks=False, **options)

    learner = made(MODELS[kind](0), callbacks=[Checkpointer(tmp_path)])
    learner.fit(1)
    model = load_model(tmp_path, MODELS[kind](1))
    again = made(model)
    for leaf, expected in zip(jax.tree.leaves(again.params), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_array_equal(leaf, expected)
    batch = BATCHES[0]
    random = float(again.run_step(again.phases[0], batch)["loss"])
    evaluated = mean_squares(CALLS[kind](model, batch[0]), batch[1])
    assert abs(random - evaluated) > 1e-4  # dropout is on


def test_load_model_does_not_change_its_argument(tmp_path):
    Learner(
        NNXNet(0), mean_squares, optax.sgd(0.1), data=BATCHES, callbacks=[Checkpointer(tmp_path)],
        default_callbacks=False,
    ).fit(1)  # fmt: skip
    model = NNXNet(1)
    before = np.array(model.layers[0].kernel)
    assert load_model(tmp_path, model) is not model
    np.testing.assert_array_equal(model.layers[0].kernel, before)
    assert model.dropout.deterministic is False


def test_a_model_of_another_structure_is_refused(tmp_path, refused):
    Learner(
        NNXNet(0), mean_squares, optax.sgd(0.1), data=BATCHES, callbacks=[Checkpointer(tmp_path)],
        default_callbacks=False,
    ).fit(1)  # fmt: skip
    with refused(
        ResumeError,
        f"The params in {tmp_path / '4'} do not match the model.\n"
        "  where: params: layers.0.bias was float32[8], and is float32[9] now\n"
        "         params: layers.0.kernel was float32[4, 8], and is float32[4, 9] now\n"
        "         params: layers.1.kernel was float32[8, 1], and is float32[9, 1] now\n"
        "         params: norm.bias was float32[8], and is float32[9] now\n"
        "         params: norm.scale was float32[8], and is float32[9] now\n"
        "  fix:   build the model as it was for training",
    ):
        load_model(tmp_path, NNXNet(0, width=9))


def test_a_pair_of_another_structure_is_refused(tmp_path, refused):
    def made(width, name="w"):
        return lambda key, xs: {name: jnp.ones((4, width))}, lambda params, xs: xs @ params[name]

    def made_for(xs):
        return {"w": jnp.ones((xs.shape[1], 1))}

    Learner(
        made(1), mean_squares, optax.sgd(0.1), data=BATCHES, callbacks=[Checkpointer(tmp_path)],
        default_callbacks=False,
    ).fit(1)  # fmt: skip
    with refused(
        ResumeError,
        f"The params in {tmp_path / '4'} do not match the model.\n"
        "  where: params: w was float32[4, 1], and is float32[4, 2] now\n"
        "  fix:   build the model as it was for training",
    ):
        load_model(tmp_path, made(2))
    with pytest.raises(ResumeError, match="do not match the model"):
        load_model(tmp_path, made(1, name="kernel"))
    loaded = load_model(tmp_path, made(1))
    unchecked = load_model(tmp_path, (lambda key, xs: made_for(xs), made(1)[1]))  # its shapes depend on the inputs
    np.testing.assert_array_equal(loaded.params["w"], unchecked.params["w"])


def test_a_custom_adapter_receives_plain_containers(tmp_path):
    class Scale:
        def init(self, key, xs):
            return {"w": jnp.ones(())}, {}

        def apply(self, params, model_state, xs, *, train, key):
            return xs * params["w"], model_state

        def rebuild(self, params, model_state):
            return params, model_state

    Learner(
        Scale(), mean_squares, optax.sgd(0.0), data=BATCHES, callbacks=[Checkpointer(tmp_path)],
        default_callbacks=False,
    ).fit(1)  # fmt: skip
    assert load_model(tmp_path, Scale()) == ({"w": 1.0}, {})


# -- quiet -------------------------------------------------------------------------------------------------------------


def test_reading_prints_nothing(tmp_path, caplog, capfd):
    counting(Checkpointer(tmp_path), ParameterEMA(0.5)).fit(1)
    capfd.readouterr()
    caplog.clear()
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load_model_state(tmp_path) == {}
        assert load_model_state(tmp_path, like={}) == {}
    assert caught == []
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")
    with caplog.at_level(logging.WARNING):
        load_params(tmp_path)
    assert [record.getMessage() for record in caplog.records] == []
    assert capfd.readouterr() == ("", "")


class NormalizedNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, xs):
        return self.layers[0](self.dropout(self.norm(xs)))


class NormalizedEquinox(eqx.Module):
    norm: eqx.nn.BatchNorm
    layers: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.layers = eqx.nn.MLP(3, 2, 4, 1, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.layers(x), state


def saved(model, folder):
    batch = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((4, 2), np.float32)
    learner = Learner(
        model,
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[batch],
        callbacks=[ParameterEMA(0.5), Checkpointer(folder)],
        default_callbacks=False,
    )
    learner.fit(1)
    return learner


def test_like_is_a_state_of_nnx(tmp_path):
    model = NormalizedNNX(nnx.Rngs(0))
    trained = saved(model, tmp_path).model
    for like in (nnx.state(model, nnx.Param), nnx.state(model)):
        found = load_params(tmp_path, like=like, average="ema")
        jax.tree.map(np.testing.assert_array_equal, found, nnx.state(trained, nnx.Param))
    found = load_model_state(tmp_path, like=nnx.state(model, nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, found, nnx.state(trained, nnx.BatchStat))


def test_like_is_an_equinox_module_and_its_state(tmp_path):
    model, state = eqx.nn.make_with_state(NormalizedEquinox)(jax.random.key(0))
    trained, trained_state = saved((model, state), tmp_path).model
    found = load_params(tmp_path, like=model, average="ema")
    assert found.layers.activation is model.layers.activation
    parameters = eqx.filter(trained, eqx.is_inexact_array)
    assert eqx.tree_equal(eqx.filter(found, eqx.is_inexact_array), parameters)
    specs = jax.eval_shape(lambda: eqx.filter(model, eqx.is_inexact_array))
    assert eqx.tree_equal(load_params(tmp_path, like=specs, average="ema"), parameters)
    found = load_model_state(tmp_path, like=state)
    jax.tree.map(np.testing.assert_array_equal, found, trained_state)


def test_message_about_like_shows_names_without_escapes(tmp_path):
    saved(eqx.nn.make_with_state(NormalizedEquinox)(jax.random.key(0)), tmp_path)
    name = next(iter(load_model_state(tmp_path)))
    assert "." in name
    with pytest.raises(ResumeError) as caught:
        load_model_state(tmp_path, like={"a.b": jnp.ones(2)})
    assert caught.value.where[0] == f"model_state: {name} (int32[]) is missing now"
    assert caught.value.where[-1] == "model_state: a.b (float32[2]) is new"
