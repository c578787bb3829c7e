"""Assigning attributes of a Learner: each assignment works, or raises an error that names the right method."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import AccessError, DeclarationError, Learner, MissingStateError, switchable
from fluxcb.callbacks import Checkpointer, CustomCallback, LearningRate, Metrics, Recorder, ReduceLROnPlateau, Scheduler
from fluxcb.checkpoints import load_params
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def by_hand(params, batches, rate, steps):
    """Train the model of `testlearner` without fluxcb."""
    for step in range(steps):
        xs, ys = batches[step % len(batches)]
        error = params["w"] * xs + params["b"] - ys
        slopes = {"w": 2 * np.mean(error * xs), "b": 2 * np.mean(error)}
        params = {name: params[name] - rate * slopes[name] for name in params}
    return params


# -- hyperparameters ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "assign",
    [
        lambda learner, value: learner.hyperparams.__setitem__("learning_rate", value),
        lambda learner, value: setattr(learner.hyperparams, "learning_rate", value),
    ],
    ids=["item", "attribute"],
)
def test_setting_hyperparameter_does_not_recompile(assign):
    learner = testlearner()
    learner.fit(1)
    counts = learner.compile_counts
    before = jax.device_get(learner.params)
    assign(learner, 0.25)
    assert learner.hyperparams == {"learning_rate": 0.25}
    learner.fit(1)
    expected = by_hand(before, learner.data.training, 0.25, 4)
    assert {name: float(value) for name, value in learner.params.items()} == pytest.approx(expected, rel=1e-5)
    assert learner.compile_counts == counts


def test_view_shows_value_that_was_set():
    rates = testlearner().hyperparams
    rates["learning_rate"] = 1
    assert (rates["learning_rate"], rates.learning_rate, dict(rates)) == (1.0, 1.0, {"learning_rate": 1.0})


def test_unknown_hyperparameter_raises(refused):
    learner = testlearner()
    with refused(
        MissingStateError,
        "The assignment needs `hyperparams.learning_rat`, which this optimizer does not have. It has `learning_rate`. "
        "Did you mean `learning_rate`?\n"
        "  why:   only injected hyperparameters are arrays on the device, which can change without recompiling\n"
        "  fix:   assign `learner.hyperparams['learning_rate']`",
    ):
        learner.hyperparams["learning_rat"] = 10.0
    with pytest.raises(MissingStateError, match="inject"):
        testlearner(optimizer=optax.sgd(0.1)).hyperparams["learning_rate"] = 10.0


def test_hyperparameter_with_schedule_in_optimizer_raises(refused):
    schedule = optax.constant_schedule(0.5)
    learner = testlearner(optimizer=fluxcb.inject(optax.sgd, learning_rate=schedule))
    with refused(
        MissingStateError,
        "The assignment writes `hyperparams.learning_rate`, which an optax schedule inside the optimizer sets at each "
        "update.\n"
        "  why:   the next update would overwrite the written value\n"
        "  fix:   inject a number instead of the schedule: "
        "`fluxcb.inject(optax.sgd, learning_rate=1e-3)`",
    ):
        learner.hyperparams["learning_rate"] = 1.0


def test_hyperparameter_that_a_callback_sets_at_each_step_raises(refused):
    scheduler = Scheduler({LearningRate: optax.constant_schedule(0.5)})
    learner = testlearner(switchable(scheduler))
    text = (
        "The assignment writes `hyperparams.learning_rate`, which switchable(Scheduler(learning_rate)) sets at each "
        "step.\n"
        "  why:   the next step would overwrite the written value\n"
        "  fix:   remove the callback first: `learner.callbacks.remove(Scheduler)`\n"
        "     or: give it another schedule: `learner.callbacks.replace(Scheduler(...))`"
    )
    with refused(DeclarationError, text):
        learner.hyperparams["learning_rate"] = 0.25
    learner.callbacks.disable("Scheduler")
    learner.hyperparams["learning_rate"] = 0.25
    learner.callbacks.enable("Scheduler")
    learner.callbacks.replace(Scheduler({LearningRate: optax.constant_schedule(0.125)}))
    learner.fit(1)
    assert learner.hyperparams["learning_rate"] == 0.125
    learner.callbacks.remove(Scheduler)
    learner.hyperparams["learning_rate"] = 0.25
    learner.fit(1)
    assert learner.hyperparams["learning_rate"] == 0.25


def test_hyperparameter_that_a_callback_sets_sometimes_can_be_assigned():
    learner = testlearner(
        Scheduler({"momentum": optax.constant_schedule(0.5)}),
        ReduceLROnPlateau(),
        Metrics(),
        optimizer=fluxcb.inject(optax.sgd, learning_rate=0.1, momentum=0.9),
    )
    learner.hyperparams["learning_rate"] = 0.25
    assert learner.hyperparams["learning_rate"] == 0.25


@pytest.mark.parametrize(("value", "shown"), [("fast", "str 'fast'"), (np.ones(2, np.float32), "float32[2]")])
def test_hyperparameter_must_be_number(value, shown, refused):
    with refused(
        DeclarationError,
        f"`learner.hyperparams.learning_rate` is float32[], and {shown} was assigned.\n  fix:   assign a number",
    ):
        testlearner().hyperparams["learning_rate"] = value


def test_deleting_hyperparameter_raises(refused):
    rates = testlearner().hyperparams
    text = (
        "`learner.hyperparams.learning_rate` cannot be deleted.\n"
        "  fix:   assign another value: `learner.hyperparams['learning_rate'] = value`"
    )
    with refused(AccessError, text):
        del rates["learning_rate"]
    with refused(AccessError, text):
        del rates.learning_rate


# -- parameters and other parts of the train state --------------------------------------------


def test_params_can_be_assigned():
    learner = testlearner()
    learner.fit(1)
    compiled = learner.compile_counts
    mine = {"w": np.float32(2.0), "b": 1}
    learner.params = mine
    assert same(learner.params, {"w": jnp.float32(2), "b": jnp.float32(1)})
    learner.fit(1)
    assert {n: float(v) for n, v in learner.params.items()} == pytest.approx(
        by_hand({"w": 2.0, "b": 1.0}, learner.data.training, 0.1, 4), rel=1e-5
    )
    assert mine == {"w": np.float32(2.0), "b": 1}
    assert learner.compile_counts == compiled


def test_assigned_arrays_are_copied():
    mine = {"w": jnp.float32(2.0), "b": jnp.float32(1.0)}
    learner = testlearner()
    learner.params = mine
    learner.fit(1)
    assert same(mine, {"w": jnp.float32(2), "b": jnp.float32(1)})  # not donated


def test_arrays_on_other_device_do_not_recompile():
    learner = testlearner()
    learner.fit(1)
    compiled = learner.compile_counts
    learner.params = jax.device_put(learner.params, jax.devices()[-1])
    learner.fit(1)
    assert learner.compile_counts == compiled


def test_assigning_params_keeps_opt_state():
    learner = testlearner(optimizer=optax.adam(0.1))
    learner.fit(1)
    before = learner.opt_state
    learner.params = {"w": 0.0, "b": 0.0}
    assert same(learner.opt_state, before)
    learner.opt_state = optax.adam(0.1).init(learner.params)
    assert same(learner.opt_state, optax.adam(0.1).init({"w": jnp.float32(0), "b": jnp.float32(0)}))
    learner.fit(1)
    fresh = testlearner(optimizer=optax.adam(0.1))
    fresh.fit(1)
    assert same(learner.params, fresh.params)


@pytest.mark.parametrize(
    ("value", "first"),
    [
        ({"w": jnp.zeros(())}, "['b'] is missing"),
        ({"w": jnp.zeros(2), "b": jnp.zeros(())}, "['w']: expected float32[], got float32[2]"),
        ({"w": jnp.zeros((), jnp.int32), "b": jnp.zeros(())}, "['w']: expected float32[], got int32[]"),
        ({"w": np.float32(0), "b": "x"}, "['b']: expected float32[], got str 'x'"),
    ],
)
def test_params_with_other_structure_raise(value, first, refused):
    learner = testlearner()
    with refused(
        DeclarationError,
        f"The assigned `params` does not fit the Learner: {first}.\n"
        "  why:   the carry of a compiled step keeps its structure, shapes and dtypes\n"
        "  fix:   assign a value with the structure of `learner.params`",
    ):
        learner.params = value
    learner.fit(1)


def test_params_with_numbers_as_keys_can_be_loaded_as_the_error_says(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    learner = fluxcb.Learner(
        nnx.Sequential(nnx.Linear(1, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 1, rngs=nnx.Rngs(1))),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(np.ones((4, 1), np.float32),) * 2],
        callbacks=[Checkpointer(tmp_path)],
    )
    learner.fit(1)
    with pytest.raises(DeclarationError) as error:
        learner.params = load_params(tmp_path)
    assert error.value.fix[1] == "for those of a checkpoint, write `load_params(path, like=learner.params)`"
    learner.params = loaded = load_params(tmp_path, like=learner.params)
    assert (learner.params["layers"][1]["kernel"] == loaded["layers"][1]["kernel"]).all()


def test_model_state_can_be_assigned():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))

        def __call__(self, xs):
            return self.norm(xs)

    batches = [(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))]
    learner = Learner(
        Model(),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=batches,
        default_callbacks=False,
    )
    first = learner.model_state
    learner.fit(1)
    assert not same(learner.model_state, first)
    learner.model_state = first
    assert same(learner.model_state, first)


def test_assignment_during_fit_raises(refused):
    def assign(learner):
        outer[0].params = {"w": 0.0, "b": 0.0}

    outer = [testlearner(CustomCallback(assign, EpochEnd, TrainingPhase))]
    with pytest.raises(DeclarationError) as error:
        outer[0].fit(1)
    assert str(error.value).startswith("`learner.params = ...` was used while this Learner is running.")


# -- key and data ------------------------------------------------------------------------------


def noisy(key):
    def loss(params, batch, key):
        return jnp.mean((params["w"] - batch - jax.random.normal(key)) ** 2)

    return Learner.from_loss(
        {"w": jnp.float32(0)},
        loss,
        optax.sgd(0.1),
        data=[np.array([1, 2], np.float32)] * 3,
        key=key,
        default_callbacks=False,
    )


def test_key_can_be_assigned():
    expected = noisy(7)
    expected.fit(1)
    for key in (7, jax.random.key(7)):
        learner = noisy(0)
        learner.key = key
        assert (learner.key == jax.random.key(7)).all()
        learner.fit(1)
        assert same(learner.params, expected.params)


def test_key_of_other_implementation_raises(refused):
    with refused(
        DeclarationError,
        "The assigned key has the implementation rbg, but the Learner's key has threefry2x32.\n"
        "  why:   the compiled step takes keys of one implementation\n"
        "  fix:   assign `jax.random.key(seed, impl='threefry2x32')`",
    ):
        noisy(0).key = jax.random.key(0, impl="rbg")


@pytest.mark.parametrize(
    "assign",
    [
        lambda learner, data: setattr(learner, "data", data),
        lambda learner, data: setattr(learner, "data", {"training": data}),
        lambda learner, data: learner.data.__setitem__("training", data),
        lambda learner, data: setattr(learner.data, "training", data),
    ],
)
def test_data_can_be_assigned(assign):
    learner, other = testlearner(), testlearner(batches=6)
    validation = learner.data.validation
    assign(learner, other.data.training)
    assert learner.data.training is other.data.training
    assert learner.data.validation is validation
    learner.fit(2)
    other.fit(2)
    assert learner.step == 12
    assert same(learner.params, other.params)


def test_data_of_unknown_phase_raises(refused):
    with refused(
        fluxcb.DataError,
        "`data` has 'trainin', but no phase has this name.\n  fix:   use 'training' or 'validation'",
    ):
        testlearner().data["trainin"] = []


def test_model_can_be_assigned():
    init, apply = lambda key, xs: {"w": jnp.float32(5)}, lambda params, xs: params["w"] * xs
    learner = Learner(
        (lambda key, xs: {"w": jnp.float32(0)}, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=testlearner().data.training,
        default_callbacks=False,
    )
    learner.model = (init, apply)
    assert float(learner.params["w"]) == 5


# -- what cannot be assigned -----------------------------------------------------------------

NEW = "build a new Learner with it, and then assign the parameters: `new.params = learner.params`"
COUNTERS = "to continue from a checkpoint, call `learner.restore(path)`; counters are also part of `learner.state`"
INSTEAD = {
    "callbacks": "write `learner.callbacks.set([...])`, or `add`, `replace` or `remove`",
    "cbstate": "assign an entry in a handler of a callback that declares it, or assign `learner.state`",
    "compile_counts": "build a new Learner to count from zero",
    "epoch": COUNTERS,
    "graph": "write `learner.callbacks.set([...])`; the graph follows from the callbacks",
    "history": "build a new Learner to start with an empty history",
    "hyperparams": "assign one of them: `learner.hyperparams[name] = value`",
    "loss_fn": NEW,
    "optimizer": f"{NEW}; to change a hyperparameter: `learner.hyperparams[name] = value`",
    "phases": NEW,
    "step": COUNTERS,
}


@pytest.mark.parametrize("name", INSTEAD)
def test_other_attributes_name_method_to_call(name, refused):
    learner = testlearner()
    with refused(AccessError, f"`learner.{name}` cannot be assigned.\n  fix:   {INSTEAD[name]}"):
        setattr(learner, name, 1)
    assert getattr(learner, name, None) != 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [("parms", " Did you mean `params`?"), ("optimiser", " Did you mean `optimizer`?"), ("qqq", ""), ("fit", "")],
)
def test_unknown_attribute_raises(name, hint, refused):
    with refused(
        AccessError,
        f"A Learner has no attribute `{name}` that could be assigned.{hint}\n"
        "  why:   the training would not use it\n"
        "  fix:   assign one of `params`, `model_state`, `opt_state`, `state`, `data`, `key`, `model`",
    ):
        setattr(testlearner(), name, 1)


def test_subclass_may_have_own_attributes():
    class Own(Learner):
        pass

    learner: Any = Own.from_loss({"w": jnp.zeros(())}, lambda params, batch, key: params["w"] ** 2, optax.sgd(0.1))
    learner.note = "mine"
    assert learner.note == "mine"
    with pytest.raises(AccessError):
        learner.optimizer = optax.sgd(1.0)


def test_suggested_fixes_of_assignments_work():
    learner = testlearner()
    learner.fit(1)
    new = testlearner(optimizer=fluxcb.inject(optax.sgd, learning_rate=0.5))
    new.params = learner.params
    assert same(new.params, learner.params)
    learner.callbacks.set([Recorder()])
    learner.state = {**learner.state, "counters": learner.state["counters"].at[0].set(100)}
    assert learner.step == 100


# -- writes into returned copies ---------------------------------------------------------------


def nested():
    def loss(params, batch, key):
        return jnp.mean((params["layer"]["w"] - batch) ** 2) + params["b"] ** 2

    params = {"layer": {"w": jnp.float32(0)}, "b": jnp.float32(0)}
    return Learner.from_loss(
        params, loss, optax.sgd(0.1), data=[np.array([1, 2], np.float32)] * 3, default_callbacks=False
    )


def changed(name):
    return (
        f"A container that `learner.{name}` returned was changed, which does not change the Learner.\n"
        f"  why:   `learner.{name}` returns a copy\n"
        f"  fix:   assign the changed container: `{name} = learner.{name}`, then change it, "
        f"then `learner.{name} = {name}`\n"
        f"     or: to change a container for another purpose: `{name} = jax.tree.map(lambda x: x, learner.{name})`"
    )


USES = {
    "fit": lambda learner: learner.fit(1),
    "run_epoch": lambda learner: learner.run_epoch(TrainingPhase()),
    "run_step": lambda learner: learner.run_step(TrainingPhase(), np.array([1, 2], np.float32)),
    "params": lambda learner: learner.params,
    "state": lambda learner: learner.state,
    "restore": lambda learner: learner.restore("nowhere"),
}


@pytest.mark.parametrize("use", USES)
def test_writing_into_returned_params_raises(use, refused):
    learner = nested()
    learner.params["layer"]["w"] = jnp.float32(3)
    with refused(AccessError, changed("params")):
        USES[use](learner)
    learner.fit(1)  # it has been told


@pytest.mark.parametrize("name", ["params", "opt_state", "state"])
def test_changing_other_returned_copies_raises(name, refused):
    learner = testlearner(optimizer=optax.chain(optax.trace(0.9), optax.sgd(0.1)))
    value = getattr(learner, name)
    (value[0].trace if name == "opt_state" else value).popitem()
    with refused(AccessError, changed(name)):
        learner.fit(1)


def test_suggested_fix_for_changed_copies_works():
    learner = nested()
    params = learner.params
    params["layer"]["w"] = jnp.float32(3)
    learner.params = params
    assert float(learner.params["layer"]["w"]) == 3
    params = jax.tree.map(lambda x: x, learner.params)
    params["layer"]["w"] = jnp.float32(5)
    learner.fit(1)


def test_reading_returned_copies_does_not_raise():
    learner = nested()
    kept = learner.params, learner.state, learner.opt_state
    learner.fit(1)
    learner.run_step(TrainingPhase(), np.array([1, 2], np.float32))
    assert float(kept[0]["layer"]["w"]) == 0


def test_copies_are_not_kept_during_training():
    alive = []

    def look(learner):
        gc.collect()
        alive.append([reference() is not None for reference in references])

    references = []
    learner = testlearner(CustomCallback(look, EpochEnd, TrainingPhase))
    references += [weakref.ref(learner.params["w"]), weakref.ref(learner.state["params"]["w"])]
    learner.fit(1)
    assert alive == [[False, False]]
    inside = []
    learner.callbacks.add(CustomCallback(lambda _: inside.append(weakref.ref(learner.params["w"])), EpochEnd))
    learner.fit(1)
    gc.collect()
    assert [reference() for reference in inside] == [None, None]
