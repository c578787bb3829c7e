"""Batches with any structure, functions as data, random keys, and the notes of exceptions in models and losses."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fluxcb import DataError, DeclarationError, Learner
from fluxcb.callbacks import ClipGradients, Metrics, accuracy
from fluxcb.data import ArrayLoader

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(8, 5)).astype(np.float32)
YS = (np.arange(8) % 3).astype(np.int32)
BATCH = {"image": XS, "label": YS}


def cross_entropy(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def learner(model, loss_fn=cross_entropy, **kwargs):
    return Learner(model, loss_fn, optax.sgd(0.1), **{"default_callbacks": False, **kwargs})


def image(batch):
    return batch["image"]


def label(batch):
    return batch["label"]


def pair():
    return (lambda key, xs: {"w": jnp.ones((xs.shape[-1], 3))}), (lambda params, xs: xs @ params["w"])


MODELS = {
    "pair": pair,
    "linen": lambda: nn.Dense(3),
    "nnx": lambda: nnx.Linear(5, 3, rngs=nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.Linear(5, 3, key=jax.random.key(0)),
}


# -- structures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("library", MODELS)
def test_dict_batches_match_pairs(library):
    pairs = learner(MODELS[library](), data=([(XS, YS)] * 3, [(XS, YS)]), callbacks=[Metrics(accuracy)])
    dicts = learner(
        MODELS[library](),
        data=([BATCH] * 3, [BATCH]),
        callbacks=[Metrics(accuracy)],
        inputs=image,
        targets=label,
    )
    pairs.fit(1), dicts.fit(1)
    jax.tree.map(np.testing.assert_array_equal, pairs.params, dicts.params)
    assert pairs.history["validation/accuracy"] == dicts.history["validation/accuracy"]
    assert pairs.evaluate() == dicts.evaluate() == dicts.evaluate(BATCH) == dicts.evaluate([BATCH])
    outputs = pairs.predict(XS)
    for data in (XS, BATCH, [BATCH], [XS]):
        np.testing.assert_array_equal(outputs, dicts.predict(data))


def test_inputs_function_is_applied_once():
    """The function `inputs` is applied to batches, but not to arrays that already are the inputs."""
    doubled = learner(
        pair(), lambda outputs, ys: jnp.mean(outputs), data=[{"image": XS}], inputs=lambda batch: 2 * batch["image"]
    )
    np.testing.assert_allclose(doubled.predict({"image": XS}), 2 * XS @ np.ones((5, 3)), rtol=1e-5)
    np.testing.assert_allclose(doubled.predict(XS), XS @ np.ones((5, 3)), rtol=1e-5)
    arrays = learner(pair(), lambda outputs, ys: jnp.mean(outputs), data=[XS], inputs=lambda batch: 2 * batch)
    np.testing.assert_allclose(arrays.predict(XS), 2 * XS @ np.ones((5, 3)), rtol=1e-5)


def test_batches_of_three_values():
    weights = np.float32([1, 0] * 4)
    trained = learner(
        pair(),
        lambda outputs, targets: jnp.sum(outputs.sum(1) * targets[1]),
        data=[(XS, YS, weights)],
        inputs=lambda batch: batch[0],
        targets=lambda batch: batch[1:],
    )
    trained.fit(1)
    np.testing.assert_allclose(trained.params["w"][:, 0], 1 - 0.1 * XS[::2].sum(0), rtol=1e-5)


class Named(NamedTuple):
    image: np.ndarray
    label: np.ndarray
    weight: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    image: np.ndarray
    label: np.ndarray


@dataclasses.dataclass
class Plain:
    image: np.ndarray
    label: np.ndarray


@pytest.mark.parametrize("batch", [Named(XS, YS, YS), Registered(XS, YS)], ids=["named tuple", "dataclass"])
def test_batches_with_attributes(batch):
    pairs = learner(pair(), data=[(XS, YS)])
    others = learner(pair(), data=[batch], inputs=lambda batch: batch.image, targets=lambda batch: batch.label)
    pairs.fit(2), others.fit(2)
    np.testing.assert_array_equal(pairs.params["w"], others.params["w"])
    np.testing.assert_array_equal(pairs.predict(XS), others.predict(batch))


def test_unregistered_dataclass_raises(refused):
    with refused(
        DataError,
        "A batch of `data.training` has an object of the dataclass `Plain`, which JAX cannot use as an array of "
        "numbers.\n"
        "  why:   JAX looks for arrays only in dataclasses that are registered\n"
        "  fix:   write `@jax.tree_util.register_dataclass` above the `@dataclass` of the class",
    ):
        learner(pair(), data=[Plain(XS, YS)], inputs=lambda batch: batch.image, targets=lambda batch: batch.label)


def test_inputs_that_is_not_function_raises(refused):
    with refused(
        DeclarationError,
        "`inputs` must be a function of a batch, not str 'image'.\n"
        '  fix:   e.g. `inputs=lambda batch: batch["image"]`',
    ):
        learner(pair(), data=[BATCH], inputs="image")
    with refused(
        DeclarationError,
        '`targets` must be a function of a batch, not (a, b).\n  fix:   e.g. `targets=lambda batch: batch["label"]`',
    ):
        learner(pair(), data=[BATCH], targets=lambda a, b: a)


# -- functions as data ---------------------------------------------------------------------------


def test_data_function_is_called_for_each_epoch():
    calls = []

    def batches():
        calls.append(len(calls))
        for _ in range(3):
            yield XS, YS

    trained = learner(pair(), data=(batches, lambda: iter([(XS, YS)])))
    trained.fit(3)
    assert (trained.step, len(calls)) == (9, 3)
    listed = learner(pair(), data=([(XS, YS)] * 3, [(XS, YS)]))
    listed.fit(3)
    np.testing.assert_array_equal(trained.params["w"], listed.params["w"])
    assert trained.evaluate() == listed.evaluate() == trained.evaluate(lambda: [(XS, YS)])
    np.testing.assert_array_equal(trained.predict(lambda: [XS]), listed.predict(XS))


def test_functions_without_batches_raise(refused):
    with refused(
        DataError,
        "`data.training` is a function with the parameters (epoch); it must take no arguments.\n"
        "  why:   fluxcb calls the function once per epoch without arguments\n"
        "  fix:   pass a lambda that calls it: `lambda: batches(...)`",
    ):
        learner(pair(), data=lambda epoch: [(XS, YS)])
    with refused(
        DataError,
        "`data.training` is a function that returned int instead of an iterable of batches.\n"
        "  why:   fluxcb calls the function once per epoch and iterates over the result\n"
        "  fix:   return an iterable of batches, or write a generator function with `yield`",
    ):
        learner(pair(), data=lambda: 3)
    with pytest.raises(DataError, match=r"^`data\.training` is type, which cannot be iterated\."):
        learner(pair(), data=ArrayLoader)


# -- notes ---------------------------------------------------------------------------------------


def notes_of(make):
    """Return the notes that fluxcb adds to the exception of a call."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - an exception of the user's
        make()
    hidden = ("For simplicity", "-----", "fluxcb removed")
    return [note for note in raised.value.__notes__ if not note.startswith(hidden)]


WHOLE = (
    "fix: the model got the whole batch, a dict. To pass a part of it, give the Learner, for example, "
    "`inputs=lambda batch: batch['image']` and `targets=lambda batch: batch['label']`, or write "
    "`def loss_fn(model, batch):`"
)
ONE = (
    "fix: fluxcb calls the model with one argument, the inputs. For a model with other arguments, write "
    "`def loss_fn(model, batch, *, key, train):`, and call the model in it with all of them"
)


@pytest.mark.parametrize("library", MODELS)
def test_model_that_takes_whole_dict(library):
    called = "the model" if library in ("nnx", "equinox") else "the model's `init`"
    assert notes_of(lambda: learner(MODELS[library](), data=[BATCH])) == [
        f'while calling {called} on {{"image": float32[8, 5], "label": int32[8]}}',
        WHOLE,
    ]
    learner(
        MODELS[library](),
        data=[BATCH],
        inputs=lambda batch: batch["image"],
        targets=lambda batch: batch["label"],
    ).fit(1)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, xs, mask):
        return nn.Dense(3)(xs * mask)


class MaskedEquinox(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x, mask):
        return self.layer(x * mask)


def test_note_for_model_with_two_arguments():
    masked = MaskedEquinox(eqx.nn.Linear(5, 3, key=jax.random.key(0)))
    both = "(float32[8, 5], float32[8, 5])"
    assert notes_of(lambda: learner(Masked(), data=[((XS, XS), YS)])) == [
        f"while calling the model's `init` on {both}",
        ONE,
    ]
    assert notes_of(lambda: learner(masked, data=[((XS, XS), YS)])) == [f"while calling the model on {both}", ONE]

    def linen_loss(model, batch, *, key, train):
        (xs, mask), ys = batch
        return cross_entropy(model(xs, mask), ys)

    def equinox_loss(model, batch, *, key, train):
        (xs, mask), ys = batch
        return cross_entropy(jax.vmap(model)(xs, mask), ys)

    learner(Masked(), linen_loss, data=[((XS, XS), YS)]).fit(1)
    learner(masked, equinox_loss, data=[((XS, XS), YS)]).fit(1)


class Norm(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(5, "examples", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return x[:3], state


def test_note_for_unbound_axis():
    from fluxcb.models import equinox

    module = eqx.nn.make_with_state(Norm)()
    assert notes_of(lambda: learner(module, data=[(XS, YS)])) == [
        "while calling the model on float32[8, 5]",
        'fix: if "examples" is the axis of the examples of an Equinox module, pass '
        '`fluxcb.models.equinox(model, axis_name="examples")` to the Learner. Otherwise remove the collective: the '
        "step computes with the whole batch, on all devices",
    ]
    learner(equinox(module, axis_name="examples"), data=[(XS, YS)]).fit(1)

    def mean_over_devices(outputs, ys):
        return jax.lax.pmean(cross_entropy(outputs, ys), "devices")

    assert notes_of(lambda: learner(pair(), mean_over_devices, data=[(XS, YS)])) == [
        "while calling the loss function on float32[8, 3], int32[8]",
        'fix: if a layer needs the axis, name it where you map the model: `jax.vmap(model, axis_name="devices")`. '
        "Otherwise remove the collective: the loss is computed from the whole batch, on all devices",
    ]


def test_note_for_lists_of_different_lengths():
    def apply(params, xs):
        raise ValueError("foreach() argument 2 is shorter than argument 1")

    assert notes_of(lambda: learner((pair()[0], apply), data=[(XS, YS)])) == [
        "while calling the model on float32[8, 5]",
        "fix: JAX was given two lists of different lengths. Often, a layer got an array with another number of axes "
        "than it takes: an Equinox module takes one example, and fluxcb maps it over the first axis of the inputs",
    ]


def test_note_for_failing_loss():
    assert notes_of(lambda: learner(pair(), data=[XS])) == [
        "while calling the loss function on float32[8, 3], None",
        "fix: the batch has no targets, because it is not a pair `(xs, ys)`. If `data` holds arrays of all examples, "
        "pass `fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`. Otherwise, give the Learner `targets=`, a "
        "function that returns them, or write `def loss_fn(model, batch):`",
    ]

    def called_net(net, batch):
        return cross_entropy(net(batch["image"]), batch["label"])

    assert notes_of(lambda: learner(pair(), called_net, data=[BATCH], inputs=image, targets=label)) == [
        "while calling the loss function on float32[8, 3], int32[8]",
        "fix: to get the model instead of its outputs, call the first parameter of the loss function `model`",
    ]


def one_hot_entropy(outputs, ys):
    return optax.softmax_cross_entropy(outputs, ys).mean()


ONE_HOT = np.eye(3)[YS]
TAKES_NUMBERS = (
    "for one-hot labels or probabilities, use `optax.softmax_cross_entropy(outputs, ys)`. This loss takes class "
    "numbers: write e.g. `ys.argmax(-1)`"
)
CONVERTED = "pass class numbers, which are integers of shape (8,): write `{}` in the loss function"


@pytest.mark.parametrize(
    ("loss_fn", "ys", "advice", "mended"),
    [
        (cross_entropy, YS.astype(np.float32), CONVERTED.format("ys.astype(int)"), lambda ys: ys.astype(int)),
        (cross_entropy, YS[:, None], CONVERTED.format("ys.squeeze(-1)"), lambda ys: ys.squeeze(-1)),
        (
            cross_entropy,
            YS[:, None].astype(np.float32),
            CONVERTED.format("ys.squeeze(-1).astype(int)"),
            lambda ys: ys.squeeze(-1).astype(int),
        ),
        (cross_entropy, ONE_HOT.astype(np.float32), TAKES_NUMBERS, lambda ys: ys.argmax(-1)),
        (cross_entropy, ONE_HOT.astype(np.int32), TAKES_NUMBERS, lambda ys: ys.argmax(-1)),
        (
            one_hot_entropy,
            YS,
            "if the labels are class numbers, use `optax.softmax_cross_entropy_with_integer_labels(outputs, ys)`, or "
            "write `jax.nn.one_hot(ys, 3)`",
            lambda ys: jax.nn.one_hot(ys, 3),
        ),
    ],
    ids=["float", "column", "float-column", "one-hot", "one-hot-int", "numbers"],
)
def test_note_for_labels_with_wrong_shape(loss_fn, ys, advice, mended):
    note = f"while calling the loss function on float32[8, 3], {ys.dtype}[{', '.join(map(str, ys.shape))}]"
    assert notes_of(lambda: learner(pair(), loss_fn, data=[(XS, ys)])) == [note, f"fix: {advice}"]

    def loss_of_mended(outputs, ys):
        return loss_fn(outputs, mended(ys))

    right = learner(pair(), data=[(XS, YS)]).fit(1)
    assert learner(pair(), loss_of_mended, data=[(XS, ys)]).fit(1) == right


@pytest.mark.parametrize(
    ("ys", "advice"),
    [
        (
            YS.astype(np.float32),
            "if the loss is a cross-entropy, pass it class numbers, which are integers: write e.g. `ys.astype(int)`",
        ),
        (
            YS[:, None],
            "if the loss is a cross-entropy, pass it class numbers, which have one axis fewer than the outputs: write "
            "e.g. `ys.squeeze(-1)`",
        ),
    ],
    ids=["float", "column"],
)
def test_note_for_labels_with_wrong_shape_in_model_loss(ys, advice):
    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    assert notes_of(lambda: learner(pair(), loss_fn, data=[(XS, ys)]))[1:] == [f"fix: {advice}"]


def test_note_for_equinox_module_with_whole_batch():
    module = eqx.nn.Linear(5, 3, key=jax.random.key(0))

    def loss_fn(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"])

    assert notes_of(lambda: learner(module, loss_fn, data=[BATCH])) == [
        'while calling the loss function on {"image": float32[8, 5], "label": int32[8]}',
        "fix: if the exception is about shapes: an Equinox module takes one example, so map it over the batch, "
        "`jax.vmap(model)(xs)`",
    ]


def test_note_for_failing_loss_of_parameters():
    def loss_fn(params, batch):
        return jnp.mean(batch["picture"] @ params["w"])

    def make():
        Learner.from_loss({"w": jnp.ones((5, 3))}, loss_fn, optax.sgd(0.1), data=[BATCH], default_callbacks=False)

    assert notes_of(make) == ['while calling the loss function on {"image": float32[8, 5], "label": int32[8]}']


def test_note_for_model_that_needs_concrete_values():
    def apply(params, xs):
        return xs @ params["w"] if xs.sum() > 0 else -xs @ params["w"]

    assert notes_of(lambda: learner((pair()[0], apply), data=[(XS, YS)])) == [
        "while calling the model on float32[8, 5]"
    ]


# -- keys and classes ----------------------------------------------------------------------------


def test_raw_keys_match_typed_keys():
    def noisy(model, batch, *, key):
        return cross_entropy(model(batch["image"] + jax.random.normal(key, (8, 5))), batch["label"])

    trained = []
    for key in (7, jax.random.key(7), jax.random.PRNGKey(7), np.asarray(jax.random.PRNGKey(7))):
        trained.append(learner(pair(), noisy, data=[BATCH] * 3, inputs=image, key=key))
        trained[-1].fit(1)
    for other in trained[1:]:
        np.testing.assert_array_equal(trained[0].params["w"], other.params["w"])


def test_class_in_callbacks_raises(refused):
    with refused(
        DeclarationError,
        "The callbacks list contains the class `ClipGradients`, which is not a callback "
        "instance.\n"
        "  fix:   write `ClipGradients(max_norm=1.0)`",
    ):
        learner(pair(), data=[(XS, YS)], callbacks=[ClipGradients])
    learner(pair(), data=[(XS, YS)], callbacks=[ClipGradients(max_norm=1.0)]).fit(1)


def test_note_for_data_that_is_a_list_of_data_sources():
    batches = [(XS, YS)] * 2
    text = (
        "fix: a batch is a list of 2 parts that are batches themselves. For training and validation data, write a "
        "tuple of two, `data=(training, validation)`. For other data, call `learner.evaluate(test)` after `fit`"
    )
    for data in ([batches, batches], (batches, batches, batches)):
        assert notes_of(lambda data=data: learner(pair(), data=data))[-1] == text
    loader = ArrayLoader((XS, YS), batch_size=4)
    with pytest.raises(DataError, match=r"^`data` is a list of 2, which is neither batches nor `\(training, valid"):
        learner(pair(), data=[loader, loader])
    trained = learner(pair(), data=(batches, batches))
    trained.fit(1)
    trained.evaluate(batches)
