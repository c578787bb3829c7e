"""Pytrees that users give: what in them is no array of numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import describe, is_key
from fluxcb._errors import FluxcbError
from fluxcb._typing import PyTree

__all__ = ["check_leaves", "is_number", "is_suspect"]

_LONGEST = 60  # characters of a value that a message shows


def check_leaves(
    tree: PyTree, what: str, name: str, error: type[FluxcbError], *, where: str = "", lists: bool = True
) -> None:
    """Check that JAX can take every leaf of a pytree as an array of numbers.

    Args:
        tree: Arrays, numbers, or specs of arrays.
        what: What messages call it, as the beginning of a sentence.
        name: What a path in it begins with, e.g. `params`.
        error: What to raise.
        where: The place in the user's code, if it is known.
        lists: Whether a list of numbers may stand for the numbers in it.

    Raises:
        FluxcbError: Of the kind that was asked for; there is a leaf that it cannot.
    """
    try:
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
            text = f"{what} has {shown}{place}, which JAX cannot take as an array of numbers."
            raise error(text, where=where, why=why, fix=fix)


def is_number(value: Any) -> bool:
    """Tell whether JAX can take something as an array of numbers."""
    return _trouble(value) is None


def is_suspect(tree: PyTree) -> bool:
    """Tell whether a pytree needs `check_leaves` before each call of a compiled program; this is the quick part of it.

    JAX refuses what is no array in that call, but reads the bytes of a NumPy array of another byte order as they are
    (jax 0.10.2; `jax.jit` refuses it).
    """
    if type(tree) is tuple:  # the usual batch is looked at for each step; what follows takes three times as long
        for leaf in tree:
            if type(leaf) is not np.ndarray or not leaf.dtype.isnative:
                break
        else:
            return False
    try:
        leaves = jax.tree_util.tree_leaves(tree)
    except (ValueError, TypeError):  # keys of a dict that cannot be sorted
        return True
    for leaf in leaves:  # noqa: SIM110 - run for each batch, and `any` takes three times as long
        if type(leaf) is np.ndarray and not leaf.dtype.isnative:
            return True
    return False


def _trouble(leaf: Any) -> tuple[str, str, str] | None:
    """Return how a message shows a leaf that cannot be taken, why it cannot, and what to do; None if it can."""
    if is_key(leaf):
        return None
    if _is_list_of_numbers(leaf):
        return (
            f"a list of {len(leaf)} number{'s' if len(leaf) > 1 else ''}",
            "a list is a container to JAX, and each number in it would be an array of its own",
            "make it an array: `np.asarray(values)`",
        )
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype):
        try:
            dtype = np.asarray(leaf).dtype
        except Exception:  # whatever the object's own code raises
            dtype = np.dtype(object)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        return (
            f"an array that has been deleted ({describe(leaf)})",
            "its buffer was donated to a compiled call, or deleted by hand",
            "give a copy that nobody else donates: `jnp.copy(x)`",
        )
    if not dtype.isnative:
        return (
            describe(leaf),
            "its bytes are in another order than this machine's",
            'convert it: `x.astype(x.dtype.newbyteorder("="))`',
        )
    if not _is_numeric(dtype):
        return _shown(leaf), "it would be an argument of a compiled program", "turn it into numbers, or leave it out"
    return None


def _is_numeric(dtype: np.dtype) -> bool:
    if dtype.kind in "biufc":
        return dtype.itemsize <= (16 if dtype.kind == "c" else 8)  # no long doubles
    return jnp.issubdtype(dtype, jnp.number)  # bfloat16 and its like, which NumPy takes for bytes


def _is_list_of_numbers(value: Any) -> bool:
    return type(value) is list and bool(value) and all(isinstance(entry, int | float) for entry in value)


def _shown(leaf: Any) -> str:
    if isinstance(getattr(leaf, "dtype", None), np.dtype):
        return describe(leaf)
    text = repr(leaf)
    if " at 0x" in text:  # says nothing, and something else each time
        return f"an object of type `{type(leaf).__name__}`"
    return f"{type(leaf).__name__} {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"
