import io
import struct
import wave
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb.logging import Audio, File, Graph, Histogram, Image, Text, Value
from fluxcb.logging.encoding import png_of, wav_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (2, 2.0),
        (True, 1.0),
        (0.1, 0.1),
        (np.float32(0.1), 0.10000000149011612),
        (np.array(3), 3.0),
        (jnp.float32(0.5), 0.5),
        (jnp.array(7), 7.0),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (float("inf"), float("inf")),
    ],
)
def test_numbers_become_floats(given, expected):
    data = Value(given).data
    assert type(data) is float
    assert data == expected


def test_nan_is_a_number():
    assert np.isnan(Value(np.nan).data)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (np.ones(2), "an array of shape (2,)"),
        (np.ones(1), "an array of shape (1,)"),
        (jnp.ones((1, 3)), "an array of shape (1, 3)"),
        ("3", "str '3'"),
        (b"3", "bytes b'3'"),
        (None, "NoneType None"),
        (1j, "complex 1j"),
        (np.complex64(1), "complex64 np.complex64(1+0j)"),
        ([1.0], "list [1.0]"),
    ],
)
def test_what_is_no_number_is_refused(given, what):
    with pytest.raises(DeclarationError) as error:
        Value(given)
    assert error.value.what == f"A value to log must be one number, not {what}."


def test_a_traced_value_is_refused():
    with pytest.raises(DeclarationError) as error:
        jax.jit(lambda x: Value(x).data)(1.0)
    assert error.value.fix == ("log it from a host handler, e.g. at StepEnd",)


@pytest.mark.parametrize("kind", [Text, Graph])
def test_texts_are_texts(kind):
    assert kind("digraph {}").data == "digraph {}"
    with pytest.raises(DeclarationError) as error:
        kind(3)
    assert str(error.value) == f"`{kind.__name__}` takes a str, not int 3.\n  fix:   write `str(...)` of it"


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((2, 3), (1, 2, 3, 1)),
        ((2, 3, 1), (1, 2, 3, 1)),
        ((2, 5, 4), (1, 2, 5, 4)),
        ((6, 2, 5, 3), (6, 2, 5, 3)),
    ],
)
def test_images_have_one_form(shape, kept):
    pixels = np.arange(np.prod(shape)).reshape(shape).astype(np.uint8)
    image = Image(pixels).data
    assert (image.shape, image.dtype) == (kept, np.uint8)
    np.testing.assert_array_equal(image.ravel(), pixels.ravel())
    pixels[:] = 0  # the caller's array may be used again
    assert image.any()
    with pytest.raises(ValueError, match="read-only"):
        image[:] = 0


def test_floating_point_images_are_scaled():
    assert Image(jnp.array([[0.0, 0.5, 1.0]], jnp.bfloat16)).data.ravel().tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            np.zeros((2, 5, 2)),
            "An image has the shape [h, w], [h, w, c] or [n, h, w, c] with 1, 3 or 4 channels, "
            "not float64 of shape (2, 5, 2).",
        ),
        (
            np.zeros(3),
            "An image has the shape [h, w], [h, w, c] or [n, h, w, c] with 1, 3 or 4 channels, "
            "not float64 of shape (3,).",
        ),
        (
            np.zeros((0, 3)),
            "An image has the shape [h, w], [h, w, c] or [n, h, w, c] with 1, 3 or 4 channels, "
            "not float64 of shape (0, 3).",
        ),
        (
            np.zeros((2, 2), int),
            "An image is uint8 (0 to 255) or floating point (0 to 1), not int64 of shape (2, 2).",
        ),
        (np.full((2, 2), 255.0), "A floating-point image has values from 0 to 1, not from 255 to 255."),
        (np.full((2, 2), np.nan), "A floating-point image has values from 0 to 1, not from nan to nan."),
        ("cat.png", "An image takes numbers, not str 'cat.png'."),
    ],
)
def test_what_is_no_image_is_refused(given, what):
    with pytest.raises(DeclarationError) as error:
        Image(given)
    assert error.value.what == what


def test_sounds_have_one_form():
    assert Audio(np.zeros(5), 8000).data.shape == (5, 1)
    sound = Audio(np.full((5, 2), -1.0), 8000)
    assert (sound.data.shape, sound.data.dtype, sound.rate) == ((5, 2), np.float32, 8000)


@pytest.mark.parametrize(
    ("data", "rate", "what"),
    [
        (
            np.zeros((5, 3)),
            8000,
            "Audio is floating point of shape [samples] or [samples, channels] with 1 or 2 channels, "
            "not float64 of shape (5, 3).",
        ),
        (
            np.zeros(5, np.int16),
            8000,
            "Audio is floating point of shape [samples] or [samples, channels] with 1 or 2 channels, "
            "not int16 of shape (5,).",
        ),
        (np.array([0.0, -1.5]), 8000, "Audio has values from -1 to 1, but the largest magnitude is 1.5."),
        (np.array([0.0, np.nan]), 8000, "Audio has values from -1 to 1, but the largest magnitude is nan."),
        (np.zeros(5), 0, "The rate of audio (Hz) must be a whole number of at least 1, not 0."),
    ],
)
def test_what_is_no_sound_is_refused(data, rate, what):
    with pytest.raises(DeclarationError) as error:
        Audio(data, rate)
    assert error.value.what == what


def test_histograms_count_what_is_finite():
    found = Histogram.of(jnp.array([[0.0, 1.0], [jnp.nan, 4.0]]), bins=4)
    assert (found.counts.tolist(), found.edges.tolist()) == ([1, 1, 0, 1], [0, 1, 2, 3, 4])
    assert Histogram.of(np.array([np.nan]), bins=2).counts.tolist() == [0, 0]
    assert Histogram.of(np.array([], np.float32)).counts.sum() == 0


@pytest.mark.parametrize("values", [[1.0, 1.0 + 2**-52], [-1.7e308, 1.7e308], [5e-324, 1e-323]])
def test_histograms_of_extreme_values_are_there(values):
    found = Histogram.of(np.array(values))
    assert found.counts.sum() == 2
    assert found.edges[0] <= values[0]
    assert found.edges[-1] >= values[1]


@pytest.mark.parametrize(
    ("counts", "edges", "what"),
    [
        ([1, 2], [0, 1], "A histogram of 2 counts has one edge more than counts, not 2."),
        ([], [0], "A histogram of 0 counts has one edge more than counts, not 1."),
        ([1], [1, 1], "A histogram has increasing, finite edges and counts that are not negative."),
        ([-1], [0, 1], "A histogram has increasing, finite edges and counts that are not negative."),
        ([1], [0, np.inf], "A histogram has increasing, finite edges and counts that are not negative."),
        ([[1]], [0, 1], "A histogram has a vector of counts and one of edges, not int64 of shape (1, 1)."),
    ],
)
def test_counts_and_edges_must_fit(counts, edges, what):
    with pytest.raises(DeclarationError) as error:
        Histogram(counts, edges)
    assert error.value.what == what


def test_histograms_count_real_numbers():
    with pytest.raises(
        DeclarationError,
        match=r"^A histogram counts real numbers, not complex128\.\n  fix:   pass its real part or its magnitude$",
    ):
        Histogram.of(np.array([1j]))


def test_files_exist(tmp_path):
    path = tmp_path / "model.txt"
    with pytest.raises(DeclarationError, match=r"^There is no file at .*model\.txt\."):
        File(path)
    path.write_text("x")
    assert File(str(path)).data == path


def unpacked(png):
    """Return the pixels of a PNG without interlacing or filters: [height, width, channels]."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", body)
            assert (depth, rest) == (8, [0, 0, 0])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_has_the_pixels(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 7, channels)).astype(np.uint8)
    np.testing.assert_array_equal(unpacked(png_of(Image(pixels))), np.concatenate(list(pixels), axis=1))


def test_wav_has_the_samples():
    with wave.open(io.BytesIO(wav_of(Audio(np.array([[0.0, 1.0], [-1.0, 0.5]]), 8000)))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth(), file.getnframes()) == (2, 8000, 2, 2)
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [0, 32767, -32767, 16384]
