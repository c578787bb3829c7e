"""`TensorBoardBackend`: event files for TensorBoard."""

from __future__ import annotations

import os
import re
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
from fluxcb.logging.record_file import RecordFile, checked_path, locations, unused_path

__all__ = ["TensorBoardBackend"]

_PATTERN = "events.out.tfevents.*"
_STAMP = re.compile(r"events\.out\.tfevents\.([0-9]{1,10})")


class TensorBoardBackend(LoggerBackend):
    """Write event files for TensorBoard. Show them with `tensorboard --logdir FOLDER`.

    Numbers are stored as float32, as in TensorBoard itself. Graphs are shown as text.

    A resumed run writes a new file to the folder. The older files are truncated to their sizes at the checkpoint, and
    the new file instructs TensorBoard to drop later steps. If a new run finds event files with values, it first
    moves them to a subfolder, for example `run-1`, which TensorBoard shows as another run.

    The events use tensorboardX's message classes, but are written in the thread of the handler. The writer of
    tensorboardX 2.6 has its own thread, which dies when the disk is full, and then flushing never returns.

    Args:
        folder: The folder, one per run.
        append: Whether a new run may write to a folder that has event files.

    Raises:
        DeclarationError: tensorboardX is not installed, or the folder cannot be written.

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
        self._restored: dict[str, Any] = {}
        self._starts_anew = False
        self._previous: Path | None = None

    def output_locations(self) -> Iterable[Path | str]:
        """Return the path of the folder."""
        return locations(self.folder, self._previous)

    def open(self, *, resumes: bool) -> None:
        """Start a new file; see `LoggerBackend`."""
        another = not self._append and (self._starts_anew or not resumes)
        self._starts_anew = another and any(map(_has_values, self.folder.glob(_PATTERN)))
        if not self._starts_anew:  # otherwise the first value starts it, so that a run that fails earlier moves nothing
            self._begin()

    def _begin(self) -> None:
        """Start a new file, after moving another run's files."""
        if self._starts_anew:
            self._starts_anew, self._previous = False, _moved(self.folder)
        restored, self._restored = self._restored, {}
        for name, size in restored.get("files", {}).items():
            path = self.folder / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        self._file = RecordFile(self._next_path(), owner=self.name)
        self._file.open(resumes=False)
        now = time.time()
        self._events.insert(0, self._event.Event(wall_time=now, file_version="brain.Event:2"))
        if restored:
            self._next_step = int(restored["next_step"])
            started = self._event.SessionLog(status=self._event.SessionLog.START)
            self._events.append(self._event.Event(wall_time=now, step=self._next_step, session_log=started))
        self._write()

    def _next_path(self) -> Path:
        # TensorBoard reads the files of a folder in the order of their names, which begin with a time. The clock may
        # have been set back since the last file was created, so the new name also has to sort after all others.
        stamps = [int(match[1]) for path in self.folder.glob(_PATTERN) if (match := _STAMP.match(path.name))]
        stamp = max([int(time.time()), *(stamp + 1 for stamp in stamps)])
        return self.folder / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}"

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Add an event for the value."""
        values = [self._summary.Summary.Value(**parts) for parts in self._values(_in_utf8(name), loggable)]
        summary = self._summary.Summary(value=values)
        self._events.append(self._event.Event(wall_time=seconds, step=step, summary=summary))
        self._next_step = max(self._next_step, step + 1)

    def _values(self, name: str, loggable: Loggable) -> list[dict[str, Any]]:
        """Return the fields of the summary's values. Several images have several values."""
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
            "tensor": {
                "dtype": "DT_STRING",
                "string_val": [_in_utf8(text).encode()],
                "tensor_shape": {"dim": [{"size": 1}]},
            },
        }

    def _histogram(self, histogram: Histogram) -> Any:
        counts, edges = histogram.counts, histogram.edges
        middles = (edges[:-1] + edges[1:]) / 2
        # TensorBoard stores only the right edge of each bucket. An empty first bucket provides the first left edge.
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
        """Append the events to the file in one write."""
        if self._starts_anew and self._events:
            self._begin()
        self._write()

    def _write(self) -> None:
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
        """Return the sizes of the event files (bytes) and the first step after them, or that there is no value yet."""
        if self._starts_anew:
            return {"starts_anew": True}
        if self._file is None:
            return {}
        files = {path.name: path.stat().st_size for path in sorted(self.folder.glob(_PATTERN))}
        return {"next_step": self._next_step, "files": files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the sizes to which the next `open` truncates the files."""
        self._starts_anew = state.get("starts_anew", False)
        self._restored = {} if self._starts_anew else dict(state)


def _has_values(path: Path) -> bool:
    """Return whether an event file has more than its first event, which is written when the file is created."""
    with path.open("rb") as file:
        head = file.read(8)
    return len(head) == 8 and path.stat().st_size > struct.unpack("<Q", head)[0] + 16


def _moved(folder: Path) -> Path:
    """Move the event files of a folder to the first unused subfolder of `run-1`, `run-2`, ..."""
    unused = unused_path(lambda number: folder / f"run-{number}")
    unused.mkdir()
    for path in folder.glob(_PATTERN):
        path.rename(unused / path.name)
    return unused


def _in_utf8(text: str) -> str:
    """Escape characters that UTF-8 cannot encode, such as those for the bytes of a file name in another encoding."""
    return text.encode("utf-8", "backslashreplace").decode()
