"""The typed learner: every state path has an attribute, handlers get the annotated types, and pyright finds typos."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, LearnerView, Read, Write, on
from fluxcb._check.source_audit import SourceAudit, audit_source
from fluxcb._compile.step_learner import KNOWN, TracedLearner
from fluxcb._declare import learner_view, phase_learner, state
from fluxcb._declare.declared import declare
from fluxcb._declare.phases import BUILTIN_PHASES
from fluxcb.events import BackwardEnd, ComputeEnd, EpochEnd, Event, ForwardBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, StepLearner, TrainingPhase
from fluxcb.testing import check_callback, testlearner


def attributes(cls: type) -> set[str]:
    """Return the public attributes and methods that a class and its bases declare."""
    declared = {name for base in cls.__mro__[:-1] for name in (*inspect.get_annotations(base), *vars(base))}
    return {name for name in declared if not name.startswith("_")}


@pytest.mark.parametrize(
    ("view", "paths"),
    [
        # `control` is a permission, which has no value; `*` is not a name.
        (LearnerView, state.FIRST_LEVEL.keys() - {"control", "*"}),
        (learner_view.ProgressView, state.PROGRESS.keys()),
        (learner_view.StepView, state.ENGINE_STEP_NAMES.keys() | state.step_names(BUILTIN_PHASES)),
        (learner_view.SharedView, state.PROVIDERS.keys()),
        (learner_view.DataView, {phase.name for phase in BUILTIN_PHASES}),
        (StepLearner, set(KNOWN)),
    ],
)
def test_every_state_path_has_typed_attribute(view: type, paths: Any) -> None:
    assert attributes(view) == set(paths)


@pytest.mark.parametrize("module", [learner_view, phase_learner])
def test_every_attribute_is_documented(module: Any) -> None:
    tree = ast.parse(inspect.getsource(module))
    undocumented = []
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, following in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and not (
                isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            ):
                undocumented.append(f"{cls.name}.{ast.unparse(statement.target)}")
    assert undocumented == []


def test_wildcard_access_can_read_every_attribute() -> None:
    found: dict[str, Any] = {}

    class Reader(Callback):
        def stateaccess(self) -> dict[str, Any]:
            return {"*": Read()}

        @on
        def read(self, event: EpochEnd, phase: TrainingPhase, learner: LearnerView) -> None:
            found.update({name: getattr(learner, name) for name in attributes(LearnerView)})
            counters = attributes(learner_view.ProgressView)
            found["counters"] = {name: getattr(learner.progress, name) for name in counters}

    testlearner(Reader()).fit(1)
    assert found.keys() == attributes(LearnerView) | {"counters"}
    assert found["counters"] == {
        "step": 4,
        "epoch": 1,
        "step_in_epoch": 4,
        "epochs": 1,
        "steps_in_epoch": 4,
        "batch_size": 0,
        "in_turn": (),
        "compiled": False,
    }


class Typed(Callback):
    """Use typed learners in `init`, a traced handler and a host handler."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, ...]] = {}

    def stateaccess(self) -> dict[str, Any]:
        return {"step": {"loss": Read()}, "cbstate": {"largest": Write()}}

    def init(self, learner: LearnerView) -> None:
        self.seen["init"] = (isinstance(learner, LearnerView),)
        if "largest" not in learner.cbstate:
            learner.cbstate.largest = jnp.float32(0)

    @on
    def keep(self, event: ComputeEnd, phase: AbstractTrainingPhase, learner: LearnerView) -> None:
        self.seen["traced"] = isinstance(learner, LearnerView), isinstance(learner.step.loss, jax.Array)
        learner.cbstate.largest = jnp.maximum(learner.cbstate.largest, learner.step.loss)

    @on(StepEnd, TrainingPhase)
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        self.seen["host"] = isinstance(learner, LearnerView), isinstance(learner.step.loss, np.ndarray | np.generic)

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_handler_gets_instance_of_annotated_type() -> None:
    callback = Typed()
    testlearner(callback).fit(1)
    assert callback.seen == {"init": (True,), "traced": (True, True), "host": (True, True)}
    assert [handler.title() for handler in callback.handlers()] == [
        "(ComputeEnd, AbstractTrainingPhase)",
        "(StepEnd, TrainingPhase)",
    ]


def test_phase_gets_instance_of_annotated_type() -> None:
    seen = []

    class Plain(TrainingPhase):
        def step(self, learner: StepLearner, emit: Any) -> None:
            seen.append(isinstance(learner, StepLearner))
            super().step(learner, emit)

    testlearner(phases=(Plain(),)).fit(1)
    assert set(seen) == {True}
    assert issubclass(TracedLearner, StepLearner)


def test_annotated_handlers_pass_check_callback() -> None:
    class Clip(Callback):
        def stateaccess(self) -> dict[str, Any]:
            return {"step": {"grads": Write()}}

        @on
        def clip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: LearnerView) -> None:
            learner.step.grads = jax.tree.map(lambda leaf: jnp.clip(leaf, -1, 1), learner.step.grads)

    check_callback(Clip)


def test_source_audit_follows_subscripted_step_value() -> None:
    class Norms(Callback):
        def stateaccess(self) -> dict[str, Any]:
            return {"step": {"xs": Read(), "input_norm": Write()}}

        @on
        def measure(self, event: ForwardBegin, phase: AbstractTrainingPhase, learner: LearnerView) -> None:
            learner.step["input_norm"] = jnp.linalg.norm(learner.step.xs)

    assert audit_source(declare([Norms()])[0]) == SourceAudit()


SAMPLE = """
import jax
import jax.numpy as jnp
import numpy as np

import fluxcb
from fluxcb import Callback, LearnerView, Read, Write, on
from fluxcb.events import BackwardEnd, EpochEnd, StepEnd
from fluxcb.phases import Phase, StepLearner, TrainingPhase


class Printer(Callback):
    def init(self, learner):
        learner.cbstate.best = jnp.float32(jnp.inf)
        learner.cbstat  # error: reportAttributeAccessIssue

    @on
    def show(self, event: StepEnd, phase: TrainingPhase, learner: LearnerView):
        loss: jax.Array | np.ndarray = learner.step.loss
        text: str = learner.step.loss  # error: reportAssignmentType
        print(f"{loss:.3f}", float(learner.step.loss), text, learner.step["gradient_norm"])
        learner.step.los  # error: reportAttributeAccessIssue
        learner.stp.loss  # error: reportAttributeAccessIssue
        learner.progress.steps  # error: reportAttributeAccessIssue
        learner.progress.step = 3  # error: reportAttributeAccessIssue
        learner.hyperparams.learning_rate = 0.1
        learner.hyperparams.weight_decay = learner.hyperparams.learning_rate / 2
        learner.cbstate.best = min(learner.cbstate.best, learner.step.loss)
        learner.cbstate.monitors.put_scalar("best", learner.cbstate.best)
        learner.cbstate.monitors.put_scalar(3, learner.cbstate.best)  # error: reportArgumentType
        first: int = learner.progress.step + learner.progress.epoch
        print(first, learner.callbacks.get(Printer).show, learner.data[phase], learner.data[TrainingPhase])

    @on(EpochEnd, TrainingPhase)
    def metrics(self, event, phase: Phase, learner: LearnerView):
        print(learner.cbstate.metrics_epoch[phase], learner.cbstate.metrics_epoch.training, "ema" in learner.cbstate)

    @on
    def clip(self, event: BackwardEnd, phase: TrainingPhase, learner: LearnerView):
        learner.step.grads = jax.tree.map(jnp.sign, learner.step.grads)
        learner.step.skip = jnp.isnan(learner.step.loss)
        learner.step.skp = True  # error: reportAttributeAccessIssue


class MyPhase(TrainingPhase):
    def step(self, learner: StepLearner, emit):
        learner.step.total = learner.forward(learner.params, learner.step.xs)
        learner.update(learner.grad(lambda params: learner.step.total, wrt="params"), wrt="params")
        learner.updat(learner.step.total)  # error: reportAttributeAccessIssue


class Unannotated(TrainingPhase):
    def step(self, learner, emit):
        learner.apply_update()  # error: reportAttributeAccessIssue
"""


@pytest.mark.long
def test_pyright_finds_typos_in_state_paths(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    sample = tmp_path / "sample.py"
    sample.write_text(SAMPLE)
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(sample)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = json.loads(run.stdout)["generalDiagnostics"]
    lines = SAMPLE.splitlines()
    expected = [(number, line.split("# error: ")[1]) for number, line in enumerate(lines) if "# error: " in line]
    errors = [(d["range"]["start"]["line"], d["rule"]) for d in found if d["severity"] == "error"]
    assert errors == expected, [d["message"] for d in found]
