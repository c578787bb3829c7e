"""The proof that a training resumes exactly: it is interrupted at every event, and what comes of it is compared."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import Event, HostEvent
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._tools.comparing import leaves
from fluxcb.callbacks.checkpointer import Checkpointer
from fluxcb.callbacks.snapshot_saver import SnapshotSaver

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["Make", "resume_differences", "state_of"]

Make = Callable[[], "Learner"] | Callable[[Path], "Learner"]


class _Killed(BaseException):
    """Stands for a kill: no handler and no `except Exception` stops it."""


class _Interruption(Callback):
    """Count the host events, and end everything at one of them."""

    name = "interruption"
    main_thread = True

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.moments: list[str] = []

    @on(HostEvent, Phase)
    def count(self, event: Event, phase: Phase, learner: Any) -> None:
        """Count an event; raise at the one that was asked for."""
        progress = learner.progress
        self.moments.append(f"{event!r} x {type(phase).__name__}, epoch {progress.epoch}, step {progress.step}")
        if len(self.moments) - 1 == self.at:
            raise _Killed


def resume_differences(make: Make, fit: Mapping[str, Any], ignore: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Interrupt a training at every host event, go on from the checkpoint, and compare with one not interrupted.

    Args:
        make: Returns a new Learner each time; it may take the directory of the run.
        fit: What `learner.fit` is told.
        ignore: Names of callbacks whose own state may differ: clocks.

    Yields:
        For each event where it was interrupted, and how the results differ; a line each.

    Raises:
        DeclarationError: `make` returns the same Learner again.
    """
    expected, moments = _run(make, fit, None, ignore)
    assert expected is not None
    for at, moment in enumerate(moments):
        found, _ = _run(make, fit, at, ignore)
        assert found is not None
        yield moment, _differing(expected, found)


def _run(
    make: Make, fit: Mapping[str, Any], at: int | None, ignore: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Train, and train on where an interruption ended that; return the final state and the events met."""
    with tempfile.TemporaryDirectory() as folder:
        probe = _Interruption(at)
        first = _prepared(make, Path(folder), probe)
        try:
            first.fit(**fit)
        except _Killed:
            second = _prepared(make, Path(folder), _Interruption(None))
            if second is first:
                raise DeclarationError(
                    "The Learner is made once and kept, so it cannot be resumed.",
                    fix="give a function that builds a new Learner each time it is called",
                ) from None
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The run goes on from")  # plain iterables are read again
                second.fit(**fit, resume=True)
            return state_of(second, ignore), probe.moments
        return state_of(first, ignore), probe.moments


def _prepared(make: Any, folder: Path, probe: _Interruption) -> Learner:
    takes_folder = bool(inspect.signature(make).parameters)
    learner = make(folder) if takes_folder else make()
    if not any(isinstance(unwrap(callback), Checkpointer) for callback in learner.callbacks):
        learner.callbacks.add(Checkpointer(folder / "checkpoints", steps=1))
    learner.callbacks.add(probe)
    return learner


def state_of(learner: Learner, ignore: Collection[str] = ()) -> dict[str, Any]:
    """Return everything a Learner holds, by name, in a form that can be compared: arrays as their bits.

    Args:
        learner: The Learner.
        ignore: Names of callbacks whose own state is left out, as is that of callbacks that write checkpoints.
    """
    snapshot = learner._state.snapshots.take(None)
    host, arrays = snapshot.host, dict(leaves(dict(snapshot.arrays)))
    left_out = {d.name for d in learner.callbacks.graph.declared if isinstance(unwrap(d.callback), SnapshotSaver)}
    left_out |= set(ignore)
    parts = {
        "progress": host["progress"],
        "cbstate": host["cbstate"],
        "callbacks": {name: held for name, held in host["callbacks"].items() if name not in left_out},
    }
    found = {f"{part}{path}": value for part in parts for path, value in _flat(parts[part], arrays)}
    found |= {name: bits for tree, held in snapshot.trees.items() for name, bits in _named(tree, held)}
    found["key"] = leaves(learner.state["key"])
    found["stop_reason"] = learner.stop_reason
    return found


def _named(tree: str, held: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{tree}{name}", bits) for name, bits in leaves(held))


def _flat(held: Any, arrays: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(held, dict):
        if "at" in held and "$" in held:
            yield path, (held["$"], arrays[f"['{held['at']}']"])
            return
        for key, item in held.items():
            yield from _flat(item, arrays, f"{path}[{key!r}]")
    elif isinstance(held, list):
        yield f"{path}.length", len(held)
        for number, item in enumerate(held):
            yield from _flat(item, arrays, f"{path}[{number}]")
    else:
        yield path, repr(held)


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    lines = [f"{name} is missing" for name in expected if name not in found]
    lines += [f"{name} is there, and was not" for name in found if name not in expected]
    for name, value in expected.items():
        if name in found and found[name] != value:
            shown = f": {value!r} became {found[name]!r}"
            lines.append(name + (shown if len(shown) < 120 else " has other bits"))
    return lines
