"""Snapshots: the complete state of a run, taken between two steps or two epochs, and restored."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from fluxcb._compile.traced import COUNTERS
from fluxcb._declare.callback import unwrap
from fluxcb._declare.described import Description, describe_value
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import method_place
from fluxcb._errors import AccessError, CheckpointCorruptError, DeclarationError, FluxcbError, ResumeError
from fluxcb._interruptions import is_interruption
from fluxcb._run.averages import averages_by_name, validated_average
from fluxcb._run.encoding import Decoder, Encoder, state_of_callback
from fluxcb._run.fit_record import Position
from fluxcb._run.restore_undo import RestoreUndo
from fluxcb._run.run_changes import Change, allows, check_allowed_names, find_changes
from fluxcb._run.run_description import SnapshotSource, describe_run
from fluxcb._run.snapshot_arrays import host_copies, placed_like
from fluxcb._run.train_state import key_text
from fluxcb._run.unsaved_fields import UnsavedFields
from fluxcb._typing import PyTree
from fluxcb.checkpoints.snapshot import Snapshot, text_of

__all__ = ["Saver", "Snapshots"]

_FIT = ("epoch", "step", "ended", "rewinds", "rewound_to")
_TREES = ("params", "model_state", "opt_state")

Saver = Callable[[Snapshot], None]
IsSaved = Callable[[tuple[Any, ...]], bool]


class _Request(NamedTuple):
    """The optional functions of a request; see `Snapshots.request`."""

    is_saved: IsSaved | None
    prepare: Callable[[], None] | None


class Snapshots:
    """Takes and restores snapshots; host handlers that declare `{"*": Read()}` get it as `learner.snapshots`.

    Args:
        core: The core of the Learner.
        between_steps: Functions to call after all handlers of the moment; see `Emitter.between_steps`.
    """

    def __init__(self, core: SnapshotSource, between_steps: list[Callable[[Phase | None], None]]) -> None:
        self._core = core
        self._between_steps = between_steps
        self._requests: dict[Saver, _Request] = {}
        self.unsaved_fields = UnsavedFields()

    def request(self, save: Saver, is_saved: IsSaved | None = None, prepare: Callable[[], None] | None = None) -> None:
        """Request a snapshot after all handlers of the moment: between two steps, or two epochs.

        Any moment without a step in flight is possible, such as Trigger or FitStopping. All requests of a moment share
        one snapshot. Because it is taken after all handlers, a saver needs no order relative to callbacks that write.

        Args:
            save: A function to call with the snapshot.
            is_saved: A function of the `position` of the snapshot. If it returns True, `save` is not called. If this
                holds for all requests of the moment, nothing is copied from the device.
            prepare: A function to call before the state is copied, for example to wait until an earlier snapshot is
                written, so that only one of them is in memory. If it raises an error, `save` is not called.

        Raises:
            AccessError: Steps have been dispatched after the step of the requesting handler.
        """
        # A snapshot of a later step would not agree with what the handler has seen.
        if self._core.state.moment.ahead:
            raise AccessError(
                "A snapshot was requested at a step, but the next steps do not wait for the handler.",
                why="the train state is not that of the handler's step",
                fix='declare `{"*": Read()}`, and request it at Trigger, on a schedule such as `every(..., steps=100)`',
            )
        if not self._requests:
            self._between_steps.append(self.deliver)
        self._requests[save] = _Request(is_saved, prepare)

    def forget(self) -> None:
        """Drop all requests."""
        self._requests = {}

    def deliver(self, phase: Phase | None) -> None:
        """Take a snapshot and deliver it to all requests of this moment.

        Args:
            phase: The phase whose epoch is running, or None between two epochs.
        """
        # Cleared first, so that a save that fails is not repeated at the next moment.
        requests, self._requests = self._requests, {}
        position = self._position(phase) if requests else ()
        due = {save: r.prepare for save, r in requests.items() if r.is_saved is None or not r.is_saved(position)}
        failures: list[Exception] = []

        def succeeds(function: Callable[..., None], *args: Any) -> bool:
            try:
                function(*args)
            except Exception as error:  # the other requests must still be served
                failures.append(error)
                return False
            return True

        ready = [save for save, prepare in due.items() if prepare is None or succeeds(prepare)]
        if ready:
            snapshot = self.take(phase)
            for save in ready:
                succeeds(save, snapshot)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"and another save failed: {type(other).__name__}: {other}")
            raise failures[0]

    # -- taking -----------------------------------------------------------------------------

    def _position(self, phase: Phase | None) -> tuple[Any, ...]:
        """Return what `Snapshot.position` of a snapshot would be."""
        state = self._core.state
        return state.progress.step, self._at(phase), state.fit.ended

    def _at(self, phase: Phase | None) -> list[Any] | None:
        at = self._core.state.fit.at  # a position that was restored and not used yet
        if at is None and phase is not None:
            at = self._core.state.progress.position(phase)
        return at.as_list() if at is not None else None

    def take(self, phase: Phase | None) -> Snapshot:
        """Return a snapshot of the current state, which later changes do not affect.

        Args:
            phase: The phase whose epoch is running, or None between two epochs.

        Raises:
            DeclarationError: A callback has state that cannot be saved.
        """
        state, graph = self._core.state, self._core.graph
        live = self.trees()
        for leaf in jax.tree.leaves(live):  # start all transfers before waiting for the first one
            leaf.copy_to_host_async()
        trees = {name: host_copies(tree) for name, tree in live.items()}
        encoder = Encoder()
        callbacks = {}
        for declared in graph.declared:
            # A callback without state needs no entry.
            saved = state_of_callback(declared)
            if saved:
                callbacks[declared.name] = encoder.encode(saved, f"the state of {declared.label}")
        fit = state.fit
        host = {
            "progress": {name: getattr(state.progress, name) for name in ("step", "epoch", "step_in_epoch")},
            "cancelled": [state.progress.cancelled, state.progress.cancelled_in_epoch],
            "at": self._at(phase),
            "fit": {name: getattr(fit, name) for name in _FIT},
            "key": encoder.encode(state.train.run_key, "the run's key"),
            "cbstate": {name: encoder.encode(v, f"`cbstate.{name}`") for name, v in state.cbstate.items()},
            "callbacks": callbacks,
            "disabled": [declared.name for declared in graph.declared if declared.disabled],
            "switching": None if self._core.switching is None else sorted(self._core.switching),
            "data": {
                name: encoder.encode(stream.position(), f"the position of `data.{name}`")
                for name, stream in self._core.streams.items()
            },
        }
        # `load_model` must return the parameters with which the metrics were measured, and these may be an average.
        average, averages = validated_average(graph, self._core.phases), averages_by_name(graph, self._core.phases)
        progress = state.progress
        return Snapshot(progress.step, progress.epoch, trees, host, encoder.arrays, self.about(), average, averages)

    def about(self) -> dict[str, Any]:
        """Return a description of the run; see `describe_run`."""
        return describe_run(self._core, self._optimizer, self.unsaved_fields.changed())

    @functools.cached_property
    def _optimizer(self) -> Description:
        found = describe_value(self._core.state.optimizer, "optimizer")
        return {path.removeprefix("optimizer").removeprefix("."): text for path, text in found.items()}

    def trees(self) -> dict[str, PyTree]:
        """Return the pytrees of a snapshot as live arrays."""
        state = self._core.state
        cbstate = state.train.carry["cbstate"]
        return {**{name: state.train.live((name,)) for name in _TREES}, "cbstate": cbstate}

    # -- restoring --------------------------------------------------------------------------

    def differences(self, about: Mapping[str, Any], allow: Collection[str]) -> tuple[list[str], list[Change]]:
        """Compare the run of a snapshot with this run.

        Args:
            about: `Snapshot.about`.
            allow: The allowed differences; see `run_changes`.

        Returns:
            A line for each difference that makes it another run, and all other differences.

        Raises:
            DeclarationError: `allow` names a part that does not exist.
        """
        current = self.about()
        check_allowed_names(allow, about, current)
        # The length of a generator is None.
        then, now = (
            {
                name: "of unknown length" if data["batches"] is None else f"{data['batches']} batches"
                for name, data in d.items()
            }
            for d in (about["data"], current["data"])
        )
        different = _changes("callbacks", about["callbacks"], current["callbacks"], allow)
        layouts = {name: text for name, text in about.get("layouts", {}).items() if name in current["layouts"]}
        different += _changes("callbacks", layouts, {name: current["layouts"][name] for name in layouts}, allow)
        different += _changes("data", then, now, allow)
        different += self.other_phases(about)
        return different, find_changes(about, current, self._core.program_kinds(about["programs"]), allow)

    def other_phases(self, about: Mapping[str, Any]) -> list[str]:
        """Return a line that compares the training phases of a snapshot's run with those of this run, or no line.

        Args:
            about: `Snapshot.about`.
        """
        then, now = about["phases"], self._core.schedule_of_phases()
        if then == now:
            return []
        return [f"phases: [{', '.join(then)}] became [{', '.join(now)}]"]

    def missing(self, host: Mapping[str, Any], allow: Collection[str]) -> list[str]:
        """Return the parts of this run for which a snapshot has no state.

        Args:
            host: `Snapshot.host`.
            allow: The allowed differences; see `run_changes`.
        """
        state, streams = self._core.state, self._core.streams
        # It is not known which callback has created an entry.
        others = any(name.partition(".")[0] == "callbacks" for name in allow)
        lines = [f"cbstate.{n}" for n in state.cbstate if n not in host["cbstate"] and not others]
        return lines + [f"data.{n}" for n in streams if n not in host["data"] and not allows(allow, f"data.{n}")]

    def restore(
        self,
        snapshot: Snapshot,
        staying: Collection[str] = (),
        *,
        adopt: bool = False,
        changed_hyperparams: Collection[str] = (),
        changed_key: bool = False,
    ) -> list[str]:
        """Restore a snapshot.

        Args:
            snapshot: A snapshot of a run with the same parts, whose trees have the structure of this run.
            changed_hyperparams: Names of the hyperparameters that get the values of this program instead.
            changed_key: Whether the run continues with the random key of this program instead.
            staying: Names of data sources that keep their position.
            adopt: Whether arrays that lie in the right place are used without a copy. Training overwrites them.

        Returns:
            A line for each data source that had to be read from its start to reach the position, and for each callback
            that has not restored a part of its state.

        Raises:
            FluxcbError: A callback or a data source cannot restore its state. Nothing has changed then.
        """
        # A restore that fails leaves the Learner as it was, so that `fit` can continue without it.
        before = RestoreUndo(self._core, snapshot.host, staying)
        try:
            lines = self._replace_all(snapshot, staying, adopt, changed_key)
            self._keep_hyperparams(snapshot.about["hyperparams"], changed_hyperparams)
            if not changed_key:  # the next resume reports the difference again; earlier versions saved no such text
                train = self._core.state.train
                train.given_key_text = snapshot.about.get("key", key_text(train.run_key))
            # Checks that the restored state can be saved again, because a class may accept a state that it cannot
            # encode.
            RestoreUndo(self._core, snapshot.host, staying)
            self._core.adopt_kinds(snapshot.about["programs"])
        except BaseException as error:
            before.restore(error)
            if isinstance(error, FluxcbError) or is_interruption(error):
                raise
            raise CheckpointCorruptError(
                f"The checkpoint cannot be restored: {type(error).__name__}: {error}.",
                why="its files have the right checksums, but not the content that fluxcb writes",
                fix="restore another checkpoint",
            ) from error
        return lines

    def _replace_all(self, snapshot: Snapshot, staying: Collection[str], adopt: bool, changed_key: bool) -> list[str]:
        """Replace everything. Whatever can be checked without replacing anything comes first."""
        state, host = self._core.state, snapshot.host
        decoder = Decoder(snapshot.arrays)
        progress, fit, at = host["progress"], host["fit"], host["at"]
        # Everything that can fail without changing the Learner is decoded first.
        run_key = state.train.given_key
        if not changed_key:
            run_key = _key_like(decoder.decode(host["key"], None, "the run's key"), state.train.run_key)
        data = {
            name: decoder.decode(host["data"][name], None, f"the position of `data.{name}`")
            # A data source that the checkpoint lacks, which the user has allowed, keeps its position.
            for name in self._core.streams
            if name in host["data"] and name not in staying
        }
        # Nothing of the Learner has changed up to here, and forged or damaged values have been refused.
        placed = {name: placed_like(state.train.live((name,)), snapshot.trees[name], adopt) for name in _TREES}
        carried_entries = snapshot.trees["cbstate"]
        cbstate = {
            name: placed_like(now, carried_entries[name], adopt) if name in carried_entries else now
            # Entries that are missing in the checkpoint belong to new callbacks and keep their initial value.
            for name, now in state.train.carry["cbstate"].items()
        }
        state.train.run_key = run_key
        for name, tree in placed.items():
            state.train.replace((name,), tree)
        state.train.carry = {**state.train.carry, "cbstate": cbstate}
        cancelled, cancelled_in_epoch = host["cancelled"]
        state.progress.replace(**progress, cancelled=cancelled, cancelled_in_epoch=cancelled_in_epoch)
        # A checkpoint between two steps is never in a stopped window, so `stopped` becomes 0.
        state.train.set_counters(state.progress, **dict.fromkeys(COUNTERS[len(progress) :], 0))
        for name in state.cbstate:
            # An entry that is missing belongs to a new callback, whose `init` runs again after the restore.
            if name in host["cbstate"]:
                state.cbstate[name] = _entry(decoder, host["cbstate"][name], state.cbstate[name], f"`cbstate.{name}`")
        lines = []
        for declared in self._core.graph.declared:
            if declared.name in host["callbacks"]:
                note = self._load(declared.callback, declared.label, host["callbacks"][declared.name], decoder)
                if isinstance(note, str):  # a callback of a user may return something else, as PyTorch does
                    lines.append(f"callbacks.{declared.name}: {note}")
        for name in _FIT:
            setattr(state.fit, name, fit[name])
        state.fit.at = Position(*at) if at is not None else None
        state.fit.restored = True
        # Last, because finding a position can take long: some sources are read again from the start.
        for name, position in data.items():
            replayed = self._core.streams[name].seek(position)
            if replayed:
                batches = "1 batch" if replayed == 1 else f"{replayed:,} batches"
                lines.append(f"data.{name}: read and discarded {batches} to reach the position")
        return lines

    def _keep_hyperparams(self, saved: Mapping[str, Any], changed: Collection[str]) -> None:
        """Set the hyperparameters that the user has changed on purpose; for the others, keep what the run began with.

        Args:
            saved: The values with which the program of the saved run began.
            changed: Names of the hyperparameters that the user has changed.
        """
        train = self._core.state.train
        # The run continues with a saved value until the user allows another one, so the next resume reports it again.
        train.given_hyperparams.update({name: value for name, value in saved.items() if name not in changed})
        for name in changed:
            new = train.hyperparams.put(train.live(("opt_state",)), name, train.given_hyperparams[name])
            train.replace(("opt_state",), new)

    def _load(self, callback: Any, label: str, encoded: Any, decoder: Decoder) -> Any:
        current = callback.state_dict()
        keys = tuple(current) if isinstance(current, dict) else ()  # before the saved state is filled into it
        saved = decoder.decode(encoded, current, f"the state of {label}")
        try:
            return callback.load_state_dict(saved)
        except Exception as error:
            # A DeclarationError of the class becomes the text of the ResumeError below, which names the callback.
            if is_interruption(error) or (isinstance(error, FluxcbError) and not isinstance(error, DeclarationError)):
                error.add_note(f"raised in `load_state_dict` of {label}")
                raise
            message, where, why, fix = f"{type(error).__name__}: {error}.", (), "", ()
            if isinstance(error, DeclarationError):
                message, where, fix = error.what, error.where, error.fix
            elif isinstance(error, KeyError) and isinstance(saved, dict) and error.args[0] not in saved:
                where = method_place(type(unwrap(callback)), "load_state_dict")
                why = f"the saved state has {', '.join(map(repr, saved)) or 'no keys'}"
                fix = f"read a key that `state_dict` returns: {', '.join(map(repr, keys))}"
                if error.args[0] in keys:  # the checkpoint is older than this version of the class
                    fix = f"write `state.get({error.args[0]!r}, default)`, because the checkpoint does not have the key"
            raise ResumeError(
                f"{label} cannot restore its state from the checkpoint: {message}",
                where=where,
                why=why,
                fix=fix or "construct it with the arguments it had when the checkpoint was written",
            ) from error


def _key_like(found: Any, now: Any) -> Any:
    """Return the run's random key from a checkpoint, if it is of the same kind as the key of this run."""
    if not (isinstance(found, jax.Array) and found.dtype == now.dtype and found.shape == now.shape):
        raise CheckpointCorruptError(
            f"The checkpoint has {text_of(found) if hasattr(found, 'dtype') else repr(found)} as the run's random key, "
            f"which is {text_of(now)}.",
            fix="build the Learner with a key of the implementation that the run began with",
        )
    return found


def _entry(decoder: Decoder, encoded: Any, existing: Any, where: str) -> Any:
    """Return a restored entry of `cbstate`; objects keep their class."""
    value = decoder.decode(encoded, existing, where)
    # A forged file must not replace an object by plain data, which would fail later in a handler.
    is_object = callable(getattr(existing, "load_state_dict", None)) or dataclasses.is_dataclass(existing)
    if is_object and type(value) is not type(existing):
        raise CheckpointCorruptError(
            f"The checkpoint has {type(value).__name__} for {where}, which is an object of "
            f"{type(existing).__name__} in this run.",
            fix="restore another checkpoint",
        )
    return value


def _changes(what: str, then: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str]) -> list[str]:
    lines = {name: f"({then[name]}) is missing now" for name in then if name not in now}
    lines |= {name: f"({now[name]}) is new" for name in now if name not in then}
    lines |= {n: f"was {then[n]}, and is {now[n]} now" for n in then if n in now and then[n] != now[n]}
    return [f"{what}: {name} {line}" for name, line in lines.items() if not allows(allow, f"{what}.{name}")]
