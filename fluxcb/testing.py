"""Tools for testing callbacks: a small Learner, a log of events, and the laws that every callback must follow.

Importing this module does not import JAX. Building a Learner does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._calls import entry_point
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import Event, HostEvent
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._errors import CheckError, ConflictError
from fluxcb._run.check import check
from fluxcb._tools.laws import Laws

if TYPE_CHECKING:
    from fluxcb._check.graph import CallbackGraph
    from fluxcb._run.learner import Learner

__all__ = [
    "EventLog",
    "assert_conflict",
    "assert_order",
    "assert_resumes_exactly",
    "assert_valid_graph",
    "check_callback",
    "testlearner",
]


@entry_point
def testlearner(
    *callbacks: Any,
    batches: int = 4,
    validation_batches: int = 2,
    batch_size: int = 8,
    learning_rate: float = 0.1,
    default_callbacks: bool = False,
    **kwargs: Any,
) -> Learner:
    """Build a small Learner that fits the line `y = 3 x - 1` to fixed examples.

    The model is `w * x + b`, with both parameters initially 0. The loss is the mean squared error. The optimizer is
    plain gradient descent with the hyperparameter `learning_rate`. An epoch takes milliseconds, and every value can be
    computed by hand.

    Args:
        *callbacks: Callback instances, and `in_order(...)` groups of them.
        batches: Number of training batches in an epoch.
        validation_batches: Number of validation batches in an epoch. 0 means no validation. Without effect if `phases`
            has no validation phase.
        batch_size: Number of examples in a batch.
        learning_rate: Step size of gradient descent.
        default_callbacks: Whether to add the default callbacks, as `Learner` does.
        **kwargs: Other arguments of `Learner`. `data=` and `optimizer=` replace those described here.

    Returns:
        The Learner. Its batches are lists of pairs `(float32[batch_size, 1], float32[batch_size, 1])`.

    Example:
        >>> learner = testlearner(EventLog())
        >>> history = learner.fit(25)
        >>> learner.step, round(float(learner.params["w"]), 1), round(float(learner.params["b"]), 1)
        (100, 3.0, -1.0)
    """
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fluxcb._compile.hyperparams import inject
    from fluxcb._run.learner import Learner

    def make(count: int, seed: int) -> list[Any]:
        drawn = np.random.default_rng(seed).uniform(-1.5, 1.5, (count, batch_size, 1)).astype(np.float32)
        return [(xs, 3 * xs - 1) for xs in drawn]

    def squared_error(outputs: Any, ys: Any) -> Any:
        return jnp.mean((outputs - ys) ** 2)

    phases = kwargs.get("phases")
    # Phases of the caller may have no use for validation data.
    validates = not isinstance(phases, list | tuple) or any(
        getattr(phase, "name", None) == "validation" for phase in phases
    )
    data = make(batches, 0), make(validation_batches, 1) if validates and validation_batches else None
    arguments = {"data": data, "optimizer": inject(optax.sgd, learning_rate=learning_rate), **kwargs}
    return Learner(
        (lambda key, xs: {"w": jnp.zeros(()), "b": jnp.zeros(())}, lambda params, xs: params["w"] * xs + params["b"]),
        squared_error,
        callbacks=callbacks,
        default_callbacks=default_callbacks,
        **arguments,
    )


# pytest collects functions whose names begin with test.
testlearner.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # functions take attributes


class EventLog(Callback):
    """Record every host event in the order of emission.

    EventLog declares no access, so it changes neither the order of callbacks nor the windows. The events are the same
    as without it.

    Attributes:
        entries: One tuple per event: event name, phase name, and the counters `progress.step`, `progress.epoch` and
            `progress.step_in_epoch` at that moment.

    Access:
        Nothing.

    Runs:
        HostEvent x Phase (host).

    Cost:
        Fetches nothing. Bounds no window.

    Example:
        >>> log = EventLog()
        >>> history = testlearner(log, batches=1, validation_batches=0).fit(1)
        >>> for entry in log.entries:
        ...     print(*entry)
        FitBegin training 0 0 0
        EpochBegin training 0 1 0
        StepBegin training 0 1 0
        StepEnd training 1 1 1
        EpochEnd training 1 1 1
        Trigger training 1 1 1
        FitStopping training 1 1 1
        FitEnd training 1 1 1
    """

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, int, int, int]] = []

    @on(HostEvent)
    def record(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Add an entry."""
        progress = learner.progress
        self.entries.append(
            (type(event).__name__, type(phase).name, progress.step, progress.epoch, progress.step_in_epoch)
        )

    def names(self, phase: str | None = None) -> list[str]:
        """Return the names of the recorded events, of one phase or of all phases."""
        return [entry[0] for entry in self.entries if phase in (None, entry[1])]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries."""
        return {"entries": list(self.entries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the entries."""
        self.entries = [(*entry,) for entry in state["entries"]]


# -- sets of callbacks -------------------------------------------------------------------------


@entry_point
def assert_valid_graph(callbacks: Iterable[Any], **kwargs: Any) -> CallbackGraph:
    """Assert that a set of callbacks is valid.

    Args:
        callbacks: The list of callbacks.
        **kwargs: Passed to `fluxcb.check`. By default, the default callbacks are not added.

    Returns:
        The graph.

    Raises:
        AssertionError: The set is not valid.

    Example:
        >>> from fluxcb.events import StepBegin
        >>> assert_valid_graph([EventLog()]).order(StepBegin, Phase)
        [EventLog()]
    """
    try:
        return check(callbacks, **{"default_callbacks": False, **kwargs})
    except CheckError as error:
        raise AssertionError(f"The callbacks do not fit together.\n{type(error).__name__}: {error}") from error


@entry_point
def assert_order(
    callbacks: Iterable[Any], event: type[Event], phase: type[Phase], classes: Sequence[type[Callback]], **kwargs: Any
) -> None:
    """Assert which callbacks run at a moment, and in which order.

    Args:
        callbacks: The list of callbacks.
        event: Event class.
        phase: Phase class.
        classes: The classes of all callbacks that run at the moment, in order, without their wrappers.
        **kwargs: Passed to `fluxcb.check`. By default, the default callbacks are not added.

    Raises:
        AssertionError: The set is not valid, other callbacks run, or the order is different.

    Example:
        >>> from fluxcb.events import StepBegin
        >>> from fluxcb.phases import TrainingPhase
        >>> assert_order([EventLog()], StepBegin, TrainingPhase, [EventLog])
    """
    graph = assert_valid_graph(callbacks, **kwargs)
    found = [type(unwrap(callback)) for callback in graph.order(event, phase)]
    if found != list(classes):
        raise AssertionError(
            f"At {event.__name__} x {phase.__name__} the order is {_names(found)}, not {_names(classes)}."
        )


@entry_point
def assert_conflict(callbacks: Iterable[Any], path: str, **kwargs: Any) -> ConflictError:
    """Assert that two of the callbacks conflict on a state path.

    Args:
        callbacks: The list of callbacks.
        path: The path in the form that messages use, e.g. `step.grads`.
        **kwargs: Passed to `fluxcb.check`. By default, the default callbacks are not added.

    Returns:
        The error, for tests that check more of it.

    Raises:
        AssertionError: There is no such conflict.

    Example:
        >>> from fluxcb import Write
        >>> from fluxcb.events import StepBegin
        >>> class Doubles(Callback):
        ...     def stateaccess(self):
        ...         return {"hyperparams": {"learning_rate": Write()}}
        ...
        ...     @on
        ...     def double(self, event: StepBegin, phase, learner):
        ...         learner.hyperparams.learning_rate = 2 * learner.hyperparams.learning_rate
        >>> error = assert_conflict([Doubles(), Doubles()], "hyperparams.learning_rate")
        >>> print(error.what)
        Doubles() and Doubles() #2 both write `hyperparams.learning_rate` and no order is declared.
    """
    problems: tuple[Any, ...] = ()
    try:
        check(callbacks, **{"default_callbacks": False, **kwargs})
    except CheckError as error:
        problems = error.problems or (error,)
    for problem in problems:
        if isinstance(problem, ConflictError) and f"`{path}`" in problem.what:
            return problem
    found_problems = "\n".join(f"{type(problem).__name__}: {problem}" for problem in problems) or "no problem was found"
    raise AssertionError(f"No two callbacks conflict about `{path}`; {found_problems}")


def _names(classes: Iterable[type]) -> str:
    return f"[{', '.join(cls.__name__ for cls in classes)}]"


# -- the laws ----------------------------------------------------------------------------------


@entry_point
def assert_resumes_exactly(
    make: Callable[[], Learner] | Callable[[Path], Learner],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Assert that a run that is interrupted and resumed equals an uninterrupted run, bit for bit.

    The test trains once and saves a checkpoint at each point where a run can be resumed: between any two steps and any
    two epochs. From each checkpoint, a new Learner continues with `fit(..., resume=True)`. Its final state must equal
    that of the uninterrupted run: parameters, optimizer, random key, counters, `cbstate`, the state of every callback,
    and `stop_reason`. Each point needs a training run of its own, so use little data.

    Args:
        make: Returns a new Learner with new callbacks and data each time. It may take a directory (`pathlib.Path`) for
            the logs of the run. When a run is resumed, the directory contains what the run had written at the
            checkpoint.
        epochs: Number of epochs to train. The default is 2 if `steps` is not given either.
        steps: Number of steps to train, instead of `epochs`.
        ignore: Names of callbacks whose own state may differ, for example because it contains elapsed times.

    Raises:
        AssertionError: Results differ. The message names the step at which the run was resumed, and the differences.

    Example:
        >>> assert_resumes_exactly(lambda: testlearner(batches=2, validation_batches=0), epochs=1)
    """
    from fluxcb._tools.resume_proof import resume_differences

    length = {"steps": steps} if steps is not None else {"epochs": epochs if epochs is not None else 2}
    failures = [(moment, lines) for moment, lines in resume_differences(make, length, ignore) if lines]
    if failures:
        moment, lines = failures[0]
        more = f"\n(and at {len(failures) - 1} other points)" if len(failures) > 1 else ""
        shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
        raise AssertionError(
            f"A run that is resumed {moment} differs from an uninterrupted run:\n  " + "\n  ".join(shown) + more
        )


@entry_point
def check_callback(
    make: Callable[[], Callback],
    *,
    needs: Iterable[Callable[[], Callback]] = (),
    learner: Callable[..., Learner] = testlearner,
    epochs: int = 2,
    unused: Iterable[str] = (),
    handles: Iterable[str] = (),
) -> None:
    """Check that a callback follows the laws for all callbacks.

    1. It trains with only the callbacks that it needs, and together with the default callbacks.
    2. It uses all the state that it declares, and no other state, which would raise an AccessError.
    3. The order of the list of callbacks does not matter: the train state is the same, bit for bit.
    4. Windows do not matter. The train state is the same, bit for bit, with several steps in one call and with a
       callback that may cancel at every step.
    5. Epochs after the first one trace and compile nothing.
    6. Running `init` twice has the same result as running it once, even after training.
    7. `load_state_dict` accepts what `state_dict` returned, and restores every field that changes during training.

    Args:
        make: Returns a new instance. It is called several times.
        needs: Functions that make the callbacks that it requires.
        learner: Builds the Learner. It is called like `testlearner`, with callback instances and `default_callbacks`.
        epochs: Length of the training (epochs).
        unused: Declared paths, such as `step.aux`, that this training does not use.
        handles: Fields that change during training but are not state: open files, consoles, clocks.

    Raises:
        AssertionError: A law is violated. The message lists all violated laws.

    Example:
        >>> from fluxcb.events import StepBegin
        >>> check_callback(EventLog)
        >>> class Counter(Callback):
        ...     steps = 0
        ...
        ...     @on
        ...     def count(self, event: StepBegin, phase, learner):
        ...         self.steps += 1
        >>> check_callback(Counter)
        Traceback (most recent call last):
        AssertionError: Counter() breaks a law of callbacks.
          Its field `steps` changes during training (from 0 to 12), and `load_state_dict` does not restore it. ...
    """
    laws = Laws(
        make,
        needs=tuple(needs),
        companion=EventLog,
        learner=learner,
        epochs=epochs,
        unused=frozenset(unused),
        handles=frozenset(handles),
    )
    laws.check()
    if laws.broken:
        count = "a law" if len(laws.broken) == 1 else f"{len(laws.broken)} laws"
        raise AssertionError("\n  ".join([f"{laws.label} breaks {count} of callbacks.", *laws.broken])) from laws.cause
