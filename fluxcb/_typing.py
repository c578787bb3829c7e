"""Words everyone shares: aliases, protocols and one plain record; nothing that runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

PyTree: TypeAlias = Any
"""Nested containers of arrays, as JAX understands them."""

Batch: TypeAlias = Any
"""One batch: any pytree of arrays whose leading axis is the example."""


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """A batch that is not there yet: rows of arrays that stay on the device, gathered inside the compiled step.

    Attributes:
        arrays: A pytree of arrays on a device, with one leading axis.
        rows: Which entries of that axis the batch has (int32[batch], in bounds).
    """

    arrays: PyTree
    rows: Any


StatePath: TypeAlias = tuple[str, ...]
"""A dotted place in the Learner, split at the dots: `("step", "loss")`."""

LossFn: TypeAlias = Callable[..., Any]
"""`loss_fn(outputs, ys) -> float32[]`, or `loss_fn(params, batch, key)` for `Learner.from_loss`."""


@runtime_checkable
class BatchSource(Protocol):
    """Anything that yields batches again when iterated again."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        ...


class ModelAdapter(Protocol):
    """The interface between the training step and a model of any library.

    An adapter may also have an attribute `held`. It is None, or the `(params, model_state)` that `init` returns for any
    arguments. `load_model` then checks that a checkpoint has arrays of the same structure.
    """

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)`; `xs` is an example of the model's input."""
        ...

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)` for a batch of inputs."""
        ...

    def rebuild(self, params: PyTree, model_state: PyTree) -> Any:
        """Return a new model of the user's type that holds these arrays, ready for inference."""
        ...
