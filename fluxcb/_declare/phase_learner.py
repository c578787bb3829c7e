"""`StepLearner`: what the step of a phase sees of the Learner, for editors and type checkers.

Like those of `learner_view.py`, the classes contain no code. At run time, the step gets an instance of a subclass of
`StepLearner` (`_compile/step_learner.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fluxcb._declare.learner_view import EntriesView, ProgressView, StepAttributes
from fluxcb._typing import Batch, PyTree

if TYPE_CHECKING:
    import jax

__all__ = ["StepLearner"]


class PhaseStepView(StepAttributes):
    """`learner.step` in a phase's step, which defines the values by assigning them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


class StepLearner:
    """The Learner as a phase's `step` sees it: the type of the parameter `learner` of `Phase.step`.

    Values are traced. `learner.step.<name> = value` defines a value of the step.
    """

    params: PyTree
    """The model's trainable parameters; can be assigned."""
    model_state: PyTree
    """What the model changes itself, such as batch statistics; can be assigned."""
    opt_state: PyTree
    """The optimizer's state; can be assigned."""
    step: PhaseStepView
    """The values of this step. Assign a value to define it."""
    cbstate: EntriesView
    """The entries of the shared state that the phase names in `uses`."""
    progress: ProgressView
    """The counters `step`, `epoch` and `step_in_epoch`, traced."""

    @property
    def key(self) -> jax.Array:
        """The random key of this step for the phase; the same at each access, so split it."""
        raise NotImplementedError

    @property
    def loss_fn(self) -> Any:
        """The user's loss function, or None."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        """The optax optimizer, or the optimizers by name."""
        raise NotImplementedError

    def forward(self, params: PyTree, xs: PyTree) -> PyTree:
        """Apply the model to a batch of inputs."""
        raise NotImplementedError

    def split(self, batch: Batch) -> tuple[PyTree, PyTree]:
        """Return the inputs and targets of a batch, as the Learner's `inputs=` and `targets=` say."""
        raise NotImplementedError

    def call_loss(self, params: PyTree) -> tuple[Any, Any]:
        """Call a loss function of the form `loss_fn(model, batch)` or `loss_fn(params, batch)`.

        The arguments are those that its signature names. In phases that train, the new model state is kept.

        Args:
            params: The parameters.

        Returns:
            The loss and aux. Aux is None if the loss function returns only the loss.
        """
        raise NotImplementedError

    def grad(self, function: Callable[[PyTree], Any], wrt: str = "params") -> PyTree:
        """Return the gradient of `function(params) -> float[]`; it may emit events and assign state.

        Args:
            function: The loss as a function of what `wrt` names.
            wrt: `params`, or a part of it such as `params.generator`.

        Raises:
            TraceError: The loss is no real floating-point scalar, or `wrt` no parameters.
        """
        raise NotImplementedError

    def apply_updates(self) -> None:
        """Update the parameters by `step.grads`, unless `step.skip` or `step.hold` is true, and emit UpdateEnd."""
        raise NotImplementedError

    def update(self, grads: PyTree, wrt: str = "params", optimizer: str | None = None, **extra: Any) -> None:
        """Update a part of the parameters, unless `step.skip` or `step.hold` is true.

        UpdateEnd is emitted at the end of the step, unless the phase emits it after its last update.

        Args:
            grads: The gradients with respect to the part.
            wrt: `params`, or the part that the optimizer owns, such as `params.generator`.
            optimizer: The name of the optimizer, if the Learner has several.
            **extra: Extra arguments for the optimizer. `value`, `grad`, `value_fn` and `grad_fn` are passed on only if
                the optimizer takes them.

        Raises:
            TraceError: There is no such optimizer, it does not own the part, or the gradients do not match the part.
        """
        raise NotImplementedError
