"""The costs of the parts of a step, compared with formulas."""

import jax
import jax.numpy as jnp
import pytest

from fluxcb._compile.costs import Cost, count_step

A, B = "fluxcb:A.run", "fluxcb:A.run_more"


def flops(function, *arguments):
    counted = count_step(function, [A, B], *arguments)
    return {scope: cost.flops for scope, cost in counted.parts.items() if cost.flops}


def in_scope(scope, function):
    def scoped(*arguments):
        with jax.named_scope(scope):
            return function(*arguments)

    return scoped


def test_product_of_matrices_costs_two_operations_per_term():
    def step(a, b):
        return in_scope(A, jnp.matmul)(a, b), in_scope(B, jnp.matmul)(b, a), a + a

    m, k = 7, 11
    assert flops(step, jnp.ones((m, k)), jnp.ones((k, m))) == {A: 2 * m * k * m, B: 2 * k * m * k, "": m * k}


def test_average_costs_three_operations_per_parameter():
    def average(params, ema):
        return jax.tree.map(lambda p, e: 0.9 * e + 0.1 * p, params, ema)

    params = {"w": jnp.ones((20, 30)), "b": jnp.ones(30)}
    counted = count_step(in_scope(A, average), [A], params, params)
    assert counted.parts[A].flops == 3 * 630
    # Two products and a sum read two arrays and write one. Before fusion, the two constants are broadcast to arrays.
    assert counted.parts[A].bytes == pytest.approx(4 * 630 * (3 * 3 + 2), rel=0.01)


def test_gradient_of_an_operation_belongs_to_its_scope():
    def loss(w, x):
        return jnp.sum((in_scope(A, jnp.matmul)(x, w) @ w) ** 2)

    n = 12
    # The gradient of a product is two products: one for each factor.
    counted = flops(lambda w, x: jax.grad(loss, argnums=(0, 1))(w, x), jnp.ones((n, n)), jnp.ones((n, n)))
    assert counted[A] == pytest.approx(3 * 2 * n**3, rel=0.05)
    assert counted[""] == pytest.approx(3 * 2 * n**3, rel=0.1)


@pytest.mark.parametrize("length", [1, 6, 7])
@pytest.mark.parametrize("unroll", [1, 2, 3, 7])
def test_loop_counts_every_iteration(length, unroll):
    def looped(x):
        body = lambda carry, _: (carry @ carry, None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=length, unroll=unroll)[0]

    n = 20
    counted = count_step(in_scope(A, looped), [A], jnp.ones((n, n)))
    # A loop also counts its iterations: a comparison and an addition or two in each.
    assert counted.parts[A].flops == pytest.approx(length * 2 * n**3, rel=0.002)
    assert counted.whole.flops == pytest.approx(length * 2 * n**3, rel=0.002)


def test_nested_loops_and_calls_multiply():
    def inner(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=3)[0]

    def outer(x):
        return jax.lax.scan(lambda c, _: (jax.checkpoint(jax.jit(inner))(c), None), x, None, length=5)[0]

    n = 16
    assert flops(in_scope(A, outer), jnp.ones((n, n)))[A] == pytest.approx(5 * 3 * 2 * n**3, rel=0.01)


def test_condition_costs_its_most_expensive_branch():
    def power(length):
        return lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=length)[0]

    n = 16
    chosen = in_scope(A, lambda x: jax.lax.cond(x[0, 0] > 0, power(2), power(4), x))
    assert flops(chosen, jnp.ones((n, n)))[A] == pytest.approx(4 * 2 * n**3, rel=0.01)


def test_step_without_operations_costs_nothing():
    counted = count_step(lambda x: x, [A], jnp.ones(3))
    assert (counted.parts, counted.whole, counted.remainder) == ({}, Cost(), Cost())


def test_random_keys_and_effects_are_counted():
    def noisy(key, x):
        jax.debug.print("{}", x[0])
        return x + jax.random.normal(key, x.shape)

    counted = count_step(in_scope(A, noisy), [A], jax.random.key(0), jnp.ones(50))
    assert counted.parts[A].flops > 50
    assert counted.remainder == Cost()
