"""`CometBackend`: logs to a Comet experiment."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fluxcb._declare.extras import library
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.encoding import png_of, wav_of
from fluxcb.logging.loggables import Audio, File, Graph, Histogram, Image, Loggable, Text, Value

__all__ = ["CometBackend"]


class CometBackend(LoggerBackend):
    """Log to a Comet experiment, online or offline.

    Texts and graphs are stored as texts that begin with their names. A resumed run continues under the same key. Values
    that were logged after its checkpoint remain, because the service cannot delete them.

    Args:
        project_name: The project, or None for Comet's default.
        offline_directory: Directory in which to store the experiment for a later upload, instead of sending it.
        **options: Other arguments of `comet_ml.Experiment` (or `OfflineExperiment`), such as `api_key` and `workspace`.

    Raises:
        DeclarationError: comet-ml is not installed.

    Source:
        tensorpack, `CometMLMonitor`.
    """

    loggables = (Value, Text, Image, Audio, Histogram, Graph, File)

    def __init__(
        self, project_name: str | None = None, *, offline_directory: str | None = None, **options: Any
    ) -> None:
        self._comet = library("comet_ml", extra="comet", owner="CometBackend")
        self.name = f"CometBackend({project_name!r})"
        self._options = {"project_name": project_name, **options}
        self._folder = offline_directory
        self._experiment: Any = None
        self._key: str | None = None
        self._url: Path | str | None = None

    def output_locations(self) -> Iterable[Path | str]:
        """Return the address of the experiment, or the directory of an offline experiment."""
        return () if self._url is None else (self._url,)

    def open(self, *, resumes: bool) -> None:
        """Start an experiment, or continue it."""
        comet, options = self._comet, self._options
        continues = resumes and self._key is not None
        if self._folder is not None:
            options = {**options, "offline_directory": self._folder}
        if continues and self._folder is not None:
            self._experiment = comet.ExistingOfflineExperiment(previous_experiment=self._key, **options)
        elif continues:
            self._experiment = comet.ExistingExperiment(previous_experiment=self._key, **options)
        else:
            create = comet.Experiment if self._folder is None else comet.OfflineExperiment
            self._experiment = create(**options)
        self._key = self._experiment.get_key()
        self._url = Path(self._folder) if self._folder is not None else self._experiment.url

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Log one value, which comet-ml sends in the background."""
        experiment = self._experiment
        match loggable:
            case Value(data):
                experiment.log_metric(name, data, step=step, epoch=epoch)
            case Text(data) | Graph(data):
                experiment.log_text(f"{name}: {data}", step=step)
            case Image():
                experiment.log_image(io.BytesIO(png_of(loggable)), name=name, step=step)
            case Audio():
                sound = io.BytesIO(wav_of(loggable))
                experiment.log_asset(sound, file_name=f"{name}_{step}.wav", step=step)
            case Histogram():
                middles = (loggable.edges[:-1] + loggable.edges[1:]) / 2
                counted = self._comet.Histogram()
                counted.add(middles.tolist(), loggable.counts.tolist())
                experiment.log_histogram_3d(counted, name=name, step=step, epoch=epoch)
            case File(data):
                experiment.log_asset(str(data), file_name=name, step=step)

    def end_epoch(self, epoch: int) -> None:
        """Log the number of the epoch."""
        self._experiment.log_epoch_end(epoch)

    def close(self) -> None:
        """End the experiment."""
        if self._experiment is not None:
            experiment, self._experiment = self._experiment, None
            experiment.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the key of the experiment."""
        return {"key": self._key} if self._key is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the key of the experiment."""
        self._key = state.get("key")
