"""`learner.explain(costs=True)`, compared with formulas for a model of known shape."""

import json
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, EverySteps, Read, Write, every, on
from fluxcb._compile.arrays import spec_of
from fluxcb._errors import DeclarationError, MissingStateError
from fluxcb._run.costs import learner_costs
from fluxcb._tools.cli import main
from fluxcb.callbacks import (
    ClipGradients,
    CustomCallback,
    GradientNoise,
    Metrics,
    ParameterEMA,
    Recorder,
    SkipNonFinite,
    accuracy,
)
from fluxcb.events import StepEnd, UpdateEnd
from fluxcb.phases import TrainingPhase

BATCH, INPUTS, HIDDEN, CLASSES = 32, 100, 200, 10
WEIGHTS = INPUTS * HIDDEN + HIDDEN * CLASSES


class Average(Callback):
    """Average the parameters with three operations for each."""

    def __init__(self, name, decay=0.9):
        self.name, self.decay = name, decay

    def __repr__(self):
        return f"{type(self).__name__}({self.name!r})"

    def stateaccess(self):
        return {"params": Read(), "cbstate": {self.name: Write()}}

    def init(self, learner):
        learner.cbstate[self.name] = learner.params

    @on(UpdateEnd, TrainingPhase)
    def average(self, event, phase, learner):
        learner.cbstate[self.name] = jax.tree.map(
            lambda e, p: self.decay * e + (1 - self.decay) * p, learner.cbstate[self.name], learner.params
        )


class ScheduledAverage(Average):
    def handlers(self):
        return [fluxcb.Handler(UpdateEnd, TrainingPhase, "average", when=EverySteps(10))]


class LargestGradient(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read(), "grads": {"out": Read()}}}

    @on(StepEnd, TrainingPhase)
    def measure(self, event, phase, learner):
        self.found = float(np.abs(learner.step.grads["out"]).max()), float(learner.step.loss)


def init(key, xs):
    one, other = jax.random.split(key)
    return {
        "in": jax.random.normal(one, (INPUTS, HIDDEN)) / INPUTS**0.5,
        "out": jax.random.normal(other, (HIDDEN, CLASSES)) / HIDDEN**0.5,
    }


def learner(*callbacks, optimizer=None, **options):
    rng = np.random.default_rng(0)
    xs, ys = rng.normal(size=(BATCH, INPUTS)).astype(np.float32), rng.integers(0, CLASSES, BATCH)
    return fluxcb.Learner(
        (init, lambda params, xs: (xs @ params["in"]) @ params["out"]),
        lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
        optax.sgd(0.1) if optimizer is None else optimizer,
        callbacks=callbacks,
        default_callbacks=False,
        **({"data": [(xs, ys)] * 3} | options),
    )


def flops(of):
    (phase,) = learner_costs(of._core).phases
    return {part.name: part.cost.flops for part in phase.parts}


def test_flops_are_those_of_formulas():
    found = flops(learner(Average("ema"), Average("slow", 0.99), ScheduledAverage("rare")))
    # Two products forward, two for the gradients of the weights, and one for that of the hidden layer.
    products = 2 * BATCH * (2 * INPUTS * HIDDEN + 3 * HIDDEN * CLASSES)
    assert found.pop("model and loss") == pytest.approx(products, rel=0.01)
    # A product with the learning rate, and a sum.
    assert found.pop("optimizer") == 2 * WEIGHTS
    # Its operations are those of a step at which it is due.
    assert found.pop("ScheduledAverage('rare').average, EverySteps(steps=10)") == pytest.approx(3 * WEIGHTS, abs=20)
    assert found.pop("packing of fetched values") < 20
    assert found == {"Average('ema').average": 3 * WEIGHTS, "Average('slow').average": 3 * WEIGHTS}


def test_parts_add_up_to_count_of_xla():
    callbacks = [ClipGradients(1.0), GradientNoise(0.01), SkipNonFinite(), ParameterEMA(0.9), Metrics(accuracy)]
    built = learner(*callbacks, optimizer=optax.adam(1e-3))
    (phase,) = learner_costs(built._core).phases
    # XLA's count of the jaxpr of the step, which does not know of parts.
    step = built._core.traced(TrainingPhase())
    with jax.default_device(jax.devices("cpu")[0]):  # XLA counts operations before compilation only for the CPU
        whole = jax.jit(step.computing({"loss", *phase_values(built)})).lower(
            spec_of(built._core.state.train.carry), step.batch_spec
        )
    counted = whole.cost_analysis()
    summed = sum(part.cost.flops for part in phase.parts)
    assert summed == pytest.approx(counted["flops"] + counted["transcendentals"], rel=0.02)
    assert sum(part.cost.bytes for part in phase.parts) == pytest.approx(counted["bytes accessed"], rel=0.02)
    assert abs(phase.step.remainder.flops) < 0.02 * phase.step.whole.flops
    assert abs(phase.step.remainder.bytes) < 0.02 * phase.step.whole.bytes


def phase_values(built):
    fetch = built._core.window_plan(TrainingPhase()).fetch
    return {path[1] for path in (*fetch.each, *fetch.last) if path[0] == "step"}


def test_bytes_fetched_for_host_handlers():
    show = CustomCallback(print, StepEnd, phase=TrainingPhase, access={"step": {"loss": Read()}})
    averaged = CustomCallback(print, StepEnd, phase=TrainingPhase, access={"cbstate": {"ema": Read()}})
    (phase,) = learner_costs(learner(LargestGradient(), show, every(averaged, steps=5), Average("ema"))._core).phases
    gradients = 4 * HIDDEN * CLASSES
    assert [(read.handler.declared.cls.__name__, read.each, read.due) for read in phase.reads] == [
        ("LargestGradient", 4 + gradients, 0),
        ("CustomCallback", 4, 0),
        ("CustomCallback", 0, 4 * WEIGHTS),
    ]
    # The loss is fetched once, with two words that tell whether the step ran and whether it stopped the window.
    assert phase.fetched == 4 + gradients + 8


def test_memory_by_entry_and_owner():
    costs = learner_costs(learner(Average("ema"), optimizer=optax.adam(1e-3))._core)
    assert [(entry.path, entry.owner, entry.bytes) for entry in costs.carry] == [
        ("params", "model", 4 * WEIGHTS),
        ("opt_state", "optimizer", 2 * 4 * WEIGHTS + 4),
        ("counters", "fluxcb", 4 * (4 + 2)),
        ("cbstate.ema", "Average('ema')", 4 * WEIGHTS),
    ]


def test_peak_covers_state_batch_and_values_of_the_step():
    rows = 5_000
    batch = np.ones((rows, INPUTS), np.float32), np.zeros(rows, np.int32)
    costs = learner_costs(learner(data=[batch])._core)
    state = sum(entry.bytes for entry in costs.carry)
    data, hidden, outputs = 4 * rows * (INPUTS + 1), 4 * rows * HIDDEN, 4 * rows * CLASSES
    # The backward pass needs the hidden layer and, at some point, its gradient. The loop around the step has a buffer
    # of two batches, and extracts one of them.
    assert state + data + hidden <= costs.peaks["TrainingPhase"] <= 2 * state + 4 * data + 2 * hidden + 10 * outputs


def test_counting_changes_nothing():
    counted, plain = learner(Average("ema")), learner(Average("ema"))
    first = counted.explain(costs=True)
    counted.fit(2)
    plain.fit(2)
    programs = [built._core.engine.programs for built in (counted, plain)]
    assert programs[0].compiles == programs[1].compiles
    assert programs[0].traces == programs[1].traces
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), counted.params, plain.params))
    assert counted.explain(costs=True) == first


def test_table():
    lines = learner(Average("ema"), Recorder(), Metrics()).explain(costs=True).splitlines()
    # Numbers of operations that follow from no formula are left out.
    shown = [re.sub(r"  +", "  ", line.rstrip()) for line in lines]
    assert shown[0] == "TrainingPhase: a step of 32 examples  FLOPs  bytes"
    assert [line.split("  ")[1] for line in shown[1:8]] == [
        "model and loss",
        "optimizer",
        "packing of fetched values",
        "Average('ema').average",
        "Metrics().accumulate",
        "not attributed",
        "whole step, as XLA counts it",
    ]
    assert shown[4].startswith("  Average('ema').average  66 k  ")
    assert re.fullmatch(r"  whole step, as XLA counts it  \d\.\d+ M  100\.0%  [\d,]+ KiB  100\.0%", shown[7])
    assert "  cbstate.ema (Average('ema'))  86 KiB" in shown
    assert len({len(line) for line in lines[1:8]}) == 1


def test_unknown_batch_is_an_error(refused):
    model = (lambda key, xs: {"w": jnp.ones(xs.shape[-1])}, lambda params, xs: xs @ params["w"])
    built = fluxcb.Learner(model, lambda outputs, ys: jnp.mean(outputs), optax.sgd(0.1))
    with refused(
        MissingStateError,
        "The train state does not exist yet, because the shape of a batch is unknown.\n"
        "  fix:   pass `data=` or `example_batch=` to the Learner, or run the first step",
    ):
        built.explain(costs=True)
    built = fluxcb.Learner.from_loss({"w": jnp.ones(3)}, lambda params, batch, key: params["w"].sum(), optax.sgd(0.1))
    with refused(
        MissingStateError,
        "The costs of a step are unknown, because the shape of a batch is unknown.\n"
        "  fix:   pass `data=` or `example_batch=` to the Learner",
    ):
        built.explain(costs=True)
    assert "optimizer" in learner(data=None, example_batch=(jnp.ones((2, INPUTS)), jnp.zeros(2, int))).explain(
        costs=True
    )


def test_picture_shows_costs():
    built = learner(Average("ema"), LargestGradient())
    plain = built.callbacks.graph.render("svg")
    picture = built.callbacks.graph.render("svg", costs=True)
    texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    found = flops(built)
    share = found["Average('ema').average"] / sum(found.values())
    assert f"{share:.1%} of the FLOPs" in texts
    assert f"fetches {4 + 4 * HIDDEN * CLASSES:,} bytes per step" in texts
    assert "FLOPs" not in plain
    assert "<dt>costs</dt><dd>fetches 8,004 bytes per step</dd>" in built.callbacks.graph.render("html", costs=True)


def test_costs_on_mesh_of_accelerators_are_an_error(refused, monkeypatch):
    # JAX returns None for programs of accelerators that have not been compiled.
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda lowered: None)
    with refused(
        DeclarationError,
        "The costs of a step cannot be counted.\n"
        "  why:   the step uses a mesh of accelerators, and only for the CPU, XLA counts operations\n"
        "  fix:   run the program with the environment variable `JAX_PLATFORMS=cpu`, which gives the same costs",
    ):
        learner(Average("ema")).explain(costs=True)


def test_costs_without_cpu_are_an_error(refused, monkeypatch):
    def no_backend(*, backend):
        raise RuntimeError(f"Unknown backend {backend}")

    built = learner(Average("ema"))
    monkeypatch.setattr(jax, "local_devices", no_backend)  # as with JAX_PLATFORMS=cuda
    with refused(
        DeclarationError,
        "The costs of a step cannot be counted.\n"
        "  why:   JAX may not use the CPU, and only for the CPU, XLA counts operations\n"
        "  fix:   run the program with the environment variable `JAX_PLATFORMS=cpu`, which gives the same costs",
    ):
        built.explain(costs=True)


def test_graph_without_costs_is_an_error(refused):
    built = learner(Average("ema"))
    graph = fluxcb.check([Average("ema")], default_callbacks=False)
    with refused(
        DeclarationError,
        "This callback graph has no costs, because it does not belong to a Learner.\n"
        "  why:   what a callback costs depends on the model and the batch\n"
        '  fix:   write `learner.callbacks.graph.render("svg", costs=True)`',
    ):
        graph.render("svg", costs=True)
    with refused(
        DeclarationError,
        "The form 'tree' of a callback graph does not show costs.\n  fix:   choose one of svg, html",
    ):
        built.callbacks.graph.render(costs=True)


# -- the command line -----------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "costs_project.py").write_text(
        "from fluxcb.callbacks import ClipGradients\n"
        "from fluxcb.testing import testlearner\n"
        "callbacks = [ClipGradients(1.0)]\n"
        "def make_learner():\n"
        "    return testlearner(*callbacks, validation_batches=0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    return tmp_path


def test_commands_show_costs(project, capsys):
    assert main(["explain", "--costs", "costs_project:make_learner"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("TrainingPhase: a step of 8 examples ")
    assert main(["explain", "--costs", "--json", "costs_project:make_learner"]) == 0
    data = json.loads(capsys.readouterr().out)
    (phase,) = data["phases"]
    parts = {part["name"]: part["flops"] for part in phase["parts"]}
    assert parts["ClipGradients(1.0).clip"] > 0
    assert sum(parts.values()) + phase["rest"]["flops"] == phase["step"]["flops"]
    assert {entry["path"] for entry in data["carry"]} >= {"params", "counters"}
    assert main(["graph", "--costs", "-o", "graph.svg", "costs_project:make_learner"]) == 0
    assert " of the FLOPs</text>" in (project / "graph.svg").read_text()


def test_commands_refuse_what_has_no_costs(project, capsys):
    assert main(["explain", "--costs", "costs_project:callbacks"]) == 1
    assert capsys.readouterr().err == (
        "DeclarationError: `costs_project:callbacks` is a list of callbacks, so it has no costs.\n"
        "  why:   what a callback costs depends on the model and the batch\n"
        "  fix:   name a Learner, or a function without required arguments that returns one\n"
    )
    assert main(["explain", "--costs", "ClipGradients", "Metrics", "costs_project:make_learner"]) == 2
    assert capsys.readouterr().err == (
        "`fluxcb explain --costs` shows the costs of a whole set, not of two callbacks.\n"
        "  fix:   leave the callbacks out: `fluxcb explain --costs pkg.train:make_learner`\n"
    )
    assert main(["graph", "--costs", "costs_project:make_learner"]) == 2
    assert "The form 'tree' of a callback graph does not show costs." in capsys.readouterr().err
