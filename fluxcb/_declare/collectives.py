"""`collective`: calls in host handlers in which all processes of a training take part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from fluxcb._calls import entry_point

__all__ = ["CollectiveCalls", "collective", "collective_calls"]

T = TypeVar("T")


class CollectiveCalls(Protocol):
    """Makes calls in which all processes take part, while a Learner runs with several processes."""

    def collective(self, function: Callable[[], T]) -> T:
        """Call a function, and tell the other processes if it fails in this process."""
        ...


_running: list[CollectiveCalls] = []


@contextlib.contextmanager
def collective_calls(calls: CollectiveCalls) -> Iterator[None]:
    """Make `collective` use an object until the context is left."""
    _running.append(calls)
    try:
        yield
    finally:
        _running.remove(calls)


@entry_point
def collective(function: Callable[[], T]) -> T:
    """Call a function that contains collective operations of all processes, in a host handler.

    Examples of such operations are `jax.experimental.multihost_utils.process_allgather` and a program whose arguments
    are spread over processes. If one process raises an error between two of them, the others wait for it forever. With
    this function, the process that raises reports its error, and all other processes end with a `PeerError` that names
    the process and the cause.

    All processes must make the same calls in the same order. Errors and cancels that all processes raise together
    belong after the call. Outside a training, and in a training with one process, this only calls the function.

    Args:
        function: The function, without arguments.

    Returns:
        What the function returns.

    Raises:
        PeerError: Another process failed or is lost.
        Exception: What the function raised.

    Example:
        >>> import fluxcb
        >>> import numpy as np
        >>> from jax.experimental.multihost_utils import process_allgather
        >>> free_bytes = np.int32(7)
        >>> fluxcb.collective(lambda: process_allgather(free_bytes)).min().item()
        7
    """
    return _running[-1].collective(function) if _running else function()
