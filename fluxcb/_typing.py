"""Shared type aliases, protocols and records, without code that runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

PyTree: TypeAlias = Any
"""A nested container of arrays, as in JAX."""

Batch: TypeAlias = Any
"""One batch: a pytree of arrays whose leading axis is the example."""


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A batch in the form of row numbers. The compiled step gathers these rows from arrays on the device.

    Attributes:
        arrays: A pytree of arrays on a device, with one common leading axis.
        rows: Row numbers of the batch on that axis (int32[batch], in bounds).
    """

    arrays: PyTree
    rows: Any


StatePath: TypeAlias = tuple[str, ...]
"""A dotted state path of the Learner, split at the dots: `("step", "loss")`."""

LossFn: TypeAlias = Callable[..., Any]
"""`loss_fn(outputs, ys)` or `loss_fn(model, batch)` for `Learner`, `loss_fn(params, batch)` for `Learner.from_loss`."""


@dataclass(frozen=True, eq=False, slots=True)
class BoundModel:
    """A model with its parameters and state, for one call of a loss function.

    Attributes:
        model: The argument of the loss function: a callable with the interface of the user's own model.
        new_state: Returns the new `model_state` after the call. The argument is the state that the loss function
            returned, or None if it returned no state.
        state: The state that the loss function takes as `model_state` and returns. None if `model` keeps the state.
    """

    model: Any
    new_state: Callable[[Any], PyTree]
    state: Any = None


class ModelAdapter(Protocol):
    """The interface between the training step and a model of any library.

    An adapter may also have an attribute `held`. It is None, or the `(params, model_state)` that `init` returns for any
    arguments. `load_model` then checks that a checkpoint has arrays of the same structure.

    An adapter may also have a method `bind(params, model_state, *, train, key) -> BoundModel`. It returns the model
    that a loss function `loss_fn(model, batch)` receives. Without it, such a loss function receives a callable
    `model(xs)`, which calls `apply`.

    An adapter that holds the initial arrays may also have a method `released(model)`. It returns an adapter without
    them, and the model that the user passed, with `jax.ShapeDtypeStruct`s in their place. The Learner then keeps only
    these two.
    """

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)`. `xs` is an example of the model's input."""
        ...

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)` for a batch of inputs."""
        ...

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return a new model of the user's type that holds these arrays, ready for inference."""
        ...
