"""`fluxcb check` reports writes to values of the step at events at which the step does not use them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluxcb
from fluxcb import Append, Callback, Read, Write, on
from fluxcb._check.preflight import unchecked_graph
from fluxcb._check.source_audit import audit_source
from fluxcb._declare.declared import declare
from fluxcb._errors import CheckError, UndeclaredAccessError
from fluxcb.events import BackwardBegin, BackwardEnd, Event, ForwardBegin, StepBegin, StepEnd, UpdateEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import testlearner

GRADS = {"step": {"grads": Write()}}


class Writes(Callback):
    """Writes a value of the step at an event of the subclass."""

    access: Any = {}

    def stateaccess(self) -> Any:
        return self.access


def zeroed(grads: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, grads)


class AtStepEnd(Writes):
    @on
    def zero(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.step.grads = zeroed(learner.step.grads)


class DeclaredAtStepEnd(AtStepEnd):
    access = GRADS


class AtBackwardEnd(Writes):
    access = GRADS

    @on
    def zero(self, event: BackwardEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.step.grads = zeroed(learner.step.grads)


class OwnName(Writes):
    access: Any = {"step": {"grads": Read(), "my_grads": Write()}}

    @on
    def zero(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        learner.step.my_grads = zeroed(learner.step.grads)


def audit(callback: Callback) -> Any:
    return audit_source(declare([callback])[0])


def problem_of(callback: Callback) -> CheckError:
    [problem] = audit(callback).problems
    return problem


@pytest.mark.parametrize(
    ("callback", "kind", "declaring"),
    [
        (AtStepEnd(), UndeclaredAccessError, ', and add `{"step": {"grads": Write()}}` to `AtStepEnd.stateaccess`'),
        (DeclaredAtStepEnd(), CheckError, ""),
    ],
)
def test_gradients_written_at_step_end_are_reported(callback: Callback, kind: type, declaring: str) -> None:
    problem = problem_of(callback)
    assert type(problem) is kind
    label = type(callback).__name__
    assert re.sub(r"  \S+:\d+", "", str(problem)) == (
        f"{label}() writes `step.grads` at StepEnd, but the step has already used it.\n"
        "  where: AtStepEnd.zero\n"
        "         Writes.stateaccess\n"
        "  why:   the write would have no effect, so the line raises AccessError\n"
        f"  fix:   write it in a handler of BackwardEnd{declaring}\n"
        '     or: write to another name: `learner.step.my_grads = ...`, and add `{"step": {"my_grads": Write()}}` to '
        f"`{label}.stateaccess`"
    )
    with pytest.raises(fluxcb.AccessError):
        testlearner(callback).fit(1)


@pytest.mark.parametrize(("callback", "trains"), [(AtBackwardEnd(), False), (OwnName(), True)])
def test_the_fixes_for_gradients_written_at_step_end_work(callback: Callback, trains: bool) -> None:
    assert not audit(callback).problems
    learner = testlearner(callback)
    before = learner.params
    learner.fit(1)
    same = jax.tree.map(np.array_equal, before, learner.params)
    assert all(jax.tree.leaves(same)) is not trains


def made(event: type[Event], phase: type[Phase], body: Any, access: Any) -> Callback:
    """Return a callback whose handler calls a function with the learner."""

    class Made(Callback):
        def __init__(self) -> None:
            self.body = body

        def stateaccess(self) -> Any:
            return access

        @on(event, phase)
        def run(self, event: Event, phase: Phase, learner: Any) -> None:
            self.body(learner)

    return Made()


def batch(learner: Any) -> None:
    learner.step.batch = learner.step.batch


def outputs(learner: Any) -> None:
    learner.step.outputs = learner.step.outputs


def loss(learner: Any) -> None:
    learner.step.loss = learner.step.loss


def grads(learner: Any) -> None:
    learner.step.grads = learner.step.grads


def updates(learner: Any) -> None:
    learner.step.updates = learner.step.updates


def skip(learner: Any) -> None:
    learner.step.skip = False


def hold(learner: Any) -> None:
    learner.step.hold = False


def stop(learner: Any) -> None:
    learner.step.stop = False


def mine(learner: Any) -> None:
    learner.step.mine = 1.0


LATER, USED, ONLY = "the step computes it later", "the step has already used it", "only the step itself writes it"


@pytest.mark.parametrize(
    ("event", "body", "why", "fixes"),
    [
        (ForwardBegin, loss, LATER, ["write it in a handler of BackwardBegin, and add `{path: Write()}`"]),
        (BackwardEnd, loss, USED, ["write it in a handler of BackwardBegin, and add `{path: Write()}`"]),
        (StepBegin, loss, LATER, ["write it in a handler of BackwardBegin, and add `{path: Write()}`"]),
        (UpdateEnd, updates, ONLY, ["write the values that it is computed from"]),
        (UpdateEnd, skip, USED, ["write it in a handler of BackwardEnd, and add `{path: Append()}`"]),
        (StepEnd, skip, USED, ["write it in a handler of BackwardEnd, and add `{path: Append()}`"]),
        (StepEnd, stop, USED, ["write it in a handler of BackwardEnd, and add `{path: Append()}`"]),
        (
            StepEnd,
            loss,
            USED,
            [
                "write it in a handler of BackwardBegin, and add `{path: Write()}`",
                "write to another name: `learner.step.my_loss = ...`, and add `{path: Write()}`",
            ],
        ),
    ],
)
def test_writes_that_the_step_would_not_use_are_reported(
    event: type[Event], body: Any, why: str, fixes: list[str]
) -> None:
    problem = problem_of(made(event, TrainingPhase, body, {}))
    assert problem.what == f"Made() writes `step.{body.__name__}` at {event.__name__}, but {why}."
    shown = [
        re.sub(r'`\{"step": \{"\w+": (\w+)\(\)\}\}` to `Made.stateaccess`', r"`{path: \1()}`", f) for f in problem.fix
    ]
    assert shown == fixes


# The step of TrainingPhase does not read `step.batch` after ForwardBegin, which is a warning.
@pytest.mark.filterwarnings(r"ignore:Made\(\) replaces `step.batch`:UserWarning")
@pytest.mark.parametrize("event", [StepBegin, ForwardBegin, BackwardBegin, BackwardEnd, UpdateEnd, StepEnd])
@pytest.mark.parametrize("body", [batch, outputs, loss, grads, updates, skip, hold, stop, mine])
def test_a_declared_write_is_reported_if_and_only_if_it_is_refused(event: type[Event], body: Any) -> None:
    permission = Append() if body in (skip, hold, stop) else Write()
    callback = made(event, TrainingPhase, body, {"step": {body.__name__: permission}})
    reported = unchecked_graph([callback], [TrainingPhase]).problems + audit(callback).problems
    try:
        testlearner(callback).fit(1)
        refused = False
    except fluxcb.FluxcbError:
        refused = True
    assert bool(reported) is refused
