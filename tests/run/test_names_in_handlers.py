"""Names that users try in handlers: those of a Learner outside handlers, and those of other libraries."""

import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import AccessError, Append, Callback, MissingStateError, Read, Write, on
from fluxcb.callbacks import Metrics, Monitors, Recorder
from fluxcb.events import BackwardEnd, EpochEnd, StepBegin, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def reads(code, access=None):
    """Return a callback whose handler of StepEnd evaluates an expression."""

    class Reads(Callback):
        def stateaccess(self):
            return access or {}

        @on(StepEnd, TrainingPhase)
        def look(self, event, phase, learner):
            self.seen = eval(code, {"learner": learner})  # noqa: S307 - only the expressions of this file

    return Reads()


CASES = {
    "learner.epoch": ("write `learner.progress.epoch` instead of `learner.epoch`", "learner.progress.epoch", {}),
    "learner.global_step": (
        "write `learner.progress.step` instead of `learner.global_step`",
        "learner.progress.step",
        {},
    ),
    "learner.loss": (
        'write `learner.step.loss` instead of `learner.loss`, and add `{"step": {"loss": Read()}}` to `stateaccess`',
        "learner.step.loss",
        {"step": {"loss": Read()}},
    ),
    "learner.batch": (
        'write `learner.step.batch` instead of `learner.batch`, and add `{"step": {"batch": Read()}}` to `stateaccess`',
        "learner.step.batch",
        {"step": {"batch": Read()}},
    ),
    "learner.lr": (
        "write `learner.hyperparams.learning_rate` instead of `learner.lr`, and add "
        '`{"hyperparams": {"learning_rate": Read()}}` to `stateaccess`',
        "learner.hyperparams.learning_rate",
        {"hyperparams": {"learning_rate": Read()}},
    ),
    "learner.metrics": (
        "write `learner.cbstate.metrics_epoch` instead of `learner.metrics`, and add "
        '`{"cbstate": {"metrics_epoch": Read()}}` to `stateaccess`',
        "learner.cbstate.metrics_epoch",
        {"cbstate": {"metrics_epoch": Read()}},
    ),
    "learner.history": (
        "write `learner.cbstate.metrics_epoch` instead of `learner.history`, and add "
        '`{"cbstate": {"metrics_epoch": Read()}}` to `stateaccess`',
        "learner.cbstate.metrics_epoch",
        {"cbstate": {"metrics_epoch": Read()}},
    ),
    "learner.log": (
        'write `learner.cbstate.monitors.put_scalar("name", value)`, and add '
        '`{"cbstate": {"monitors": Append()}}` to `stateaccess`',
        'learner.cbstate.monitors.put_scalar("name", 1.0)',
        {"cbstate": {"monitors": Append()}},
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_fix_names_the_path_and_works(code):
    fix, instead, access = CASES[code]
    with pytest.raises(AccessError) as error:
        testlearner(Metrics(), Recorder(), Monitors(), reads(code)).fit(1)
    assert str(error.value).splitlines()[-1] == f"  fix:   {fix}"
    testlearner(Metrics(), Recorder(), Monitors(), reads(instead, access)).fit(1)


@pytest.mark.parametrize("name", ["evaluate", "predict", "fit"])
def test_methods_of_a_learner_are_not_for_handlers(name):
    with pytest.raises(AccessError) as error:
        testlearner(reads(f"learner.{name}()")).fit(1)
    lines = str(error.value).splitlines()
    assert lines[0] == f"Reads() uses `learner.{name}`, which handlers do not have."
    assert lines[-2:] == [
        f"  fix:   call `learner.{name}` after `fit`",
        "     or: measure on other data during the training with `InferenceRunner`",
    ]


@pytest.mark.parametrize("code", ["learner.step % 2", "learner.step == 3", "learner.step > 3", "learner.step + 1"])
def test_step_of_a_handler_is_no_number(code):
    with pytest.raises(AccessError) as error:
        testlearner(reads(code)).fit(1)
    lines = str(error.value).splitlines()
    assert lines[0] == "Reads() uses `learner.step` as a number."
    assert lines[-2:] == [
        "  why:   in a handler, `learner.step` holds the values of the step",
        "  fix:   write `learner.progress.step`",
    ]
    testlearner(reads(code.replace("learner.step", "learner.progress.step"))).fit(1)


def test_views_of_a_learner_can_be_compared_and_hashed():
    found = reads("(learner.step == learner.step, learner.step == None, len({learner.step, learner.progress}))")
    testlearner(found).fit(1)
    assert found.seen == (True, False, 2)


def uses(code, access=None, *, at=StepEnd, creates=None):
    """Return a callback whose handler runs a statement, and whose `init` creates an entry of `cbstate`."""

    class Uses(Callback):
        def stateaccess(self):
            return access or {}

        def init(self, learner):
            if creates is not None:
                learner.cbstate[creates] = 1

        @on(at, TrainingPhase)
        def use(self, event, phase, learner):
            exec(code, {"learner": learner})

    return Uses()


def trained(*callbacks, optimizer=None):
    model = (lambda key, xs: {"w": xs[0] * 0}, lambda params, xs: xs * params["w"])
    optimizer = optimizer or fluxcb.inject(optax.sgd, learning_rate=0.1)
    data = [(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))]
    learner = fluxcb.Learner(
        model, lambda outputs, ys: ((outputs - ys) ** 2).mean(), optimizer, data=data, callbacks=callbacks
    )
    learner.fit(1)


def refusal(*callbacks, error=AccessError, **options):
    """Return the first line and the fix of an error."""
    with pytest.raises(error) as raised:
        trained(*callbacks, **options)
    first, *_, last = str(raised.value).splitlines()
    return first, last


RATE = {"hyperparams": {"learning_rate": Read()}}
DECLARE_RATE = 'add `{"hyperparams": {"learning_rate": Read()}}` to `stateaccess`'
RENAME = "write `learner.hyperparams.learning_rate` instead of `learner.hyperparams.lr`"
INJECT = "write `fluxcb.inject(optax.sgd, learning_rate=1e-3)` instead of `optax.sgd(...)`"


@pytest.mark.parametrize("at", [StepEnd, BackwardEnd])
@pytest.mark.parametrize(
    ("name", "optimizer", "fix"),
    [
        ("learning_rate", optax.sgd(0.1), f"{INJECT}, and {DECLARE_RATE}"),
        ("lr", optax.sgd(0.1), f"{INJECT}, {RENAME}, and {DECLARE_RATE}"),
        ("lr", None, f"{RENAME}, and {DECLARE_RATE}"),
        ("weird", None, f"{RENAME.replace('write', 'write e.g.').replace('lr`', 'weird`')}, and {DECLARE_RATE}"),
    ],
)
def test_unknown_undeclared_hyperparameter_shows_all_edits(name, optimizer, fix, at):
    first, last = refusal(uses(f"learner.hyperparams.{name}", at=at), optimizer=optimizer)
    assert first.startswith(f"Uses() may not read `hyperparams.{name}`: its `stateaccess` does not declare it.")
    assert last == f"  fix:   {fix}"
    trained(uses("learner.hyperparams.learning_rate", RATE, at=at))


def test_hyperparameter_that_the_optimizer_could_have_shows_all_edits():
    adamw = fluxcb.inject(optax.adamw, learning_rate=1e-3)
    _, last = refusal(uses("learner.hyperparams.wd = 0.1", at=EpochEnd), optimizer=adamw)
    assert last == (
        "  fix:   inject it as well: `fluxcb.inject(optax.adamw, learning_rate=1e-3, weight_decay=0.0001)`, write "
        "`learner.hyperparams.weight_decay` instead of `learner.hyperparams.wd`, and add "
        '`{"hyperparams": {"weight_decay": Write()}}` to `stateaccess`'
    )
    mended = uses("learner.hyperparams.weight_decay = 0.1", {"hyperparams": {"weight_decay": Write()}}, at=EpochEnd)
    trained(mended, optimizer=fluxcb.inject(optax.adamw, learning_rate=1e-3, weight_decay=0.0001))


def test_declared_unknown_hyperparameter_shows_all_edits():
    wrong = uses("learner.hyperparams.lr", {"hyperparams": {"lr": Read()}})
    first, last = refusal(wrong, error=MissingStateError)
    assert first == (
        "Uses() needs `hyperparams.lr`, which this optimizer does not have. It has `learning_rate`. "
        "Did you mean `learning_rate`?"
    )
    assert last == f"  fix:   {RENAME}, and {DECLARE_RATE}"
    _, last = refusal(wrong, error=MissingStateError, optimizer=optax.sgd(0.1))
    assert last == f"  fix:   {INJECT}, {RENAME}, and {DECLARE_RATE}"


@pytest.mark.parametrize("code", ["learner.cbstate.mine", "learner.cbstate.mine = 2", "learner.cbstate['mine']"])
def test_undeclared_entry_that_no_callback_creates_shows_both_edits(code):
    _, last = refusal(uses(code))
    assert last == (
        "  fix:   for a value of your own, create `learner.cbstate.mine` in `init`, and add "
        '`{"cbstate": {"mine": Write()}}` to `stateaccess`'
    )
    access = {"cbstate": {"mine": Write()}}
    trained(uses(code, access, creates="mine"))
    # Another callback has created it, so the declaration is sufficient.
    _, last = refusal(uses("learner.cbstate.mine"), uses("", access, creates="mine"))
    assert last == '  fix:   add `{"cbstate": {"mine": Read()}}` to `stateaccess`'
    # The `init` has the first edit already.
    _, last = refusal(uses("", creates="mine"))
    assert last == '  fix:   add `{"cbstate": {"mine": Write()}}` to `stateaccess`'


def test_undeclared_entry_of_a_missing_callback_shows_both_edits():
    _, last = refusal(uses("learner.cbstate.monitors"))
    assert last == (
        "  fix:   add `Monitors()` to the callbacks, which creates it, and add "
        '`{"cbstate": {"monitors": Append()}}` to `stateaccess`'
    )
    trained(Monitors(), uses("learner.cbstate.monitors", {"cbstate": {"monitors": Append()}}))


@pytest.mark.parametrize("at", [StepBegin, EpochEnd])
@pytest.mark.parametrize("name", ["outputs", "ys", "loss", "grads"])
def test_undeclared_step_value_at_other_event_shows_both_edits(name, at):
    declare = f'add `{{"step": {{"{name}": Read()}}}}` to `stateaccess`'
    _, last = refusal(uses(f"learner.step.{name}", at=at))
    assert last == f"  fix:   handle StepEnd instead, and {declare}"
    _, last = refusal(uses(f"learner.step.{name}"))
    assert last == f"  fix:   {declare}"
    trained(uses(f"learner.step.{name}", {"step": {name: Read()}}))


def test_undeclared_batch_at_its_events():
    for at in (StepBegin, StepEnd):
        _, last = refusal(uses("learner.step.batch", at=at))
        assert last == '  fix:   add `{"step": {"batch": Read()}}` to `stateaccess`'
