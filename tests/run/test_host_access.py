"""What a host handler may access, and the errors for everything else."""

import collections
import operator
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import AccessError, Append, Callback, DeclarationError, MissingStateError, Read, Write, on
from fluxcb._run.views import read_only
from fluxcb.events import BackwardEnd, EpochBegin, EpochEnd, StepBegin, StepEnd, UpdateEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def at(function):
    return f"{os.path.relpath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def made(event, access, function):
    class Made(Callback):
        def stateaccess(self):
            return access

        def init(self, learner):
            if "cbstate" in access:
                for name in access["cbstate"]:
                    if name not in learner.cbstate:
                        learner.cbstate[name] = {"list": [1], "set": {2}, "dict": {3: 4}, "array": np.zeros(2)}

        @on(event, TrainingPhase)
        def handle(self, event, phase, learner):
            function(learner)

    return Made()


def fails(error, event, access, function):
    """Return the message of the error that training raises."""
    bad = made(event, access, function)
    with pytest.raises(error) as raised:
        testlearner(bad).fit(1)
    return bad, str(raised.value)


def declared(bad):
    return f"  where: Made.stateaccess  {at(type(bad).stateaccess)}\n"


WHY = "  why:   declared access determines order, conflicts and device-to-host transfers\n"


def test_undeclared_read_raises():
    bad, text = fails(AccessError, StepEnd, {"step": {"loss": Read()}}, lambda learner: learner.step.grads)
    assert text == (
        "Made() may not read `step.grads`: its `stateaccess` does not declare it.\n"
        + declared(bad)
        + WHY
        + '  fix:   add `{"step": {"grads": Read()}}` to `stateaccess`'
    )


def test_undeclared_read_of_whole_hub_raises():
    bad, text = fails(AccessError, EpochEnd, {}, lambda learner: learner.params)
    assert text == (
        "Made() may not read `params`: its `stateaccess` does not declare it.\n"
        + declared(bad)
        + WHY
        + '  fix:   add `{"params": Read()}` to `stateaccess`'
    )


def test_hasattr_does_not_hide_access_error():
    _, text = fails(AccessError, EpochEnd, {}, lambda learner: hasattr(learner, "params"))
    assert text.startswith("Made() may not read `params`")


@pytest.mark.parametrize(
    ("name", "meant", "line"),
    [
        ("parms", "params", None),
        ("opt_stat", "opt_state", '{"opt_state": Read()}'),
        ("cbstat", "cbstate", None),
        ("step.los", "step.loss", '{"step": {"loss": Read()}}'),
        ("step.outpust", "step.outputs", '{"step": {"outputs": Read()}}'),
        ("cbstate.tabel", "cbstate.table", None),
        ("cbstate.hidde", "cbstate.hidden", '{"cbstate": {"hidden": Read()}}'),
        ("hyperparams.learning_rat", "hyperparams.learning_rate", '{"hyperparams": {"learning_rate": Read()}}'),
    ],
)
def test_misspelled_name_raises_with_suggestion(name, meant, line):
    class Hides(Callback):
        def stateaccess(self):
            return {"cbstate": {"hidden": Write()}}

        def init(self, learner):
            learner.cbstate.hidden = 1

    access = {"params": Read(), "cbstate": {"table": Write()}}
    bad = made(StepEnd, access, lambda learner: operator.attrgetter(name)(learner))
    with pytest.raises(AccessError) as raised:
        testlearner(bad, Hides()).fit(1)
    added = f", and add `{line}` to `stateaccess`" if line else ""
    assert str(raised.value) == (
        f"Made() may not read `{name}`: its `stateaccess` does not declare it. Did you mean "
        f"`{meant.split('.')[-1]}`?\n"
        + declared(bad)
        + WHY
        + f"  fix:   write `learner.{meant}` instead of `learner.{name}`{added}"
    )
    if line:
        for first, below in eval(line, {"Read": Read}).items():  # noqa: S307 - of the message's own text
            access[first] = access.get(first, {}) | below if isinstance(below, dict) else below
    fixed = FollowsMessage(access, meant)
    testlearner(fixed, Hides()).fit(1)


class FollowsMessage(Callback):
    def __init__(self, access, path):
        self.access, self.path = access, path

    def stateaccess(self):
        return self.access

    def init(self, learner):
        learner.cbstate.table = 0

    @on
    def handle(self, event: StepEnd, phase: TrainingPhase, learner):
        operator.attrgetter(self.path)(learner)


def test_name_that_is_not_state_raises():
    bad, text = fails(AccessError, EpochEnd, {}, lambda learner: learner.seen)
    assert text == (
        "Made() reads `seen`, which is not part of the state.\n"
        + declared(bad)
        + WHY
        + "  fix:   for a value of your own, create `learner.cbstate.seen` in `init`, and add "
        '`{"cbstate": {"seen": Write()}}` to `stateaccess`'
    )
    testlearner(made(EpochEnd, {"cbstate": {"seen": Write()}}, lambda learner: learner.cbstate.seen)).fit(1)


def test_write_with_read_access_raises():
    def write(learner):
        learner.params = learner.params

    bad, text = fails(AccessError, EpochEnd, {"params": Read()}, write)
    assert text == (
        "Made() declares only Read() on `params`, but writes it.\n"
        + declared(bad)
        + WHY
        + '  fix:   add `{"params": Write()}` to `stateaccess`'
    )


def test_deleting_raises():
    def delete(learner):
        del learner.params

    bad, text = fails(AccessError, EpochEnd, {"params": Write()}, delete)
    assert text == (
        "Made() deletes `params`; state of the Learner cannot be deleted.\n"
        + declared(bad)
        + "  fix:   assign a new value instead"
    )


def into_params(learner):
    learner.params["w"] = jnp.zeros(())


def into_grads(learner):
    learner.step.grads["w"] = np.zeros(())


@pytest.mark.parametrize(
    ("event", "access", "function", "path"),
    [
        (EpochEnd, {"params": Read()}, into_params, "params"),
        (EpochEnd, {"params": Write()}, into_params, "params"),
        (StepEnd, {"step": {"grads": Read()}}, into_grads, "step.grads"),
    ],
)
def test_writing_into_read_container_raises(event, access, function, path):
    _, text = fails(AccessError, event, access, function)
    assert text.splitlines()[0] == f"Made() writes into the container that it read from `{path}`."


def test_read_arrays_are_read_only():
    def write(learner):
        learner.step.outputs[0] = 1

    _, text = fails(ValueError, StepEnd, {"step": {"outputs": Read()}}, write)
    assert text == "assignment destination is read-only"


def test_note_for_a_batch_that_is_changed_in_place():
    def in_place(learner):
        learner.step.batch[0][0] = 1

    def assigned(learner):
        xs, ys = learner.step.batch
        learner.step.batch = (xs + 1, ys)

    access = {"step": {"batch": Write()}}
    with pytest.raises(ValueError, match="read-only") as raised:
        testlearner(made(StepBegin, access, in_place)).fit(1)
    assert raised.value.__notes__[1] == (
        "fix: arrays of the Learner cannot be changed in place. Compute a new array and assign it to its path, for "
        "example `learner.step.batch = (xs + 1, ys)`, with `Write()` in `stateaccess`"
    )
    testlearner(made(StepBegin, access, assigned)).fit(1)


def appends(learner):
    learner.cbstate.shared["list"].append(1)


def adds(learner):
    learner.cbstate.shared["set"].add(1)


def sets(learner):
    learner.cbstate.shared["dict"][5] = 6


def replaces(learner):
    learner.cbstate.shared["list"] = []


@pytest.mark.parametrize("function", [appends, adds, sets, replaces])
def test_changing_read_cbstate_raises(function):
    creator = made(EpochEnd, {"cbstate": {"shared": Write()}}, lambda learner: learner.cbstate.shared)

    class Reader(Callback):
        def stateaccess(self):
            return {"cbstate": {"shared": Read()}}

        @on
        def read(self, event: StepEnd, phase: TrainingPhase, learner):
            function(learner)

    with pytest.raises(AccessError) as raised:
        testlearner(creator, Reader()).fit(1)
    assert str(raised.value) == (
        "Reader() declares only to read `cbstate.shared`, but writes to it.\n"
        f"  where: Reader.stateaccess  {at(Reader.stateaccess)}\n"
        "  why:   declared access determines order and conflicts\n"
        '  fix:   add `{"cbstate": {"shared": Write()}}` to `stateaccess`'
    )


def test_assigning_cbstate_with_read_access_raises():
    creator = made(EpochEnd, {"cbstate": {"shared": Write()}}, lambda learner: learner.cbstate.shared)

    class Reader(Callback):
        def stateaccess(self):
            return {"cbstate": {"shared": Read()}}

        @on
        def read(self, event: StepEnd, phase: TrainingPhase, learner):
            learner.cbstate.shared = 1

    with pytest.raises(AccessError) as raised:
        testlearner(creator, Reader()).fit(1)
    assert str(raised.value) == (
        "Reader() declares only Read() on `cbstate.shared`, but writes it.\n"
        f"  where: Reader.stateaccess  {at(Reader.stateaccess)}\n"
        + WHY
        + '  fix:   add `{"cbstate": {"shared": Write()}}` to `stateaccess`'
    )


def test_flags_are_false_by_default():
    flags = []

    def look(learner):
        flags.append((bool(learner.step.skip), bool(learner.step.stop)))

    testlearner(made(StepEnd, {"step": {"skip": Read(), "stop": Read()}}, look)).fit(1)
    assert flags == [(False, False)] * 4


class Skips(Callback):
    def stateaccess(self):
        return {"step": {"skip": Append(), "stop": Append()}}

    @on
    def skip(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.skip = learner.progress.step == 1
        learner.step.stop = learner.progress.step == 2


def test_flags_are_visible_at_their_step():
    flags = []

    def look(learner):
        flags.append((bool(learner.step.skip), bool(learner.step.stop)))

    testlearner(Skips(), made(StepEnd, {"step": {"skip": Read(), "stop": Read()}}, look)).fit(1)
    assert flags == [(False, False), (True, False), (False, True), (False, False)]


class Notes(Callback):
    def stateaccess(self):
        return {"step": {"note": Write()}}

    @on
    def note(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.step.note = f"step {learner.progress.step}"


def test_host_handlers_share_step_values():
    notes = []
    reader = made(StepEnd, {"step": {"note": Read()}}, lambda learner: notes.append(learner.step.note))
    testlearner(reader, Notes()).fit(1)
    assert notes == ["step 1", "step 2", "step 3", "step 4"]


def test_step_values_are_pytrees():
    seen = []

    def look(learner):
        grads = learner.step.grads
        seen.append(float(sum(jax.tree.leaves(jax.tree.map(np.abs, grads)))))
        assert type(grads) is dict
        assert type(learner.step.batch) is tuple

    testlearner(made(StepEnd, {"step": {"grads": Read(), "batch": Read()}}, look)).fit(1)
    assert len(seen) == 4


def test_step_values_are_read_only_numpy_or_borrowed_jax_arrays():
    types = []

    def look(learner):
        step = learner.step
        types.append([type(step.loss), type(step.outputs), step.outputs.flags.writeable, type(step.aux_grads)])

    class Copies(Callback):
        def stateaccess(self):
            return {"step": {"grads": Read(), "aux_grads": Write()}}

        @on
        def copy(self, event: UpdateEnd, phase: TrainingPhase, learner):
            learner.step.aux_grads = learner.step.grads["w"]

    reads = {"loss": Read(), "outputs": Read(), "aux_grads": Read(borrow=True)}
    testlearner(Copies(), made(StepEnd, {"step": reads}, look), batches=1).fit(1)
    assert types[0][:3] == [np.float32, np.ndarray, False]
    assert types[0][3] is np.float32  # fetched with the others: borrowing is for what is not fetched


def test_borrowed_carry_is_live():
    is_live = []

    def look(seen):
        live = learner._state.train.carry["params"]["w"]
        is_live.append(seen.params["w"].unsafe_buffer_pointer() == live.unsafe_buffer_pointer())

    live, copied = made(EpochEnd, {"params": Read(borrow=True)}, look), made(EpochEnd, {"params": Read()}, look)
    learner = testlearner(live, copied)
    learner.fit(1)
    assert is_live == [True, False]


def test_reading_missing_values_raises():
    _, text = fails(
        MissingStateError, EpochEnd, {"cbstate": {"made": Write()}, "step": Append()}, lambda learner: learner.step.loss
    )
    assert text.splitlines()[0] == "Made() reads `step.loss`, which does not exist here."
    _, text = fails(MissingStateError, StepBegin, {"step": Read()}, lambda learner: learner.step.batches)
    assert text.splitlines()[0] == "Made() reads `step.batches`, which does not exist here. Did you mean `batch`?"


@pytest.mark.parametrize(
    ("value", "difference"),
    [
        ({"w": jnp.zeros(2), "b": jnp.zeros(())}, "['w']: expected float32[], got float32[2]"),
        ({"w": jnp.zeros((), jnp.int32), "b": jnp.zeros(())}, "['w']: expected float32[], got int32[]"),
        ({"w": jnp.zeros(())}, "['b'] is missing"),
    ],
)
def test_params_with_other_structure_raise(value, difference):
    def put(learner):
        learner.params = value

    bad, text = fails(DeclarationError, EpochBegin, {"params": Write()}, put)
    assert text == (
        f"Made() changes the structure, shape or dtype of `params`: {difference}.\n"
        + declared(bad)
        + "  why:   the carry of a compiled step keeps its structure, shapes and dtypes\n"
        "  fix:   compute each array from the old one, with the same dtype: "
        "`learner.params = jax.tree.map(lambda old: ..., learner.params)`"
    )


def test_python_numbers_take_old_dtype():
    def put(learner):
        learner.params = {"w": 2, "b": 0.5}

    learner = testlearner(made(EpochEnd, {"params": Write()}, put))
    learner.fit(1)
    assert jax.tree.map(float, learner.params) == {"w": 2.0, "b": 0.5}
    learner.fit(1)
    assert learner.compile_counts == {"traces": 2, "compiles": 2}


def test_single_parameter_by_path():
    def put(learner):
        learner.params.w = learner.params.w * 0 + 7

    learner = testlearner(made(EpochEnd, {"params": {"w": Write()}}, put))
    learner.fit(1)
    assert float(learner.params["w"]) == 7
    _, text = fails(AccessError, EpochEnd, {"params": {"w": Write()}}, lambda learner: learner.params.b)
    assert text.startswith("Made() may not read `params.b`")


def test_data_can_be_replaced_between_epochs():
    xs = np.full((8, 1), 0.5, np.float32)

    def put(learner):
        if learner.progress.epoch == 1:
            learner.data.training = [(xs, xs)] * 2

    learner = testlearner(made(EpochEnd, {"data": {"training": Write()}}, put))
    learner.fit(2)
    assert learner.step == 4 + 2


def test_replacing_fixed_parts_raises():
    def put(learner):
        learner.optimizer = None

    bad, text = fails(AccessError, EpochEnd, {"optimizer": Write()}, put)
    assert text == (
        "Made() assigns `optimizer`, which is fixed when the Learner is built.\n"
        + declared(bad)
        + "  fix:   build a new Learner"
    )


def test_parts_of_learner_can_be_read():
    seen = []

    def look(learner):
        seen.append((learner.optimizer, learner.loss_fn, learner.model, len(learner.callbacks), learner.data.training))

    parts = {name: Read() for name in ("optimizer", "loss_fn", "model", "callbacks", "data")}
    learner = testlearner(made(EpochEnd, parts, look))
    learner.fit(1)
    ((optimizer, loss_fn, model, count, data),) = seen
    assert callable(optimizer.update)
    assert float(loss_fn(jnp.ones(1), jnp.zeros(1))) == 1
    assert len(model) == 2
    assert (count, len(data)) == (1, 4)


def test_host_keys_differ_by_step_and_callback():
    keys = []

    def look(learner):
        keys.append(tuple(jax.random.key_data(learner.key).tolist()))

    testlearner(made(StepEnd, {}, look), made(StepEnd, {}, look)).fit(1)
    assert len(set(keys)) == 8


def test_writing_counters_raises():
    def put(learner):
        learner.progress.step = 3

    _, text = fails(AccessError, StepEnd, {}, put)
    assert text.splitlines()[0] == ("Made() writes `progress.step`, which only the engine may write.")


@pytest.mark.parametrize(
    "change",
    [
        lambda held: next(iter(held["nested"].values())).append(1),
        lambda held: next(iter(held["nested"].items()))[1].append(1),
        lambda held: held["queue"].append(1),
        lambda held: held["queue"].rotate(),
        lambda held: held["queue"].__setitem__(0, 5),
    ],
)
def test_views_cannot_be_bypassed(change):
    held = {"nested": {"a": [1]}, "queue": collections.deque([1, 2])}

    def refuse():
        return AccessError("no")

    with pytest.raises(AccessError):
        change(read_only(held, refuse))
    assert held == {"nested": {"a": [1]}, "queue": collections.deque([1, 2])}
    view = read_only(held, refuse)
    assert [list(values) for values in view["nested"].values()] == [[1]]
    assert list(view["queue"]) == [1, 2]


@pytest.mark.parametrize("held", [{"a": [1]}, [1, 2], {1, 2}, collections.deque([1, 2])])
def test_pickled_view_is_a_copy_of_its_object(held):
    view = read_only(held, lambda: AccessError("no"))
    copied = pickle.loads(pickle.dumps(view))
    assert type(copied) is type(held)
    assert copied == held
