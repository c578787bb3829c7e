"""`StepScalars`: base class of callbacks that summarize numbers of the step inside the compiled step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import ComputeEnd, Event
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.inspect.named_values import NamedValues

__all__ = ["StepScalars"]


class StepScalars(Callback):
    """Base class of callbacks that keep a summary of each number in the carry and log it.

    The summary of a number is in `cbstate.<entry>.<name>`, where `.` in the name is replaced with `/`. Subclasses
    define it by `initial` and `updated`, and log it in host handlers.

    Args:
        names: One path or several: values of the step, or hyperparameters.
    """

    entry: ClassVar[str]

    def __init__(self, names: str | Sequence[str]) -> None:
        self._values = NamedValues(names, type(self).__name__, ("step", "hyperparams"))

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the values."""
        return self._values.names

    def initial(self) -> Any:
        """Return the summary of a number before the first step: float32[...]."""
        raise NotImplementedError

    def updated(self, stored: Any, value: Any, step: Any) -> Any:
        """Return the summary of a number after one more step.

        Args:
            stored: The summary so far.
            value: The number, float32[].
            step: Number of earlier training steps, int32[].
        """
        raise NotImplementedError

    # The access of the handlers depends on the names.

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {**self._values.access(), "cbstate": {self.entry: self._entries(Write()), "monitors": Append()}}

    def _entries(self, permission: Read | Write) -> dict[str, Any]:
        return {_key(name): permission for name in self.names}

    def handlers(self) -> list[Handler]:
        """Return the handlers with the access of this instance."""
        return [self.configured(handler) for handler in super().handlers()]

    def configured(self, handler: Handler) -> Handler:
        """Return a handler with the access of this instance."""
        if handler.traced:
            return replace(handler, access={**self._values.access(), "cbstate": {self.entry: self._entries(Write())}})
        return replace(handler, access={"cbstate": {self.entry: self._entries(Read()), "monitors": Append()}})

    def init(self, learner: LearnerView) -> None:
        """Create the summaries."""
        import jax.numpy as jnp

        stored = learner.cbstate[self.entry]
        for name in self.names:
            if _key(name) not in stored:
                stored[_key(name)] = jnp.asarray(self.initial(), jnp.float32)

    @on(ComputeEnd, AbstractTrainingPhase)
    def update(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Update the summaries with the numbers of the step."""
        import jax.numpy as jnp

        stored, step = learner.cbstate[self.entry], learner.progress.step
        for name, value in self._values.read(learner).items():
            if not hasattr(value, "shape") or value.shape != () or not jnp.isrealobj(value):
                kind = f"has shape {value.shape}" if hasattr(value, "shape") else f"is a {type(value).__name__}"
                raise DeclarationError(
                    f"`{name}` {kind}; `{type(self).__name__}` takes single real numbers.",
                    fix="reduce it where it is computed, e.g. with `jnp.mean`, or use the path of a part that "
                    "is a number",
                )
            stored[_key(name)] = self.updated(stored[_key(name)], value.astype(jnp.float32), step)

    def stored(self, learner: LearnerView) -> dict[str, Any]:
        """Return the summaries as NumPy arrays, keyed by the names to log them under."""
        import numpy as np

        stored = learner.cbstate[self.entry]
        return {_key(name): np.asarray(stored[_key(name)]) for name in self.names}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


def _key(name: str) -> str:
    return name.replace(".", "/")
