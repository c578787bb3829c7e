import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxcb._errors import DataError, DeclarationError
from fluxcb.data import ArrayLoader

XS = np.arange(20, dtype=np.float32).reshape(10, 2)
YS = np.arange(10, dtype=np.int32)


def order(loader):
    return np.concatenate([np.asarray(ys) for _, ys in loader]).tolist()


def test_order_matches_numpy_for_seed_and_epoch():
    loader = ArrayLoader((XS, YS), 4, seed=3)
    for epoch in range(3):
        assert order(loader) == np.random.default_rng((3, epoch)).permutation(10).tolist()


def test_all_arrays_use_same_order():
    for xs, ys in ArrayLoader((XS, YS), 4):
        np.testing.assert_array_equal(xs, XS[ys])


def test_set_epoch_sets_next_epoch():
    loader, other = ArrayLoader((XS, YS), 4), ArrayLoader((XS, YS), 4)
    epochs = [order(loader) for _ in range(5)]
    other.set_epoch(3)
    assert [order(other), order(other)] == epochs[3:]
    other.set_epoch(1)
    assert order(other) == epochs[1]


def test_epoch_starts_at_iter():
    loader, other = ArrayLoader((XS, YS), 4), ArrayLoader((XS, YS), 4)
    first, second = iter(loader), iter(loader)
    other.set_epoch(1)
    assert [ys.tolist() for _, ys in second] == [ys.tolist() for _, ys in other]
    assert np.concatenate([ys for _, ys in first]).tolist() == np.random.default_rng((0, 0)).permutation(10).tolist()


def test_order_without_shuffling_is_stored_order():
    loader = ArrayLoader((XS, YS), 4, shuffle=False)
    assert [order(loader), order(loader)] == [YS.tolist(), YS.tolist()]


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), size=st.integers(1, 45), drop_last=st.booleans(), shuffle=st.booleans())
def test_batches_partition_the_examples(n, size, drop_last, shuffle):
    if drop_last and size > n:
        return
    loader = ArrayLoader(np.arange(n), size, drop_last=drop_last, shuffle=shuffle)
    batches = list(loader)
    assert len(batches) == len(loader) == (n // size if drop_last else -(-n // size))
    assert all(len(batch) == size for batch in batches[:-1])
    assert len(batches[0]) == loader.element_spec.shape[0]
    seen = np.concatenate(batches)
    assert len(set(seen.tolist())) == len(seen) == (n // size * size if drop_last else n)


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_new_arrays(shuffle):
    loader = ArrayLoader(XS, 5, shuffle=shuffle)
    assert loader.fresh_batches is True
    batches = [*loader, *loader]
    for number, batch in enumerate(batches):
        assert not any(np.shares_memory(batch, other) for other in [XS, *batches[:number]])


def test_any_pytree_and_device_arrays_are_accepted():
    loader = ArrayLoader({"image": jnp.asarray(XS), "label": YS}, 4, shuffle=False)
    first = next(iter(loader))
    assert isinstance(first["image"], jax.Array)
    assert isinstance(first["label"], np.ndarray)
    np.testing.assert_array_equal(first["image"], XS[:4])


def test_element_spec_describes_full_batch():
    spec = ArrayLoader((XS.astype(np.float64), YS), 4).element_spec
    assert spec == (jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32))
    assert ArrayLoader(XS, 64).element_spec == jax.ShapeDtypeStruct((10, 2), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 6)
    assert ArrayLoader(keys, 2).element_spec == jax.ShapeDtypeStruct((2,), keys.dtype)


def test_repr_shows_sizes():
    assert repr(ArrayLoader((XS, YS), 4, seed=2)) == "ArrayLoader(10 examples, batch_size=4, seed=2)"


def test_import_does_not_import_jax():
    code = "import fluxcb.data, sys; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_unequal_lengths_raise():
    with pytest.raises(DataError) as caught:
        ArrayLoader({"image": XS, "label": YS[:7]}, 4)
    assert str(caught.value) == (
        "The arrays do not have the same number of examples: `arrays['image']` has 10, `arrays['label']` has 7.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        "  why:   the same index must select the same example in all arrays\n"
        "  fix:   pass arrays whose first axes have the same length"
    )


@pytest.mark.parametrize(
    ("arrays", "why"),
    [((XS[:0], YS), "`arrays[0]` has shape (0, 2), `arrays[1]` has shape (10,)"), ((), "`arrays` contains no arrays")],
)
def test_empty_arrays_raise(arrays, why):
    with pytest.raises(DataError) as caught:
        ArrayLoader(arrays, 4)
    assert str(caught.value) == (
        "`ArrayLoader` received no examples.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        f"  why:   {why}\n"
        "  fix:   pass arrays with at least one example"
    )


@pytest.mark.parametrize(("leaf", "kind"), [([1.0, 2.0], "float"), (np.float32(1), "float32")])
def test_array_without_leading_axis_raises(leaf, kind):
    with pytest.raises(DataError) as caught:
        ArrayLoader((XS, leaf), 4)
    name = "arrays[1][0]" if isinstance(leaf, list) else "arrays[1]"
    assert str(caught.value) == (
        f"`{name}` has no leading axis for the examples; its type is `{kind}`.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        "  fix:   pass NumPy or JAX arrays whose first axis is the example; convert lists to arrays first"
    )


def test_drop_last_with_less_than_one_batch_raises():
    with pytest.raises(DataError) as caught:
        ArrayLoader(XS, 16, drop_last=True)
    assert str(caught.value) == (
        "An epoch would have no batches: 10 examples do not fill a batch of 16.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        "  why:   `drop_last=True` drops the only batch, because it is smaller than the batch size\n"
        "  fix:   use a `batch_size` of at most 10\n"
        "     or: remove `drop_last`"
    )


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 (`int`)"), (-3, "-3 (`int`)"), (2.0, "2.0 (`float`)"), ("8", "'8' (`str`)"), (True, "True (`bool`)")],
)
def test_invalid_batch_size_raises(size, shown):
    with pytest.raises(DeclarationError) as caught:
        ArrayLoader(XS, size)
    assert str(caught.value) == (
        f"`batch_size` must be an int of 1 or more, not {shown}.\n"
        "  where: fluxcb.data.ArrayLoader\n"
        "  fix:   pass an int, e.g. `batch_size=32`"
    )


def test_negative_seed_or_epoch_raises():
    with pytest.raises(DeclarationError, match=r"^`seed` must be an int of 0 or more, not -1 \(`int`\)\."):
        ArrayLoader(XS, 4, seed=-1)
    with pytest.raises(DeclarationError, match=r"^`epoch` must be an int of 0 or more, not 1\.5 \(`float`\)\."):
        ArrayLoader(XS, 4).set_epoch(1.5)  # pyright: ignore[reportArgumentType]


def test_numpy_integers_are_accepted():
    assert len(ArrayLoader(XS, np.int64(5), seed=np.int32(1))) == 2  # pyright: ignore[reportArgumentType]


# -- on the device -----------------------------------------------------------------------------------------------------


def test_resident_batches_match_and_are_on_device():
    arrays = (np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10))
    plain, resident = ArrayLoader(arrays, 4, seed=3), ArrayLoader(arrays, 4, seed=3, device=True)
    assert (plain.resident, resident.resident) == (False, True)
    for _ in range(2):
        for (xs, ys), (device_xs, device_ys) in zip(plain, resident, strict=True):
            assert isinstance(device_xs, jax.Array)
            np.testing.assert_array_equal(xs, device_xs)
            np.testing.assert_array_equal(ys, device_ys)
    assert plain.element_spec == resident.element_spec


def test_rows_index_batches_of_epoch():
    arrays = {"x": np.arange(10) * 10}
    batches, rows = (ArrayLoader(arrays, 4, device=True) for _ in range(2))
    batches.set_epoch(5)
    rows.set_epoch(5)
    found = list(rows.iter_rows())
    assert [row.rows.dtype for row in found] == [np.int32] * 3
    assert len({id(row.arrays) for row in [*found, *rows.iter_rows()]}) == 1
    for batch, row in zip(batches, found, strict=True):
        np.testing.assert_array_equal(batch["x"], np.asarray(row.arrays["x"])[row.rows])


def test_arrays_may_be_separate_arguments(refused):
    xs, ys = np.arange(6), np.arange(6) ** 2
    expected = list(ArrayLoader((xs, ys), 4))
    for loader in (
        ArrayLoader(xs, ys, batch_size=4),
        ArrayLoader(xs, ys, 4),
        ArrayLoader((xs, ys), batch_size=4),
        ArrayLoader(arrays=(xs, ys), batch_size=4),
    ):
        for batch, other in zip(loader, expected, strict=True):
            assert isinstance(batch, tuple)
            np.testing.assert_array_equal(batch, other)
    (batch,) = ArrayLoader(xs, batch_size=np.int64(6))
    assert sorted(batch.tolist()) == xs.tolist()
    for arrays, what in (((xs, ys), "only arrays"), (((xs, ys),), "only one argument"), ((xs, [ys]), "only arrays")):
        with refused(
            DeclarationError,
            f"`ArrayLoader` received {what} and no batch size.\n"
            "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
            "  fix:   pass the batch size by name: `ArrayLoader(xs, ys, batch_size=32)`",
        ):
            ArrayLoader(*arrays)
