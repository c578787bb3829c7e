"""Calls with invalid arguments: each public name explains them, and the traceback ends in the user's line."""

import abc
import copy
import importlib
import inspect
import pickle
import re
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fluxcb
from fluxcb import Callback, DeclarationError, on
from fluxcb.callbacks import (
    Checkpointer,
    ClipGradients,
    EarlyStopping,
    Freeze,
    GradientNoise,
    LogTraces,
    Metrics,
    Monitors,
    Recorder,
    StopAfter,
    accuracy,
)
from fluxcb.data import ArrayLoader
from fluxcb.events import StepEnd
from fluxcb.testing import testlearner

MODULES = [
    "fluxcb",
    *(f"fluxcb.{name}" for name in fluxcb.__all__ if inspect.ismodule(getattr(fluxcb, name))),
]
EXEMPT = {
    "fluxcb.At",  # is not called: `At[StepEnd, TrainingPhase]`
    "fluxcb.LearnerView",  # a type for annotations; only fluxcb makes instances
    "fluxcb.phases.StepLearner",
    "fluxcb.callbacks.accuracy",  # fluxcb calls it
    "fluxcb.models.ModelAdapter",  # a protocol
}


def public() -> dict[str, Any]:
    found = {}
    for module in MODULES:
        imported = importlib.import_module(module)
        for name in imported.__all__:
            value = getattr(imported, name)
            is_error = isinstance(value, type) and issubclass(value, BaseException)
            if callable(value) and not is_error and f"{module}.{name}" not in EXEMPT:
                found[f"{module}.{name}"] = value
    return found


PUBLIC = public()


def raised(function: Any) -> DeclarationError:
    """Return the error of a call, and fail if its traceback has a frame outside of this file."""
    with pytest.raises(DeclarationError) as caught:
        function()
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}
    assert caught.value.__context__ is None
    return caught.value


def takes_any_keyword(function: Any) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", [name for name in PUBLIC if not takes_any_keyword(PUBLIC[name])])
def test_wrong_keyword_of_each_public_name_raises(name):
    error = raised(lambda: PUBLIC[name](zzz=1))
    assert error.what == f"`{PUBLIC[name].__name__}` has no argument `zzz`."
    assert error.fix[0].startswith("leave out `zzz=...`")


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    learner = testlearner(Metrics())
    return {
        "Learner": learner,
        "CallbackSet": learner.callbacks,
        "History": learner.history,
        "ArrayLoader": ArrayLoader(np.arange(4), batch_size=2),
    }


@pytest.mark.parametrize("kind", ["Learner", "CallbackSet", "History", "ArrayLoader"])
def test_wrong_keyword_of_each_public_method_raises(kind, objects):
    names = [
        name
        for cls in type(objects[kind]).__mro__
        if cls.__module__.startswith("fluxcb")
        for name, value in vars(cls).items()
        if not name.startswith("_") and not isinstance(value, property) and callable(getattr(cls, name))
    ]
    assert len(names) >= 2
    for name in names:
        error = raised(lambda name=name: getattr(objects[kind], name)(zzz=1))
        assert error.what == f"`{kind}.{name}` has no argument `zzz`."


MESSAGES = [
    (
        lambda: Recorder(lr=2),
        "`Recorder` has no argument `lr`.\n  why:   it takes no arguments\n  fix:   leave out `lr=...`",
        Recorder,
    ),
    (
        lambda: GradientNoise(decay=0.5),
        "`GradientNoise` has no argument `decay`.\n"
        "  why:   it takes eta, gamma\n"
        "  fix:   leave out `decay=...`, and pass `eta`",
        lambda: GradientNoise(eta=0.1),
    ),
    (
        lambda: Metrics(accuracy=accuracy),
        "`Metrics` has no argument `accuracy`.\n"
        "  why:   it takes *metrics\n"
        "  fix:   pass the value by position, without `accuracy=`",
        lambda: Metrics(accuracy),
    ),
    (
        lambda: StopAfter(steps=100),
        "`StopAfter` has no argument `steps`.\n"
        "  why:   it takes seconds\n"
        "  fix:   for a number of steps, write `learner.fit(steps=...)`; `StopAfter` takes `seconds`",
        lambda: StopAfter(seconds=60),
    ),
    (
        lambda: ClipGradients(value=1.0),
        "`ClipGradients` has no argument `value`.\n"
        "  why:   it takes max_norm\n"
        "  fix:   write `max_norm=...` to limit the norm of all gradients; to limit each element, chain "
        "`optax.clip(value)` with the optimizer",
        lambda: ClipGradients(max_norm=1.0),
    ),
    (
        lambda: StopAfter(60, min_delta=0.01),
        "`StopAfter` has no argument `min_delta`.\n  why:   it takes seconds\n  fix:   leave out `min_delta=...`",
        lambda: StopAfter(60),
    ),
    (
        lambda: LogTraces(3),
        "`LogTraces` takes no arguments by position, and was given 1.\n"
        "  why:   it takes no arguments\n"
        "  fix:   write `LogTraces()`",
        LogTraces,
    ),
    (
        lambda: fluxcb.EverySteps(stps=3),
        "`EverySteps` has no argument `stps`.\n"
        "  why:   it takes steps\n"
        "  fix:   write `steps=...` instead of `stps=...`",
        lambda: fluxcb.EverySteps(steps=3),
    ),
    (
        lambda: fluxcb.inject(),
        "`inject` was not given `factory`.\n"
        "  why:   it takes factory, **arguments\n"
        "  fix:   pass an optimizer of optax first: `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
        lambda: None,
    ),
    (
        lambda: testlearner(Metrics()).evaluate(metric=1),
        "`Learner.evaluate` has no argument `metric`.\n"
        "  why:   it takes data, metrics, phase, batch_size, average\n"
        "  fix:   write `metrics=...` instead of `metric=...`",
        lambda: None,
    ),
    (
        lambda: testlearner(Metrics()).predict(),
        "`Learner.predict` was not given `data`.\n"
        "  why:   it takes data, batch_size, average\n"
        "  fix:   write `Learner.predict(data)`",
        lambda: None,
    ),
    *(
        (
            call,
            f"`Learner.fit` {problem}.\n"
            "  why:   it takes epochs, steps, steps_per_epoch, resume, allow\n"
            "  fix:   write `learner.fit(10)` to train 10 epochs, or `learner.fit(steps=10)` to train 10 steps",
            lambda: (testlearner().fit(10), testlearner().fit(steps=10)),
        )
        for call, problem in [
            (lambda: testlearner().fit(1, epochs=2), "was given `epochs` twice: by position and by name"),
            (lambda: testlearner().fit(1, 2), "takes 1 argument by position, and was given 2"),
        ]
    ),
    (
        lambda: Checkpointer("runs/1", kep_last=2),
        "`Checkpointer` has no argument `kep_last`.\n"
        "  why:   it takes folder, steps, epochs, seconds, keep_last, keep_best, keep_every, metric, mode\n"
        "  fix:   write `keep_last=...` instead of `kep_last=...`",
        lambda: Checkpointer("runs/1", keep_last=2),
    ),
]


@pytest.mark.parametrize(("call", "text", "fixed"), MESSAGES)
def test_messages(call, text, fixed):
    assert str(raised(call)) == text
    fixed()


NAMES_ELSEWHERE = [
    ("ParameterEMA(momentum=0.9)", "ParameterEMA(decay=0.9)"),
    ("MovingAverage(['step.loss'], momentum=0.9)", "MovingAverage(['step.loss'], decay=0.9)"),
    ("SmoothLoss(momentum=0.9)", "SmoothLoss(beta=0.9)"),
    ("LabelSmoothing(smoothing=0.1)", "LabelSmoothing(alpha=0.1)"),
    ("ClipGradients(max_grad_norm=1)", "ClipGradients(max_norm=1)"),
    ("ClipGradients(global_clipnorm=1)", "ClipGradients(max_norm=1)"),
    ("AccumulateGradients(accumulate_grad_batches=4)", "AccumulateGradients(steps=4)"),
    ("GradientNoise(std=0.1)", "GradientNoise(eta=0.1)"),
    ("DynamicLossScale(init_scale=8.0)", "DynamicLossScale(initial=2.0**15)"),
    ("DynamicLossScale(growth_interval=100)", "DynamicLossScale(period=100)"),
    ("LossSpikeGuard(n_sigma=3)", "LossSpikeGuard(threshold=3)"),
    ("SkipNonFinite(max_consecutive_errors=3)", "SkipNonFinite(limit=3)"),
    ("StochasticWeightAveraging(swa_start=2)", "StochasticWeightAveraging(start=2)"),
    ("EarlyStopping(3, monitor='val_loss')", 'EarlyStopping(3, metric="loss")'),
    ("EarlyStopping(n=3)", "EarlyStopping(patience=3)"),
    ("ReduceLROnPlateau(gamma=0.5)", "ReduceLROnPlateau(factor=0.5)"),
    ("ReduceLROnPlateau(eta_min=0.5)", "ReduceLROnPlateau(min_lr=0.5)"),
    ("onecycle(100, max_lr=1e-3)", "onecycle(100, max_value=0.001)"),
    ("Checkpointer(dirpath='runs')", 'Checkpointer(folder="runs")'),
    ("Checkpointer('runs', every_n_epochs=2)", "Checkpointer('runs', epochs=2)"),
    ("Checkpointer('runs', save_total_limit=2)", "Checkpointer('runs', keep_last=2)"),
    ("ModelSaver('runs', keep_last=2)", "ModelSaver('runs', max_to_keep=2)"),
    ("MinSaver('runs', monitor='val_loss')", "MinSaver('runs', metric=\"loss\")"),
    ("DumpArrays('params', dirpath='runs')", "DumpArrays('params', folder=\"runs\")"),
    ("TensorBoardBackend(log_dir='runs')", 'TensorBoardBackend(folder="runs")'),
    ("LogHistograms(every=10)", "LogHistograms(freq=10)"),
    ("PeriodicTrigger(Checkpointer('runs'), epochs=2)", "PeriodicTrigger(Checkpointer('runs'), every_k_epochs=2)"),
    ("ConfusionMatrix(num_classes=3)", "ConfusionMatrix(classes=3)"),
    ("StopAfter(timeout=60)", "StopAfter(seconds=60)"),
    ("Patience(patience=3)", "Patience(n=3)"),
    ("ArrayLoader(np.arange(4), bs=2)", "ArrayLoader(np.arange(4), batch_size=2)"),
]


@pytest.mark.parametrize(("wrong", "mended"), NAMES_ELSEWHERE)
def test_argument_of_other_library_names_ours(wrong, mended):
    names = {**vars(fluxcb.callbacks), **vars(fluxcb.logging), **vars(fluxcb.stopping), "np": np}
    names["ArrayLoader"] = ArrayLoader
    (ours,), (theirs,) = (re.findall(r"(\w+=)[^=]+\)$", code) for code in (mended, wrong))
    error = raised(lambda: eval(compile(wrong, __file__, "eval"), names))  # noqa: S307 - of this file
    assert error.fix == (f"write `{mended[mended.rindex(ours) : -1]}` instead of `{theirs}...`",)
    eval(mended, names)  # noqa: S307 - of this file


def test_several_values_by_name_are_passed_by_position():
    error = raised(lambda: Freeze(layers="w", epochs=1))
    assert error.fix == ("pass the values by position, without `layers=`",)
    Freeze("w", epochs=1)


# -- classes of users ----------------------------------------------------------------------------


class Plain(Callback):
    def __init__(self, every: int) -> None:
        self.every = every

    @on
    def act(self, event: StepEnd, phase, learner) -> None: ...


@dataclass
class Data(Callback):
    every: int
    offset: int = 0

    @on
    def act(self, event: StepEnd, phase, learner) -> None: ...


class Sub(Plain):
    def __init__(self, evry: int) -> None:
        super().__init__(evry=evry)  # pyright: ignore[reportCallIssue]  # this is the point


class Meta(type):
    pass


class WithMeta(Plain, metaclass=Meta):
    pass


class WithABC(Plain, abc.ABC):
    @abc.abstractmethod
    def period(self) -> int: ...


class New(Callback):
    def __new__(cls, every: int) -> "New":
        made = super().__new__(cls)
        made.every = every
        return made

    @on
    def act(self, event: StepEnd, phase, learner) -> None: ...


@pytest.mark.parametrize("cls", [Plain, Data, WithMeta])
def test_constructor_of_user_class(cls):
    takes = "every, offset" if cls is Data else "every"
    assert str(raised(lambda: cls(evry=3))) == (
        f"`{cls.__name__}` has no argument `evry`.\n"
        f"  why:   it takes {takes}\n"
        "  fix:   write `every=...` instead of `evry=...`"
    )
    assert raised(cls).what == f"`{cls.__name__}` was not given `every`."
    assert cls(every=3).every == 3


def test_the_fix_names_arguments_that_must_be_passed_by_name():
    class Named(Callback):
        def __init__(self, freq, *, path): ...

        @on
        def act(self, event: StepEnd, phase, learner) -> None: ...

    assert str(raised(Named)) == (
        "`Named` was not given `freq` and `path`.\n  why:   it takes freq, path\n  fix:   write `Named(freq, path=...)`"
    )
    Named(10, path="runs")


def test_new_method_of_user_class():
    assert str(raised(lambda: New(evry=3))) == (
        "`New` has no argument `evry`.\n  why:   it takes every\n  fix:   write `every=...` instead of `evry=...`"
    )
    assert raised(New).what == "`New` was not given `every`."
    assert raised(lambda: New(1, 2)).what == "`New` takes 1 argument by position, and was given 2."
    assert New(every=3).every == 3

    class SubOfNew(New):
        def __new__(cls):
            return super().__new__(cls, evry=3)

    assert raised(SubOfNew).what == "`New` has no argument `evry`."


def test_error_names_constructor_that_subclass_calls():
    error = raised(lambda: Sub(3))
    assert error.what == "`Plain` has no argument `evry`."


def test_error_inside_constructor_shows_user_lines():
    class Fails(Callback):
        def __init__(self) -> None:
            raise TypeError("as planned")

    with pytest.raises(TypeError, match=r"^as planned$") as caught:
        Fails()
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["__init__"]


def test_abstract_class_raises_python_error():
    with pytest.raises(
        TypeError, match=r"^Can't instantiate abstract class WithABC with abstract method period$"
    ) as caught:
        WithABC(3)
    assert [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)] == [__file__]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
@pytest.mark.parametrize("made", [Plain(3), Data(3), WithMeta(3)], ids=lambda made: type(made).__name__)
def test_copies(made, copied):
    again = copied(made)
    assert type(again) is type(made)
    assert vars(again) == vars(made)
    assert fields(again) == ({"every": 3, "offset": 0} if isinstance(made, Data) else {"every": 3})


def fields(made):
    return {name: value for name, value in vars(made).items() if not name.startswith("_fluxcb_")}


def test_class_with_own_new():
    assert fields(New(3)) == {"every": 3}


def test_signatures_match_constructors():
    assert str(inspect.signature(Recorder)) == "()"
    assert list(inspect.signature(EarlyStopping).parameters)[:2] == ["criteria", "patience"]
    assert list(inspect.signature(Data).parameters) == ["every", "offset"]
    assert next(iter(inspect.signature(Monitors).parameters)) == "backends"
