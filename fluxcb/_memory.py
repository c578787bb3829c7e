"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

__all__ = ["release_freed_memory"]


def release_freed_memory() -> None:
    """Return the pages to the operating system that the C library keeps for later allocations.

    glibc has a heap for each of several threads, and keeps most of what is freed in a heap. Other threads cannot use
    this memory, so the process grows. A call took 1 to 15 ms in a process with 100 MiB of freed memory. glibc keeps the
    free memory at the end of the heaps of threads. With other C libraries, the call does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    # `CDLL(None)` opens the running program, which Windows does not support.
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
