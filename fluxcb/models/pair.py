"""A model written as two functions, `(init, apply)`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree
from fluxcb.models._keywords import accepted_keywords, fits_call

__all__ = ["PairAdapter", "PairModel", "pair"]


def pair(init: Callable[..., Any], apply: Callable[..., Any], *, stateful: bool = False) -> "PairAdapter":
    """Adapt two functions to what the training step needs.

    Where `apply` spells out a keyword `key`, it is given the step's PRNG key; where it spells out `train`, it is told
    whether the step trains. With neither it is called as it stands, so transforms of other libraries fit:
    `pair(*hk.without_apply_rng(hk.transform(f)))` for Haiku,
    `pair(lambda key, xs: init(key, xs.shape)[1], apply)` for stax.

    Args:
        init: `init(key, xs) -> params`, with `xs` an example of the input.
        apply: `apply(params, xs) -> outputs`, and optionally the keywords `key` and `train`.
        stateful: Whether the model keeps state beside its params. If so, `init` returns `(params, model_state)`, and
            `apply(params, model_state, xs)` returns `(outputs, new_model_state)`.

    Returns:
        The adapter.

    Raises:
        DeclarationError: One of the two cannot be called, or takes other arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def init(key, xs):
        ...     return {"w": jnp.ones((xs.shape[-1], 1))}
        >>> def apply(params, xs):
        ...     return xs @ params["w"]
        >>> model = pair(init, apply)
        >>> params, model_state = model.init(jax.random.key(0), jnp.ones((2, 3)))
        >>> model.apply(params, model_state, jnp.ones((2, 3)), train=True, key=None)[0].tolist()
        [[3.0], [3.0]]
    """
    for name, function in (("init", init), ("apply", apply)):
        if not callable(function):
            raise DeclarationError(
                f"`{name}` of a model pair must be a function, not of type `{type(function).__name__}`.",
                where="fluxcb.models.pair(init, apply)",
                fix="pass `init(key, xs) -> params` and `apply(params, xs) -> outputs`",
            )
    arguments = {"init": ("key", "xs"), "apply": ("params", "model_state", "xs") if stateful else ("params", "xs")}
    for name, function in (("init", init), ("apply", apply)):
        keywords = accepted_keywords(apply) & {"key", "train"} if name == "apply" else ()
        if not fits_call(function, len(arguments[name]), keywords):
            raise DeclarationError(
                f"`{name}` of a model pair takes {inspect.signature(function)}, "
                f"and is called as `{name}({', '.join(arguments[name])})`.",
                where=_place(function),
                fix=f"write `def {name}({', '.join(arguments[name])}):`",
            )
    return PairAdapter(init, apply, stateful)


class PairAdapter:
    """Runs a pair of functions as a model; made by `pair`.

    Attributes:
        held: The `(params, model_state)` of the trained pair that this adapter was created from, or None.
    """

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        stateful: bool,
        held: tuple[PyTree, PyTree] | None = None,
    ) -> None:
        """Take what `pair` was given."""
        self.held = held
        self._init = init
        self._apply = apply
        self._stateful = stateful
        self._accepted = accepted_keywords(apply) & {"key", "train"}

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)` for inputs like `xs`; the state of a stateless pair is `{}`."""
        if self.held is not None:
            return self.held
        made = self._init(key, xs)
        if not self._stateful:
            return made, {}
        if not (isinstance(made, tuple) and len(made) == 2):
            raise DeclarationError(
                f"`init` of a stateful pair must return `(params, model_state)`, but returned `{type(made).__name__}`.",
                where=_place(self._init),
                fix=["return both", "leave out `stateful=True`"],
            )
        return made[0], made[1]

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`; the state is left alone where `train` is False."""
        keywords = {name: value for name, value in (("key", key), ("train", train)) if name in self._accepted}
        if not self._stateful:
            return self._apply(params, xs, **keywords), model_state
        outputs, new_model_state = self._apply(params, model_state, xs, **keywords)
        return outputs, new_model_state if train else model_state

    def rebuild(self, params: PyTree, model_state: PyTree) -> "PairModel":
        """Return a callable `model(xs)` that holds these arrays."""
        return PairModel(params, model_state, self)

    def holding(self, params: PyTree, model_state: PyTree) -> "PairAdapter":
        """Return an adapter for the same functions whose `init` returns these arrays."""
        return PairAdapter(self._init, self._apply, self._stateful, (params, model_state))

    def __repr__(self) -> str:
        """Return the call that made it, in short."""
        return f"pair({_name(self._init)}, {_name(self._apply)})"


@dataclass(frozen=True)
class PairModel:
    """A trained pair: `model(xs)` is `apply` with the trained params, in evaluation.

    If you pass it to a Learner, training starts with these params.
    """

    params: PyTree
    model_state: PyTree
    adapter: PairAdapter = field(repr=False)

    def __call__(self, xs: PyTree, *, key: Any = None) -> PyTree:
        """Return the outputs for a batch of inputs; `key` reaches an `apply` that takes one."""
        return self.adapter.apply(self.params, self.model_state, xs, train=False, key=key)[0]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{_name(function)}  {code.co_filename}:{code.co_firstlineno}" if code else _name(function)
