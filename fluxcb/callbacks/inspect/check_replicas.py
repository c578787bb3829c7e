"""`CheckReplicas`: compare the copies of the training state that processes and devices hold."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.collectives import collective
from fluxcb._declare.events import Event, FitBegin, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import FluxcbError

__all__ = ["CheckReplicas"]

_TREES = ("params", "model_state", "opt_state")
_SHOWN = 5


class CheckReplicas(Callback):
    """End training with an error if two replicas of an array differ between processes or devices.

    If an array is replicated, or sharded and its shards are replicated, all copies of it must be equal. Copies can
    differ if processes start with different parameters, if a program computes different results on different devices,
    or if a device is faulty. Training does not fail then, but its results are wrong.

    Each device computes a checksum of 64 bits of each of its shards, and only the checksums are compared. Any change of
    a single element changes the checksum. Values must be equal bit for bit, so 0.0 and -0.0 differ. If checksums
    differ, the processes exchange the values of one array, to report the largest difference.

    The replicas are compared when a fit begins and at each `Trigger`, which is after each epoch unless a schedule says
    otherwise: `every(CheckReplicas(), steps=100)`.

    Access:
        *: Read (borrowed). It uses `params`, `model_state`, `opt_state` and the arrays in `cbstate`.

    Runs:
        FitBegin, Trigger x AbstractTrainingPhase (host).

    Cost:
        A pass over the training state on each device, one wait for the device, and one collective of 16 bytes per array
        and device. Compiles one program per local device.

    Raises:
        FluxcbError: In training. Replicas differ.

    Example:
        >>> from fluxcb import every
        >>> from fluxcb.callbacks import CheckReplicas
        >>> from fluxcb.testing import testlearner
        >>> history = testlearner(every(CheckReplicas(), steps=2)).fit(1)  # no error: the replicas are equal
    """

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"*": Read(borrow=True)}

    @on(FitBegin, AbstractTrainingPhase)
    def check_first(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Compare the replicas when a fit begins."""
        _check(learner)

    @on(Trigger, AbstractTrainingPhase)
    def check(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Compare the replicas."""
        _check(learner)

    def __repr__(self) -> str:
        return "CheckReplicas()"


class _Replica(NamedTuple):
    """A copy of a shard: its process, and the position of its device among the devices of the process."""

    process: int
    device: int


class _Drift(NamedTuple):
    """An array with copies of a shard that differ, and the copies, grouped by their checksums."""

    leaf: int
    shard: int
    groups: list[list[_Replica]]


def _check(learner: LearnerView) -> None:
    """Compare the replicas of the training state.

    Raises:
        FluxcbError: Some differ.
    """
    error = collective(lambda: _compared(list(_arrays(learner))))
    if error is not None:
        raise error


def _compared(named: Sequence[tuple[str, Any]]) -> FluxcbError | None:
    """Return the error that all processes raise if replicas differ, or None. All processes have to call it."""
    if not named:
        return None
    rows = _gathered(_checksums([leaf for _, leaf in named]))
    drifts = list(_drifts(rows))
    if not drifts:
        return None
    # Every process has found the same drifts, so all of them take part in the exchange of values.
    first = drifts[0]
    path, leaf = named[first.leaf]
    difference = _largest_difference(leaf, first)
    paths = list(dict.fromkeys(named[drift.leaf][0] for drift in drifts))
    others = f" and of {len(paths) - 1} other arrays" if len(paths) > 2 else f" and `{paths[1]}`" if paths[1:] else ""
    within = len({replica.process for group in first.groups for replica in group}) == 1
    return FluxcbError(
        f"The replicas of `{path}`{others} differ between {'devices' if within else 'processes'}.",
        where=[
            f"`{path}` has {len(first.groups)} different values: {_named(first.groups)}",
            f"the largest difference between two of them is {difference:.6g}",
            *([f"also: {', '.join(f'`{p}`' for p in paths[1 : 1 + _SHOWN])}"] if len(paths) > 2 else []),
        ],
        why="replicas are updated in the same way, so those that differ once stay different, and the results are wrong",
        fix=[
            "give all processes the same parameters, assignments and key when the fit begins",
            "if the replicas were equal when the fit began, resume from the last checkpoint, and test the devices",
        ],
    )


def _arrays(learner: LearnerView) -> Iterator[tuple[str, Any]]:
    """Iterate over the arrays of the training state with their paths, in the same order in all processes."""
    import jax

    trees = {name: getattr(learner, name) for name in _TREES}
    trees |= {f"cbstate.{name}": learner.cbstate[name] for name in sorted(learner.cbstate)}
    for name, tree in trees.items():
        if not isinstance(tree, jax.Array | Mapping | tuple | list) and name.startswith("cbstate."):
            continue  # an object on the host
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, jax.Array) and leaf.size:
                is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                leaf = jax.random.key_data(leaf) if is_key else leaf
                yield ".".join(filter(None, (name, jax.tree_util.keystr(path, simple=True, separator=".")))), leaf


def _checksums(leaves: Sequence[Any]) -> Any:
    """Return `uint32[leaves, devices, 4]`: whether a local device has a shard, which shard, and its checksum."""
    import jax
    import numpy as np

    # The default devices can be others, for example if the training runs on the CPU of a machine with a GPU.
    platform = next((device.platform for leaf in leaves for device in leaf.devices()), None)
    # Processes can have different numbers of devices, and a collective needs equal shapes.
    processes = [device.process_index for device in jax.devices(platform)]
    rows = np.zeros((len(leaves), max(map(processes.count, set(processes))), 4), np.uint32)
    on_device: dict[Any, list[tuple[int, Any]]] = {device: [] for device in jax.local_devices(backend=platform)}
    for number, leaf in enumerate(leaves):
        for shard in leaf.addressable_shards:
            on_device[shard.device].append((number, shard))
    computed = [_digests()([shard.data for _, shard in shards]) for shards in on_device.values()]  # all devices at once
    for position, (shards, digests) in enumerate(zip(on_device.values(), computed, strict=True)):
        for (number, shard), digest in zip(shards, np.asarray(digests) if shards else (), strict=True):
            rows[number, position] = (1, _shard_id(leaves[number], shard), *digest)
    return rows


def _shard_id(leaf: Any, shard: Any) -> int:
    bounds = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
    return zlib.crc32(repr(bounds).encode())


@functools.cache
def _digests() -> Any:
    """Return a jitted function that returns `uint32[arrays, 2]` for arrays on one device."""
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda arrays: jnp.stack([_digest(x) for x in arrays]) if arrays else jnp.zeros((0, 2), jnp.uint32))


def _digest(x: Any) -> Any:
    """Return two sums over the mixed bits of an array, traced."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    elif (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits < 8:  # int4, float4
        x = x.astype(jnp.float32)  # which is exact
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32).reshape(-1)
    index = jax.lax.iota(jnp.uint32, words.size)
    # For each position, this is a bijection of the word (odd factors, xor with shifts): one changed element always
    # changes the first sum. The factors are those of the finalizer of MurmurHash3.
    mixed = words ^ (index * jnp.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    other = (mixed ^ (mixed >> 15)) * (2 * index + 1)
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(other, dtype=jnp.uint32)])


def _gathered(row: Any) -> Any:
    """Return the arrays of all processes."""
    import jax

    if jax.process_count() == 1:
        return row[None]
    # It takes time to import, and a single process does not need it.
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(row)


def _drifts(rows: Any) -> Iterator[_Drift]:
    """Iterate over the shards whose copies have different checksums."""
    for leaf in range(rows.shape[1]):
        found: dict[int, dict[tuple[int, int], list[_Replica]]] = {}
        for process, devices in enumerate(rows[:, leaf].tolist()):
            for device, (there, shard, *digest) in enumerate(devices):
                if there:
                    found.setdefault(shard, {}).setdefault(tuple(digest), []).append(_Replica(process, device))
        for shard, groups in sorted(found.items()):
            if len(groups) > 1:
                yield _Drift(leaf, shard, list(groups.values()))


def _largest_difference(leaf: Any, drift: _Drift) -> float:
    """Return the largest difference between the copies of a shard. All processes have to call it."""
    import numpy as np

    copies = [_numbers(shard.data) for shard in leaf.addressable_shards if _shard_id(leaf, shard) == drift.shard]
    # A process without a copy takes part in the collective, and its numbers are not used.
    copies = copies or [np.zeros_like(_numbers(leaf.addressable_shards[0].data))]
    # The bounds of the copies of each process: two arrays per process, however many devices have a copy.
    bounds = np.stack([functools.reduce(np.minimum, copies), functools.reduce(np.maximum, copies)])
    rows = _gathered(np.ascontiguousarray(bounds).view(np.uint8))  # as bytes, because JAX would round to 32 bits
    bounds = np.ascontiguousarray(rows).view(np.float64)
    with_copy = sorted({replica.process for group in drift.groups for replica in group})
    bounds = bounds[with_copy]
    return float(np.max(bounds[:, 1].max(axis=0) - bounds[:, 0].min(axis=0)))


def _numbers(data: Any) -> Any:
    """Return an array as float64 numbers of one axis."""
    import numpy as np

    array = np.asarray(data)
    if array.dtype.kind == "c":
        array = np.stack([np.real(array), np.imag(array)])
    return array.astype(np.float64).reshape(-1)


def _named(groups: Sequence[Sequence[_Replica]]) -> str:
    """Return the groups of replicas as text."""
    of_processes = len({replica.process for group in groups for replica in group}) > 1
    return " | ".join(_members(group, of_processes=of_processes) for group in groups)


def _members(group: Sequence[_Replica], *, of_processes: bool) -> str:
    if not of_processes:
        return "device " + ", ".join(str(replica.device) for replica in group)
    return "process " + ", ".join(str(process) for process in sorted({replica.process for replica in group}))
