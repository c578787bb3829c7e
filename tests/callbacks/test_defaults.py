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
    """A subclass takes the default's place."""


def test_defaults_are_new_instances():
    first, second = default_callbacks(), default_callbacks()
    assert [type(c) for c in first] == [Metrics, Recorder, ProgressBar, MetricsPrinter, StopOnNaNLoss, FitSummary]
    assert not {id(c) for c in first} & {id(c) for c in second}


def test_defaults_are_added_behind_and_only_where_missing():
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


def test_one_line_logs_the_metrics(build, tmp_path):
    learner = build([Monitors(JSONLinesBackend(tmp_path / "log.jsonl"))], default_callbacks=True)
    learner.fit(1)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    metrics = learner.cbstate["metrics_epoch"]["training"]
    assert [set(record) - {"step", "epoch", "time"} for record in records] == [
        *[{"training/step/loss"}] * (len(records) - 1),
        {"training/step/loss", "training/loss"},
    ]
    assert records[-1]["training/loss"] == metrics.last("loss")


def test_a_log_that_would_be_empty_is_a_warning(build, tmp_path):
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
def test_what_is_no_list_comes_back_for_the_check_to_report(bad):
    assert with_defaults(bad) is bad
    with pytest.raises(
        DeclarationError, match=r"`callbacks` must be a list of callback instances|no callback instance"
    ):
        fluxcb.check(bad)


def test_what_is_no_callback_comes_back_for_the_check_to_report():
    assert with_defaults([Recorder, 3]) == [Recorder, 3]
    with pytest.raises(DeclarationError, match=r"The callbacks list contains .*Recorder'>, which is no callback"):
        fluxcb.check([Recorder])


def test_the_default_set_bounds_windows_at_fetches_only(build):
    learner = build([], default_callbacks=True)
    learner.fit(1)
    plan = learner._parts.engine.steps(learner.phases[0]).caller.plan
    assert [(bound.call.handler.name, bound.blocks) for bound in plan.bounds] == [("fetch_step_values", False)]
    assert (list(plan.fetch.each), list(plan.fetch.last)) == ([("step", "loss")], [])
    # The summary is printed last.
    assert set(learner.graph.edges) == {("MetricsPrinter()", "FitSummary()"), ("ProgressBar()", "FitSummary()")}
    assert len(learner._state.carry["cbstate"]) == 1


def test_shared_state_has_the_providers_that_messages_name(build):
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
