"""Wrappers around data sources that prepare each batch (`map`) or put it on a device (`place`)."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from fluxcb._calls import entry_point
from fluxcb._errors import DataError, DeclarationError
from fluxcb._interruptions import is_interruption
from fluxcb._typing import Batch
from fluxcb.data.loader import ArrayLoader

__all__ = [
    "FunctionSource",
    "MappedSource",
    "PlacedSource",
    "is_inputs_and_targets",
    "length_of",
    "map",
    "order_of",
    "place",
]


@entry_point
def map(fn: Callable[[Batch], Batch], source: Iterable[Batch]) -> "MappedSource":
    """Apply a function to every batch of a source when the batch is fetched.

    Use it to prepare batches, for example with casts, augmentation or tokenization. A handler that changes the batch at
    `StepBegin` has the same effect, but shortens every window to one step.

    Args:
        fn: `fn(batch) -> batch`. It should return new arrays, because the batches of a source must not change later.
        source: Any object that yields batches each time it is iterated over.

    Returns:
        A source with the same number of batches. It forwards `len` and `set_epoch` to `source`, and its iterators
        forward `get_state` and `set_state`. It does not forward `element_spec`, because `fn` may change the shapes.

    Raises:
        DeclarationError: `fn` is not callable, or `source` is not iterable.

    Example:
        >>> doubled = map(lambda batch: batch * 2, [1, 2, 3])
        >>> list(doubled), len(doubled)
        ([2, 4, 6], 3)
    """
    if not callable(fn):
        raise DeclarationError(
            f"`fn` must be a function of a batch, not of type `{type(fn).__name__}`.",
            where="fluxcb.data.map(fn, source)",
            fix="pass the function first and the source second",
        )
    _require_iterable(source, "fluxcb.data.map(fn, source)")
    return MappedSource(source, fn)


class FunctionSource:
    """A data source that calls a function for the batches of each epoch.

    Args:
        function: `function()` returns an iterable of batches.
        name: Name of the source, at the beginning of messages.
    """

    def __init__(self, function: Callable[[], Iterable[Batch]], name: str) -> None:
        self.function = function
        self._name = name

    def __iter__(self) -> Iterator[Batch]:
        """Call the function, and iterate over its result.

        Raises:
            DataError: The result is not iterable.
        """
        batches = self.function()
        if not hasattr(batches, "__iter__") or isinstance(batches, type | str | bytes):
            raise DataError(
                f"{self._name} is a function that returned {type(batches).__name__} instead of an iterable of batches.",
                why="fluxcb calls the function once per epoch and iterates over the result",
                fix="return an iterable of batches, or write a generator function with `yield`",
            )
        return iter(batches)

    @classmethod
    def of(cls, source: Any, name: str) -> Any:
        """Return the source, or a `FunctionSource` if the source is a function.

        Raises:
            DataError: The function takes arguments.
        """
        if not callable(source) or isinstance(source, type) or hasattr(source, "__iter__"):
            return source
        try:
            inspect.signature(source).bind()
        except ValueError:  # a builtin without a signature
            pass
        except TypeError:
            raise DataError(
                f"{name} is a function with the parameters {inspect.signature(source)}; it must take no arguments.",
                why="fluxcb calls the function once per epoch without arguments",
                fix="pass a lambda that calls it: `lambda: batches(...)`",
            ) from None
        return cls(source, name)  # pyright: ignore[reportArgumentType]  # the result is checked after each call


@entry_point
def place(source: Iterable[Batch], placement: Any) -> "PlacedSource":
    """Transfer every batch of a source to a device, or shard it over several devices, before a step needs it.

    Args:
        source: Any object that yields batches each time it is iterated over. If it is the result of `place` with
            another placement, its original source is used.
        placement: A `jax.Device` or a `jax.sharding.Sharding`. If a sharding splits the batch, every batch must divide
            evenly; see `drop_last` of `ArrayLoader`.

    Returns:
        A source with the same number of batches. It forwards `len`, `set_epoch`, `element_spec` and `fresh_batches` to
        `source`, and its iterators forward `get_state` and `set_state`.

    Raises:
        DeclarationError: `placement` is not a device or a sharding, or `source` is not iterable.

    Example:
        >>> import jax, numpy as np
        >>> placed = place([np.ones(2)], jax.devices()[0])
        >>> [batch.devices() == {jax.devices()[0]} for batch in placed]
        [True]
    """
    import jax

    _require_iterable(source, "fluxcb.data.place(source, placement)")
    if not isinstance(placement, (jax.Device, jax.sharding.Sharding)):
        raise DeclarationError(
            f"`placement` must be a device or a sharding, not of type `{type(placement).__name__}`.",
            where="fluxcb.data.place(source, placement)",
            fix=["pass a device, e.g. `jax.devices()[0]`", "pass a `jax.sharding.NamedSharding(mesh, spec)`"],
        )
    if isinstance(source, PlacedSource):
        if source.placement == placement:
            return source
        source = source.source
    return PlacedSource(source, placement)


class _WrappedSource(ABC):
    """Base class of sources that wrap another source and prepare its batches.

    It forwards the attributes in `_forwarded` to the wrapped source.
    """

    _forwarded: ClassVar[frozenset[str]]

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source = source

    @abstractmethod
    def _prepare(self, batch: Batch) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]:
        return _WrappedIterator(iter(self.source), self._prepare)

    def __len__(self) -> int:
        # If the source has no length, this raises the TypeError that callers such as `list` expect and ignore.
        return len(self.source)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return True  # not `len(self) > 0`, because `if source:` must not raise an error for a source without a length

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._forwarded:
            return getattr(self.source, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


class MappedSource(_WrappedSource):
    """A source that applies a function to each batch; see `map`."""

    _forwarded = frozenset({"set_epoch"})

    def __init__(self, source: Iterable[Batch], fn: Callable[[Batch], Batch]) -> None:
        """Store the arguments of `map`."""
        super().__init__(source)
        self.fn = fn

    def _prepare(self, batch: Batch) -> Batch:
        return self.fn(batch)

    def __repr__(self) -> str:
        """Return the call that created the source."""
        return f"map({getattr(self.fn, '__qualname__', self.fn)}, {self.source!r})"


class PlacedSource(_WrappedSource):
    """A source that transfers each batch to a device; see `place`."""

    _forwarded = frozenset({"set_epoch", "element_spec", "fresh_batches"})

    def __init__(self, source: Iterable[Batch], placement: Any) -> None:
        """Store the arguments of `place`."""
        super().__init__(source)
        self.placement = placement
        # JAX may use a NumPy array without copying it, and read it after the loader has overwritten it.
        self._copies = not (isinstance(source, Sequence) or getattr(source, "fresh_batches", False))

    def _prepare(self, batch: Batch) -> Batch:
        import jax

        if self._copies:
            batch = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
        return jax.device_put(batch, self.placement)

    def __repr__(self) -> str:
        """Return the call that created the source."""
        return f"place({self.source!r}, {self.placement})"


class _WrappedIterator:
    """An iterator over prepared batches.

    It is not a generator, because it must forward `get_state` and `set_state`, for example to a Grain iterator.
    """

    def __init__(self, batches: Iterator[Batch], prepare: Callable[[Batch], Batch]) -> None:
        self._batches = batches
        self._prepare = prepare

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        try:
            return self._prepare(batch)
        except StopIteration as error:  # otherwise, it would silently end the epoch early
            raise RuntimeError("the function of a mapped source raised StopIteration") from error

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state"):
            return getattr(self._batches, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def is_inputs_and_targets(source: Any) -> bool:
    """Return whether a source is a pair of arrays that cannot be two batches, because they differ in axes or dtypes."""
    if not (isinstance(source, tuple) and len(source) == 2 and all(hasattr(part, "__array__") for part in source)):
        return False
    xs, ys = map(np.asarray, source)
    return xs.shape[:1] == ys.shape[:1] and (xs.ndim != ys.ndim or xs.dtype.kind != ys.dtype.kind)


def length_of(source: Any) -> int | None:
    """Return the number of batches of a source, or None if it is not known."""
    try:
        return len(source)
    except TypeError as error:  # also raised by a wrapper if the wrapped source has no length
        if is_interruption(error):
            raise
        return None


def order_of(source: Any) -> dict[str, str]:
    """Return what decides which examples the batches of a source have, as texts; `{}` if it is not known."""
    while isinstance(source, _WrappedSource):
        source = source.source
    if not isinstance(source, ArrayLoader):
        return {}
    order = {"shuffle": str(source.shuffle), "batch_size": str(source.batch_size), "examples": str(source.examples)}
    # Without a shuffle, the seed has no effect.
    return {**order, "seed": str(source.seed)} if source.shuffle else order


def _require_iterable(source: Any, where: str) -> None:
    if not isinstance(source, Iterable):
        raise DeclarationError(
            f"`source` must be an iterable of batches, but `{type(source).__name__}` is not iterable.",
            where=where,
            fix="pass a list of batches, a `fluxcb.data.ArrayLoader`, a Grain dataset, or another iterable",
        )
