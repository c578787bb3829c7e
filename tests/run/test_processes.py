"""Two processes on one machine train together: `chief_only`, and their agreement on cancels, errors and signals."""

import json

import pytest

import fluxcb
from fluxcb import Append, Callback, Read, Write, every, on
from fluxcb.callbacks import MetricsPrinter, ModelSummary, ProgressBar, Recorder
from fluxcb.events import BackwardEnd, EpochEnd, FitBegin, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner
from tests.run_processes import run_processes

PROGRAM = """
import faulthandler, json, os, signal, sys, time
faulthandler.dump_traceback_later(200, exit=True)  # a process that waits for the other in vain says where
import jax
number, port = int(sys.argv[1]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb import Append, Callback, CancelEpoch, CancelFitting, Read, every, on
from fluxcb.callbacks import ToDevice
from fluxcb.events import EpochBegin, EpochEnd, FitBegin, StepEnd, Trigger
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
drawn = np.random.default_rng(0).uniform(-1.5, 1.5, (20, 8, 1)).astype(np.float32)
told = {}  # of the case at hand

class Slow:
    # Process 0 takes far longer for a batch, so whatever hangs on time would differ.
    def __iter__(self):
        for xs in drawn:
            time.sleep(0.004 * (1 - number))
            yield xs, 3 * xs - 1

    def __len__(self):
        return len(drawn)

class Chief(Callback):
    chief_only = True

    def stateaccess(self):
        return {"control": Append()}

    def _note(self, learner):
        told.setdefault("ran", []).append(learner.progress.step)

class CancelsAtStep(Chief):
    @on
    def stop(self, event: StepEnd, phase: TrainingPhase, learner):
        self._note(learner)
        if learner.progress.step == 13:
            raise CancelFitting("process 0 has seen enough")

class CancelsEpoch(Chief):
    @on
    def stop(self, event: StepEnd, phase: TrainingPhase, learner):
        self._note(learner)
        if learner.progress.step == 13:
            raise CancelEpoch

class CancelsAtEpochEnd(Chief):
    @on(EpochEnd, TrainingPhase)
    def stop(self, event, phase, learner):
        self._note(learner)
        raise CancelFitting("one epoch will do")

class CancelsAtTrigger(Chief):
    @on(Trigger, TrainingPhase)
    def stop(self, event, phase, learner):
        self._note(learner)
        if learner.progress.step >= 14:
            raise CancelFitting("triggered")

class Fails(Chief):
    @on(EpochEnd, TrainingPhase)
    def fail(self, event, phase, learner):
        raise OSError("no disk")

class Presses(Callback):
    @on
    def press(self, event: StepEnd, phase: TrainingPhase, learner):
        if number == 0 and learner.progress.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

class Ticks(Callback):
    def __init__(self):
        self.steps = []

    def stateaccess(self):
        return {"params": Read(borrow=True)}  # every process has to take part

    @on
    def tick(self, event: StepEnd, phase: TrainingPhase, learner):
        self.steps.append(learner.progress.step)

class Reads(Callback):
    chief_only = True

    def stateaccess(self):
        return {"params": {"w": Read()}}

    @on(EpochEnd, TrainingPhase)
    def read(self, event, phase, learner):
        told["read"] = np.asarray(learner.params.w).tolist()

class ReadsAll(Reads):
    def stateaccess(self):
        return {"*": Read()}

def spread(placement, reader):
    fluxcb.Learner.from_loss(
        {"w": jnp.zeros(2)}, lambda params, batch, key: jnp.sum(params["w"] ** 2) + jnp.mean(batch), optax.sgd(0.1),
        data=[np.ones(2, np.float32)], callbacks=[ToDevice(placement), reader], default_callbacks=False,
    ).fit(1)

def toy(*callbacks, executor=None):
    return fluxcb.Learner(
        (lambda key, xs: {"w": jnp.zeros(()), "b": jnp.zeros(())}, lambda params, xs: params["w"] * xs + params["b"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=Slow(),
        callbacks=[ToDevice(whole, batches=split), *callbacks],
        executor=executor,
    )

def spread_over_processes():
    for reader in (Reads(), ReadsAll()):
        try:
            spread(split, reader)
        except fluxcb.DeclarationError as error:
            told.setdefault("refused", []).append(str(error))
    spread(whole, Reads())

def run(*callbacks, executor=None):
    learner = toy(*callbacks, executor=executor)
    try:
        learner.fit(3)
    except BaseException as error:
        told["raised"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    told["step"], told["epoch"], told["reason"] = learner.step, learner.epoch, learner.stop_reason
    told["params"] = {name: np.asarray(x).tobytes().hex() for name, x in learner.params.items()}

def clocked():
    ticks = Ticks()
    run(every(ticks, seconds=0.05))
    told["ticks"] = ticks.steps

cases = {
    "step": lambda: run(CancelsAtStep()),
    "epoch": lambda: run(CancelsEpoch()),
    "every 13": lambda: run(every(CancelsAtStep(), steps=13)),
    "epoch end": lambda: run(CancelsAtEpochEnd()),
    "trigger": lambda: run(every(CancelsAtTrigger(), steps=7)),
    "threads": lambda: run(CancelsAtStep(), EventLog(), EventLog(), executor=fluxcb.ThreadExecutor(2)),
    "fails": lambda: run(Fails()),
    "Ctrl-C": lambda: run(Presses()),
    "seconds": clocked,
    "plain": run,
    "spread": spread_over_processes,
}
everything = {}
for case, do in cases.items():
    print(f"== {case}", flush=True)
    told = {}
    do()
    everything[case] = told
with open(f"told{number}.json", "w") as file:
    json.dump(everything, file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the reports and output of two processes for each case; one pair of processes runs all cases."""
    folder = tmp_path_factory.mktemp("processes")
    ended = run_processes(PROGRAM, 2, cwd=folder, warnings_are_errors=True)
    for process in ended:
        assert process.code == 0, process.stderr[-3000:]
    told = [json.loads((folder / f"told{number}.json").read_text()) for number in (0, 1)]
    printed = [dict(part.split("\n", 1) for part in stdout.split("== ")[1:]) for _, stdout, _ in ended]
    return {case: ([t[case] for t in told], [p[case] for p in printed]) for case in told[0]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "step", "epoch", "reason"),
    [
        ("step", 13, 1, "process 0 has seen enough"),
        ("epoch", 53, 3, None),  # 13 of the first epoch's 20, and two whole ones
        ("every 13", 13, 1, "process 0 has seen enough"),
        ("epoch end", 20, 1, "one epoch will do"),
        ("trigger", 14, 1, "triggered"),
        ("threads", 13, 1, "process 0 has seen enough"),
    ],
)
def test_cancel_in_process_0_ends_all_processes_at_same_step(case, step, epoch, reason, trained):
    (chief, other), _ = trained[case]
    assert (chief["step"], chief["epoch"], chief["reason"]) == (step, epoch, reason)
    assert {**chief, "ran": None} == {**other, "ran": None}
    assert "ran" in chief
    assert "ran" not in other


@pytest.mark.long
def test_error_in_process_0_is_raised_in_other_process(trained):
    (chief, other), _ = trained["fails"]
    assert chief["raised"] == "OSError: no disk"
    assert other["raised"] == "PeerError: Process 0 failed: OSError: no disk"
    assert chief["step"] == other["step"] == 20


@pytest.mark.long
def test_ctrl_c_in_one_process_ends_both_at_same_step(trained):
    told, _ = trained["Ctrl-C"]
    assert [(t["raised"], t["reason"]) for t in told] == [("KeyboardInterrupt: ", "KeyboardInterrupt")] * 2
    first, second = (t["step"] for t in told)
    assert 5 <= first == second <= 20


@pytest.mark.long
def test_process_0_controls_clock_and_console(trained):
    (chief, other), (printed, nothing) = trained["seconds"]
    assert chief == other
    assert 1 < len(chief["ticks"]) < 60
    assert "Training finished after epoch 3, step 60" in printed  # the default callbacks print
    assert [line for line in nothing.splitlines() if not line.startswith("[Gloo]")] == []


@pytest.mark.long
def test_two_processes_match_single_process(trained):
    (chief, other), _ = trained["plain"]
    assert chief == other
    assert (chief["step"], chief["reason"]) == (60, None)
    import numpy as np

    # Gradient descent by the formula: w and b move against the gradient of the mean of (w x + b - 3 x + 1)^2.
    w = b = 0.0
    drawn = np.random.default_rng(0).uniform(-1.5, 1.5, (20, 8, 1)).astype(np.float32)
    for xs in [*drawn] * 3:
        residual = w * xs + b - (3 * xs - 1)
        w, b = w - 0.1 * float(np.mean(2 * residual * xs)), b - 0.1 * float(np.mean(2 * residual))
    found = {name: float(np.frombuffer(bytes.fromhex(x), np.float32)[0]) for name, x in chief["params"].items()}
    assert found == pytest.approx({"w": w, "b": b}, abs=1e-5)


@pytest.mark.long
def test_reading_distributed_arrays_raises_in_each_process(trained):
    (chief, other), _ = trained["spread"]
    first, second = chief["refused"]
    assert chief["refused"] == other["refused"]
    lines = first.splitlines()
    assert lines[0] == (
        "Reads() is `chief_only`, and reads `params.w`, whose arrays are spread over several processes."
    )
    assert lines[1].startswith("  where: Reads.read  ")
    assert lines[2:] == [
        "  why:   all processes have to take part in assembling such an array",
        "  fix:   remove `chief_only = True`",
        "     or: compute what it needs in a traced handler",
    ]
    assert second.startswith("ReadsAll() is `chief_only`, and reads `params`, whose arrays are spread")
    assert chief["read"] == [0.0, 0.0]  # what each process has whole may be read
    assert "read" not in other


# --- what is refused when a Learner is built ------------------------------------------------------------------------


class Traced(Callback):
    chief_only = True

    def stateaccess(self):
        return {"step": {"grads": Read()}}

    @on  # traced
    def look(self, event: BackwardEnd, phase: TrainingPhase, learner):
        pass


class Sets(Callback):
    chief_only = True

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on(StepEnd, TrainingPhase)  # sets
    def lower(self, event, phase, learner):
        pass


class Marks(Callback):
    chief_only = True

    def stateaccess(self):
        return {"cbstate": {"mark": Write()}}

    def init(self, learner):
        learner.cbstate.mark = 0

    @on(EpochEnd, TrainingPhase)  # marks
    def mark(self, event, phase, learner):
        pass


class LooksAtMark(Callback):
    def stateaccess(self):  # looks
        return {"cbstate": {"mark": Read()}}

    @on(StepEnd, TrainingPhase)
    def look(self, event, phase, learner):
        pass


def test_chief_only_traced_handler_raises(refused):
    with refused(
        fluxcb.DeclarationError,
        "Traced() is `chief_only`, and its handler `look` of (BackwardEnd, TrainingPhase) is traced into the step.\n"
        "  where: Traced.look  <@traced>\n"
        "  why:   all processes must compile the same step, so a traced handler runs on each of them\n"
        "  fix:   move the traced handler into a separate callback that is not `chief_only`\n"
        "     or: remove `chief_only = True`, and test `jax.process_index() == 0` in the host handlers",
    ):
        fluxcb.check([Traced()])


def test_chief_only_write_of_training_state_raises(refused):
    with refused(
        fluxcb.DeclarationError,
        "Sets() at EverySteps(steps=2) is `chief_only`, and its handler `lower` may write "
        "`hyperparams.learning_rate`.\n"
        "  where: Sets.lower  <@sets>\n"
        "  why:   process 0 would train with a different state than the other processes\n"
        "  fix:   remove `chief_only = True`\n"
        "     or: declare `Read()` if the handler only reads it",
    ):
        testlearner(every(Sets(), steps=2))


def test_chief_only_write_of_shared_state_raises(refused):
    with refused(
        fluxcb.DeclarationError,
        "Marks() is `chief_only`, and may write `cbstate.mark`, which LooksAtMark() reads on every process.\n"
        "  where: Marks.mark  <@marks>\n"
        "         LooksAtMark.stateaccess  <@looks>\n"
        "  why:   the other processes would never receive the value that process 0 writes, so their states would "
        "differ\n"
        "  fix:   remove `chief_only = True` from Marks\n"
        "     or: also make LooksAtMark `chief_only`",
    ):
        fluxcb.check([Marks(), LooksAtMark()])


def test_chief_only_write_with_chief_only_reader_is_accepted():
    class Looks(LooksAtMark):
        chief_only = True

    learner = testlearner(Marks(), Looks())
    learner.fit(1)
    assert learner.cbstate["mark"] == 0


def test_single_process_runs_chief_only_callbacks():
    seen = []

    class Chief(Callback):
        chief_only = True

        def stateaccess(self):
            return {"control": Append(), "params": Read()}

        @on
        def look(self, event: FitBegin, phase: TrainingPhase, learner):
            seen.append(float(learner.params["w"]))

    testlearner(Chief()).fit(1)
    assert seen == [0.0]


def test_wrappers_forward_chief_only():
    assert every(ProgressBar(), steps=2).chief_only
    assert not every(Recorder(), steps=2).chief_only
    assert [cls.chief_only for cls in (ProgressBar, MetricsPrinter, ModelSummary, Recorder)] == [True] * 3 + [False]
