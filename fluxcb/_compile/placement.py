"""Where each array of a training with a mesh is placed: rules become the `NamedSharding` of each leaf."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fluxcb._compile.arrays import is_key
from fluxcb._declare.shardings import FSDP, Sharding, as_sharding, automatic_mesh
from fluxcb._errors import DeclarationError, did_you_mean, nearest
from fluxcb._typing import PyTree

__all__ = ["Placement", "bytes_per_device", "distributed_copy", "leaf_paths", "make_placement", "spec_text"]

_Names = tuple[str, ...]
_DATA_AXES = ("data", "fsdp")  # batches are divided over those of them that a mesh has


def make_placement(mesh: Any, sharding: Any) -> Placement | None:
    """Return the placement that a Learner's arguments `mesh` and `sharding` describe, or None without a mesh.

    Raises:
        DeclarationError: `mesh` is not a mesh, `sharding` is wrong, or there is a sharding without a mesh.
    """
    if mesh is None:
        if sharding is None:
            return None
        raise DeclarationError(
            f"`sharding={sharding!r}` was given without a mesh.",
            why="arrays are divided over the axes of a mesh",
            fix=["add `mesh=fluxcb.mesh()`, which has all devices", "leave out `sharding`"],
        )
    if not isinstance(mesh, Mesh):
        raise DeclarationError(
            f"`mesh` must be a `jax.sharding.Mesh`, not {type(mesh).__name__} {mesh!r}.",
            fix=["write `mesh=fluxcb.mesh()`", 'write `mesh=jax.make_mesh((jax.device_count(),), ("data",))`'],
        )
    return Placement(automatic_mesh(mesh), as_sharding(sharding, mesh))


class Placement:
    """The shardings of all arrays of a training.

    Args:
        mesh: The mesh, whose axes have the type Auto.
        sharding: The rules.

    Attributes:
        mesh: See the argument.
        sharding: See the argument.
        replicated: The sharding of arrays that every device holds as a whole.
        data_axes: The axes of the mesh that divide the examples of a batch.
        processes: The number of processes that have devices of the mesh.
    """

    def __init__(self, mesh: Mesh, sharding: Sharding) -> None:
        self.mesh = mesh
        self.sharding = sharding
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.processes = len({device.process_index for device in mesh.devices.flat})
        # Filled by `of_params`, for the arrays that mirror a parameter.
        self._params: dict[_Names, tuple[tuple[int, ...], NamedSharding]] = {}
        # Checked before any array exists. The specs of a rule that is a function are checked when it returns them.
        for argument in ("params", "opt_state", "batch", "cbstate"):
            for rule in getattr(sharding, argument) or ():
                self._check_axes(rule, argument)
        self.data_axes = self._find_data_axes()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which models can name the axes of the mesh, for tracing and compiling."""
        return jax.set_mesh(self.mesh)

    # -- resolving --------------------------------------------------------------------------

    def of_params(self, specs: PyTree, annotations: Mapping[_Names, Any] | None = None) -> PyTree:
        """Return the shardings of the parameters, and remember them for the arrays that follow the parameters.

        Args:
            specs: The parameters, or their shapes and dtypes.
            annotations: The `PartitionSpec`s of a Flax module by path, which are used if there is no rule.

        Raises:
            DeclarationError: A rule matches no parameter, or does not divide one evenly.
        """
        leaves = leaf_paths(specs)
        rules = self.sharding.params
        if rules is None:
            found = {path: spec for path, spec in (annotations or {}).items() if spec}
            for spec in found.values():
                self._check_spec(spec, "the annotation of a parameter")
        else:
            found = self._matched(rules, leaves, "params")
        # In the order of the leaves, on which `of_carry` relies.
        self._params = {
            path: (tuple(leaf.shape), self._checked(path, leaf, found.get(path), "params")) for path, leaf in leaves
        }
        shardings = [sharding for _, sharding in self._params.values()]
        return jax.tree.unflatten(jax.tree.structure(specs), shardings)

    def specs_on_mesh(self, arrays: PyTree) -> dict[_Names, PartitionSpec]:
        """Return the specs of the arrays that are divided over this mesh already, by path."""
        return {
            path: leaf.sharding.spec
            for path, leaf in leaf_paths(arrays)
            if isinstance(leaf, jax.Array)
            and isinstance(leaf.sharding, NamedSharding)
            # A replicated array must not take precedence over the annotation of its parameter.
            and not leaf.is_fully_replicated
            # `jax.make_mesh` creates Explicit axes by default, and those of `self.mesh` are Auto.
            and automatic_mesh(leaf.sharding.mesh) == self.mesh
        }

    def of_others(self, specs: PyTree, argument: str) -> PyTree:
        """Return the shardings of a part of the carry other than the parameters.

        Args:
            specs: The arrays, or their shapes and dtypes.
            argument: The argument of `Sharding` that has the rules: `opt_state` or `cbstate`. Others have no rules.

        Raises:
            DeclarationError: A rule matches no array, or does not divide one evenly.
        """
        leaves = leaf_paths(specs)
        rules = getattr(self.sharding, argument, None)
        # An empty part, such as the state of plain SGD, has nothing that a rule could match, so this is no error.
        found = self._matched(rules, leaves, argument) if rules is not None and leaves else {}
        shardings = [
            self._checked(path, leaf, found[path], argument) if path in found else self._mirrored(path, leaf)
            for path, leaf in leaves
        ]
        return jax.tree.unflatten(jax.tree.structure(specs), shardings)

    def _mirrored(self, path: _Names, leaf: Any) -> NamedSharding:
        """Return the sharding of the parameter whose path this path ends with, if the shapes are the same."""
        # The longest ending first: the path `0.mu.dense.kernel` of Adam's state ends with that of a parameter.
        # The last ending is empty, which is the path of parameters that are a single array.
        for start in range(len(path) + 1):
            shape, sharding = self._params.get(path[start:], (None, self.replicated))
            if shape == tuple(leaf.shape):
                return sharding
        return self.replicated

    def of_carry(self, carry: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Return the shardings of all arrays of a carry. `of_params` has been called before."""

        def of_part(name: str, part: PyTree) -> PyTree:
            if name == "params":
                return jax.tree.unflatten(jax.tree.structure(part), [sharding for _, sharding in self._params.values()])
            # If the parameters are a single array, `counters` has the same path, and may have the same shape.
            return self.replicated if name == "counters" else self.of_others(part, name)

        return {name: of_part(name, part) for name, part in carry.items()}

    def with_places(self, carry: dict[str, PyTree]) -> dict[str, PyTree]:
        """Return a carry in which arrays that were assigned without a place are on the mesh."""
        if all(leaf.committed for leaf in jax.tree.leaves(carry)):
            return carry
        shardings = self.of_carry(carry)

        def placed(leaf: Any, sharding: NamedSharding) -> Any:
            return leaf if leaf.committed else _distributed(leaf, sharding)

        return {name: jax.tree.map(placed, part, shardings[name]) for name, part in carry.items()}

    def of_batch(self, specs: PyTree) -> PyTree:
        """Return the shardings of the arrays of a batch.

        Args:
            specs: The arrays, or their shapes and dtypes.

        Raises:
            DeclarationError: A rule matches no array, or does not divide one evenly.
        """
        leaves = leaf_paths(specs)
        rules = self.sharding.batch
        if rules is None:
            over_examples = PartitionSpec(self.data_axes)
            found: dict[_Names, Any] = {path: over_examples for path, leaf in leaves if leaf.shape}
        else:
            found = {
                path: PartitionSpec(*tuple(spec)[: len(dict(leaves)[path].shape)])  # of a spec for all arrays
                for path, spec in self._matched(rules, leaves, "batch").items()
            }
        shardings = [self._checked(path, leaf, found.get(path), "batch") for path, leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(specs), shardings)

    def devices_along(self, axes: Any) -> int:
        """Return the number of devices along one or several axes of the mesh."""
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def example_axes(self) -> Any:
        """The mesh axes over which the batch rule divides the examples, as an entry of a `PartitionSpec`."""
        rules = self.sharding.batch
        if rules is None:
            return self.data_axes
        specs = [spec for rule in rules if isinstance(rule, Mapping) for spec in rule.values()]
        return max((spec[0] for spec in specs if len(spec)), key=self.devices_along, default=None)

    # -- rules ------------------------------------------------------------------------------

    def _matched(self, rules: Sequence[Any], leaves: Sequence[tuple[_Names, Any]], argument: str) -> dict[_Names, Any]:
        """Return the specs of the leaves that a rule matches."""
        found: dict[_Names, Any] = {}
        for rule in rules:
            if isinstance(rule, Mapping):
                matches = self._match_patterns(rule, leaves, argument)
            elif isinstance(rule, FSDP):
                matches = self._match_large(rule, leaves, argument, found)
            else:
                matches = self._match_function(rule, leaves, argument)
            # The first rule that matches an array decides.
            found = {**matches, **found}
        return found

    def _match_patterns(
        self, rule: Mapping[str, Any], leaves: Sequence[tuple[_Names, Any]], argument: str
    ) -> dict[_Names, Any]:
        matches: dict[_Names, Any] = {}
        for pattern, spec in rule.items():
            fitting = [path for path, _ in leaves if _fits(pattern, path)]
            if not fitting:
                known = [".".join(path) for path, _ in leaves]
                near = _nearest(pattern, known)
                raise DeclarationError(
                    f"`{argument}` of the sharding: no array fits `{pattern}`.{did_you_mean(pattern, known)}",
                    where=f"{pattern!r}: {_text(spec)}",
                    why="a rule that matches nothing is usually a typing error, and the arrays would be replicated",
                    fix=f"use the path of an array: {', '.join(f'`{path}`' for path in near)}",
                )
            for path in fitting:
                # Within a rule, the first pattern decides.
                matches.setdefault(path, spec)
        return matches

    def _match_large(
        self, rule: FSDP, leaves: Sequence[tuple[_Names, Any]], argument: str, found: Mapping[_Names, Any]
    ) -> dict[_Names, Any]:
        devices = self.devices_along(rule.axis)
        matches: dict[_Names, Any] = {}
        for path, leaf in leaves:
            dimension = rule.dimension(leaf.shape, _nbytes(leaf), devices)
            if dimension is not None:
                matches[path] = PartitionSpec(*(None,) * dimension, rule.axis)
        # Parameters that an earlier rule matches do not count, because the first rule decides.
        if devices > 1 and leaves and not (matches.keys() - found.keys()) and argument == "params":
            rest = [(path, leaf) for path, leaf in leaves if path not in found]
            if not rest:
                raise DeclarationError(
                    f"`{rule!r}` matches no parameter, because earlier rules match all of them.",
                    why="the first rule that matches an array decides",
                    fix=f"remove `{rule!r}` from the rules",
                )
            path, largest = max(rest, key=lambda entry: _nbytes(entry[1]))
            reason = f"`{'.'.join(path)}` of shape {tuple(largest.shape)}, {_nbytes(largest):,} bytes"
            small = _nbytes(largest) < rule.min_bytes
            raise DeclarationError(
                f"`{rule!r}` divides no parameter over the {devices} devices of the axis `{rule.axis}`.",
                where=f"the largest parameter {'without a rule ' if found else ''}is {reason}",
                why="it is smaller than `min_bytes`" if small else "no dimension is a multiple of the devices",
                # A smaller `min_bytes` does not help if no dimension can be divided.
                fix=["write `sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=0))`"] * small
                + ["write `sharding='replicated'`"],
            )
        return matches

    def _match_function(
        self, rule: Callable[..., Any], leaves: Sequence[tuple[_Names, Any]], argument: str
    ) -> dict[_Names, Any]:
        matches: dict[_Names, Any] = {}
        for path, leaf in leaves:
            spec = rule(".".join(path), tuple(leaf.shape))
            if spec is None:
                continue
            if not isinstance(spec, PartitionSpec):
                raise DeclarationError(
                    f"`{argument}` of the sharding returned {spec!r} for `{'.'.join(path)}`.",
                    why="a rule returns a `PartitionSpec`, or None for arrays that it does not match",
                    fix='return e.g. `jax.sharding.PartitionSpec("data")`',
                )
            self._check_spec(spec, f"`{argument}` of the sharding")
            matches[path] = spec
        return matches

    # -- checks -----------------------------------------------------------------------------

    def _find_data_axes(self) -> tuple[str, ...]:
        names = self.mesh.axis_names
        # The only axis of a mesh may have any name.
        found = tuple(name for name in names if name in _DATA_AXES) or (names if len(names) == 1 else ())
        if not found and self.sharding.batch is None:
            raise DeclarationError(
                f"The mesh has the axes {', '.join(map(str, names))}, and none of them is called `data`.",
                why="batches are divided over the axis `data`, unless the sharding of batches is declared",
                fix=[
                    f'declare it: `sharding=fluxcb.Sharding(batch=jax.sharding.PartitionSpec("{names[0]}"))`',
                    "name an axis `data`: `mesh=fluxcb.mesh(data=-1)`",
                ],
            )
        return found

    def _check_axes(self, rule: Any, argument: str) -> None:
        if isinstance(rule, FSDP):
            self._check_spec(PartitionSpec(rule.axis), f"`{rule!r}`")
        for pattern, spec in rule.items() if isinstance(rule, Mapping) else ():
            self._check_spec(spec, f"`{argument}[{pattern!r}]` of the sharding")

    def _check_spec(self, spec: PartitionSpec, what: str) -> None:
        for entry in spec:
            for name in entry if isinstance(entry, tuple) else (entry,):
                # An entry can also be None or `UNCONSTRAINED`.
                if isinstance(name, str) and name not in self.mesh.axis_names:
                    known = [str(axis) for axis in self.mesh.axis_names]
                    raise DeclarationError(
                        f"{what[0].upper()}{what[1:]} names the mesh axis `{name}`, which does not exist."
                        f"{did_you_mean(name, known)}",
                        why=f"the mesh has the axes {', '.join(known)}",
                        fix=[
                            f"name an axis of the mesh: `{nearest(name, known) or known[0]}`",
                            f"make a mesh that has the axis: `fluxcb.mesh({name}=...)`",
                        ],
                    )

    def _checked(self, path: _Names, leaf: Any, spec: Any, argument: str) -> NamedSharding:
        """Return the sharding of a leaf, whose dimensions the spec must divide evenly."""
        if spec is None:
            return self.replicated
        shape, name = tuple(leaf.shape), ".".join(path)
        if len(spec) > len(shape):
            raise DeclarationError(
                f"`{argument}.{name}` has the shape {shape}, and its sharding {_text(spec)} has {len(spec)} entries.",
                why="a spec has at most one entry for each dimension",
                fix="use a pattern that matches only arrays with enough dimensions",
            )
        for position, entry in enumerate(spec):
            devices = self.devices_along(entry) if entry is not PartitionSpec.UNCONSTRAINED else 1
            # JAX would report this only when the array is placed, and without the rule.
            if shape[position] % devices:
                raise DeclarationError(
                    f"`{argument}.{name}` has the shape {shape}, and {_text(spec)} divides dimension {position} over "
                    f"{devices} devices.",
                    why=f"{shape[position]} is not a multiple of {devices}",
                    fix=["divide another dimension", "make the dimension a multiple of the devices"],
                )
        return NamedSharding(self.mesh, spec)


def leaf_paths(tree: PyTree) -> list[tuple[_Names, Any]]:
    """Return the path of each leaf, as its names, and the leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in leaves]


def _fits(pattern: str, path: _Names) -> bool:
    # `.value` ends the paths of parameters that Linen's `with_partitioning` boxes.
    pattern = pattern.replace("/", ".")
    name = ".".join(path)
    forms = (name, name.removesuffix(".value"))
    # The path of a container matches all arrays in it.
    return name.startswith(f"{pattern}.") or any(fnmatch.fnmatchcase(form, pattern) for form in forms)


def _nearest(pattern: str, known: list[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(pattern.replace("/", "."), known, n=3, cutoff=0.3) or known[:3]


def _nbytes(leaf: Any) -> int:
    # A typed key has the size of its words.
    spec = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


def spec_text(sharding: Any) -> str:
    """Return how a table shows a sharding."""
    if isinstance(sharding, NamedSharding):
        return _text(sharding.spec)
    return "one device"


def bytes_per_device(leaf: Any) -> int:
    """Return the size of the part of an array that one device holds (bytes)."""
    if is_key(leaf):
        return _nbytes(leaf)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def distributed_copy(tree: PyTree, shardings: PyTree) -> PyTree:
    """Return copies of arrays, divided over a mesh. Arrays on the host or on one device are never copied as a whole."""
    leaves, structure = jax.tree.flatten(tree)
    placed = jax.tree.leaves(shardings)
    return structure.unflatten(_distributed(leaf, to) for leaf, to in zip(leaves, placed, strict=True))


def _distributed(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if is_key(leaf):
        mesh = cast(NamedSharding, sharding).mesh
        # The words, because NumPy cannot convert typed keys.
        words = _distributed(jax.random.key_data(leaf), NamedSharding(mesh, PartitionSpec()))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        # It lies on the mesh already. `device_put` moves shards between devices, but may return the argument itself.
        return _copied(jax.device_put(leaf, sharding))
    host = np.asarray(leaf)
    shards = []
    for device, index in sharding.addressable_devices_indices_map(host.shape).items():
        # `device_put` alone may use the memory of the argument, which training must not donate.
        shard = jax.device_put(np.ascontiguousarray(host[index]).reshape(sharding.shard_shape(host.shape)), device)
        shards.append(jax.device_put(shard, device, may_alias=False))
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


@jax.jit
def _copied(array: jax.Array) -> jax.Array:
    return jnp.copy(array)
