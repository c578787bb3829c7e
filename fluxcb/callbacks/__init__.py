"""Callbacks that come with fluxcb; each could have been written by a third party.

They use the public extension points only: what they touch, they declare. Importing this package does not import JAX.
"""

from fluxcb._declare.proxy import ProxyCallback
from fluxcb.callbacks.accumulate import AccumulateGradients
from fluxcb.callbacks.average import ParameterEMA, StochasticWeightAveraging
from fluxcb.callbacks.best_saver import MaxSaver, MinSaver
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.checkpointer import Checkpointer, ModelSaver
from fluxcb.callbacks.conditional import CallbackCondition, ConditionalCallback, FrequencyThrottle, TimeThrottle
from fluxcb.callbacks.custom import CustomCallback
from fluxcb.callbacks.debugger import Debugger
from fluxcb.callbacks.defaults import default_callbacks, with_defaults
from fluxcb.callbacks.device import ToDevice
from fluxcb.callbacks.device_memory import DeviceMemoryTracker
from fluxcb.callbacks.dump_arrays import DumpArrays
from fluxcb.callbacks.dump_images import DumpImages
from fluxcb.callbacks.early_stopping import EarlyStopping
from fluxcb.callbacks.factory import CallbackFactory
from fluxcb.callbacks.fit_summary import FitSummary
from fluxcb.callbacks.freeze import Freeze
from fluxcb.callbacks.garbage import GarbageCollect
from fluxcb.callbacks.gpu_utilization import GPUUtilizationTracker
from fluxcb.callbacks.gradients import ClipGradients, GradientNoise
from fluxcb.callbacks.hooks import HookToCallback
from fluxcb.callbacks.host_memory import HostMemoryTracker
from fluxcb.callbacks.human_setter import HumanHyperParamSetter
from fluxcb.callbacks.hyperparameter import HyperParameter, LearningRate, ObjAttrParam
from fluxcb.callbacks.inference import InferenceRunner
from fluxcb.callbacks.inference_parallel import DataParallelInferenceRunner
from fluxcb.callbacks.inferencer import BinaryClassificationStats, ClassificationError, Inferencer, ScalarStats
from fluxcb.callbacks.inject_shell import InjectShell
from fluxcb.callbacks.log_histograms import LogHistograms
from fluxcb.callbacks.log_hyperparams import LogHyperParams
from fluxcb.callbacks.log_metrics import LogMetrics
from fluxcb.callbacks.log_summaries import LogSummaries
from fluxcb.callbacks.log_traces import LogTraces
from fluxcb.callbacks.log_visualization import LogVisualization
from fluxcb.callbacks.loss_scale import DynamicLossScale
from fluxcb.callbacks.loss_spikes import LossSpikeGuard
from fluxcb.callbacks.lr_finder import LRFinderPhase, LRFinderResult, find_learning_rate
from fluxcb.callbacks.metric import AbstractMetric, Loss, Metric, SmoothLoss, accuracy
from fluxcb.callbacks.metric_values import EpochValues, StepValues
from fluxcb.callbacks.metrics import Metrics
from fluxcb.callbacks.mixing import CutMix, MixUp
from fluxcb.callbacks.monitors import Monitors
from fluxcb.callbacks.moving_average import MovingAverage, SimpleMovingAverage
from fluxcb.callbacks.nan_loss import StopOnNaNLoss
from fluxcb.callbacks.numerics import CheckNumerics
from fluxcb.callbacks.periodic import EnableCallbackIf, PeriodicCallback, PeriodicTrigger
from fluxcb.callbacks.plateau import ReduceLROnPlateau
from fluxcb.callbacks.prediction_writer import PredictionWriter
from fluxcb.callbacks.printer import MetricsPrinter
from fluxcb.callbacks.proc_or_thread import StartProcOrThread
from fluxcb.callbacks.process_arrays import PrintArrays, ProcessArrays
from fluxcb.callbacks.profiler import Profiler
from fluxcb.callbacks.progress import ProgressBar
from fluxcb.callbacks.recorder import PhaseHistory, Recorder
from fluxcb.callbacks.run_function import RunFunction
from fluxcb.callbacks.sanity_check import SanityCheck
from fluxcb.callbacks.sanity_checks import Check, default_checks
from fluxcb.callbacks.scheduled_setter import ScheduledHyperParamSetter
from fluxcb.callbacks.scheduler import Scheduler, onecycle
from fluxcb.callbacks.send_data import SendMonitorData
from fluxcb.callbacks.send_stat import SendStat
from fluxcb.callbacks.setters import HyperParamSetter, HyperParamSetterWithFunc
from fluxcb.callbacks.skip import SkipNonFinite
from fluxcb.callbacks.smoothing import LabelSmoothing
from fluxcb.callbacks.stat_setter import StatMonitorParamSetter
from fluxcb.callbacks.step_timeout import StepTimeout
from fluxcb.callbacks.stop_after import StopAfter
from fluxcb.callbacks.summary import ModelSummary
from fluxcb.callbacks.throughput import ThroughputTracker
from fluxcb.callbacks.time_left import EstimatedTimeLeft
from fluxcb.callbacks.traces import Traces, TraceValues
from fluxcb.callbacks.watched import Watched

__all__ = [
    "AbstractMetric",
    "AccumulateGradients",
    "BinaryClassificationStats",
    "ByPhase",
    "CallbackCondition",
    "CallbackFactory",
    "Check",
    "CheckNumerics",
    "Checkpointer",
    "ClassificationError",
    "ClipGradients",
    "ConditionalCallback",
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
