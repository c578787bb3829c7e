import hashlib
from pathlib import Path

import numpy as np

import fluxcb.data
from fluxcb.data import digits


def stored():
    with np.load(Path(fluxcb.data.__file__).with_name("digits.npz")) as file:
        assert sorted(file) == ["images", "labels"]
        return file["images"], file["labels"]


def test_stored_file_matches_scikit_learn():
    images, labels = stored()
    assert (images.dtype, images.shape, labels.dtype, labels.shape) == (np.uint8, (1797, 64), np.uint8, (1797,))
    # The hashes of `load_digits().data` and `load_digits().target` (scikit-learn 1.9.1), converted to uint8.
    expected = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
    assert hashlib.sha256(images.tobytes()).hexdigest() == expected
    expected = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"
    assert hashlib.sha256(labels.tobytes()).hexdigest() == expected


def test_split_is_fixed_shuffle_of_all_examples():
    (train_x, train_y), (valid_x, valid_y) = digits()
    assert (train_x.shape, train_y.shape, valid_x.shape, valid_y.shape) == ((1437, 64), (1437,), (360, 64), (360,))
    assert {train_x.dtype, valid_x.dtype} == {np.dtype(np.float32)}
    assert {train_y.dtype, valid_y.dtype} == {np.dtype(np.int32)}
    order = np.random.default_rng(0).permutation(1797)
    images, labels = stored()
    np.testing.assert_array_equal(np.concatenate([train_x, valid_x]) * 16, images[order])
    np.testing.assert_array_equal(np.concatenate([train_y, valid_y]), labels[order])
    # Written out, so that a NumPy whose permutations differ is noticed.
    assert valid_y[:10].tolist() == [0, 8, 8, 9, 8, 3, 7, 5, 0, 6]


def test_pixels_are_in_unit_range_and_splits_have_all_digits():
    for xs, ys in digits():
        assert (xs.min(), xs.max()) == (0.0, 1.0)
        assert np.unique(ys).tolist() == list(range(10))


def test_each_call_returns_new_arrays():
    first, second = digits(), digits()
    first[0][0][:] = -1
    assert second[0][0].min() == 0
    assert digits()[0][0].min() == 0


def test_license_is_stored_with_data():
    text = Path(fluxcb.data.__file__).with_name("digits_LICENSE.md").read_text()
    for part in ("Alpaydin", "Kaynak", "CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/", "Changes"):
        assert part in text
