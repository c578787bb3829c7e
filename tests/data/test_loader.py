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


def test_the_order_is_numpys_for_the_seed_and_the_epoch():
    loader = ArrayLoader((XS, YS), 4, seed=3)
    for epoch in range(3):
        assert order(loader) == np.random.default_rng((3, epoch)).permutation(10).tolist()


def test_every_array_is_taken_by_the_same_examples():
    for xs, ys in ArrayLoader((XS, YS), 4):
        np.testing.assert_array_equal(xs, XS[ys])


def test_set_epoch_says_which_epoch_is_next_and_counting_goes_on_from_there():
    loader, other = ArrayLoader((XS, YS), 4), ArrayLoader((XS, YS), 4)
    epochs = [order(loader) for _ in range(5)]
    other.set_epoch(3)
    assert [order(other), order(other)] == epochs[3:]
    other.set_epoch(1)
    assert order(other) == epochs[1]


def test_an_epoch_starts_with_iter_not_with_the_first_batch():
    loader, other = ArrayLoader((XS, YS), 4), ArrayLoader((XS, YS), 4)
    first, second = iter(loader), iter(loader)
    other.set_epoch(1)
    assert [ys.tolist() for _, ys in second] == [ys.tolist() for _, ys in other]
    assert np.concatenate([ys for _, ys in first]).tolist() == np.random.default_rng((0, 0)).permutation(10).tolist()


def test_without_shuffling_the_order_is_the_stored_one():
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
def test_batches_are_new_arrays_every_time(shuffle):
    loader = ArrayLoader(XS, 5, shuffle=shuffle)
    assert loader.fresh_batches is True
    batches = [*loader, *loader]
    for number, batch in enumerate(batches):
        assert not any(np.shares_memory(batch, other) for other in [XS, *batches[:number]])


def test_any_pytree_and_arrays_on_a_device():
    loader = ArrayLoader({"image": jnp.asarray(XS), "label": YS}, 4, shuffle=False)
    first = next(iter(loader))
    assert isinstance(first["image"], jax.Array)
    assert isinstance(first["label"], np.ndarray)
    np.testing.assert_array_equal(first["image"], XS[:4])


def test_element_spec_is_a_full_batch_as_a_step_sees_it():
    spec = ArrayLoader((XS.astype(np.float64), YS), 4).element_spec
    assert spec == (jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32))
    assert ArrayLoader(XS, 64).element_spec == jax.ShapeDtypeStruct((10, 2), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 6)
    assert ArrayLoader(keys, 2).element_spec == jax.ShapeDtypeStruct((2,), keys.dtype)


def test_repr_gives_sizes():
    assert repr(ArrayLoader((XS, YS), 4, seed=2)) == "ArrayLoader(10 examples, batch_size=4, seed=2)"


def test_importing_the_package_does_not_import_jax():
    code = "import fluxcb.data, sys; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_unequal_lengths_are_refused_by_name():
    with pytest.raises(DataError) as caught:
        ArrayLoader({"image": XS, "label": YS[:7]}, 4)
    assert str(caught.value) == (
        "The arrays do not have the same number of examples: `arrays['image']` has 10, `arrays['label']` has 7.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        "  why:   one index picks the same example from each of them\n"
        "  fix:   make their first axes equally long"
    )


@pytest.mark.parametrize(
    ("arrays", "why"),
    [((XS[:0], YS), "`arrays[0]` has shape (0, 2), `arrays[1]` has shape (10,)"), ((), "`arrays` holds no arrays")],
)
def test_no_examples_are_refused(arrays, why):
    with pytest.raises(DataError) as caught:
        ArrayLoader(arrays, 4)
    assert str(caught.value) == (
        "There are no examples to take batches from.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        f"  why:   {why}\n"
        "  fix:   pass arrays with at least one example"
    )


@pytest.mark.parametrize(("leaf", "kind"), [([1.0, 2.0], "float"), (np.float32(1), "float32")])
def test_what_has_no_leading_axis_is_refused(leaf, kind):
    with pytest.raises(DataError) as caught:
        ArrayLoader((XS, leaf), 4)
    name = "arrays[1][0]" if isinstance(leaf, list) else "arrays[1]"
    assert str(caught.value) == (
        f"`{name}` has no leading axis to take batches from: it is of type `{kind}`.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        "  fix:   pass NumPy or JAX arrays whose first axis is the example; turn lists into arrays first"
    )


def test_dropping_the_only_batch_is_refused():
    with pytest.raises(DataError) as caught:
        ArrayLoader(XS, 16, drop_last=True)
    assert str(caught.value) == (
        "An epoch would have no batches: 10 examples make no batch of 16.\n"
        "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
        "  why:   `drop_last=True` leaves out the only batch, which is smaller\n"
        "  fix:   make `batch_size` 10 or less\n"
        "     or: leave out `drop_last`"
    )


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 (`int`)"), (-3, "-3 (`int`)"), (2.0, "2.0 (`float`)"), ("8", "'8' (`str`)"), (True, "True (`bool`)")],
)
def test_a_batch_size_that_cannot_be_meant_is_refused(size, shown):
    with pytest.raises(DeclarationError) as caught:
        ArrayLoader(XS, size)
    assert str(caught.value) == (
        f"`batch_size` must be an int of 1 or more, not {shown}.\n"
        "  where: fluxcb.data.ArrayLoader\n"
        "  fix:   pass an int, batch_size=32 for example"
    )


def test_a_negative_seed_or_epoch_is_refused():
    with pytest.raises(DeclarationError, match=r"^`seed` must be an int of 0 or more, not -1 \(`int`\)\."):
        ArrayLoader(XS, 4, seed=-1)
    with pytest.raises(DeclarationError, match=r"^`epoch` must be an int of 0 or more, not 1\.5 \(`float`\)\."):
        ArrayLoader(XS, 4).set_epoch(1.5)  # pyright: ignore[reportArgumentType]


def test_numpy_ints_are_ints():
    assert len(ArrayLoader(XS, np.int64(5), seed=np.int32(1))) == 2  # pyright: ignore[reportArgumentType]


# -- on the device -----------------------------------------------------------------------------------------------------


def test_resident_batches_are_the_same_and_lie_on_the_device():
    arrays = (np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10))
    plain, resident = ArrayLoader(arrays, 4, seed=3), ArrayLoader(arrays, 4, seed=3, device=True)
    assert (plain.resident, resident.resident) == (False, True)
    for _ in range(2):
        for (xs, ys), (device_xs, device_ys) in zip(plain, resident, strict=True):
            assert isinstance(device_xs, jax.Array)
            np.testing.assert_array_equal(xs, device_xs)
            np.testing.assert_array_equal(ys, device_ys)
    assert plain.element_spec == resident.element_spec


def test_rows_name_the_batches_of_the_epoch_and_share_the_arrays():
    arrays = {"x": np.arange(10) * 10}
    batches, rows = (ArrayLoader(arrays, 4, device=True) for _ in range(2))
    batches.set_epoch(5)
    rows.set_epoch(5)
    found = list(rows.iter_rows())
    assert [row.rows.dtype for row in found] == [np.int32] * 3
    assert len({id(row.arrays) for row in [*found, *rows.iter_rows()]}) == 1
    for batch, row in zip(batches, found, strict=True):
        np.testing.assert_array_equal(batch["x"], np.asarray(row.arrays["x"])[row.rows])


def test_arrays_may_be_passed_one_by_one(refused):
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
    for arrays, what in (((xs, ys), "arrays only"), (((xs, ys),), "one argument only"), ((xs, [ys]), "arrays only")):
        with refused(
            DeclarationError,
            f"`ArrayLoader` was given {what}, and no batch size.\n"
            "  where: fluxcb.data.ArrayLoader(arrays, batch_size)\n"
            "  fix:   add it by name: `ArrayLoader(xs, ys, batch_size=32)`",
        ):
            ArrayLoader(*arrays)
