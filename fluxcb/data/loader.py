"""Shuffled batches of arrays that fit in memory."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fluxcb._declare.signatures import explained
from fluxcb._errors import DataError, DeclarationError
from fluxcb._typing import Batch, PyTree, Rows

__all__ = ["ArrayLoader"]

_WHERE = "fluxcb.data.ArrayLoader(arrays, batch_size)"

_CURES: dict[str, str] = dict.fromkeys(
    ("x", "y", "xs", "ys", "inputs", "targets", "arrays"),
    "pass the arrays by position: `ArrayLoader(xs, ys, batch_size=32)`",
)
"""The fixes to suggest for arguments that `ArrayLoader` does not have, and for missing arrays."""


class ArrayLoader:
    """Yields batches of arrays, in an order that depends on the seed and the epoch and on nothing else.

    Epoch `e` visits the examples in the order `np.random.default_rng((seed, e)).permutation(n)`. Each `iter()` starts
    the next epoch, from 0 on; `set_epoch(e)` says which epoch the next `iter()` starts, and counting goes on from
    there. So a resumed run that sets the epoch sees the batches it would have seen.

    Every batch is made of new arrays, and none is written to again: a step may still be reading the last ones.
    NumPy arrays give NumPy batches; JAX arrays are indexed where they are, so data on a device stays there.

    With `device=True` the arrays are put on the device once, and a Learner is given row numbers instead of batches: the
    compiled program gathers the rows itself. Nothing else is stacked or moved then, which suits data that fits there.
    The order is the same as without it.

    Args:
        arrays: A pytree of NumPy or JAX arrays with one leading axis, the example: `(xs, ys)`, a dict, ...
        *more: More arrays: `ArrayLoader(xs, ys, batch_size=32)` is `ArrayLoader((xs, ys), batch_size=32)`. The last
            positional argument may be the batch size: `ArrayLoader((xs, ys), 32)`.
        batch_size: Examples in a batch.
        shuffle: Whether to visit the examples in a new order each epoch. Without it they come as they are stored.
        seed: A non-negative int.
        drop_last: Whether to leave out the last batch of an epoch if it is smaller than the others.
        device: Whether to keep the arrays on the default device.

    Raises:
        DataError: The arrays differ in their leading axis, are empty, or make no whole batch under `drop_last`.
        DeclarationError: `batch_size` is missing, or `batch_size` or `seed` is not a valid number.

    Example:
        >>> loader = ArrayLoader((np.arange(5), np.arange(5) ** 2), 2, shuffle=False)
        >>> [(xs.tolist(), ys.tolist()) for xs, ys in loader]
        [([0, 1], [0, 1]), ([2, 3], [4, 9]), ([4], [16])]
        >>> len(loader), loader.element_spec[0].shape
        (3, (2,))
        >>> len(ArrayLoader(np.arange(5), np.arange(5) ** 2, batch_size=2))
        3
    """

    fresh_batches = True
    """No buffer is reused: a batch may be kept, and passed to JAX without a copy."""

    resident: bool
    """Whether the arrays stay on the device, and `iter_rows` yields row numbers of them."""

    @explained(_CURES)
    def __init__(
        self,
        arrays: PyTree,
        *more: PyTree,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: bool = False,
    ) -> None:
        """Check the arrays against each other, once; see the class."""
        import jax  # here and not above, so that importing fluxcb.data stays cheap

        if batch_size is None:
            *others, batch_size = _ending_in_batch_size(more)
        else:
            others = list(more)
        if others:
            arrays = (arrays, *others)
        self.batch_size = _whole_number("batch_size", batch_size, at_least=1)
        self.seed = _whole_number("seed", seed, at_least=0)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.resident = device
        with_paths, self._structure = jax.tree.flatten_with_path(arrays)
        self._leaves = [leaf for _, leaf in with_paths]
        names = [f"arrays{jax.tree_util.keystr(path)}" for path, _ in with_paths]
        self._examples = _common_length(names, self._leaves)
        if device:
            self._leaves = [_on_device(name, leaf) for name, leaf in zip(names, self._leaves, strict=True)]
        self._arrays = self._structure.unflatten(self._leaves)
        self._epoch = 0
        if len(self) == 0:
            raise DataError(
                f"An epoch would have no batches: {self._examples} examples make no batch of {self.batch_size}.",
                where=_WHERE,
                why="`drop_last=True` leaves out the only batch, which is smaller",
                fix=[f"make `batch_size` {self._examples} or less", "leave out `drop_last`"],
            )

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` start epoch `epoch`, counted from 0."""
        self._epoch = _whole_number("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        """Return the number of batches an epoch."""
        if self.drop_last:
            return self._examples // self.batch_size
        return math.ceil(self._examples / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch."""
        # Indexing by an array copies; a slice would hand out a view of the user's data.
        return _Batches(self, lambda chosen: self._structure.unflatten([leaf[chosen] for leaf in self._leaves]))

    def iter_rows(self) -> Iterator[Rows]:
        """Start the next epoch, as row numbers of the resident arrays: what a Learner asks of a resident source."""
        return _Batches(self, lambda chosen: Rows(self._arrays, chosen.astype(np.int32)))

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of one full batch as a step sees them: a pytree of `jax.ShapeDtypeStruct`."""
        import jax

        rows = min(self.batch_size, self._examples)
        specs = [
            # float64 arrays become float32 on the way to the device, unless jax_enable_x64 is on
            jax.ShapeDtypeStruct(
                (rows, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            )
            for leaf in self._leaves
        ]
        return self._structure.unflatten(specs)

    def __repr__(self) -> str:
        """Return sizes, not contents."""
        return f"ArrayLoader({self._examples} examples, batch_size={self.batch_size}, seed={self.seed})"

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return np.random.default_rng((self.seed, epoch)).permutation(self._examples)
        return np.arange(self._examples)

    def _next_epoch(self) -> int:
        """Return the epoch that an `iter()` starts now."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        return epoch


class _Batches(Iterator[Any]):
    """The batches of one epoch; knows its position, which a resumed run goes on from without making those before it."""

    def __init__(self, loader: ArrayLoader, made: Callable[[np.ndarray], Any]) -> None:
        self._loader = loader
        self._made = made
        self._begin(loader._next_epoch())

    def _begin(self, epoch: int) -> None:
        self._epoch, self._next, self._order = epoch, 0, self._loader._order(epoch)

    def __next__(self) -> Any:
        if self._next == len(self._loader):
            raise StopIteration
        first = self._next * self._loader.batch_size
        self._next += 1
        return self._made(self._order[first : first + self._loader.batch_size])

    def get_state(self) -> dict[str, int]:
        """Return the epoch, and the number of its next batch."""
        return {"epoch": self._epoch, "next": self._next}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go to where `get_state` was."""
        self._begin(state["epoch"])
        self._next = state["next"]
        self._loader.set_epoch(self._epoch + 1)


def _ending_in_batch_size(more: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments after the first arrays; the last one is the batch size.

    Raises:
        DeclarationError: The last argument is an array or a container, or there is none.
    """
    if more and not (isinstance(more[-1], list | tuple | Mapping) or getattr(more[-1], "shape", ())):
        return more
    given = "arrays only" if more else "one argument only"
    raise DeclarationError(
        f"`ArrayLoader` was given {given}, and no batch size.",
        where=_WHERE,
        fix="add it by name: `ArrayLoader(xs, ys, batch_size=32)`",
    )


def _whole_number(name: str, value: Any, *, at_least: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise DeclarationError(
            f"`{name}` must be an int of {at_least} or more, not {value!r} (`{type(value).__name__}`).",
            where="fluxcb.data.ArrayLoader",
            fix=f"pass an int, {name}={max(at_least, 32 if name == 'batch_size' else 0)} for example",
        )
    return number


def _common_length(names: list[str], leaves: list[Any]) -> int:
    """Return the length of the leading axis that all leaves share, and which is not 0."""
    for name, leaf in zip(names, leaves, strict=True):
        if not getattr(leaf, "shape", ()):
            raise DataError(
                f"`{name}` has no leading axis to take batches from: it is of type `{type(leaf).__name__}`.",
                where=_WHERE,
                fix="pass NumPy or JAX arrays whose first axis is the example; turn lists into arrays first",
            )
    lengths = [leaf.shape[0] for leaf in leaves]
    if not lengths or 0 in lengths:
        raise DataError(
            "There are no examples to take batches from.",
            where=_WHERE,
            why=", ".join(f"`{n}` has shape {leaf.shape}" for n, leaf in zip(names, leaves, strict=True))
            or "`arrays` holds no arrays",
            fix="pass arrays with at least one example",
        )
    if len(set(lengths)) > 1:
        raise DataError(
            "The arrays do not have the same number of examples: "
            + ", ".join(f"`{name}` has {length}" for name, length in zip(names, lengths, strict=True))
            + ".",
            where=_WHERE,
            why="one index picks the same example from each of them",
            fix="make their first axes equally long",
        )
    return lengths[0]


def _on_device(name: str, leaf: Any) -> Any:
    import jax

    try:
        return jax.numpy.array(leaf, copy=True)
    except TypeError:
        raise DataError(
            f"`{name}` is {leaf.dtype}[{', '.join(map(str, leaf.shape))}], which cannot stay on the device.",
            where=_WHERE,
            why="JAX takes arrays of numbers, in this machine's byte order",
            fix=["make numbers of it before", "leave out `device=True`, and prepare batches with `fluxcb.data.map`"],
        ) from None
