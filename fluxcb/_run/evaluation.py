"""Computing values of a phase's step on any batch, without changing the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import jax

from fluxcb._compile.arrays import signature_of, spec_of
from fluxcb._compile.carry_paths import root_of
from fluxcb._compile.step import TracedStep
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, MissingStateError, did_you_mean
from fluxcb._run.batch_placement import BatchPlacement
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostState
from fluxcb._typing import Batch, PyTree

__all__ = ["Evaluation", "Evaluator"]


class Evaluator:
    """Returns evaluations; host handlers that declare `evaluation` get it as `learner.evaluation`.

    Args:
        state: The state.
        programs: The compiled programs.
        known_phase: Returns the form in which the Learner runs a phase.
    """

    def __init__(self, state: HostState, programs: Programs, known_phase: Callable[[Phase], Phase]) -> None:
        self._state, self._programs = state, programs
        self._known_phase = known_phase
        # Weak keys, so that steps of replaced callbacks and their functions are freed.
        self._functions: WeakKeyDictionary[TracedStep, dict[tuple[str, ...], Callable[..., dict[str, Any]]]]
        self._functions = WeakKeyDictionary()

    def __call__(self, phase: Phase, params: PyTree, model_state: PyTree, names: Iterable[str]) -> Evaluation:
        """Return a function that computes values of the phase's step on a batch.

        The traced handlers of the phase run in it, as in an epoch of the phase. Their writes to the state, and the
        changes of the model's own state, are discarded. The computation runs on the device of `params`.

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
                f"`learner.evaluation` needs a phase that does not train, but {type(phase).__name__} trains.",
                fix="pass a phase such as `ValidationPhase()`",
            )
        if self._state.moment.ahead:
            raise DeclarationError(
                f"A step's handler requested an evaluation of {type(phase).__name__}, "
                "but the next steps do not wait for this handler.",
                why="the device has run further steps, so the train state is not that of the handler's step",
                fix='declare `{"params": Read(borrow=True)}` for this handler; the next steps then wait for it',
            )
        return Evaluation(self._state, self._programs, phase, params, model_state, tuple(names), self._function)

    def _function(self, step: TracedStep, names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
        functions = self._functions.setdefault(step, {})
        if names not in functions:
            # The function refers only to the jaxpr. If it referred to the step, the value in this weak dict would keep
            # its own key alive.
            run, spec = step.computing([name for name in names if name != "batch"]), step.batch_spec
            placement = _batch_placement(self._state, step.phase)

            def compute(carry: PyTree, batch: Batch) -> dict[str, Any]:
                batch = placement.without_added_rows(batch, spec) if placement is not None else batch
                values = run(carry, batch)[1]
                return {**values, "batch": batch} if "batch" in names else values

            functions[names] = jax.jit(compute)
        return functions[names]


class Evaluation:
    """Computes values of a phase's step on one batch after the other; each batch has its own random keys.

    Args:
        state: The state.
        programs: The compiled programs.
        phase: The phase.
        params: The parameters.
        model_state: The model's state.
        names: The names of the values to compute.
        function: Returns the compiled function of a traced step and names.
    """

    def __init__(
        self,
        state: HostState,
        programs: Programs,
        phase: Phase,
        params: PyTree,
        model_state: PyTree,
        names: tuple[str, ...],
        function: Callable[[TracedStep, tuple[str, ...]], Callable[..., dict[str, Any]]],
    ) -> None:
        self._state, self._programs = state, programs
        self._phase = phase
        self._model = {"params": params, "model_state": model_state}
        self._names = names
        self._function = function
        self._batches = 0
        self._placement = _batch_placement(state, phase)
        self._moved: dict[tuple[str, ...], Any] = {}

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the values on the device, by name, without waiting for them.

        Raises:
            MissingStateError: The phase's step does not compute one of the names.
            FluxcbError: The step or a traced handler is wrong.
        """
        batch, spec = self._placed(batch)
        step = self._step(spec)  # looked up for each batch, because batches may differ in shape
        self._require(step)
        # A program returns the batch only if it has to remove rows from it.
        added = self._placement is not None and signature_of(spec_of(batch)) != signature_of(spec)
        names = tuple(name for name in self._names if name != "batch" or added)
        values = self._function(step, names)(self._carry(step), batch) if names else {}
        self._batches += 1
        return {**values, "batch": batch} if "batch" in self._names and not added else values

    def _placed(self, batch: Batch) -> tuple[Batch, PyTree]:
        """Return a batch, on the mesh if there is one, and the batch or its specs to trace the step with."""
        if self._placement is None:
            return batch, batch
        return self._placement.place_any(batch)

    def computed(self, batch: Batch) -> tuple[str, ...]:
        """Return the names of all values that the step computes for a batch of this shape."""
        return (*self._step(self._placed(batch)[1]).step_specs, "batch")

    def _step(self, batch: Batch) -> TracedStep:
        # Unchecked, because an evaluation takes batches of any shape, unlike the data of a phase.
        return self._programs.traced(self._phase, batch, checked=False)

    def _require(self, step: TracedStep) -> None:
        known = [*step.step_specs, "batch"]
        for name in self._names:
            if name not in known:
                raise MissingStateError(
                    f"An evaluation of {type(self._phase).__name__} requested `step.{name}`, which the phase does not "
                    f"compute.{did_you_mean(name, known)}",
                    why=f"the step has {', '.join(known)}",
                    fix=[
                        f"assign `learner.step.{name}` in the phase's `step` or in a traced handler",
                        "return it from a loss function of the batch: `return loss, aux`"
                        if name == "aux"
                        else f"if the loss function returns it in its aux, write `aux.{name}`",
                    ],
                )

    def _carry(self, step: TracedStep) -> dict[str, Any]:
        """Return the carry with everything that the step reads on the devices of the parameters."""
        train, progress = self._state.train, self._state.progress
        # The number of the batch replaces the step in the epoch, so that each batch has its own random keys.
        counters = train.counters([progress.step, progress.epoch, self._batches, 0])  # the last 0: nothing is stopped
        carry = {**train.carry, **self._model, "counters": counters}
        place = _place(self._model["params"])
        if place is None:
            return carry
        # A callback has placed the parameters on other devices, and a program takes arguments on one set of devices. So
        # the other values that the step reads are copied there, once for all batches.
        roots = {root_of(path) for touched in step.touched.values() for path in touched.read | touched.written}
        entries = dict(carry["cbstate"])
        for root in roots:
            if root[0] == "cbstate" and root[1] in entries:
                entries[root[1]] = self._at(place, root, entries[root[1]])
        if ("opt_state",) in roots:
            carry["opt_state"] = self._at(place, ("opt_state",), carry["opt_state"])
        return {**carry, "cbstate": entries, "counters": jax.device_put(counters, place)}

    def _at(self, place: Any, root: tuple[str, ...], value: PyTree) -> PyTree:
        if root not in self._moved:
            self._moved[root] = jax.device_put(value, place)
        return self._moved[root]


def _batch_placement(state: HostState, phase: Phase) -> BatchPlacement | None:
    placement = state.train.placement
    return BatchPlacement(placement, f"data.{type(phase).name}") if placement is not None else None


def _place(params: PyTree) -> Any:
    """Return the placement of a small value that is used with the parameters, or None if any placement works."""
    first = jax.tree.leaves(params)[0]
    # JAX uses uncommitted arrays together with arrays on any device.
    if not first.committed:
        return None
    place = first.sharding
    # A small value is replicated over the mesh; it cannot be split like the parameters.
    if isinstance(place, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return place
