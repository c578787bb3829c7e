"""What differs on an accelerator, on a simulated platform, and the dispatch of long steps ahead."""

import gzip
import json
import signal
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fluxcb import Append, Callback, CancelFitting, Read, Write, on
from fluxcb._compile import fetch
from fluxcb._compile.arrays import process_nbytes_of
from fluxcb._run import program_runner, programs, window, window_trial
from fluxcb._run.step_loop import StepLoop
from fluxcb._run.train_state import TrainState
from fluxcb.callbacks import Checkpointer, StopOnNaNLoss
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


@pytest.fixture
def gpu(monkeypatch):
    """Let the engine take the devices of the train state for GPUs."""
    monkeypatch.setattr(TrainState, "platform", property(lambda self: "gpu"))


def runner_of(learner):
    return learner._core.engine.step_loop(TrainingPhase()).runner


# -- profiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps_per_call", "expected"),
    [
        (1, [("training", {"step_num": str(number)}) for number in range(6, 11)]),
        (
            2,
            [
                ("training", {"step_num": "6", "steps": "2"}),
                ("training", {"step_num": "8", "steps": "2"}),
                ("training", {"step_num": "10"}),
            ],
        ),
    ],
)
def test_profile_contains_numbered_steps(tmp_path, steps_per_call, expected):
    learner = testlearner(batches=5, validation_batches=0, steps_per_call=steps_per_call)
    learner.fit(1)
    with jax.profiler.trace(tmp_path):
        learner.fit(1)
    (path,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [(e["name"], e["args"]) for e in events if "step_num" in e.get("args", {})]
    assert steps == expected


# -- steps ahead ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "devices", "calls"), [("cpu", 1, 32), ("cpu", 8, 8), ("gpu", 1, 32), ("gpu", 8, 32), ("tpu", 8, 32)]
)
def test_calls_ahead_by_platform(monkeypatch, platform, devices, calls):
    learner = testlearner(steps_per_call=1)
    learner.fit(1)
    monkeypatch.setattr(TrainState, "platform", property(lambda self: platform))
    array = SimpleNamespace(devices=lambda: set(range(devices)))
    monkeypatch.setattr(TrainState, "some_array", property(lambda self: array))
    assert runner_of(learner).max_length(idle=True) == calls


class Told(Callback):
    """Note each step's end, with the hyperparameter and the loss of the step."""

    def __init__(self, log, action=None, access=None):
        self.log, self.action, self.access = log, action, access or {}

    def stateaccess(self):
        return {"step": {"loss": Read()}, **self.access}

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.log.append(("end", learner.progress.step, float(learner.step.loss)))
        if self.action is not None:
            self.action(learner)


class Pulls:
    """A source that notes when each of its batches is pulled."""

    fresh_batches = True

    def __init__(self, log, batches):
        self.log, self.batches = log, batches

    def __iter__(self):
        for number, batch in enumerate(self.batches, 1):
            self.log.append(("pull", number))
            yield batch


@pytest.fixture
def long_steps(monkeypatch):
    """Let each step be recorded as one of 0.2 s, and return the log of what happens."""
    log, dispatch, record = [], StepLoop._dispatch, program_runner.ProgramRunner.record_duration

    def noted(self, window, ahead, stream, **how):
        log.append(("dispatch", [self._number() + ahead + 1 + i for i in range(window.length)]))
        dispatch(self, window, ahead, stream, **how)

    monkeypatch.setattr(StepLoop, "_dispatch", noted)
    monkeypatch.setattr(
        program_runner.ProgramRunner,
        "record_duration",
        lambda self, window, _: record(self, window, 0.2 * window.length),
    )
    monkeypatch.setattr(program_runner, "WINDOW_SECONDS", 0.1)
    return log


def batches_of(count):
    xs = np.random.default_rng(0).normal(size=(count, 8, 1)).astype(np.float32)
    return [(x, 3 * x - 1) for x in xs]


def long_fit(log, *callbacks, count=5, epochs=1, **access):
    learner = testlearner(*callbacks, data=Pulls(log, batches_of(count)), validation_batches=0)
    learner.fit(epochs)
    return learner


def test_long_steps_are_dispatched_one_ahead_with_prefetched_batch(long_steps):
    long_fit(long_steps, Told(long_steps))
    what = [entry[:2] for entry in long_steps[long_steps.index(("pull", 2)) - 1 :]]
    assert what == [
        ("dispatch", [1]),
        ("pull", 2),
        ("end", 1),  # the first step is measured
        ("dispatch", [2]),
        ("pull", 3),
        ("dispatch", [3]),
        ("end", 2),
        ("pull", 4),
        ("dispatch", [4]),
        ("end", 3),
        ("pull", 5),
        ("dispatch", [5]),
        ("end", 4),
        ("end", 5),
    ]


def test_handlers_of_long_steps_see_their_own_step(long_steps, monkeypatch):
    learner = long_fit(long_steps, Told(long_steps), count=7)
    told = [entry[1:] for entry in long_steps if entry[0] == "end"]
    reference, expected = testlearner(data=batches_of(7), validation_batches=0), []
    for number, batch in enumerate(batches_of(7), 1):
        loss = reference.run_step(TrainingPhase(), batch)["loss"]
        expected.append((number, float(loss)))
    # On an accelerator, a program that returns other values may have other last bits.
    np.testing.assert_allclose(told, expected, rtol=1e-6)
    for name, value in learner.params.items():
        np.testing.assert_allclose(value, reference.params[name], rtol=1e-6)


def test_handler_that_cancels_keeps_long_steps_from_running_ahead(long_steps):
    def cancel(learner):
        if learner.progress.step == 3:
            raise CancelFitting("enough")

    learner = long_fit(long_steps, Told(long_steps, cancel, {"control": Append()}))
    assert [entry[1] for entry in long_steps if entry[0] == "dispatch"] == [[1], [2], [3]]
    assert learner.step == 3


def test_stop_returns_batches_of_long_steps_ahead(long_steps):
    first = batches_of(6)
    first[2] = (np.full((8, 1), np.nan, np.float32), first[2][1])
    stream = iter(Pulls(long_steps, first))
    learner = testlearner(StopOnNaNLoss(), Told(long_steps), data=stream, validation_batches=0)
    with pytest.warns(RuntimeWarning, match="the loss was nan at step 3"):
        learner.fit(1, steps_per_epoch=6)
    assert [entry[1] for entry in long_steps if entry[0] == "dispatch"] == [[1], [2], [3], [4]]
    assert [entry[1] for entry in long_steps if entry[0] == "pull"] == [1, 2, 3, 4]
    assert learner.step == 3
    # The step that was dispatched ahead has not run, so its batch comes next.
    del long_steps[:]
    learner.fit(steps=1, steps_per_epoch=6)
    told = list(long_steps)
    reference = testlearner(data=batches_of(6), validation_batches=0)
    for number in (0, 1, 3):
        loss = reference.run_step(TrainingPhase(), first[number])["loss"]
    assert told == [("dispatch", [4]), ("end", 4, float(loss))]


def test_failed_handler_of_long_step_counts_step_ahead(long_steps):
    def fail(learner):
        if learner.progress.step == 3:
            raise ValueError("wrong")

    learner = testlearner(Told(long_steps, fail), data=batches_of(6), validation_batches=0)
    with pytest.raises(ValueError, match="wrong") as raised:
        learner.fit(1)
    assert "the device runs ahead of host handlers: the train state is that after step 4" in raised.value.__notes__
    assert learner.step == int(learner.state["counters"][0]) == 4


def test_ctrl_c_takes_effect_after_one_more_long_step(long_steps):
    def press(learner):
        if learner.progress.step == 3:
            signal.raise_signal(signal.SIGINT)

    learner = testlearner(Told(long_steps, press), data=batches_of(9), validation_batches=0)
    with pytest.raises(KeyboardInterrupt):
        learner.fit(1)
    # Step 4 was dispatched before the handlers of step 3 ran.
    assert [entry[1] for entry in long_steps if entry[0] == "end"] == [1, 2, 3, 4]
    assert learner.step == int(learner.state["counters"][0]) == 4


# -- transfers -------------------------------------------------------------------------------------


@pytest.fixture
def joined(monkeypatch):
    """Let programs pass for those of an accelerator, and return the numbers of rows that are moved together."""
    compiled, join, counts = programs.compile_program, window.join_rows, []
    monkeypatch.setattr(programs, "compile_program", lambda *of, **how: replace(compiled(*of, **how), on_host=False))
    monkeypatch.setattr(window, "join_rows", lambda rows: counts.append(len(rows)) or join(rows))
    return counts


class KeepsOutputs(Told):
    def stateaccess(self):
        return {"step": {"loss": Read(), "outputs": Read()}}

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.log.append(np.asarray(learner.step.outputs).tobytes())


@pytest.mark.parametrize("bad", [None, 0, 20, 32, 69])
def test_rows_of_single_steps_are_moved_together(joined, bad):
    batches = batches_of(70)
    if bad is not None:
        batches[bad][1][:] = np.nan

    def told():
        log = []
        callbacks = KeepsOutputs(log), StopOnNaNLoss()
        learner = testlearner(*callbacks, data=batches, validation_batches=0, steps_per_call=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of the NaN
            learner.fit(1)
        assert learner.step == (70 if bad is None else bad + 1)
        return (
            str(log),
            learner.stop_reason,
            {name: np.asarray(value).tobytes() for name, value in learner.params.items()},
        )

    before = fetch._stacked._cache_size()
    found = told()
    # The first window has one step, the next ones 32.
    assert joined == [32, 32, 5] if bad is None else set(joined) <= {32, 5}
    assert fetch._stacked._cache_size() - before <= 1  # one program joins the rows of windows of all lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window.Window, "start_transfers", lambda self: None)  # as on CPU
        assert told() == found


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "shard", "expected"),
    [
        ([0, 0, 0, 0], (8, 3), 4 * 8 * 3 * 4),  # all shards are here
        ([0, 0, 1, 1], (8, 3), 2 * 8 * 3 * 4),
        ([0, 1, 1, 1], (8, 3), 3 * 8 * 3 * 4),  # the same on both processes
        ([0, 0], (32, 3), 2 * 32 * 3 * 4),  # replicated
    ],
)
def test_sharded_batch_counts_with_shards_of_one_process(processes, shard, expected):
    devices = [SimpleNamespace(process_index=process) for process in processes]
    sharding = SimpleNamespace(device_set=devices, shard_shape=lambda shape: shard)
    array = SimpleNamespace(shape=(32, 3), dtype=np.dtype(np.float32), sharding=sharding)
    assert process_nbytes_of([array, np.zeros(5, np.float32)]) == expected + 20


def test_window_bytes_limit_bytes_of_process(monkeypatch):
    monkeypatch.setattr(program_runner, "process_nbytes_of", lambda batch: 100)
    learner = testlearner(validation_batches=0, window_bytes=1000)
    learner.fit(1)
    # A step fetches 8 bytes: its flags.
    assert runner_of(learner).max_length(idle=True) == 1000 // 108


# -- the choice between windows and single steps ----------------------------------------------------


@pytest.fixture
def trial(monkeypatch, gpu):
    """`trial(singles, windows)` sets the duration of both in a trial, and returns the list of trials."""
    single, window = window_trial._seconds_of_single_steps, window_trial._seconds_of_window
    faster = program_runner.faster_kind
    trials, seconds = [], {}

    def record(self, window, seconds):
        self.call_seconds, self.step_seconds = 1e9, 1e-6

    def noted(train, one, several, batches, stacker):
        trials.append(len(batches))
        return faster(train, one, several, batches, stacker)

    monkeypatch.setattr(program_runner.ProgramRunner, "record_duration", record)  # windows pay off immediately
    monkeypatch.setattr(program_runner, "faster_kind", noted)
    monkeypatch.setattr(
        window_trial, "_seconds_of_single_steps", lambda *given: [single(*given), seconds["singles"]][1]
    )
    monkeypatch.setattr(
        window_trial,
        "_seconds_of_window",
        lambda *given: seconds["windows"] if window(*given) is not None else None,
    )

    def set_seconds(singles, windows):
        seconds.update(singles=singles, windows=windows)
        return trials

    return set_seconds


def fit(*callbacks, epochs=2, **options):
    learner = testlearner(*callbacks, data=batches_of(40), validation_batches=0, **options)
    learner.fit(epochs)
    return learner


def same_bits(one, other):
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), one.params, other.params)
    return all(jax.tree.leaves(same))


def program_line(learner):
    return learner.explain_windows().splitlines()[1].strip()


def test_faster_windows_are_chosen_once(trial):
    trials = trial(singles=2.0, windows=1.0)
    learner = fit()
    assert trials == [32]
    assert learner._core.program_kinds() == {"training": "loop, measured"}
    assert runner_of(learner).window_program is not None
    assert program_line(learner) == "program   loop: measured to be faster than single steps on this platform"


@pytest.mark.parametrize("windows", [3.0, 1.95], ids=["slower", "hardly faster"])
def test_slower_windows_are_never_used(trial, windows):
    trials = trial(singles=2.0, windows=windows)
    learner = fit()
    assert trials == [32]
    assert learner._core.program_kinds() == {"training": "straight, measured"}
    assert runner_of(learner).window_program is None
    assert program_line(learner) == "program   straight: measured to be faster than windows on this platform"
    # The trial leaves no trace in the training.
    assert same_bits(learner, fit(steps_per_call=1))
    assert learner.step == 80


def test_steps_before_the_choice_run_one_by_one(trial):
    trial(singles=2.0, windows=1.0)
    learner = fit()
    calls = runner_of(learner).calls
    # One single step is measured, the trial window of 32 steps follows; then the last 7 and the next epoch.
    assert calls < 10
    reference = fit(steps_per_call=40)
    np.testing.assert_allclose(learner.params["w"], reference.params["w"], rtol=1e-6)


def test_trial_of_stopped_steps_is_repeated(trial):
    class Stops(Callback):
        """Stop the steps 10 and 15."""

        def stateaccess(self):
            return {"step": {"stop": Write()}}

        @on
        def stop(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.stop = (learner.progress.step == 10) | (learner.progress.step == 15)

    trials = trial(singles=2.0, windows=1.0)
    learner = fit(Stops(), epochs=1)
    assert learner.step == 40
    assert len(trials) > 1
    assert learner._core.program_kinds() == {"training": "loop, measured"}


def test_trials_that_always_stop_choose_single_steps(trial, monkeypatch):
    trials = trial(singles=2.0, windows=1.0)
    monkeypatch.setattr(window_trial, "_seconds_of_window", lambda *_: None)  # as if the steps were stopped
    learner = fit(epochs=4)
    assert len(trials) == program_runner._MAX_TRIALS
    assert learner._core.program_kinds() == {"training": "straight, measured"}


def test_resumed_run_uses_the_choice_of_its_checkpoint(trial, tmp_path):
    trials = trial(singles=2.0, windows=1.0)
    first = fit(Checkpointer(tmp_path))
    trial(singles=1.0, windows=2.0)  # on a machine that would choose single steps
    resumed = testlearner(Checkpointer(tmp_path), data=batches_of(40), validation_batches=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.fit(4, resume=True)
    assert len(trials) == 1
    assert resumed._core.program_kinds() == {"training": "loop, measured"}
    first.fit(2)
    assert same_bits(resumed, first)


def test_run_resumed_before_the_choice_measures(trial, tmp_path, monkeypatch):
    trials = trial(singles=2.0, windows=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(program_runner.ProgramRunner, "_windows_pay_off", lambda self, batch: False)
        fit(Checkpointer(tmp_path))
    assert not trials
    resumed = testlearner(Checkpointer(tmp_path), data=batches_of(40), validation_batches=0)
    resumed.fit(4, resume=True)
    assert trials == [32]


def test_trial_that_fails_chooses_single_steps(trial, monkeypatch):
    trial(singles=2.0, windows=1.0)

    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(window_trial, "_seconds_of_window", fails)
    learner = fit()
    assert learner._core.program_kinds() == {"training": "straight, measured"}
    assert same_bits(learner, fit(steps_per_call=1))


class Tells(Callback):
    """Have a side effect in each step."""

    def __init__(self):
        self.steps = []

    @on
    def tell(self, event: BackwardEnd, phase: TrainingPhase, learner):
        jax.debug.callback(lambda step: self.steps.append(int(step)), learner.progress.step)


@pytest.mark.parametrize(
    ("callbacks", "options", "why"),
    [
        ([Tells()], {}, "windows are not measured, because the step has side effects"),
        ([], {"window_bytes": 20}, "windows are not measured, because the train state is larger than `window_bytes`"),
    ],
)
def test_windows_that_cannot_be_measured_are_not_used(trial, callbacks, options, why):
    trials = trial(singles=2.0, windows=1.0)
    learner = fit(*callbacks, **options)
    assert not trials
    assert learner._core.program_kinds() == {"training": "straight"}
    assert program_line(learner) == f"program   straight: {why}; ask for them by `steps_per_call=`"
    for callback in callbacks:
        jax.effects_barrier()
        assert sorted(callback.steps) == list(range(80))


def test_several_processes_do_not_measure(gpu, monkeypatch):
    learner = testlearner(validation_batches=0)
    programs, step = learner._core.engine.programs, learner._core.traced(TrainingPhase())
    assert step is not None
    assert programs.awaits_choice(step, "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not programs.awaits_choice(step, "gpu")
    assert program_line(learner) == (
        "program   straight: with several processes, windows are not measured; ask for them by `steps_per_call=`"
    )


def test_number_of_steps_is_not_measured(trial):
    trials = trial(singles=1.0, windows=2.0)
    assert fit(steps_per_call=5)._core.program_kinds() == {"training": "loop"}
    assert fit(steps_per_call=1)._core.program_kinds() == {"training": "straight"}
    assert not trials
