"""Fits in which the schedule of the learning rate has already ended at 0."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import every
from fluxcb.callbacks import AccumulateGradients, Checkpointer, LearningRate, Scheduler

STEPS = 4  # of an epoch


def learner_of(*callbacks, optimizer=None, **options):
    """Return a Learner whose loss is the sum of its two parameters, so that the gradients are 1."""
    return fluxcb.Learner.from_loss(
        {"a": jnp.ones(()), "b": jnp.ones(())},
        lambda params, batch: params["a"] + params["b"] + 0 * jnp.sum(batch),
        optimizer or fluxcb.inject(optax.sgd, learning_rate=9.0),
        data=[np.zeros(2, np.float32)] * STEPS,
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


def scheduled(schedule, *callbacks, **options):
    return learner_of(Scheduler({LearningRate: schedule}, **options), *callbacks)


def inside(schedule):
    """Return a Learner whose optimizer has the schedule."""
    return learner_of(optimizer=optax.chain(optax.clip_by_global_norm(9.0), optax.adam(schedule)))


def injected(schedule):
    return learner_of(optimizer=fluxcb.inject(optax.adam, learning_rate=schedule))


def text(owner, rate, unit, since, idle, fitted, total):
    return (
        f"{owner} has set {rate} to 0 from {unit} {since} on, so the last {idle} of the {fitted} {unit}s of this fit "
        "trained with a learning rate of 0, which leaves the parameters unchanged. The schedule counts the "
        f"{unit}s of all fits, not epochs. Give it as many {unit}s as all fits have together ({total} so far), or a "
        f"positive final value, such as `optax.cosine_decay_schedule(1e-2, {total}, alpha=0.01)`."
    )


BY_CALLBACK = ("Scheduler(learning_rate)", "`hyperparams.learning_rate`")
MADE = {
    "callback": (scheduled, "step", BY_CALLBACK),
    "optimizer": (inside, "update", ("The optimizer", "its learning rate")),
    "inject": (injected, "update", ("The optimizer", "`hyperparams.learning_rate`")),
}


def warned(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("place", MADE)
@pytest.mark.parametrize("steps_per_call", [1, "auto"])
def test_a_second_fit_after_the_end_of_the_schedule_is_a_warning(place, steps_per_call):
    make, unit, owner = MADE[place]
    learner = make(optax.cosine_decay_schedule(1e-2, 8))
    assert warned(lambda: learner.fit(2)) == []
    before = learner.params
    assert warned(lambda: learner.fit(2)) == [text(*owner, unit, 9, 8, 8, 16)]
    assert learner.params == before
    # both fixes
    for schedule in (optax.cosine_decay_schedule(1e-2, 16), optax.cosine_decay_schedule(1e-2, 16, alpha=0.01)):
        longer = make(schedule)
        assert warned(lambda: longer.fit(2)) == warned(lambda: longer.fit(2)) == []  # noqa: B023 - called here


@pytest.mark.parametrize("place", MADE)
def test_a_schedule_of_as_many_steps_as_epochs_is_a_warning(place):
    make, unit, owner = MADE[place]
    learner = make(optax.cosine_decay_schedule(1e-2, 3))
    assert warned(lambda: learner.fit(3)) == [text(*owner, unit, 4, 9, 12, 12)]


@pytest.mark.parametrize("place", MADE)
@pytest.mark.parametrize(
    ("schedule", "fits"),
    [
        (optax.cosine_decay_schedule(1e-2, 7), [{"epochs": 2}]),  # 0 in the last of 8 steps
        (optax.cosine_decay_schedule(1e-2, 7), [{"steps": 7}, {"steps": 1}]),
        (optax.cosine_decay_schedule(1e-2, 7), [{"steps": 6}, {"steps": 2}]),  # 0 in one of the two
        (optax.linear_schedule(1.0, 0.0, 5), [{"epochs": 2}]),  # 0 in 3 of 8 steps
        (optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, 12), [{"steps": 1}, {"epochs": 2}]),
        (lambda step: jnp.where(step < 4, 0.0, 0.1), [{"epochs": 1}, {"epochs": 1}]),  # it begins later
        (lambda step: 0.1 * (step % 2), [{"epochs": 2}, {"steps": 1}]),  # it is 0 in every other step
        (optax.constant_schedule(0.0), [{"epochs": 2}]),  # the user does not train
        (optax.cosine_decay_schedule(1e-2, 4, alpha=0.01), [{"epochs": 3}]),
    ],
)
def test_other_schedules_are_no_warning(place, schedule, fits):
    learner = MADE[place][0](schedule)
    for fit in fits:
        assert warned(lambda: learner.fit(**fit)) == []  # noqa: B023 - called here


def test_exactly_half_of_the_steps_is_a_warning():
    assert warned(lambda: scheduled(optax.linear_schedule(1.0, 0.0, 4)).fit(2)) == [
        text(*BY_CALLBACK, "step", 5, 4, 8, 8)
    ]
    assert warned(lambda: scheduled(optax.linear_schedule(1.0, 0.0, 2)).fit(steps=4)) == [
        text(*BY_CALLBACK, "step", 3, 2, 4, 4)
    ]


@pytest.mark.parametrize(("decay", "expected"), [(2, 3), (3, None)])
def test_a_schedule_of_updates_counts_updates(decay, expected):
    schedule = optax.linear_schedule(1.0, 0.0, decay)
    learner = scheduled(schedule, AccumulateGradients(2), count="updates")
    owner = ('Scheduler(learning_rate, count="updates")', BY_CALLBACK[1])
    texts = [text(*owner, "update", expected, 2, 4, 4)] if expected else []
    assert warned(lambda: learner.fit(2)) == texts  # 8 steps, 4 updates


@pytest.mark.parametrize(("decay", "fitted", "warns"), [(4, 8, False), (4, 12, True), (8, 12, False)])
def test_steps_that_only_accumulate_gradients_are_no_updates(decay, fitted, warns):
    learner = scheduled(optax.linear_schedule(1.0, 0.0, decay), AccumulateGradients(4))
    texts = [text(*BY_CALLBACK, "step", decay + 1, fitted - decay, fitted, fitted)] if warns else []
    assert warned(lambda: learner.fit(steps=fitted)) == texts


def test_other_hyperparameters_may_be_zero():
    optimizer = fluxcb.inject(optax.adamw, learning_rate=0.1, weight_decay=0.1)
    learner = learner_of(Scheduler({"weight_decay": optax.linear_schedule(0.1, 0.0, 2)}), optimizer=optimizer)
    assert warned(lambda: learner.fit(2)) == []


@pytest.mark.parametrize("ended", [("a",), ("a", "b")])
def test_one_group_of_parameters_may_end_before_the_others(ended):
    rates = {f"{name}.learning_rate": optax.linear_schedule(1.0, 0.0, 2 if name in ended else 99) for name in "ab"}
    groups = {name: fluxcb.inject(optax.sgd, learning_rate=0.1) for name in "ab"}
    learner = learner_of(Scheduler(rates), optimizer=groups)
    owner = "Scheduler(a.learning_rate, b.learning_rate)"
    expected = [text(owner, "`hyperparams.a.learning_rate`", "step", 3, 6, 8, 8)] if len(ended) == 2 else []
    assert warned(lambda: learner.fit(2)) == expected


def test_an_optimizer_without_hyperparameters_may_go_on():
    groups = {"a": fluxcb.inject(optax.sgd, learning_rate=0.1), "b": optax.sgd(0.1)}
    learner = learner_of(Scheduler({LearningRate: optax.linear_schedule(1.0, 0.0, 2)}), optimizer=groups)
    assert warned(lambda: learner.fit(2)) == []


def test_schedules_that_are_not_the_last_transformation_are_not_judged():
    schedule = optax.linear_schedule(1.0, 0.0, 2)
    added = optax.chain(optax.sgd(schedule), optax.add_decayed_weights(-0.1))
    parts = optax.partition({"a": optax.sgd(schedule), "b": optax.sgd(0.1)}, {"a": "a", "b": "b"})
    for optimizer in (added, parts):
        assert warned(lambda: learner_of(optimizer=optimizer).fit(2)) == []  # noqa: B023 - called here


def test_a_scheduler_that_does_not_set_every_step_is_not_judged():
    wrapped = every(Scheduler({LearningRate: optax.linear_schedule(1.0, 0.0, 2)}), steps=2, traced=True)
    assert warned(lambda: learner_of(wrapped).fit(2)) == []


def test_a_resumed_fit_counts_its_own_steps(tmp_path):
    def make():
        return scheduled(optax.linear_schedule(1.0, 0.0, 5), Checkpointer(tmp_path))

    make().fit(1)
    resumed = make()
    # 4 steps before the checkpoint, 4 steps after it. In this program, XLA computes -1e-8 as the last learning rate.
    assert warned(lambda: resumed.fit(2, resume=True)) == [text(*BY_CALLBACK, "step", 6, 3, 4, 8)]
    assert warned(lambda: make().fit(2, resume=True)) == []  # it was complete
    assert resumed.step == 8
