"""`Traces`: record values that functions compute at every step of a phase."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fluxcb._declare.access import Append, Read, Write, dotted, normalise
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import ComputeEnd, Event, StepEnd
from fluxcb._declare.handlers import Handler, check_pair, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import function_of, require
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.named_values import NamedValues

__all__ = ["TraceValues", "Traces"]


class TraceValues(NamedValues):
    """The traces of one phase, keyed by name.

    Attributes:
        values: For each trace, a list of `(step, value)` pairs. Steps of the phase are counted from 1.

    Example:
        >>> values = TraceValues()
        >>> values.add("norm", 1, 0.5)
        >>> values["norm"], values.last("norm"), list(values)
        ([(1, 0.5)], 0.5, ['norm'])
    """

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, Any]]] = {}

    def add(self, name: str, step: int, value: Any) -> None:
        """Add the value of a step, and remove values of this and later steps, which exist after a rewind."""
        pairs = self.values.setdefault(name, [])
        while pairs and pairs[-1][0] >= step:
            pairs.pop()
        pairs.append((step, value))

    def last(self, name: str) -> Any:
        """Return the latest value of a trace.

        Raises:
            KeyError: The trace has no values.
        """
        return self.values[name][-1][1]

    def state_dict(self) -> dict[str, Any]:
        """Return the values, keyed by name.

        Each trace is a list of `{"steps": int64[n], "values": [n, ...]}`. A new item begins where the shape or the
        dtype of the values changes.
        """
        import numpy as np

        state: dict[str, Any] = {}
        for name, pairs in self.values.items():
            parts = itertools.groupby(pairs, lambda pair: (np.shape(pair[1]), np.asarray(pair[1]).dtype))
            state[name] = [
                {"steps": np.array(steps, np.int64), "values": np.stack(values)}
                for steps, values in (zip(*part, strict=True) for _, part in parts)
            ]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values with those that `state_dict` returned."""
        self.values = {
            name: [
                (int(step), value) for part in parts for step, value in zip(part["steps"], part["values"], strict=True)
            ]
            for name, parts in state.items()
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TraceValues) or self.values.keys() != other.values.keys():
            return False
        return all(_equal(pairs, other.values[name]) for name, pairs in self.values.items())

    def __repr__(self) -> str:
        return f"TraceValues({', '.join(f'{len(pairs)} of {name}' for name, pairs in self.values.items())})"


class Traces(Callback):
    """Record values that functions compute inside the compiled step, at every step of a phase.

    The functions are traced, so they must use `jax.numpy`. Only their results, numbers or arrays, are fetched from the
    device. `cbstate.traces[phase][name]` is a list of `(step, value)`. Steps are counted per phase; in training, they
    are equal to `progress.step`. Several `Traces` can record the same phase under different names.

    Args:
        preprocess: The functions `function(learner) -> array`, keyed by the name of the trace.
        phase: The phase class; includes its subclasses.
        access: The state that the functions read, in the format of `stateaccess`.

    Access:
        The paths in `access`: Read.
        step.trace_<name>: Write (traced), Read (host).
        cbstate.traces: Append.

    Runs:
        ComputeEnd x `phase` (traced).
        StepEnd x `phase` (host).

    Cost:
        The functions, inside the step. Fetches their values, which takes a few microseconds per step, and keeps all
        values in memory.

    Raises:
        DeclarationError: `preprocess` is empty, a name is not an identifier, `access` contains a write, `phase` is not
            a phase, or a function does not return an array.
        AccessError: A function reads state that `access` does not declare (when the Learner is built).

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

    access_argument = "access"

    def __init__(
        self,
        preprocess: Mapping[str, Callable[[Any], Any]],
        phase: type[Phase] = Phase,
        *,
        access: Mapping[str, Any],
    ) -> None:
        fits = isinstance(preprocess, Mapping) and bool(preprocess)
        example = '{"squared": lambda learner: learner.step.loss**2}'
        require(fits, preprocess, "`preprocess` of `Traces`", "functions of the learner by name", example)
        for name, function in preprocess.items():
            named = isinstance(name, str) and name.isidentifier()
            require(named, name, "The name of a trace", "an identifier", '{"gradient_norm": function}')
            function_of(function, f"The trace `{name}`", "learner")
        _, self.phase = check_pair(StepEnd, phase, "Traces(...)")
        for path, permission in normalise(access, owner="Traces(access=...)", where="").items():
            if path in (("step",), ("cbstate",), ("*",)):
                raise DeclarationError(
                    f"`access` of `Traces` declares all of `{path[0]}`; it must name what the functions read.",
                    fix='write e.g. `access={"step": {"loss": Read()}}`',
                )
            if not isinstance(permission, Read):
                raise DeclarationError(
                    f"`access` of `Traces` declares {permission!r} on `{dotted(path)}`, but its functions only read.",
                    fix="declare `Read()`",
                )
        self.preprocess = dict(preprocess)
        self.access = access

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        access = dict(self._traced())
        access["cbstate"] = {**access.get("cbstate", {}), "traces": Append()}
        return access

    def _traced(self) -> Mapping[str, Any]:
        return {**self.access, "step": {**self.access.get("step", {}), **self._steps(Write())}}

    def _steps(self, permission: Read | Write) -> dict[str, Any]:
        return {f"trace_{name}": permission for name in self.preprocess}

    # The phase and the access depend on the arguments.

    def handlers(self) -> list[Handler]:
        """Return the handlers with the phase and the access of this instance."""
        return [self._configured(handler) for handler in super().handlers()]

    def _configured(self, handler: Handler) -> Handler:
        host = {"step": self._steps(Read()), "cbstate": {"traces": Append()}}
        return replace(handler, phase=self.phase, access=self._traced() if handler.traced else host)

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.traces`."""
        if "traces" not in learner.cbstate:
            learner.cbstate.traces = ByPhase(TraceValues)

    @on(ComputeEnd, Phase)
    def compute(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Compute the values."""
        import jax
        import jax.numpy as jnp

        for name, function in self.preprocess.items():
            value = function(learner)
            if not jax.tree_util.all_leaves([value]) or value is None:
                raise DeclarationError(
                    f"The trace `{name}` is a {type(value).__name__}; a trace must be a number or an array.",
                    fix="write one trace per part",
                )
            learner.step[f"trace_{name}"] = jnp.asarray(value)

    @on(StepEnd, Phase)
    def record(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Record the values."""
        traces = learner.cbstate.traces.entry(phase)
        for name in self.preprocess:
            if type(phase).trains:
                step = learner.progress.step
            else:  # `progress` only counts training steps
                step = traces[name][-1][0] + 1 if name in traces else 1
            traces.add(name, step, learner.step[f"trace_{name}"])

    def __repr__(self) -> str:
        phase = "" if self.phase is Phase else f", {self.phase.__name__}"
        return f"Traces({', '.join(self.preprocess)}{phase})"


def _equal(ours: list[tuple[int, Any]], theirs: list[tuple[int, Any]]) -> bool:
    import numpy as np

    return len(ours) == len(theirs) and all(
        i == j and np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind in "fc")
        for (i, a), (j, b) in zip(ours, theirs, strict=True)
    )
