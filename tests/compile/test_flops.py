"""The estimated FLOPs of a step, compared with XLA and with formulas."""

import jax
import jax.numpy as jnp
import pytest

from fluxcb._compile.step import flops_of


def of(function, *arguments):
    return flops_of(jax.jit(function).trace(*arguments).jaxpr.jaxpr)


def dense(params, xs):
    return jnp.sum(jnp.tanh(xs @ params["w"]) @ params["out"])


def convolution(strides, groups):
    def loss(kernel, images):
        out = jax.lax.conv_general_dilated(
            images,
            kernel,
            strides,
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.sum(out**2)

    return loss


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (dense, ({"w": jnp.ones((64, 128)), "out": jnp.ones((128, 10))}, jnp.ones((32, 64)))),
        (jax.grad(dense), ({"w": jnp.ones((64, 128)), "out": jnp.ones((128, 10))}, jnp.ones((32, 64)))),
        (jax.vmap(jax.grad(dense), (None, 0)), ({"w": jnp.ones((8, 8)), "out": jnp.ones((8, 2))}, jnp.ones((5, 4, 8)))),
        (convolution((1, 1), 1), (jnp.ones((3, 3, 4, 16)), jnp.ones((8, 28, 28, 4)))),
        (convolution((2, 2), 1), (jnp.ones((5, 5, 4, 16)), jnp.ones((8, 28, 28, 4)))),
        (convolution((1, 1), 4), (jnp.ones((3, 3, 1, 16)), jnp.ones((8, 28, 28, 4)))),
    ],
    ids=["dense", "gradient", "batched", "convolution", "strided", "grouped"],
)
def test_flops_are_close_to_xla(function, arguments):
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    with jax.default_device(jax.devices("cpu")[0]):  # XLA counts operations before compilation only for the CPU
        expected = jax.jit(function).lower(*specs).cost_analysis()["flops"]
    assert of(function, *arguments) == pytest.approx(expected, rel=0.2)


def test_loop_counts_each_iteration():
    def looped(x):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ carry), None), x, None, length=7)[0]

    assert of(looped, jnp.ones((20, 20))) == 7 * (2 * 20**3 + 20**2)


def test_conditions_calls_and_custom_gradients_are_counted():
    @jax.custom_jvp
    def squared(x):
        return x @ x

    squared.defjvp(lambda primals, tangents: (squared(*primals), 2 * primals[0] @ tangents[0]))
    product = 2 * 20**3
    x = jnp.ones((20, 20))
    assert of(jax.checkpoint(squared), x) == product
    assert of(lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x), x) == pytest.approx(product, rel=0.1)
