"""Calls in a process of their own: nothing is compiled, allocated or set there yet."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["in_fresh_process"]

P = ParamSpec("P")
T = TypeVar("T")


def in_fresh_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a module's function returns when a new interpreter calls it.

    Raises:
        Exception: What the function raised.
    """
    # Spawned, not forked: a forked JAX has locks of threads that it does not have.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()
