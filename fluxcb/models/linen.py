"""Flax Linen modules."""

from collections.abc import Sequence
from typing import Any

import jax

from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree
from fluxcb.models._keywords import train_flag

__all__ = ["LinenAdapter", "linen"]


def linen(
    module: Any, train_argument: str | None = None, *, rng_streams: Sequence[str] = ("dropout",)
) -> "LinenAdapter":
    """Adapt a Flax Linen module to what the training step needs.

    The `params` collection becomes `params`; every other collection that `module.init` creates (`batch_stats`, ...)
    becomes `model_state`, is mutable while the step trains and is left alone otherwise. Collections that only a call
    creates (`intermediates`) are not kept.

    `learner.model` is bound to the trained variables. Linen modules do not store a mode, so pass the train flag of your
    module as in any call: `learner.model(xs, train=False)`. If you pass a bound module to a Learner, training starts
    with its variables.

    Args:
        module: The module. If it is bound to variables, these are the initial values.
        train_argument: The keyword of the module's call that says whether it is being trained. None takes whichever
            of `train`, `training`, `is_training` and `deterministic` the call spells out; without one, nothing is
            passed. `deterministic` is True where the others are False.
        rng_streams: Names of the random streams that the module draws from in a call. The first gets the step's key
            itself, the others keys folded from it.

    Returns:
        The adapter.

    Raises:
        DeclarationError: The module cannot be called, its call does not take `train_argument`, or several keywords
            could be meant.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> model = linen(nn.Dense(3))
        >>> params, model_state = model.init(jax.random.key(0), jnp.ones((2, 5)))
        >>> jax.tree.map(jnp.shape, params)
        {'bias': (3,), 'kernel': (5, 3)}
    """
    if isinstance(rng_streams, str):
        raise DeclarationError(
            f"`rng_streams` is the string {rng_streams!r}; it must be a sequence of names.",
            where="fluxcb.models.linen(module, rng_streams=...)",
            fix=f"pass `rng_streams=({rng_streams!r},)`",
        )
    return LinenAdapter(module, train_argument, tuple(rng_streams))


class LinenAdapter:
    """Runs a Linen module as a model; made by `linen`.

    Attributes:
        held: The `(params, model_state)` that the module is bound to, or None.
    """

    def __init__(self, module: Any, train_argument: str | None, rng_streams: tuple[str, ...]) -> None:
        """Take what `linen` was given."""
        self._module = module
        self._streams = rng_streams
        self.held: tuple[PyTree, PyTree] | None = None
        if module.scope is not None:
            self._module, variables = module.unbind()
            self.held = _parts(variables)
        kind = type(module)
        where = f"{kind.__module__}.{kind.__qualname__}"
        if not callable(module):
            raise DeclarationError(
                f"The Linen module `{kind.__qualname__}` has no `__call__`.",
                where=where,
                why="the step calls the model as `module.apply(variables, xs)`",
                fix="give it a `__call__` that takes a batch of inputs",
            )
        self._flag = train_flag(module.__call__, train_argument, adapter="linen", where=f"{where}.__call__")

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return the `(params, model_state)` that the module is bound to, or those of `module.init(key, xs)`."""
        if self.held is not None:
            return self.held
        # The training path is the one initialised: layers that only training uses (auxiliary heads) need params too.
        rngs = {"params": key}
        for number, stream in enumerate(self._streams, 1):
            rngs.setdefault(stream, jax.random.fold_in(key, number))
        return _parts(self._module.init(rngs, xs, **self._keywords(True)))

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`, as `module.apply` with `model_state` mutable in training only."""
        from flax import core

        variables = {"params": params, **model_state}
        mutable = list(model_state) if train else []
        keywords = {"rngs": self._rngs(key), **self._keywords(train)}
        if not mutable:
            return self._module.apply(variables, xs, **keywords), model_state
        outputs, updated = self._module.apply(variables, xs, mutable=mutable, **keywords)
        return outputs, {**model_state, **core.unfreeze(updated)}

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return the module bound to these arrays: `model(xs)` works, and so do its methods."""
        return self._module.bind({"params": params, **model_state})

    def _keywords(self, train: bool) -> dict[str, bool]:
        return self._flag.keywords(train) if self._flag else {}

    def _rngs(self, key: Any) -> dict[str, Any]:
        if key is None:
            return {}
        return {
            stream: jax.random.fold_in(key, number) if number else key for number, stream in enumerate(self._streams)
        }

    def __repr__(self) -> str:
        """Return the call that made it, in short."""
        return f"linen({type(self._module).__qualname__})"


def _parts(variables: Any) -> tuple[PyTree, PyTree]:
    from flax import core

    collections = dict(core.unfreeze(variables))
    return collections.pop("params", {}), collections
