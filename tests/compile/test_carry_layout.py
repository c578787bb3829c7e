"""Packing the carry into few arrays: which arrays are combined, and that values do not change."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxcb._compile.carry_layout import CarryLayout

DTYPES = ("float32", "int32", "uint32", "bool", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn")


@pytest.fixture(autouse=True)
def on_cpu():
    """Create arrays on the CPU, because carries on other devices are not packed."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def bits(tree):
    """Return shapes, dtypes and bits of all arrays. All NaNs are equal, because XLA normalizes those of bfloat16."""

    def of(x):
        x = np.array(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            with np.errstate(invalid="ignore"):
                x[np.isnan(x)] = np.nan
        return x.shape, str(x.dtype), x.tobytes()

    return [of(x) for x in jax.tree.leaves(tree)]


def together(carry):
    """Return which arrays of a carry share a vector, by the dtype of the vector."""
    layout = CarryLayout.of(carry)
    groups = {}
    for index, name in enumerate(layout.vectors if layout is not None else ()):
        groups.setdefault(name, []).append(index)
    return groups


def small(count, dtype="float32", shape=(3,)):
    return [jnp.ones(shape, dtype) for _ in range(count)]


@st.composite
def carries(draw):
    def leaf(i):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        raw = np.random.default_rng(i).integers(0, 256, (*shape, np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize))
        raw = (raw % 2 if dtype == "bool" else raw).astype(np.uint8)
        return jnp.asarray(raw.view(getattr(ml_dtypes, dtype, dtype)).reshape(shape))

    return {"nested": [leaf(i) for i in range(draw(st.integers(1, 9)))], "more": (leaf(10), leaf(11), leaf(12))}


@settings(max_examples=60, deadline=None)
@given(carries())
def test_pack_and_unpack_preserve_all_bits(carry):
    layout = CarryLayout.of(carry)
    if layout is None:
        return
    packed = layout.pack(carry)
    assert len(packed) <= len(jax.tree.leaves(carry)) - 3
    assert bits(layout.unpack(packed)) == bits(carry)
    assert bits(layout.join(carry)) == bits(packed)
    split = layout.split(packed)
    assert jax.tree.structure(split) == jax.tree.structure(carry)
    assert bits(split) == bits(carry)


def test_small_arrays_are_grouped_by_dtype():
    carry = [*small(3), jnp.ones((32, 33)), *small(2, "int32", ()), jnp.ones((32, 32)), jnp.ones(1, "uint32")]
    # 32 x 33 floats are more than 4096 bytes, and there is one uint32 only.
    assert together(carry) == {"float32": [0, 1, 2, 6], "int32": [4, 5], "": [3, 7]}


def test_few_arrays_are_not_packed():
    assert CarryLayout.of(small(3)) is None
    assert together(small(4)) == {"float32": [0, 1, 2, 3]}
    assert CarryLayout.of([*small(2), *small(2, "int32"), jnp.ones(5000)]) is None


def test_random_keys_are_not_packed():
    carry = [*small(4), jax.random.key(0), jax.random.split(jax.random.key(1), 3)]
    assert together(carry) == {"float32": [0, 1, 2, 3], "": [4, 5]}
    layout = CarryLayout.of(carry)
    assert layout.unpack(layout.pack(carry))[4] is carry[4]


def test_weak_type_does_not_change_layout():
    weak = jax.jit(lambda: 1.0)()
    assert weak.weak_type
    layout = CarryLayout.of([*small(4), weak])
    assert layout == CarryLayout.of([*small(4), jnp.float32(1)])
    assert not layout.unpack(layout.pack([*small(4), weak]))[4].weak_type  # as it would be after the first step


def test_committed_array_disables_packing():
    assert CarryLayout.of([*small(5), jax.device_put(jnp.ones(2), jax.devices()[0])]) is None


@pytest.mark.parametrize(
    "other",
    [
        [*small(4), jnp.ones(7)],
        [*small(5, shape=(4,))],
        [*small(4), jnp.ones(3, "int32")],
        (*small(5),),
        [*small(4), jax.device_put(jnp.ones(3), jax.devices()[0])],
    ],
    ids=["length", "shapes", "dtype", "structure", "place"],
)
def test_packing_other_structure_raises(other):
    with pytest.raises(TypeError, match="differs from the layout"):
        CarryLayout.of(small(5)).pack(other)


def test_copies_outlive_packed_arrays():
    large = [jnp.arange(2000.0), jnp.arange(2000.0) + 1]
    carry = {"a": small(4), "b": large, "c": jnp.arange(4.0)}
    layout = CarryLayout.of(carry)
    arrays = layout.pack(carry)
    indices = layout.indices
    copies = layout.copy(arrays, [indices["c"], indices["b"][1]])
    for array in arrays:
        array.delete()
    copied = layout.part(copies, {"b": indices["b"][1], "c": indices["c"]})
    assert bits(copied["c"]) == bits(np.arange(4, dtype=np.float32))
    assert bits(copied["b"]) == bits(np.arange(2000, dtype=np.float32) + 1)
    assert [x is None for x in copies] == [False, True, False]  # nobody asked for b[0]


def test_kept_arrays_outlive_packed_arrays():
    large = [jnp.arange(2000.0), jnp.arange(2000.0) + 1]
    carry = {"a": small(4), "b": large, "c": jnp.arange(6, dtype="int32").reshape(2, 3), "d": jnp.arange(4)}
    layout = CarryLayout.of(carry)
    arrays = layout.pack(carry)
    indices = layout.indices
    kept = layout.keep(arrays, [{"c": indices["c"]}, indices["b"][1], indices["d"], indices["a"], indices])
    for array in arrays:
        array.delete()
    c, b, d, a, everything = [get() for get in kept]
    assert list(c) == ["c"]
    wanted = np.arange(6, dtype="i4").reshape(2, 3), np.arange(2000, dtype="f4") + 1, np.arange(4, dtype="i4"), small(4)
    assert bits([c, b, d, a]) == bits(wanted)
    assert bits(everything) == bits({"a": small(4), "b": [np.arange(2000.0, dtype="f4"), b], "c": c, "d": d})


@pytest.mark.parametrize("which", ["in the first vector", "in another vector", "by itself"])
def test_replace_one_array(which):
    carry = {
        "a": small(4),
        "b": jnp.arange(2000.0),
        "c": jnp.arange(4.0),
        "i": small(2, "int32"),
        "n": jnp.ones(3, "u4"),
    }
    name, value = {
        "in the first vector": ("c", np.full(4, 7, "f4")),
        "in another vector": ("i", np.full(3, 7, "i4")),
        "by itself": ("n", np.full(3, 7, "u4")),
    }[which]
    layout = CarryLayout.of(carry)
    arrays = layout.pack(carry)
    index = jax.tree.leaves(layout.indices[name])[-1]
    replaced = layout.replaced(arrays, index, value)
    expected = jax.tree.map(np.array, {**carry, name: [carry["i"][0], value] if name == "i" else value})
    assert isinstance(replaced[0], jax.Array)  # by which it is known whether they are gone, and where they lie
    assert bits(layout.unpack(replaced)) == bits(expected)
    assert bits(layout.unpack(arrays)) == bits(carry)
    again = layout.replaced(replaced, index, value + 1)
    assert bits(layout.part(again, index)) == bits(value + 1)
    assert bits(layout.unpack(replaced)) == bits(expected)

    @functools.partial(jax.jit, donate_argnums=0)
    def doubled(arrays):
        return layout.join(jax.tree.map(lambda x: 2 * x, layout.split(arrays)))

    assert bits(layout.unpack(doubled(replaced))) == bits(jax.tree.map(lambda x: 2 * x, expected))


def test_unpacked_part_does_not_depend_on_method():
    carry = {"a": small(4), "b": jnp.arange(6).reshape(2, 3), "c": jnp.arange(4.0), "i": jnp.arange(2)}
    layout = CarryLayout.of(carry)
    arrays = layout.pack(carry)
    for name in ("b", "c"):
        before = layout.part(arrays, {"it": layout.indices[name]})  # over the host's memory
        (kept,) = layout.keep(arrays, [layout.indices[name]])  # by a program, which there is from now on
        after = layout.part(arrays, {"it": layout.indices[name]})
        assert bits(before) == bits(kept()) == bits(after) == bits(carry[name])
        assert isinstance(after["it"], jax.Array)
    for array in arrays:
        array.delete()
    assert bits(after) == bits(carry["c"])


def test_discard_deletes_only_unpacked_arrays():
    carry = [*small(4), jnp.ones(3000)]
    layout = CarryLayout.of(carry)
    unpacked = layout.unpack(layout.pack(carry))
    layout.discard(unpacked, layout.indices)
    assert [x.is_deleted() for x in unpacked] == [True] * 4 + [False]
    assert not any(x.is_deleted() for x in carry)
