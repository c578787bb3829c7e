"""Warnings about loss functions of a batch that broadcast outputs and targets to all pairs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from fluxcb._compile.loss_calls import bound_model
from fluxcb._compile.step_setup import StepSetup
from fluxcb._declare.losses import batch_arguments, takes_model
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree

__all__ = ["warn_of_pairs_in_batch"]


def warn_of_pairs_in_batch(setup: StepSetup, carry: Mapping[str, Any], batch: PyTree, shapes: set[Any]) -> None:
    """Warn if a loss function broadcasts outputs `[N, 1]` and a part `[N]` of the batch, or the reverse.

    The form is `loss_fn(model, batch)` or `loss_fn(params, batch)`. In the second one, the outputs are what the
    function computes from the other parts of the batch. All pairs of the same part, as in `scores[:, None] - scores`,
    give no warning.

    Args:
        setup: The fixed inputs of the step.
        carry: The specs of the carry.
        batch: The specs of the batch.
        shapes: The shapes `[N, N]` of all values in the step that are computed from N values.
    """
    if setup.model is not None and not takes_model(setup.loss_fn):
        return
    leaves = [leaf for leaf in jax.tree.leaves(batch) if leaf.shape]
    count = leaves[0].shape[0] if leaves else 0
    # Tracing the loss a second time costs time, so it is done only if the step has values for all pairs.
    if count < 2 or (count, count) not in shapes:
        return
    for part, outputs in (((count,), (count, 1)), ((count, 1), (count,))):
        if any(leaf.shape == part for leaf in leaves) and _promotes(setup, carry, batch, part, outputs):
            combined = f"outputs {list(outputs)} of the model and values {list(part)} of the batch"
            if setup.model is None:  # what has which shape is not known
                combined = f"values of shapes [{count}, 1] and [{count}]"
            warn_user(
                f"The loss function combines {combined}, which NumPy broadcasts to [{count}, {count}]: each output is "
                f"compared with every target. Write `[:, 0]` after the value of shape [{count}, 1]. If all pairs are "
                "intended, write `[None, :]` after the other.",
                UserWarning,
            )
            return


def _promotes(
    setup: StepSetup, carry: Mapping[str, Any], batch: PyTree, part: tuple[int, ...], outputs: tuple[int, ...]
) -> bool:
    """Return whether an operation adds an axis to combine outputs of the model with a part of the batch."""
    # Unusual sizes, because JAX caches the traces of its own functions by shape. The sizes differ, which tells the part
    # from outputs: all pairs of the outputs, as in a ranking loss, are intended.
    sizes = 2 * part[0] + 1, 2 * part[0] + 3

    def resized(leaf: Any) -> Any:
        if leaf.shape[:1] != part[:1]:
            return leaf
        # The part gets the second size, and the inputs get the first one, which the outputs then have.
        return jax.ShapeDtypeStruct((sizes[leaf.shape == part], *leaf.shape[1:]), leaf.dtype)

    recorded: list[tuple[int, ...]] = []

    def loss(params: PyTree, model_state: PyTree, batch: PyTree) -> None:
        # Only shapes are computed, so any key will do.
        key: Any = jax.random.key(0)
        first, state = params, model_state
        if setup.model is not None:
            bound = bound_model(setup.model, params, model_state, train=True, key=key)
            first, state = _Recorded(bound.model, recorded), bound.state
        loss_fn: Any = setup.loss_fn
        args, kwargs = batch_arguments(loss_fn, first, batch, key=key, train=True, model_state=state)
        loss_fn(*args, **kwargs)

    first, second = (rf"\({size}," for size in sizes)
    promotion = rf"(?s).*rank promotion.*({first}.*{second}|{second}.*{first})"
    found = False
    with warnings.catch_warnings(), jax.numpy_rank_promotion("warn"):
        warnings.simplefilter("ignore")
        # As an error, because JAX caches a trace that succeeds, and would not warn the next time.
        warnings.filterwarnings("error", message=promotion)
        try:
            jax.eval_shape(loss, carry["params"], carry["model_state"], jax.tree.map(resized, batch))
        except Exception as error:  # also one of the loss function, for example if it depends on the batch size
            found = re.match(promotion, str(error)) is not None
    if setup.model is None:
        return found
    # A model that is mapped over the batch, such as an Equinox module, returns one example.
    expected = {(sizes[0], *outputs[1:]), outputs[1:]}
    return found and not expected.isdisjoint(recorded)


class _Recorded:
    """A model that records the shapes of its outputs."""

    def __init__(self, model: Any, shapes: list[tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        outputs = self._model(*args, **kwargs)
        self._shapes += [leaf.shape for leaf in jax.tree.leaves(outputs) if hasattr(leaf, "shape")]
        return outputs
