"""Shuffled batches of arrays that fit in memory."""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fluxcb._calls import Constructed, entry_point
from fluxcb._errors import DataError, DeclarationError
from fluxcb._typing import Batch, PyTree, Rows

__all__ = ["ArrayLoader"]

_WHERE = "fluxcb.data.ArrayLoader(arrays, batch_size)"

_FIXES: dict[str, str] = dict.fromkeys(
    ("x", "y", "xs", "ys", "inputs", "targets", "arrays"),
    "pass the arrays by position: `ArrayLoader(xs, ys, batch_size=32)`",
)
"""The fixes to suggest for arguments that `ArrayLoader` does not have, and for missing arrays."""


class ArrayLoader(Constructed):
    """Yield batches of arrays in an order that depends only on the seed and the epoch.

    Epoch `e` visits the examples in the order `np.random.default_rng((seed, e)).permutation(n)`. Each `iter()` starts
    the next epoch. The first epoch is 0. `set_epoch(e)` sets the epoch of the next `iter()`, and later epochs count
    from `e`. A resumed run that sets the epoch therefore gets the same batches as an uninterrupted run.

    Every batch consists of new arrays that are never written again, because a step may still be reading the previous
    batches. NumPy arrays give NumPy batches. JAX arrays are indexed on their device, so their data stays there.

    With `device=True`, the arrays are copied to the device once, and a Learner gets row numbers instead of batches. The
    compiled program gathers the rows, so no batches are stacked or transferred. Use this option for data that fits in
    device memory. It does not change the order of the examples.

    Args:
        arrays: A pytree of NumPy or JAX arrays whose leading axis is the example: `(xs, ys)`, a dict, ...
        *more: More arrays: `ArrayLoader(xs, ys, batch_size=32)` is `ArrayLoader((xs, ys), batch_size=32)`. The last
            positional argument may be the batch size: `ArrayLoader((xs, ys), 32)`.
        batch_size: Number of examples in a batch.
        shuffle: Whether to visit the examples in a new order in each epoch. Otherwise, they keep their stored order.
        seed: A non-negative int.
        drop_last: Whether to drop the last batch of an epoch if it is smaller than the others.
        device: Whether to keep the arrays on the default device.

    Raises:
        DataError: The arrays differ in their leading axis, are empty, or have too few examples for a full batch with
            `drop_last`.
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
    """No buffer is reused. A batch can be kept, and passed to JAX without a copy."""

    resident: bool
    """Whether the arrays stay on the device. If so, `iter_rows` yields row numbers."""

    @entry_point(fixes=_FIXES)
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
        """Check the arrays and the options. The class docstring describes the arguments."""
        import jax  # imported here, so that importing fluxcb.data stays fast

        if batch_size is None:
            *others, batch_size = _ending_in_batch_size(more)
        else:
            others = list(more)
        if others:
            arrays = (arrays, *others)
        self.batch_size = _whole_number("batch_size", batch_size, at_least=1)
        self.seed = _whole_number("seed", seed, at_least=0)
        self.shuffle = _flag("shuffle", shuffle)
        self.drop_last = _flag("drop_last", drop_last)
        self.resident = _flag("device", device)
        with_paths, self._structure = jax.tree.flatten_with_path(arrays)
        self._leaves = [leaf for _, leaf in with_paths]
        names = [f"arrays{jax.tree_util.keystr(path)}" for path, _ in with_paths]
        self.examples = _common_length(names, self._leaves)
        if device:
            self._leaves = [_on_device(name, leaf) for name, leaf in zip(names, self._leaves, strict=True)]
        self._arrays = self._structure.unflatten(self._leaves)
        self._epoch = 0
        if len(self) == 0:
            raise DataError(
                f"An epoch would have no batches: {self.examples} examples do not fill a batch of {self.batch_size}.",
                where=_WHERE,
                why="`drop_last=True` drops the only batch, because it is smaller than the batch size",
                fix=[f"use a `batch_size` of at most {self.examples}", "remove `drop_last`"],
            )

    @entry_point
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (counted from 0) that the next `iter()` starts. A Learner's first pass is epoch 1."""
        self._epoch = _whole_number("epoch", epoch, at_least=0)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        if self.drop_last:
            return self.examples // self.batch_size
        return math.ceil(self.examples / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch."""
        # Indexing with an array copies. A slice would return a view of the user's data.
        return _Batches(self, lambda chosen: self._structure.unflatten([leaf[chosen] for leaf in self._leaves]))

    @entry_point
    def iter_rows(self) -> Iterator[Rows]:
        """Start the next epoch and yield row numbers of the arrays on the device. The Learner uses this method."""
        return _Batches(self, lambda chosen: Rows(self._arrays, chosen.astype(np.int32)))

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of one full batch in the step, as a pytree of `jax.ShapeDtypeStruct`."""
        import jax

        rows = min(self.batch_size, self.examples)
        specs = [
            # On the device, float64 arrays become float32 unless `jax_enable_x64` is set.
            jax.ShapeDtypeStruct(
                (rows, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            )
            for leaf in self._leaves
        ]
        return self._structure.unflatten(specs)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The different numbers of examples that batches have."""
        rest = self.examples % self.batch_size
        full = (self.batch_size,) if self.examples >= self.batch_size else ()
        return full if self.drop_last or not rest else (*full, rest)

    def __repr__(self) -> str:
        """Return the sizes of the arrays and the options."""
        return f"ArrayLoader({self.examples} examples, batch_size={self.batch_size}, seed={self.seed})"

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle:
            return np.random.default_rng((self.seed, epoch)).permutation(self.examples)
        return np.arange(self.examples)

    def _next_epoch(self) -> int:
        """Return the number of the epoch that the next call of `iter` starts, and advance it."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        return epoch


class _Batches(Iterator[Any]):
    """The batches of one epoch. A resumed run can set its position without creating the earlier batches."""

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
        """Return the epoch and the index of the next batch."""
        return {"epoch": self._epoch, "next": self._next}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Set the position that `get_state` returned."""
        self._begin(state["epoch"])
        self._next = state["next"]
        self._loader.set_epoch(self._epoch + 1)


def _flag(name: str, value: Any) -> bool:
    """Return a flag. Other values are an error, because the text "no" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise DeclarationError(
            f"`{name}` of `ArrayLoader` must be True or False, not {value!r}.", where=_WHERE, fix=f"write `{name}=True`"
        )
    return bool(value)


def _ending_in_batch_size(more: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments after the first one if the last of them can be the batch size.

    Raises:
        DeclarationError: The last argument is an array or a container, or there are no arguments.
    """
    if more and not (isinstance(more[-1], list | tuple | Mapping) or getattr(more[-1], "shape", ())):
        return more
    received = "only arrays" if more else "only one argument"
    raise DeclarationError(
        f"`ArrayLoader` received {received} and no batch size.",
        where=_WHERE,
        fix="pass the batch size by name: `ArrayLoader(xs, ys, batch_size=32)`",
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
            fix=f"pass an int, e.g. `{name}={max(at_least, 32 if name == 'batch_size' else 0)}`",
        )
    return number


def _common_length(names: list[str], leaves: list[Any]) -> int:
    """Return the length of the leading axis, which must be the same for all leaves and not 0."""
    for name, leaf in zip(names, leaves, strict=True):
        if not getattr(leaf, "shape", ()):
            raise DataError(
                f"`{name}` has no leading axis for the examples; its type is `{type(leaf).__name__}`.",
                where=_WHERE,
                fix="pass NumPy or JAX arrays whose first axis is the example; convert lists to arrays first",
            )
    lengths = [leaf.shape[0] for leaf in leaves]
    if not lengths or 0 in lengths:
        raise DataError(
            "`ArrayLoader` received no examples.",
            where=_WHERE,
            why=", ".join(f"`{n}` has shape {leaf.shape}" for n, leaf in zip(names, leaves, strict=True))
            or "`arrays` contains no arrays",
            fix="pass arrays with at least one example",
        )
    if len(set(lengths)) > 1:
        raise DataError(
            "The arrays do not have the same number of examples: "
            + ", ".join(f"`{name}` has {length}" for name, length in zip(names, lengths, strict=True))
            + ".",
            where=_WHERE,
            why="the same index must select the same example in all arrays",
            fix="pass arrays whose first axes have the same length",
        )
    return lengths[0]


def _on_device(name: str, leaf: Any) -> Any:
    import jax

    try:
        return jax.numpy.array(leaf, copy=True)
    except TypeError:
        raise DataError(
            f"`{name}` is {leaf.dtype}[{', '.join(map(str, leaf.shape))}], which cannot be stored on the device.",
            where=_WHERE,
            why="JAX only supports arrays of numbers in the byte order of this machine",
            fix=["convert it to numbers first", "remove `device=True`, and prepare batches with `fluxcb.data.map`"],
        ) from None
