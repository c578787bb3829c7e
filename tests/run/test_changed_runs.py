"""A run that is resumed by a program that has changed: what is reported, what is kept, and what `allow` changes."""

import copy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, DeclarationError, EverySteps, Learner, Read, Write, every, on
from fluxcb._declare.described import describe_value
from fluxcb._run.run_description import describe_run
from fluxcb.callbacks import (
    Checkpointer,
    CustomCallback,
    EarlyStopping,
    HyperParamSetterWithFunc,
    LearningRate,
    Metric,
    Metrics,
    MetricsPrinter,
    ParameterEMA,
    Scheduler,
)
from fluxcb.checkpoints import ResumeWarning
from fluxcb.data import ArrayLoader
from fluxcb.events import StepBegin, UpdateEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

STEPS = 4  # of an epoch


def rates(learning_rate):
    return fluxcb.inject(optax.sgd, learning_rate=learning_rate)


def falling(*callbacks, optimizer, batches=STEPS):
    """Return a Learner whose parameter falls by the learning rate at each step."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: params["w"] + 0 * jnp.sum(batch),
        optimizer,
        data=[np.zeros(1, np.float32)] * batches,
        callbacks=callbacks,
        default_callbacks=False,
    )


def warned_by(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    assert all(warning.category is ResumeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def rows_of(text):
    """Return the rows of the table in a warning, by path: the saved value, that of the program, and which is used."""
    lines = [line.split("  ") for line in text.splitlines() if line.startswith("  ")]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {row[0]: tuple(row[1:]) for row in cells[1:] if len(row) == 4}


def test_new_learning_rate_is_reported_and_saved_one_kept(tmp_path):
    falling(Checkpointer(tmp_path), optimizer=rates(0.5)).fit(1)
    learner = falling(Checkpointer(tmp_path), optimizer=rates(0.25))
    (warned,) = warned_by(lambda: learner.fit(2, resume=True))
    assert warned == (
        f"The run resumes from {tmp_path / '4'} with differences:\n"
        "  path                       saved  program  used\n"
        "  hyperparams.learning_rate  0.5    0.25     saved\n"
        "  To use the program's value of a hyperparameter, pass e.g. `allow=('hyperparams.learning_rate',)`."
    )
    assert float(learner.params["w"]) == -(4 * 0.5 + 4 * 0.5)
    assert learner.hyperparams["learning_rate"] == 0.5
    # The checkpoint of step 8 belongs to a run that has begun with 0.5, so the difference is reported again.
    again = falling(Checkpointer(tmp_path), optimizer=rates(0.25))
    (warned,) = warned_by(lambda: again.fit(2, resume=True))
    assert rows_of(warned) == {"hyperparams.learning_rate": ("0.5", "0.25", "saved")}


@pytest.mark.parametrize("name", ["hyperparams.learning_rate", "hyperparams"])
@pytest.mark.parametrize("restores", [False, True])
def test_allowed_learning_rate_is_used_once(tmp_path, name, restores):
    def program(learning_rate):
        halves = HyperParamSetterWithFunc(LearningRate, lambda epoch, rate: rate / 2 if epoch == 2 else None)
        return falling(halves, Checkpointer(tmp_path), optimizer=rates(learning_rate))

    program(0.5).fit(1)
    learner = program(0.25)
    if restores:
        learner.restore(tmp_path, allow=(name,))
        learner.fit(1)
    else:
        learner.fit(2, resume=True, allow=(name,))
    assert float(learner.params["w"]) == -(4 * 0.5 + 4 * 0.25)
    assert learner.hyperparams["learning_rate"] == 0.125
    # The same program again: the run began with 0.25, and goes on with the rate that the callback has set.
    learner = program(0.25)
    learner.fit(2 if restores else 3, resume=True, allow=(name,))  # after `restore`, a fit counts from there
    assert float(learner.params["w"]) == -(4 * 0.5 + 4 * 0.25 + 4 * 0.125)


def test_rate_that_program_assigns_before_it_resumes_is_its_rate(tmp_path):
    def program():
        learner = falling(Checkpointer(tmp_path), optimizer=rates(0.5))
        learner.hyperparams["learning_rate"] = 0.25
        return learner

    program().fit(1)
    learner = program()
    learner.fit(2, resume=True)
    assert float(learner.params["w"]) == -8 * 0.25
    (warned,) = warned_by(lambda: falling(Checkpointer(tmp_path), optimizer=rates(0.5)).fit(3, resume=True))
    assert rows_of(warned) == {"hyperparams.learning_rate": ("0.25", "0.5", "saved")}


def test_reported_numbers_differ_if_the_numbers_do(tmp_path):
    """Some neighbors in float32 have the same 8 digits."""
    rate = np.float32(0.11270241)
    after = np.nextafter(rate, np.float32(1))
    assert f"{rate:.8g}" == f"{after:.8g}"
    falling(Checkpointer(tmp_path), optimizer=rates(float(rate))).fit(1)
    learner = falling(Checkpointer(tmp_path), optimizer=rates(float(after)))
    (warned,) = warned_by(lambda: learner.fit(2, resume=True))
    (saved, program, _) = rows_of(warned)["hyperparams.learning_rate"]
    assert (np.float32(saved), np.float32(program)) == (rate, after)


def test_rates_of_groups_are_compared_one_by_one(tmp_path):
    def program(first, second):
        parts = optax.named_chain(("first", rates(first)), ("second", rates(second)))
        return falling(Checkpointer(tmp_path), optimizer=parts)

    program(1.0, 0.5).fit(1)
    learner = program(2.0, 0.25)
    allow = ("hyperparams.second",)
    (warned,) = warned_by(lambda: learner.fit(2, resume=True, allow=allow))
    assert rows_of(warned) == {"hyperparams.first.learning_rate": ("1", "2", "saved")}
    assert dict(learner.hyperparams) == {"first.learning_rate": 1.0, "second.learning_rate": 0.25}


def noisy(key, *callbacks):
    """Return a Learner whose gradient is a random number."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: params["w"] * jax.random.normal(key) + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * STEPS,
        callbacks=callbacks,
        default_callbacks=False,
        key=key,
    )


def test_another_key_is_reported_and_saved_one_kept(tmp_path):
    straight = noisy(0)
    straight.fit(2)
    noisy(0, Checkpointer(tmp_path)).fit(1)
    assert warned_by(lambda: noisy(jax.random.key(0), Checkpointer(tmp_path)).fit(1, resume=True)) == []
    learner = noisy(1, Checkpointer(tmp_path))
    (warned,) = warned_by(lambda: learner.fit(1, resume=True))  # also if the run is complete
    assert warned == (
        f"The run resumes from {tmp_path / '4'} with differences:\n"
        "  path  saved  program  used\n"
        "  key   0      1        saved\n"
        "  To use the program's key from here on, pass `allow=('key',)`."
    )
    (warned,) = warned_by(lambda: noisy(1, Checkpointer(tmp_path)).fit(2, resume=True))
    assert rows_of(warned) == {"key": ("0", "1", "saved")}
    # The checkpoint of step 8 belongs to a run that has begun with the key 0.
    learner = noisy(jnp.array([5, 6], jnp.uint32), Checkpointer(tmp_path))
    (warned,) = warned_by(lambda: learner.fit(2, resume=True))
    assert rows_of(warned) == {"key": ("0", "[5, 6]", "saved")}
    assert float(learner.params["w"]) == float(straight.params["w"])


def test_allowed_key_is_used(tmp_path):
    first, other = noisy(0, Checkpointer(tmp_path)), noisy(1)
    first.fit(1)
    other.state = {**first.state, "key": jax.random.key(1)}
    other.fit(1)
    learner = noisy(1, Checkpointer(tmp_path))
    assert warned_by(lambda: learner.fit(2, resume=True, allow=("key",))) == []
    assert float(learner.params["w"]) == float(other.params["w"])
    again = noisy(1, Checkpointer(tmp_path))
    assert warned_by(lambda: again.fit(3, resume=True)) == []  # the run has now begun with the key 1
    (warned,) = warned_by(lambda: noisy(0, Checkpointer(tmp_path)).fit(3, resume=True))
    assert rows_of(warned) == {"key": ("1", "0", "saved")}


def test_key_of_another_implementation_can_be_allowed(tmp_path):
    noisy(0, Checkpointer(tmp_path)).fit(1)
    learner = noisy(jax.random.key(0, impl="rbg"), Checkpointer(tmp_path))
    learner.fit(2, resume=True, allow=("key",))
    assert str(jax.random.key_impl(learner.key)) == "rbg"


def test_checkpoint_without_a_key_shows_no_row(tmp_path, monkeypatch):
    def without_key(*args):
        about = describe_run(*args)
        del about["key"]
        return about

    with monkeypatch.context() as patch:
        patch.setattr("fluxcb._run.snapshots.describe_run", without_key)
        noisy(0, Checkpointer(tmp_path)).fit(1)
    assert warned_by(lambda: noisy(1, Checkpointer(tmp_path)).fit(2, resume=True)) == []
    (warned,) = warned_by(lambda: noisy(1, Checkpointer(tmp_path)).fit(2, resume=True))
    assert rows_of(warned) == {"key": ("0", "1", "saved")}


def loading(*callbacks, wrap=lambda source: source, validation=None, **order):
    """Return a Learner that trains on 8 numbers."""
    source = wrap(ArrayLoader(np.arange(8, dtype=np.float32), **{"batch_size": 2, **order}))
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch: params["w"] * jnp.mean(batch),
        optax.sgd(1.0),
        data=source if validation is None else (source, validation),
        callbacks=callbacks,
        default_callbacks=False,
    )


ORDERS = [
    ({"shuffle": False}, {"data.training.shuffle": ("True", "False", "program")}),
    ({"seed": 3}, {"data.training.seed": ("0", "3", "program")}),
    ({"batch_size": 3, "drop_last": False}, None),  # another number of batches is an error
    ({}, {}),
]


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: fluxcb.data.map(lambda x: x, s)], ids=["plain", "mapped"])
@pytest.mark.parametrize(("order", "expected"), ORDERS)
def test_another_order_of_data_is_reported(tmp_path, order, expected, wrap):
    loading(Checkpointer(tmp_path), wrap=wrap).fit(1)
    learner = loading(Checkpointer(tmp_path), wrap=wrap, **order)
    if expected is None:
        with pytest.raises(fluxcb.ResumeError, match="a different run"):
            learner.fit(2, resume=True)
        return
    warned = warned_by(lambda: learner.fit(2, resume=True))
    assert [rows_of(text) for text in warned] == ([expected] if expected else [])
    assert all("within an epoch" not in text for text in warned)
    again = loading(Checkpointer(tmp_path), wrap=wrap, **order)
    assert warned_by(lambda: again.fit(3, resume=True)) == []


def test_other_sizes_of_batches_and_data_are_reported(tmp_path):
    validation = [ArrayLoader(np.zeros(n, np.float32), b, shuffle=False) for n, b in [(4, 2), (3, 2), (4, 3)]]
    loading(Checkpointer(tmp_path), validation=validation[0]).fit(1)
    found = []
    for source in validation[1:]:
        learner = loading(Checkpointer(tmp_path), validation=source)
        found += [rows_of(text) for text in warned_by(lambda learner=learner: learner.restore(tmp_path))]
    assert found == [
        {"data.validation.examples": ("4", "3", "program")},
        {"data.validation.batch_size": ("2", "3", "program")},
    ]


def test_another_order_within_an_epoch_is_explained(tmp_path):
    loading(Checkpointer(tmp_path, steps=3)).fit(1)
    learner = loading(Checkpointer(tmp_path, steps=3), shuffle=False)
    (warned,) = warned_by(lambda: learner.restore(tmp_path / "3"))
    assert warned.splitlines()[-1] == (
        "  The run resumes within an epoch. The rest of it has the program's order, so that the epoch can have some "
        "examples twice, and others not at all."
    )
    learner.callbacks.remove(Checkpointer)
    learner.fit(1)
    shuffled = np.random.default_rng((0, 1)).permutation(8)  # of the first pass
    assert float(learner.params["w"]) == -sum(shuffled[:6]) / 2 - (6 + 7) / 2
    learner = loading(Checkpointer(tmp_path, steps=3), shuffle=False)
    assert warned_by(lambda: learner.restore(tmp_path / "3", allow=("data.training.shuffle",))) == []


@pytest.mark.parametrize("now", [3, None])
def test_another_length_of_an_epoch_is_reported(tmp_path, now):
    loading(Checkpointer(tmp_path)).fit(2, steps_per_epoch=2)
    learner = loading(Checkpointer(tmp_path))
    (warned,) = warned_by(lambda: learner.fit(3, steps_per_epoch=now, resume=True))
    assert rows_of(warned) == {"fit.steps_per_epoch": ("2", str(now), "program")}
    assert learner.step == 4 + (now or 4)
    assert warned_by(lambda: loading(Checkpointer(tmp_path)).restore(tmp_path)) == []  # not known before `fit`
    assert warned_by(lambda: loading(Checkpointer(tmp_path)).fit(3, steps_per_epoch=now, resume=True)) == []


CHANGES = {
    "argument": (
        lambda n: [Metrics(), EarlyStopping(n, metric="loss", phase=fluxcb.phases.TrainingPhase)],
        {"callbacks.EarlyStopping.criteria[0]": ("3", "5", "program")},
    ),
    "schedule": (
        lambda n: [Scheduler({LearningRate: optax.cosine_decay_schedule(0.5, 10 * n)})],
        {"callbacks.Scheduler.schedules.LearningRate.decay_steps": ("30", "50", "program")},
    ),
    "schedule of a wrapper": (
        lambda n: [Metrics(), every(MetricsPrinter(), steps=n)],
        {"callbacks.MetricsPrinter.schedule.steps": ("3", "5", "program")},
    ),
    "argument in a wrapper": (
        lambda n: [every(ParameterEMA(n / 10), steps=2, traced=True)],
        {"callbacks.ParameterEMA.callback.decay": ("0.3", "0.5", "program")},
    ),
}


@pytest.mark.parametrize("kind", list(CHANGES))
def test_changed_callback_is_reported_and_program_used(tmp_path, kind):
    callbacks, expected = CHANGES[kind]
    falling(*callbacks(3), Checkpointer(tmp_path), optimizer=rates(0.5)).fit(1)
    changed = falling(*callbacks(5), Checkpointer(tmp_path), optimizer=rates(0.5))
    (warned,) = warned_by(lambda: changed.fit(2, resume=True))
    assert rows_of(warned) == expected
    same = falling(*callbacks(5), Checkpointer(tmp_path), optimizer=rates(0.5))
    assert warned_by(lambda: same.fit(3, resume=True)) == []


@pytest.mark.parametrize("allow", ["callbacks.Scheduler", "callbacks", "callbacks.Scheduler.schedules"])
def test_allowed_change_of_callback_is_not_reported(tmp_path, allow):
    def program(steps):
        schedule = optax.linear_schedule(1.0, 0.0, steps)
        return falling(Scheduler({LearningRate: schedule}), Checkpointer(tmp_path), optimizer=rates(1.0))

    program(8).fit(1)  # with 1, 7/8, 6/8 and 5/8
    learner = program(16)
    learner.fit(2, resume=True, allow=(allow,))  # with 12/16, 11/16, 10/16 and 9/16
    assert float(learner.params["w"]) == pytest.approx(-(26 / 8 + 42 / 16))


def test_number_in_optimizer_is_reported_and_program_used(tmp_path):
    falling(Checkpointer(tmp_path), optimizer=optax.sgd(0.5)).fit(1)
    learner = falling(Checkpointer(tmp_path), optimizer=optax.sgd(0.25))
    (warned,) = warned_by(lambda: learner.fit(2, resume=True))
    ((path, values),) = rows_of(warned).items()
    assert path.startswith("optimizer.")
    assert values == ("-0.5", "-0.25", "program")
    assert float(learner.params["w"]) == -(4 * 0.5 + 4 * 0.25)


def test_function_with_another_body_is_reported(tmp_path):
    def program(function):
        return falling(Scheduler({LearningRate: function}), Checkpointer(tmp_path), optimizer=rates(1.0))

    program(lambda step: 0.5 + 0 * step).fit(1)
    assert warned_by(lambda: program(lambda step: 0.5 + 0 * step).fit(2, resume=True)) == []
    (warned,) = warned_by(lambda: program(lambda step: 0.25 + 0 * step).fit(3, resume=True))
    assert list(rows_of(warned)) == ["callbacks.Scheduler.schedules.LearningRate.code"]


def test_allow_names_single_callbacks_and_data(tmp_path):
    falling(Checkpointer(tmp_path), optimizer=rates(0.5)).fit(1)
    changed = [Metrics(), Checkpointer(tmp_path)]
    with pytest.raises(fluxcb.ResumeError) as raised:
        falling(*changed, optimizer=rates(0.5), batches=6).fit(2, resume=True, allow=("callbacks.Metrics",))
    assert raised.value.where == ("data: training was 4 batches, and is 6 batches now",)
    learner = falling(Metrics(), Checkpointer(tmp_path), optimizer=rates(0.5), batches=6)
    learner.fit(2, resume=True, allow=("callbacks.Metrics", "data.training"))
    assert (learner.step, float(learner.params["w"])) == (4 + 6, -10 * 0.5)


def test_an_allowed_source_that_is_shorter_than_the_position_is_an_error(tmp_path):
    def batches(size):
        return ArrayLoader(np.zeros((24, 1), np.float32), batch_size=size)

    def fail(learner):
        if learner.progress.step == 5 and fails:
            raise RuntimeError("no")

    def program(size):
        return Learner.from_loss(
            {"w": jnp.zeros(())},
            lambda params, batch, key: params["w"] + 0 * jnp.sum(batch),
            rates(0.5),
            data=batches(size),
            callbacks=[Checkpointer(tmp_path, steps=1), CustomCallback(fail, StepBegin)],
            default_callbacks=False,
        )

    fails = True
    with pytest.raises(RuntimeError, match="no"):
        program(4).fit(2)
    fails = False
    with pytest.raises(fluxcb.DataError) as raised:
        program(8).fit(2, resume=True, allow=("data.training",))
    assert raised.value.what == "`data.training` ends after 3 of the 5 batches that came before the checkpoint."


def test_failed_resume_changes_no_hyperparameter(tmp_path):
    class Fails(Callback):
        fails = False

        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, state):
            if self.fails:
                raise ValueError("no")

    falling(Fails(), Checkpointer(tmp_path), optimizer=rates(0.5)).fit(1)
    learner = falling(Fails(), Checkpointer(tmp_path), optimizer=rates(0.25))
    Fails.fails = True
    with pytest.raises(fluxcb.ResumeError, match="no"):
        learner.restore(tmp_path)
    Fails.fails = False
    assert learner.hyperparams["learning_rate"] == 0.25
    (warned,) = warned_by(lambda: learner.restore(tmp_path))
    assert rows_of(warned) == {"hyperparams.learning_rate": ("0.5", "0.25", "saved")}


WRONG = {
    "misspelled": (
        ("hyperparams.learning_rat",),
        "`allow` names `hyperparams.learning_rat`, which does not exist. "
        "Did you mean `hyperparams.learning_rate`?\n"
        '  fix:   write "hyperparams" to allow all of them',
    ),
    "another part": (
        ("optimizer",),
        "`allow` takes some of ('callbacks', 'data', 'hyperparams', 'key'), or parts of them such as "
        "'hyperparams.learning_rate', not ('optimizer',).\n"
        '  fix:   write e.g. `learner.fit(10, resume=True, allow=("data",))`',
    ),
    "a part of the key": (
        ("key.seed",),
        '`allow` names `key.seed`, but `key` has no parts.\n  fix:   write "key"',
    ),
    "a text": (
        "hyperparams",
        "`allow` takes some of ('callbacks', 'data', 'hyperparams', 'key'), or parts of them such as "
        "'hyperparams.learning_rate', not 'hyperparams'.\n"
        '  fix:   write e.g. `learner.fit(10, resume=True, allow=("hyperparams",))`',
    ),
}


def test_text_with_a_valid_name_is_shown_as_a_tuple(tmp_path):
    learner = falling(Checkpointer(tmp_path), optimizer=rates(0.5))
    calls = [(learner.fit, "learner.fit(10, resume=True"), (learner.restore, "learner.restore(path")]
    for function, call in calls:
        with pytest.raises(DeclarationError) as raised:
            function(tmp_path if function == learner.restore else 2, allow="callbacks.ClipGradients")
        assert raised.value.fix == (f'write e.g. `{call}, allow=("callbacks.ClipGradients",))`',)
    with pytest.raises(DeclarationError) as raised:
        learner.fit(2, resume=True, allow="optimizer.b1")
    assert raised.value.fix == ('write e.g. `learner.fit(10, resume=True, allow=("data",))`',)


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_allow_raises(tmp_path, case):
    allow, message = WRONG[case]
    falling(Checkpointer(tmp_path), optimizer=rates(0.5)).fit(1)
    learner = falling(Checkpointer(tmp_path), optimizer=rates(0.25))
    with pytest.raises(DeclarationError) as raised:
        learner.fit(2, resume=True, allow=allow)
    assert str(raised.value) == message
    assert learner.step == 0
    learner.fit(2, resume=True, allow=("hyperparams",))


def test_allow_without_resume_raises(tmp_path):
    falling(Checkpointer(tmp_path), optimizer=rates(0.5)).fit(1)
    learner = falling(Checkpointer(tmp_path), optimizer=rates(0.25))
    with pytest.raises(DeclarationError) as raised:
        learner.fit(2, allow=("hyperparams",))
    assert str(raised.value) == (
        "`fit` was given `allow` without `resume=True`.\n"
        "  why:   `allow` names differences from the run that is resumed\n"
        "  fix:   write `learner.fit(..., resume=True, allow=('hyperparams',))`"
    )
    warned_by(lambda: learner.restore(tmp_path))
    with pytest.raises(DeclarationError) as raised:
        learner.fit(2, resume=True, allow=("hyperparams",))
    assert str(raised.value) == (
        "`fit` was given `allow` after `learner.restore`, which has already compared the program with the run.\n"
        "  fix:   pass it to `restore`: `learner.restore(path, allow=('hyperparams',))`"
    )
    learner.restore(tmp_path, allow=("hyperparams",))
    learner.fit(2, resume=True)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_callbacks_have_arguments_of_original(tmp_path, copied):
    falling(Checkpointer(tmp_path, keep_last=5), optimizer=rates(0.5)).fit(1)
    learner = falling(copied(Checkpointer(tmp_path, keep_last=4)), optimizer=rates(0.5))
    (warned,) = warned_by(lambda: learner.restore(tmp_path))
    assert rows_of(warned) == {"callbacks.Checkpointer.keep_last": ("5", "4", "program")}


# --- descriptions -----------------------------------------------------------------------------------------------------


def recursive(depth):
    def function(step):
        return function(step - 1) if depth else step

    return function


DESCRIBED = [
    (3, {"x": "3"}),
    ((1, "a"), {"x[0]": "1", "x[1]": "'a'"}),
    ({"a": {LearningRate: None}}, {"x": "dict", "x.a": "dict", "x.a.LearningRate": "None"}),
    ({2, 1}, {"x": "set", "x[0]": "1", "x[1]": "2"}),
    ([0.5, 1], {"x": "list", "x[0]": "0.5", "x[1]": "1"}),
    ([object()], {"x": "list"}),  # a callback collects objects in it
    (np.float32(0.5), {"x": "0.5"}),
    (np.zeros((2, 3), np.float32), {"x": "float32[2, 3]"}),
    (jnp.zeros(3), {"x": "float32[3]"}),
    (EverySteps(7), {"x": "EverySteps", "x.steps": "7"}),
    (object(), {"x": "object"}),
    ("a" * 300, {"x": "'" + "a" * 99 + "... (302 characters, e3af4a2c)"}),
]


@pytest.mark.parametrize(("value", "expected"), DESCRIBED, ids=lambda value: type(value).__name__)
def test_values_are_described_by_their_parts(value, expected):
    assert describe_value(value, "x") == expected


def test_function_is_described_by_code_defaults_and_closure():
    found = describe_value(optax.exponential_decay(0.5, 100, 0.9), "x")
    assert {"x.init_value": "0.5", "x.transition_steps": "100", "x.decay_rate": "0.9"}.items() <= found.items()
    found = describe_value(recursive(3), "x")
    assert found == {"x": "function", "x.code": found["x.code"], "x.depth": "3", "x.function": found["x"]}
    assert describe_value(recursive(2), "x")["x.code"] == found["x.code"]
    log = []
    assert "x.log" not in describe_value(lambda step: log.append(step), "x")  # it would differ after the first fit


DISCARDS = (
    "To train with the state of this Learner, call `fit` without `resume=True`, and give the Checkpointer a new "
    "directory if that call refuses the old one. The epochs or steps then count from the current step."
)


def test_values_that_were_assigned_after_a_fit_and_that_a_resume_discards_are_reported(tmp_path):
    learner = falling(Checkpointer(tmp_path), optimizer=rates(0.5))
    assert warned_by(lambda: learner.fit(1, resume=True)) == []
    learner.hyperparams["learning_rate"] = 0.25
    learner.params = {"w": jnp.ones(())}
    learner.key = 7
    assert warned_by(lambda: learner.fit(2, resume=True)) == [
        f"`fit(resume=True)` has restored {tmp_path / '4'} and discarded the assigned "
        "`learner.hyperparams['learning_rate']`, `learner.params`, `learner.key`. " + DISCARDS
    ]
    assert float(learner.params["w"]) == -8 * 0.5
    # They are reported once. The fix keeps them, in the same directory.
    assert warned_by(lambda: learner.fit(3, resume=True)) == []
    learner.hyperparams["learning_rate"] = 0.25
    assert warned_by(lambda: learner.fit(1)) == []
    assert float(learner.params["w"]) == -12 * 0.5 - 4 * 0.25
    assert warned_by(lambda: learner.fit(1, resume=True)) == []


def test_steps_that_a_resume_discards_are_reported(tmp_path):
    learner = falling(Checkpointer(tmp_path / "1"), optimizer=rates(0.5))
    learner.fit(1, resume=True)
    learner.callbacks.remove(Checkpointer)
    learner.fit(2)
    learner.callbacks.add(Checkpointer(tmp_path / "1"))
    assert warned_by(lambda: learner.fit(1, resume=True)) == [
        f"`fit(resume=True)` has restored {tmp_path / '1' / '4'} and discarded the training from step 4 to step 12. "
        + DISCARDS
    ]
    assert learner.step == 4


def test_a_program_that_assigns_before_it_resumes_or_repeats_a_failed_fit_is_not_warned(tmp_path):
    class Fails(Callback):
        happened = False

        @on
        def fail(self, event: StepBegin, phase: TrainingPhase, learner):
            if learner.progress.step == 6 and not Fails.happened:
                Fails.happened = True
                raise OSError("no power")

    def build():
        learner = falling(Checkpointer(tmp_path), Fails(), optimizer=rates(0.5))
        learner.params = {"w": jnp.ones(())}
        return learner

    learner = build()
    with pytest.raises(OSError, match="no power"):
        learner.fit(2, resume=True)
    assert learner.step > 4
    assert warned_by(lambda: learner.fit(2, resume=True)) == []
    assert warned_by(lambda: build().fit(3, resume=True)) == []


# -- state of callbacks that were added, removed, or changed -----------------------------------------


def constant(name, value):
    return Metric(lambda loss: value + 0 * loss, name, needs=("loss",))


def test_metrics_in_another_order_are_refused_unless_allowed(tmp_path):
    saved = falling(Checkpointer(tmp_path, steps=1), Metrics(constant("a", 8), constant("b", 2)), optimizer=rates(0.5))
    saved.fit(steps=6)  # the second epoch has two steps more
    path, swapped = tmp_path / "6", [Checkpointer(tmp_path, steps=1), Metrics(constant("b", 2), constant("a", 8))]
    with pytest.raises(fluxcb.ResumeError) as raised:
        falling(*swapped, optimizer=rates(0.5)).restore(path)
    assert raised.value.where == ("callbacks: Metrics was (loss, a, b), and is (loss, b, a) now",)
    learner = falling(*swapped, optimizer=rates(0.5))
    assert f"call `learner.restore({str(path)!r}, allow=('callbacks',))`" in str(raised.value)
    learner.restore(path, allow=("callbacks.Metrics",))
    history = learner.fit(1)
    assert (history["training/a"], history["training/b"]) == ([8, 8], [2, 2])


def test_metrics_can_be_added_and_removed_if_allowed(tmp_path):
    falling(Checkpointer(tmp_path), Metrics(constant("a", 8)), optimizer=rates(0.5)).fit(2)
    added = falling(Checkpointer(tmp_path), Metrics(constant("a", 8), constant("b", 2)), optimizer=rates(0.5))
    with pytest.raises(fluxcb.ResumeError, match=r"allow=\('callbacks',\)"):
        added.fit(3, resume=True)
    history = added.fit(3, resume=True, allow=("callbacks.Metrics",))
    assert (history["training/a"], history["training/b"]) == ([8, 8, 8], [2])
    removed = falling(Checkpointer(tmp_path), optimizer=rates(0.5))
    with pytest.raises(fluxcb.ResumeError, match=r"allow=\('callbacks',\)"):
        removed.fit(4, resume=True)
    removed.fit(4, resume=True, allow=("callbacks.Metrics",))
    assert float(removed.params["w"]) == -(4 * 4 * 0.5)


class Target(Callback):
    """Keep the first parameters: in the carry, and on the host."""

    def stateaccess(self):
        return {"params": Read(), "cbstate": {"target": Write(), "first": Write()}}

    def init(self, learner):
        if "target" not in learner.cbstate:
            learner.cbstate.target = jnp.array(learner.params["w"])
            learner.cbstate.first = [float(learner.params["w"])]

    @on(UpdateEnd, TrainingPhase, access={"cbstate": {"target": Write()}})
    def keep(self, event, phase, learner):
        learner.cbstate.target = learner.cbstate.target + 0


def test_added_callback_initializes_from_the_restored_state(tmp_path):
    falling(Checkpointer(tmp_path), optimizer=rates(0.5)).fit(2)
    learner = falling(Checkpointer(tmp_path), Target(), optimizer=rates(0.5))
    learner.fit(3, resume=True, allow=("callbacks.Target",))
    assert (float(learner.cbstate["target"]), learner.cbstate["first"]) == (-4.0, [-4.0])
    assert float(learner.params["w"]) == -6.0
    again = falling(Checkpointer(tmp_path), Target(), optimizer=rates(0.5))
    again.fit(4, resume=True)
    assert (float(again.cbstate["target"]), again.cbstate["first"]) == (-4.0, [-4.0])


def test_program_with_two_fits_that_is_resumed_trains_too_far_with_a_warning(tmp_path):
    def program():
        learner = falling(Checkpointer(tmp_path), optimizer=rates(0.5))
        learner.fit(1, resume=True)
        learner.fit(2)
        return learner.epoch

    assert program() == 3
    (warned,) = warned_by(program)
    assert warned == (
        "`fit(2)` trains further, although the resumed run may have trained it already: its checkpoint was saved by a "
        "fit that began after epoch 1. A program that can be resumed needs a single fit, e.g. "
        "`learner.fit(total, resume=True)`."
    )


def test_single_fit_that_is_resumed_several_times_gives_no_warning(tmp_path):
    def program(epochs):
        learner = falling(Checkpointer(tmp_path), optimizer=rates(0.5))
        learner.fit(epochs, resume=True)
        return learner

    program(1)
    learner = program(2)
    learner.fit(1)
    assert learner.epoch == 3


def test_warning_about_a_stopped_run_says_how_to_train_further(tmp_path):
    def learner(patience):
        callbacks = Metrics(), EarlyStopping(patience), Checkpointer(tmp_path)
        return testlearner(*callbacks, optimizer=optax.sgd(0.0))

    learner(1).fit(10)
    again = learner(5)
    with pytest.warns(ResumeWarning, match=r"EarlyStopping\.criteria\[0\] +1 +5 +program") as record:
        again.fit(10, resume=True)
    assert str(record[0].message).splitlines()[-1] == (
        f"  The run was stopped ({again.stop_reason}), so `fit` with `resume=True` trains nothing. To train further, "
        "call `learner.fit(n)` after it."
    )
    assert again.epoch == 2
    again.fit(10)
    assert again.epoch == 6  # 5 epochs after the first one, without an improvement
