"""Types of values that can be logged: numbers, texts, images, audio, histograms, graphs and files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._calls import Constructed
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._paths import fix_of_path, why_impossible

__all__ = ["Audio", "File", "Graph", "Histogram", "Image", "Loggable", "Text", "Value"]

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Loggable(Constructed):
    """Base class of values that can be logged. Values are checked when they are constructed."""


@dataclass(frozen=True)
class Value(Loggable):
    """A number, which may be NaN or infinite.

    Args:
        data: A Python number, or a NumPy or JAX array of shape `()`.

    Raises:
        DeclarationError: `data` is not a number.

    Example:
        >>> import numpy as np
        >>> Value(np.float32(0.5)), Value(3)
        (Value(data=0.5), Value(data=3.0))
    """

    data: float

    def __post_init__(self) -> None:
        if type(self.data) is not float:
            object.__setattr__(self, "data", _number(self.data))


@dataclass(frozen=True)
class Text(Loggable):
    """A text.

    Args:
        data: The text.

    Raises:
        DeclarationError: `data` is not a `str`.
    """

    data: str

    def __post_init__(self) -> None:
        _require_text(self, self.data)


@dataclass(frozen=True)
class Graph(Loggable):
    """A graph in text form.

    Args:
        data: The graph, e.g. in the DOT language.

    Raises:
        DeclarationError: `data` is not a `str`.
    """

    data: str

    def __post_init__(self) -> None:
        _require_text(self, self.data)


@dataclass(frozen=True, eq=False)
class Image(Loggable):
    """One image, or several images of the same size.

    Args:
        data: `uint8[...]` from 0 to 255, or `float[...]` from 0 to 1, of shape `[h, w]`, `[h, w, c]` or
            `[n, h, w, c]`, with 1, 3 (RGB) or 4 (RGBA) channels. Stored as `uint8[n, h, w, c]`.

    Raises:
        DeclarationError: The dtype, the shape or the range is different.

    Example:
        >>> import numpy as np
        >>> Image(np.full((2, 5), 0.5)).data.shape
        (1, 2, 5, 1)
    """

    data: Any

    def __post_init__(self) -> None:
        import numpy as np

        array = _array(self.data, "An image")
        given = f"{array.dtype} of shape {array.shape}"
        if array.ndim not in (2, 3, 4) or not array.size or (array.ndim > 2 and array.shape[-1] not in _CHANNELS):
            raise DeclarationError(
                f"An image has the shape [h, w], [h, w, c] or [n, h, w, c] with 1, 3 or 4 channels, not {given}.",
                fix="for several images of one channel, add an axis: `images[..., None]`",
            )
        if array.dtype != np.uint8:
            if array.dtype.kind != "f":
                raise DeclarationError(
                    f"An image is uint8 (0 to 255) or floating point (0 to 1), not {given}.",
                    fix="`image.astype(numpy.uint8)`",
                )
            lowest, highest = float(array.min()), float(array.max())
            if not (lowest >= 0 and highest <= 1):  # also true for NaN
                raise DeclarationError(
                    f"A floating-point image has values from 0 to 1, not from {lowest:g} to {highest:g}.",
                    fix=["scale it", "pass values from 0 to 255 as uint8"],
                )
            array = np.rint(array * 255).astype(np.uint8)
        array = array[..., None] if array.ndim == 2 else array
        object.__setattr__(self, "data", _frozen(array[None] if array.ndim == 3 else array))


@dataclass(frozen=True, eq=False)
class Audio(Loggable):
    """An audio clip.

    Args:
        data: `float[samples]` or `float[samples, channels]` from -1 to 1, with 1 or 2 channels. Stored as
            `float32[samples, channels]`.
        rate: Samples per second (Hz).

    Raises:
        DeclarationError: The dtype, the shape or the range is different, or `rate` is not a positive integer.
    """

    data: Any
    rate: int

    def __post_init__(self) -> None:
        import numpy as np

        array = _array(self.data, "Audio")
        if array.ndim not in (1, 2) or not array.size or array.dtype.kind != "f" or array.shape[1:] not in _SOUNDS:
            raise DeclarationError(
                "Audio is floating point of shape [samples] or [samples, channels] with 1 or 2 channels, "
                f"not {array.dtype} of shape {array.shape}.",
                fix="`samples.astype(numpy.float32) / 32768` for 16-bit samples",
            )
        loudest = float(np.abs(array).max())
        if not loudest <= 1:
            raise DeclarationError(
                f"Audio has values from -1 to 1, but the largest magnitude is {loudest:g}.", fix="scale it"
            )
        object.__setattr__(self, "data", _frozen(array.reshape(len(array), -1).astype(np.float32)))
        object.__setattr__(self, "rate", positive(self.rate, "The rate of audio (Hz)"))


_SOUNDS = ((), (1,), (2,))


@dataclass(frozen=True, eq=False)
class Histogram(Loggable):
    """The number of values in each bin. `Histogram.of(values)` counts them.

    Args:
        counts: `float[bins]`, not negative.
        edges: `float[bins + 1]`, increasing.

    Raises:
        DeclarationError: The two do not match, or violate these conditions.

    Example:
        >>> import numpy as np
        >>> found = Histogram.of(np.array([0.0, 0.2, 1.0]), bins=2)
        >>> found.counts.tolist(), found.edges.tolist()
        ([2.0, 1.0], [0.0, 0.5, 1.0])
    """

    counts: Any
    edges: Any

    def __post_init__(self) -> None:
        import numpy as np

        counts, edges = (_array(given, "A histogram") for given in (self.counts, self.edges))
        for array in (counts, edges):
            if array.dtype.kind not in "biuf" or array.ndim != 1:
                raise DeclarationError(
                    f"A histogram has a vector of counts and one of edges, not {array.dtype} of shape {array.shape}.",
                    fix="pass what `numpy.histogram(values)` returns",
                )
        counts, edges = counts.astype(np.float64), edges.astype(np.float64)
        if not len(counts) or len(edges) != len(counts) + 1:
            raise DeclarationError(
                f"A histogram of {len(counts)} counts has one edge more than counts, not {len(edges)}.",
                fix="pass what `numpy.histogram(values)` returns",
            )
        if not (np.isfinite(edges).all() and (edges[1:] > edges[:-1]).all() and (counts >= 0).all()):
            raise DeclarationError(
                "A histogram has increasing, finite edges and counts that are not negative.",
                fix="pass what `numpy.histogram(values)` returns",
            )
        object.__setattr__(self, "counts", _frozen(counts))
        object.__setattr__(self, "edges", _frozen(edges))

    @classmethod
    def of(cls, values: Any, bins: int = 64) -> Histogram:
        """Count values in bins of equal width. Values that are not finite are ignored.

        Args:
            values: Numbers, of any shape.
            bins: Number of bins.
        """
        import numpy as np

        array = _array(values, "A histogram")
        if array.dtype.kind not in "biuf":
            raise DeclarationError(
                f"A histogram counts real numbers, not {array.dtype}.", fix="pass its real part or its magnitude"
            )
        numbers = array.astype(np.float64).ravel()
        numbers = numbers[np.isfinite(numbers)]
        try:
            with np.errstate(all="raise", under="ignore"):
                counts, edges = np.histogram(numbers, positive(bins, "`bins` of a histogram"))
        except (ValueError, FloatingPointError):  # the range is too small or too large for this many bins in float64
            counts, edges = np.array([len(numbers)]), _around(numbers.min(), numbers.max())
        return cls(counts, edges)


@dataclass(frozen=True)
class File(Loggable):
    """A file that is stored with the log.

    Args:
        data: Path of the file.

    Raises:
        DeclarationError: The file does not exist.
    """

    data: Path

    def __post_init__(self) -> None:
        if not isinstance(self.data, str | os.PathLike):
            raise DeclarationError(f"`File` takes a path, not {self.data!r}.", fix='write e.g. `File("model.txt")`')
        path = Path(self.data)
        if why_impossible(path) or not path.is_file():
            raise DeclarationError(
                f"There is no file at {path}.",
                fix=fix_of_path(path, "write the file before you log it"),
            )
        object.__setattr__(self, "data", path)


def _number(value: Any) -> float:
    shape = getattr(value, "shape", ())
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    if shape == () and kind not in "cSUO" and not isinstance(value, str | bytes | complex):
        try:
            return float(value)
        except TypeError as error:
            if "trace" in str(error).lower():
                raise DeclarationError(
                    f"A value to log must be a number, not {value!r}.",
                    why="values are not known yet inside a traced handler",
                    fix="log it from a host handler, e.g. at StepEnd",
                ) from None
    what = f"an array of shape {shape}" if shape else f"{type(value).__name__} {value!r}"
    raise DeclarationError(
        f"A value to log must be one number, not {what}.",
        fix="reduce it, e.g. with `.mean()`, or log it with `put_histogram`" if shape else "pass an int or a float",
    )


def _require_text(loggable: Loggable, data: Any) -> None:
    if not isinstance(data, str):
        raise DeclarationError(
            f"`{type(loggable).__name__}` takes a str, not {type(data).__name__} {data!r}.",
            fix="write `str(...)` of it",
        )


def _around(low: Any, high: Any) -> Any:
    """Return two edges that enclose these numbers."""
    import numpy as np

    most = np.finfo(np.float64).max
    return np.clip([np.nextafter(low, -np.inf), np.nextafter(high, np.inf)], -most, most)


def _array(value: Any, what: str) -> Any:
    """Return a new NumPy array. bfloat16 and similar dtypes become float32, which NumPy supports."""
    import numpy as np

    try:
        array = np.array(value)
    except Exception as error:
        raise DeclarationError(
            f"{what} takes an array, not {type(value).__name__}: {error}", fix="pass an array"
        ) from error
    if array.dtype.kind == "V" and array.dtype.names is None:
        array = array.astype(np.float32)
    if array.dtype.kind in "OSU":
        raise DeclarationError(
            f"{what} takes numbers, not {type(value).__name__} {value!r}.", fix="pass an array of numbers"
        )
    return array


def _frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array
