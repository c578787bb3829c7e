"""`WandbBackend`: a run of Weights & Biases."""

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
    """Log to a run of Weights & Biases, online or offline.

    Charts have the training step on their axis; `step` and `epoch` are logged beside the values. A run that resumes
    goes on under the same id; what was logged after its checkpoint stays, because the service takes nothing back.

    Args:
        project: The project, or None for wandb's default.
        **init: Whatever else `wandb.init` takes: `name`, `config`, `mode="offline"`, `dir`.

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
        """Begin a run, or go on with it."""
        going_on = {"id": self._id, "resume": "allow"} if resumes and self._id is not None else {}
        self._run = self._wandb.init(**{**self._init, **going_on})
        self._id, self._url = self._run.id, self._run.url  # an offline run has no address
        self._sounds = tempfile.TemporaryDirectory()
        # The service's own count must not go back, which a resumed run's step does.
        self._run.define_metric("*", step_metric="step")

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Add something to its step's row; a file is kept with the run's files."""
        if isinstance(loggable, File):
            self._run.save(str(loggable.data.resolve()), base_path=str(loggable.data.resolve().parent), policy="now")
        else:
            self._rows.add(name, self._converted(loggable), step=step, epoch=epoch, seconds=seconds)

    def _converted(self, loggable: Loggable) -> Any:
        if isinstance(loggable, Histogram):
            return self._wandb.Histogram(np_histogram=(loggable.counts.tolist(), loggable.edges.tolist()))
        if isinstance(loggable, Image):
            return [self._wandb.Image(one[..., 0] if one.shape[-1] == 1 else one) for one in loggable.data]
        if isinstance(loggable, Audio):  # from a file: of an array, wandb makes one with another library
            path = Path(self._sounds.name, f"{len(os.listdir(self._sounds.name))}.wav")
            path.write_bytes(wav_of(loggable))
            return self._wandb.Audio(str(path))
        return getattr(loggable, "data", None)

    def flush(self) -> None:
        """Log the rows; wandb sends them in the background."""
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
        """Return the run's id."""
        return {"id": self._id} if self._id is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the run's id back."""
        self._id = state.get("id")
