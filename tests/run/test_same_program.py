"""Two processes whose programs differ raise an error in both, and processes that do not train together are reported."""

import json

import pytest

from tests.run_processes import run_processes

PROGRAM = """
import faulthandler, json, os, sys, warnings
faulthandler.dump_traceback_later(200, exit=True)  # a process that waits for the other in vain says where
import jax
number, port = int(sys.argv[1]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb import Callback, Write, every, on
from fluxcb.callbacks import Checkpointer, LogMetrics, Metrics, MetricsPrinter, Monitors, ParameterEMA, ProgressBar
from fluxcb.events import StepEnd
from fluxcb.logging import CSVBackend
from fluxcb.phases import TrainingPhase

drawn = np.random.default_rng(number).uniform(-1.5, 1.5, (4, 8, 1)).astype(np.float32)

class Reads(Callback):
    def stateaccess(self):
        return {}

    @on(StepEnd, TrainingPhase)
    def read(self, event, phase, learner):
        pass

def learner_of(*callbacks, rate=0.1, optimizer=None, **kwargs):
    return fluxcb.Learner(
        (lambda key, xs: {"w": jax.random.normal(key), "b": jnp.zeros(())}, lambda ps, xs: ps["w"] * xs + ps["b"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optimizer or fluxcb.inject(optax.adam, learning_rate=rate),
        data=[(xs, 3 * xs - 1) for xs in drawn],
        callbacks=[Metrics(), *callbacks],
        default_callbacks=False,
        **{"mesh": fluxcb.mesh(), **kwargs},
    )

def run(*callbacks, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            learner = learner_of(*callbacks, **kwargs)
            learner.fit(1)
        except fluxcb.FluxcbError as error:
            return f"{type(error).__name__}: {error}"
    return [str(one.message) for one in caught] or [float(value) for value in learner.params.values()]

def assigned():
    learner = learner_of()
    learner.fit(1)
    if number == 1:
        learner.hyperparams["learning_rate"] = 0.5
    try:
        learner.fit(1)
    except fluxcb.DeclarationError as error:
        raised = str(error).splitlines()[:2]
    learner.hyperparams["learning_rate"] = 0.5
    learner.fit(1)
    return [*raised, learner.step]

first = [None][number:]
cases = {
    "key": lambda: run(key=number),
    "rate": lambda: run(rate=[0.5, 0.25][number]),
    "assigned": assigned,
    "optimizer": lambda: run(optimizer=optax.sgd([0.5, 0.25][number])),
    "steps_per_call": lambda: run(steps_per_call=[2, 4][number]),
    "argument": lambda: run(ParameterEMA([0.5, 0.75][number])),
    "traced": lambda: run(*[ParameterEMA(0.5) for _ in first]),
    "trigger": lambda: run(*[every(MetricsPrinter(), steps=3) for _ in first]),
    "fused": lambda: run(*[Reads() for _ in first], steps_per_call=2),
    "many": lambda: run(*[cls() for cls in [ParameterEMA] for _ in first], optimizer=optax.sgd([0.5, 0.25][number])),
    "same": lambda: run(ParameterEMA(0.5), Reads(), every(MetricsPrinter(), steps=3), Checkpointer("saved")),
    "legitimate": lambda: run(
        LogMetrics(), Monitors(CSVBackend(f"{number}.csv")), *[ProgressBar() for _ in first], *[Reads() for _ in first]
    ),
    "separate": lambda: run(mesh=None, key=number),
    "separate, saved": lambda: run(Checkpointer("runs"), mesh=None),
}
told = {name: case() for name, case in cases.items()}
print("TOLD" + json.dumps(told))
"""

WHY = "all processes compute each step together, and otherwise wait for each other or train different models"


def _differ(name, *rows, fix=None):
    where = "\n         ".join(rows)
    fix = fix or f"use the same value of `{name}` in all processes"
    return (
        f"DeclarationError: Process 0 and process 1 do not run the same program: `{name}` differs.\n"
        f"  where: {where}\n  why:   {WHY}\n  fix:   {fix}"
    )


def _absent(name, text):
    fix = f"put `{name}` in the list of all processes; a callback whose class sets `chief_only = True` acts only in "
    return _differ(f"callbacks.{name}", f"callbacks.{name}: {text} in process 0, - in process 1", fix=fix + "process 0")


EXPECTED = {
    "key": _differ("key", "key: threefry2x32 [0, 0] in process 0, threefry2x32 [0, 1] in process 1"),
    "rate": _differ("hyperparams.learning_rate", "hyperparams.learning_rate: 0.5 in process 0, 0.25 in process 1"),
    "steps_per_call": _differ("steps_per_call", "steps_per_call: 2 in process 0, 4 in process 1"),
    "argument": _differ(
        "callbacks.ParameterEMA.decay", "callbacks.ParameterEMA.decay: 0.5 in process 0, 0.75 in process 1"
    ),
    "trigger": _absent("MetricsPrinter", "fluxcb.callbacks.MetricsPrinter, every 3 steps"),
    "fused": _absent("Reads", "__main__.Reads"),
    "assigned": [
        "Process 0 and process 1 do not run the same program: `hyperparams.learning_rate` differs.",
        "  where: hyperparams.learning_rate: 0.10000000149011612 in process 0, 0.5 in process 1",
        8,
    ],
    "separate": [
        "Each process trains its own model on its own data, because the Learner has no mesh of all processes. "
        "Pass `mesh=fluxcb.mesh()` to the Learner to train one model."
    ],
    "separate, saved": (
        "DeclarationError: Each process trains its own model on its own data, because the Learner has no mesh of all "
        "processes.\n  where: Checkpointer('runs')\n  why:   the processes save one checkpoint together, which can "
        "contain only one model\n  fix:   pass `mesh=fluxcb.mesh()` to the Learner"
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return what each of two processes prints, by case."""
    ended = run_processes(PROGRAM, 2, cwd=tmp_path_factory.mktemp("processes"))
    assert [one.code for one in ended] == [0, 0], ended
    return [json.loads(one.stdout.rpartition("TOLD")[2]) for one in ended]


@pytest.mark.parametrize("case", EXPECTED)
def test_difference_raises_same_error_in_both_processes(case, told):
    assert [one[case] for one in told] == [EXPECTED[case]] * 2


def test_constant_of_optimizer_is_compared(told):
    assert told[0]["optimizer"] == told[1]["optimizer"]
    assert "`optimizer" in told[0]["optimizer"]
    assert "0.5 in process 0, 0.25 in process 1" in told[0]["optimizer"].replace("-", "")


def test_traced_callback_in_one_process_raises(told):
    assert told[0]["traced"] == told[1]["traced"]
    head, _, rest = told[0]["traced"].partition("\n")
    assert head.endswith("`callbacks.ParameterEMA` differs.")
    assert "fluxcb.callbacks.ParameterEMA in process 0, - in process 1" in rest


def test_all_differences_are_shown(told):
    assert "callbacks.ParameterEMA: " in told[0]["many"]
    assert "optimizer" in told[0]["many"]


@pytest.mark.parametrize("case", ["same", "legitimate"])
def test_processes_without_difference_train_one_model(case, told):
    assert [len(one[case]) for one in told] == [2, 2]
    assert told[0][case] == told[1][case]
