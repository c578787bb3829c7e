"""Logging: the types of values that can be logged, the backends that write them, and the hub between the two.

The callback `fluxcb.callbacks.Monitors` creates the hub as `cbstate.monitors`. Importing this package imports neither
JAX nor the libraries of logging services. Each backend imports its library when it is constructed.
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
