"""Checks of names: metrics that are watched but that no callback provides, and names that two callbacks use."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.declared import Declared
from fluxcb._declare.phases import Phase, ValidationPhase, named_phase
from fluxcb._errors import CheckError, ConflictError, DeclarationError, MissingStateError

__all__ = ["MetricNames"]


@dataclass
class MetricNames:
    """The names of the metrics that a set of callbacks provides.

    Args:
        declared: The callbacks.
        phases: The phases that will be run.

    Attributes:
        providers: The callbacks that provide a metric, keyed by the name of its phase and its own name.
    """

    declared: Sequence[Declared]
    phases: Sequence[type[Phase]]
    providers: dict[tuple[str, str], list[Declared]] = field(init=False)

    def __post_init__(self) -> None:
        self.providers = {}
        self._of_phase: dict[type[Phase], list[str]] = {phase: [] for phase in self.phases}
        run = {phase.name for phase in self.phases}
        for declared in self.declared:
            own = {phase.name: phase for phase in declared.callback.metric_phases()}
            for phase in (*self.phases, *(phase for name, phase in own.items() if name not in run)):
                for name in _names(declared, "provided_metrics", phase) or ():
                    if phase.name not in own:  # otherwise the callback computes them, not the phase
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
        return any(_names(d, "provided_metrics", p) is None for d in self.declared for p in of_name)

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

    def _unprovided(self, declared: Declared, watched: Any) -> CheckError:
        nearest = self._nearest(watched)
        fix = ["watch one of these metrics instead"]
        if nearest:
            alone = "" if nearest.startswith(f"{watched.phase}/") else ", without `phase=`"
            fix = [f'write "{nearest}" as the metric{alone}']
        if any(phase.name == watched.phase for phase in self.phases):
            fix.append(f'add the metric: `Metrics(Metric(fn, name="{watched.metric}"))`')
        elif not any(phase == watched.phase for phase, _ in self.providers):
            inference = f'`InferenceRunner(data, ScalarStats("{watched.metric}"), name="{watched.phase}")`'
            fix.append(f"add a callback that provides it, e.g. {inference}")
        return MissingStateError(
            f"{declared.label} watches `{watched}`, which no callback provides."
            + (f" Did you mean `{nearest}`?" if nearest else ""),
            where=f"the callbacks provide {', '.join(f'`{name}`' for name in self.known)}",
            why="a metric that never has a value decides nothing",
            fix=fix,
        )

    def _nearest(self, watched: Any) -> str | None:
        """Return the logged name of the provided metric that the user most likely meant."""
        for name in self.known:
            if name.endswith(f"/{watched}"):  # a metric with a slash in its own name
                return name
        head, _, rest = watched.metric.partition("_")  # `val_loss`, as other libraries name it
        for phase, name in self.providers:
            if rest and name == rest and phase.startswith(head):
                return f"{phase}/{name}"
        own = [name for phase, name in self.providers if phase == watched.phase]
        name = _near(watched.metric, own) or _near(watched.metric, [name for _, name in self.providers])
        if name is None:
            return None
        phases = [phase for phase, provided in self.providers if provided == name]
        return f"{_near(watched.phase, phases) or phases[0]}/{name}"

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
            if any(phase in (p.name for p in d.callback.metric_phases()) for d in self.declared):
                continue  # its statistics do not use the Learner's data
            give = "data=(training, validation)" if phase == ValidationPhase.name else f'data={{"{phase}": batches}}'
            others = [f"{other}/{watched.metric}" for other in has_data if (other, watched.metric) in self.providers]
            yield MissingStateError(
                f"{declared.label} watches `{watched}`, but the Learner has no data for {phase}.",
                why="a metric that never has a value decides nothing",
                fix=[
                    f"give the Learner data for it: `{give}`",
                    *(f'write "{name}" as the metric, without `phase=`' for name in others),
                ],
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
                why="values are kept by name, so the values of the two would be mixed",
                fix=_cures(one, other),
            )

    def _logged(self) -> dict[str, list[Declared]]:
        found: dict[str, list[Declared]] = {}
        for declared in self.declared:
            for name in _names(declared, "logged_names", self._of_phase) or ():
                found.setdefault(name, []).append(declared)
        return found


def _near(name: str, known: Collection[str]) -> str | None:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else None


def _cures(one: Declared, other: Declared) -> list[str]:
    if one.cls is other.cls:
        return [
            f"remove one `{one.cls.__name__}` from the callbacks",
            "give one of the two another name, if it takes one",
        ]
    return ["give the values of one of the two another name"]


def _names(declared: Declared, method: str, argument: Any) -> Collection[str] | None:
    """Return the names that a callback declares, or None if it does not know them."""
    names = getattr(declared.callback, method)(argument)
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise DeclarationError(
            f"`{declared.cls.__name__}.{method}` must return a collection of names or None, not {names!r}.",
            fix='return e.g. `("loss", "accuracy")`',
        )
    return tuple(dict.fromkeys(names))
