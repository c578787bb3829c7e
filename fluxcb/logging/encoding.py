"""Encoding of images as PNG and audio as WAV with the standard library."""

from __future__ import annotations

import io
import struct
import wave
import zlib

from fluxcb.logging.loggables import Audio, Image

__all__ = ["png_of", "wav_of"]

_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # by channels: grey, RGB, RGBA


def png_of(image: Image) -> bytes:
    """Return an image as a PNG file. Several images are placed side by side."""
    import numpy as np

    tiled = np.concatenate(list(image.data), axis=1)
    height, width, channels = tiled.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    # Each row begins with the number of its filter; 0 is none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), tiled.reshape(height, -1)], axis=1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def wav_of(audio: Audio) -> bytes:
    """Return audio as a WAV file of 16-bit samples."""
    import numpy as np

    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(audio.data.shape[1])
        file.setsampwidth(2)
        file.setframerate(audio.rate)
        file.writeframes(np.rint(audio.data * 32767).astype("<i2").tobytes())
    return out.getvalue()
