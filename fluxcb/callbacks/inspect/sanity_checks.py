"""`Check`, and the default checks of `SanityCheck`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fluxcb._calls import Constructed, entry_point
from fluxcb._declare.learner_view import LearnerView
from fluxcb.callbacks.arguments import function_of, nonempty_text
from fluxcb.data.sources import MappedSource, PlacedSource

__all__ = ["Check", "default_checks"]


@dataclass(frozen=True)
class Check(Constructed):
    """A check that `SanityCheck` runs before training.

    Args:
        function: `function(learner) -> bool`, which returns True if the check passes. It can read the state that
            `SanityCheck` declares: `data`, `model`, `loss_fn`, `optimizer`, `callbacks`, `params` and `model_state`. An
            exception counts as a failure.
        name: The expected condition in a few words, for example "several batches".
        message: What is wrong if the check fails, and how to fix it.
        error: Whether a failure raises an error. Otherwise, it issues a warning.

    Raises:
        DeclarationError: `function` does not take one argument, or `name` or `message` is empty.

    Example:
        >>> from fluxcb.callbacks import Check
        >>> Check(lambda learner: len(learner.data.training) > 1, "several batches", "give a smaller batch size")
        Check('several batches')

    Source:
        FluxTraining.jl, `Check`.
    """

    function: Callable[[Any], Any]
    name: str
    message: str
    error: bool = True

    def __post_init__(self) -> None:
        example = "lambda learner: learner.data.validation is not None"
        function_of(self.function, "The function of a `Check`", "learner", example=example)
        nonempty_text(self.name, "The name of a `Check`", "a string", '"validation data"')
        nonempty_text(self.message, "The message of a `Check`", "a string", '"There is no validation data."')

    def failure(self, learner: LearnerView) -> str | None:
        """Return the description of the failure, or None if the check passes."""
        try:
            if self.function(learner):
                return None
        except Exception as error:
            return f"{self.name}: {type(error).__name__}: {error}"
        return f"{self.name}: {self.message}"

    def __repr__(self) -> str:
        return f"Check({self.name!r})"


@entry_point
def default_checks() -> tuple[Check, ...]:
    """Return the default checks of `SanityCheck`, in order.

    Example:
        >>> from fluxcb.callbacks import default_checks
        >>> [check.name for check in default_checks() if not check.error]
        ['validation data', 'finite inputs']
    """
    return _DEFAULTS


def _training_data(learner: LearnerView) -> bool:
    return learner.data.training is not None


def _validation_data(learner: LearnerView) -> bool:
    return learner.data.validation is not None


def _pairs(learner: LearnerView) -> bool:
    return learner.model is None or all(isinstance(b, tuple | list) and len(b) == 2 for b in _first_batch(learner))


def _batch_sizes(learner: LearnerView) -> bool:
    import jax
    import numpy as np

    if learner.model is None:  # a custom loss function may take batches of any structure
        return True
    return all(len({np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}) <= 1 for batch in _first_batch(learner))


def _finite_inputs(learner: LearnerView) -> bool:
    return all(_finite(batch) for batch in _first_batch(learner))


def _finite_parameters(learner: LearnerView) -> bool:
    return _finite(learner.params)


def _model_output(learner: LearnerView) -> bool:
    return learner.model is None or all(_finite(_outputs(learner, batch)) for batch in _first_batch(learner))


def _loss(learner: LearnerView) -> bool:
    import jax.numpy as jnp

    if learner.loss_fn is None:
        return True
    for batch in _first_batch(learner):
        if learner.model is None:
            loss = learner.loss_fn(learner.params, batch, learner.key)
            loss = loss[0] if isinstance(loss, tuple) else loss
        else:
            loss = learner.loss_fn(_outputs(learner, batch), batch[1])
        if jnp.shape(loss) != () or not _finite(loss):
            return False
    return True


def _first_batch(learner: LearnerView) -> Iterator[Any]:
    """Yield the first training batch, or nothing if the data is a one-shot iterator, which would lose the batch."""
    source = innermost = learner.data.training
    while isinstance(innermost, MappedSource | PlacedSource):  # these do not make an iterator repeatable
        innermost = innermost.source
    if not isinstance(innermost, Iterator):
        yield next(iter(source))


def _outputs(learner: LearnerView, batch: Any) -> Any:
    from fluxcb.models import adapt

    xs, _ = batch
    model = adapt(learner.model)
    outputs, _ = model.apply(learner.params, learner.model_state, xs, train=False, key=learner.key)
    return outputs


def _finite(tree: Any) -> bool:
    import jax
    import jax.numpy as jnp

    floats = [leaf for leaf in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return all(bool(jnp.isfinite(leaf).all()) for leaf in floats)


_DEFAULTS = (
    Check(_training_data, "training data", "there are none; pass `data=` to the Learner"),
    Check(
        _validation_data,
        "validation data",
        "there are none, so the fit does not validate; pass `data=(training, validation)` to the Learner",
        error=False,
    ),
    Check(_pairs, "batches of inputs and targets", "the first training batch is not a pair `(xs, ys)`"),
    Check(_batch_sizes, "equal batch sizes", "the arrays of the first training batch differ in their first axis"),
    Check(_finite_inputs, "finite inputs", "the first training batch has NaN or infinite values", error=False),
    Check(_finite_parameters, "finite parameters", "a parameter is NaN or infinite before training"),
    Check(_model_output, "finite outputs", "the model outputs for the first training batch are NaN or infinite"),
    Check(_loss, "a finite loss", "the loss of the first training batch is not a finite scalar"),
)
