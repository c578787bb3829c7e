"""`CometBackend`: an experiment of Comet."""

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
    """Log to an experiment of Comet, online or offline.

    Texts and graphs are kept as texts, each behind its name. A run that resumes goes on under the same key; what was
    logged after its checkpoint stays, because the service takes nothing back.

    Args:
        project_name: The project, or None for Comet's default.
        offline_directory: Where to keep the experiment for a later upload, instead of sending it.
        **options: Whatever else `comet_ml.Experiment` (or `OfflineExperiment`) takes: `api_key`, `workspace`.

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
        """Begin an experiment, or go on with it."""
        comet, options = self._comet, self._options
        goes_on = resumes and self._key is not None
        if self._folder is not None:
            options = {**options, "offline_directory": self._folder}
        if goes_on and self._folder is not None:
            self._experiment = comet.ExistingOfflineExperiment(previous_experiment=self._key, **options)
        elif goes_on:
            self._experiment = comet.ExistingExperiment(previous_experiment=self._key, **options)
        else:
            made = comet.Experiment if self._folder is None else comet.OfflineExperiment
            self._experiment = made(**options)
        self._key = self._experiment.get_key()
        self._url = Path(self._folder) if self._folder is not None else self._experiment.url

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Log one thing; comet-ml sends it in the background."""
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
        """Note the epoch."""
        self._experiment.log_epoch_end(epoch)

    def close(self) -> None:
        """End the experiment."""
        if self._experiment is not None:
            experiment, self._experiment = self._experiment, None
            experiment.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the experiment's key."""
        return {"key": self._key} if self._key is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the experiment's key back."""
        self._key = state.get("key")
