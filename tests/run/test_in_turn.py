"""`InTurn`: training phases that alternate within an epoch."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CancelEpoch,
    CancelFitting,
    DataError,
    DeclarationError,
    Learner,
    PauseFitting,
    RewindFitting,
    ThreadExecutor,
    every,
    on,
)
from fluxcb.callbacks import (
    Checkpointer,
    CustomCallback,
    EarlyStopping,
    LearningRate,
    Metric,
    Metrics,
    MetricsPrinter,
    ProgressBar,
    Recorder,
    Scheduler,
)
from fluxcb.checkpoints import ResumeWarning
from fluxcb.checkpoints.run_folder import RunFolder
from fluxcb.events import BackwardBegin, BackwardEnd, ComputeEnd, EpochBegin, EpochEnd, ForwardBegin, HostEvent, StepEnd
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, InTurn
from fluxcb.testing import assert_resumes_exactly
from tests.changed_callbacks import changes_arguments

RATE = 0.125


class A(AbstractTrainingPhase):
    """Move `w` towards the mean of the batch."""

    name = "a"
    provides = {ForwardBegin: (), BackwardBegin: ("loss",), BackwardEnd: ("grads",)}
    weight = 1.0

    def step(self, learner, emit):
        emit(ForwardBegin())

        def loss(params):
            learner.step.loss = self.weight * jnp.mean((params["w"] - learner.step.batch) ** 2)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss)
        emit(BackwardEnd())
        learner.apply_updates()


class B(A):
    """Like `A`, with another weight and batches of another shape."""

    name, weight = "b", 0.5


class C(A):
    name, weight = "c", 0.25


WEIGHTS = {"a": 1.0, "b": 0.5, "c": 0.25}


class Check(AbstractValidationPhase):
    provides = {ComputeEnd: ("loss",)}

    def step(self, learner, emit):
        learner.step.loss = jnp.mean((learner.params["w"] - learner.step.batch) ** 2)


def batches(count, size, seed):
    return list(np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32))


def source(*names):
    data = {"a": batches(3, 4, 1), "b": batches(5, 2, 2), "c": batches(2, 3, 4), "validation": batches(2, 4, 3)}
    return {name: data[name] for name in names or ("a", "b", "validation")}


def learner_of(*callbacks, data=None, phases=None, optimizer=None, **kwargs):
    return Learner.from_loss(
        {"w": jnp.float32(1)},
        None,
        optimizer or fluxcb.inject(optax.sgd, learning_rate=RATE),
        data=data or source(),
        phases=phases or [InTurn(A(), B(), steps=(1, 2)), Check()],
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def assert_same(a, b):
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


class Log(Callback):
    def __init__(self):
        self.lines = []

    @on(HostEvent)
    def log(self, event, phase, learner):
        now = learner.progress
        self.lines.append((repr(event), phase.name, now.epoch, now.step, now.step_in_epoch, now.steps_in_epoch))

    def steps(self):
        return "".join(phase for event, phase, *_ in self.lines if event == "StepEnd" and phase != "validation")


@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_sequence_of_events(steps_per_call):
    log = Log()
    learner = learner_of(log, steps_per_call=steps_per_call)
    learner.fit(2)
    assert (learner.step, learner.epoch) == (18, 2)
    expected = [("FitBegin", "a", 0, 0, 0, 0)]
    for epoch in (1, 2):
        step = 9 * (epoch - 1)
        done, total = {"a": 0, "b": 0}, {"a": 3, "b": 6}
        expected += [("EpochBegin", name, epoch, step, 0, total[name]) for name in "ab"]
        for name in "abb" * 3:
            expected.append(("StepBegin", name, epoch, step, done[name], total[name]))
            step, done[name] = step + 1, done[name] + 1
            expected.append(("StepEnd", name, epoch, step, done[name], total[name]))
        expected += [("EpochEnd", name, epoch, step, total[name], total[name]) for name in "ab"]
        expected.append(("EpochBegin", "validation", epoch, step, 0, 2))
        for i in range(2):
            expected.append(("StepBegin", "validation", epoch, step, i, 2))
            expected.append(("StepEnd", "validation", epoch, step, i + 1, 2))
        expected.append(("EpochEnd", "validation", epoch, step, 2, 2))
        expected.append(("Trigger", "a", epoch, step, 6, 6))
    expected += [(name, "a", 2, 18, 6, 6) for name in ("FitStopping", "FitEnd")]
    assert log.lines == expected


def test_event_shows_whether_epoch_is_shared():
    told = []

    class Tell(Callback):
        @on
        def tell(self, event: EpochBegin, phase, learner):
            told.append((phase.name, event.shares_epoch))

    learner_of(Tell(), data=source("a", "b", "c"), phases=[C(), InTurn(A(), B())]).fit(2)
    assert told == [("c", False), ("a", True), ("b", True)] * 2


def by_hand(names, turns, epochs, *, data=None, limit=None, rate=lambda step: RATE):
    """Alternate in a hand-written loop; return the parameters, and the losses and steps of each phase in each epoch."""
    data = data or source(*names)
    streams = {name: itertools.cycle(data[name]) for name in names}
    w, step, kept = np.float32(1), 0, {name: [[] for _ in range(epochs)] for name in names}
    for epoch in range(epochs):
        count = 0
        left = len(data[names[0]]) if limit is None else None
        for name in itertools.cycle([name for name, turn in zip(names, turns, strict=True) for _ in range(turn)]):
            if limit is not None and count == limit:
                break
            if name == names[0] and left is not None:
                if not left:
                    break
                left -= 1
            batch = next(streams[name])
            difference = w - batch
            step, count = step + 1, count + 1
            kept[name][epoch].append((step, WEIGHTS[name] * np.mean(difference**2)))
            w = w - rate(step - 1) * WEIGHTS[name] * 2 * np.mean(difference)
    return w, kept


MEMBERS = {"a": A(), "b": B(), "c": C()}


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize(
    ("names", "turns"), [("ab", (1, 1)), ("ab", (1, 5)), ("ab", (2, 1)), ("abc", (1, 2, 1)), ("cab", (1, 1, 3))]
)
def test_training_matches_hand_written_loop(names, turns, limit, steps_per_call):
    log = Log()
    phase = InTurn(*(MEMBERS[name] for name in names), steps=turns)
    learner = learner_of(Metrics(), Recorder(), log, data=source(*names), phases=[phase], steps_per_call=steps_per_call)
    history = learner.fit(3, steps_per_epoch=limit)
    w, kept = by_hand(names, turns, 3, limit=limit)
    assert float(learner.params["w"]) == pytest.approx(w, rel=1e-5)
    for name in names:
        expected = [np.mean([loss for _, loss in epoch]) for epoch in kept[name]]
        assert history[f"{name}/loss"] == pytest.approx(expected, rel=1e-5)
        per_step = [pair for epoch in kept[name] for pair in epoch]
        assert [step for step, _ in history.per_step[name]["loss"]] == [step for step, _ in per_step]
        assert [loss for _, loss in history.per_step[name]["loss"]] == pytest.approx(
            [loss for _, loss in per_step], rel=1e-5
        )
        assert learner.cbstate.history[name].steps == len(per_step)
        counts = [(now[-2], now[-1]) for event, phase, *now in log.lines if (event, phase) == ("EpochEnd", name)]
        assert counts == [(len(epoch), len(epoch)) for epoch in kept[name]]


def test_step_values_exceeding_device_buffer_of_metrics():
    data = {"a": batches(400, 4, 1), "b": batches(5, 2, 2)}
    learner = learner_of(Metrics(), data=data, phases=[InTurn(A(), B())], steps_per_call=4)
    history = learner.fit(1)
    _, kept = by_hand("ab", (1, 1), 1, data=data)
    for name in "ab":
        assert [step for step, _ in history.per_step[name]["loss"]] == [step for step, _ in kept[name][0]]
        assert [loss for _, loss in history.per_step[name]["loss"]] == pytest.approx(
            [loss for _, loss in kept[name][0]], rel=1e-4
        )


def test_metrics_of_some_phases():
    def size(w):
        return abs(w)

    class Sized(B):
        provides = {ForwardBegin: ("w",), BackwardBegin: ("loss",), BackwardEnd: ("grads",)}

        def step(self, learner, emit):
            learner.step.w = learner.params["w"]
            super().step(learner, emit)

    learner = learner_of(Metrics(Metric(size, needs=("w",), phase=Sized)), phases=[InTurn(A(), Sized()), Check()])
    history = learner.fit(2)
    assert list(history) == ["a/loss", "b/loss", "b/size", "validation/loss"]
    assert [len(history.per_step[name]) for name in "ab"] == [1, 2]


def test_running_sums_are_added_only_for_in_turn():
    def size(phases):
        learner = learner_of(Metrics(), data=source("a", "b", "c"), phases=phases)
        return learner.state["cbstate"]["metrics_now"]["float32"].size

    slot, ring = 5, 512
    assert size([A(), B(), C()]) == 2 * slot + ring
    assert size([InTurn(A(), B()), C()]) == 3 * slot + 2 * ring
    assert size([InTurn(A(), B(), C())]) == 4 * slot + 2 * ring


def test_two_groups_with_phase_between():
    class D(A):
        name = "d"

    class E(A):
        name, weight = "e", 0.5

    data = {**source("a", "b", "c"), "d": batches(2, 4, 5), "e": batches(3, 4, 6)}
    log = Log()
    phases = [InTurn(A(), B()), C(), InTurn(D(), E(), steps=(1, 2))]
    learner = learner_of(Metrics(), log, data=data, phases=phases)
    history = learner.fit(2)
    assert log.steps() == ("ab" * 3 + "cc" + "dee" * 2) * 2
    steps = {name: [s for s, _ in history.per_step[name]["loss"]] for name in "abcde"}
    assert steps == {name: [i + 1 for i, c in enumerate(log.steps()) if c == name] for name in "abcde"}
    assert {name: len(history[f"{name}/loss"]) for name in "abcde"} == dict.fromkeys("abcde", 2)


def test_schedule_counts_steps_of_all_phases():
    def rate(step):
        return 0.01 * (step + 1)

    learner = learner_of(Scheduler({LearningRate: rate}))
    learner.fit(2)
    assert float(learner.params["w"]) == pytest.approx(by_hand("ab", (1, 2), 2, rate=rate)[0], rel=1e-5)


def test_periods_count_steps_of_all_phases():
    seen = []

    def tell(name):
        def append(learner):
            seen.append((name, learner.progress.step))

        return CustomCallback(append, StepEnd, AbstractTrainingPhase, name=name)

    learner_of(every(tell("steps"), steps=5), every(tell("epochs"), epochs=2), phases=[InTurn(A(), B()), Check()]).fit(
        2
    )
    assert [step for name, step in seen if name == "steps"] == [5, 10]
    assert [step for name, step in seen if name == "epochs"] == list(range(7, 13))


@pytest.mark.parametrize(
    ("steps", "ran"), [(1, "a"), (2, "ab"), (4, "abba"), (9, "abbabbabb"), (10, "abbabbabb" + "a")]
)
def test_step_counters_include_all_phases(steps, ran):
    log = Log()
    learner = learner_of(log)
    learner.fit(steps=steps)
    assert (learner.step, log.steps()) == (steps, ran)


def test_data_of_first_phase_ends_epoch_within_turn():
    log = Log()
    learner_of(log, phases=[InTurn(A(), B(), steps=(2, 1))], data=source("a", "b")).fit(2)
    assert log.steps() == "aaba" * 2


def test_data_of_other_phases_continues():
    class Sums(A):
        """Set `w` to the number of batches and the last batch."""

        def step(self, learner, emit):
            learner.step.loss = 0.0 * learner.params["w"]
            seen = learner.params["seen"]
            at = learner.progress.step.astype(jnp.int32)
            learner.params = {**learner.params, "seen": seen.at[at].set(learner.step.batch)}

    class More(Sums):
        name = "b"

    Sums.provides = More.provides = {BackwardBegin: ("loss",)}
    learner = Learner.from_loss(
        {"w": jnp.float32(1), "seen": jnp.zeros(12)},
        None,
        optax.sgd(0.1),
        data={"a": [np.float32(i) for i in (1, 2, 3)], "b": [np.float32(i) for i in (10, 20, 30, 40)]},
        phases=[InTurn(Sums(), More())],
        default_callbacks=False,
    )
    learner.fit(2)
    assert learner.params["seen"].tolist() == [1, 10, 2, 20, 3, 30, 1, 40, 2, 10, 3, 20]


def test_windows_and_executors_do_not_change_bits():
    results = []
    for kwargs in (*({"steps_per_call": k} for k in (1, 2, 3, 8, "auto")), {"executor": ThreadExecutor(2)}):
        learner = learner_of(
            Metrics(),
            phases=[InTurn(A(), B(), steps=(2, 5)), Check()],
            data=source() | {"a": batches(7, 4, 1)},
            **kwargs,
        )
        learner.fit(2)
        results.append((learner.state, learner.history.to_dict()))
    for state, history in results[1:]:
        assert_same(results[0][0], state)
        assert results[0][1] == history


# -- ending ------------------------------------------------------------------------------------


def cancels(error, step, phase=AbstractTrainingPhase):
    def cancel(learner):
        if learner.progress.step == step:
            raise error("enough")

    return CustomCallback(cancel, StepEnd, phase, access={"control": Append()})


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize(("step", "counts"), [(1, (1, 0)), (2, (1, 1)), (4, (2, 2))])
@pytest.mark.parametrize("error", [CancelEpoch, CancelFitting])
def test_cancel_ends_epoch_of_all_phases(error, step, counts, steps_per_call):
    log = Log()
    learner = learner_of(log, cancels(error, step), steps_per_call=steps_per_call)
    learner.fit(1)
    ends = [(phase, at[-2]) for event, phase, *at in log.lines if event == "EpochEnd"]
    assert ends == [*zip("ab", counts, strict=True), *([("validation", 2)] if error is CancelEpoch else [])]
    assert learner.stop_reason == (None if error is CancelEpoch else "enough")


@pytest.mark.parametrize("event", [EpochBegin, EpochEnd])
@pytest.mark.parametrize("error", [CancelEpoch, CancelFitting])
def test_cancel_between_epochs(event, error):
    class Cancel(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on(event, A)
        def cancel(self, event, phase, learner):
            if phase.name == "a":
                raise error("enough")

    log = Log()
    learner = learner_of(log, Cancel())
    learner.fit(1)
    ends = [phase for name, phase, *_ in log.lines if name == "EpochEnd" and phase != "validation"]
    assert (log.steps(), ends) == (("", ["a"]) if event is EpochBegin else ("abb" * 3, ["a", "b"]))
    assert learner.stop_reason == (None if error is CancelEpoch else "enough")


def test_pause_within_turn_resumes(tmp_path):
    def make(folder, *callbacks):
        return learner_of(Metrics(), Checkpointer(folder), *callbacks)

    class Pause(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def pause(self, event: StepEnd, phase: B, learner):
            if learner.progress.step == 5:
                raise PauseFitting("later")

    whole, log = make(tmp_path / "whole"), Log()
    whole.fit(2)
    paused = make(tmp_path / "paused", log, Pause())
    paused.fit(2)
    assert (paused.step, paused.stop_reason) == (5, "later")
    assert [line[:2] for line in log.lines[-4:]] == [
        ("FitStopping", "a"),
        ("EpochEnd", "a"),
        ("EpochEnd", "b"),
        ("FitEnd", "a"),
    ]
    again = make(tmp_path / "again")
    again.restore(tmp_path / "paused", allow=("callbacks",))
    again.fit(2)
    assert_same(whole.state, again.state)
    assert whole.history.to_dict() == again.history.to_dict()


def test_early_stopping_watches_any_phase():
    learner = learner_of(Metrics(), EarlyStopping(1, metric="loss", phase="b"))
    history = learner.fit(100)
    assert learner.stop_reason is not None
    assert learner.stop_reason.startswith("b/loss: no improvement")
    assert len(history["b/loss"]) == learner.epoch


def test_printers_show_all_phases():
    bar, table = io.StringIO(), io.StringIO()
    learner = learner_of(Metrics(), ProgressBar(bar), MetricsPrinter(table))
    history = learner.fit(2)
    shown = [line.split(",")[0] for line in bar.getvalue().splitlines() if "steps/s" in line]
    assert shown == [f"epoch {e}/2 a: 3/3 steps" for e in (1, 2)]
    lines = table.getvalue().splitlines()
    assert lines[0].split() == ["epoch", "a", "loss", "b", "loss", "valid", "loss", "time"]
    rows = [line.split() for line in lines if line.split()[0] in ("1", "2")]
    values = zip(*(history[f"{name}/loss"] for name in ("a", "b", "validation")), strict=True)
    assert [row[1:4] for row in rows] == [[f"{value:.4f}" for value in row] for row in values]


# -- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "steps_per_call"),
    [({"epochs": 2}, 1), ({"epochs": 2}, 4), ({"steps": 13}, 4)],
)
def test_resumes_exactly_from_every_step(length, steps_per_call):
    def make():
        return learner_of(
            Metrics(),
            Recorder(),
            Scheduler({LearningRate: lambda step: 0.01 * (step + 1)}),
            optimizer=fluxcb.inject(optax.adam, learning_rate=0.1),
            steps_per_call=steps_per_call,
        )

    assert_resumes_exactly(make, **length)


def test_three_phases_and_following_phase_resume_exactly():
    class D(A):
        name = "d"

    def make():
        data = {**source("a", "b", "c"), "d": batches(2, 4, 5)}
        phases = [InTurn(C(), A(), B(), steps=(1, 1, 2)), D()]
        return learner_of(Metrics(), data=data, phases=phases)

    assert_resumes_exactly(make, epochs=2)


@pytest.mark.parametrize("at", [1, 2, 3, 6, 9, 11, 14])
@changes_arguments("callbacks.Checkpointer")
def test_restored_checkpoint_continues_by_steps_and_epochs(tmp_path, at):
    whole = learner_of(every(Checkpointer(tmp_path, keep_last=100), steps=1))
    whole.fit(2)
    for name, number in (("steps", 18 - at), ("epochs", 2 - (at - 1) // 9)):
        again = learner_of(every(Checkpointer(tmp_path / name), steps=100))
        again.restore(next(entry.path for entry in RunFolder(tmp_path).entries() if entry.step == at))
        again.fit(**{name: number})
        assert_same(whole.state, again.state)


@pytest.mark.parametrize("at", [1, 5, 7, 8, 12])
@changes_arguments("callbacks.Checkpointer")
def test_streams_resume_exactly(tmp_path, at):
    whole = learner_of(every(Checkpointer(tmp_path, keep_last=100), steps=1))
    whole.fit(steps=16, steps_per_epoch=7)
    again = learner_of(every(Checkpointer(tmp_path / "again"), steps=100))
    again.restore(next(entry.path for entry in RunFolder(tmp_path).entries() if entry.step == at))
    again.fit(steps=16 - at, steps_per_epoch=7)
    assert_same(whole.state, again.state)


def test_rewinding_keeps_positions_of_all_data(tmp_path):
    class Back(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def back(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
            if learner.progress.step == 5 and not went:
                went.append(phase.name)
                raise RewindFitting("astray", 3, 1)

    class Sums(A):
        """Add the batches to `w`."""

        provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}

        def step(self, learner, emit):
            def loss(params):
                learner.step.loss = -params["w"] * learner.step.batch
                emit(BackwardBegin())
                return learner.step.loss

            learner.step.grads = learner.grad(loss)
            emit(BackwardEnd())
            learner.apply_updates()

    class More(Sums):
        name = "b"

    went = []
    data = {"a": [np.float32(2**i) for i in range(5)], "b": [np.float32(2**i) for i in range(5, 10)]}
    learner = learner_of(
        Back(), Checkpointer(tmp_path, steps=1), data=data, phases=[InTurn(Sums(), More())], optimizer=optax.sgd(1.0)
    )
    with pytest.warns(ResumeWarning, match="goes back from step 5"):
        learner.fit(1)
    # Steps 4 and 5 used 2 ** 6 (b) and 2 ** 2 (a), which are not used again. The run goes back to a turn of b.
    assert went == ["a"]
    used = [2**0, 2**5, 2**1, 2**7, 2**3, 2**8, 2**4, 2**9]
    assert (learner.epoch, int(learner.params["w"])) == (1, 1 + sum(used))


# -- what is refused ---------------------------------------------------------------------------


class Twin(A):
    weight = 2.0


def test_two_phases_with_same_name_raise(refused):
    with refused(
        DeclarationError,
        "`phases` contains A() and Twin(), which have the same `name`, 'a'.\n"
        f"  where: {__name__}.Twin\n"
        "  why:   the name selects the data and the metrics of a phase, so the two would share them\n"
        '  fix:   give each class a name of its own: `name = "a_2"` in the body of `Twin`',
    ):
        learner_of(phases=[InTurn(A(), Twin())])


def test_phase_without_data_raises(refused):
    learner = learner_of(data={"a": batches(3, 4, 1)})
    with refused(
        DataError,
        'There is no data for B: `data.b` is not set.\n  fix:   pass `data={"b": batches}` to the Learner',
    ):
        learner.fit(1)
    learner_of(data={"a": batches(3, 4, 1), "b": batches(5, 2, 2)}).fit(1)


@pytest.mark.parametrize("steps", [(1,), (1, 2, 3), 5, "ab"])
def test_steps_with_wrong_length_raise(refused, steps):
    with refused(
        DeclarationError,
        f"`steps` of `InTurn` must have 2 numbers, one for each phase, not {steps!r}.\n"
        "  fix:   write e.g. `steps=(1, 5)`",
    ):
        InTurn(A(), B(), steps=steps)
    assert InTurn(A(), B(), steps=(1, 5)).steps == (1, 5)


def test_non_positive_steps_raise(refused):
    with refused(
        DeclarationError,
        "Each number in `steps` of `InTurn` must be a whole number of at least 1, not 0.\n"
        "  why:   periods and counts are whole numbers of steps or epochs\n"
        "  fix:   pass a positive int",
    ):
        InTurn(A(), B(), steps=(1, 0))


def test_non_training_phase_raises(refused):
    with refused(
        DeclarationError,
        "`InTurn` contains Check(), which does not train.\n"
        "  why:   phases that do not train run after the training phases of an epoch\n"
        "  fix:   move it out of `InTurn`: `phases=[InTurn(...), Check()]`",
    ):
        InTurn(A(), B(), Check())


def test_nested_in_turn_raises(refused):
    with refused(
        DeclarationError,
        "`InTurn` contains InTurn(B(), C(), steps=(1, 2)), and cannot be nested.\n"
        "  why:   each turn of an `InTurn` consists of steps of one phase\n"
        "  fix:   list all phases in one `InTurn`, e.g. `InTurn(A(), B(), C())`",
    ):
        InTurn(A(), InTurn(B(), C(), steps=(1, 2)))  # pyright: ignore[reportArgumentType]
    assert InTurn(A(), B(), C()).steps == (1, 1, 1)


def test_invalid_phase_raises(refused):
    with refused(DeclarationError, f"`InTurn` contains {A!r}, which is not a phase instance.\n  fix:   write `A()`"):
        InTurn(A, B)  # pyright: ignore[reportArgumentType]


def test_single_phase_raises(refused):
    with refused(
        DeclarationError,
        "`InTurn` takes at least two phases, not 1.\n  fix:   write `phases=[A()]`, without `InTurn`",
    ):
        InTurn(A())
    learner_of(phases=[A()], data=source("a")).fit(1)


def test_run_epoch_with_in_turn_raises(refused):
    learner = learner_of()
    with refused(
        DeclarationError,
        "InTurn(A(), B(), steps=(1, 2)) is not a phase instance.\n  fix:   pass an instance, e.g. `A()`",
    ):
        learner.run_epoch(InTurn(A(), B(), steps=(1, 2)))  # pyright: ignore[reportArgumentType]
    assert learner.run_epoch(A()) == 3


def test_check_accepts_in_turn():
    graph = fluxcb.check([Metrics()], phases=[InTurn(A(), B()), Check()])
    assert graph.phases == (A, B, Check)
