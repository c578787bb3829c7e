"""SanityCheck: which checks fail for which mistakes, and which failures are errors or warnings."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import DeclarationError
from fluxcb.callbacks import Check, SanityCheck, default_checks
from fluxcb.data import ArrayLoader
from fluxcb.data import map as prepared
from fluxcb.events import FitBegin
from fluxcb.testing import testlearner

ONES = np.ones((4, 1), np.float32)
FINE = Check(lambda learner: True, "fine", "cannot be")


def batches(*values):
    return [(np.full((4, 1), value, np.float32), ONES) for value in values]


def said_by(learner):
    with pytest.raises(DeclarationError) as caught:
        learner.fit(1)
    return str(caught.value)


def refusal(count, *failures, of=8):
    where = "\n         ".join(failures)
    them = "it" if count == 1 else "them"
    return (
        f"{count} of {of} sanity checks failed.\n"
        f"  where: {where}\n"
        "  why:   training is unlikely to work as intended\n"
        f"  fix:   correct {them}, or remove `SanityCheck` if this is intended"
    )


def model(bias=0.0):
    def init(key, xs):
        return {"w": jnp.ones(()), "b": jnp.float32(bias)}

    return init, lambda params, xs: params["w"] * xs + params["b"]


def learner(data, *, check=None, bias=0.0, loss=lambda outputs, ys: jnp.mean((outputs - ys) ** 2), **kwargs):
    return fluxcb.Learner(
        model(bias),
        loss,
        optax.sgd(0.1),
        data=data,
        callbacks=[check or SanityCheck()],
        default_callbacks=False,
        **kwargs,
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: testlearner(SanityCheck()),
        lambda: learner((ArrayLoader((ONES, ONES), batch_size=2), batches(1.0))),
        lambda: learner((ArrayLoader((ONES, ONES), batch_size=2, device=True), batches(1.0))),
        lambda: learner((iter(batches(1.0)), batches(1.0))),
        lambda: fluxcb.Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch, key: (params["w"] * batch["a"].sum(), batch["b"]),
            optax.sgd(0.1),
            data=([{"a": np.ones(3, np.float32), "b": np.ones(4, np.int32)}],) * 2,
            callbacks=[SanityCheck()],
            default_callbacks=False,
        ),
        lambda: fluxcb.Learner(
            nnx.Sequential(
                nnx.Linear(1, 4, rngs=nnx.Rngs(0)),
                nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
                nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
            ),
            lambda outputs, ys: jnp.mean(outputs**2),
            optax.sgd(0.1),
            data=(batches(1.0), batches(1.0)),
            callbacks=[SanityCheck()],
            default_callbacks=False,
        ),
    ],
    ids=["pair", "loader", "resident", "one-shot", "from_loss", "nnx"],
)
def test_a_correct_training_passes(make):
    make().fit(1)


def test_it_does_not_change_the_training():
    with_check, without = testlearner(SanityCheck()), testlearner()
    with_check.fit(2)
    without.fit(2)
    assert with_check.params == without.params


def test_a_one_shot_iterator_loses_no_batch():
    trained = learner((prepared(lambda batch: batch, iter(batches(1.0, 2.0, 3.0))), batches(1.0)))
    trained.fit(1)
    assert trained.step == 3


def test_missing_validation_data_are_a_warning():
    with pytest.warns(UserWarning, match="validation data") as caught:
        learner(batches(1.0)).fit(1)
    assert [str(warning.message) for warning in caught] == [
        "sanity check: validation data: there are none, so the fit does not validate; pass "
        "`data=(training, validation)` to the Learner"
    ]


def test_missing_training_data_are_an_error():
    empty = learner(None, example_batch=batches(1.0)[0], check=SanityCheck(default_checks()[:1]))
    with pytest.raises(DeclarationError) as caught:
        empty.emit(FitBegin(), empty.phases[0])
    assert str(caught.value) == refusal(1, "training data: there are none; pass `data=` to the Learner", of=1)


def test_inputs_that_are_not_finite_are_a_warning_and_their_loss_an_error():
    with pytest.warns(UserWarning, match="^sanity check: finite inputs: the first training batch has NaN or inf"):
        text = said_by(learner((batches(np.nan), batches(1.0))))
    assert text == refusal(
        2,
        "finite outputs: the model outputs for the first training batch are NaN or infinite",
        "a finite loss: the loss of the first training batch is not a finite scalar",
    )


def test_batches_of_two_sizes():
    def broadcast(outputs, ys):
        return jnp.mean(outputs) - jnp.mean(ys)

    data = [(ONES, ONES[:1])]
    with pytest.warns(UserWarning, match=r"NumPy broadcasts the only target"):
        text = said_by(learner((data, data), loss=broadcast))
    assert text == refusal(1, "equal batch sizes: the arrays of the first training batch differ in their first axis")


def test_parameters_that_are_not_finite():
    text = said_by(learner((batches(1.0), batches(1.0)), bias=np.inf))
    assert text == refusal(
        3,
        "finite parameters: a parameter is NaN or infinite before training",
        "finite outputs: the model outputs for the first training batch are NaN or infinite",
        "a finite loss: the loss of the first training batch is not a finite scalar",
    )


def test_a_loss_that_is_not_finite():
    text = said_by(learner((batches(1.0),) * 2, loss=lambda outputs, ys: jnp.log(-jnp.mean(outputs))))
    assert text == refusal(1, "a finite loss: the loss of the first training batch is not a finite scalar")


def test_it_fails_before_the_first_step():
    trained = learner((batches(1.0),) * 2, bias=np.nan)
    said_by(trained)
    assert (trained.step, trained.epoch) == (0, 0)


# --- checks of one's own --------------------------------------------------------------------------------------------


def test_custom_checks_replace_the_default_ones_unless_requested():
    assert SanityCheck().checks == default_checks()
    assert SanityCheck([FINE]).checks == (FINE,)
    assert SanityCheck(FINE).checks == (FINE,)
    assert SanityCheck([FINE], defaults=True).checks == (*default_checks(), FINE)
    assert SanityCheck(defaults=False).checks == ()


def test_custom_checks_can_read_the_declared_state():
    def long_enough(learner):
        names = [type(callback).__name__ for callback in learner.callbacks]
        assert (names, learner.optimizer is not None) == (["SanityCheck"], True)
        return len(learner.data.training) >= 2

    check = Check(long_enough, "two batches", "there is one")
    text = said_by(learner((batches(1.0),) * 2, check=SanityCheck([FINE, check])))
    assert text == refusal(1, "two batches: there is one", of=2)
    learner((batches(1.0, 2.0), batches(1.0)), check=SanityCheck([check])).fit(1)


def test_a_check_that_raises_has_failed():
    check = Check(lambda learner: 1 / 0, "division", "cannot be")
    assert said_by(learner(batches(1.0), check=SanityCheck([check]))) == refusal(
        1, "division: ZeroDivisionError: division by zero", of=1
    )


def test_checks_run_in_every_fit():
    seen = []
    check = Check(lambda learner: not seen.append(learner.progress.epoch), "noted", "cannot be")
    trained = learner(batches(1.0), check=SanityCheck([check]))
    trained.fit(2)
    trained.fit(1)
    assert seen == [0, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SanityCheck([lambda learner: True]), "Each check of `SanityCheck` must be a `Check`, not <function "),
        (
            lambda: Check("x", "name", "message"),
            "The function of a `Check` must be a function of the learner, not 'x'.",
        ),
        (
            lambda: Check(lambda: True, "name", "message"),
            "The function of a `Check` must be a function of the learner; `<lambda>` takes ().",
        ),
        (lambda: Check(lambda learner: True, "", "message"), "The name of a `Check` must be a string, not ''."),
        (lambda: Check(lambda learner: True, "name", None), "The message of a `Check` must be a string, not None."),
    ],
)
def test_invalid_arguments_are_rejected_at_construction(make, said):
    with pytest.raises(DeclarationError) as caught:
        make()
    assert caught.value.what.startswith(said)
    assert caught.value.fix
