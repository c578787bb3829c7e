"""A kit for the tests of callbacks: a small Learner, a log of events, and the laws that every callback keeps.

Importing it does not import JAX; building a Learner does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import Event, HostEvent
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._errors import CheckError, ConflictError
from fluxcb._run.checking import check
from fluxcb._tools.laws import Laws
from fluxcb._tracebacks import entry_point

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
    """Build a Learner that fits a line, `y = 3 x - 1`, from the same few examples each time.

    The model is `w * x + b`, both 0 at first, the loss the mean squared error, the optimizer plain gradient descent
    with the hyperparameter `learning_rate`. An epoch takes milliseconds, and every value can be computed by hand.

    Args:
        *callbacks: Callback instances, and `in_order(...)` groups of them.
        batches: Training batches in an epoch.
        validation_batches: Validation batches in an epoch; 0 for no validation.
        batch_size: Examples in a batch.
        learning_rate: Step size of the gradient descent.
        default_callbacks: Whether to add the default callbacks, as `Learner` does.
        **kwargs: Whatever else `Learner` takes; `data=` and `optimizer=` replace the ones described here.

    Returns:
        The Learner. Batches are pairs `(float32[batch_size, 1], float32[batch_size, 1])` in lists.

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

    data = make(batches, 0), make(validation_batches, 1) if validation_batches else None
    given = {"data": data, "optimizer": inject(optax.sgd, learning_rate=learning_rate), **kwargs}
    return Learner(
        (lambda key, xs: {"w": jnp.zeros(()), "b": jnp.zeros(())}, lambda params, xs: params["w"] * xs + params["b"]),
        squared_error,
        callbacks=callbacks,
        default_callbacks=default_callbacks,
        **given,
    )


# pytest collects functions whose names begin with test.
testlearner.__test__ = False  # pyright: ignore[reportFunctionMemberAccess]  # functions take attributes


class EventLog(Callback):
    """Record every host event, in the order of emission.

    It declares no access, so it changes neither order nor windows: what it sees is what happens without it.

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
    def record(self, event: Event, phase: Phase, learner: Any) -> None:
        """Add an entry."""
        progress = learner.progress
        self.entries.append(
            (type(event).__name__, type(phase).name, progress.step, progress.epoch, progress.step_in_epoch)
        )

    def names(self, phase: str | None = None) -> list[str]:
        """Return the names of the events of one phase, or of all."""
        return [entry[0] for entry in self.entries if phase in (None, entry[1])]

    def state_dict(self) -> dict[str, Any]:
        """Return the entries."""
        return {"entries": list(self.entries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the entries back."""
        self.entries = [(*entry,) for entry in state["entries"]]


# -- sets of callbacks -------------------------------------------------------------------------


def assert_valid_graph(callbacks: Iterable[Any], **kwargs: Any) -> CallbackGraph:
    """Assert that a set of callbacks fits together.

    Args:
        callbacks: The callbacks list.
        **kwargs: Passed to `fluxcb.check`; the default callbacks are not added unless asked for.

    Returns:
        The graph.

    Raises:
        AssertionError: It does not fit together.

    Example:
        >>> from fluxcb.events import StepBegin
        >>> assert_valid_graph([EventLog()]).order(StepBegin, Phase)
        [EventLog()]
    """
    try:
        return check(callbacks, **{"default_callbacks": False, **kwargs})
    except CheckError as error:
        raise AssertionError(f"The callbacks do not fit together.\n{type(error).__name__}: {error}") from error


def assert_order(
    callbacks: Iterable[Any], event: type[Event], phase: type[Phase], classes: Sequence[type[Callback]], **kwargs: Any
) -> None:
    """Assert which callbacks run at a moment, and in which order.

    Args:
        callbacks: The callbacks list.
        event: Event class.
        phase: Phase class.
        classes: The classes of all callbacks that run then, wrappers taken off, first to last.
        **kwargs: Passed to `fluxcb.check`; the default callbacks are not added unless asked for.

    Raises:
        AssertionError: The set is not valid, or others run, or in another order.

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


def assert_conflict(callbacks: Iterable[Any], path: str, **kwargs: Any) -> ConflictError:
    """Assert that two of the callbacks conflict about a state path.

    Args:
        callbacks: The callbacks list.
        path: The path as messages show it, `step.grads`.
        **kwargs: Passed to `fluxcb.check`; the default callbacks are not added unless asked for.

    Returns:
        The error, for tests that look at more of it.

    Raises:
        AssertionError: They do not.

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
    told = "\n".join(f"{type(problem).__name__}: {problem}" for problem in problems) or "no problem was found"
    raise AssertionError(f"No two callbacks conflict about `{path}`; {told}")


def _names(classes: Iterable[type]) -> str:
    return f"[{', '.join(cls.__name__ for cls in classes)}]"


# -- the laws ----------------------------------------------------------------------------------


def assert_resumes_exactly(
    make: Callable[[], Learner] | Callable[[Path], Learner],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    ignore: Collection[str] = (),
) -> None:
    """Assert that a training that is interrupted anywhere, and resumed, is the one that was not.

    A run can go on between two steps and between two epochs: there its state is saved to disk, as a Checkpointer would.
    From each of these checkpoints a new Learner goes on, with `fit(..., resume=True)`, and its final state is compared
    with that of the run that went through, to the last bit: parameters, optimizer, random key, counters, `cbstate`, the
    state of every callback, `stop_reason`. Each point costs a training, so give it little data.

    Args:
        make: Returns a new Learner with new callbacks and data each time; it may take a directory (`pathlib.Path`), for
            its logs, which has in it what the run had written there when the checkpoint was.
        epochs: How many epochs are trained; 2 if neither is given.
        steps: How many steps are trained, instead.
        ignore: Names of callbacks whose own state may differ, because it says how long something took.

    Raises:
        AssertionError: Results differ; it says where the run was resumed, and what differs.

    Example:
        >>> assert_resumes_exactly(lambda: testlearner(batches=2, validation_batches=0), epochs=1)
    """
    from fluxcb._tools.resume_proof import resume_differences

    length = {"steps": steps} if steps is not None else {"epochs": epochs if epochs is not None else 2}
    failures = [(moment, lines) for moment, lines in resume_differences(make, length, ignore) if lines]
    if failures:
        moment, lines = failures[0]
        more = f"\n(and so at {len(failures) - 1} other points)" if len(failures) > 1 else ""
        shown = lines[:10] + ([f"... and {len(lines) - 10} more"] if len(lines) > 10 else [])
        raise AssertionError(
            f"A run that is resumed {moment}, differs from one that was not interrupted:\n  "
            + "\n  ".join(shown)
            + more
        )


def check_callback(
    make: Callable[[], Callback],
    *,
    needs: Iterable[Callable[[], Callback]] = (),
    learner: Callable[..., Learner] = testlearner,
    epochs: int = 2,
    unused: Iterable[str] = (),
    handles: Iterable[str] = (),
) -> None:
    """Run a callback through the laws that every callback keeps.

    1. It trains with the callbacks it needs and nobody else, and beside the default callbacks.
    2. What it declares it touches, and it touches nothing else (that would be an AccessError).
    3. The order of the callbacks list does not matter: the train state is the same bit for bit.
    4. Windows do not matter: with several steps in one call, and beside a callback that may cancel at every step, the
       train state is the same bit for bit.
    5. An epoch after the first traces and compiles nothing.
    6. `init` run twice leaves what `init` run once leaves, also after training.
    7. `load_state_dict` takes what `state_dict` gave, and restores every field that changes during training.

    Args:
        make: Returns a new instance; called several times.
        needs: Makers of the callbacks it cannot do without.
        learner: Builds the Learner: called like `testlearner`, with callback instances and `default_callbacks`.
        epochs: How long it is trained (epochs).
        unused: Declared paths (`step.aux`) that this training gives no occasion to touch.
        handles: Fields that change and are rightly no state: open files, consoles, clocks.

    Raises:
        AssertionError: A law is broken; all broken ones are told.

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
          Its field `steps` changes during training (from 0 to 12), and is not restored by `load_state_dict`. ...
    """
    laws = Laws(
        make,
        needs=tuple(needs),
        beside=EventLog,
        learner=learner,
        epochs=epochs,
        unused=frozenset(unused),
        handles=frozenset(handles),
    )
    laws.check()
    if laws.broken:
        count = "a law" if len(laws.broken) == 1 else f"{len(laws.broken)} laws"
        raise AssertionError("\n  ".join([f"{laws.label} breaks {count} of callbacks.", *laws.broken])) from laws.cause
