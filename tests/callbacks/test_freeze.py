"""Frozen parameters stay what they are, bit for bit, until they are freed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, ConflictError, DeclarationError, Read, Write, on
from fluxcb.callbacks import ClipGradients, CustomCallback, Freeze, ParameterEMA
from fluxcb.events import StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

PARAMS = {
    "encoder": {"w": jnp.arange(3.0) + 1, "bias": jnp.ones(3)},
    "encoder2": {"w": jnp.ones(3)},
    "head": [jnp.ones(2), {"bias": jnp.ones(())}],
}


def learner(*callbacks, optimizer=None, **kwargs):
    """Return a Learner whose parameters do not meet in the loss: each trains as it would alone."""
    return fluxcb.Learner.from_loss(
        PARAMS,
        lambda params, batch, key: sum(jnp.sum((leaf - 3) ** 2) for leaf in jax.tree.leaves(params)),
        optimizer or optax.adamw(0.1, weight_decay=0.1),
        data=[jnp.zeros(1)] * 4,
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


class Params(Callback):
    """Keep the parameters after each step."""

    def __init__(self):
        self.kept = []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.kept.append(flat(learner.params))


def flat(params):
    with_paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in with_paths}


def still(params):
    """Return which parameters are what they were, bit for bit."""
    start = flat(PARAMS)
    return {path for path, leaf in flat(params).items() if leaf.tobytes() == start[path].tobytes()}


@pytest.mark.parametrize(
    ("paths", "frozen"),
    [
        (["encoder"], {"encoder.w", "encoder.bias"}),
        (["encoder*"], {"encoder.w", "encoder.bias", "encoder2.w"}),
        (["*.bias"], {"encoder.bias", "head.1.bias"}),
        (["head.0", "encoder.w"], {"head.0", "encoder.w"}),
        (["*"], set(flat(PARAMS))),
    ],
)
@pytest.mark.parametrize("optimizer", [optax.adamw(0.1, weight_decay=0.1), optax.sgd(0.01, momentum=0.9)])
def test_what_is_frozen_does_not_move_and_the_rest_trains_as_ever(paths, frozen, optimizer):
    ours, plain = learner(Freeze(*paths), optimizer=optimizer), learner(optimizer=optimizer)
    ours.fit(3)
    plain.fit(3)
    assert still(ours.params) == frozen
    assert still(plain.params) == set()
    expected = flat(plain.params)
    for path, leaf in flat(ours.params).items():
        if path not in frozen:
            np.testing.assert_allclose(leaf, expected[path], rtol=1e-6)


@pytest.mark.parametrize(("until", "free_after"), [({"epochs": 2}, 8), ({"steps": 5}, 5), ({"epochs": 1}, 4), ({}, 12)])
@pytest.mark.parametrize("steps_per_call", [1, 3, "auto"])
def test_they_are_freed_after_so_many_epochs_or_steps(until, free_after, steps_per_call):
    params = Params()
    trained = learner(Freeze("encoder", **until), params, steps_per_call=steps_per_call)
    trained.fit(1)
    counts = trained.compile_counts
    trained.fit(2)
    frozen = [{"encoder.w", "encoder.bias"} <= still_of(kept) for kept in params.kept]
    assert frozen == [True] * free_after + [False] * (12 - free_after)
    assert steps_per_call == "auto" or trained.compile_counts == counts


def still_of(kept):
    start = flat(PARAMS)
    return {path for path, leaf in kept.items() if leaf.tobytes() == start[path].tobytes()}


def test_a_resumed_training_frees_at_the_same_step():
    whole, first, second = (
        learner(Freeze("head", steps=6)),
        learner(Freeze("head", steps=6)),
        learner(Freeze("head", steps=6)),
    )
    whole.fit(2)
    first.fit(1)
    second.state = first.state
    second.fit(1)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole.params, second.params))
    assert "head.0" not in still(second.params)


def test_the_optimizer_state_goes_on_meanwhile():
    # sgd with momentum 0.5 and a gradient of 2 (w - 3) = -4 that stays: velocity -4, -6, -7; then freed
    ours = learner(Freeze("encoder2", steps=3), optimizer=optax.sgd(0.01, momentum=0.5))
    ours.fit(steps=3)
    [velocity] = [
        s.trace
        for s in jax.tree.leaves(ours.state["opt_state"], is_leaf=lambda s: hasattr(s, "trace"))
        if hasattr(s, "trace")
    ]
    np.testing.assert_allclose(velocity["encoder2"]["w"], -7.0)
    ours.fit(steps=1)  # the next velocity is 0.5 * -7 - 4 = -7.5
    np.testing.assert_allclose(ours.params["encoder2"]["w"], 1 + 0.075, rtol=1e-6)


def test_several_free_one_part_after_the_other_in_any_order():
    def parts():
        return [Freeze("encoder", epochs=1), Freeze("head", epochs=2), Freeze("*.bias")]

    forth, back = learner(*parts()), learner(*parts()[::-1])
    for epoch, frozen in ((1, {"head.0", "encoder.w"}), (2, {"head.0"}), (3, set())):
        for trained in (forth, back):
            trained.fit(1)
            assert still(trained.params) == frozen | {"encoder.bias", "head.1.bias"}, epoch
    assert jax.tree.all(jax.tree.map(np.array_equal, forth.state["params"], back.state["params"]))


def test_averages_see_what_was_put_back_and_other_writers_need_an_order():
    averaged = learner(ParameterEMA(0.5, validate=False), Freeze("encoder"), ClipGradients(1.0))
    averaged.fit(2)
    np.testing.assert_array_equal(averaged.cbstate["ema"]["params"]["encoder"]["w"], PARAMS["encoder"]["w"])

    def limit(learner):
        learner.params = jax.tree.map(lambda p: jnp.clip(p, -1, 1), learner.params)

    clip = CustomCallback(limit, UpdateEnd, AbstractTrainingPhase, access={"params": Write()})
    with pytest.raises(ConflictError) as error:
        learner(Freeze("encoder"), clip)
    assert error.value.what == (
        "Freeze('encoder') and CustomCallback(limit, UpdateEnd, AbstractTrainingPhase) both write `params` and no "
        "order is declared."
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Freeze, '`Freeze` takes paths of parameters, not nothing.\n  fix:   e.g. `Freeze("encoder", "*.bias")`'),
        (
            lambda: Freeze("a", 3),  # pyright: ignore[reportArgumentType]
            '`Freeze` takes paths of parameters, not \'a\', 3.\n  fix:   e.g. `Freeze("encoder", "*.bias")`',
        ),
        (
            lambda: Freeze("a", epochs=1, steps=1),
            '`Freeze` takes epochs or steps, not both.\n  fix:   e.g. `Freeze("encoder", epochs=3)`',
        ),
        (
            lambda: Freeze("a", epochs=0),
            "`epochs` of `Freeze` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are numbers of whole steps or epochs\n"
            "  fix:   give a positive int",
        ),
        (
            lambda: learner(Freeze("encoder", "haed")),
            "Freeze('encoder', 'haed'): no parameter fits `haed`. Did you mean `head`?\n"
            "  why:   nothing would be frozen\n"
            "  fix:   the parameters are `encoder.bias`, `encoder.w`, `encoder2.w`, `head.0`, `head.1.bias`",
        ),
    ],
)
def test_arguments_that_cannot_be_meant(make, message):
    with pytest.raises(DeclarationError) as error:
        make()
    assert str(error.value) == message
