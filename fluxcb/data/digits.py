"""A small real data set for examples and tests: 1,797 handwritten digits."""

from pathlib import Path

import numpy as np

from fluxcb._calls import entry_point

__all__ = ["digits"]

_TRAINING_EXAMPLES = 1437


@entry_point
def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return a small data set `((train_x, train_y), (valid_x, valid_y))` of handwritten digits with 8 x 8 pixels.

    There are 1,437 training examples and 360 validation examples, split by a fixed shuffle. Each call returns new
    arrays.

    Returns:
        Two pairs of images and labels. The images are `float32[n, 64]`, with pixels from 0 (paper) to 1 (ink), row by
        row. The labels are `int32[n]`, the digits from 0 to 9.

    Example:
        >>> (train_x, train_y), (valid_x, valid_y) = digits()
        >>> train_x.shape, train_x.dtype, valid_y.shape, valid_y.dtype
        ((1437, 64), dtype('float32'), (360,), dtype('int32'))

    Source:
        Alpaydin and Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
        https://doi.org/10.24432/C50P49, CC BY 4.0. See digits_LICENSE.md in the directory of this file.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images, labels = stored["images"], stored["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    xs = images[order].astype(np.float32) / np.float32(16)
    ys = labels[order].astype(np.int32)
    n = _TRAINING_EXAMPLES
    return (xs[:n], ys[:n]), (xs[n:], ys[n:])
