"""Frozen parameters stay constant, bit for bit, until they are unfrozen."""

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
    """Return a Learner whose loss is separable, so each parameter trains as it would alone."""
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
    """Record the parameters after each step."""

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
    """Return the paths of the parameters that have not changed, bit for bit."""
    start = flat(PARAMS)
    return {path for path, leaf in flat(params).items() if leaf.tobytes() == start[path].tobytes()}


@pytest.mark.filterwarnings(r"ignore:Freeze\('\*'\) freezes all parameters:UserWarning")
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
def test_frozen_parameters_stay_constant_and_others_train(paths, frozen, optimizer):
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
def test_parameters_unfreeze_after_the_given_epochs_or_steps(until, free_after, steps_per_call):
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


def test_a_resumed_run_unfreezes_at_the_same_step():
    uninterrupted, first, second = (
        learner(Freeze("head", steps=6)),
        learner(Freeze("head", steps=6)),
        learner(Freeze("head", steps=6)),
    )
    uninterrupted.fit(2)
    first.fit(1)
    second.state = first.state
    second.fit(1)
    assert jax.tree.all(jax.tree.map(np.array_equal, uninterrupted.params, second.params))
    assert "head.0" not in still(second.params)


def test_the_optimizer_state_is_updated_for_frozen_parameters():
    # SGD with momentum 0.5 and a constant gradient of 2 (w - 3) = -4: velocity -4, -6, -7; then unfrozen
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


def test_several_freezes_unfreeze_parts_in_turn_in_any_list_order():
    def parts():
        return [Freeze("encoder", epochs=1), Freeze("head", epochs=2), Freeze("*.bias")]

    forth, back = learner(*parts()), learner(*parts()[::-1])
    for epoch, frozen in ((1, {"head.0", "encoder.w"}), (2, {"head.0"}), (3, set())):
        for trained in (forth, back):
            trained.fit(1)
            assert still(trained.params) == frozen | {"encoder.bias", "head.1.bias"}, epoch
    assert jax.tree.all(jax.tree.map(np.array_equal, forth.state["params"], back.state["params"]))


def test_averages_see_restored_parameters_and_other_writers_need_an_order():
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
        (
            Freeze,
            "The arguments of `Freeze` must be paths of parameters, not ().\n"
            '  fix:   write e.g. `Freeze("encoder", "*.bias")`',
        ),
        (
            lambda: Freeze("a", 3),  # pyright: ignore[reportArgumentType]
            "The arguments of `Freeze` must be paths of parameters, not ('a', 3).\n"
            '  fix:   write e.g. `Freeze("encoder", "*.bias")`',
        ),
        (
            lambda: Freeze("a", epochs=1, steps=1),
            "`Freeze` was given epochs and steps, but takes only one of them.\n"
            '  fix:   write e.g. `Freeze("encoder", epochs=3)`',
        ),
        (
            lambda: Freeze("a", epochs=0),
            "`epochs` of `Freeze` must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (
            lambda: learner(Freeze("encoder", "haed")),
            "Freeze('encoder', 'haed'): no parameter matches `haed`. Did you mean `head`?\n"
            "  why:   nothing would be frozen\n"
            "  fix:   use the path of a parameter: `encoder.bias`, `encoder.w`, `encoder2.w`, `head.0`, `head.1.bias`",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(DeclarationError) as error:
        make()
    assert str(error.value) == message


def test_freezing_all_parameters_is_a_warning():
    with pytest.warns(UserWarning, match="freezes all parameters") as caught:
        frozen = learner(Freeze("encoder*", "head"))
    assert str(caught[0].message) == (
        "Freeze('encoder*', 'head') freezes all parameters, so training changes none of them. Name only those that "
        "must stay constant, or limit the time with `epochs=` or `steps=`."
    )
    before = jax.tree.map(np.asarray, frozen.params)
    frozen.fit(1)
    assert jax.tree.all(jax.tree.map(np.array_equal, frozen.params, before))
    learner(Freeze("encoder*", "head", epochs=1))
    learner(Freeze("encoder"))


@pytest.mark.parametrize(("unit", "next_"), [("epochs", 4), ("steps", 10)])
def test_time_that_has_passed_is_a_warning(unit, next_):
    trained = learner()
    trained.fit(2)
    before = flat(trained.params)["head.0"]
    with pytest.warns(UserWarning, match="freezes nothing") as record:
        trained.callbacks.add(Freeze("head.0", **{unit: 2}))
    assert [str(warning.message) for warning in record] == [
        f"Freeze('head.0', {unit}=2) freezes nothing after {unit[:-1]} 2, which the training has reached, because it "
        f"counts from the start of the training. For the next 2 {unit}, write `{unit}={next_}`."
    ]
    trained.callbacks.replace(Freeze("head.0", **{unit: next_}))
    if unit == "epochs":
        trained.fit(2)
    else:
        trained.fit(steps=2)
    np.testing.assert_array_equal(flat(trained.params)["head.0"], before)
    trained.fit(1)
    assert np.all(flat(trained.params)["head.0"] != before)


def test_time_that_passes_in_the_training_is_no_warning():
    trained = learner(Freeze("head.0", epochs=1))
    trained.fit(2)
    trained.callbacks.add(ParameterEMA(0.9))  # calls every `init` again
    trained.fit(1)
    assert trained.epoch == 3
