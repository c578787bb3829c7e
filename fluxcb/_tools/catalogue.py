"""The callbacks that fluxcb provides, for `fluxcb list` and the table in the docs.

Reads and writes are taken from `stateaccess`, moments from the handlers, and descriptions from the docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import gettempdir
from typing import Any

import fluxcb.callbacks as library
from fluxcb._declare.access import Append, Read, dotted, normalise, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BUILTIN_EVENTS, StepEnd, Trigger
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView

__all__ = ["Listed", "listed"]


def _nothing(learner: LearnerView) -> None:
    """Do nothing. This is the function argument of an example."""


def _example() -> Callback:
    return library.CallbackFactory(trigger=_nothing)


# How to construct the callbacks that require arguments.
_EXAMPLES: dict[str, tuple[str, Callable[[], Callback]]] = {
    "AccumulateGradients": ("AccumulateGradients(4)", lambda: library.AccumulateGradients(4)),
    "Checkpointer": ("Checkpointer(folder)", lambda: library.Checkpointer(gettempdir())),
    "ClipGradients": ("ClipGradients(1.0)", lambda: library.ClipGradients(1.0)),
    "CustomCallback": (
        'CustomCallback(fn, StepEnd, access={"step": {"loss": Read()}})',
        lambda: library.CustomCallback(lambda learner: None, StepEnd, access={"step": {"loss": Read()}}, name="fn"),
    ),
    "DataParallelInferenceRunner": (
        'DataParallelInferenceRunner(data, ScalarStats("loss"))',
        lambda: library.DataParallelInferenceRunner([0], library.ScalarStats("loss")),
    ),
    "GradientNoise": ("GradientNoise(0.3)", lambda: library.GradientNoise(0.3)),
    "InferenceRunner": (
        'InferenceRunner(data, ScalarStats("loss"))',
        lambda: library.InferenceRunner([0], library.ScalarStats("loss")),
    ),
    "MaxSaver": ('MaxSaver(folder, "accuracy")', lambda: library.MaxSaver(gettempdir(), "accuracy")),
    "MinSaver": ("MinSaver(folder)", lambda: library.MinSaver(gettempdir())),
    "ModelSaver": ("ModelSaver(folder)", lambda: library.ModelSaver(gettempdir())),
    "Metrics": ("Metrics(accuracy)", lambda: library.Metrics(library.accuracy)),
    "Scheduler": ("Scheduler({LearningRate: schedule})", lambda: library.Scheduler({library.LearningRate: abs})),
    "EarlyStopping": ("EarlyStopping(3)", lambda: library.EarlyStopping(3)),
    "ControlFile": ('ControlFile("runs/1")', lambda: library.ControlFile("runs/1")),
    "StopAfter": ("StopAfter(seconds=3600)", lambda: library.StopAfter(3600)),
    "StochasticWeightAveraging": (
        "StochasticWeightAveraging(start=1000)",
        lambda: library.StochasticWeightAveraging(1000),
    ),
    "Freeze": ('Freeze("encoder")', lambda: library.Freeze("encoder")),
    "HumanHyperParamSetter": (
        "HumanHyperParamSetter(LearningRate)",
        lambda: library.HumanHyperParamSetter(library.LearningRate),
    ),
    "HyperParamSetter": ("HyperParamSetter(LearningRate)", lambda: library.HyperParamSetter(library.LearningRate)),
    "HyperParamSetterWithFunc": (
        "HyperParamSetterWithFunc(LearningRate, func)",
        lambda: library.HyperParamSetterWithFunc(library.LearningRate, lambda epoch, current: None),
    ),
    "ScheduledHyperParamSetter": (
        "ScheduledHyperParamSetter(LearningRate, [(30, 0.01)])",
        lambda: library.ScheduledHyperParamSetter(library.LearningRate, [(30, 0.01)]),
    ),
    "StatMonitorParamSetter": (
        'StatMonitorParamSetter(LearningRate, "loss", func, 0.01, 5)',
        lambda: library.StatMonitorParamSetter(library.LearningRate, "loss", abs, 0.01, 5),
    ),
    "Profiler": ('Profiler("profile", steps=(100, 120))', lambda: library.Profiler("profile", steps=(100, 120))),
    "SendMonitorData": ('SendMonitorData(url, "loss")', lambda: library.SendMonitorData(print, "loss")),
    "SendStat": (
        'SendStat(["notify-send", "{loss:.3f}"], "loss")',
        lambda: library.SendStat(["notify-send", "{loss:.3f}"], "loss"),
    ),
    "StepTimeout": ("StepTimeout(60)", lambda: library.StepTimeout(60)),
    "DumpArrays": ('DumpArrays("step.outputs", folder)', lambda: library.DumpArrays("step.outputs", gettempdir())),
    "DumpImages": ('DumpImages("params.conv", folder)', lambda: library.DumpImages("params.conv", gettempdir())),
    "LogSummaries": (
        'LogSummaries("step.loss", period=100)',
        lambda: library.LogSummaries("step.loss", period=100),
    ),
    "LogVisualization": (
        'LogVisualization(fn, "step.outputs")',
        lambda: library.LogVisualization(abs, "step.outputs"),
    ),
    "MovingAverage": ('MovingAverage("step.loss")', lambda: library.MovingAverage("step.loss")),
    "PrintArrays": ('PrintArrays("step.loss")', lambda: library.PrintArrays("step.loss")),
    "ProcessArrays": ('ProcessArrays("step.loss", fn)', lambda: library.ProcessArrays("step.loss", abs)),
    "SimpleMovingAverage": (
        'SimpleMovingAverage("step.loss", 100)',
        lambda: library.SimpleMovingAverage("step.loss", 100),
    ),
    "Traces": (
        'Traces({"norm": fn}, access={"step": {"grads": Read()}})',
        lambda: library.Traces({"norm": _nothing}, access={"step": {"grads": Read()}}),
    ),
    "ToDevice": ("ToDevice(device)", lambda: library.ToDevice(None)),
    "CallbackFactory": ("CallbackFactory(trigger=fn)", lambda: library.CallbackFactory(trigger=_nothing)),
    "ConditionalCallback": (
        "ConditionalCallback(callback, FrequencyThrottle(10, Trigger))",
        lambda: library.ConditionalCallback(_example(), library.FrequencyThrottle(10, Trigger)),
    ),
    "EnableCallbackIf": (
        "EnableCallbackIf(callback, pred)",
        lambda: library.EnableCallbackIf(_example(), lambda learner: True),
    ),
    "HookToCallback": ("HookToCallback(hook)", lambda: library.HookToCallback(_nothing)),
    "PeriodicCallback": (
        "PeriodicCallback(callback, every_k_epochs=5)",
        lambda: library.PeriodicCallback(_example(), every_k_epochs=5),
    ),
    "PeriodicTrigger": (
        "PeriodicTrigger(callback, every_k_steps=500)",
        lambda: library.PeriodicTrigger(_example(), every_k_steps=500),
    ),
    "ProxyCallback": ("ProxyCallback(callback)", lambda: library.ProxyCallback(_example())),
    "RunFunction": ("RunFunction(fn)", lambda: library.RunFunction(_nothing)),
    "StartProcOrThread": ("StartProcOrThread(make)", lambda: library.StartProcOrThread(lambda: None)),
}


@dataclass(frozen=True)
class Listed:
    """A callback of the library.

    Attributes:
        name: Name of the class.
        shown: A call that constructs it.
        what: What it does, in one sentence.
        reads: Paths that it reads.
        writes: Paths that it writes. Paths that it appends to are marked.
        runs: Event and phase of its handlers, host or traced, with schedules.
        cost: Its cost.
        origin: Its source: a paper or another library.
    """

    name: str
    shown: str
    what: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    runs: tuple[str, ...]
    cost: str
    origin: str


def listed() -> list[Listed]:
    """Return the public callbacks, by name."""
    found = ((name, getattr(library, name)) for name in library.__all__)
    return [_listed(name, cls) for name, cls in found if isinstance(cls, type) and issubclass(cls, Callback)]


def _listed(name: str, cls: Callable[[], Callback]) -> Listed:
    shown, make = _EXAMPLES.get(name, (f"{name}()", cls))
    callback = make()
    access = normalise(callback.stateaccess(), owner=name, where="")
    return Listed(
        name,
        shown,
        inspect.cleandoc(cls.__doc__ or "").splitlines()[0],
        tuple(dotted(path) for path, permission in access.items() if not writes(permission)),
        tuple(
            f"{dotted(path)} (appends)" if isinstance(permission, Append) else dotted(path)
            for path, permission in access.items()
            if writes(permission)
        ),
        runs_of(callback),
        _section(cls, "Cost"),
        _section(cls, "Source"),
    )


def _section(cls: Any, title: str) -> str:
    """Return a section of a class's docstring as one line."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", inspect.cleandoc(cls.__doc__ or "") + "\n", re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def runs_of(callback: Callback) -> tuple[str, ...]:
    """Return the events and phases of a callback's handlers, grouped if they differ only in the event."""
    position = {event: i for i, event in enumerate(BUILTIN_EVENTS)}
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in sorted(callback.handlers(), key=lambda e: position.get(e.event, -1)):
        groups.setdefault((entry.phase.__name__, _how(entry)), []).append(entry.event.__name__)
    return tuple(f"{', '.join(events)} x {phase} ({kind})" for (phase, kind), events in groups.items())


def _how(handler: Handler) -> str:
    """Return whether a handler is traced, and its schedules."""
    due = [str(schedule) for schedule in handler.schedules(handler.event, handler.phase)]
    return ", ".join(["traced" if handler.traced else "host", *due])
