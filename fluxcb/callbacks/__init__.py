"""Callbacks that come with fluxcb; each could have been written by a third party.

They use the public extension points only: what they touch, they declare. Importing this package does not import JAX.
"""

from fluxcb.callbacks.average import ParameterEMA
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.custom import CustomCallback
from fluxcb.callbacks.defaults import default_callbacks, with_defaults
from fluxcb.callbacks.device import ToDevice
from fluxcb.callbacks.gradients import ClipGradients
from fluxcb.callbacks.metric import AbstractMetric, Loss, Metric, SmoothLoss, accuracy
from fluxcb.callbacks.metric_values import EpochValues, StepValues
from fluxcb.callbacks.metrics import Metrics
from fluxcb.callbacks.nan_loss import StopOnNaNLoss
from fluxcb.callbacks.printer import MetricsPrinter
from fluxcb.callbacks.progress import ProgressBar
from fluxcb.callbacks.recorder import History, Recorder
from fluxcb.callbacks.scheduler import HyperParameter, LearningRate, Scheduler, onecycle
from fluxcb.callbacks.summary import ModelSummary

__all__ = [
    "AbstractMetric",
    "ByPhase",
    "ClipGradients",
    "CustomCallback",
    "EpochValues",
    "History",
    "HyperParameter",
    "LearningRate",
    "Loss",
    "Metric",
    "Metrics",
    "MetricsPrinter",
    "ModelSummary",
    "ParameterEMA",
    "ProgressBar",
    "Recorder",
    "Scheduler",
    "SmoothLoss",
    "StepValues",
    "StopOnNaNLoss",
    "ToDevice",
    "accuracy",
    "default_callbacks",
    "onecycle",
    "with_defaults",
]
