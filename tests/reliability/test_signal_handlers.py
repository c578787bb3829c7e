"""Exceptions in the user's signal handlers reach the caller of `fit` from anywhere in the training."""

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, CancelEpoch, CancelFitting, on
from fluxcb._run import batch_stream, program_runner, programs, stacker, step_loop, window
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

STEPS = 12
FILES = frozenset(module.__file__ for module in (program_runner, batch_stream, programs, stacker, step_loop, window))
"""The files with the step loop."""


class AlarmError(Exception):
    pass


class AlarmTypeError(TypeError):
    """An error of a class that the step loop catches, because JAX raises it for a batch of another shape."""


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, before)


def a_function(kind: type[Exception]) -> Callable[[int, Any], None]:
    def handle(number: int, frame: Any) -> None:
        raise kind("from the handler")

    return handle


def a_function_that_removes_itself(kind: type[Exception]) -> Callable[[int, Any], None]:
    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise kind("from the handler")

    return handle


class Handler:
    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def method(self, number: int, frame: Any) -> None:
        raise self.kind("from the handler")

    def __call__(self, number: int, frame: Any) -> None:
        self.method(number, frame)


def a_method(kind: type[Exception]) -> Callable[[int, Any], None]:
    return Handler(kind).method


def a_partial(kind: type[Exception]) -> Callable[[int, Any], None]:
    return functools.partial(Handler.method, Handler(kind))


HANDLERS = [a_function, a_method, a_partial, Handler]


def batches(count: int = STEPS) -> list[Any]:
    return [(np.full((2, 1), i / 50, np.float32), np.full((2, 1), i / 60, np.float32)) for i in range(count)]


@contextmanager
def raised_by_handler(kind: type[Exception]) -> Iterator[None]:
    with pytest.raises(kind) as raised:
        yield
    assert raised.value.args == ("from the handler",)


# -- at every line of the step loop ------------------------------------------------------------------


@contextmanager
def signal_at_line(number: int | None) -> Iterator[list[int]]:
    """Send the signal before the `number`-th executed line of the step loop, and count the lines."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def with_own_exception_state(call: Callable[[], Any]) -> Iterator[Any]:
    """Yield the result of a call without changing `sys.exception()` of this thread.

    CPython 3.11 to 3.13 do not restore `sys.exception()` when a trace function raises at the first line of an `except`
    block: all later exceptions of the thread, including those of other tests, would have the handled one as context. A
    generator has its own exception state, which ends with the generator.
    """
    yield call()


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("kind", [AlarmError, AlarmTypeError])
def test_exception_at_any_line_of_step_loop_reaches_caller(
    no_clock: None, steps_per_call: int, kind: type[Exception]
) -> None:
    learner = testlearner(data=(batches(), None), steps_per_call=steps_per_call)
    learner.fit(2)  # from now on all programs are known
    first = learner.state
    with signal_at_line(None) as lines:
        learner.fit(1)
    signal.signal(signal.SIGUSR1, a_function(kind))
    lost, tried = [], 0
    for number in range(1, lines[0] + 1):
        if learner.step is None or not alive(learner):
            learner = testlearner(data=(batches(), None), steps_per_call=steps_per_call)
            learner.fit(2)
        learner.state = first
        tried += 1
        raised = None
        try:
            with signal_at_line(number) as passed:
                next(with_own_exception_state(lambda learner=learner: learner.fit(1)))
        except kind as error:
            raised = str(error)
        if raised != "from the handler" and passed[0] >= number:
            lost.append(number)
    assert lost == []
    assert tried >= 40
    assert sys.exception() is None


def alive(learner: fluxcb.Learner) -> bool:
    try:
        return learner.state is not None
    except fluxcb.StateLostError:
        return False


# -- while a step is traced ---------------------------------------------------------------------------


class Cancels(Callback):
    """Raise a cancel at the end of a step."""

    def __init__(self, step: int, cancel: Exception) -> None:
        self.step, self.cancel = step, cancel

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        if learner.progress.step == self.step:
            raise self.cancel


def traced_with_a_signal(*callbacks: Callback) -> fluxcb.Learner:
    """Return a Learner that gets the signal while the step is traced for the smaller last batch."""
    traced = []

    def loss(params: Any, batch: Any, key: Any) -> Any:
        if batch.shape[0] == 1:
            traced.append(batch.shape)
            if len(traced) == 1:
                signal.raise_signal(signal.SIGUSR1)
        return jnp.sum(params["w"] * batch)

    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        loss,
        optax.sgd(0.1),
        data=[*([np.ones(2, np.float32)] * STEPS), np.ones(1, np.float32)],
        callbacks=callbacks,
        default_callbacks=False,
    )


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("kind", [AlarmError, AlarmTypeError])
def test_exception_while_tracing_reaches_caller(
    no_clock: None, handler: Callable[..., Any], kind: type[Exception]
) -> None:
    learner = traced_with_a_signal()
    signal.signal(signal.SIGUSR1, handler(kind))
    with raised_by_handler(kind):
        learner.fit(1)
    assert learner.step == int(learner.state["counters"][0]) == STEPS
    assert learner.stop_reason == f"{kind.__name__}: from the handler"
    learner.fit(1)
    assert learner.step == 2 * STEPS + 1


@pytest.mark.parametrize("cancel", [CancelEpoch(), CancelFitting("enough")])
def test_cancel_of_previous_step_does_not_hide_exception(no_clock: None, cancel: Exception) -> None:
    learner = traced_with_a_signal(Cancels(STEPS, cancel))
    signal.signal(signal.SIGUSR1, a_function(AlarmError))
    with raised_by_handler(AlarmError):
        learner.fit(1)


def test_exception_of_removed_signal_handler_reaches_caller(no_clock: None) -> None:
    learner = traced_with_a_signal()
    signal.signal(signal.SIGUSR1, a_function_that_removes_itself(AlarmError))
    with raised_by_handler(AlarmError):
        learner.fit(1)
    assert learner.step == int(learner.state["counters"][0])


# -- while batches are pulled -------------------------------------------------------------------------


class Signals:
    """A source that sends the signal when a certain batch is read for the first time."""

    def __init__(self, at: int) -> None:
        self.at: int | None = at

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            if number == self.at:
                self.at = None
                signal.raise_signal(signal.SIGUSR1)
            yield batch


@pytest.mark.parametrize("at", range(1, STEPS, 3))
def test_exception_while_reading_batch_is_not_hidden_by_cancel(no_clock: None, at: int) -> None:
    learner = testlearner(Cancels(at, CancelFitting("enough")), data=(Signals(at), None), steps_per_call=4)
    signal.signal(signal.SIGUSR1, a_function(AlarmError))
    with raised_by_handler(AlarmError):
        learner.fit(1)


# -- while a Learner is built -------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["the model", "the optimizer"])
def test_exception_while_building_learner_reaches_caller(part: str) -> None:
    sent = []

    def send(here: str) -> None:
        if here == part and not sent:
            sent.append(here)
            signal.raise_signal(signal.SIGUSR1)

    def init(key: Any, xs: Any) -> Any:
        send("the model")
        return {"w": jnp.zeros(())}

    def init_of_optimizer(params: Any) -> Any:
        send("the optimizer")
        return ()

    optimizer = optax.GradientTransformation(init_of_optimizer, lambda updates, state, params=None: (updates, state))
    signal.signal(signal.SIGUSR1, a_function(AlarmError))
    with raised_by_handler(AlarmError):
        fluxcb.Learner(
            (init, lambda params, xs: params["w"] * xs),
            lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
            optimizer,
            data=batches(),
            default_callbacks=False,
        )
    assert sent == [part]
