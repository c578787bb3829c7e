"""`ProcessArrays` and `PrintArrays`: values looked at on the host, after each step or at Trigger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.console import console_for, print_line
from fluxcb.callbacks.named_values import NamedValues, leaf_arrays
from fluxcb.logging.consoles import text_file

__all__ = ["LooksAtValues", "PrintArrays", "ProcessArrays", "require_takes"]


class LooksAtValues(Callback):
    """Base of what does something with named values: after steps if one of them is the step's, else at Trigger.

    Subclasses define `process`.

    Args:
        names: A path, or several.
    """

    chief_only = True

    def __init__(self, names: str | Sequence[str]) -> None:
        self._values = NamedValues(names, type(self).__name__)

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the values."""
        return self._values.names

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return self._values.access()

    def init(self, learner: Any) -> None:
        """Check that the parts of the train state exist."""
        self._values.require(learner)

    def process(self, learner: Any, values: Mapping[str, Any]) -> None:
        """Do something with the values, given by path."""
        raise NotImplementedError

    # The handler of the other moment is not there at all, so that it orders, fetches and waits for nothing.

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self._has(entry.event)]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment."""
        return super().entry_for(event, phase) if self._has(event) else None

    def _has(self, event: type[Event]) -> bool:
        return not issubclass(event, Trigger if self._values.of_steps else StepEnd)

    @on(StepEnd, AbstractTrainingPhase)
    def after_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Look at the values after a step."""
        self.process(learner, self._values.read(learner))

    @on(Trigger, AbstractTrainingPhase)
    def at_trigger(self, event: Event, phase: Phase, learner: Any) -> None:
        """Look at the values at Trigger."""
        self.process(learner, self._values.read(learner))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


class ProcessArrays(LooksAtValues):
    """Call a function with values: after each training step if one of them is the step's, else at Trigger.

    The values leave the device with the step. Those of the train state are what they are after it. Under several
    processes, process 0 calls the function.

    Args:
        names: Path or paths of the values: `step.loss`, `step.aux.kl`, `params.layers.0.w`,
            `hyperparams.learning_rate`.
        fn: `fn(*values)`, in the order of the names; what it raises ends the training.

    Access:
        What the names say: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host, if a name is a step's).
        Trigger x AbstractTrainingPhase (host, if none is).

    Cost:
        Fetches the values. Small ones bound no window; large parts of the train state do: give it a period with
        `every(..., steps=100)`.

    Raises:
        DeclarationError: A name is no path, or `fn` does not take as many arguments as there are names.

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

    def process(self, learner: Any, values: Mapping[str, Any]) -> None:
        """Call the function."""
        self.fn(*values.values())


class PrintArrays(LooksAtValues):
    """Print values: after each training step if one of them is the step's, else at Trigger.

    A line per array: `step 12  step.loss: 0.2500`. Long arrays are shortened. Under several processes, process 0
    prints.

    Args:
        names: Path or paths of the values; see `ProcessArrays`.
        file: Where to; standard output by default.

    Access:
        What the names say: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host, if a name is a step's).
        Trigger x AbstractTrainingPhase (host, if none is).

    Cost:
        As `ProcessArrays`, and about 0.1 ms per line.

    Raises:
        DeclarationError: A name is no path.

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

    def process(self, learner: Any, values: Mapping[str, Any]) -> None:
        """Print a line per array."""
        import numpy as np

        console, step = console_for(self.file), learner.progress.step
        for name, value in values.items():
            for path, array in leaf_arrays(name, value):
                shown = np.array2string(array, precision=4, threshold=20, edgeitems=3, floatmode="maxprec_equal")
                rows = "\n" if "\n" in shown else " "
                print_line(console, f"step {step}  {path}:{rows}{shown}")


def require_takes(fn: Any, owner: str, count: int) -> None:
    """Check that a function takes as many values.

    Raises:
        DeclarationError: It does not.
    """
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError as error:
        raise DeclarationError(
            f"`{owner}` calls its function with {count} value{'s'[: count != 1]}, one per name; {fn!r} does not fit.",
            why=str(error),
            fix="take one argument per name, in their order",
        ) from None
    except ValueError:  # a builtin without a signature
        pass
