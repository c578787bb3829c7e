"""Notes of exceptions that Flax Linen, Equinox and Optax raise because of how fluxcb calls the model or the loss."""

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import jax
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb.models import equinox, linen

XS = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
YS = (np.arange(8) % 3).astype(np.int32)
KEY = jax.random.key(0)


def cross_entropy(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def fitted(model, loss_fn=cross_entropy, ys=YS):
    """Train and validate a model for one epoch."""
    learner = Learner(model, loss_fn, optax.sgd(0.1), data=([(XS, ys)], [(XS, ys)]), default_callbacks=False)
    learner.fit(1)
    return learner


def fixes_of(*args, **kwargs):
    """Return the notes with a fix of the exception that a fit raises."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - an exception of the library
        fitted(*args, **kwargs)
    return [note for note in raised.value.__notes__ if note.startswith("fix: ")]


# -- Linen variables that evaluation changes -----------------------------------------------------

KEPT = "fix: evaluation does not change `model_state`. "


class HiddenFlag(nn.Module):
    @nn.compact
    def __call__(self, x, in_training=True):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not in_training)(x))


class NoFlag(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


class IgnoresFlag(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(x))


class TakesFlag(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


class Counts(nn.Module):
    guarded: bool = False

    @nn.compact
    def __call__(self, x):
        calls = self.variable("counts", "calls", lambda: np.int32(0))
        if not self.guarded or self.is_mutable_collection("counts"):
            calls.value += 1
        return nn.Dense(3)(x)


@pytest.mark.parametrize(
    ("module", "fix", "fixed"),
    [
        (
            HiddenFlag(),
            'if `in_training` is true in training, pass `fluxcb.models.linen(module, "in_training")` as the model',
            linen(HiddenFlag(), "in_training"),
        ),
        (
            NoFlag(),
            "add a parameter `train` to `NoFlag.__call__`, and write `use_running_average=not train`",
            TakesFlag(),
        ),
        (IgnoresFlag(), "write `use_running_average=not train` for each `nn.BatchNorm`", TakesFlag()),
        (
            Counts(),
            'update the variable only if `self.is_mutable_collection("counts")` is true',
            Counts(guarded=True),
        ),
    ],
)
def test_note_for_variable_that_evaluation_changes(module, fix, fixed):
    assert fixes_of(module) == [KEPT + fix]
    fitted(fixed)


def test_note_for_loss_function_with_literal_train_flag():
    def literal(model, batch):
        return cross_entropy(model(batch[0], train=True), batch[1])

    def passed(model, batch, *, train):
        return cross_entropy(model(batch[0], train=train), batch[1])

    assert fixes_of(TakesFlag(), literal) == [
        KEPT + "write `def loss_fn(model, batch, *, train):`, and pass `train=train` when you call the model"
    ]
    fitted(TakesFlag(), passed)


# -- Equinox modules -----------------------------------------------------------------------------


class Maps(eqx.Module):
    layer: eqx.nn.Linear
    maps: bool = True

    def __call__(self, xs):
        return jax.vmap(self.layer)(xs) if self.maps else self.layer(xs)


class Drops(eqx.Module):
    layer: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.layer, self.dropout = eqx.nn.Linear(5, 3, key=KEY), eqx.nn.Dropout(0.5)


class NoKey(Drops):
    def __call__(self, x):
        return self.layer(self.dropout(x))


class OtherKey(Drops):
    def __call__(self, x, rng=None):
        return self.layer(self.dropout(x, key=rng))


class RequiredKey(Drops):
    def __call__(self, x, *, rng):
        return self.layer(self.dropout(x, key=rng))


class ForgetsKey(Drops):
    def __call__(self, x, key=None):
        return self.layer(self.dropout(x))


class TakesKey(Drops):
    def __call__(self, x, key=None):
        return self.layer(self.dropout(x, key=key))


def test_note_for_equinox_module_that_maps_over_the_batch_itself():
    layer = eqx.nn.Linear(5, 3, key=KEY)
    assert fixes_of(Maps(layer)) == [
        "fix: fluxcb maps the module over the batch, so `Maps.__call__` gets one example, float32[5]. If the module "
        "uses `jax.vmap` to map over the batch itself, remove it, or pass `fluxcb.models.equinox(model, vmap=False)`"
    ]
    one, other = fitted(Maps(layer, maps=False)), fitted(equinox(Maps(layer), vmap=False))
    np.testing.assert_allclose(one.params.layer.weight, other.params.layer.weight, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        (
            NoKey(),
            "add a parameter `key=None` to `NoKey.__call__`, and pass it on to each layer that uses dropout: fluxcb "
            "passes random keys only to a parameter with this name",
        ),
        (
            OtherKey(),
            "rename the parameter `rng` of `OtherKey.__call__` to `key`: fluxcb passes random keys only to a parameter "
            "with this name",
        ),
        (RequiredKey(), "if `rng` is the random key of `RequiredKey.__call__`, rename the parameter to `key`"),
        (
            ForgetsKey(),
            "in `ForgetsKey.__call__`, pass `key=key`, or a key split from it, to each layer that uses dropout",
        ),
    ],
)
def test_note_for_equinox_dropout_without_key(module, fix):
    assert fixes_of(module) == [f"fix: {fix}"]
    fitted(TakesKey())


def test_note_for_loss_function_that_passes_no_key():
    def without(model, batch):
        return cross_entropy(jax.vmap(model)(batch[0]), batch[1])

    def passed(model, batch, *, key):
        xs, ys = batch
        return cross_entropy(jax.vmap(model)(xs, key=jax.random.split(key, len(xs))), ys)

    assert fixes_of(TakesKey(), without) == [
        "fix: write `def loss_fn(model, batch, *, key):`, and pass a key for each example: "
        "`jax.vmap(model)(xs, key=jax.random.split(key, len(xs)))`"
    ]
    fitted(TakesKey(), passed)


# -- shapes of Optax losses ----------------------------------------------------------------------

TARGETS = XS[:, 0]


def test_note_for_outputs_with_an_additional_axis():
    def loss_fn(outputs, ys):
        return optax.l2_loss(outputs, ys).mean()

    def squeezed(outputs, ys):
        return optax.l2_loss(outputs.squeeze(-1), ys).mean()

    assert fixes_of(nn.Dense(1), loss_fn, TARGETS) == ["fix: write `outputs.squeeze(-1)` in the loss function"]
    fitted(nn.Dense(1), squeezed, TARGETS)


def test_note_for_targets_with_an_additional_axis():
    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)[:, 0]

    def loss_fn(outputs, ys):
        return optax.l2_loss(outputs, ys).mean()

    def squeezed(outputs, ys):
        return optax.l2_loss(outputs, ys.squeeze(-1)).mean()

    assert fixes_of(Flat(), loss_fn, TARGETS[:, None]) == ["fix: write `ys.squeeze(-1)` in the loss function"]
    fitted(Flat(), squeezed, TARGETS[:, None])


def test_note_for_outputs_with_an_additional_axis_in_model_loss():
    def loss_fn(model, batch):
        outputs = model(batch[0])
        return optax.l2_loss(outputs, batch[1]).mean()

    assert fixes_of(nn.Dense(1), loss_fn, TARGETS) == [
        "fix: if one of the shapes has an additional axis of length 1, remove it: write e.g. `outputs.squeeze(-1)`"
    ]


# -- random numbers of NNX -----------------------------------------------------------------------


def test_note_for_random_streams_outside_the_model():
    rngs = nnx.Rngs(0)

    def loss_fn(model, batch):
        noise = jax.random.normal(rngs.noise(), batch[0].shape)
        return cross_entropy(model(batch[0] + noise), batch[1])

    def with_key(model, batch, *, key):
        noise = jax.random.normal(key, batch[0].shape)
        return cross_entropy(model(batch[0] + noise), batch[1])

    assert fixes_of(nnx.Linear(5, 3, rngs=nnx.Rngs(1)), loss_fn) == [
        "fix: the step is compiled, so it cannot draw from an `nnx.Rngs` outside the model. If it belongs to a module "
        "outside the model, such as a teacher, call its `eval()` before you build the Learner. Otherwise, write "
        "`def loss_fn(model, batch, *, key):`, and draw from `key`, which differs in each step"
    ]
    fitted(nnx.Linear(5, 3, rngs=nnx.Rngs(1)), with_key)
