import operator
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from fluxcb import data
from fluxcb._errors import DeclarationError
from fluxcb.data import ArrayLoader

DEVICE = jax.devices()[0]
SHARDING = jax.sharding.SingleDeviceSharding(DEVICE)
XS = np.arange(10, dtype=np.float32)


class Positioned:
    """An iterable whose iterators have a position, like those of Grain."""

    def __iter__(self):
        return PositionedIterator()


class PositionedIterator:
    def __init__(self):
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 4:
            raise StopIteration
        self.position += 1
        return np.full(2, self.position)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def test_map_applies_function_in_every_epoch():
    loader = ArrayLoader(XS, 4, seed=1)
    mapped = data.map(operator.neg, loader)
    assert len(mapped) == 3
    for epoch in (0, 1):
        expected = -XS[np.random.default_rng((1, epoch)).permutation(10)]
        np.testing.assert_array_equal(np.concatenate(list(mapped)), expected)


def test_map_forwards_epoch_but_not_spec():
    loader = ArrayLoader(XS, 4)
    mapped = data.map(operator.neg, loader)
    mapped.set_epoch(5)
    np.testing.assert_array_equal(-np.concatenate(list(mapped)), XS[np.random.default_rng((0, 5)).permutation(10)])
    assert not hasattr(mapped, "element_spec")
    assert not hasattr(mapped, "fresh_batches")


def test_place_moves_batches_and_forwards_attributes():
    loader = ArrayLoader((XS, XS), 4, shuffle=False)
    placed = data.place(loader, SHARDING)
    first = next(iter(placed))
    assert [leaf.sharding for leaf in first] == [SHARDING, SHARDING]
    np.testing.assert_array_equal(first[0], XS[:4])
    assert len(placed) == 3
    assert placed.element_spec == loader.element_spec
    assert placed.fresh_batches is True
    placed.set_epoch(2)
    assert loader._epoch == 2


def test_placing_twice_wraps_once():
    placed = data.place([XS], DEVICE)
    assert data.place(placed, DEVICE) is placed
    moved = data.place(placed, SHARDING)
    assert moved.source == [XS]
    assert moved.placement == SHARDING


def test_place_shards_batches_over_devices():
    code = """
import jax, numpy as np
from fluxcb.data import ArrayLoader, place
mesh = jax.make_mesh((4,), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
placed = place(ArrayLoader(np.arange(17.0), 8, drop_last=True), sharding)
for batch in placed:
    print(batch.sharding == sharding, [shard.data.shape for shard in batch.addressable_shards])
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "True [(2,), (2,), (2,), (2,)]\n" * 2


def test_wrapped_source_has_only_attributes_of_source():
    for wrapped in (data.map(operator.neg, Positioned()), data.place(Positioned(), DEVICE)):
        assert not hasattr(wrapped, "set_epoch")
        assert not hasattr(wrapped, "element_spec")
        assert bool(wrapped) is True
        with pytest.raises(TypeError, match="has no len"):
            len(wrapped)
        assert len(list(wrapped)) == 4


def test_iterators_keep_position():
    for wrapped in (data.map(operator.neg, Positioned()), data.place(Positioned(), DEVICE)):
        batches = iter(wrapped)
        next(batches)
        state = batches.get_state()
        resumed = iter(wrapped)
        resumed.set_state(state)
        np.testing.assert_array_equal(np.asarray(list(resumed)), np.asarray(list(batches)))
        assert not hasattr(iter(data.map(operator.neg, [1])), "get_state")


def test_grain_dataset_keeps_position():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(list(range(12))).seed(1).shuffle().batch(3).to_iter_dataset()
    mapped = data.map(operator.neg, dataset)
    batches = iter(mapped)
    next(batches)
    resumed = iter(mapped)
    resumed.set_state(batches.get_state())
    np.testing.assert_array_equal(np.asarray(list(resumed)), np.asarray(list(batches)))


def test_stop_iteration_in_function_raises():
    with pytest.raises(RuntimeError, match=r"^the function of a mapped source raised StopIteration$"):
        list(data.map(lambda batch: next(iter(())), [1, 2]))


def test_nested_wrappers():
    wrapped = data.place(data.map(operator.neg, ArrayLoader(XS, 5, shuffle=False)), DEVICE)
    np.testing.assert_array_equal(np.concatenate(list(wrapped)), -XS)
    assert repr(wrapped) == f"place(map(neg, ArrayLoader(10 examples, batch_size=5, seed=0)), {DEVICE})"


def test_map_rejects_non_functions():
    with pytest.raises(DeclarationError) as caught:
        data.map([1, 2], operator.neg)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "`fn` must be a function of a batch, not of type `list`.\n"
        "  where: fluxcb.data.map(fn, source)\n"
        "  fix:   pass the function first and the source second"
    )


def test_non_iterable_sources_raise():
    with pytest.raises(DeclarationError) as caught:
        data.place(3, DEVICE)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "`source` must be an iterable of batches, but `int` is not iterable.\n"
        "  where: fluxcb.data.place(source, placement)\n"
        "  fix:   pass a list of batches, a `fluxcb.data.ArrayLoader`, a Grain dataset, or another iterable"
    )


def test_place_rejects_invalid_placement():
    with pytest.raises(DeclarationError) as caught:
        data.place([XS], "cpu")
    assert str(caught.value) == (
        "`placement` must be a device or a sharding, not of type `str`.\n"
        "  where: fluxcb.data.place(source, placement)\n"
        "  fix:   pass a device, e.g. `jax.devices()[0]`\n"
        "     or: pass a `jax.sharding.NamedSharding(mesh, spec)`"
    )
