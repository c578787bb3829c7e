"""Snapshots: all the state there is, taken between two steps or two epochs, and put back."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import is_key
from fluxcb._compile.traced import COUNTERS
from fluxcb._declare.callback import unwrap
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError, DeclarationError, ResumeError
from fluxcb._run.averages import averages_by_name, validated_average
from fluxcb._run.encoding import Decoder, Encoder
from fluxcb._run.feed import Feed
from fluxcb._run.state import HostState, Position
from fluxcb._typing import PyTree
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["DIFFERENCES", "Saver", "Snapshots"]

DIFFERENCES = ("callbacks", "data")
"""What of a run may be changed on purpose before it goes on."""

_FIT = ("epoch", "step", "ended", "rewinds", "rewound_to")
_TREES = ("params", "model_state", "opt_state")
_PACKAGES = ("fluxcb", "jax", "jaxlib", "numpy", "optax")


Saver = Callable[[Snapshot], None]


class Parts(Protocol):
    """What snapshots are taken of."""

    state: HostState
    graph: CallbackGraph
    feeds: dict[str, Feed]
    phases: tuple[Phase, ...]

    def kinds(self) -> dict[str, str]:
        """Return the kind of program that each phase's steps run in, by the phase's name."""
        ...


class Snapshots:
    """What host handlers that declare `{"*": Read()}` get as `learner.snapshots`.

    Args:
        parts: The parts of the Learner.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked: list[Saver] = []

    @property
    def asked(self) -> bool:
        """Whether somebody waits for a snapshot."""
        return bool(self._asked)

    def request(self, save: Saver) -> None:
        """Ask for a snapshot once all handlers of the moment have run: between two steps, or two epochs.

        The moment that asks may be any at which no step is under way: Trigger, FitStopping. All who ask share one.

        Args:
            save: Called with the snapshot.

        Raises:
            AccessError: Steps have been dispatched behind the one whose handler asks.
        """
        if self._parts.state.ahead:
            raise AccessError(
                "A snapshot is asked for at a step, and the next steps do not wait for it.",
                why="the train state is not that of the handler's step",
                fix='declare `{"*": Read()}`, and ask at Trigger: a schedule such as `every(..., steps=100)` says when',
            )
        if save not in self._asked:
            self._asked.append(save)

    def forget(self) -> None:
        """Forget who asked."""
        self._asked = []

    def give(self, phase: Phase | None) -> None:
        """Give everybody who asked the snapshot of this moment.

        Args:
            phase: The phase whose epoch is at hand, or None between two epochs.
        """
        asked, self._asked = self._asked, []
        if asked:
            snapshot, failures = self.take(phase), []
            for save in asked:
                try:
                    save(snapshot)
                except Exception as error:  # which is no reason for the others not to save
                    failures.append(error)
            if failures:
                for other in failures[1:]:
                    failures[0].add_note(f"and another save failed: {type(other).__name__}: {other}")
                raise failures[0]

    # -- taking -----------------------------------------------------------------------------

    def take(self, phase: Phase | None) -> Snapshot:
        """Return the state as it is now; nothing that happens later changes it.

        Args:
            phase: The phase whose epoch is at hand, or None between two epochs.

        Raises:
            DeclarationError: A callback keeps something that cannot be saved.
        """
        state, graph = self._parts.state, self._parts.graph
        carry = state.carry
        for leaf in jax.tree.leaves(carry):
            leaf.copy_to_host_async()
        trees = {name: _held(carry[name]) for name in (*_TREES, "cbstate")}
        encoder = Encoder()
        callbacks = {}
        for declared in graph.declared:
            saved = declared.callback.state_dict()
            if saved:
                callbacks[declared.name] = encoder.encode(saved, f"the state of {declared.label}")
        fit = state.fit
        at = None if phase is None else [type(phase).name, state.step_in_epoch, state.outer_step_in_epoch]
        if fit.at is not None:  # nothing has been run since this was restored
            at = list(astuple(fit.at))
        host = {
            "progress": {name: getattr(state, name) for name in ("step", "epoch", "step_in_epoch")},
            "cancelled": [state.cancelled, state.cancelled_in_epoch],
            "at": at,
            "fit": {name: getattr(fit, name) for name in _FIT},
            "key": encoder.encode(state.run_key, "the run's key"),
            "cbstate": {name: encoder.encode(v, f"`cbstate.{name}`") for name, v in state.cbstate.items()},
            "callbacks": callbacks,
            "data": {
                name: encoder.encode(feed.position(), f"the position of `data.{name}`")
                for name, feed in self._parts.feeds.items()
            },
        }
        average, averages = validated_average(graph, self._parts.phases), averages_by_name(graph, self._parts.phases)
        return Snapshot(state.step, state.epoch, trees, host, encoder.arrays, self.about(), average, averages)

    def about(self) -> dict[str, Any]:
        """Return what the run is made of."""
        return {
            "callbacks": {d.name: _class_of(d.callback) for d in self._parts.graph.declared},
            "data": {name: {"batches": _length(feed.source)} for name, feed in self._parts.feeds.items()},
            "programs": self._parts.kinds(),
            "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
            "devices": [self._platform(), jax.device_count(), platform.machine()],
        }

    def _platform(self) -> str:
        return self._parts.state.platform

    def trees(self) -> dict[str, PyTree]:
        """Return the pytrees that a snapshot of this run has, as they are now: the live arrays."""
        return {name: self._parts.state.carry[name] for name in (*_TREES, "cbstate")}

    # -- putting back -----------------------------------------------------------------------

    def differences(self, about: Mapping[str, Any], allow: Collection[str]) -> tuple[list[str], list[str]]:
        """Compare what a snapshot's run is made of with what this one is.

        Args:
            about: `Snapshot.about`.
            allow: What may differ, of `DIFFERENCES`.

        Returns:
            What makes it another run, and what may make its numbers differ in the last bits; a line each.
        """
        mine, wrong, inexact = self.about(), [], []
        if "callbacks" not in allow:
            wrong += _changes("callbacks", about["callbacks"], mine["callbacks"])
        if "data" not in allow:
            wrong += _changes("data", *({n: d["batches"] for n, d in of["data"].items()} for of in (about, mine)))
        for part in ("programs", "versions"):
            inexact += _changes(part, about[part], mine[part])
        if about["devices"] != mine["devices"]:
            inexact.append(f"devices: {about['devices']} became {mine['devices']}")
        return wrong, inexact

    def put_back(self, snapshot: Snapshot, staying: Collection[str] = ()) -> list[str]:
        """Go to where a snapshot was taken.

        Args:
            snapshot: A snapshot of a run that is made of the same, and whose trees have this run's structure.
            staying: Names of data that stays where it is.

        Returns:
            What it cost to find the data's positions, a line for each source that had to be read from its start.

        Raises:
            FluxcbError: A callback or a data source cannot take its state back.
        """
        state, host = self._parts.state, snapshot.host
        decoder = Decoder(snapshot.arrays)
        progress, fit = host["progress"], host["fit"]
        carry = dict(state.carry)
        for name in _TREES:
            carry[name] = _placed(carry[name], snapshot.trees[name])
        riding = snapshot.trees["cbstate"]
        carry["cbstate"] = {
            name: _placed(now, riding[name]) if name in riding else now for name, now in carry["cbstate"].items()
        }
        state.run_key = decoder.decode(host["key"], None, "the run's key")
        state.carry = carry
        for name, value in progress.items():
            setattr(state, name, value)
        state.cancelled, state.cancelled_in_epoch = host.get("cancelled", (0, 0))
        state.set_counters(**dict.fromkeys(COUNTERS[len(progress) :], 0))
        for name in state.cbstate:
            if name in host["cbstate"]:
                present = state.cbstate[name]
                state.cbstate[name] = decoder.decode(host["cbstate"][name], present, f"`cbstate.{name}`")
        for declared in self._parts.graph.declared:
            if declared.name in host["callbacks"]:
                self._load(declared.callback, declared.label, host["callbacks"][declared.name], decoder)
        at = host["at"]
        for name in _FIT:
            setattr(state.fit, name, fit[name])
        state.fit.at = Position(*at) if at is not None else None
        state.fit.restored = True
        lines = []
        for name, feed in self._parts.feeds.items():
            if name in host["data"] and name not in staying:
                replayed = feed.go_to(decoder.decode(host["data"][name], None, f"the position of `data.{name}`"))
                if replayed:
                    lines.append(f"data.{name}: {replayed:,} batches were read and thrown away to get there")
        return lines

    def _load(self, callback: Any, label: str, held: Any, decoder: Decoder) -> None:
        saved = decoder.decode(held, callback.state_dict(), f"the state of {label}")
        try:
            callback.load_state_dict(saved)
        except DeclarationError as error:
            raise ResumeError(
                f"{label} cannot take back the state that the checkpoint has for it: {error.what}",
                where=error.where,
                fix=error.fix or "construct it with the arguments it had when the checkpoint was written",
            ) from error
        except BaseException as error:
            error.add_note(f"raised in `load_state_dict` of {label}")
            raise


def _held(tree: PyTree) -> PyTree:
    """Return a pytree's arrays as copies on the host; those spread over several processes stay where they are."""

    def held(leaf: Any) -> Any:
        if is_key(leaf) or not leaf.is_fully_addressable:
            return jnp.copy(leaf)
        return np.array(leaf)

    return jax.tree.map(held, tree)


def _placed(now: PyTree, then: PyTree) -> PyTree:
    """Return the arrays of `then` as the program expects them: placed, and of the same (weak) types."""

    def placed(old: Any, new: Any) -> Any:
        if is_key(old):
            new = new if is_key(new) else jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(old))
        new = jnp.copy(new) if is_key(new) else jnp.array(new, copy=True)
        return jax.device_put(new, old.sharding) if old.committed else new

    return jax.tree.map(placed, now, then)


def _changes(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    lines = [f"{what}: {name} ({then[name]}) is missing now" for name in then if name not in now]
    lines += [f"{what}: {name} ({now[name]}) is new" for name in now if name not in then]
    return lines + [
        f"{what}: {name} was {then[name]}, and is {now[name]} now"
        for name in then
        if name in now and then[name] != now[name]
    ]


def _class_of(callback: Any) -> str:
    cls = type(unwrap(callback))
    return f"{cls.__module__}.{cls.__qualname__}"


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


@functools.cache  # it reads files
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
