"""`WandbBackend`: logs to a Weights & Biases run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fluxcb._declare.extras import library
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.encoding import wav_of
from fluxcb.logging.loggables import Audio, File, Graph, Histogram, Image, Loggable, Text, Value
from fluxcb.logging.rows import Rows

__all__ = ["WandbBackend"]


class WandbBackend(LoggerBackend):
    """Log to a Weights & Biases run, online or offline.

    Charts have the training step on their horizontal axis. `step` and `epoch` are logged together with the values. A
    resumed run continues under the same id. Values that were logged after its checkpoint remain, because the service
    cannot delete them.

    Args:
        project: The project, or None for the default of wandb.
        **init: Other arguments of `wandb.init`, such as `name`, `config`, `mode="offline"` and `dir`.

    Raises:
        DeclarationError: wandb is not installed.
    """

    loggables = (Value, Text, Image, Audio, Histogram, Graph, File)

    def __init__(self, project: str | None = None, **init: Any) -> None:
        self._wandb = library("wandb", extra="wandb", owner="WandbBackend")
        self.name = f"WandbBackend({project!r})"
        self._init = {"project": project, **init}
        self._rows = Rows()
        self._run: Any = None
        self._id: str | None = None
        self._url: str | None = None
        self._sounds: Any = None

    def output_locations(self) -> Iterable[Path | str]:
        """Return the address of the run."""
        return () if self._url is None else (self._url,)

    def open(self, *, resumes: bool) -> None:
        """Start a run, or continue it."""
        going_on = {"id": self._id, "resume": "allow"} if resumes and self._id is not None else {}
        self._run = self._wandb.init(**{**self._init, **going_on})
        self._id, self._url = self._run.id, self._run.url  # an offline run has no address
        self._sounds = tempfile.TemporaryDirectory()
        # Log the step as a value, because the service's own step counter must not decrease, as it does after a resume.
        self._run.define_metric("*", step_metric="step")

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Add a value to the row of its step. A file is stored with the files of the run."""
        if isinstance(loggable, File):
            self._run.save(str(loggable.data.resolve()), base_path=str(loggable.data.resolve().parent), policy="now")
        else:
            self._rows.add(name, self._converted(loggable), step=step, epoch=epoch, seconds=seconds)

    def _converted(self, loggable: Loggable) -> Any:
        if isinstance(loggable, Histogram):
            return self._wandb.Histogram(np_histogram=(loggable.counts.tolist(), loggable.edges.tolist()))
        if isinstance(loggable, Image):
            return [self._wandb.Image(one[..., 0] if one.shape[-1] == 1 else one) for one in loggable.data]
        if isinstance(loggable, Audio):  # as a file, because wandb needs another library for arrays
            path = Path(self._sounds.name, f"{len(os.listdir(self._sounds.name))}.wav")
            path.write_bytes(wav_of(loggable))
            return self._wandb.Audio(str(path))
        return getattr(loggable, "data", None)

    def flush(self) -> None:
        """Log the rows, which wandb sends in the background."""
        for row in self._rows.take():
            del row["time"]
            self._run.log(row)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
            self._sounds.cleanup()

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"id": self._id} if self._id is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the id of the run."""
        self._id = state.get("id")
