"""Batches that are named tuples of two entries."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError

XS = np.linspace(0.5, 1, 8, dtype=np.float32)[:, None]


class Labeled(NamedTuple):
    label: Any
    image: Any


class Usual(NamedTuple):
    image: Any
    label: Any


class Unnamed(NamedTuple):
    first: Any
    second: Any


def trained(batch, **parts):
    learner = fluxcb.Learner(
        (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.5),
        data=[batch],
        default_callbacks=False,
        **parts,
    )
    learner.fit(100)
    return float(learner.params["w"][0, 0])


def test_targets_before_inputs_are_an_error_whose_fix_works():
    batch = Labeled(label=2 * XS, image=XS)
    with pytest.raises(DeclarationError, match="The first entry of a batch `Labeled` is `label`") as raised:
        trained(batch)
    fix = "write `inputs=lambda batch: batch.image` and `targets=lambda batch: batch.label`"
    assert list(raised.value.fix) == [fix]
    assert trained(batch, inputs=lambda batch: batch.image, targets=lambda batch: batch.label) == pytest.approx(2)


@pytest.mark.parametrize("batch", [Usual(XS, 2 * XS), Unnamed(XS, 2 * XS), (XS, 2 * XS)])
def test_other_pairs_have_the_inputs_first(batch):
    assert trained(batch) == pytest.approx(2)
