"""Messages about data sources that have no batches, no more batches, None instead of a batch, or perhaps no end."""

from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from fluxcb._errors import DataError
from fluxcb._tracebacks import warn_user

__all__ = ["no_batches", "none_as_batch", "not_iterable", "past_position", "too_short", "used_up", "warn_of_long_pass"]


def no_batches(name: str, source: Any) -> DataError:
    """Return the error for a data source that yields nothing; `name` is its name in messages."""
    fix = ["check its length and filters; with `drop_last=True`, the batch size may exceed the data"]
    if isinstance(source, Iterator):
        fix.insert(0, "check whether the program has read it before: an iterator yields its batches only once")
    return DataError(
        f"`{name}` yields no batches.",
        why="an epoch without a step has no loss and no metrics",
        fix=fix,
    )


def not_iterable(name: str, source: Any) -> DataError:
    """Return the error for a data source that is a text, or that has no iterator; `name` is its name in messages."""
    # A string has an iterator, so "cannot be iterated" would be wrong.
    what = "yields no batches" if isinstance(source, str | bytes) else "cannot be iterated"
    fix = ["pass a list of batches, a Grain dataset, or `fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`"]
    # Map-style datasets of PyTorch are like this. Their items can be batches or examples.
    if hasattr(source, "__getitem__") and not isinstance(source, str | bytes | type):
        what = "has `__getitem__`, but no `__iter__`"
        fix = [
            "if its items are batches, pass them as a list: `[dataset[i] for i in range(len(dataset))]`",
            "if its items are examples, pass a loader that makes batches of them, such as PyTorch's DataLoader or "
            "`fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`",
        ]
    return DataError(f"`{name}` is {type(source).__name__}, which {what}.", fix=fix)


def none_as_batch(name: str) -> DataError:
    """Return the error for a data source that yields None; `name` is its name in messages."""
    return DataError(
        f"`{name}` yields None, which is not a batch.",
        why="a batch is a pytree of arrays",
        fix="skip the items that have no batch; an iterator ends with StopIteration",
    )


def used_up(name: str, source: Any, fit: str | None = None, with_length: str | None = None) -> DataError:
    """Return the error for an iterator that has no more batches, or that has none for the second epoch of a fit.

    Args:
        name: The name of the data source in messages.
        source: The iterator.
        fit: The call of `fit` that needs it in several epochs, or None if it is used up already.
        with_length: The same call for an iterator that never ends, or None if its epochs can have no length.
    """
    fix = ["pass something that can be iterated again: a list, a dataset, a class with `__iter__`"]
    if isinstance(source, GeneratorType) and source.gi_code.co_name.isidentifier():  # no generator expression
        function = source.gi_code.co_name
        # `FunctionSource` calls the function without arguments.
        again = f"lambda: {function}(...)" if source.gi_code.co_argcount else function
        fix.insert(0, f"pass a function that starts it again: `{again}`")
    if with_length is not None:
        fix.append(f"if it never ends, pass the length of an epoch: `{with_length}`")
    when = "" if fit is None else f" after the first epoch of `{fit}`"
    return DataError(
        f"`{name}` is a one-shot iterator ({type(source).__name__}), and it is used up{when}.",
        why="each epoch iterates over its data source, and an iterator yields nothing the second time",
        fix=fix,
    )


def too_short(name: str, batches: int, needed: int) -> DataError:
    """Return the error for a data source that ends after `batches` of the `needed` batches before a checkpoint."""
    return DataError(
        f"`{name}` ends after {batches} of the {needed} batches that came before the checkpoint.",
        why="the run continues with the batches after them",
        fix="pass the data that the run began with",
    )


def past_position(name: str, source: Any, batches: int) -> DataError:
    """Return the error for an iterator that is `batches` batches past the position of a checkpoint."""
    return DataError(
        f"`{name}` is a one-shot iterator ({type(source).__name__}) and is {batches} batches past the position of the "
        "checkpoint.",
        why="an iterator cannot go back",
        fix="pass something that can be iterated again, or a Grain iterator, which knows its position",
    )


def warn_of_long_pass(name: str, batches: int) -> None:
    """Warn that a pass over data without a length may never end.

    Args:
        name: The name of the data source in messages.
        batches: Batches that have been read in the pass.
    """
    warn_user(
        f"`{name}` has no length and has yielded {batches} batches in this epoch. An epoch that does not train is a "
        "complete pass over its data, so if the data never ends, neither does the epoch. Limit endless data, e.g. "
        "`lambda: itertools.islice(batches(), 100)`, or give long data a `__len__`.",
        UserWarning,
    )
