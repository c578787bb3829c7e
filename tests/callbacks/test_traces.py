"""Traces and LogTraces: names, steps and numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import AccessError, ConflictError, DeclarationError, MissingStateError, Read, Write, every
from fluxcb.callbacks import LogTraces, Metrics, Monitors, Traces
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

FUSING = pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])


def history(learner, name):
    return learner.cbstate["monitors"].history(name)


# --- Traces -----------------------------------------------------------------------------------------------------------

LOSS = {"step": {"loss": Read()}}
OF_LOSS = {"square": lambda learner: learner.step.loss**2}


@FUSING
def test_values_of_every_step_of_both_phases_are_recorded(steps_per_call):
    traces = Traces(OF_LOSS, access=LOSS)
    learner = testlearner(traces, Metrics(), steps_per_call=steps_per_call)
    learner.fit(2)
    found = learner.cbstate["traces"]
    losses = learner.cbstate["metrics_step"]["training"]["loss"]
    assert [step for step, _ in found[TrainingPhase]["square"]] == list(range(1, 9))
    np.testing.assert_allclose([v for _, v in found["training"]["square"]], np.square(losses), rtol=1e-6)
    assert [step for step, _ in found["validation"]["square"]] == [1, 2, 3, 4]  # two steps an epoch


def test_traces_of_one_phase_can_be_arrays_and_come_from_several_callbacks():
    gradients = Traces(
        {"gradient": lambda learner: jnp.stack([learner.step.grads["w"], learner.step.grads["b"]])},
        AbstractTrainingPhase,
        access={"step": {"grads": Read()}},
    )
    learner = testlearner(gradients, Traces(OF_LOSS, ValidationPhase, access=LOSS), batches=1)
    xs, ys = learner._state.data["training"][0]
    learner.fit(1)
    found = learner.cbstate["traces"]
    assert {phase: list(values) for phase, values in found.items()} == {
        "training": ["gradient"], "validation": ["square"],
    }  # fmt: skip
    expected = [float(np.mean(-2 * ys * xs)), float(np.mean(-2 * ys))]  # of mean((w x + b - y) ** 2), w = b = 0
    np.testing.assert_allclose(found["training"].last("gradient"), expected, rtol=1e-5)
    with pytest.raises(ConflictError, match=r"`step.trace_square`"):
        testlearner(Traces(OF_LOSS, access=LOSS), Traces(OF_LOSS, access=LOSS))


def test_only_the_trace_is_fetched():
    traces = Traces(
        {"norm": lambda learner: learner.step.grads["w"] ** 2}, TrainingPhase, access={"step": {"grads": Read()}}
    )
    learner = testlearner(traces)
    plan = learner._core.window_plan(learner.phases[0])
    assert (list(plan.fetch.each), plan.bounds) == ([("step", "trace_norm")], ())


def test_a_rewound_run_has_each_step_once():
    learner = testlearner(Traces(OF_LOSS, TrainingPhase, access=LOSS))
    learner.fit(1)
    saved = learner.state
    learner.fit(1)
    before = [(step, float(value)) for step, value in learner.cbstate["traces"]["training"]["square"]]
    learner.state = saved
    learner.fit(1)
    assert [(step, float(value)) for step, value in learner.cbstate["traces"]["training"]["square"]] == before


def test_a_function_that_reads_undeclared_state_is_an_error():
    with pytest.raises(AccessError, match=r"may not read `step.grads`"):
        testlearner(Traces({"norm": lambda learner: learner.step.grads["w"]}, TrainingPhase, access=LOSS))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"preprocess": {}}, "`preprocess` of `Traces` must be functions of the learner by name, not {}.\n"
         '  fix:   write e.g. `{"squared": lambda learner: learner.step.loss**2}`'),
        ({"preprocess": {"a b": abs}}, "The name of a trace must be an identifier, not 'a b'.\n"
         '  fix:   write e.g. `{"gradient_norm": function}`'),
        ({"preprocess": {"a": 3}}, "The trace `a` must be a function of the learner, not 3.\n"
         "  fix:   write e.g. `lambda learner: ...`"),
        ({"access": {"step": Read()}}, "`access` of `Traces` declares all of `step`; it must name what the "
                                       "functions read.\n"
         '  fix:   write e.g. `access={"step": {"loss": Read()}}`'),
        ({"access": {"step": {"loss": Write()}}}, "`access` of `Traces` declares Write() on `step.loss`, but "
         "its functions only read.\n  fix:   declare `Read()`"),
        ({"phase": 3}, "A handler's phase must be a subclass of `Phase`, not 3.\n  where: Traces(...)\n"
         "  fix:   name one of `fluxcb.phases`, or a class derived from `fluxcb.phases.Phase`"),
    ],
)  # fmt: skip
def test_traces_rejects_invalid_arguments(arguments, text, refused):
    with refused(DeclarationError, text):
        Traces(**{"preprocess": OF_LOSS, "access": LOSS, **arguments})


def test_a_trace_must_be_a_single_array(refused):
    with refused(
        DeclarationError,
        "The trace `both` is a tuple; a trace must be a number or an array.\n  fix:   write one trace per part",
    ):
        testlearner(Traces({"both": lambda learner: (1, 2)}, access={}))


# --- LogTraces --------------------------------------------------------------------------------------------------------


@FUSING
def test_traces_are_logged_per_step_of_training_and_per_epoch_of_validation(steps_per_call):
    both = Traces({**OF_LOSS, "pair": lambda learner: jnp.stack([learner.step.loss, 0.0])}, access=LOSS)
    learner = testlearner(LogTraces(), Monitors(), both, steps_per_call=steps_per_call)
    learner.fit(2)
    hub, traces = learner.cbstate["monitors"], learner.cbstate["traces"]
    assert history(learner, "training/traces/square") == [(s, float(v)) for s, v in traces["training"]["square"]]
    of_validation = [float(value) for _, value in traces["validation"]["square"]]
    assert history(learner, "validation/traces/square") == [(4, of_validation[1]), (8, of_validation[3])]
    assert hub.latest("training/traces/pair").counts.sum() == 2  # a histogram


def test_traces_can_be_logged_with_a_period():
    learner = testlearner(Traces(OF_LOSS, TrainingPhase, access=LOSS), every(LogTraces(), steps=3), Monitors())
    learner.fit(2)
    assert [step for step, _ in history(learner, "training/traces/square")] == [3, 6]


def test_log_traces_names_the_missing_callback():
    with pytest.raises(
        MissingStateError, match=r"`cbstate.traces`, which no callback creates(.*\n)*.*add `Traces\(\)`"
    ):
        testlearner(LogTraces(), Monitors())
