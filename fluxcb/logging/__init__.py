"""Logging: what can be logged, where it goes, and the hub between callbacks and backends.

The callback `fluxcb.callbacks.Monitors` puts the hub into `cbstate.monitors`. Importing this package imports neither
JAX nor the libraries of the services; a backend imports its own when it is made.
"""

from fluxcb.logging.backend import LoggerBackend, log_to
from fluxcb.logging.comet import CometBackend
from fluxcb.logging.console import ConsoleBackend
from fluxcb.logging.csv_file import CSVBackend
from fluxcb.logging.hub import MonitorHub
from fluxcb.logging.json_lines import JSONLinesBackend
from fluxcb.logging.loggables import Audio, File, Graph, Histogram, Image, Loggable, Text, Value
from fluxcb.logging.mlflow import MLflowBackend
from fluxcb.logging.tensorboard import TensorBoardBackend
from fluxcb.logging.wandb import WandbBackend

__all__ = [
    "Audio",
    "CSVBackend",
    "CometBackend",
    "ConsoleBackend",
    "File",
    "Graph",
    "Histogram",
    "Image",
    "JSONLinesBackend",
    "Loggable",
    "LoggerBackend",
    "MLflowBackend",
    "MonitorHub",
    "TensorBoardBackend",
    "Text",
    "Value",
    "WandbBackend",
    "log_to",
]
