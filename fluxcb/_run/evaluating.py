"""Evaluating: a phase's step on any batch, of which nothing stays but what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax

from fluxcb._compile.carried import root_of
from fluxcb._compile.plan import Plan
from fluxcb._compile.step import TracedStep
from fluxcb._compile.traced import StepSetup
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, MissingStateError, did_you_mean
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostState
from fluxcb._typing import Batch, PyTree

__all__ = ["Evaluation", "Evaluator"]


class Host(Protocol):
    """What evaluating needs of the engine."""

    state: HostState
    programs: Programs
    plan: Plan

    @property
    def setup(self) -> Callable[[Phase], StepSetup]:
        """Returns what a phase's traced step needs."""
        ...


class Evaluator:
    """What host handlers that declare `evaluation` get as `learner.evaluation`.

    Args:
        engine: The engine.
        known_phase: Returns a phase as the Learner runs it.
    """

    def __init__(self, engine: Host, known_phase: Callable[[Phase], Phase]) -> None:
        self._engine = engine
        self._known_phase = known_phase
        self._functions: WeakKeyDictionary[TracedStep, dict[tuple[str, ...], Callable[..., dict[str, Any]]]]
        self._functions = WeakKeyDictionary()

    def __call__(self, phase: Phase, params: PyTree, model_state: PyTree, names: Iterable[str]) -> Evaluation:
        """Return a function that computes values of the phase's step on a batch.

        The traced handlers of the phase run in it, as in an epoch of the phase; what they write to the state, and what
        the model changes in its own, is dropped. Its computations are where `params` are.

        Args:
            phase: A phase that does not train.
            params: The parameters.
            model_state: The model's state.
            names: Names of step values, or `batch`.

        Raises:
            DeclarationError: The phase trains, or the train state is not that of the handler's step.
        """
        phase = self._known_phase(phase)
        if type(phase).trains:
            raise DeclarationError(
                f"`learner.evaluation` computes steps that change nothing, and {type(phase).__name__} trains.",
                fix="give it a phase such as `ValidationPhase()`",
            )
        if self._engine.state.ahead:
            raise DeclarationError(
                f"A step's handler asks for an evaluation of {type(phase).__name__}, "
                "and the next steps do not wait for it.",
                why="the device has gone on meanwhile, so the train state is not that of the handler's step",
                fix='declare `{"params": Read(borrow=True)}` for this handler; the next steps then wait for it',
            )
        return Evaluation(self._engine, phase, params, model_state, tuple(names), self._function)

    def _function(self, step: TracedStep, names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
        functions = self._functions.setdefault(step, {})
        if names not in functions:
            run = step.computing(names)  # not the step itself, which would never be freed
            functions[names] = jax.jit(lambda carry, batch: run(carry, batch)[1])
        return functions[names]


class Evaluation:
    """Computes values of a phase's step on one batch after the other; each has random keys of its own.

    Args:
        engine: The engine.
        phase: The phase.
        params: The parameters.
        model_state: The model's state.
        names: What to compute.
        function: Returns the compiled function of a traced step and names.
    """

    def __init__(
        self,
        engine: Host,
        phase: Phase,
        params: PyTree,
        model_state: PyTree,
        names: tuple[str, ...],
        function: Callable[[TracedStep, tuple[str, ...]], Callable[..., dict[str, Any]]],
    ) -> None:
        self._engine = engine
        self._phase = phase
        self._state = {"params": params, "model_state": model_state}
        self._names = names
        self._function = function
        self._batches = 0
        self._placed: dict[tuple[str, ...], Any] = {}

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the values on the device, by name, without waiting for them.

        Raises:
            MissingStateError: The phase's step does not compute one of the names.
            FluxcbError: The step or a traced handler is wrong.
        """
        step = self._step(batch)
        self._require(step)
        names = tuple(name for name in self._names if name != "batch")
        values = self._function(step, names)(self._carry(step), batch) if names else {}
        self._batches += 1
        return {**values, "batch": batch} if "batch" in self._names else values

    def computed(self, batch: Batch) -> tuple[str, ...]:
        """Return the names of all values that the step computes for a batch of this shape."""
        return (*self._step(batch).step_specs, "batch")

    def _step(self, batch: Batch) -> TracedStep:
        engine = self._engine
        return engine.programs.traced(
            engine.setup(self._phase), engine.plan, self._phase, engine.state, batch, checked=False
        )

    def _require(self, step: TracedStep) -> None:
        known = [*step.step_specs, "batch"]
        for name in self._names:
            if name not in known:
                raise MissingStateError(
                    f"An evaluation of {type(self._phase).__name__} is asked for `step.{name}`, which it does not "
                    f"compute.{did_you_mean(name, known)}",
                    why=f"the step has {', '.join(known)}",
                    fix="return it from the loss as aux, or assign it in the phase's `step` or in a traced handler",
                )

    def _carry(self, step: TracedStep) -> dict[str, Any]:
        """Return the carry, with what the step reads where the parameters are; the rest is compiled away."""
        state = self._engine.state
        counters = state.counters([state.step, state.epoch, self._batches, 0])
        carry = {**state.carry, **self._state, "counters": counters}
        place = _place(self._state["params"])
        if place is None:
            return carry
        roots = {root_of(path) for touched in step.touched.values() for path in touched.read | touched.written}
        entries = dict(carry["cbstate"])
        for root in roots:
            if root[0] == "cbstate" and root[1] in entries:
                entries[root[1]] = self._at(place, root, entries[root[1]])
        if ("opt_state",) in roots:
            carry["opt_state"] = self._at(place, ("opt_state",), carry["opt_state"])
        return {**carry, "cbstate": entries, "counters": jax.device_put(counters, place)}

    def _at(self, place: Any, root: tuple[str, ...], value: PyTree) -> PyTree:
        if root not in self._placed:
            self._placed[root] = jax.device_put(value, place)
        return self._placed[root]


def _place(params: PyTree) -> Any:
    """Return where a small value goes to be used beside the parameters, or None for anywhere."""
    first = jax.tree.leaves(params)[0]
    if not first.committed:
        return None
    place = first.sharding
    if isinstance(place, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return place
