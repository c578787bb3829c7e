"""Callbacks that come with fluxcb; each could have been written by a third party.

They use the public extension points only: what they touch, they declare. Importing this package does not import JAX.
"""

from fluxcb._declare.proxy import ProxyCallback
from fluxcb.callbacks.augment.mixing import CutMix, MixUp
from fluxcb.callbacks.augment.smoothing import LabelSmoothing
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.defaults import default_callbacks, with_defaults
from fluxcb.callbacks.gradients.accumulate import AccumulateGradients
from fluxcb.callbacks.gradients.average import ParameterEMA, StochasticWeightAveraging
from fluxcb.callbacks.gradients.bad_steps import BadSteps
from fluxcb.callbacks.gradients.freeze import Freeze
from fluxcb.callbacks.gradients.gradients import ClipGradients, GradientNoise
from fluxcb.callbacks.gradients.loss_scale import DynamicLossScale
from fluxcb.callbacks.gradients.loss_spikes import LossSpikeGuard
from fluxcb.callbacks.gradients.skip import SkipNonFinite
from fluxcb.callbacks.hyperparams.human_setter import HumanHyperParamSetter
from fluxcb.callbacks.hyperparams.hyperparameter import HyperParameter, LearningRate, ObjAttrParam
from fluxcb.callbacks.hyperparams.lr_finder import LRFinderPhase, LRFinderResult, find_learning_rate
from fluxcb.callbacks.hyperparams.plateau import ReduceLROnPlateau
from fluxcb.callbacks.hyperparams.scheduled_setter import ScheduledHyperParamSetter
from fluxcb.callbacks.hyperparams.scheduler import Scheduler, onecycle
from fluxcb.callbacks.hyperparams.setters import HyperParamSetter, HyperParamSetterWithFunc
from fluxcb.callbacks.hyperparams.stat_setter import StatMonitorParamSetter
from fluxcb.callbacks.inference.inference import InferenceRunner
from fluxcb.callbacks.inference.inference_parallel import DataParallelInferenceRunner
from fluxcb.callbacks.inference.inferencer import (
    BinaryClassificationStats,
    ClassificationError,
    Inferencer,
    ScalarStats,
)
from fluxcb.callbacks.inference.prediction_writer import PredictionWriter
from fluxcb.callbacks.inspect.check_replicas import CheckReplicas
from fluxcb.callbacks.inspect.debugger import Debugger
from fluxcb.callbacks.inspect.inject_shell import InjectShell
from fluxcb.callbacks.inspect.numerics import CheckNumerics
from fluxcb.callbacks.inspect.process_arrays import PrintArrays, ProcessArrays
from fluxcb.callbacks.inspect.profiler import Profiler
from fluxcb.callbacks.inspect.run_function import RunFunction
from fluxcb.callbacks.inspect.sanity_check import SanityCheck
from fluxcb.callbacks.inspect.sanity_checks import Check, default_checks
from fluxcb.callbacks.inspect.traces import Traces, TraceValues
from fluxcb.callbacks.logging.log_histograms import LogHistograms
from fluxcb.callbacks.logging.log_hyperparams import LogHyperParams
from fluxcb.callbacks.logging.log_metrics import LogMetrics
from fluxcb.callbacks.logging.log_summaries import LogSummaries
from fluxcb.callbacks.logging.log_traces import LogTraces
from fluxcb.callbacks.logging.log_visualization import LogVisualization
from fluxcb.callbacks.logging.monitors import Monitors
from fluxcb.callbacks.logging.moving_average import MovingAverage, SimpleMovingAverage
from fluxcb.callbacks.logging.send_data import SendMonitorData
from fluxcb.callbacks.logging.send_stat import SendStat
from fluxcb.callbacks.metrics.class_metrics import AUROC, ConfusionMatrix, PerClassAccuracy, accuracy
from fluxcb.callbacks.metrics.gathered import AbstractGatheredMetric
from fluxcb.callbacks.metrics.metric import AbstractMetric, Loss, Metric, SmoothLoss
from fluxcb.callbacks.metrics.metric_values import EpochValues, StepValues
from fluxcb.callbacks.metrics.metrics import Metrics
from fluxcb.callbacks.metrics.recorder import PhaseHistory, Recorder
from fluxcb.callbacks.progress.fit_summary import FitSummary
from fluxcb.callbacks.progress.printer import MetricsPrinter
from fluxcb.callbacks.progress.progress import ProgressBar
from fluxcb.callbacks.progress.summary import ModelSummary
from fluxcb.callbacks.progress.throughput import ThroughputTracker
from fluxcb.callbacks.progress.time_left import EstimatedTimeLeft
from fluxcb.callbacks.saving.best_saver import MaxSaver, MinSaver
from fluxcb.callbacks.saving.checkpointer import Checkpointer, ModelSaver
from fluxcb.callbacks.saving.dump_arrays import DumpArrays
from fluxcb.callbacks.saving.dump_images import DumpImages
from fluxcb.callbacks.stopping.early_stopping import EarlyStopping
from fluxcb.callbacks.stopping.nan_loss import StopOnNaNLoss
from fluxcb.callbacks.stopping.stop_after import StopAfter
from fluxcb.callbacks.system.control_file import ControlFile
from fluxcb.callbacks.system.device import ToDevice
from fluxcb.callbacks.system.device_memory import DeviceMemoryTracker
from fluxcb.callbacks.system.garbage import GarbageCollect
from fluxcb.callbacks.system.gpu_utilization import GPUUtilizationTracker
from fluxcb.callbacks.system.host_memory import HostMemoryTracker
from fluxcb.callbacks.system.proc_or_thread import StartProcOrThread
from fluxcb.callbacks.system.run_control import RunControl
from fluxcb.callbacks.system.step_timeout import StepTimeout
from fluxcb.callbacks.watched import Watched
from fluxcb.callbacks.wrappers.conditional import (
    CallbackCondition,
    ConditionalCallback,
    FrequencyThrottle,
    TimeThrottle,
)
from fluxcb.callbacks.wrappers.custom import CustomCallback
from fluxcb.callbacks.wrappers.factory import CallbackFactory
from fluxcb.callbacks.wrappers.hooks import HookToCallback
from fluxcb.callbacks.wrappers.periodic import EnableCallbackIf, PeriodicCallback, PeriodicTrigger

__all__ = [
    "AUROC",
    "AbstractGatheredMetric",
    "AbstractMetric",
    "AccumulateGradients",
    "BadSteps",
    "BinaryClassificationStats",
    "ByPhase",
    "CallbackCondition",
    "CallbackFactory",
    "Check",
    "CheckNumerics",
    "CheckReplicas",
    "Checkpointer",
    "ClassificationError",
    "ClipGradients",
    "ConditionalCallback",
    "ConfusionMatrix",
    "ControlFile",
    "CustomCallback",
    "CutMix",
    "DataParallelInferenceRunner",
    "Debugger",
    "DeviceMemoryTracker",
    "DumpArrays",
    "DumpImages",
    "DynamicLossScale",
    "EarlyStopping",
    "EnableCallbackIf",
    "EpochValues",
    "EstimatedTimeLeft",
    "FitSummary",
    "Freeze",
    "FrequencyThrottle",
    "GPUUtilizationTracker",
    "GarbageCollect",
    "GradientNoise",
    "HookToCallback",
    "HostMemoryTracker",
    "HumanHyperParamSetter",
    "HyperParamSetter",
    "HyperParamSetterWithFunc",
    "HyperParameter",
    "InferenceRunner",
    "Inferencer",
    "InjectShell",
    "LRFinderPhase",
    "LRFinderResult",
    "LabelSmoothing",
    "LearningRate",
    "LogHistograms",
    "LogHyperParams",
    "LogMetrics",
    "LogSummaries",
    "LogTraces",
    "LogVisualization",
    "Loss",
    "LossSpikeGuard",
    "MaxSaver",
    "Metric",
    "Metrics",
    "MetricsPrinter",
    "MinSaver",
    "MixUp",
    "ModelSaver",
    "ModelSummary",
    "Monitors",
    "MovingAverage",
    "ObjAttrParam",
    "ParameterEMA",
    "PerClassAccuracy",
    "PeriodicCallback",
    "PeriodicTrigger",
    "PhaseHistory",
    "PredictionWriter",
    "PrintArrays",
    "ProcessArrays",
    "Profiler",
    "ProgressBar",
    "ProxyCallback",
    "Recorder",
    "ReduceLROnPlateau",
    "RunControl",
    "RunFunction",
    "SanityCheck",
    "ScalarStats",
    "ScheduledHyperParamSetter",
    "Scheduler",
    "SendMonitorData",
    "SendStat",
    "SimpleMovingAverage",
    "SkipNonFinite",
    "SmoothLoss",
    "StartProcOrThread",
    "StatMonitorParamSetter",
    "StepTimeout",
    "StepValues",
    "StochasticWeightAveraging",
    "StopAfter",
    "StopOnNaNLoss",
    "ThroughputTracker",
    "TimeThrottle",
    "ToDevice",
    "TraceValues",
    "Traces",
    "Watched",
    "accuracy",
    "default_callbacks",
    "default_checks",
    "find_learning_rate",
    "onecycle",
    "with_defaults",
]
