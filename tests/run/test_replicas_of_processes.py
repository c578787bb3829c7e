"""Two processes on one machine train with equal replicas, whatever their host handlers write."""

import json

import numpy as np
import pytest

from tests.run_processes import run_processes

PROGRAM = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(100, exit=True)  # a process that waits for the other in vain says where
import jax
number, port = int(sys.argv[1]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb import Append, Callback, CancelFitting, Read, Write, every, on, when
from fluxcb.callbacks import (
    CheckReplicas, HumanHyperParamSetter, InferenceRunner, LogMetrics, Metrics, Monitors, PredictionWriter, ToDevice
)
from fluxcb.data import place
from fluxcb.logging import ConsoleBackend, CSVBackend, JSONLinesBackend, TensorBoardBackend
from fluxcb.events import EpochEnd, FitBegin, StepEnd, UpdateEnd
from fluxcb.phases import TrainingPhase

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
drawn = np.random.default_rng(0).uniform(-1.5, 1.5, (4, 8, 1)).astype(np.float32)

class SetsRate(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on(EpochEnd, TrainingPhase)
    def set(self, event, phase, learner):
        learner.hyperparams.learning_rate = 0.01 * (1 + number)

class SetsRateInOne(Callback):
    # Only process 1 writes, and every step is a window of its own.
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on(StepEnd, TrainingPhase)
    def set(self, event, phase, learner):
        if number == 1:
            learner.hyperparams.learning_rate = 0.5

class SetsParams(Callback):
    def stateaccess(self):
        return {"params": {"w": Write()}, "control": Append()}

    @on(StepEnd, TrainingPhase)
    def set(self, event, phase, learner):
        if number == 0:
            learner.params.w = -0.0
        if learner.progress.step == 6 and number == 0:
            learner.params.w = 7.0
            raise CancelFitting("enough")

class Counts(Callback):
    def stateaccess(self):
        return {"cbstate": {"count": Write()}}

    def init(self, learner):
        learner.cbstate.count = jnp.zeros((), jnp.int32)

    @on(UpdateEnd, TrainingPhase)
    def count(self, event, phase, learner):
        learner.cbstate.count = learner.cbstate.count + 1

    @on(EpochEnd, TrainingPhase)
    def set(self, event, phase, learner):
        learner.cbstate.count = learner.cbstate.count + 10 * (1 + number)

class Fails(SetsRate):
    @on(EpochEnd, TrainingPhase)
    def set(self, event, phase, learner):
        if number == 1:
            raise OSError("no disk")
        learner.hyperparams.learning_rate = 0.5

def learner_of(*callbacks, **kwargs):
    return fluxcb.Learner(
        (lambda key, xs: {"w": jnp.zeros(()), "b": jnp.zeros(())}, lambda params, xs: params["w"] * xs + params["b"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        fluxcb.inject(optax.adam, learning_rate=0.1),
        data=[(xs, 3 * xs - 1) for xs in drawn],
        callbacks=[ToDevice(whole, batches=split), *callbacks],
        default_callbacks=False,
        **kwargs,
    )

def run(*callbacks, **kwargs):
    learner = learner_of(*callbacks, **kwargs)
    told = {}
    try:
        learner.fit(3)
    except Exception as error:
        told["raised"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    told["step"] = learner.step
    told["rate"] = float(learner.hyperparams["learning_rate"])
    told["params"] = {name: np.asarray(x).tobytes().hex() for name, x in learner.params.items()}
    told["count"] = int(learner.cbstate["count"]) if "count" in learner.cbstate else None
    return told

def setter():
    with open(f"hyper{number}.txt", "w") as file:
        file.write(f"learning_rate: {0.0036 if number == 0 else 0.9}")
    return HumanHyperParamSetter("learning_rate", f"hyper{number}.txt")

def files():
    # Both processes name the same files.
    batches = place([(xs, 3 * xs - 1) for xs in drawn], whole)
    backends = JSONLinesBackend("log.jsonl"), CSVBackend("log.csv"), TensorBoardBackend("tb"), ConsoleBackend()
    learner = learner_of(
        Metrics(), LogMetrics(), Monitors(*backends), InferenceRunner(batches, PredictionWriter("predictions.jsonl"))
    )
    with learner.callbacks.trace("trace.json"):
        learner.fit(3)
    return {"logged": "training/loss" in learner.cbstate["monitors"].names()}

class Doubles(Callback):
    # Each process has one half of the array.
    def __init__(self, *processes):
        self.processes = processes

    def stateaccess(self):
        return {"params": Write()}

    @on(EpochEnd, TrainingPhase)
    def double(self, event, phase, learner):
        if number in self.processes:
            w = learner.params["w"]
            learner.params = {"w": jax.make_array_from_callback(w.shape, w.sharding, lambda at: 2 * local(w, at))}

def local(array, at):
    return next(np.asarray(shard.data) for shard in array.addressable_shards if shard.index == at)

def spread():
    told = {}
    for processes in ((0, 1), (1,)):
        learner = fluxcb.Learner.from_loss(
            {"w": jnp.arange(4.0)}, lambda params, batch: 0 * jnp.sum(params["w"]), optax.sgd(0.1),
            data=[np.ones(4, np.float32)], callbacks=[ToDevice(split), Doubles(*processes), CheckReplicas()],
            default_callbacks=False,
        )
        try:
            learner.fit(1)
        except fluxcb.FluxcbError as error:
            told["raised"] = str(error)
        else:
            told["w"] = [np.asarray(shard.data).tolist() for shard in learner.params["w"].addressable_shards]
    return told

def drift():
    told = {}
    learner = learner_of(every(CheckReplicas(), steps=2))
    learner.fit(1)
    if number == 1:
        learner.params = {**learner.params, "b": learner.params["b"] + 0.25}
    try:
        learner.fit(1)
    except fluxcb.FluxcbError as error:
        told["raised"] = str(error)
    told["step"] = learner.step
    return told

def drift_in_fit():
    class Drifts(Callback):
        # As a faulty device would: the engine does not notice.
        def stateaccess(self):
            return {"control": Append()}

        @on(StepEnd, TrainingPhase)
        def drift(self, event, phase, learner):
            if learner.progress.step == 3 and number == 1:
                train = drifting._core.state.train
                train.replace(("params",), {**train.live(("params",)), "w": jnp.float32(9.0)})

    drifting = learner_of(every(CheckReplicas(), steps=4), Drifts())
    try:
        drifting.fit(2)
    except fluxcb.FluxcbError as error:
        return {"raised": str(error).splitlines()[0], "step": drifting.step}

cases = {
    "rate": lambda: run(SetsRate()),
    "one": lambda: run(SetsRateInOne()),
    "condition": lambda: run(when(SetsRate(), lambda learner: number == 0)),
    "params": lambda: run(SetsParams()),
    "entry": lambda: run(Counts()),
    "threads": lambda: run(SetsRate(), Counts(), executor=fluxcb.ThreadExecutor(2)),
    "setter": lambda: run(setter()),
    "fails": lambda: run(Fails()),
    "files": files,
    "spread": spread,
    "drift": drift,
    "drift in fit": drift_in_fit,
}
everything = {}
for case, do in cases.items():
    print(f"== {case}", flush=True)
    everything[case] = do()
with open(f"told{number}.json", "w") as file:
    json.dump(everything, file)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the reports of two processes for each case; one pair of processes runs all cases."""
    folder = tmp_path_factory.mktemp("replicas")
    ended = run_processes(PROGRAM, 2, cwd=folder, warnings_are_errors=True)
    for process in ended:
        assert process.code == 0, process.stderr[-3000:]
    told = [json.loads((folder / f"told{number}.json").read_text()) for number in (0, 1)]
    reports = {case: [t[case] for t in told] for case in told[0]}
    return reports, folder, [process.stdout for process in ended]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("rate", {"step": 12, "rate": 0.01}),
        ("one", {"step": 12, "rate": 0.1}),  # what process 1 alone has written is replaced
        ("condition", {"step": 12, "rate": 0.01}),
        ("params", {"step": 6, "rate": 0.1, "w": 7.0}),
        ("entry", {"step": 12, "count": 12 + 3 * 10}),
        ("threads", {"step": 12, "rate": 0.01, "count": 12 + 3 * 10}),
        ("setter", {"step": 12, "rate": 0.0036}),
    ],
)
def test_processes_train_with_what_process_0_writes(case, found, trained):
    chief, other = trained[0][case]
    assert chief == other
    values = {**chief, "w": np.frombuffer(bytes.fromhex(chief["params"]["w"]), np.float32).item()}
    assert {name: values[name] for name in found} == pytest.approx(found, rel=1e-6)
    assert "raised" not in chief


@pytest.mark.long
def test_error_of_writing_handler_is_raised_in_both_processes(trained):
    chief, other = trained[0]["fails"]
    assert chief["raised"] == "PeerError: Process 1 failed: OSError: no disk"
    assert other["raised"] == "OSError: no disk"
    assert chief["step"] == other["step"] == 4
    assert chief["params"] == other["params"]


@pytest.mark.long
def test_written_arrays_spread_over_processes_keep_their_shards(trained):
    chief, other = trained[0]["spread"]
    assert (chief["w"], other["w"]) == ([[0.0, 2.0]], [[4.0, 6.0]])
    assert chief["raised"] == other["raised"]
    lines = chief["raised"].splitlines()
    assert lines[0] == "`params` was written by process 1 only, and its arrays are spread over several processes."
    assert lines[1].startswith("  where: Doubles.double  ")
    assert lines[2:] == [
        "  why:   process 0 has only a part of such an array, and cannot send it to the other processes",
        "  fix:   write arrays with the same sharding in all processes, or write them in a traced handler",
    ]


@pytest.mark.long
def test_process_0_writes_files(trained):
    reports, folder, printed = trained
    assert reports["files"] == [{"logged": True}] * 2  # both processes have the values
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 13))
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + 12
    assert len(list((folder / "tb").iterdir())) == 1
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 4 * 8
    assert json.loads((folder / "trace.json").read_text())
    # Another writer would have renamed an existing file.
    assert not [path.name for path in folder.iterdir() if path.name.endswith(("-1.jsonl", "-1.csv", ".unfinished"))]
    assert ["epoch 1, step 4" in text for text in printed] == [True, False]


@pytest.mark.long
def test_replicas_that_differ_when_fit_begins_raise(trained):
    chief, other = trained[0]["drift"]
    assert chief == other
    assert chief["step"] == 4  # no step of the second fit has run
    assert chief["raised"] == (
        "The replicas of `params.b` differ between processes.\n"
        "  where: `params.b` has 2 different values: process 0 | process 1\n"
        "         the largest difference between two of them is 0.25\n"
        "  why:   replicas are updated in the same way, so those that differ once stay different, and the results are "
        "wrong\n"
        "  fix:   give all processes the same parameters, assignments and key when the fit begins\n"
        "     or: if the replicas were equal when the fit began, resume from the last checkpoint, and test the devices"
    )


@pytest.mark.long
def test_replicas_that_differ_within_fit_raise(trained):
    assert (
        trained[0]["drift in fit"]
        == [{"raised": "The replicas of `params.w` differ between processes.", "step": 4}] * 2
    )
