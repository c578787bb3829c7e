"""Warnings about loss functions that compare each output with every target because of NumPy's broadcasting."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb.data import ArrayLoader

XS = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]


def learner(loss_fn, *, flat_outputs=False, ys=XS[:, 0], batch_size=16):
    def apply(params, xs):
        return (xs @ params["w"])[:, 0] if flat_outputs else xs @ params["w"]

    model = (lambda key, xs: {"w": jnp.ones((1, 1))}, apply)
    data = ArrayLoader((XS, ys), batch_size=batch_size)
    return fluxcb.Learner(model, loss_fn, optax.sgd(0.1), data=data, default_callbacks=False)


def squares(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


@pytest.mark.parametrize("loss_fn", [squares, jax.jit(squares), lambda outputs, ys: jnp.mean((ys - outputs) ** 2)])
def test_all_pairs_of_outputs_and_targets_give_a_warning(loss_fn):
    for _ in range(2):  # the warning does not depend on JAX's caches
        with pytest.warns(UserWarning, match="broadcasts") as caught:
            learner(loss_fn).fit(1)
        assert [str(warning.message) for warning in caught] == [
            "The loss function combines outputs float32[16, 1] and targets float32[16], which NumPy broadcasts to "
            "[16, 16]: each output is compared with every target. Write `outputs[:, 0]` instead of `outputs` in the "
            "loss function. If all pairs are intended, write `ys[None, :]`."
        ]
        assert caught[0].filename == __file__
    learner(lambda outputs, ys: loss_fn(outputs[:, 0], ys)).fit(1)


def test_targets_with_an_additional_axis_give_a_warning():
    with pytest.warns(UserWarning, match="broadcasts") as caught:
        learner(squares, flat_outputs=True, ys=XS)
    assert [str(warning.message) for warning in caught] == [
        "The loss function combines outputs float32[16] and targets float32[16, 1], which NumPy broadcasts to "
        "[16, 16]: each output is compared with every target. Write `ys[:, 0]` instead of `ys` in the loss function. "
        "If all pairs are intended, write `outputs[None, :]`."
    ]
    learner(lambda outputs, ys: squares(outputs, ys[:, 0]), flat_outputs=True, ys=XS)


@pytest.mark.parametrize("loss_fn", [lambda a, b: squares(a.squeeze(), b), lambda a, b: squares(a, b[:, 0])])
def test_columns_of_which_the_loss_flattens_one_give_a_warning(loss_fn):
    with pytest.warns(UserWarning, match="broadcasts") as caught:
        learner(loss_fn, ys=XS)
    assert [str(warning.message) for warning in caught] == [
        "The outputs and the targets are float32[16, 1] and float32[16, 1], but the loss function removes the last "
        "axis of one of them. NumPy broadcasts [16] and [16, 1] to [16, 16]: each output is compared with every "
        "target. Remove this axis from both, or from neither. If all pairs are intended, write `[None, :]` after the "
        "value without this axis."
    ]
    learner(squares, ys=XS)
    learner(lambda outputs, ys: squares(outputs.squeeze(), ys.squeeze()), ys=XS)
    learner(lambda outputs, ys: squares(outputs, ys[:, 0][None, :]), ys=XS)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda outputs, ys: jnp.mean((outputs - outputs.T) * (ys - ys.T)),
        lambda outputs, ys: optax.sigmoid_binary_cross_entropy(outputs, ys).mean(),
        lambda outputs, ys: jnp.mean(outputs * jnp.ones(1) - ys),
    ],
)
def test_other_losses_of_columns_give_no_warning(loss_fn):
    learner(loss_fn, ys=XS).fit(1)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda outputs, ys: jnp.mean((outputs - ys[:, None]) ** 2),
        lambda outputs, ys: jnp.mean((outputs.squeeze(-1) - ys) ** 2),
        lambda outputs, ys: jnp.mean((outputs - ys[None, :]) ** 2),  # all pairs, on purpose
        lambda outputs, ys: jnp.mean((outputs - outputs.T) * (ys[:, None] - ys[None, :])),
        lambda outputs, ys: jnp.mean(jax.vmap(lambda output, y: (output - y) ** 2)(outputs, ys)),
        lambda outputs, ys: optax.sigmoid_binary_cross_entropy(outputs[..., 0], ys).mean(),
        lambda outputs, ys: jnp.mean(outputs) - jnp.mean(ys) + jnp.mean(outputs - jnp.ones(1)),
        lambda outputs, ys: jnp.mean(outputs[:, 0] * jnp.ones(16) - ys),  # works for this batch size only
    ],
)
def test_other_losses_of_these_shapes_give_no_warning(loss_fn):
    learner(loss_fn).fit(1)


def ranking(outputs, ys):
    """Compare all pairs of outputs with all pairs of targets, on purpose."""
    scores, values = outputs.reshape(-1), ys.reshape(-1)
    return jnp.mean((scores[:, None] - scores) * (values[:, None] > values))


@pytest.mark.parametrize("ys", [XS, XS[:, 0]])
def test_all_pairs_of_outputs_give_no_warning(ys):
    learner(ranking, ys=ys).fit(1)


def test_batches_of_one_example_give_no_warning():
    learner(squares, batch_size=1).fit(1)


@pytest.mark.parametrize(("ys", "shape"), [(XS[:1], "[1, 1]"), (XS[0], "[1]")])
def test_one_target_for_all_examples_gives_a_warning(ys, shape):
    with pytest.warns(UserWarning, match="broadcasts") as caught:
        fluxcb.Learner(
            (lambda key, xs: {"w": jnp.ones((1, 1))}, lambda params, xs: xs @ params["w"]),
            squares,
            optax.sgd(0.1),
            data=[(XS, ys)],
        )
    assert [str(warning.message) for warning in caught] == [
        f"The model returns float32[32, 1] for a batch with targets float32{shape}. NumPy broadcasts the only target: "
        f"all 32 outputs are compared with it. Give the batch a target for each example. If one target for all is "
        f"intended, repeat it in the data, for example with `np.repeat(ys, len(xs), axis=0)`."
    ]
    learner(squares, ys=np.repeat(XS[:1], len(XS), axis=0))


def test_single_examples_instead_of_batches_give_a_warning_whose_fixes_work():
    ys = XS[:, 0]

    def build(data):
        model = (lambda key, xs: {"w": jnp.ones((1, 1))}, lambda params, xs: xs @ params["w"])
        return fluxcb.Learner(model, squares, optax.sgd(0.1), data=data, default_callbacks=False)

    with pytest.warns(UserWarning, match="single examples") as caught:
        build(list(zip(XS, ys, strict=True)))
    assert [str(warning.message) for warning in caught] == [
        "The model returns float32[1] for targets float32[], so the data seems to consist of single examples instead "
        "of batches. Pass the arrays of all examples as `data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`, or "
        "add an axis of length 1 to each example."
    ]
    build(fluxcb.data.ArrayLoader((XS, XS), batch_size=32))
    build([(x[None], y[None, None]) for x, y in zip(XS, ys, strict=True)])


# -- loss_fn(model, batch) -------------------------------------------------------------------------


def _model_loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def _fitted(model, loss_fn, ys):
    data = [(np.ones((8, 4), np.float32), ys)]
    return fluxcb.Learner(model, loss_fn, optax.sgd(0.1), data=data, default_callbacks=False).fit(1)


_COLUMN = (lambda key, xs: {"w": jnp.ones((4, 1)), "b": jnp.ones(1)}, lambda p, xs: xs @ p["w"] + p["b"])
_FLAT = (lambda key, xs: {"w": jnp.ones(4)}, lambda p, xs: xs @ p["w"])
_YS = np.arange(8, dtype=np.float32)


@pytest.mark.parametrize(
    ("model", "ys", "outputs", "part"), [(_COLUMN, _YS, "[8, 1]", "[8]"), (_FLAT, _YS[:, None], "[8]", "[8, 1]")]
)
def test_loss_of_model_and_batch_that_compares_all_pairs_warns(model, ys, outputs, part):
    with pytest.warns(UserWarning, match="broadcasts") as caught:
        _fitted(model, _model_loss, ys)
    assert [str(warning.message) for warning in caught] == [
        f"The loss function combines outputs {outputs} of the model and values {part} of the batch, which NumPy "
        "broadcasts to [8, 8]: each output is compared with every target. Write `[:, 0]` after the value of shape "
        "[8, 1]. If all pairs are intended, write `[None, :]` after the other."
    ]


def test_mapped_equinox_module_that_compares_all_pairs_warns():
    model = eqx.nn.Linear(4, 1, key=jax.random.key(0))
    with pytest.warns(UserWarning, match=r"outputs \[8, 1\] of the model and values \[8\]"):
        _fitted(model, lambda model, batch: _model_loss(jax.vmap(model), batch), _YS)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: ((model(batch[0])[:, 0] - batch[1]) ** 2).mean(),
        lambda model, batch: ((model(batch[0]) - batch[1][None, :]) ** 2).mean(),
        lambda model, batch: _ranking(model(batch[0])[:, 0], batch[1]),
    ],
)
def test_fixes_and_losses_of_pairs_do_not_warn(loss_fn):
    _fitted(_COLUMN, loss_fn, _YS)


def _ranking(scores, ys):
    return ((scores[:, None] - scores) * (ys[:, None] - ys)).mean()


# -- loss_fn(params, batch) ------------------------------------------------------------------------


def _from_loss(loss_fn, ys):
    data = [(np.ones((8, 4), np.float32), ys)]
    params = {"w": jnp.ones((4, 1))}
    return fluxcb.Learner.from_loss(params, loss_fn, optax.sgd(0.1), data=data, default_callbacks=False)


@pytest.mark.parametrize("ys", [_YS, _YS[:, None]])
def test_loss_of_params_and_batch_that_compares_all_pairs_warns(ys):
    def loss_fn(params, batch):
        computed = batch[0] @ params["w"]
        computed = computed if ys.ndim == 1 else computed[:, 0]
        return ((computed - batch[1]) ** 2).mean(), {"outputs": computed, "ys": batch[1]}

    with pytest.warns(UserWarning, match="broadcasts") as caught:
        _from_loss(loss_fn, ys)
    assert [str(warning.message) for warning in caught] == [
        "The loss function combines values of shapes [8, 1] and [8], which NumPy broadcasts to [8, 8]: each output is "
        "compared with every target. Write `[:, 0]` after the value of shape [8, 1]. If all pairs are intended, write "
        "`[None, :]` after the other."
    ]


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, batch: (((batch[0] @ params["w"])[:, 0] - batch[1]) ** 2).mean(),
        lambda params, batch: ((batch[0] @ params["w"] - batch[1][None, :]) ** 2).mean(),
        lambda params, batch: _ranking((batch[0] @ params["w"])[:, 0], batch[1]),
        lambda params, batch: jnp.mean(jax.nn.relu(batch[1][:, None] - batch[1]) * params["w"][0]),
    ],
)
def test_fixes_and_losses_of_pairs_with_params_do_not_warn(loss_fn):
    _from_loss(loss_fn, _YS)
