"""The Learner as a phase's `step` sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluxcb._compile.carried import conforming
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.traced import TraceState
from fluxcb._declare.state import CARRY
from fluxcb._errors import TraceError, did_you_mean
from fluxcb._typing import PyTree

__all__ = ["StepLearner"]


class _StepNames:
    """`learner.step` as a phase sees it: whatever has been assigned."""

    def __init__(self, state: TraceState) -> None:
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        values = self._state.values
        if ("step", name) not in values:
            known = [p[1] for p in values if p[0] == "step"]
            raise TraceError(
                f"`{type(self._state.phase).__name__}.step` reads `step.{name}` before it is assigned."
                f"{did_you_mean(name, known)}",
                fix=f"assign `learner.step.{name}` first; so far there is {', '.join(known)}",
            )
        if name == "loss":
            self._state.losses.read()
        return values["step", name]

    def __setattr__(self, name: str, value: Any) -> None:
        state = self._state
        if state.inside_foreign_transformation():
            raise TraceError(
                f"`{type(state.phase).__name__}.step` assigns `step.{name}` inside a JAX transformation "
                "(grad, vmap, scan, ...) that fluxcb did not open.",
                why="the value would leak out of the transformation as a tracer",
                fix='differentiate with `learner.grad(function, wrt="params")`, or assign what comes out of it',
            )
        if name != "loss":  # which is checked where it is differentiated
            check_leaves(
                value, f"`step.{name}`", f"step.{name}", TraceError, where=f"{type(state.phase).__name__}.step"
            )
        state.values["step", name] = value


class StepLearner:
    """The Learner as a phase's `step` sees it: unprotected, as tracers.

    Args:
        state: The state being traced.
    """

    def __init__(self, state: TraceState) -> None:
        self.__dict__["_state"] = state
        self.__dict__["step"] = _StepNames(state)

    @property
    def loss_fn(self) -> Any:
        """The user's loss function, or None."""
        return self._state.setup.loss_fn

    @property
    def optimizer(self) -> Any:
        """The optax optimizer."""
        return self._state.setup.optimizer

    @property
    def key(self) -> Any:
        """The random key of this step for the phase; the same at each access, so split it."""
        return self._state.key_for(f"phase {type(self._state.phase).__name__}")

    def forward(self, params: PyTree, xs: PyTree) -> PyTree:
        """Apply the model to a batch of inputs."""
        return self._state.forward(params, xs)

    def grad(self, function: Callable[[PyTree], Any], wrt: str = "params") -> PyTree:
        """Return the gradient of `function(params) -> float[]`; it may emit events and assign state.

        Args:
            function: The loss as a function of what `wrt` names.
            wrt: `params`, or a part of it such as `params.generator`.

        Raises:
            TraceError: The loss is no real floating-point scalar, or `wrt` no parameters.
        """
        return self._state.grad(function, wrt)

    def apply_updates(self) -> None:
        """Update the parameters by `step.grads`, honour `step.skip`, and emit UpdateEnd."""
        self._state.apply_updates()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if (name,) in self._state.values:
            return self._state.values[name,]
        if name == "progress":
            return _Progress(self._state)
        raise TraceError(
            f"`{type(self._state.phase).__name__}.step` reads `learner.{name}`, which a step does not have."
            f"{did_you_mean(name, [*CARRY, 'step', 'progress', 'forward', 'grad', 'apply_updates', 'loss_fn'])}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        state = self._state
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
