"""`Check`, and the checks that `SanityCheck` makes by default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.data.sources import MappedSource, PlacedSource

__all__ = ["Check", "default_checks"]


@dataclass(frozen=True)
class Check:
    """One thing to look at before training.

    Args:
        function: `function(learner) -> bool`, true if all is well. It may read what `SanityCheck` declares: `data`,
            `model`, `loss_fn`, `optimizer`, `callbacks`, `params`, `model_state`. An exception is a failure, too.
        name: What should be the case, a few words.
        message: What is wrong if it is not, and how to mend it.
        error: Whether a failure ends the fit; else it is a warning.

    Raises:
        DeclarationError: `function` does not take one argument, or a text is missing.

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
        try:
            inspect.signature(self.function).bind(None)
        except (TypeError, ValueError):
            raise DeclarationError(
                f"A `Check` takes a function of the learner, not {self.function!r}.",
                fix='e.g. `Check(lambda learner: learner.data.validation is not None, "name", "message")`',
            ) from None
        for what, text in (("name", self.name), ("message", self.message)):
            if not isinstance(text, str) or not text:
                raise DeclarationError(
                    f"The {what} of a `Check` must be a text, not {text!r}.", fix="say what should be the case"
                )

    def failure(self, learner: Any) -> str | None:
        """Return what is wrong, or None."""
        try:
            if self.function(learner):
                return None
        except Exception as error:
            return f"{self.name}: {type(error).__name__}: {error}"
        return f"{self.name}: {self.message}"

    def __repr__(self) -> str:
        return f"Check({self.name!r})"


def default_checks() -> tuple[Check, ...]:
    """Return the checks that `SanityCheck` makes, in order.

    Example:
        >>> from fluxcb.callbacks import default_checks
        >>> [check.name for check in default_checks() if not check.error]
        ['validation data', 'finite inputs']
    """
    return _DEFAULTS


def _training_data(learner: Any) -> bool:
    return learner.data.training is not None


def _validation_data(learner: Any) -> bool:
    return learner.data.validation is not None


def _pairs(learner: Any) -> bool:
    return learner.model is None or all(isinstance(b, tuple | list) and len(b) == 2 for b in _first_batch(learner))


def _batch_sizes(learner: Any) -> bool:
    import jax
    import numpy as np

    if learner.model is None:  # batches of a loss function of one's own may be anything
        return True
    return all(len({np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}) <= 1 for batch in _first_batch(learner))


def _finite_inputs(learner: Any) -> bool:
    return all(_finite(batch) for batch in _first_batch(learner))


def _finite_parameters(learner: Any) -> bool:
    return _finite(learner.params)


def _model_output(learner: Any) -> bool:
    return learner.model is None or all(_finite(_outputs(learner, batch)) for batch in _first_batch(learner))


def _loss(learner: Any) -> bool:
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


def _first_batch(learner: Any) -> Iterator[Any]:
    """Yield the first batch of training; none where looking would take it from the training."""
    source = innermost = learner.data.training
    while isinstance(innermost, MappedSource | PlacedSource):  # these do not make an iterator repeatable
        innermost = innermost.source
    if not isinstance(innermost, Iterator):
        yield next(iter(source))


def _outputs(learner: Any, batch: Any) -> Any:
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
    Check(_training_data, "training data", "there are none: give the Learner `data=`"),
    Check(
        _validation_data,
        "validation data",
        "there are none, so nothing is validated: give the Learner `data=(training, validation)`",
        error=False,
    ),
    Check(_pairs, "batches of inputs and targets", "a batch of training is no pair `(xs, ys)`"),
    Check(_batch_sizes, "equal batch sizes", "the arrays of a batch of training differ in their first axis"),
    Check(_finite_inputs, "finite inputs", "the first batch of training has NaN or infinite values", error=False),
    Check(_finite_parameters, "finite parameters", "a parameter is NaN or infinite before any training"),
    Check(_model_output, "finite outputs", "the model's outputs for the first batch of training are NaN or infinite"),
    Check(_loss, "a finite loss", "the loss of the first batch of training is no finite scalar"),
)
