"""A small real data set for examples and tests: 1,797 handwritten digits."""

from pathlib import Path

import numpy as np

__all__ = ["digits"]

_TRAINING_EXAMPLES = 1437


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return `((train_x, train_y), (valid_x, valid_y))`: images of handwritten digits, 8 x 8 pixels each.

    1,437 examples to train on and 360 to validate on, by a fixed shuffle. Each call returns new arrays.

    Returns:
        Two pairs: images as `float32[n, 64]`, rows of pixels from 0 (paper) to 1 (ink), and the digits they show as
        `int32[n]`.

    Example:
        >>> (train_x, train_y), (valid_x, valid_y) = digits()
        >>> train_x.shape, train_x.dtype, valid_y.shape, valid_y.dtype
        ((1437, 64), dtype('float32'), (360,), dtype('int32'))

    Source:
        Alpaydin and Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
        https://doi.org/10.24432/C50P49, CC BY 4.0. See digits_LICENSE.md beside this file.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    xs = images[order].astype(np.float32) / np.float32(16)
    ys = labels[order].astype(np.int32)
    n = _TRAINING_EXAMPLES
    return (xs[:n], ys[:n]), (xs[n:], ys[n:])
