"""The error for a one-shot iterator that a second epoch needs."""

from types import GeneratorType
from typing import Any

from fluxcb._errors import DataError

__all__ = ["used_up"]


def used_up(name: str, source: Any) -> DataError:
    """Return the error for an iterator that has no more batches.

    Args:
        name: The name of the data source in messages.
        source: The iterator.
    """
    fix = ["pass something that can be iterated again: a list, a dataset, a class with `__iter__`"]
    if isinstance(source, GeneratorType) and source.gi_code.co_name.isidentifier():  # no generator expression
        function = source.gi_code.co_name
        again = f"lambda: {function}(...)" if source.gi_code.co_argcount else function
        fix.insert(0, f"pass a function that starts it again: `{again}`")
    return DataError(
        f"`{name}` is a one-shot iterator ({type(source).__name__}), and it is used up.",
        why="each epoch iterates over its data source, and an iterator yields nothing the second time",
        fix=fix,
    )
