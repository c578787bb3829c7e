"""Notes on exceptions of optimizers."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fluxcb import Learner

XS, YS = np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32)


def train(optimizer, ys=YS):
    learner = Learner(
        nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optimizer,
        data=[(XS, ys)],
        default_callbacks=False,
    )
    learner.fit(1)
    return learner


def label(state):
    return nnx.map_state(lambda path, value: "train" if "kernel" in path else "freeze", state)


def labelled(labels):
    return optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, labels)


MASK = nnx.map_state(lambda path, value: "kernel" in path, nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param))


def masked(mask):
    return optax.masked(optax.set_to_zero(), mask)


@pytest.mark.parametrize(
    ("wrong", "fixed", "unchanged"),
    [
        (labelled(label), labelled(lambda params: nnx.to_pure_dict(label(nnx.State(params)))), "bias"),
        (masked(MASK), masked(nnx.to_pure_dict(MASK)), "kernel"),
    ],
    ids=["labels", "mask"],
)
def test_masks_and_labels_of_nnx_states_have_a_note_whose_fix_works(wrong, fixed, unchanged):
    with pytest.raises((AttributeError, ValueError)) as caught:
        train(wrong)
    shapes = '{"bias": float32[2], "kernel": float32[4, 2]}'
    assert caught.value.__notes__[:2] == [
        f"while calling `optimizer.init` on {shapes}",
        "fix: the parameters are nested dicts and not an `nnx.State`. Convert a mask: "
        "`mask=nnx.to_pure_dict(nnx.map_state(...))`. For labels, pass a function: "
        "`lambda params: nnx.to_pure_dict(label(nnx.State(params)))`",
    ]
    learner, initial = train(fixed, ys=YS + 1), nnx.to_pure_dict(nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))
    changed = {name: bool((learner.params[name] != initial[name]).any()) for name in initial}
    assert changed == {name: name != unchanged for name in ("bias", "kernel")}


def test_exception_of_update_has_a_note():
    with pytest.raises(TypeError) as caught:
        train(optax.adam("1e-3"))
    assert caught.value.__notes__[0].startswith("while calling `optimizer.update` on ")


def test_inputs_and_targets_of_different_lengths_have_a_note():
    with pytest.raises(TypeError) as caught:
        train(optax.sgd(0.1), ys=YS[:5])
    fix = "fix: a batch has 8 outputs but 5 targets. Make batches of equally many of both"
    assert fix in caught.value.__notes__
