"""`Traces`: values of every step of a phase, as functions make them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fluxcb._declare.access import Append, Read, Write, dotted, normalise
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry, check_pair
from fluxcb._declare.events import ComputeEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.by_phase import ByPhase

__all__ = ["TraceValues", "Traces"]


class TraceValues:
    """The traces of one phase, by name.

    Attributes:
        values: For each trace, `(step, value)` pairs; numbers of steps count those of the phase, from 1.

    Example:
        >>> values = TraceValues()
        >>> values.add("norm", 1, 0.5)
        >>> values["norm"], values.last("norm"), list(values)
        ([(1, 0.5)], 0.5, ['norm'])
    """

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, Any]]] = {}

    def add(self, name: str, step: int, value: Any) -> None:
        """Note a step's value, and drop those of later steps, which a run that was set back has."""
        pairs = self.values.setdefault(name, [])
        while pairs and pairs[-1][0] >= step:
            pairs.pop()
        pairs.append((step, value))

    def last(self, name: str) -> Any:
        """Return a trace's latest value.

        Raises:
            KeyError: It has none.
        """
        return self.values[name][-1][1]

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name: parts of one shape and type, `{"steps": int64[n], "values": [n, ...]}` each."""
        import numpy as np

        found: dict[str, Any] = {}
        for name, pairs in self.values.items():
            parts = itertools.groupby(pairs, lambda pair: (np.shape(pair[1]), np.asarray(pair[1]).dtype))
            found[name] = [
                {"steps": np.array(steps, np.int64), "values": np.stack(values)}
                for steps, values in (zip(*part, strict=True) for _, part in parts)
            ]
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, in place of what is there."""
        self.values = {
            name: [
                (int(step), value) for part in parts for step, value in zip(part["steps"], part["values"], strict=True)
            ]
            for name, parts in state.items()
        }

    def __getitem__(self, name: str) -> list[tuple[int, Any]]:
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values))

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TraceValues) or self.values.keys() != other.values.keys():
            return False
        return all(_equal(pairs, other.values[name]) for name, pairs in self.values.items())

    def __hash__(self) -> int:
        raise TypeError("a TraceValues changes, and cannot be hashed")

    def __repr__(self) -> str:
        return f"TraceValues({', '.join(f'{len(pairs)} of {name}' for name, pairs in self.values.items())})"


class Traces(Callback):
    """Record values of every step of a phase, each computed by a function inside the compiled step.

    A function is traced: it stays in `jax.numpy`, and only what it returns, a number or an array, leaves the device.
    `cbstate.traces[phase][name]` is a list of `(step, value)`; steps count those of the phase: for training they are
    `progress.step`. Traces of one phase may come from several `Traces`, under different names.

    Args:
        preprocess: For each trace, by name, `function(learner) -> array`.
        phase: Phase class; also its subclasses.
        access: What the functions read, as `stateaccess` would return it.

    Access:
        What `access` says: Read.
        step.trace_<name>: Write (traced), Read (host).
        cbstate.traces: Append.

    Runs:
        ComputeEnd x `phase` (traced).
        StepEnd x `phase` (host).

    Cost:
        What the functions cost inside the step. Fetches their values, a few microseconds per step, and keeps them all.

    Raises:
        DeclarationError: No functions, a name that is no identifier, access to write, or no phase; a function returns
            no array.
        AccessError: A function reads what `access` does not say (when the Learner is built).

    Example:
        >>> from fluxcb import Read
        >>> from fluxcb.callbacks import Traces
        >>> from fluxcb.phases import TrainingPhase
        >>> from fluxcb.testing import testlearner
        >>> traces = Traces(
        ...     {"square": lambda learner: learner.step.loss**2, "slope": lambda learner: learner.step.grads["w"]},
        ...     TrainingPhase,
        ...     access={"step": {"loss": Read(), "grads": Read()}},
        ... )
        >>> learner = testlearner(traces)
        >>> history = learner.fit(1)
        >>> learner.cbstate["traces"]["training"]
        TraceValues(4 of square, 4 of slope)
        >>> [step for step, _ in learner.cbstate["traces"]["training"]["square"]]
        [1, 2, 3, 4]

    Source:
        FluxTraining.jl, `Traces`, whose functions run on the host.
    """

    def __init__(
        self,
        preprocess: Mapping[str, Callable[[Any], Any]],
        phase: type[Phase] = Phase,
        *,
        access: Mapping[str, Any],
    ) -> None:
        if not isinstance(preprocess, Mapping) or not preprocess:
            raise DeclarationError(
                f"`Traces` takes functions of the learner by name, not {preprocess!r}.",
                fix='e.g. `Traces({"sq": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}})`',
            )
        for name, function in preprocess.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise DeclarationError(f"A trace has a name such as `gradient_norm`, not {name!r}.")
            _require_takes_learner(name, function)
        _, self.phase = check_pair(StepEnd, phase, "Traces(...)")
        for path, permission in normalise(access, owner="Traces(access=...)", where="").items():
            if path in (("step",), ("cbstate",), ("*",)):
                raise DeclarationError(
                    f"`access` of `Traces` gives all of `{path[0]}`; name what the functions read.",
                    fix='e.g. `access={"step": {"loss": Read()}}`',
                )
            if not isinstance(permission, Read):
                raise DeclarationError(
                    f"`access` of `Traces` gives `{dotted(path)}` {permission!r}; its functions only read.",
                    fix="give `Read()`",
                )
        self.preprocess = dict(preprocess)
        self.access = access

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        access = dict(self._traced())
        access["cbstate"] = {**access.get("cbstate", {}), "traces": Append()}
        return access

    def _traced(self) -> Mapping[str, Any]:
        return {**self.access, "step": {**self.access.get("step", {}), **self._steps(Write())}}

    def _steps(self, permission: Read | Write) -> dict[str, Any]:
        return {f"trace_{name}": permission for name in self.preprocess}

    # Phase and access differ from instance to instance.

    def handlers(self) -> list[Entry]:
        """Return the handlers, of this instance's phase and with its access."""
        return [self._own(entry) for entry in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment of this instance's phase."""
        found = super().entry_for(event, phase) if issubclass(phase, self.phase) else None
        return None if found is None else (found[0], self._own(found[1]), found[2])

    def _own(self, entry: Entry) -> Entry:
        host = {"step": self._steps(Read()), "cbstate": {"traces": Append()}}
        return replace(entry, phase=self.phase, access=self._traced() if entry.traced else host)

    def init(self, learner: Any) -> None:
        """Create `cbstate.traces`."""
        if "traces" not in learner.cbstate:
            learner.cbstate.traces = ByPhase(TraceValues)

    @on(ComputeEnd, Phase)
    def compute(self, event: Event, phase: Phase, learner: Any) -> None:
        """Compute the values."""
        import jax
        import jax.numpy as jnp

        for name, function in self.preprocess.items():
            value = function(learner)
            if not jax.tree_util.all_leaves([value]) or value is None:
                raise DeclarationError(
                    f"The trace `{name}` is a {type(value).__name__}; a trace is a number or an array.",
                    fix="make a trace of each part",
                )
            learner.step[f"trace_{name}"] = jnp.asarray(value)

    @on(StepEnd, Phase)
    def record(self, event: Event, phase: Phase, learner: Any) -> None:
        """Record the values."""
        kept = learner.cbstate.traces.entry(phase)
        for name in self.preprocess:
            if type(phase).trains:
                step = learner.progress.step
            else:
                step = kept[name][-1][0] + 1 if name in kept else 1
            kept.add(name, step, learner.step[f"trace_{name}"])

    def __repr__(self) -> str:
        phase = "" if self.phase is Phase else f", {self.phase.__name__}"
        return f"Traces({', '.join(self.preprocess)}{phase})"


def _equal(ours: list[tuple[int, Any]], theirs: list[tuple[int, Any]]) -> bool:
    import numpy as np

    return len(ours) == len(theirs) and all(
        i == j and np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind in "fc")
        for (i, a), (j, b) in zip(ours, theirs, strict=True)
    )


def _require_takes_learner(name: str, function: Any) -> None:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        raise DeclarationError(
            f"The trace `{name}` must be a function of the learner, not {function!r}.",
            fix="write `lambda learner: ...`",
        ) from None
