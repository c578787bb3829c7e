"""Validating the requirements of callbacks that need a Learner or its state, beyond the checks of the graph."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from fluxcb._check.graph import CallbackGraph
from fluxcb._check.metric_names import MetricNames, mode_warnings
from fluxcb._check.uncalled_handlers import uncalled_handlers
from fluxcb._compile.arrays import leaves_of
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._declare.access import Write, lookup, overlap, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import StepEnd, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import assigns
from fluxcb._declare.state import PROVIDERS
from fluxcb._declare.uncalled_methods import unmarked
from fluxcb._errors import CheckError, CheckpointError, DeclarationError, MissingStateError, did_you_mean
from fluxcb._run.inference_checks import check_inference
from fluxcb._run.refused_access import refuse_late_writes
from fluxcb._tracebacks import warn_user
from fluxcb._typing import StatePath
from fluxcb.callbacks import Checkpointer, Monitors, StopOnNaNLoss
from fluxcb.checkpoints.savers import RunLock

__all__ = [
    "carried_entries",
    "check_hyperparams",
    "check_watched_data",
    "refuse_shared",
    "refuse_shared_names",
    "refuse_useless",
    "require_created",
    "require_used",
    "traced_entries",
    "warn_ineffective",
]


def refuse_shared(graph: CallbackGraph, owner: object) -> None:
    """Check that no callback belongs to another Learner than `owner`, and that no two savers have one directory.

    Raises:
        DeclarationError: A callback belongs to another Learner.
        CheckpointError: Two savers have the same directory.
    """
    _refuse_shared_folders(graph)
    for declared in graph.declared:
        # A weak reference, so that a callback does not keep its old Learner alive.
        reference = getattr(unwrap(declared.callback), "_fluxcb_owner", None)
        if reference is not None and reference() not in (None, owner):
            gc.collect()  # an unreachable Learner may still wait for garbage collection
        if reference is not None and reference() not in (None, owner):
            raise DeclarationError(
                f"{declared.label} already belongs to another Learner.",
                why="a callback's own state would mix the two trainings",
                fix=[
                    "construct a new instance for each Learner; `fluxcb check` and pytest call a function such as "
                    "`make_learner` several times, so construct it inside the function",
                    "free it first: `other.callbacks.remove(callback)`",
                ],
            )


def _refuse_shared_folders(graph: CallbackGraph) -> None:
    # The locks of two savers of one directory would exclude each other, as if of two runs.
    folders: dict[str, RunLock] = {}
    for saver in (unwrap(declared.callback) for declared in graph.declared):
        folder = getattr(saver, "folder", None)  # `RunLock` does not require it
        if not isinstance(saver, RunLock) or folder is None:
            continue
        other = folders.setdefault(os.path.realpath(str(folder)), saver)  # one directory can have several paths
        if other is not saver:
            raise CheckpointError(
                f"{other!r} and {saver!r} write checkpoints to the same directory.",
                why="their checkpoints would replace each other",
                fix=["use a separate directory for each of them", "remove one of them"],
            )


def refuse_shared_names(phases: Sequence[Phase]) -> None:
    """Check that all phases have different names.

    Raises:
        DeclarationError: Two phases have the same name.
    """
    by_name: dict[str, Phase] = {}
    for phase in phases:
        name = type(phase).name
        # The same instance may appear twice; it has one set of data and metrics.
        other = by_name.setdefault(name, phase)
        if other is not phase:
            raise DeclarationError(
                f"`phases` contains {other!r} and {phase!r}, which have the same `name`, {name!r}.",
                where=f"{type(phase).__module__}.{type(phase).__qualname__}",
                why="the name selects the data and the metrics of a phase, so the two would share them",
                fix=f'give each class a name of its own: `name = "{name}_2"` in the body of `{type(phase).__name__}`'
                if type(phase) is not type(other)
                else f'derive a class with another name: `class Second({type(phase).__name__}): name = "{name}_2"`',
            )


def check_hyperparams(graph: CallbackGraph, hyperparams: HyperparamIndex) -> None:
    """Check that the optimizer has the hyperparameters that callbacks declare.

    Raises:
        FluxcbError: A hyperparameter is missing.
    """
    for declared in graph.declared:
        for path, permission in declared.access.items():
            # The path `hyperparams` alone names none that could be missing.
            if path[0] == "hyperparams" and len(path) > 1:
                writing = isinstance(permission, Write)
                hyperparams.require(path[1], writing=writing, declared=declared, where=declared.where)


def check_watched_data(graph: CallbackGraph, has_data: Collection[str]) -> None:
    """Check that the metrics that callbacks watch or read belong to phases with data, if the Learner has any data.

    Args:
        graph: The graph.
        has_data: Names of the phases that have data.

    Raises:
        CheckError: A phase has no data, and no callback can assign its data.
    """
    if not has_data:
        return  # a hand-written loop provides its own batches
    written = [path for d in graph.declared for path, permission in d.access.items() if writes(permission)]
    names = {phase.name for phase in graph.phases}
    # A callback that may assign the data of a phase can provide it later.
    filled = {name for name in names if any(overlap(path, ("data", name)) for path in written)}
    # All problems at once, as in the check of the graph.
    names_of_metrics = MetricNames(graph.declared, graph.phases)
    found = names_of_metrics.without_data, names_of_metrics.parts_without_data
    problems = [problem for find in found for problem in find(has_data, filled)]
    if problems:
        raise CheckError.of(problems)


def refuse_useless(graph: CallbackGraph) -> None:
    """Check that no callback declares what could have no effect.

    Raises:
        AccessError: A callback without traced handlers writes a flag of the step.
        DeclarationError: A class has `load_state_dict`, but no `state_dict`. Or a callback would look for the metric of
            an epoch only within the epoch.
        MissingStateError: An `InferenceRunner` fetches a step value that does not exist.
    """
    refuse_late_writes(graph)
    _refuse_lost_state(graph)
    _refuse_early_metrics(graph)
    check_inference(graph)


def warn_ineffective(graph: CallbackGraph) -> None:
    """Warn about what has no effect, entries of `cbstate` that two callbacks create, and assumed modes of metrics."""
    for text in mode_warnings(graph.declared):
        _warn(text)
    _warn_empty_log(graph)
    _warn_shared_entries(graph)
    _warn_inert(graph)
    _warn_uncalled(graph)
    _warn_unused_stop(graph)
    for declared, others in graph.ineffective_orders():
        _warn(
            f"`in_order` has no effect on {declared.label}: it never runs at the same event and phase as "
            f"{' or '.join(other.label for other in others)}. Events come in a fixed order. {_when(declared)}, and "
            f"{', and '.join(map(_when, others))}. Leave {declared.label} out of `in_order`, or give it a handler of "
            "another event."
        )


def _when(declared: Declared) -> str:
    titles = dict.fromkeys(f"{h.event.__name__} x {h.phase.__name__}" for h in declared.handlers)
    return f"{declared.label} runs at {', '.join(titles)}"


def _warn_empty_log(graph: CallbackGraph) -> None:
    """Warn if a `Monitors` has backends, but no callback logs anything."""
    for declared in graph.declared:
        monitors = unwrap(declared.callback)
        # Without backends, a `Monitors` only keeps values in memory, so an empty one is no mistake.
        if not isinstance(monitors, Monitors) or not monitors.backends:
            continue
        if any(other.may_write(("cbstate", "monitors")) for other in graph.declared if other is not declared):
            continue
        _warn(
            f"{declared.label} has backends, but no callback logs anything, so the log will be empty. "
            "Add `LogMetrics()` to the callbacks."
        )


def _refuse_early_metrics(graph: CallbackGraph) -> None:
    """Check that callbacks that watch a metric of a phase also run after the epoch, when it has its value.

    Raises:
        DeclarationError: A callback runs only within epochs, for example every 10 steps.
    """
    names = {phase.name for phase in graph.phases}
    for phase in filter(lambda phase: phase.trains, graph.phases):
        for handler in graph.handlers(Trigger, phase):
            if isinstance(unwrap(handler.declared.callback), Checkpointer):
                continue  # also saves checkpoints that have no value of the metric
            early = [schedule for schedule in handler.schedules if schedule.after_epoch() is None]
            # An `InferenceRunner` can run on the same schedule, so its metrics have values within the epoch.
            watched = [of for of in handler.declared.callback.watched_metrics() if early and of.phase in names]
            if watched:
                raise DeclarationError(
                    f"{handler.declared.label} watches `{watched[0]}`, and runs only within epochs ({early[0]}).",
                    where=handler.declared.where,
                    why="the metric gets its value at the end of an epoch, so the callback would never act",
                    fix="give the period in epochs, e.g. `every(callback, epochs=1)`",
                )


def _refuse_lost_state(graph: CallbackGraph) -> None:
    """Check that classes with `load_state_dict` also have `state_dict`, without which nothing is saved.

    Raises:
        DeclarationError: A class has only `load_state_dict`.
    """
    for declared in graph.declared:
        cls = type(unwrap(declared.callback))
        if cls.load_state_dict is not Callback.load_state_dict and cls.state_dict is Callback.state_dict:
            raise DeclarationError(
                f"`{cls.__name__}` has `load_state_dict`, but no `state_dict`.",
                where=declared.where,
                why="checkpoints would save nothing of it, so a resumed run would begin with another state",
                fix="define `state_dict(self)`, which returns what `load_state_dict(self, state)` restores",
            )


def _warn_shared_entries(graph: CallbackGraph) -> None:
    """Warn about an entry of `cbstate` that two callbacks create and write at different moments.

    If they wrote it at the same moment, they would conflict. So only the second use of a name can have gone unnoticed.
    """
    creators: dict[str, list[Declared]] = {}
    for declared in graph.declared:
        for path in declared.access:
            own_entry = len(path) == 2 and path[0] == "cbstate" and not declared.is_shipped
            if own_entry and _writes(declared, path) and assigns(declared.cls.init, path[1]):
                creators.setdefault(path[1], []).append(declared)
    for name, found in creators.items():
        for one, other in itertools.combinations(found, 2):
            if one.cls is not other.cls and not _are_related(graph, one, other, ("cbstate", name)):
                _warn(
                    f"{one.label} and {other.label} both create and write `cbstate.{name}`, and share its value. If "
                    f"that is intended, return `({one.cls.__name__},)` from `{other.cls.__name__}.runafter()`. "
                    "Otherwise, give one of the entries another name."
                )


def _are_related(graph: CallbackGraph, one: Declared, other: Declared, path: StatePath) -> bool:
    """Return whether one of two callbacks names the other, or both write a path at some moment in a known order."""
    if isinstance(unwrap(one.callback), other.runafter) or isinstance(unwrap(other.callback), one.runafter):
        return True
    writers = (
        {handler.declared for handler in handlers if lookup(handler.access, path) is not None}
        for handlers in graph.orders.values()
    )
    return any({one, other} <= together for together in writers)


def _warn_unused_stop(graph: CallbackGraph) -> None:
    """Warn about callbacks that set `step.stop` if no host handler acts on it."""
    stop = ("step", "stop")
    for declared in graph.declared:
        # A callback with a host handler of StepEnd may act on the flag itself, by a Cancel or an error.
        if not _writes(declared, stop) or any(entry.event is StepEnd for entry in declared.handlers):
            continue
        others = (other for other in graph.declared if other is not declared)
        if not any(lookup(other.access, stop) is not None and not _writes(other, stop) for other in others):
            _warn(
                f"{declared.label} sets `step.stop`, but no host handler acts on it, so the training would continue "
                'with the next step. Add `"control": Append()` to `stateaccess`, and a handler of StepEnd: '
                '`if learner.step.stop: raise CancelFitting("the reason")`.'
            )


def _writes(declared: Declared, path: StatePath) -> bool:
    permission = declared.access.get(path)
    return permission is not None and writes(permission)


def _warn_inert(graph: CallbackGraph) -> None:
    """Warn about callbacks that do nothing, and about methods that look like handlers but are never called."""
    unmarked_methods: dict[type, list[Any]] = {}
    for declared in graph.declared:
        callback = unwrap(declared.callback)
        cls = type(callback)
        # An instance that chooses its handlers may deliberately have none.
        if _chooses_handlers(cls):
            continue
        # A warning and not an error, because the method may be a helper that other code calls.
        known = cls in unmarked_methods
        if not known:
            unmarked_methods[cls] = unmarked(cls)
        if forgotten := unmarked_methods[cls]:
            for name in () if known else (function.__name__ for function in forgotten):
                _warn(
                    f"`{cls.__name__}.{name}` has the parameters of a handler, but it is not marked with `@on`, so "
                    f"fluxcb does not call it. Write e.g. `@on(StepEnd, TrainingPhase)` above `def {name}`. If other "
                    "code calls it, annotate the parameter: `event: Event`."
                )
        # A callback can act without handlers, for example by its `init`.
        elif not callback.handlers() and all(getattr(cls, name) is getattr(Callback, name) for name in _EFFECTS):
            _warn(
                f"{declared.label} has no handlers, so it does nothing. Mark a method with `@on`, e.g. "
                "`@on(StepEnd, TrainingPhase)` above `def act(self, event, phase, learner):`."
            )


def _warn_uncalled(graph: CallbackGraph) -> None:
    """Warn about handlers that no phase calls."""
    for declared, text in uncalled_handlers(graph):
        # `StopOnNaNLoss` is one of the defaults, which users may not know.
        is_guard = isinstance(unwrap(declared.callback), StopOnNaNLoss)
        _warn(text + is_guard * " Otherwise, a loss that is NaN or infinite does not end the fit.")


_EFFECTS = (
    *("init", "runafter", "resolveconflict", "state_dict", "output_locations", "validates_with", "measured_with"),
    *("provided_metrics", "metric_phases", "watched_metrics", "logged_names", "left_out_batches"),
)
"""Methods through which a callback without handlers can affect the Learner or other callbacks."""


def _chooses_handlers(cls: type[Callback]) -> bool:
    return cls.handlers is not Callback.handlers


def _warn(text: str) -> None:
    warn_user(text, UserWarning)


def require_created(graph: CallbackGraph, exists: Collection[str]) -> None:
    """Check that the `cbstate` entries that callbacks declare exist, once all have been initialized.

    Raises:
        MissingStateError: An entry does not exist.
    """
    for declared in graph.declared:
        for path, permission in declared.access.items():
            # The handlers of an optional read check for the entry themselves.
            if getattr(permission, "optional", False):
                continue
            if path[0] == "cbstate" and len(path) > 1 and path[1] not in exists:
                # Suggest the callbacks that declare to write the entry; otherwise the reader itself.
                writers = dict.fromkeys(
                    d.label
                    for d in graph.declared
                    for p, granted in d.access.items()
                    if writes(granted) and (p[:2] == path[:2] or p == ("cbstate",))
                )
                init = f"assign `learner.cbstate.{path[1]}` in the `init` of {' or '.join(writers or [declared.label])}"
                known = PROVIDERS.get(path[1])
                raise MissingStateError(
                    f"{declared.label} declares `cbstate.{path[1]}`, which no callback's `init` creates."
                    f"{did_you_mean(path[1], exists)}",
                    where=declared.where,
                    why="shared state must exist before the first handler runs",
                    fix=f"add `{known}()` to the callbacks, which creates it" if known else init,
                )


def require_used(graph: CallbackGraph, carried_entries: Collection[str], exists: Collection[str]) -> None:
    """Check that the `cbstate` entries that phases use exist and are made of JAX arrays.

    Raises:
        MissingStateError: An entry does not exist, or is not made of JAX arrays.
    """
    for phase, name in _used_by_phases(graph):
        if name in carried_entries:
            continue
        assign = f"assign `learner.cbstate.{name}` in the `init` of a callback that declares to write it"
        known = PROVIDERS.get(name)
        missing, fix = "no callback's `init` creates", f"add `{known}()` to the callbacks" if known else assign
        # The step is traced with arrays, so a Python object in the entry cannot be used.
        if name in exists:
            missing, fix = (
                "is not made of JAX arrays",
                f"create it as arrays: `learner.cbstate.{name} = jnp.zeros(...)`",
            )
        hint = did_you_mean(name, exists) if name not in exists else ""
        raise MissingStateError(
            f"`{phase.__name__}` uses `cbstate.{name}`, which {missing}.{hint}",
            where=f"{phase.__module__}.{phase.__qualname__}.uses",
            why="the compiled step takes the entry as arrays, from its first call on",
            fix=fix,
        )


def _used_by_phases(graph: CallbackGraph) -> list[tuple[type[Phase], str]]:
    """Return the phases that use entries of `cbstate`, each with the name of one entry."""
    return [(phase, path.partition(".")[2]) for phase in graph.phases for path in phase.uses]


def carried_entries(graph: CallbackGraph, cbstate: Mapping[str, Any]) -> list[str]:
    """Return the `cbstate` entries that belong in the carry: JAX arrays that a traced handler or a phase declares."""
    declared = traced_entries(graph)
    return [
        name
        for name, value in cbstate.items()
        if (name in declared or "*" in declared)
        and (leaves := leaves_of(value))
        # Tracing would turn a Python number into an array, so an entry with one stays on the host.
        and all(isinstance(leaf, jax.Array) for leaf in leaves)
    ]


def traced_entries(graph: CallbackGraph) -> set[str]:
    """Return the `cbstate` entries that a traced handler or a phase declares. `*` stands for all entries."""
    # Found by the declared access, so a callback needs no declaration beyond `stateaccess`.
    declared = {name for _, name in _used_by_phases(graph)}
    for (event, _), handlers in graph.orders.items():
        # Host handlers can read an entry from the carry as well, so they do not decide.
        if not issubclass(event, TracedEvent):
            continue
        for handler in handlers:
            for path in handler.access:
                if path[0] == "cbstate" and len(path) > 1:
                    declared.add(path[1])
                elif path in (("cbstate",), ("*",)):
                    declared.add("*")
    return declared
