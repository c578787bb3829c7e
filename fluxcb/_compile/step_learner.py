"""The Learner in the form that a phase's `step` receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluxcb._compile.call_errors import noted, noting
from fluxcb._compile.carry_paths import conforming
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.loss_broadcasting import warning_of_pairs
from fluxcb._compile.loss_calls import call_loss
from fluxcb._compile.named_optimizers import NamedOptimizers
from fluxcb._compile.traced import TraceState
from fluxcb._declare.phase_learner import StepLearner
from fluxcb._declare.state import CARRY
from fluxcb._errors import TraceError, did_you_mean
from fluxcb._typing import Batch, PyTree, StatePath

__all__ = ["KNOWN", "TracedLearner"]

KNOWN = (
    *CARRY,
    "step",
    "cbstate",
    "progress",
    "forward",
    "split",
    "call_loss",
    "grad",
    "update",
    "apply_updates",
    "loss_fn",
    "optimizer",
)
"""The attributes that a step may use."""


class _StepNames:
    """`learner.step` for a phase, which can assign and read any name."""

    def __init__(self, state: TraceState) -> None:
        # The class overrides `__setattr__`.
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        # Copying and inspection look up special methods, and expect an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        values = self._state.values
        if ("step", name) not in values:
            known = [p[1] for p in values if p[0] == "step"]
            raise TraceError(
                f"`{type(self._state.phase).__name__}.step` reads `step.{name}` before it is assigned."
                f"{did_you_mean(name, known)}",
                fix=f"assign `learner.step.{name}` first; so far, the step has {', '.join(known)}",
            )
        # Reading a written loss outside of a gradient counts as using it; see `LossWrites`.
        if name == "loss":
            self._state.losses.read()
        if name == "grads":
            self._state.grads.read()
        self._state.inputs.read(name)
        return values["step", name]

    def __setattr__(self, name: str, value: Any) -> None:
        state = self._state
        if state.inside_foreign_transformation():
            raise TraceError(
                f"`{type(state.phase).__name__}.step` assigns `step.{name}` inside a JAX transformation "
                "(grad, vmap, scan, ...) that fluxcb did not open.",
                why="the value would leak out of the transformation as a tracer",
                fix='differentiate with `learner.grad(function, wrt="params")`, or assign its result',
            )
        if name != "loss":  # the loss is checked when it is differentiated
            check_leaves(
                value, f"`step.{name}`", f"step.{name}", TraceError, where=f"{type(state.phase).__name__}.step"
            )
        # Not written to `values` directly, because an earlier loss of the step is kept.
        state.assign_step(name, value)


class _SharedNames:
    """`learner.cbstate` for a phase: the entries in the carry, as attributes and as items."""

    def __init__(self, state: TraceState) -> None:
        # The class overrides `__setattr__`.
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        # Copying and inspection look up special methods, and expect an AttributeError.
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._state.values[self._path(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        state, path = self._state, self._path(name)
        step = f"`{type(state.phase).__name__}.step`"
        if state.inside_foreign_transformation():
            raise TraceError(
                f"{step} assigns `cbstate.{name}` inside a JAX transformation (grad, vmap, scan, ...) that fluxcb did "
                "not open.",
                why="the value would leak out of the transformation as a tracer",
                fix='differentiate with `learner.grad(function, wrt="params")`, or assign its result',
            )
        what = f"{step} changes the structure, shape or dtype of `cbstate.{name}`"
        state.values[path] = conforming(state.values[path], value, what)

    def _path(self, name: str) -> StatePath:
        path, phase = ("cbstate", name), type(self._state.phase)
        if path in self._state.values:
            return path
        # Undeclared entries stay on the host, so the trace has no value for them.
        known = [p[1] for p in self._state.values if p[0] == "cbstate"]
        raise TraceError(
            f"`{phase.__name__}.step` uses `cbstate.{name}`, which is not in the carry.{did_you_mean(name, known)}",
            why="a step has only the entries of `cbstate` that its phase or a traced handler declares",
            fix=f'write `uses = ("cbstate.{name}",)` in `{phase.__name__}`, and pass the phase in `phases=`',
        )


class TracedLearner(StepLearner):
    """The Learner in the form that a phase's `step` receives: unprotected, with tracers.

    Args:
        state: The state being traced.
    """

    def __init__(self, state: TraceState) -> None:
        # `__setattr__` only accepts names of the carry.
        self.__dict__["_state"] = state
        self.__dict__["step"] = _StepNames(state)
        self.__dict__["cbstate"] = _SharedNames(state)

    @property
    def loss_fn(self) -> Any:
        """The user's loss function, or None."""
        loss_fn = self._state.setup.loss_fn
        if loss_fn is None:
            return None
        loss_fn = noted(loss_fn)  # so that its exceptions show the shapes of its arguments
        # Other phases may have targets of another form for their metrics, and ignore the loss.
        return warning_of_pairs(loss_fn) if type(self._state.phase).trains else loss_fn

    @property
    def optimizer(self) -> Any:
        """The optax optimizer, or the optimizers by name."""
        optimizer = self._state.setup.optimizer
        if isinstance(optimizer, NamedOptimizers):
            # A phase that takes the optimizers itself may use each of them.
            self._state.updates.used.update(optimizer)
        return optimizer

    @property
    def key(self) -> Any:
        """The random key of this step for the phase. Each access returns the same key, so split it."""
        return self._state.model_key()

    def forward(self, params: PyTree, xs: PyTree) -> PyTree:
        """Apply the model to a batch of inputs."""
        return self._state.forward(params, xs)

    def split(self, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return the inputs and targets of a batch, according to the Learner's `inputs=` and `targets=`."""
        with noting("`inputs` and `targets`", batch):
            return self._state.setup.split(batch)

    def call_loss(self, params: PyTree) -> tuple[Any, Any]:
        """Call a loss function of the form `loss_fn(model, batch)` or `loss_fn(params, batch)`."""
        return call_loss(self._state, params)

    def grad(self, function: Callable[[PyTree], Any], wrt: str = "params") -> PyTree:
        """Return the gradient of `function(params) -> float[]`; it may emit events and assign state."""
        return self._state.grad(function, wrt)

    def apply_updates(self) -> None:
        """Update the parameters by `step.grads`, unless `step.skip` or `step.hold` is true, and emit UpdateEnd."""
        self._state.updates.apply()

    def update(self, grads: PyTree, wrt: str = "params", optimizer: str | None = None, **extra: Any) -> None:
        """Update a part of the parameters, unless `step.skip` or `step.hold` is true."""
        self._state.updates.update(grads, wrt, optimizer, **extra)

    def __getattr__(self, name: str) -> Any:
        # Copying and inspection look up special methods, and expect an AttributeError.
        if name.startswith("_"):
            raise AttributeError(name)
        # After the properties above, these are the parts of the carry: `params`, `model_state`, ...
        if (name,) in self._state.values:
            # A function that is differentiated may read the parameters here instead of taking its argument.
            value, differentiated = self._state.values[name,], self._state.differentiated
            return value if differentiated is None else differentiated.read(name, value)
        if name == "progress":
            return _Progress(self._state)
        raise TraceError(
            f"`{type(self._state.phase).__name__}.step` reads `learner.{name}`, which a step does not have."
            f"{did_you_mean(name, KNOWN)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        state = self._state
        # The key of the next step is derived from the counters, so an assigned key would have no effect.
        if (name,) not in state.values or name == "key":
            raise TraceError(
                f"`{type(state.phase).__name__}.step` assigns `learner.{name}`, which a step cannot change.",
                fix=f"assign `learner.step.{name}` for a value of the step",
            )
        what = f"`{type(state.phase).__name__}.step` changes the structure, shape or dtype of `{name}`"
        state.values[name,] = conforming(state.values[name,], value, what)


class _Progress:
    def __init__(self, state: TraceState) -> None:
        self._trace_state = state

    def __getattr__(self, name: str) -> Any:
        return self._trace_state.progress(name)
