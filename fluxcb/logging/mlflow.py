"""`MLflowBackend`: a run of MLflow."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from fluxcb._declare.extras import library
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.encoding import png_of, wav_of
from fluxcb.logging.loggables import Audio, File, Graph, Image, Loggable, Text, Value

__all__ = ["MLflowBackend"]

_BATCH = 1000  # what the tracking API takes at once
_FORBIDDEN = re.compile(r"[^\w./ -]", re.ASCII)


class MLflowBackend(LoggerBackend):
    """Log to a run of MLflow: numbers as metrics, everything else as artifacts `NAME/STEP.EXTENSION`.

    Characters that MLflow has no place for in names become `_`. A run that resumes goes on under the same id; what was
    logged after its checkpoint stays, because the service takes nothing back.

    Args:
        experiment: The experiment's name; made if there is none.
        run_name: The run's name, or None for one that MLflow invents.
        tracking_uri: The server, or a database: `sqlite:///mlflow.db`; None for MLflow's default.

    Raises:
        DeclarationError: mlflow (or mlflow-skinny) is not installed.
    """

    loggables = (Value, Text, Image, Audio, Graph, File)

    def __init__(
        self, experiment: str = "Default", *, run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        self._mlflow = library("mlflow", extra="mlflow", owner="MLflowBackend")
        self.name = f"MLflowBackend({experiment!r})"
        self._experiment, self._run_name, self._uri = experiment, run_name, tracking_uri
        self._client: Any = None
        self._run: str | None = None
        self._metrics: list[Any] = []

    def open(self, *, resumes: bool) -> None:
        """Begin a run, or go on with it."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if resumes and self._run is not None:
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(experiment, run_name=self._run_name).info.run_id

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Keep a number for `flush`; send anything else."""
        name = _FORBIDDEN.sub("_", name)
        if isinstance(loggable, Value):
            made = self._mlflow.entities.Metric(name, loggable.data, int(seconds * 1000), step)
            self._metrics.append(made)
        elif isinstance(loggable, File):
            self._client.log_artifact(self._run, str(loggable.data), name)
        else:
            self._send(name, step, loggable)

    def _send(self, name: str, step: int, loggable: Loggable) -> None:
        match loggable:
            case Text(data):
                extension, content = "txt", data.encode()
            case Graph(data):
                extension, content = "dot", data.encode()
            case Image():
                extension, content = "png", png_of(loggable)
            case Audio():
                extension, content = "wav", wav_of(loggable)
            case _:
                raise TypeError(f"{type(loggable).__name__} is not among its loggables")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{step}.{extension}")
            path.write_bytes(content)
            self._client.log_artifact(self._run, str(path), name)

    def flush(self) -> None:
        """Send the numbers."""
        metrics, self._metrics = self._metrics, []
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + _BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"run": self._run} if self._run is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the run's id back."""
        self._run = state.get("run")
