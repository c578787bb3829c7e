"""`ProcessArrays` and `PrintArrays`: process values on the host, after each step or at Trigger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.inspect.named_values import NamedValues, leaf_arrays
from fluxcb.callbacks.progress.console import console_for, print_lines
from fluxcb.logging.consoles import text_file

__all__ = ["NamedValuesCallback", "PrintArrays", "ProcessArrays", "require_takes"]


class NamedValuesCallback(Callback):
    """Base class of callbacks that process named values on the host.

    They run after each training step if at least one path begins with `step`, and at Trigger otherwise. Subclasses
    implement `process`.

    Args:
        names: One path or several.
    """

    chief_only = True

    def __init__(self, names: str | Sequence[str]) -> None:
        self._values = NamedValues(names, type(self).__name__)

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the values."""
        return self._values.names

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return self._values.access()

    def init(self, learner: LearnerView) -> None:
        """Check the paths into the train state."""
        self._values.require(learner)

    def process(self, learner: LearnerView, values: Mapping[str, Any]) -> None:
        """Process the values, which are keyed by path."""
        raise NotImplementedError

    # The unused handler is removed instead of disabled, so that it causes no ordering constraints, fetches or waits.

    def handlers(self) -> list[Handler]:
        """Return the handler for StepEnd or for Trigger, depending on the paths."""
        return [handler for handler in super().handlers() if self._has(handler.event)]

    def _has(self, event: type[Event]) -> bool:
        return not issubclass(event, Trigger if self._values.of_steps else StepEnd)

    @on(StepEnd, AbstractTrainingPhase)
    def after_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Process the values after a step."""
        self.process(learner, self._values.read(learner))

    @on(Trigger, AbstractTrainingPhase)
    def at_trigger(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Process the values at Trigger."""
        self.process(learner, self._values.read(learner))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


class ProcessArrays(NamedValuesCallback):
    """Call a function with named values.

    The function is called after each training step if at least one path begins with `step`, and at Trigger otherwise.
    Values of the train state are those after the step. In a multi-host run, only process 0 calls the function.

    Args:
        names: One path or several, such as `step.loss`, `step.aux.kl`, `params.layers.0.w` or
            `hyperparams.learning_rate`.
        fn: `fn(*values)`, with the values in the order of the names. An exception ends the training.

    Access:
        The paths in `names`: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host, if a path begins with `step`).
        Trigger x AbstractTrainingPhase (host, otherwise).

    Cost:
        Fetches the values. Small values do not shorten windows. Large parts of the train state do, so give the callback
        a period for them: `every(..., steps=100)`.

    Raises:
        DeclarationError: A path is invalid, or `fn` does not take one argument per name.

    Example:
        >>> from fluxcb import every
        >>> from fluxcb.callbacks import ProcessArrays
        >>> from fluxcb.testing import testlearner
        >>> seen = []
        >>> keep = ProcessArrays(["step.loss", "hyperparams.learning_rate"], lambda *values: seen.append(values))
        >>> history = testlearner(every(keep, steps=4)).fit(2)
        >>> [(f"{loss:.4f}", f"{rate:.1f}") for loss, rate in seen]
        [('1.1852', '0.1'), ('0.2563', '0.1')]

    Source:
        tensorpack, `ProcessTensors`.
    """

    def __init__(self, names: str | Sequence[str], fn: Callable[..., Any]) -> None:
        super().__init__(names)
        require_takes(fn, "ProcessArrays", len(self.names))
        self.fn = fn

    def process(self, learner: LearnerView, values: Mapping[str, Any]) -> None:
        """Call the function."""
        self.fn(*values.values())


class PrintArrays(NamedValuesCallback):
    """Print named values, one line per array: `step 12  step.loss: 0.2500`.

    The callback prints after each training step if at least one path begins with `step`, and at Trigger otherwise. Long
    arrays are shortened. In a multi-host run, only process 0 prints.

    Args:
        names: One path or several; see `ProcessArrays`.
        file: Where to print; standard output by default.

    Access:
        The paths in `names`: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host, if a path begins with `step`).
        Trigger x AbstractTrainingPhase (host, otherwise).

    Cost:
        The cost of `ProcessArrays`, plus about 0.1 ms per line.

    Raises:
        DeclarationError: A path is invalid.

    Example:
        >>> from fluxcb import every
        >>> from fluxcb.callbacks import PrintArrays
        >>> from fluxcb.testing import testlearner
        >>> history = testlearner(every(PrintArrays(["step.loss", "params"]), steps=4)).fit(1)
        step 4  step.loss: 1.1852
        step 4  params.b: -0.455
        step 4  params.w: 1.5736

    Source:
        tensorpack, `TensorPrinter`.
    """

    def __init__(self, names: str | Sequence[str], file: IO[str] | None = None) -> None:
        super().__init__(names)
        self.file = text_file(file, "PrintArrays")

    def process(self, learner: LearnerView, values: Mapping[str, Any]) -> None:
        """Print one line per array."""
        import numpy as np

        console, step = console_for(self.file), learner.progress.step
        for name, value in values.items():
            for path, array in leaf_arrays(name, value):
                shown = np.array2string(array, precision=4, threshold=20, edgeitems=3, floatmode="maxprec_equal")
                rows = "\n" if "\n" in shown else " "
                print_lines(console, f"step {step}  {path}:{rows}{shown}".split("\n"))


def require_takes(fn: Any, owner: str, count: int) -> None:
    """Check that a function takes `count` positional arguments.

    Args:
        fn: The function.
        owner: Name of the callback, for the message.
        count: The number of arguments.

    Raises:
        DeclarationError: The function takes a different number of arguments.
    """
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError as error:
        raise DeclarationError(
            f"`{owner}` calls its function with {count} value{'s'[: count != 1]}, one per name; "
            f"{fn!r} does not take them.",
            why=str(error),
            fix="write a function that takes one argument per name, in the same order",
        ) from None
    except ValueError:  # a builtin without a signature
        pass
