"""`StepScalars`: base of callbacks that keep something about numbers of the step in the carry, and log it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import ComputeEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.named_values import NamedValues

__all__ = ["StepScalars"]


class StepScalars(Callback):
    """What is kept about each number is in `cbstate.<entry>.<name>`, with `/` for `.` in the name.

    Subclasses say what in `fresh` and `updated`, and log it in host handlers.

    Args:
        names: A path, or several: values of the step, or hyperparameters.
    """

    entry: ClassVar[str]

    def __init__(self, names: str | Sequence[str]) -> None:
        self._values = NamedValues(names, type(self).__name__, ("step", "hyperparams"))

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the values."""
        return self._values.names

    def fresh(self) -> Any:
        """Return what is kept about a number at first: float32[...]."""
        raise NotImplementedError

    def updated(self, kept: Any, value: Any, step: Any) -> Any:
        """Return what is kept about a number after one more step.

        Args:
            kept: What was kept so far.
            value: The number, float32[].
            step: Training steps finished before, int32[].
        """
        raise NotImplementedError

    # Which values differs from instance to instance, and so do the handlers' accesses.

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {**self._values.access(), "cbstate": {self.entry: self._kept(Write()), "monitors": Append()}}

    def _kept(self, permission: Read | Write) -> dict[str, Any]:
        return {_key(name): permission for name in self.names}

    def handlers(self) -> list[Entry]:
        """Return the handlers, with this instance's accesses."""
        return [self.own(entry) for entry in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, with this instance's access and schedule."""
        found = super().entry_for(event, phase)
        if found is None:
            return None
        entry = self.own(found[1])
        return found[0], entry, (entry.when,) if entry.when is not None else ()

    def own(self, entry: Entry) -> Entry:
        """Return a handler with this instance's access."""
        if entry.traced:
            return replace(entry, access={**self._values.access(), "cbstate": {self.entry: self._kept(Write())}})
        return replace(entry, access={"cbstate": {self.entry: self._kept(Read()), "monitors": Append()}})

    def init(self, learner: Any) -> None:
        """Create the entries."""
        import jax.numpy as jnp

        kept = learner.cbstate[self.entry]
        for name in self.names:
            if _key(name) not in kept:
                kept[_key(name)] = jnp.asarray(self.fresh(), jnp.float32)

    @on(ComputeEnd, AbstractTrainingPhase)
    def take_in(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take in the step's numbers."""
        import jax.numpy as jnp

        kept, step = learner.cbstate[self.entry], learner.progress.step
        for name, value in self._values.read(learner).items():
            if not hasattr(value, "shape") or value.shape != () or not jnp.isrealobj(value):
                kind = f"has shape {value.shape}" if hasattr(value, "shape") else f"is a {type(value).__name__}"
                raise DeclarationError(
                    f"`{name}` {kind}; `{type(self).__name__}` takes real numbers, each by itself.",
                    fix="reduce it where it is computed, e.g. with `jnp.mean`, or name a part of it",
                )
            kept[_key(name)] = self.updated(kept[_key(name)], value.astype(jnp.float32), step)

    def kept(self, learner: Any) -> dict[str, Any]:
        """Return what is kept, by the names to log it under, on the host."""
        import numpy as np

        kept = learner.cbstate[self.entry]
        return {_key(name): np.asarray(kept[_key(name)]) for name in self.names}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.names))})"


def _key(name: str) -> str:
    return name.replace(".", "/")
