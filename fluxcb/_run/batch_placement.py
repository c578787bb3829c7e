"""Placing batches on a mesh, and what happens to batches that its devices cannot divide evenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fluxcb._compile.arrays import signature_of, spec_of
from fluxcb._compile.placement import Placement
from fluxcb._declare.padded_batch import PaddedDict, PaddedTuple, mask_of, padded
from fluxcb._errors import DataError
from fluxcb._typing import Batch, PyTree
from fluxcb.data.sources import length_of

__all__ = ["BatchPlacement"]


class BatchPlacement:
    """Places the batches of one data source.

    With several processes, each process has its own rows, and a batch consists of the rows of all of them.

    Args:
        placement: The mesh and the shardings.
        name: The name of the source in messages, such as `data.training`.
    """

    def __init__(self, placement: Placement, name: str) -> None:
        self._placement = placement
        self._name = name
        self._ragged = placement.sharding.ragged
        self._processes = placement.processes
        self._divides = False  # whether a batch has been divided
        self._rows = 0  # of the first batch, to which `pad` fills up the others
        self._shardings: dict[Any, PyTree] = {}

    def place(self, batch: Batch) -> Batch | None:
        """Return a batch on the mesh, or None if it is dropped.

        Raises:
            DataError: The devices cannot divide it evenly, and `ragged` is "error". Or it has no place for a mask.
        """
        batch = self._masked(batch) if self._ragged == "pad" else batch
        if self._uneven(batch):
            if self._ragged == "drop":
                return None
            raise self._ragged_error(_rows_of(batch), of_all=not self._divides)
        self._divides = True
        return self._placed(batch)

    def place_one(self, batch: Batch) -> Batch:
        """Return a single batch on the mesh, which is not dropped.

        Raises:
            DataError: The devices cannot divide it evenly. Or it has no place for a mask.
        """
        placed = self.place(batch)
        if placed is None:
            raise self._ragged_error(_rows_of(batch), of_all=True)
        return placed

    def place_any(self, batch: Batch) -> tuple[Batch, PyTree]:
        """Return a batch on the mesh, and its specs.

        If the devices cannot divide the batch evenly, each process adds rows to its own, and the specs do not include
        them. A program calls `without_added_rows` before it computes anything, so that they affect no result.
        """
        # With `pad`, loss functions read the mask of each batch, so a complete one gets a mask as well.
        if self._ragged == "pad" and mask_of(batch) is None:
            batch = self._with_mask(batch, np.ones(_rows_of(batch), np.float32))
        if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(batch)):
            return batch, spec_of(batch)  # the source has placed it
        rows = _rows_of(batch)
        filled = _filled(batch, rows, self._divisible(rows))
        return self._placed(filled), self._of_all_processes(spec_of(batch))

    def without_added_rows(self, batch: Batch, spec: PyTree) -> Batch:
        """Return a batch without the rows that `place_any` has added to those of each process, traced."""

        def own_rows(leaf: Any, spec: Any) -> Any:
            if leaf.shape == spec.shape:
                return leaf
            # Each process has added rows after its own, so the added rows are not at the end of the whole batch.
            own = leaf.reshape(self._processes, -1, *leaf.shape[1:])[:, : spec.shape[0] // self._processes]
            # Without the constraint, XLA would compute the whole batch on each device.
            return jax.lax.with_sharding_constraint(own.reshape(spec.shape), self._over_examples)

        return jax.tree.map(own_rows, batch, spec)

    def divided(self, outputs: PyTree) -> PyTree:
        """Return outputs for the rows of a batch, with rows added again so that the devices divide them, traced."""

        def divide(leaf: Any) -> Any:
            by_process = leaf.reshape(self._processes, -1, *leaf.shape[1:])
            added = self._divisible(by_process.shape[1]) - by_process.shape[1]
            filled = jnp.pad(by_process, ((0, 0), (0, added), *((0, 0),) * (leaf.ndim - 1)))
            return jax.lax.with_sharding_constraint(filled.reshape(-1, *leaf.shape[1:]), self._over_examples)

        return jax.tree.map(divide, outputs)

    def own_rows(self, output: jax.Array, rows: int) -> np.ndarray:
        """Return this process's rows of an output that `divided` has returned, on the host."""
        if self._processes > 1:
            from jax.experimental import multihost_utils  # it takes time to import

            output = multihost_utils.global_array_to_host_local_array(
                output, self._placement.mesh, self._over_examples.spec
            )
        return np.asarray(output)[:rows]

    def spec(self, spec: PyTree) -> PyTree:
        """Return the specs of the batch on the mesh that a batch of the source becomes."""
        if self._ragged == "pad" and mask_of(spec) is None:
            mask = jax.ShapeDtypeStruct((self._padded_rows(_rows_of(spec)),), np.float32)
            spec = self._with_mask(jax.tree.map(lambda s: _with_rows(s, mask.shape[0]), spec), mask)
        if self._uneven(spec):
            raise self._ragged_error(_rows_of(spec), of_all=True)
        return self._of_all_processes(spec_of(spec))

    def check_source(self, source: Any) -> int:
        """Check the sizes of all batches of a source, as far as they are known without reading it.

        Returns:
            The number of batches that are dropped.

        Raises:
            DataError: One cannot be divided evenly, and `ragged` is "error".
        """
        sizes = _known_sizes(source)
        uneven = [rows for rows in sizes if self._is_uneven(rows)]
        if uneven and self._ragged == "error":
            raise self._ragged_error(uneven[0], of_all=self._is_uneven(sizes[0]))
        return len(uneven) if self._ragged == "drop" else 0

    def _placed(self, batch: Batch) -> Batch:
        shardings = self._shardings_of(batch)
        if self._processes == 1:
            return jax.device_put(batch, shardings)
        return jax.tree.map(self._from_local_rows, batch, shardings)

    def _divisible(self, rows: int) -> int:
        """Return the smallest number of rows that is not less than `rows` and that the devices divide evenly."""
        return -(-rows // self._divisor) * self._divisor

    @property
    def _over_examples(self) -> NamedSharding:
        return NamedSharding(self._placement.mesh, PartitionSpec(self._placement.example_axes))

    def _uneven(self, batch: Batch) -> bool:
        return self._is_uneven(_rows_of(batch))

    def _is_uneven(self, rows: int) -> bool:
        return rows % self._divisor != 0

    @property
    def _divisor(self) -> int:
        """The number of parts into which the devices of this process divide its rows."""
        parts = self._placement.devices_along(self._placement.example_axes)
        return max(1, parts // self._processes)

    def _shardings_of(self, batch: Batch) -> PyTree:
        key = signature_of(spec := spec_of(batch))
        # Matching the rules with all paths takes long compared with a small batch, so it is done once for each shape.
        if key not in self._shardings:
            self._shardings[key] = self._placement.of_batch(self._of_all_processes(spec))
        return self._shardings[key]

    def _of_all_processes(self, spec: PyTree) -> PyTree:
        return jax.tree.map(lambda s: _with_rows(s, s.shape[0] * self._processes) if s.shape else s, spec)

    def _from_local_rows(self, rows: Any, sharding: Any) -> jax.Array:
        if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
            return rows  # the source has placed it
        return jax.make_array_from_process_local_data(sharding, np.asarray(rows))

    # -- masks ------------------------------------------------------------------------------

    def _padded_rows(self, rows: int) -> int:
        self._rows = max(self._rows, self._divisible(rows))
        return self._rows

    def _masked(self, batch: Batch) -> Batch:
        """Return a batch with a mask, filled up to the size of the first batch."""
        # The source has padded the batch itself.
        if mask_of(batch) is not None:
            return batch
        rows = _rows_of(batch)
        full = self._padded_rows(rows)
        mask = (np.arange(full) < rows).astype(np.float32)
        return self._with_mask(_filled(batch, rows, full), mask)

    def _with_mask(self, batch: Batch, mask: Any) -> Batch:
        made = padded(batch, mask)
        if made is None:
            raise DataError(
                f"`ragged='pad'` cannot add a mask to a batch of `{self._name}`.",
                why="the mask is an attribute of the batch, which must be a tuple, a list or a dictionary",
                fix=["yield dictionaries or tuples", "write `ragged='drop'`"],
            )
        return made

    def _ragged_error(self, rows: int, *, of_all: bool) -> DataError:
        """Return the error for a batch that cannot be divided.

        Args:
            rows: Its number of examples.
            of_all: Whether it is the first batch. The others then have probably the same size, and leaving out such
                batches would leave none.
        """
        parts = self._divisor
        each = "" if self._processes == 1 else " of this process"
        drop = (
            "leave such batches out: `sharding=fluxcb.Sharding(..., ragged='drop')`, or `drop_last=True` in the loader"
        )
        pad = "fill them up: `sharding=fluxcb.Sharding(..., ragged='pad')`, with a loss that uses `batch.mask`"
        sizes = [size for size in (rows // parts * parts, self._divisible(rows)) if size]
        size = f"use batches of {' or '.join(map(str, sizes))} examples"
        return DataError(
            f"A batch of `{self._name}` has {rows} examples, which the {parts} devices{each} cannot divide evenly.",
            why=f"{rows} is not a multiple of {parts}",
            fix=[size, pad] if of_all else [drop, pad, f"use batches of a multiple of {parts} examples"],
        )


def _filled(batch: Batch, rows: int, full: int) -> Batch:
    """Return a batch with copies of its last example after its rows. Zeros could cause NaN in a model."""
    if full == rows:
        return batch
    chosen = np.minimum(np.arange(full), rows - 1)
    # Leaves without the axis of examples, such as scalars, stay as they are.
    return jax.tree.map(lambda leaf: np.asarray(leaf)[chosen] if np.shape(leaf)[:1] == (rows,) else leaf, batch)


def _rows_of(batch: Batch) -> int:
    # Scalars have no axis of examples, so the first array with axes decides.
    leaves = (np.shape(leaf) for leaf in jax.tree.leaves(batch))
    return next((shape[0] for shape in leaves if shape), 1)


def _with_rows(spec: Any, rows: int) -> Any:
    return jax.ShapeDtypeStruct((rows, *spec.shape[1:]), spec.dtype) if spec.shape else spec


def _known_sizes(source: Any) -> list[int]:
    """Return the sizes of the batches of a source in memory, or of a loader; otherwise nothing."""
    if isinstance(source, Sequence):
        return [_rows_of(batch) for batch in source]
    sizes = getattr(source, "batch_sizes", None)
    if sizes is not None:
        return list(sizes)
    # A wrapper of another length merges or filters batches, so their sizes are unknown.
    inner = getattr(source, "source", None)
    return _known_sizes(inner) if inner is not None and length_of(source) == length_of(inner) else []


def _flatten_padded(batch: PaddedTuple | PaddedDict) -> tuple[Any, Any]:
    # Plain containers: JAX would flatten a `PaddedDict` within itself without end.
    parts = dict(batch) if isinstance(batch, PaddedDict) else tuple(batch)
    return (parts, mask_of(batch)), None


def _flatten_padded_with_keys(batch: PaddedTuple | PaddedDict) -> tuple[Any, Any]:
    (parts, mask), _ = _flatten_padded(batch)
    return ((jax.tree_util.GetAttrKey("batch"), parts), (jax.tree_util.GetAttrKey("mask"), mask)), None


def _unflatten_dict(_: Any, children: Any) -> PaddedDict:
    # While JAX checks a structure, the children may be anything.
    made = PaddedDict(children[0] if isinstance(children[0], dict) else {0: children[0]})
    made.mask = children[1]
    return made


def _unflatten_tuple(_: Any, children: Any) -> PaddedTuple:
    made = PaddedTuple(children[0] if isinstance(children[0], tuple | list) else (children[0],))
    made.mask = children[1]
    return made


# Registered here, because `_declare`, which defines these classes, does not import JAX.
jax.tree_util.register_pytree_with_keys(PaddedDict, _flatten_padded_with_keys, _unflatten_dict, _flatten_padded)
jax.tree_util.register_pytree_with_keys(PaddedTuple, _flatten_padded_with_keys, _unflatten_tuple, _flatten_padded)
