"""Populations that cannot work are refused when they are built, with a fix that works."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, DeclarationError, Population, ThreadExecutor, TraceError, Write, on
from fluxcb._declare.signatures import source_of
from fluxcb.callbacks import Checkpointer, EarlyStopping, Metrics, ParameterEMA
from fluxcb.events import BackwardEnd
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import testlearner

WHY = "  why:   all members run in one program, which performs the same operations on arrays of the same shapes\n"
FIX = (
    "  fix:   build all members with the same model, callbacks and data shapes; numbers may differ, except those that "
    "decide which operations a step has, such as a weight decay of 0 or an integer exponent\n"
    "     or: train members of different structure in populations of their own"
)


def refused(make, *, error: type[fluxcb.FluxcbError] = DeclarationError, **arguments):
    with pytest.raises(error) as caught:
        Population(make, default_callbacks=False, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"learning_rate": 0.1},
            "`Population` was given no sequence, so the number of members is unknown.\n"
            "  why:   each member gets one value of every sequence, and all values that are not sequences\n"
            "  fix:   pass e.g. `learning_rate=[1e-3, 1e-2]` or `key=range(8)`",
        ),
        (
            {"learning_rate": [0.1, 0.2], "key": range(3)},
            "`learning_rate` has 2 values, and `key` has 3.\n"
            "  why:   each member gets one value of every sequence\n"
            "  fix:   pass sequences of one length, or a single value for all members",
        ),
        (
            {"learning_rate": []},
            "`learning_rate` is empty, so the population would have no members.\n"
            "  fix:   give `learning_rate` at least one value",
        ),
    ],
    ids=["no sequence", "other length", "empty"],
)
def test_wrong_lengths_are_explained(arguments, message):
    assert refused(testlearner, **arguments) == message


def make_member(learning_rate, width=1):
    return testlearner(Metrics(), learning_rate=learning_rate)


@pytest.mark.parametrize(
    ("wrong", "fix", "mended"),
    [
        (
            {"learning_rat": [0.1, 0.2]},
            "  fix:   write `learning_rate=...` instead of `learning_rat=...`",
            [{"learning_rate": [0.1, 0.2]}],
        ),
        (
            {"learning_rate": [0.1, 0.2], "default_callback": False},
            "  fix:   write `default_callbacks=...` instead of `default_callback=...`",
            [{"learning_rate": [0.1, 0.2], "default_callbacks": False}],
        ),
        (
            {"learning_rate": [0.1, 0.2], "momentum": 0.9},
            "  fix:   leave out `momentum=...`\n     or: give `make_member` a parameter `momentum`",
            [{"learning_rate": [0.1, 0.2]}],
        ),
    ],
    ids=["parameter", "option", "neither"],
)
def test_unknown_names_are_explained(wrong, fix, mended):
    *_, name = wrong
    with pytest.raises(DeclarationError) as caught:
        Population(make_member, **wrong)
    assert str(caught.value) == (
        f"`{name}` is neither an option of `Population` nor a parameter of `make_member`.\n"
        f"  where: make_member  {source_of(make_member)}\n"
        "  why:   `make_member` takes (learning_rate, width=1)\n" + fix
    )
    for arguments in mended:
        Population(make_member, **arguments)


def test_added_parameter_and_factories_that_take_any_name_are_accepted():
    def make(learning_rate, momentum):  # the second fix of the message above
        return make_member(learning_rate)

    @functools.wraps(make_member)
    def decorated(*args, momentum, **kwargs):
        return make_member(*args, **kwargs)

    for factory in (make, decorated, lambda momentum, **options: make_member(**options)):
        Population(factory, learning_rate=[0.1, 0.2], momentum=0.9, default_callbacks=False)
    Population(functools.partial(make_member, width=2), learning_rate=[0.1, 0.2], width=3, default_callbacks=False)


def test_factory_must_be_function():
    assert refused(testlearner(), key=range(2)).startswith("`Population` takes a function that builds a Learner, not ")


def test_factory_must_return_new_learners():
    assert refused(lambda key: key, key=range(2)) == (
        "The factory of a `Population` must return a Learner, not int.\n"
        "  fix:   return the Learner from the function: `return fluxcb.Learner(...)`"
    )
    learner = testlearner()
    assert refused(lambda key: learner, key=range(2)) == (
        "The factory returned the same Learner for member 0 and member 1.\n"
        "  why:   each member has its own train state and callbacks\n"
        "  fix:   build the Learner inside the factory"
    )


def test_error_of_factory_names_member():
    def make(key):
        if key == 1:
            raise ValueError("no such key")
        return testlearner(key=key)

    with pytest.raises(ValueError, match="no such key") as caught:
        Population(make, key=range(2))
    assert caught.value.__notes__[-1] == "raised while `Population` built member 1 (key=1)"


def test_other_batches_are_refused():
    assert refused(lambda size: testlearner(batch_size=size), size=[8, 4]) == (
        "Member 1 (size=4) has other batches of `data.training` than member 0 (size=8).\n"
        "  where: [0]: expected float32[8, 1], got float32[4, 1]\n"
        "         [1]: expected float32[8, 1], got float32[4, 1]\n" + WHY + FIX
    )


def test_other_parameters_are_refused():
    def make(width):
        return fluxcb.Learner.from_loss(
            {"w": jnp.zeros(width)},
            lambda params, batch, key: jnp.sum(params["w"]) * jnp.mean(batch),
            optax.sgd(0.1),
            data=[np.ones(2, np.float32)],
            default_callbacks=False,
        )

    assert refused(make, width=[2, 3]) == (
        "Member 1 (width=3) has another train state than member 0 (width=2).\n"
        "  where: ['params']['w']: expected float32[2], got float32[3]\n" + WHY + FIX
    )


def test_other_callbacks_are_refused():
    def make(average):
        return testlearner(Metrics(), *([ParameterEMA()] if average else []))

    assert refused(make, average=[True, False]).startswith(
        "Member 1 (average=False) has another train state than member 0 (average=True).\n"
        "  where: ['cbstate']['ema']['params']['b'] is missing\n"
    )
    Population(make, average=[True, True])


class Scale(Callback):
    """Scale the gradients in a way that Python chooses."""

    def __init__(self, kind):
        self.kind = kind

    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on(BackwardEnd, AbstractTrainingPhase)
    def scale(self, event, phase, learner):
        function = jnp.sign if self.kind == "sign" else jnp.tanh
        learner.step.grads = jax.tree.map(function, learner.step.grads)


def test_other_operations_name_the_argument():
    assert refused(lambda kind: testlearner(Scale(kind)), kind=["sign", "tanh"]) == (
        "Member 1 (kind='tanh') has another step than member 0 (kind='sign').\n"
        "  where: an operation is `tanh` instead of `sign`\n"
        "         callbacks.Scale.kind: 'sign' became 'tanh'\n" + WHY + FIX
    )


def test_other_phases_and_settings_are_refused():
    assert refused(lambda steps: testlearner(steps_per_call=steps), steps=[1, 2]) == (
        "Member 1 (steps=2) has other settings than member 0 (steps=1).\n"
        "  where: steps_per_call: 1 became 2\n" + WHY + FIX
    )


def test_numbers_inside_branches_are_refused():
    class Branch(Scale):
        @on(BackwardEnd, AbstractTrainingPhase)
        def scale(self, event, phase, learner):
            factor = self.kind
            learner.step.grads = jax.lax.cond(
                learner.step.loss > 0,
                lambda grads: jax.tree.map(lambda g: g * factor, grads),
                lambda grads: grads,
                learner.step.grads,
            )

        def stateaccess(self):
            return {"step": {"grads": Write(), "loss": fluxcb.Read()}}

    message = refused(lambda factor: testlearner(Branch(factor)), factor=[2.0, 3.0])
    assert message.startswith(
        "Member 1 (factor=3.0) has another step than member 0 (factor=2.0).\n"
        "  where: `mul` inside a branch or loop uses 3.0 instead of 2.0\n"
        "         callbacks.Branch.kind: 2.0 became 3.0\n"
    )


def test_mesh_and_threads_are_refused():
    assert refused(lambda key: testlearner(mesh=fluxcb.mesh(), key=key), key=range(2)) == (
        "Member 0 (key=0) has a mesh.\n"
        "  why:   the members of a population share one device\n"
        "  fix:   build the Learner without `mesh=` and `sharding=`"
    )
    assert refused(lambda key: testlearner(executor=ThreadExecutor(2), key=key), key=range(2)) == (
        "Member 0 (key=0) runs its handlers on threads.\n"
        "  why:   the members of a population take turns, so that their order is fixed\n"
        "  fix:   build the Learner without `executor=`, or with `executor=fluxcb.SerialExecutor()`"
    )


def test_operations_without_vmap_are_refused():
    class Call(Scale):
        @on(BackwardEnd, AbstractTrainingPhase)
        def scale(self, event, phase, learner):
            grads = learner.step.grads
            learner.step.grads = {
                **grads,
                "w": jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct((), jnp.float32), grads["w"]),
            }

    message = refused(lambda key: testlearner(Call(""), key=key), key=range(2), error=TraceError)
    assert message.startswith("The step of TrainingPhase cannot run for several members at once: ")
    assert message.endswith(
        "  why:   a population applies `jax.vmap` to the step, and an operation of this step does not support it\n"
        "  fix:   remove that operation; `jax.pure_callback` needs `vmap_method=`, and ordered effects do not "
        "work\n"
        "     or: train the Learners one after the other"
    )


def test_two_members_must_not_write_to_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(lambda key: testlearner(Checkpointer("runs"), key=key), key=range(2)) == (
        "Member 0 (key=0) and member 1 (key=1) both write to 'runs'.\n"
        "  where: Checkpointer of each member\n"
        "  why:   each member has its own checkpoints and logs, and one would overwrite those of the other\n"
        "  fix:   give the factory a parameter `member`, which gets the number of the member, and use it in the path: "
        '`Checkpointer(f"runs/{member}")`'
    )
    numbers = []

    def make(key, member):
        numbers.append(member)
        return testlearner(Checkpointer(f"runs/{member}"), key=key)

    Population(make, key=range(2))
    assert numbers == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "message", "mended"),
    [
        (
            "population.fit()",
            "`fit` takes exactly one of epochs and steps.\n"
            "  fix:   write `population.fit(10)` or `population.fit(steps=10_000)`",
            "population.fit(1)",
        ),
        (
            "population.fit(1, max_epochs=2)",
            "`Population.fit` has no argument `max_epochs`.\n"
            "  why:   it takes epochs, steps, steps_per_epoch, resume, allow\n"
            "  fix:   leave out `max_epochs=...`",
            "population.fit(1)",
        ),
        (
            "population.fit(1, train_data=[])",
            "`Population.fit` has no argument `train_data`.\n"
            "  why:   it takes epochs, steps, steps_per_epoch, resume, allow\n"
            "  fix:   pass the data to the Learner: `Learner(..., data=(training, validation))`, then write "
            "`population.fit(10)`",
            "population.fit(1)",
        ),
        (
            "population.fit(1, resume='runs/1')",
            "`resume` must be True or False, not 'runs/1'.\n"
            "  why:   `fit` continues the run in the directory of the `Checkpointer` among the callbacks\n"
            "  fix:   write `resume=True`\n"
            "     or: to continue from another checkpoint, call `population[0].restore(path)` before `fit`",
            "population.fit(1)",
        ),
    ],
    ids=["length", "max_epochs", "data", "resume"],
)
def test_wrong_arguments_of_fit_name_the_population(wrong, message, mended):
    population = Population(testlearner, key=range(2), default_callbacks=False)
    with pytest.raises(DeclarationError) as caught:
        eval(wrong)  # noqa: S307 - of this file
    assert str(caught.value) == message
    assert population[0].step == 0
    eval(mended)  # noqa: S307 - of this file
    assert population[1].step == 4


def test_callbacks_of_members_are_refused_in_population():
    message = refused(lambda key: testlearner(key=key), key=range(2), callbacks=[EarlyStopping(3)])
    assert message == (
        "`callbacks` of `Population` takes callbacks that compare the members, "
        "not EarlyStopping(NumberSinceBest(n=3)).\n"
        "  why:   all other callbacks belong to the members, which each need their own instances\n"
        "  fix:   put it into the `callbacks` of the Learner that the factory returns"
    )


def test_best_and_plot_name_available_metrics():
    members = Population(lambda key: testlearner(Metrics(), key=key), key=range(2), default_callbacks=False)
    with pytest.raises(DeclarationError) as caught:
        members.best("accuracy")
    assert str(caught.value) == (
        "No member has a value of `validation/accuracy`.\n"
        "  where: available metrics: none\n"
        "  fix:   train the population first, with `Metrics` in each Learner"
    )
    members.fit(1)
    with pytest.raises(DeclarationError) as caught:
        members.plot("accuracy")
    assert str(caught.value) == (
        "No member has a value of `validation/accuracy`.\n"
        "  where: available metrics: `training/loss`, `validation/loss`\n"
        "  fix:   name one of these"
    )
    assert members.best() == 0  # equal values: the lower number


def test_sequences_of_arrays_and_shared_values():
    built = []

    def make(rate, name, pair):
        built.append((rate, name, pair))
        return testlearner(learning_rate=rate)

    Population(make, rate=np.array([0.1, 0.2]), name="shared", pair=({"a": 1}, {"a": 2}))
    assert built == [(0.1, "shared", {"a": 1}), (0.2, "shared", {"a": 2})]
    assert all(type(rate) is float for rate, *_ in built)


def test_members_print_nothing_by_default(capsys):
    def make(key):
        return testlearner(key=key, default_callbacks=True)

    members = Population(make, key=range(2))
    members.fit(1)
    table, summary = (lines := capsys.readouterr().out.splitlines())[:2], lines[2:]
    assert [len(line.split()) for line in table] == [6, 8]
    assert [line.split()[0] for line in summary] == ["Training", "Next:"]
    names = [type(callback).__name__ for callback in members[0].callbacks]
    assert names == ["Metrics", "Recorder", "StopOnNaNLoss", "PopulationTable", "PopulationRecord"]
    assert {"ProgressBar", "MetricsPrinter"} <= {type(callback).__name__ for callback in make(0).callbacks}
