"""Hyperparameters of groups of parameters: `encoder.learning_rate` under `optax.partition`."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import AccessError, Learner, MissingStateError, Read, Write
from fluxcb.callbacks import CustomCallback, HumanHyperParamSetter, ScheduledHyperParamSetter, Scheduler
from fluxcb.events import FitBegin

PARAMS = {"encoder": {"w": jnp.array([1.0, 2.0])}, "head": {"w": jnp.array([3.0, -1.0])}}
LABELS = {"encoder": "encoder", "head": "head"}
LINE = inspect.getsourcelines(Scheduler.stateaccess)[1]
WHERE = f"  where: Scheduler.stateaccess  {os.path.relpath(inspect.getfile(Scheduler))}:{LINE}\n"
WHY = (
    "  why:   a hyperparameter that occurs in several groups is named `<group>.<name>`, "
    "and one that occurs once is named without a group\n"
)


def loss(params, batch, key):
    return jnp.sum((params["encoder"]["w"] * params["head"]["w"] - jnp.mean(batch)) ** 2)


def partitioned(encoder=None, head=None):
    encoder = fluxcb.inject(optax.sgd, learning_rate=0.1) if encoder is None else encoder
    head = fluxcb.inject(optax.sgd, learning_rate=0.01) if head is None else head
    return optax.partition({"encoder": encoder, "head": head}, LABELS)


def learner_of(*callbacks, optimizer=None, **options):
    return Learner.from_loss(
        PARAMS,
        loss,
        partitioned() if optimizer is None else optimizer,
        data=[jnp.full(2, float(number)) for number in range(4)],
        callbacks=list(callbacks),
        default_callbacks=False,
        **options,
    )


def by_hand(rates, steps=8):
    """Return the parameters after plain gradient descent, with the rates of the encoder and of the head by step."""
    params = PARAMS
    for step in range(steps):
        grads = jax.grad(loss)(params, jnp.full(2, float(step % 4)), None)
        params = {
            part: jax.tree.map(lambda p, g, rate=rate: p - rate * g, params[part], grads[part])
            for part, rate in zip(("encoder", "head"), rates(step), strict=True)
        }
    return params


def same(params, expected):
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_schedule_for_one_group(steps_per_call):
    learner = learner_of(
        Scheduler({"encoder.learning_rate": optax.linear_schedule(0.02, 0.0, 10)}), steps_per_call=steps_per_call
    )
    learner.fit(2)
    same(learner.params, by_hand(lambda step: (0.02 * (1 - step / 10), 0.01)))
    assert dict(learner.hyperparams) == {
        "encoder.learning_rate": pytest.approx(0.02 * 0.3),
        "head.learning_rate": pytest.approx(0.01),
    }


def test_two_groups_can_have_two_setters():
    learner = learner_of(
        Scheduler({"encoder.learning_rate": 0.02}),
        ScheduledHyperParamSetter("head.learning_rate", [(0, 0.01), (1, 0.03)]),
    )
    learner.fit(2)
    same(learner.params, by_hand(lambda step: (0.02, 0.01 if step < 4 else 0.03)))


def test_a_file_sets_the_rate_of_a_group(tmp_path):
    path = tmp_path / "rates.txt"
    path.write_text("encoder.learning_rate: 0.5\n")
    learner = learner_of(HumanHyperParamSetter("encoder.learning_rate", path))
    learner.fit(1)
    assert learner.hyperparams["encoder.learning_rate"] == 0.5


@pytest.mark.parametrize("access", [{"encoder": {"learning_rate": Read()}}, {"encoder.learning_rate": Read()}])
def test_handlers_read_by_the_full_name(access):
    seen = []
    callback = CustomCallback(
        lambda learner: seen.append(float(learner.hyperparams["encoder.learning_rate"])),
        FitBegin,
        access={"hyperparams": access},
    )
    learner_of(callback).fit(1)
    assert seen == [pytest.approx(0.1)]


def test_a_name_without_its_group(refused):
    with refused(
        MissingStateError,
        "Scheduler(learning_rate) needs `hyperparams.learning_rate`, which 2 groups of parameters have: "
        "`encoder.learning_rate`, `head.learning_rate`.\n"
        f"{WHERE}{WHY}"
        '  fix:   write `Scheduler({"encoder.learning_rate": ...})`',
    ):
        learner_of(Scheduler({"learning_rate": 0.1}))


def test_a_hyperparameter_of_only_one_group(refused):
    with refused(
        MissingStateError,
        "Scheduler(encoder.learning_rate) needs `hyperparams.encoder.learning_rate`, which this optimizer does not "
        "have. It has `learning_rate`. Did you mean `learning_rate`?\n"
        f"{WHERE}{WHY}"
        "  fix:   write `Scheduler({LearningRate: ...})`",
    ):
        learner_of(Scheduler({"encoder.learning_rate": 0.1}), optimizer=partitioned(head=optax.sgd(0.1)))


def test_an_unknown_hyperparameter(refused):
    with refused(
        MissingStateError,
        "Scheduler(encoder.momentum) needs `hyperparams.encoder.momentum`, which this optimizer does not have. "
        "It has `encoder.learning_rate`, `head.learning_rate`.\n"
        f"{WHERE}{WHY}"
        "  fix:   inject it in the optimizer of its group: "
        "`fluxcb.inject(optax.sgd, learning_rate=1e-3, momentum=0.9)`",
    ):
        learner_of(Scheduler({"encoder.momentum": 0.9}))
    injected = fluxcb.inject(optax.sgd, learning_rate=1e-3, momentum=0.9)
    learner_of(Scheduler({"momentum": 0.9}), optimizer=partitioned(encoder=injected))


def test_a_handler_that_omits_the_group(refused):
    callback = CustomCallback(
        lambda learner: learner.hyperparams.learning_rate,
        FitBegin,
        access={"hyperparams": {"encoder.learning_rate": Write()}},
    )
    learner = learner_of(callback)
    with pytest.raises(AccessError) as caught:
        learner.fit(1)
    assert str(caught.value).endswith(
        'fix:   write `learner.hyperparams["encoder.learning_rate"]` instead of `learner.hyperparams.learning_rate`'
    )


def test_parts_of_a_chain_are_distinguished_by_name():
    rate = fluxcb.inject(optax.sgd, learning_rate=0.1)
    chain = optax.named_chain(("first", rate), ("second", rate))
    learner = learner_of(Scheduler({"first.learning_rate": 0.5}), optimizer=chain)
    learner.fit(1)
    assert dict(learner.hyperparams) == {
        "first.learning_rate": 0.5,
        "second.learning_rate": pytest.approx(0.1),
    }
