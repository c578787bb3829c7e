"""Callbacks can declare parts of hubs: one name of the monitors, one phase of the history, or one metric."""

import numpy as np
import pytest

import fluxcb
from fluxcb import AccessError, Append, ConflictError, MissingStateError, Read, Write
from fluxcb.callbacks import CustomCallback, InferenceRunner, LogMetrics, Metrics, Monitors, Recorder, ScalarStats
from fluxcb.events import EpochBegin, EpochEnd, StepEnd, Trigger
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

DATA = [(np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))]


def doing(function, event, hub, part, *, phase=TrainingPhase, name="own"):
    """Return a callback that calls a function with one hub, of which it declares a part."""
    return CustomCallback(
        lambda learner: function(learner.cbstate[hub], learner.progress),
        event,
        phase,
        access={"cbstate": {hub: part}},
        name=name,
    )


def fitted(*callbacks):
    learner = testlearner(*callbacks)
    learner.fit(2)
    return learner.cbstate


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (lambda hub: hub.losss, "`learner.cbstate.monitors` has no `losss`. Did you mean `loss`?"),
        (lambda hub: hub.put_scaler, "`learner.cbstate.monitors` has no `put_scaler`. Did you mean `put_scalar`?"),
        (lambda hub: hub.x, "`learner.cbstate.monitors` has no `x`."),
        (
            lambda hub: hub["loss"].put_scaler,
            "`learner.cbstate.monitors['loss']` has no `put_scaler`. Did you mean `put_scalar`?",
        ),
    ],
    ids=["name", "method", "other", "named"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["handler", "outside"])
def test_missing_monitor_names_raise(look, text, inside):
    seen = []

    def use(hub, progress):
        hub.put_scalar("loss", 1.0)
        if inside:
            with pytest.raises(AttributeError) as raised:
                look(hub)
            seen.append(raised.value)

    cbstate = fitted(Monitors(), doing(use, EpochEnd, "monitors", Append()))
    if not inside:
        with pytest.raises(AttributeError) as raised:
            look(cbstate["monitors"])
        seen.append(raised.value)
    assert {str(error) for error in seen} == {text}


# --- monitors ---------------------------------------------------------------------------------------------------------

PUTS = {
    "its method": lambda name: lambda hub, progress: hub[name].put_scalar(progress.step),
    "the method of the hub": lambda name: lambda hub, progress: hub.put_scalar(name, progress.step),
}


@pytest.mark.parametrize("permission", [Append(), Write()], ids=str)
@pytest.mark.parametrize("name", ["val_loss", "validation/loss", "class", "1 x 1"])
@pytest.mark.parametrize("way", PUTS)
def test_declared_name_can_be_logged(way, name, permission):
    own = doing(PUTS[way](name), EpochEnd, "monitors", {name: permission})
    assert fitted(own, Monitors())["monitors"].history(name) == [(4, 4.0), (8, 8.0)]


def test_other_kinds_of_values_under_declared_name():
    def put(hub, progress):
        hub.text.put_text("a text")
        hub.put_histogram("histogram", np.arange(4.0), bins=2)
        hub.image.put_image(np.zeros((2, 2, 1), np.float32))
        hub.value.put(fluxcb.logging.Value(3))

    names = ("text", "histogram", "image", "value")
    hub = fitted(doing(put, EpochEnd, "monitors", dict.fromkeys(names, Append())), Monitors())["monitors"]
    assert hub.names() == list(names)
    assert (hub.latest("text").data, hub.latest("value")) == ("a text", 3.0)
    assert hub.latest("histogram").counts.tolist() == [2, 2]


def test_logged_values_of_declared_name_can_be_read():
    seen = []

    def read(hub, progress):
        seen.append((hub.loss.latest(), hub.latest("loss"), hub.history("loss"), "loss" in hub, list(hub)))

    reader = doing(read, EpochEnd, "monitors", {"loss": Read()})
    writer = doing(PUTS["its method"]("loss"), EpochEnd, "monitors", {"loss": Append()}, name="writer")
    fitted(reader, writer, Monitors())  # the writer runs first, because the reader names what it writes
    assert seen == [(4.0, 4.0, [(4, 4.0)], True, ["loss"]), (8.0, 8.0, [(4, 4.0), (8, 8.0)], True, ["loss"])]


WHY = "  why:   declared access determines order, conflicts and device-to-host transfers\n"
OWN = "CustomCallback(own, EpochEnd, TrainingPhase)"


@pytest.fixture
def where():
    """Return where CustomCallback declares its access, which does not matter here."""
    return fluxcb._declare.dispatch.source_of(CustomCallback.stateaccess)


@pytest.mark.parametrize(
    ("use", "permission", "text"),
    [
        (
            lambda hub, _: hub.put_scalar("other", 1),
            Append(),
            "{own} may not append to `cbstate.monitors.other`: its argument `access` does not declare it.\n{where}{why}"
            '  fix:   add `{{"cbstate": {{"monitors": {{"other": Append()}}}}}}` '
            "to the argument `access`: `CustomCallback(fn, EpochEnd, TrainingPhase, access={{...}})`",
        ),
        (
            lambda hub, _: hub["lose"].put_scalar(1),
            Append(),
            "{own} may not append to `cbstate.monitors.lose`: its argument `access` does not declare it."
            " Did you mean `loss`?\n{where}{why}"
            "  fix:   write `learner.cbstate.monitors.loss` instead of `learner.cbstate.monitors.lose`\n"
            '     or: add `{{"cbstate": {{"monitors": {{"lose": Append()}}}}}}` '
            "to the argument `access`: `CustomCallback(fn, EpochEnd, TrainingPhase, access={{...}})`",
        ),
        (
            lambda hub, _: hub.latest("other"),
            Read(),
            "{own} may not read `cbstate.monitors.other`: its argument `access` does not declare it.\n{where}{why}"
            '  fix:   add `{{"cbstate": {{"monitors": {{"other": Read()}}}}}}` '
            "to the argument `access`: `CustomCallback(fn, EpochEnd, TrainingPhase, access={{...}})`",
        ),
        (
            lambda hub, _: hub.names(),
            Append(),
            "{own} uses `cbstate.monitors.names`, and its argument `access` declares only parts of "
            "`cbstate.monitors`.\n{where}{why}"
            "  fix:   use a declared part: `learner.cbstate.monitors['loss']`\n"
            '     or: declare the whole: add `{{"cbstate": {{"monitors": Append()}}}}` '
            "to the argument `access`: `CustomCallback(fn, EpochEnd, TrainingPhase, access={{...}})`",
        ),
        (
            lambda hub, _: hub.put_scalar("loss", 1),
            Read(),
            "{own} declares only to read `cbstate.monitors.loss`, but writes to it.\n{where}"
            "  why:   declared access determines order and conflicts\n"
            '  fix:   add `{{"cbstate": {{"monitors": {{"loss": Write()}}}}}}` '
            "to the argument `access`: `CustomCallback(fn, EpochEnd, TrainingPhase, access={{...}})`",
        ),
        (
            lambda hub, _: setattr(hub, "loss", 1),
            Write(),
            "{own} assigns `cbstate.monitors.loss`, a part of a MonitorHub.\n{where}"
            "  why:   the assignment would not reach the object that other callbacks read\n"
            '  fix:   write `learner.cbstate.monitors.put_scalar("loss", value)`',
        ),
    ],
)
def test_access_outside_declared_part_raises(use, permission, text, where, refused):
    writer = doing(lambda hub, _: hub.put_scalar("loss", 1), StepEnd, "monitors", {"loss": Append()}, name="writer")
    writers = [writer] if isinstance(permission, Read) else []  # two callbacks must not log one name
    learner = testlearner(doing(use, EpochEnd, "monitors", {"loss": permission}), *writers, Monitors())
    place = f"  where: CustomCallback.stateaccess  {where}\n"
    with refused(AccessError, text.format(own=OWN, where=place, why=WHY)):
        learner.fit(1)


def test_name_without_monitors_or_logger_raises(where, refused):
    place = f"  where: CustomCallback.stateaccess  {where}\n"
    puts = doing(lambda hub, _: hub.loss.put_scalar(1), EpochEnd, "monitors", {"loss": Append()})
    with refused(
        MissingStateError,
        f"{OWN} appends to `cbstate.monitors.loss`, which no callback creates.\n{place}"
        "  why:   it would fail at the first handler that appends to it\n"
        "  fix:   add `Monitors()` to the callbacks, which creates it",
    ):
        fluxcb.check([puts])
    fluxcb.check([puts, Monitors()])
    reads = doing(lambda hub, _: None, EpochEnd, "monitors", {"lss": Read()})
    with refused(
        MissingStateError,
        f"{OWN} reads `cbstate.monitors.lss`, but no callback declares a write to it. Did you mean `loss`?\n{place}"
        "  why:   `Append()` on the whole of `cbstate.monitors` does not declare which names it adds\n"
        "  fix:   declare `Append()` on `cbstate.monitors.lss` in the callback that writes it\n"
        "     or: declare `Read()` on `cbstate.monitors`, which runs after all callbacks that write to it",
    ):
        fluxcb.check([reads, puts, LogMetrics(), Monitors()])
    whole = doing(lambda hub, _: None, EpochEnd, "monitors", Read())
    order = fluxcb.check([whole, puts, LogMetrics(), Monitors()]).order(EpochEnd, TrainingPhase)
    assert order.index(whole) > order.index(puts)


def test_callbacks_with_different_names_are_independent():
    one = doing(lambda hub, _: hub.a.put_scalar(1), EpochEnd, "monitors", {"a": Write()})
    other = doing(lambda hub, _: hub.b.put_scalar(1), EpochEnd, "monitors", {"b": Write()}, name="other")
    same = doing(lambda hub, _: hub.a.put_scalar(1), EpochEnd, "monitors", {"a": Write()}, name="same")
    assert not {(0, 1), (1, 0)} & fluxcb.check([one, other, Monitors()], default_callbacks=False).edges.keys()
    with pytest.raises(ConflictError, match=r"both write `cbstate\.monitors\.a`"):
        fluxcb.check([one, same, Monitors()], default_callbacks=False)


# --- kept by phase ----------------------------------------------------------------------------------------------------


def test_history_of_one_phase():
    seen = []

    def read(history, progress):
        seen.append((history.training.steps, history[TrainingPhase].steps, history["training"].epochs, list(history)))

    fitted(doing(read, Trigger, "history", {"training": Read()}), Recorder())
    assert seen == [(4, 4, 1, ["training"]), (8, 8, 2, ["training"])]


@pytest.mark.parametrize("event", [EpochBegin, StepEnd])
def test_phase_that_has_not_run_has_zero_counts(event):
    seen = []
    fitted(
        doing(lambda history, _: seen.append(history.validation.steps), event, "history", {"validation": Read()}),
        Recorder(),
    )
    assert seen == ([0, 2] if event is EpochBegin else [0] * 4 + [2] * 4)


def test_single_count_of_phase_can_be_set():
    def back(history, progress):
        history.training.samples = 0

    for part in ({"training": Write()}, {"training": {"samples": Write()}}):
        shared = fitted(doing(back, Trigger, "history", part), Recorder())
        assert (shared["history"]["training"].samples, shared["history"]["training"].steps) == (0, 8)


@pytest.mark.parametrize(
    "use",
    [
        lambda history: history.validation,
        lambda history: history["validation"],
        lambda history: history[ValidationPhase],
        lambda history: history[ValidationPhase()],
    ],
)
def test_other_phase_raises(use, where, refused):
    own = doing(lambda history, _: use(history), EpochEnd, "history", {"training": Read()})
    with refused(
        AccessError,
        f"{OWN} may not read `cbstate.history.validation`: its argument `access` does not declare it.\n"
        f"  where: CustomCallback.stateaccess  {where}\n{WHY}"
        '  fix:   add `{"cbstate": {"history": {"validation": Read()}}}` '
        "to the argument `access`: `CustomCallback(fn, EpochEnd, TrainingPhase, access={...})`",
    ):
        fitted(own, Recorder())


def test_metrics_of_one_phase_and_single_metric():
    seen = []

    def of_phase(metrics, progress):
        seen.append((metrics.validation.last("loss"), metrics[ValidationPhase]["loss"]))

    def of_metric(metrics, progress):
        seen.append(list(metrics.validation.loss))

    values = fitted(doing(of_phase, Trigger, "metrics_epoch", {"validation": Read()}), Metrics())
    pairs = values["metrics_epoch"]["validation"]["loss"]
    assert [last for last, _ in seen] == [value for _, value in pairs]
    assert len(pairs) == 2
    seen.clear()
    fitted(doing(of_metric, Trigger, "metrics_epoch", {"validation": {"loss": Read()}}), Metrics())
    assert [found[-1] for found in seen] == pairs


def test_metric_without_value_raises_on_read(where, refused):
    asked = []
    part = {"validation": {"loss": Read()}}
    fitted(
        doing(lambda metrics, _: asked.append("loss" in metrics.validation), EpochEnd, "metrics_epoch", part), Metrics()
    )
    assert asked == [False, True]  # validation comes after the epoch of training
    with refused(
        MissingStateError,
        f"{OWN} reads `cbstate.metrics_epoch.validation.loss`, which has no value yet.\n"
        f"  where: CustomCallback.stateaccess  {where}\n"
        "  why:   so far, `cbstate.metrics_epoch.validation` has nothing\n"
        '  fix:   check first: `if "loss" in learner.cbstate.metrics_epoch.validation`',
    ):
        fitted(doing(lambda metrics, _: metrics.validation.loss, EpochEnd, "metrics_epoch", part), Metrics())


@pytest.mark.parametrize("permission", [Write(), Append()], ids=str)
@pytest.mark.parametrize("deep", [False, True])
def test_custom_metrics_are_added_to_part(permission, deep):
    def add(metrics, progress):
        if deep:
            metrics.mine.twice.append((progress.epoch, 2.0 * progress.epoch))
        else:
            metrics.mine.add("twice", progress.epoch, 2.0 * progress.epoch)

    part = {"mine": {"twice": permission} if deep else permission}
    learner = testlearner(doing(add, Trigger, "metrics_epoch", part), Metrics())
    learner.fit(2)
    assert learner.cbstate["metrics_epoch"]["mine"]["twice"] == [(1, 2.0), (2, 4.0)]


def test_reader_of_inference_metrics_runs_after_runner():
    seen = []
    reader = doing(lambda metrics, _: seen.append(metrics.test.at(_.epoch)), Trigger, "metrics_epoch", {"test": Read()})
    shared = fitted(reader, InferenceRunner(DATA, ScalarStats("loss"), name="test"), Metrics())
    assert [list(found) for found in seen] == [["loss"], ["loss"]]
    assert [found["loss"] for found in seen] == [value for _, value in shared["metrics_epoch"]["test"]["loss"]]
