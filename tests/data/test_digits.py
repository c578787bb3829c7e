from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import fluxcb.data
from fluxcb.data import digits


def test_the_stored_file_is_scikit_learns_copy_element_for_element():
    stored = np.load(Path(fluxcb.data.__file__).with_name("digits.npz"))
    bunch = load_digits()
    assert sorted(stored) == ["images", "labels"]
    assert (stored["images"].dtype, stored["labels"].dtype) == (np.uint8, np.uint8)
    np.testing.assert_array_equal(stored["images"], bunch.data)
    np.testing.assert_array_equal(stored["images"].reshape(-1, 8, 8), bunch.images)
    np.testing.assert_array_equal(stored["labels"], bunch.target)
    stored.close()


def test_the_split_is_a_fixed_shuffle_of_all_examples():
    (train_x, train_y), (valid_x, valid_y) = digits()
    assert (train_x.shape, train_y.shape, valid_x.shape, valid_y.shape) == ((1437, 64), (1437,), (360, 64), (360,))
    assert {train_x.dtype, valid_x.dtype} == {np.dtype(np.float32)}
    assert {train_y.dtype, valid_y.dtype} == {np.dtype(np.int32)}
    order = np.random.default_rng(0).permutation(1797)
    bunch = load_digits()
    np.testing.assert_array_equal(np.concatenate([train_x, valid_x]) * 16, bunch.data[order])
    np.testing.assert_array_equal(np.concatenate([train_y, valid_y]), bunch.target[order])
    # Written out, so that a NumPy whose permutations differ is noticed.
    assert valid_y[:10].tolist() == [0, 8, 8, 9, 8, 3, 7, 5, 0, 6]


def test_pixels_are_between_0_and_1_and_every_digit_is_in_both_parts():
    for xs, ys in digits():
        assert (xs.min(), xs.max()) == (0.0, 1.0)
        assert np.unique(ys).tolist() == list(range(10))


def test_each_call_returns_new_arrays():
    first, second = digits(), digits()
    first[0][0][:] = -1
    assert second[0][0].min() == 0
    assert digits()[0][0].min() == 0


def test_the_licence_lies_beside_the_data():
    text = Path(fluxcb.data.__file__).with_name("digits_LICENSE.md").read_text()
    for part in ("Alpaydin", "Kaynak", "CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/", "Changes"):
        assert part in text
