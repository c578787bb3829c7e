"""Wrappers around batch sources: prepare each batch (`map`), put it on a device (`place`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from fluxcb._errors import DeclarationError
from fluxcb._typing import Batch

__all__ = ["MappedSource", "PlacedSource", "map", "place"]


def map(fn: Callable[[Batch], Batch], source: Iterable[Batch]) -> "MappedSource":
    """Apply a function to every batch of a source, while batches are fed and not while steps run.

    This is where batch preparation belongs (casting, augmentation, tokens to ids): a handler that changes the batch at
    `StepBegin` would bound every window to one step.

    Args:
        fn: `fn(batch) -> batch`. It should return new arrays: what a source yielded must not change afterwards.
        source: Anything that yields batches again when iterated again.

    Returns:
        A source of as many batches. `len` and `set_epoch` reach `source`, and iterators forward `get_state` and
        `set_state`; `element_spec` does not, as `fn` may change it.

    Raises:
        DeclarationError: `fn` cannot be called, or `source` cannot be iterated over.

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


def place(source: Iterable[Batch], placement: Any) -> "PlacedSource":
    """Put every batch of a source on a device, or spread it over several, before a step needs it.

    Args:
        source: Anything that yields batches again when iterated again. One that is placed already is placed anew from
            its own source, or returned as it is if the placement is the same.
        placement: A `jax.Device` or a `jax.sharding.Sharding`. With a sharding that splits the batch, every batch has
            to divide evenly: see `drop_last` of `ArrayLoader`.

    Returns:
        A source of as many batches; `len`, `set_epoch`, `element_spec` and `fresh_batches` are those of `source`, and
        iterators forward `get_state` and `set_state`.

    Raises:
        DeclarationError: `placement` is not a device or sharding, or `source` cannot be iterated over.

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
            fix=["pass a device, as `jax.devices()[0]`", "pass a `jax.sharding.NamedSharding(mesh, spec)`"],
        )
    if isinstance(source, PlacedSource):
        if source.placement == placement:
            return source
        source = source.source
    return PlacedSource(source, placement)


class _WrappedSource(ABC):
    """Yields what `_prepare` makes of each batch; hands chosen attributes through, if the source has them."""

    _forwarded: ClassVar[frozenset[str]]

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source = source

    @abstractmethod
    def _prepare(self, batch: Batch) -> Batch: ...

    def __iter__(self) -> Iterator[Batch]:
        return _WrappedIterator(iter(self.source), self._prepare)

    def __len__(self) -> int:
        # A source without a length: the TypeError of `len` is what `list` and others expect, and pass over.
        return len(self.source)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return True  # not `len(self) > 0`: asking `if source:` of a stream must not raise

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._forwarded:
            return getattr(self.source, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


class MappedSource(_WrappedSource):
    """A source whose batches went through a function; made by `map`."""

    _forwarded = frozenset({"set_epoch"})

    def __init__(self, source: Iterable[Batch], fn: Callable[[Batch], Batch]) -> None:
        """Take what `map` was given."""
        super().__init__(source)
        self.fn = fn

    def _prepare(self, batch: Batch) -> Batch:
        return self.fn(batch)

    def __repr__(self) -> str:
        """Return the call that made it."""
        return f"map({getattr(self.fn, '__qualname__', self.fn)}, {self.source!r})"


class PlacedSource(_WrappedSource):
    """A source whose batches are on their device; made by `place`."""

    _forwarded = frozenset({"set_epoch", "element_spec", "fresh_batches"})

    def __init__(self, source: Iterable[Batch], placement: Any) -> None:
        """Take what `place` was given."""
        super().__init__(source)
        self.placement = placement
        # JAX may take a NumPy array as it is, without copying it, and read it later than its loader writes to it again.
        self._copies = not (isinstance(source, Sequence) or getattr(source, "fresh_batches", False))

    def _prepare(self, batch: Batch) -> Batch:
        import jax

        if self._copies:
            batch = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
        return jax.device_put(batch, self.placement)

    def __repr__(self) -> str:
        """Return the call that made it."""
        return f"place({self.source!r}, {self.placement})"


class _WrappedIterator:
    """Not a generator: iterators of Grain know their position, and a resume asks for it."""

    def __init__(self, batches: Iterator[Batch], prepare: Callable[[Batch], Batch]) -> None:
        self._batches = batches
        self._prepare = prepare

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        try:
            return self._prepare(batch)
        except StopIteration as error:  # would end the epoch early, and silently
            raise RuntimeError("the function of a mapped source raised StopIteration") from error

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state"):
            return getattr(self._batches, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def _require_iterable(source: Any, where: str) -> None:
    if not isinstance(source, Iterable):
        raise DeclarationError(
            f"`source` must yield batches, but `{type(source).__name__}` cannot be iterated over.",
            where=where,
            fix="pass a list of batches, a `fluxcb.data.ArrayLoader`, a Grain dataset, or another iterable",
        )
