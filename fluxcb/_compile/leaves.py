"""Checks of pytrees from users for leaves that are not arrays of numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._errors import DataError, FluxcbError
from fluxcb._interruptions import is_interruption
from fluxcb._traced_values import describe
from fluxcb._typing import PyTree

__all__ = ["check_examples", "check_leaves", "is_number", "is_suspect"]

_LONGEST = 60  # maximum number of characters of a value that a message shows


def check_leaves(
    tree: PyTree, what: str, name: str, error: type[FluxcbError], *, where: str = "", lists: bool = True
) -> None:
    """Check that JAX can use every leaf of a pytree as an array of numbers.

    Args:
        tree: Arrays, numbers, or specs of arrays.
        what: The name of the tree in messages, as the beginning of a sentence.
        name: The first name of its paths, e.g. `params`.
        error: The class of the error.
        where: The location in the user's code, if it is known.
        lists: Whether a list of numbers is allowed as a container of numbers.

    Raises:
        FluxcbError: JAX cannot use a leaf. The error has the class `error`.
    """
    try:
        # By default, JAX flattens a list of numbers, so a list of labels would become one array per example.
        found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=None if lists else _is_list_of_numbers)[0]
    except (ValueError, TypeError):
        raise error(
            f"{what} has a dict whose keys cannot be sorted.",
            where=where,
            why="JAX orders the entries of a dict by their keys",
            fix="use keys of one type, e.g. only str",
        ) from None
    for path, leaf in found:
        trouble = _trouble(leaf)
        if trouble is not None:
            shown, why, fix = trouble
            keys = jax.tree_util.keystr(path)
            place = f" at `{name}{keys}`" if keys else ""
            text = f"{what} has {shown}{place}, which JAX cannot use as an array of numbers."
            raise error(text, where=where, why=why, fix=fix)


def check_examples(batch: PyTree, what: str) -> None:
    """Check that a batch has examples.

    A batch without arrays that have axes is one example. Empty arrays are allowed next to arrays with examples.

    Args:
        batch: Arrays or specs of arrays.
        what: The name of the batch in messages, as the beginning of a sentence.

    Raises:
        DataError: The leading axes of all arrays have the length 0.
    """
    shapes = [shape for leaf in jax.tree.leaves(batch) if (shape := np.shape(leaf))]
    # Without this check, the parameters would be NaN after the step, and nothing would name the batch.
    if shapes and not any(shape[0] for shape in shapes):
        raise DataError(
            f"{what} has no examples.",
            where=[f"`batch{keys}` is {describe(leaf)}" for keys, leaf in _named(batch)],
            why="the mean loss of no examples is NaN, and an update with it makes every parameter NaN",
            fix="leave out empty batches, e.g. after a filter in the loader",
        )


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves[:5]]


def is_number(value: Any) -> bool:
    """Return whether JAX can use a value as an array of numbers."""
    return _trouble(value) is None


def is_suspect(tree: PyTree) -> bool:
    """Return whether a batch needs `check_leaves` and `check_examples`. This quick check runs for each batch.

    JAX itself raises an error for values that are not arrays, but misreads NumPy arrays of another byte order (jax
    0.10.2; `jax.jit` raises an error for them).
    """
    if type(tree) is tuple:  # the common case, checked for each step; the general code takes three times as long
        for leaf in tree:
            if type(leaf) is not np.ndarray or not leaf.dtype.isnative or not leaf.size:
                break
        else:
            return False
    try:
        leaves = jax.tree_util.tree_leaves(tree)
    except (ValueError, TypeError):  # keys of a dict that cannot be sorted
        return True
    for leaf in leaves:  # noqa: SIM110 - run for each batch, and `any` takes three times as long
        if (type(leaf) is np.ndarray and not leaf.dtype.isnative) or not getattr(leaf, "size", 1):
            return True
    return False


def _trouble(leaf: Any) -> tuple[str, str, str] | None:
    """Return the text of a leaf that JAX cannot use, the reason, and a fix, or None if JAX can use it."""
    if is_key(leaf):
        return None
    if _is_list_of_numbers(leaf):
        return (
            f"a list of {len(leaf)} number{'s' if len(leaf) > 1 else ''}",
            "JAX treats a list as a container, so each number in it would become a separate array",
            "convert it to an array: `np.asarray(values)`",
        )
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return (
            f"an object of the dataclass `{type(leaf).__name__}`",
            "JAX looks for arrays only in dataclasses that are registered",
            "write `@jax.tree_util.register_dataclass` above the `@dataclass` of the class",
        )
    # Specs and tracers have a dtype, but no values that NumPy could convert.
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        try:
            dtype = np.asarray(leaf).dtype
        except Exception as raised:  # whatever the object's own code raises
            if is_interruption(raised):
                raise
            dtype = np.dtype(object)
    # A tracer has no buffer that could be deleted.
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        return (
            f"an array that has been deleted ({describe(leaf)})",
            "its buffer was donated to a compiled call, or deleted explicitly",
            "pass a copy: `jnp.copy(x)`",
        )
    if not dtype.isnative:
        return (
            describe(leaf),
            "its byte order is not the native byte order of this machine",
            'convert it: `x.astype(x.dtype.newbyteorder("="))`',
        )
    if not _is_numeric(dtype):
        return (
            _shown(leaf),
            "the arguments of a compiled program are arrays of numbers",
            "convert it to numbers, or remove it",
        )
    return None


def _is_numeric(dtype: np.dtype) -> bool:
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)  # no long doubles
    return jnp.issubdtype(dtype, jnp.number)  # bfloat16 and similar dtypes, which NumPy treats as bytes


def _is_list_of_numbers(value: Any) -> bool:
    return type(value) is list and bool(value) and all(isinstance(entry, int | float) for entry in value)


def _shown(leaf: Any) -> str:
    if isinstance(getattr(leaf, "dtype", None), np.dtype):
        return describe(leaf)
    text = repr(leaf)
    if " at 0x" in text:  # an address is not informative and differs between runs
        return f"an object of type `{type(leaf).__name__}`"
    return f"{type(leaf).__name__} {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"
