"""The migration pages are complete: exported names have rows, fluxcb names exist, and defects have tests."""

import ast
import inspect
import io
import re
import threading
from functools import cache
from pathlib import Path

import pytest

import fluxcb
from fluxcb import Callback
from fluxcb.callbacks import Metrics, ProgressBar, StartProcOrThread
from fluxcb.testing import testlearner

ROOT = Path(__file__).resolve().parents[2]
TENSORPACK = ROOT / "docs/migrating/from-tensorpack.md"
FLUXTRAINING = ROOT / "docs/migrating/from-fluxtraining.md"

# `tensorpack.callbacks.__all__` of version 0.11.
EXPORTED_BY_TENSORPACK = """
Callback ProxyCallback CallbackFactory StartProcOrThread RunOp RunUpdateOps ProcessTensors DumpTensors DumpTensor
DumpTensorAsImage DumpParamAsImage CheckNumerics Callbacks CallbackToHook HookToCallback TFLocalCLIDebugHook ScalarStats
Inferencer ClassificationError BinaryClassificationStats InferenceRunnerBase InferenceRunner DataParallelInferenceRunner
SendStat InjectShell EstimatedTimeLeft MonitorBase Monitors TFEventWriter JSONWriter ScalarPrinter SendMonitorData
CometMLMonitor HyperParam GraphVarParam ObjAttrParam HyperParamSetter HumanHyperParamSetter ScheduledHyperParamSetter
StatMonitorParamSetter HyperParamSetterWithFunc GPUUtilizationTracker GraphProfiler PeakMemoryTracker GPUMemoryTracker
HostMemoryTracker ThroughputTracker ModelSaver MinSaver MaxSaver TensorPrinter ProgressBar SessionRunTimeout
MovingAverageSummary MergeAllSummaries SimpleMovingAverage PeriodicTrigger PeriodicCallback EnableCallbackIf
"""
# The `export` of FluxTraining.jl 0.3.10.
EXPORTED_BY_FLUXTRAINING = """
AbstractCallback Loss ConditionalCallback CancelStepException CancelEpochException CancelFittingException Checkpointer
CustomCallback EarlyStopping ToDevice ToGPU GarbageCollect Learner Metric Recorder ProgressPrinter Metrics
MetricsPrinter Traces TrainingPhase ValidationPhase Schedule Scheduler LogMetrics SmoothLoss LogTraces LogHistograms
LogHyperParams LogVisualization TensorBoardBackend StopOnNaNLoss LearningRate throttle SanityCheck accuracy fit! epoch!
step! onecycle loadmodel savemodel
"""
EXPORTED = {TENSORPACK: EXPORTED_BY_TENSORPACK.split(), FLUXTRAINING: EXPORTED_BY_FLUXTRAINING.split()}
TABLES = {
    TENSORPACK: ("hooks", "names", "around"),
    FLUXTRAINING: ("names", "documented", "events"),
    ROOT / "docs/migrating/from-keras.md": ("names", "callbacks", "hooks"),
    ROOT / "docs/migrating/from-lightning.md": ("names", "callbacks", "hooks"),
}
PAGES = pytest.mark.parametrize("page", EXPORTED, ids=lambda page: page.stem)
PAGES_WITH_TABLES = pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)

# Which tests show the behaviour here, for each line of the pages' tables of defects.
SHOWN = {
    "D1": ["callbacks/test_hyperparameters.py::test_a_new_instance_starts_with_the_value_of_the_current_epoch"],
    "D2": ["callbacks/test_hyperparameters.py::test_a_function_is_not_applied_again_at_a_resume"],
    "D3": ["callbacks/test_savers.py::test_the_smallest_value_is_kept"],
    "D4": [
        "callbacks/test_savers.py::test_a_state_that_could_not_be_saved_is_not_the_best",
        "callbacks/test_savers.py::test_a_state_that_is_not_finite_is_not_the_best",
    ],
    "D5": ["callbacks/test_savers.py::test_the_best_checkpoint_has_the_current_state"],
    "D6": [
        "callbacks/test_early_stopping.py::test_a_resumed_run_ends_at_the_same_epoch",
        "contract/test_every_callback.py::test_public_callback_passes_check_callback",
    ],
    "D7": ["logging/test_monitors.py::test_values_before_a_stop_are_written"],
    "D8": [
        "logging/test_json_lines.py::test_flushing_is_one_write",
        "logging/test_json_lines.py::test_numbers_survive_to_the_last_bit_and_what_is_not_finite_is_text",
    ],
    "D9": ["logging/test_monitors.py::test_the_log_of_a_resumed_run_equals_that_of_an_uninterrupted_run"],
    "D10": ["callbacks/test_periodic.py::test_a_period_of_steps_gates_both_handlers_of_one_step"],
    "D11": ["callbacks/test_periodic.py::test_invalid_arguments_are_rejected"],
    "D12": ["docs/test_migrating.py::test_each_step_has_its_own_loss_in_one_step_epochs"],
    "D13": [
        "callbacks/test_step_averages.py::test_means_are_logged_at_multiples_of_the_window",
        "callbacks/test_step_averages.py::test_the_first_window_after_a_resume_is_complete",
    ],
    "D14": ["callbacks/test_dumping.py::test_missing_values_are_errors_when_the_learner_is_built"],
    "D15": ["callbacks/test_inference.py::test_a_statistic_must_be_a_number"],
    "D16": ["callbacks/test_inference.py::test_the_mean_is_over_all_samples_if_the_last_batch_is_smaller"],
    "D17": ["callbacks/test_hyperparameters.py::test_values_that_are_not_finite_are_ignored"],
    "D18": ["callbacks/test_hyperparameters.py::test_bad_lines_are_skipped_with_a_warning"],
    "D19": [
        "logging/test_hub.py::test_a_history_is_the_callers_own",
        "logging/test_hub.py::test_an_unknown_name_is_an_error_and_leaves_no_trace",
    ],
    "D20": ["logging/test_loggables.py::test_numbers_become_floats"],
    "D21": ["callbacks/test_commands.py::test_the_latest_values_are_sent_after_each_epoch"],
    "D22": [
        "callbacks/test_trackers.py::test_two_triggers_at_one_step_log_one_value",
        "callbacks/test_trackers.py::test_no_value_is_logged_without_elapsed_time",
    ],
    "D23": ["callbacks/test_periodic.py::test_a_callback_is_only_triggered_at_its_periods"],
    "D24": [
        "callbacks/test_periodic.py::test_invalid_arguments_are_rejected",
        "declare/test_schedules.py::test_periods_are_positive_integers",
    ],
    "D25": ["callbacks/test_dumping.py::test_a_function_may_return_a_list_of_images"],
    "D26": [
        "callbacks/test_proc_or_thread.py::test_they_are_stopped_after_an_error",
        "docs/test_migrating.py::test_failing_set_up_starts_nothing",
    ],
    "D27": ["callbacks/test_periodic.py::test_a_changing_predicate_still_runs_the_matching_end_handler"],
    "D28": ["callbacks/test_wrapping.py::test_a_proxy_says_of_itself_what_is_said_of_what_it_wraps_also_later"],
    "D29": [
        "declare/test_lists.py::test_duplicate_instance_raises",
        "run/test_callbackset.py::test_duplicate_instance_raises",
    ],
    "D30": ["callbacks/test_savers.py::test_a_metric_name_can_contain_a_slash"],
    "D31": [
        "compile/test_traced.py::test_each_event_provides_documented_values",
        "callbacks/test_step_averages.py::test_the_average_is_the_debiased_average_of_tensorpack",
    ],
    "D32": [
        "callbacks/test_savers.py::test_a_fit_that_ends_early_is_saved_at_its_end",
        "callbacks/test_savers.py::test_the_end_is_saved_for_every_period",
    ],
    "D33": ["callbacks/test_run_function.py::test_run_before_runs_once_per_training"],
    "D34": [
        "callbacks/test_trackers.py::test_a_driver_failure_during_training_warns_once_and_does_not_end_the_training"
    ],
    "D35": ["callbacks/test_savers.py::test_errors_of_savers_end_the_training"],
    "F1": [
        "run/test_cancel.py::test_stop_reason_is_message_of_cancel_fitting",
        "callbacks/test_early_stopping.py::test_the_fit_ends_at_the_epoch_of_the_criterion",
    ],
    "F2": [
        "check/test_cycles.py::test_cycle_of_two",
        "check/test_cycles.py::test_cycle_of_five_with_five_reasons",
    ],
    "F3": [
        "check/test_preflight.py::test_missing_state_error_names_creator",
        "run/test_callbackset.py::test_uncreated_entry_raises",
    ],
    "F4": ["check/test_order.py::test_either_callback_may_resolve_and_wrappers_forward_resolution"],
    "F5": [
        "check/test_order.py::test_no_conflict_keeps_list_order",
        "check/test_conflicts.py::test_unresolvable_raises",
    ],
    "F6": ["callbacks/test_training_callbacks.py::test_schedules_set_what_they_say_at_every_step"],
    "F7": [
        "declare/test_schedules.py::test_wrappers_forward_declarations_and_state",
        "check/test_order.py::test_runafter_resolves_conflict_and_includes_subclasses",
    ],
    "F8": [
        "callbacks/test_wrapping.py::test_a_frequency_applies_to_one_event_and_counts_steps_not_calls",
        "callbacks/test_periodic.py::test_periods_count_from_the_beginning_of_the_training_even_after_a_resume",
    ],
    "F9": [
        "run/test_numerics.py::test_state_can_be_copied_to_other_learner",
        "callbacks/test_early_stopping.py::test_a_resumed_run_ends_at_the_same_epoch",
    ],
    "F10": ["callbacks/test_training_callbacks.py::test_schedules_set_what_they_say_at_every_step"],
    "F11": ["callbacks/test_device.py::test_the_whole_state_and_the_batches_move"],
    "F12": ["callbacks/test_training_callbacks.py::test_a_loss_that_is_no_number_ends_the_fit_at_its_step"],
    "F13": ["callbacks/test_metrics.py::test_epoch_values_are_means_over_samples"],
    "F14": ["callbacks/test_metrics.py::test_step_values_are_complete_and_do_not_shorten_windows"],
    "F15": ["callbacks/test_log_callbacks.py::test_hyperparameters_are_logged_when_they_change"],
    "F16": ["callbacks/test_log_callbacks.py::test_counts_of_parameters_and_gradients_at_due_steps"],
    "F17": ["callbacks/test_metrics.py::test_exchanging_metrics_between_fits"],
    "F18": [
        "run/test_host_access.py::test_writing_into_read_container_raises",
        "run/test_host_access.py::test_read_arrays_are_read_only",
        "run/test_host_access.py::test_changing_read_cbstate_raises",
    ],
    "F19": ["callbacks/test_sanity_check.py::test_missing_validation_data_are_a_warning"],
    "F20": [
        "run/test_data.py::test_list_of_batches",
        "run/test_sequences.py::test_only_phases_with_data_are_validated",
    ],
    "F21": [
        "callbacks/test_early_stopping.py::test_bad_arguments",
        "callbacks/test_early_stopping.py::test_training_losses_precede_validation_values",
    ],
    "F22": [
        "check/test_moments.py::test_edges_at_different_moments_do_not_form_cycle",
        "check/test_moments.py::test_writers_without_common_moment_do_not_conflict",
    ],
    "F23": ["run/test_cancel.py::test_cancel_epoch_after_last_step_skips_rest_of_moment"],
    "F24": ["docs/test_tables.py::test_table_of_events"],
    "F25": [
        "logging/test_tensorboard.py::test_a_new_run_moves_the_events_of_another_to_a_subfolder",
        "logging/test_tensorboard.py::test_a_run_that_resumes_has_the_events_of_its_checkpoint",
        "logging/test_tensorboard.py::test_everything_else_is_read_back",
    ],
    "F26": ["run/test_callbackset.py::test_duplicate_instance_raises"],
    "F27": [
        "reliability/test_kills.py::test_killed_and_resumed_run_matches_uninterrupted_run",
        "callbacks/test_savers.py::test_parameters_are_read_without_their_container_classes",
    ],
}


def table(page: Path, name: str) -> list[list[str]]:
    """Return the rows, without the header, of the table below `<!-- table: name -->`."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"<!-- table: {name} -->\n")
    assert found, f"{page.name} has no table {name}"
    lines = rest.lstrip("\n").splitlines()
    rows = lines[2 : next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {len(row) for row in cells} == {3}
    return cells


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def roots() -> dict[str, object]:
    return {"learner": testlearner(), "callback": Callback()}


def there_is(name: str) -> bool:
    """Return whether a name of the second column exists in `fluxcb`, on a Learner, or on a callback."""
    first, *rest = name.split(".")
    found = roots().get(first) or getattr(fluxcb, first, None)
    for part in rest:
        found = getattr(found, part, None)
    return found is not None


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@PAGES
def test_every_exported_name_has_exactly_one_row(page):
    assert sorted(names_in(row[0]) for row in table(page, "names")) == sorted([name] for name in EXPORTED[page])


def test_lists_of_exported_names_are_complete():
    assert {page.stem: len(set(names)) for page, names in EXPORTED.items()} == {
        "from-tensorpack": 59,
        "from-fluxtraining": 41,
    }


@PAGES_WITH_TABLES
def test_every_fluxcb_name_exists(page):
    for there, here, _ in [row for name in TABLES[page] for row in table(page, name)]:
        assert names_in(here), f"{there} has nothing to go to"
        assert [name for name in names_in(here) if not there_is(name)] == [], there


@PAGES_WITH_TABLES
def test_every_row_describes_difference(page):
    assert [row for name in TABLES[page] for row in table(page, name) if not all(row)] == []


@PAGES
def test_every_row_of_defects_is_complete_and_names_tests(page):
    rows = table(page, "defects")
    letter = "D" if page is TENSORPACK else "F"
    assert [row[0] for row in rows] == [f"{letter}{i + 1}" for i in range(35 if page is TENSORPACK else 27)]
    assert all(before and after for _, before, after in rows)
    assert {row[0] for row in rows} == {number for number in SHOWN if number[0] == letter}


@pytest.mark.parametrize("number", SHOWN)
def test_tests_of_defects_exist(number):
    assert SHOWN[number]
    for test in SHOWN[number]:
        path, _, name = test.partition("::")
        assert name in functions_of(ROOT / "tests" / path), test


SOURCE = re.compile(r"(tensorpack|FluxTraining\.jl),\s+(`[\w!]+`(?:(?:,| and|, and)\s+`[\w!]+`)*)")


def origins() -> list[tuple[Path, list[str], str]]:
    """Return the page, the original names and the fluxcb name of each class and function that names its origin."""
    pages = {"tensorpack": TENSORPACK, "FluxTraining.jl": FLUXTRAINING}
    return [
        (pages[system], names_in(cited), f"{module.__name__.removeprefix('fluxcb.')}.{name}")
        for module in (fluxcb.callbacks, fluxcb.logging)
        for name in module.__all__
        for system, cited in SOURCE.findall(inspect.getdoc(getattr(module, name)) or "")
    ]


def test_every_origin_in_docstring_has_row():
    rows = {page: [row for name in TABLES[page] for row in table(page, name)] for page in TABLES}
    found = origins()
    assert len(found) > 60
    lost = [
        (page.stem, there, here)
        for page, there, here in found
        if not any(set(there) & set(names_in(row[0])) and here in names_in(row[1]) for row in rows[page])
    ]
    assert lost == []


# --- behaviour that no other test shows -----------------------------------------------------------------------------


def test_each_step_has_its_own_loss_in_one_step_epochs():
    file = io.StringIO()
    learner = testlearner(ProgressBar(file, interval=1e-9), Metrics(), batches=1, validation_batches=0)
    learner.fit(4)
    losses = dict(enumerate(learner.cbstate["metrics_step"]["training"]["loss"], 1))
    shown = re.findall(r"epoch (\d)/4 training: 1/1 steps, loss (\d+\.\d{4})", file.getvalue())
    assert shown[-3:] == [(str(epoch), f"{losses[epoch]:.4f}") for epoch in (2, 3, 4)]
    assert len({loss for _, loss in shown}) == len(shown)


def test_failing_set_up_starts_nothing():
    class Helper(threading.Thread):
        def stop(self):
            raise AssertionError("it never ran")

    class Fails(Callback):
        def init(self, learner):
            raise RuntimeError("no set-up")

    helper = Helper()
    with pytest.raises(RuntimeError, match="no set-up"):
        testlearner(StartProcOrThread(helper), Fails())
    assert helper.ident is None
