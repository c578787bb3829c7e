"""`TensorBoardBackend`: event files for TensorBoard."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fluxcb._declare.extras import library
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.encoding import png_of, wav_of
from fluxcb.logging.loggables import Audio, Graph, Histogram, Image, Loggable, Text, Value
from fluxcb.logging.record_file import RecordFile, checked_path, refuse_to_overwrite

__all__ = ["TensorBoardBackend"]

_PATTERN = "events.out.tfevents.*"


class TensorBoardBackend(LoggerBackend):
    """Write event files that TensorBoard shows: `tensorboard --logdir FOLDER`.

    Numbers are kept in float32, as TensorBoard does. Graphs are shown as text.

    A run that resumes begins another file in the folder. The older ones are cut back to what they held when the
    checkpoint was written, and TensorBoard is told to forget later steps. A new run does not write to a folder that has
    event files.

    The events are made with tensorboardX's message classes, and written in the handler's own thread: its writer has
    one of its own, which dies when the disk is full, whereupon flushing never returns (tensorboardX 2.6).

    Args:
        folder: The folder, one per run.
        append: Whether a new run may write to a folder that has event files.

    Raises:
        DeclarationError: tensorboardX is not installed; it cannot be written there; or, when it is opened, there are
            event files of another run.

    Source:
        FluxTraining.jl, `TensorBoardBackend`; tensorpack, `TFEventWriter`.
    """

    loggables = (Value, Text, Image, Audio, Histogram, Graph)

    def __init__(self, folder: str | os.PathLike[str], *, append: bool = False) -> None:
        self.name = f"TensorBoardBackend({str(folder)!r})"
        self._event = library("tensorboardX.proto.event_pb2", extra="tensorboard", owner="TensorBoardBackend")
        self._summary = library("tensorboardX.proto.summary_pb2", extra="tensorboard", owner="TensorBoardBackend")
        self._checksum = library(
            "tensorboardX.record_writer", extra="tensorboard", owner="TensorBoardBackend"
        ).masked_crc32c
        self._append = append
        self.folder = checked_path(folder, owner=self.name, folder=True)
        self._file: RecordFile | None = None
        self._events: list[Any] = []
        self._next_step = 0
        self._kept: dict[str, Any] = {}

    def output_locations(self) -> Iterable[Path | str]:
        """Return the folder."""
        return (self.folder,)

    def open(self, *, resumes: bool) -> None:
        """Begin a file; see `LoggerBackend`."""
        if not (resumes or self._append) and any(self.folder.glob(_PATTERN)):
            refuse_to_overwrite(self.folder, self.name)
        kept, self._kept = self._kept, {}
        for name, size in kept.get("files", {}).items():
            path = self.folder / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        self._file = RecordFile(self._unused_path(), owner=self.name)
        self._file.open(resumes=False)
        now = time.time()
        self._events.append(self._event.Event(wall_time=now, file_version="brain.Event:2"))
        if kept:
            self._next_step = int(kept["next_step"])
            started = self._event.SessionLog(status=self._event.SessionLog.START)
            self._events.append(self._event.Event(wall_time=now, step=self._next_step, session_log=started))
        self.flush()

    def _unused_path(self) -> Path:
        # TensorBoard reads a folder's files in the order of their names.
        for number in range(10_000):
            path = self.folder / f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}"
            if not path.exists():
                return path
        raise FileExistsError(f"there are too many event files in {self.folder}")

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Make an event."""
        values = [self._summary.Summary.Value(**parts) for parts in self._values(name, loggable)]
        summary = self._summary.Summary(value=values)
        self._events.append(self._event.Event(wall_time=seconds, step=step, summary=summary))
        self._next_step = max(self._next_step, step + 1)

    def _values(self, name: str, loggable: Loggable) -> list[dict[str, Any]]:
        """Return the fields of the summary's values, of which several images have several."""
        made = self._summary.Summary
        match loggable:
            case Value(data):
                return [{"tag": name, "simple_value": data}]
            case Text(data):
                return [self._text(name, data)]
            case Graph(data):
                return [self._text(name, f"```\n{data}\n```")]
            case Histogram():
                return [{"tag": name, "histo": self._histogram(loggable)}]
            case Audio():
                wave = made.Audio(
                    sample_rate=loggable.rate,
                    num_channels=loggable.data.shape[1],
                    length_frames=len(loggable.data),
                    encoded_audio_string=wav_of(loggable),
                    content_type="audio/wav",
                )
                return [{"tag": name, "audio": wave}]
            case Image():
                number, height, width, channels = loggable.data.shape
                size = {"height": height, "width": width, "colorspace": channels}
                return [
                    {
                        "tag": name if number == 1 else f"{name}/{i}",
                        "image": made.Image(**size, encoded_image_string=png_of(Image(one))),
                    }
                    for i, one in enumerate(loggable.data)
                ]
        raise TypeError(f"{type(loggable).__name__} is not among its loggables")

    def _text(self, name: str, text: str) -> dict[str, Any]:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return {
            "tag": name,
            "metadata": self._summary.SummaryMetadata(plugin_data=plugin),
            "tensor": {"dtype": "DT_STRING", "string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}},
        }

    def _histogram(self, histogram: Histogram) -> Any:
        counts, edges = histogram.counts, histogram.edges
        middles = (edges[:-1] + edges[1:]) / 2
        # A first empty bucket, so that each other one has a left edge: a bucket is given by its right one.
        return self._summary.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=counts.sum(),
            sum=counts @ middles,
            sum_squares=counts @ middles**2,
            bucket_limit=edges.tolist(),
            bucket=[0.0, *counts.tolist()],
        )

    def flush(self) -> None:
        """Append the events to the file, in one write."""
        events, self._events = self._events, []
        if events and self._file is not None:
            self._file.write(b"".join(self._record(event.SerializeToString()) for event in events))

    def _record(self, data: bytes) -> bytes:
        length = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        return length + checks[0] + data + checks[1]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes of the event files (bytes), and the first step that none of them has."""
        if self._file is None:
            return {}
        files = {path.name: path.stat().st_size for path in sorted(self.folder.glob(_PATTERN))}
        return {"next_step": self._next_step, "files": files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what the files are to be cut back to."""
        self._kept = dict(state)
