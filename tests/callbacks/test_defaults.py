import itertools
import json
import re

import pytest

import fluxcb
from fluxcb import DeclarationError, every, in_order
from fluxcb._declare.state import PROVIDERS
from fluxcb.callbacks import (
    AccumulateGradients,
    DynamicLossScale,
    FitSummary,
    LogMetrics,
    LossSpikeGuard,
    Metrics,
    MetricsPrinter,
    Monitors,
    ParameterEMA,
    ProgressBar,
    Recorder,
    SkipNonFinite,
    StochasticWeightAveraging,
    StopOnNaNLoss,
    accuracy,
    default_callbacks,
    with_defaults,
)
from fluxcb.logging import JSONLinesBackend


class QuietBar(ProgressBar):
    """A subclass replaces the default."""


def test_defaults_are_new_instances():
    first, second = default_callbacks(), default_callbacks()
    assert [type(c) for c in first] == [Metrics, Recorder, ProgressBar, MetricsPrinter, StopOnNaNLoss, FitSummary]
    assert not {id(c) for c in first} & {id(c) for c in second}


def test_missing_defaults_are_appended():
    given = [every(MetricsPrinter(), epochs=2), in_order(QuietBar(), Metrics(accuracy)), ParameterEMA()]
    added = with_defaults(given)
    assert added[:3] == given
    assert [type(c) for c in added[3:]] == [Recorder, StopOnNaNLoss, FitSummary]
    assert [type(c) for c in with_defaults([])] == [type(c) for c in default_callbacks()]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([Monitors()], [LogMetrics]),
        ([in_order(Monitors(), Recorder())], [LogMetrics]),
        ([Monitors(), every(LogMetrics(steps=False), epochs=2)], []),
        ([], []),
    ],
)
def test_a_log_has_the_metrics_by_default(given, added):
    logs = [c for c in with_defaults(given) if isinstance(c, LogMetrics)]
    assert [type(c) for c in logs if c not in given] == added
    fluxcb.check(given)


def test_monitors_alone_log_the_metrics(build, tmp_path):
    learner = build([Monitors(JSONLinesBackend(tmp_path / "log.jsonl"))], default_callbacks=True)
    learner.fit(1)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    metrics = learner.cbstate["metrics_epoch"]["training"]
    assert [set(record) - {"step", "epoch", "time"} for record in records] == [
        *[{"training/step/loss"}] * (len(records) - 1),
        {"training/step/loss", "training/loss"},
    ]
    assert records[-1]["training/loss"] == metrics.last("loss")


def test_an_empty_log_is_a_warning(build, tmp_path):
    backend = JSONLinesBackend(tmp_path / "log.jsonl")
    text = (
        f"Monitors({backend!r}) has backends, but no callback logs anything, so the log will be empty. "
        "Add `LogMetrics()` to the callbacks."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as caught:
        learner = build([Metrics(), Monitors(backend)])
    assert len(caught) == 1
    learner.callbacks.add(LogMetrics())  # the fix, without a warning
    build([Metrics(), Monitors()])  # without a backend, there is no log


@pytest.mark.parametrize("bad", [3, "Recorder", Recorder, Recorder(), None])
def test_an_argument_that_is_not_a_list_is_returned_unchanged(bad):
    assert with_defaults(bad) is bad
    with pytest.raises(
        DeclarationError, match=r"`callbacks` must be a list of callback instances|not a callback instance"
    ):
        fluxcb.check(bad)


def test_a_list_with_other_objects_is_returned_unchanged():
    assert with_defaults([Recorder, 3]) == [Recorder, 3]
    with pytest.raises(
        DeclarationError, match="The callbacks list contains the class `Recorder`, which is not a callback"
    ):
        fluxcb.check([Recorder])


def test_the_default_callbacks_end_windows_only_at_fetches(build):
    learner = build([], default_callbacks=True)
    learner.fit(1)
    plan = learner._core.engine.step_loop(learner.phases[0]).runner.plan
    assert [(bound.call.handler.name, bound.blocks) for bound in plan.bounds] == [("fetch_step_values", False)]
    assert (list(plan.fetch.each), list(plan.fetch.last)) == ([("step", "loss")], [])
    # The header of the table is printed first, and the summary last.
    printing = ["MetricsPrinter()", "ProgressBar()", "FitSummary()"]
    assert set(learner.graph.edges) == set(itertools.combinations(printing, 2))
    assert len(learner._state.train.carry["cbstate"]) == 1


def test_messages_name_the_providers_of_shared_state(build):
    callbacks = [
        Metrics(),
        Recorder(),
        ParameterEMA(),
        StochasticWeightAveraging(1, validate=False),
        AccumulateGradients(2),
        SkipNonFinite(),
        DynamicLossScale(),
        LossSpikeGuard(),
    ]
    learner = build(callbacks)
    made = {type(callback).__name__ for callback in callbacks}
    assert set(learner.cbstate) == {name for name, provider in PROVIDERS.items() if provider in made}
    for callback in callbacks:
        names = callback.stateaccess()["cbstate"]
        assert {PROVIDERS[name] for name in names} == {type(callback).__name__}
