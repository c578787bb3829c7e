"""Checks of names: metrics that are watched but that no callback provides, and names that two callbacks use."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.access import dotted, overlap, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.phases import Phase, ValidationPhase, defined_phase_names, named_phase
from fluxcb._declare.state import METRICS
from fluxcb._errors import CheckError, ConflictError, DeclarationError, MissingStateError
from fluxcb._typing import StatePath

__all__ = ["MetricNames", "mode_warnings"]

_MONITORS = "cbstate", "monitors"
_BY_METRIC = ("metrics_epoch", "metrics_step")  # entries of `cbstate` that are kept by phase and by metric


@dataclass
class MetricNames:
    """The names of the metrics that a set of callbacks provides.

    Args:
        declared: The callbacks.
        phases: The phases that will be run.

    Attributes:
        providers: The callbacks that provide a metric, keyed by the name of its phase and its own name.
        arrays: The keys of the metrics whose values are arrays.
    """

    declared: Sequence[Declared]
    phases: Sequence[type[Phase]]
    providers: dict[tuple[str, str], list[Declared]] = field(init=False)
    arrays: set[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.providers, self.arrays = {}, set()
        self._of_phase: dict[type[Phase], list[str]] = {phase: [] for phase in self.phases}
        run = {phase.name for phase in self.phases}
        methods = "provided_metrics", "array_metrics", "metric_phases"
        # All other callbacks have no metrics. They are skipped because sets can be large.
        self._providing = [
            d for d in self.declared if _overrides(d, *methods) or d.may_write(("cbstate", "metrics_epoch"))
        ]
        for declared in self._providing:
            own = {phase.name: phase for phase in declared.callback.metric_phases()}
            for phase in (*self.phases, *(phase for name, phase in own.items() if name not in run)):
                arrays = _names(declared, "array_metrics", phase) or ()
                self.arrays.update((phase.name, name) for name in arrays)
                for name in _names(declared, "provided_metrics", phase) or ():
                    # Otherwise the callback computes them, not the phase. Loggers log only numbers.
                    if phase.name not in own and name not in arrays:
                        self._of_phase[phase].append(name)
                    providers = self.providers.setdefault((phase.name, name), [])
                    if declared not in providers:  # two phases may have the same name
                        providers.append(declared)

    @property
    def known(self) -> list[str]:
        """The names of the provided metrics in the form in which they are logged, `validation/loss`."""
        return [f"{phase}/{name}" for phase, name in self.providers]

    def is_open(self, phase: str) -> bool:
        """Return whether a phase with this name may have metrics with unknown names."""
        of_name = [p for p in self.phases if p.name == phase] or [named_phase(phase)]
        return any(_names(d, "provided_metrics", p) is None for d in self._providing for p in of_name)

    # -- watched metrics ----------------------------------------------------------------------

    def watched(self) -> Iterator[tuple[Declared, Any]]:
        """Yield the metrics that callbacks watch, each with its callback."""
        for declared in self.declared:
            for watched in declared.callback.watched_metrics():
                if not all(isinstance(getattr(watched, part, None), str) for part in ("phase", "metric")):
                    raise DeclarationError(
                        f"`{declared.cls.__name__}.watched_metrics` returned {watched!r}, which is not a `Watched`.",
                        fix='return e.g. `(Watched.named("loss", None, "MyCallback"),)`',
                    )
                yield declared, watched

    def unprovided(self) -> Iterator[CheckError]:
        """Yield a problem for each watched metric that no callback provides."""
        if not self.providers:
            return  # `cbstate.metrics_epoch` itself is missing, which another check reports
        for declared, watched in self.watched():
            if (watched.phase, watched.metric) not in self.providers and not self.is_open(watched.phase):
                yield self._unprovided(declared, watched)

    def not_numbers(self) -> Iterator[CheckError]:
        """Yield a problem for each watched metric whose values are arrays."""
        for declared, watched in self.watched():
            if (watched.phase, watched.metric) in self.arrays:
                numbers = [name for name, key in zip(self.known, self.providers, strict=True) if key not in self.arrays]
                yield CheckError(
                    f"{declared.label} watches `{watched}`, whose values are arrays.",
                    where=f"the metrics whose values are numbers are {', '.join(f'`{name}`' for name in numbers)}"
                    if numbers
                    else (),
                    why="it compares values of different epochs, so they must be numbers",
                    fix=[
                        *(["watch one of these metrics instead"] if numbers else []),
                        "add a metric that reduces the array to a number: a subclass that sets `self.shape = ()` after "
                        "`super().__init__` and returns e.g. `super().compute(state).min()` from `compute`",
                    ],
                )

    def _unprovided(self, declared: Declared, watched: Any) -> CheckError:
        nearest = self._nearest(watched.phase, watched.metric)
        fix = ["watch one of these metrics instead"]
        if nearest:
            alone = "" if nearest.startswith(f"{watched.phase}/") else ", without `phase=`"
            fix = [f'write "{nearest}" as the metric{alone}']
        if any(phase.name == watched.phase for phase in self.phases):
            added = self._added(watched.phase, watched.metric)
            fix = [*added, *fix] if not nearest and "Metric(fn" not in "".join(added) else [*fix, *added]
        elif not any(phase == watched.phase for phase, _ in self.providers):
            inference = f'`InferenceRunner(data, ScalarStats("{watched.metric}"), name="{watched.phase}")`'
            fix.append(f"add a callback that provides it, e.g. {inference}")
        return MissingStateError(
            f"{declared.label} watches `{watched}`, which no callback provides."
            + (f" Did you mean `{nearest}`?" if nearest else ""),
            where=f"the callbacks provide {', '.join(f'`{name}`' for name in self.known)}",
            why="the metric would never have a value, so the callback would have no effect",
            fix=fix,
        )

    def _added(self, phase: str, metric: str) -> list[str]:
        """Return the edit that adds a metric to the callbacks, or no edit if the metric is there already."""
        head, _, rest = metric.partition("_")
        # `val_accuracy`, as other libraries name the validation's `accuracy`.
        meant = next((p.name for p in self.phases if rest and p.name.startswith(head)), phase)
        name = rest if meant != phase or (rest and phase.startswith(head)) else metric
        if name != metric and (meant, name) in self.providers:
            return []
        shipped = _near(name, METRICS)
        shipped = None if (meant, shipped) in self.providers else shipped
        code = METRICS[shipped] if shipped else f'Metric(fn, name="{name}")'
        # A list has one `Metrics` only, so the metric is added to those of the user.
        present = [repr(d.callback) for d in self.declared if d.cls.__name__ == "Metrics"]
        metrics = f"{present[0].removesuffix(')')}, " if present and present[0] != "Metrics()" else "Metrics("
        written = "" if (shipped or name) == metric else f', and write "{meant}/{shipped or name}" as the metric'
        return [f"add the metric: `{metrics}{code})`{written}"]

    def _nearest(self, wanted_phase: str, metric: str) -> str | None:
        """Return the logged name of the provided metric that the user most likely meant."""
        for name in self.known:
            if name.endswith(f"/{wanted_phase}/{metric}"):  # a metric with a slash in its own name
                return name
        head, _, rest = metric.partition("_")  # `val_loss`, as other libraries name it
        for phase, name in self.providers:
            if rest and (name == rest or _abbreviates(rest, name)) and phase.startswith(head):
                return f"{phase}/{name}"
        own = [name for phase, name in self.providers if phase == wanted_phase]
        name = _near(metric, own) or _near(metric, [name for _, name in self.providers])
        if name is None:
            return None
        phases = [phase for phase, provided in self.providers if provided == name]
        return f"{_near(wanted_phase, phases) or phases[0]}/{name}"

    def unprovided_parts(self) -> Iterator[CheckError]:
        """Yield a problem for each declared part whose metric does not exist: `cbstate.metrics_epoch.training.los`."""
        if not self.providers:
            return
        found: set[tuple[Declared, StatePath]] = set()
        for declared in self.declared:
            for path, permission, where in declared.accesses():
                if len(path) < 4 or path[0] != "cbstate" or path[1] not in _BY_METRIC or writes(permission):
                    continue
                phase, metric = path[2:4]
                if (phase, metric) in self.providers or (declared, path) in found or self._may_hold(path):
                    continue
                found.add((declared, path))
                yield self._unprovided_part(declared, path, where)

    def _may_hold(self, path: StatePath) -> bool:
        """Return whether callbacks may store metrics with unknown names at a path."""
        phase = path[2]
        run = {phase for phase, _ in self.providers}
        if (phase not in run and phase in defined_phase_names()) or self.is_open(phase):
            return True
        providing = {declared for of in self.providers.values() for declared in of}
        return any(declared.may_write(path[:2]) for declared in self.declared if declared not in providing)

    def _unprovided_part(self, declared: Declared, path: StatePath, where: str) -> CheckError:
        hub, phase, metric = dotted(path[:2]), *path[2:4]
        nearest = self._nearest(phase, metric)
        fix = self._added(phase, metric)
        hint = ""
        if nearest:
            near_phase, _, near_metric = nearest.partition("/")
            hint = f" Did you mean `{hub}.{near_phase}.{near_metric}`?"
            fix.insert(0, f"declare access to `{hub}.{near_phase}.{near_metric}` instead")
        return MissingStateError(
            f"{declared.label} reads `{dotted(path)}`, a metric that no callback provides.{hint}",
            where=[where, f"the callbacks provide {', '.join(f'`{name}`' for name in self.known)}"],
            why="reading a metric that has no values is an error",
            fix=fix,
        )

    def without_data(self, has_data: Collection[str], filled: Collection[str]) -> Iterator[CheckError]:
        """Yield a problem for each watched metric of a phase that never runs because it has no data.

        Args:
            has_data: Names of the phases that have data.
            filled: Names of the phases whose data callbacks may assign.
        """
        run = {phase.name for phase in self.phases}
        for declared, watched in self.watched():
            phase = watched.phase
            if phase not in run or phase in has_data or phase in filled or self.is_open(phase):
                continue
            if self._is_computed_otherwise(phase):
                continue
            others = [f"{other}/{watched.metric}" for other in has_data if (other, watched.metric) in self.providers]
            yield MissingStateError(
                f"{declared.label} watches `{watched}`, but the Learner has no data for {phase}.",
                why="the metric would never have a value, so the callback would have no effect",
                fix=[
                    _passing_data(phase),
                    *(f'write "{name}" as the metric, without `phase=`' for name in others),
                ],
            )

    def _is_computed_otherwise(self, phase: str) -> bool:
        """Return whether a callback computes the metrics of a phase from data that is not the Learner's."""
        return any(phase in (p.name for p in d.callback.metric_phases()) for d in self.declared)

    def parts_without_data(self, has_data: Collection[str], filled: Collection[str]) -> Iterator[CheckError]:
        """Yield a problem for each declared read of metrics of a phase that never runs because it has no data.

        Args:
            has_data: Names of the phases that have data.
            filled: Names of the phases whose data callbacks may assign.
        """
        absent = {p.name for p in self.phases if not self._is_computed_otherwise(p.name)} - {*has_data, *filled}
        runs = [phase for phase in self.phases if phase.name in has_data]
        for declared in self.declared if absent else ():
            found: dict[StatePath, str] = {}
            for handler in declared.handlers:
                # A handler of the phase itself does not run either, for which a fit has a warning.
                if not any(issubclass(phase, handler.phase) for phase in runs):
                    continue
                where = declared.where if handler.access is None else declared.place_of(handler)
                for path, permission in declared.access_of(handler).items():
                    named = path[0] == "cbstate" and len(path) > 2 and path[1] in _BY_METRIC and path[2] in absent
                    if named and not writes(permission) and not self._may_be_added(path):
                        found.setdefault(path, where)
            for path, where in found.items():
                yield self._part_without_data(declared, path, where, has_data)

    def _may_be_added(self, path: StatePath) -> bool:
        """Return whether a callback may add values at a path, other than those of the metrics of a phase that runs."""
        for declared in self.declared:
            of_user = not declared.is_shipped or declared.cls.access_argument is not None
            for written, permission in declared.access.items():
                # The callbacks of the library name the phase to which they add, unless they add to those that run.
                if writes(permission) and (written[:3] == path[:3] or (of_user and overlap(written, path))):
                    return True
        return False

    def _part_without_data(
        self, declared: Declared, path: StatePath, where: str, has_data: Collection[str]
    ) -> CheckError:
        hub, phase, *metric = path[1:]
        names = [other for other in has_data if metric and (other, metric[0]) in self.providers]
        test = f'"{metric[0]}" in learner.cbstate.{hub}["{phase}"]' if metric else f'"{phase}" in learner.cbstate.{hub}'
        return MissingStateError(
            f"{declared.label} reads `{dotted(path)}`, but the Learner has no data for {phase}.",
            where=where,
            why="it would never have a value",
            fix=[
                _passing_data(phase),
                *(f"declare and read `cbstate.{hub}.{other}.{metric[0]}` instead" for other in names),
                f"to read it only if it exists, declare `Read()` on `cbstate.{hub}`, and test `{test}`",
            ],
        )

    # -- names of logged values ----------------------------------------------------------------

    def unlogged(self) -> Iterator[CheckError]:
        """Yield a problem for each logged value that a callback reads, but that no callback logs."""
        logs = [declared for declared in self.declared if declared.may_write(_MONITORS)]
        names = {d: _names(d, "logged_names", self._of_phase) for d in logs}
        # `LogMetrics` logs the metrics of all phases, which may have unknown names.
        if not logs or None in names.values() or any(self.is_open(phase.name) for phase in self.phases):
            return
        logged = list(dict.fromkeys(name for of in names.values() for name in of or ()))
        for declared in self.declared:
            for name in _names(declared, "watched_names") or ():
                if name not in logged:
                    yield self._unlogged(declared, name, logged)

    def _unlogged(self, declared: Declared, name: str, logged: Sequence[str]) -> CheckError:
        near = next((other for other in logged if other.endswith(f"/{name}")), None) or _near(name, logged)
        fix = [f'write "{near}" as the name'] if near else []
        if name in self.known:
            fix.append("add `LogMetrics()` to the callbacks")
        fix.append(f'log the value in a callback of your own: `learner.cbstate.monitors.put_scalar("{name}", value)`')
        return MissingStateError(
            f"{declared.label} reads the logged value `{name}`, which no callback logs."
            + (f" Did you mean `{near}`?" if near else ""),
            where=f"the callbacks log {', '.join(f'`{known}`' for known in logged) or 'nothing'}",
            why="the value would never exist",
            fix=fix,
        )

    # -- names that two callbacks use -----------------------------------------------------------

    def doubled(self, conflicts: Collection[tuple[int, int]]) -> Iterator[CheckError]:
        """Yield a problem for each pair of callbacks that provide a metric, or log, under the same name.

        Args:
            conflicts: Positions of the pairs that already conflict. They are not reported again.
        """
        pairs: dict[tuple[int, int], tuple[Declared, Declared, list[str], str]] = {}
        provided = {f"{phase}/{name}": of for (phase, name), of in self.providers.items()}
        for names, verb in ((provided, "provide the metric"), (self._logged(), "log")):
            for name, of in names.items():
                for one, other in itertools.combinations(of, 2):
                    key = one.position, other.position
                    if key not in conflicts:
                        pairs.setdefault(key, (one, other, [], verb))[2].append(name)
        for one, other, names, verb in pairs.values():
            first = dict.fromkeys(names)
            shown = " and ".join(f"`{name}`" for name in list(first)[:2])
            more = f" and {len(first) - 2} more" if len(first) > 2 else ""
            yield ConflictError(
                f"{one.label} and {other.label} both {verb} {shown}{more}.",
                why="values are stored by name, so the values of both would be mixed",
                fix=_cures(one, other),
            )

    def _logged(self) -> dict[str, list[Declared]]:
        found: dict[str, list[Declared]] = {}
        for declared in self.declared:
            if _overrides(declared, "logged_names"):
                names = _names(declared, "logged_names", self._of_phase) or ()
            else:  # the class may declare each name that it logs
                names = {p[2] for p, a, _ in declared.accesses() if p[:2] == _MONITORS and len(p) > 2 and writes(a)}
            for name in names:
                found.setdefault(name, []).append(declared)
        return found


def mode_warnings(declared: Sequence[Declared]) -> Iterator[str]:
    """Yield a warning for each watched metric of new callbacks whose mode is assumed; see `Watched.default_mode`."""
    # Callbacks that belong to a Learner were there before its list of callbacks changed.
    new = (d.callback for d in declared if getattr(unwrap(d.callback), "_fluxcb_owner", None) is None)
    texts = (getattr(watched, "mode_warning", None) for callback in new for watched in callback.watched_metrics())
    yield from dict.fromkeys(text for text in texts if text is not None)


def _passing_data(phase: str) -> str:
    # A pair has no place for the data of another phase.
    give = "data=(training, validation)" if phase == ValidationPhase.name else f'data={{"{phase}": batches}}'
    return f"pass data for it to the Learner: `{give}`"


def _near(name: str, known: Collection[str]) -> str | None:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else next((longer for longer in known if _abbreviates(name, longer)), None)


def _abbreviates(short: str, name: str) -> bool:
    """Return whether a name is the beginning of another one: `acc`, as other libraries call `accuracy`."""
    return len(short) >= 3 and name.startswith(short)


def _cures(one: Declared, other: Declared) -> list[str]:
    if one.cls is other.cls:
        return [
            f"remove one `{one.cls.__name__}` from the callbacks",
            "use another name for one of the two, if it accepts a name",
        ]
    return ["rename the values of one of the two"]


def _overrides(declared: Declared, *methods: str) -> bool:
    cls = type(declared.callback)
    return any(getattr(cls, method) is not getattr(Callback, method) for method in methods)


def _names(declared: Declared, method: str, *arguments: Any) -> Collection[str] | None:
    """Return the names that a callback declares, or None if it does not know them."""
    names = getattr(declared.callback, method)(*arguments)
    if names is None or names == ():  # most callbacks
        return names
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise DeclarationError(
            f"`{declared.cls.__name__}.{method}` must return a collection of names or None, not {names!r}.",
            fix='return e.g. `("loss", "accuracy")`',
        )
    return tuple(dict.fromkeys(names))
