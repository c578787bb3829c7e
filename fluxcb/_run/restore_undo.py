"""Undoing a restore that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.declared import Declared
from fluxcb._interruptions import is_interruption
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.encoding import Decoder, Encoder
from fluxcb._run.state import HostState

__all__ = ["RestoreUndo"]

_COUNTERS = ("step", "epoch", "step_in_epoch", "cancelled", "cancelled_in_epoch")


class RestoreTarget(Protocol):
    """The parts of a Learner that a restore replaces; `LearnerCore` has them."""

    state: HostState
    graph: CallbackGraph
    streams: dict[str, BatchStream]


class RestoreUndo:
    """A copy of everything that a restore replaces.

    Args:
        core: The core of the Learner.
        host: The host state of the checkpoint, which determines what is replaced.
        staying: Names of the data sources that keep their position.

    Raises:
        DeclarationError: A callback has state that cannot be saved.
    """

    def __init__(self, core: RestoreTarget, host: Mapping[str, Any], staying: Collection[str]) -> None:
        state = self._state = core.state
        # The carry is a reference: a restore replaces it by new arrays, and no step runs in between.
        self._carry = state.train.carry
        self._counters = {name: getattr(state.progress, name) for name in _COUNTERS}
        self._run_key = state.train.run_key
        self._given_key_text = state.train.given_key_text
        self._given_hyperparams = dict(state.train.given_hyperparams)  # a restore updates it in place
        self._fit = dataclasses.replace(state.fit)
        self._cbstate = dict(state.cbstate)
        # Entries and callbacks are encoded and not copied, because `load_state_dict` of an object is the only general
        # way to change it back.
        encoder = Encoder()
        self._entries = {
            name: encoder.encode(value, f"`cbstate.{name}`")
            for name, value in state.cbstate.items()
            if name in host["cbstate"]
        }
        self._callbacks: list[tuple[Declared, Any, Any]] = []
        for declared in core.graph.declared:
            if declared.name in host["callbacks"]:
                existing = declared.callback.state_dict()
                encoded = encoder.encode(existing, f"the state of {declared.label}")
                self._callbacks.append((declared, existing, encoded))
        self._arrays = encoder.arrays
        self._streams = [
            stream.make_undo() for name, stream in core.streams.items() if name in host["data"] and name not in staying
        ]

    def restore(self, error: BaseException) -> None:
        """Restore the previous state.

        Args:
            error: The exception of the restore. A note is added for each object that cannot restore its own previous
                state.
        """
        state, decoder = self._state, Decoder(self._arrays)
        state.train.carry = self._carry
        state.train.run_key = self._run_key
        state.train.given_key_text = self._given_key_text
        state.train.given_hyperparams = self._given_hyperparams
        state.progress.replace(**self._counters)
        # In place, because the engine holds references to the record.
        vars(state.fit).update(vars(self._fit))
        for restore in self._streams:
            restore()
        # In place, for the same reason.
        state.cbstate.clear()
        state.cbstate.update(self._cbstate)
        interruption: BaseException | None = None
        for what, load in self._loads(decoder):
            try:
                load()
            except BaseException as other:
                # A failing object must not prevent the others from being restored, not even by Ctrl-C.
                if is_interruption(other):
                    interruption = other
                reason = f"{type(other).__name__}: {other}"
                # An object that can never be loaded fails here as in the restore itself, whose message has the reason.
                same = reason in f"{type(error).__name__}: {error}"
                error.add_note(f"and {what} could not be undone{', for the same reason' if same else f': {reason}'}")
        if interruption is not None:
            raise interruption

    def _loads(self, decoder: Decoder) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield a name and a restoring function for each entry of `cbstate` and for the state of each callback."""
        for name, encoded in self._entries.items():
            what = f"`cbstate.{name}`"

            # Default arguments bind the values of this iteration.
            def load_entry(name: str = name, encoded: Any = encoded, what: str = what) -> None:
                self._state.cbstate[name] = decoder.decode(encoded, self._cbstate[name], what)

            yield what, load_entry
        for declared, existing, encoded in self._callbacks:
            what = f"the state of {declared.label}"

            def load(declared: Declared = declared, existing: Any = existing, encoded: Any = encoded, what: str = what):
                declared.callback.load_state_dict(decoder.decode(encoded, existing, what))

            yield what, load
