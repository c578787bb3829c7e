"""The pages for those who come from elsewhere: all names there have a row, all names here exist, all defects a test."""

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
TABLES = {TENSORPACK: ("hooks", "names", "around"), FLUXTRAINING: ("names", "documented", "events")}
PAGES = pytest.mark.parametrize("page", EXPORTED, ids=lambda page: page.stem)

# Which tests show the behaviour here, for each line of the pages' tables of defects.
SHOWN = {
    "D1": ["callbacks/test_hyperparameters.py::test_a_new_instance_begins_with_the_value_of_the_epoch_at_hand"],
    "D2": ["callbacks/test_hyperparameters.py::test_a_function_is_not_applied_again_at_a_resume"],
    "D3": ["callbacks/test_savers.py::test_the_smallest_value_is_kept"],
    "D4": [
        "callbacks/test_savers.py::test_what_could_not_be_saved_is_not_the_best",
        "callbacks/test_savers.py::test_a_state_that_is_not_finite_is_not_the_best",
    ],
    "D5": ["callbacks/test_savers.py::test_the_best_is_the_state_at_hand_and_not_a_checkpoint_with_a_similar_number"],
    "D6": [
        "callbacks/test_early_stopping.py::test_a_training_that_is_saved_and_resumed_ends_where_it_would_have",
        "contract/test_every_callback.py::test_a_public_callback_keeps_the_laws",
    ],
    "D7": ["logging/test_monitors.py::test_what_was_put_before_a_stop_is_written"],
    "D8": [
        "logging/test_json_lines.py::test_flushing_is_one_write",
        "logging/test_json_lines.py::test_numbers_survive_to_the_last_bit_and_what_is_not_finite_is_text",
    ],
    "D9": ["logging/test_monitors.py::test_the_log_of_a_resumed_run_is_that_of_an_uninterrupted_one"],
    "D10": ["callbacks/test_periodic.py::test_a_period_of_steps_gates_both_handlers_of_one_step"],
    "D11": ["callbacks/test_periodic.py::test_what_cannot_be_meant_is_refused"],
    "D12": ["docs/test_migrating.py::test_no_epoch_of_one_step_shows_the_loss_of_another"],
    "D13": [
        "callbacks/test_step_averages.py::test_means_are_logged_at_multiples_of_the_window",
        "callbacks/test_step_averages.py::test_the_first_window_after_a_resume_is_whole",
    ],
    "D14": ["callbacks/test_dumping.py::test_values_that_do_not_exist_are_errors_when_the_learner_is_built"],
    "D15": ["callbacks/test_inference.py::test_a_statistic_must_be_a_number"],
    "D16": ["callbacks/test_inference.py::test_a_mean_over_a_ragged_last_batch_is_that_over_all_samples"],
    "D17": ["callbacks/test_hyperparameters.py::test_what_is_no_number_counts_for_nothing"],
    "D18": ["callbacks/test_hyperparameters.py::test_bad_lines_are_passed_over_with_a_warning"],
    "D19": [
        "logging/test_hub.py::test_a_history_is_the_callers_own",
        "logging/test_hub.py::test_an_unknown_name_is_an_error_and_leaves_no_trace",
    ],
    "D20": ["logging/test_loggables.py::test_numbers_become_floats"],
    "D21": ["callbacks/test_commands.py::test_the_latest_values_are_sent_after_each_epoch"],
    "D22": [
        "callbacks/test_trackers.py::test_two_triggers_at_one_step_put_one_value",
        "callbacks/test_trackers.py::test_no_time_no_value",
    ],
    "D23": ["callbacks/test_periodic.py::test_a_callback_is_triggered_in_the_periods_and_at_no_other_time"],
    "D24": [
        "callbacks/test_periodic.py::test_what_cannot_be_meant_is_refused",
        "declare/test_schedules.py::test_periods_are_whole_and_positive",
    ],
    "D25": ["callbacks/test_dumping.py::test_a_function_may_return_a_list_of_images"],
    "D26": [
        "callbacks/test_proc_or_thread.py::test_they_are_stopped_after_an_error",
        "docs/test_migrating.py::test_nothing_was_started_when_the_set_up_of_another_fails",
    ],
    "D27": ["callbacks/test_periodic.py::test_a_predicate_that_changes_its_mind_still_ends_what_was_begun"],
    "D28": ["callbacks/test_wrapping.py::test_a_proxy_says_of_itself_what_is_said_of_what_it_wraps_also_later"],
    "D29": [
        "declare/test_lists.py::test_one_instance_given_twice",
        "run/test_callbackset.py::test_one_instance_twice_is_an_error",
    ],
    "D30": ["callbacks/test_savers.py::test_a_name_with_a_slash_is_a_name"],
    "D31": [
        "compile/test_traced.py::test_each_event_sees_what_the_design_says",
        "callbacks/test_step_averages.py::test_the_average_is_the_debiased_one_of_tensorpack",
    ],
    "D32": [
        "callbacks/test_savers.py::test_a_fit_that_is_ended_is_saved_where_it_ended",
        "callbacks/test_savers.py::test_the_end_is_saved_whatever_the_period",
    ],
    "D33": ["callbacks/test_run_function.py::test_before_training_is_once_in_a_training"],
    "D34": ["callbacks/test_trackers.py::test_a_driver_that_fails_in_training_is_told_once_and_does_not_end_it"],
    "D35": ["callbacks/test_savers.py::test_the_savers_errors_end_the_training"],
    "F1": [
        "run/test_cancel.py::test_the_stop_reason_is_the_message_of_cancel_fitting",
        "callbacks/test_early_stopping.py::test_the_fit_ends_at_the_epoch_of_the_criterion",
    ],
    "F2": [
        "check/test_cycles.py::test_a_loop_of_two",
        "check/test_cycles.py::test_a_loop_of_five_with_five_reasons_beside_innocents",
    ],
    "F3": [
        "check/test_preflight.py::test_missing_state_names_the_callback_that_creates_it",
        "run/test_callbackset.py::test_shared_state_that_nobody_creates",
    ],
    "F4": ["check/test_order.py::test_either_side_may_say_who_runs_first_and_wrappers_forward_the_answer"],
    "F5": [
        "check/test_order.py::test_no_conflict_leaves_the_list_order_for_writers_and_for_readers",
        "check/test_conflicts.py::test_unresolvable",
    ],
    "F6": ["callbacks/test_training_callbacks.py::test_schedules_set_what_they_say_at_every_step"],
    "F7": [
        "declare/test_schedules.py::test_wrappers_forward_every_declaration_and_the_state",
        "check/test_order.py::test_runafter_settles_two_writers_and_a_base_class_stands_for_its_subclasses",
    ],
    "F8": [
        "callbacks/test_wrapping.py::test_a_frequency_is_of_one_event_and_counts_numbers_not_calls",
        "callbacks/test_periodic.py::test_periods_are_those_of_the_whole_training_also_after_a_resume",
    ],
    "F9": [
        "run/test_numerics.py::test_state_out_and_in",
        "callbacks/test_early_stopping.py::test_a_training_that_is_saved_and_resumed_ends_where_it_would_have",
    ],
    "F10": ["callbacks/test_training_callbacks.py::test_schedules_set_what_they_say_at_every_step"],
    "F11": ["callbacks/test_device.py::test_the_whole_state_and_the_batches_move"],
    "F12": ["callbacks/test_training_callbacks.py::test_a_loss_that_is_no_number_ends_the_fit_at_its_step"],
    "F13": ["callbacks/test_metrics.py::test_epoch_values_are_means_over_samples"],
    "F14": ["callbacks/test_metrics.py::test_step_values_are_complete_and_come_without_bounding_windows"],
    "F15": ["callbacks/test_log_callbacks.py::test_hyperparameters_are_logged_where_they_change"],
    "F16": ["callbacks/test_log_callbacks.py::test_counts_of_parameters_and_gradients_at_due_steps"],
    "F17": ["callbacks/test_metrics.py::test_exchanging_metrics_between_fits"],
    "F18": [
        "run/test_host_access.py::test_a_write_into_a_container_that_was_read",
        "run/test_host_access.py::test_arrays_that_were_read_cannot_be_written",
        "run/test_host_access.py::test_shared_state_that_was_read_cannot_be_changed",
    ],
    "F19": ["callbacks/test_sanity_check.py::test_missing_validation_data_are_a_warning"],
    "F20": ["run/test_data.py::test_a_list", "run/test_sequences.py::test_only_phases_with_data_are_validated"],
    "F21": [
        "callbacks/test_early_stopping.py::test_mistakes_are_told_at_construction",
        "callbacks/test_early_stopping.py::test_training_losses_go_before_those_of_validation",
    ],
    "F22": [
        "check/test_moments.py::test_the_known_false_cycle_is_none",
        "check/test_moments.py::test_writers_that_never_meet_do_not_conflict",
    ],
    "F23": ["run/test_cancel.py::test_cancel_epoch_where_no_step_is_left_skips_the_rest_of_the_moment"],
    "F24": ["docs/test_tables.py::test_events"],
    "F25": [
        "logging/test_tensorboard.py::test_a_new_run_does_not_write_to_the_folder_of_another",
        "logging/test_tensorboard.py::test_a_run_that_resumes_has_the_events_of_its_checkpoint",
        "logging/test_tensorboard.py::test_everything_else_is_read_back",
    ],
    "F26": ["run/test_callbackset.py::test_one_instance_twice_is_an_error"],
    "F27": [
        "reliability/test_kills.py::test_killed_and_resumed_is_never_killed",
        "callbacks/test_savers.py::test_parameters_are_read_without_the_classes_that_hold_them",
    ],
}


def table(page: Path, name: str) -> list[list[str]]:
    """Return the rows, without the head, of the table that stands below `<!-- table: name -->`."""
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
    """Tell whether a name of the second column exists: in `fluxcb`, on a Learner, or on a callback."""
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
def test_every_exported_name_has_one_row_and_no_other_name_has(page):
    assert sorted(names_in(row[0]) for row in table(page, "names")) == sorted([name] for name in EXPORTED[page])


def test_the_lists_of_names_are_whole():
    assert {page.stem: len(set(names)) for page, names in EXPORTED.items()} == {
        "from-tensorpack": 59,
        "from-fluxtraining": 41,
    }


@PAGES
def test_every_name_on_the_right_exists(page):
    for there, here, _ in [row for name in TABLES[page] for row in table(page, name)]:
        assert names_in(here), f"{there} has nothing to go to"
        assert [name for name in names_in(here) if not there_is(name)] == [], there


@PAGES
def test_every_row_says_what_differs(page):
    assert [row for name in TABLES[page] for row in table(page, name) if not all(row)] == []


@PAGES
def test_every_line_of_the_defects_says_both_sides_and_has_tests(page):
    rows = table(page, "defects")
    letter = "D" if page is TENSORPACK else "F"
    assert [row[0] for row in rows] == [f"{letter}{i + 1}" for i in range(35 if page is TENSORPACK else 27)]
    assert all(before and after for _, before, after in rows)
    assert {row[0] for row in rows} == {number for number in SHOWN if number[0] == letter}


@pytest.mark.parametrize("number", SHOWN)
def test_the_tests_of_a_defect_exist(number):
    assert SHOWN[number]
    for test in SHOWN[number]:
        path, _, name = test.partition("::")
        assert name in functions_of(ROOT / "tests" / path), test


SOURCE = re.compile(r"(tensorpack|FluxTraining\.jl),\s+(`[\w!]+`(?:(?:,| and|, and)\s+`[\w!]+`)*)")


def origins() -> list[tuple[Path, list[str], str]]:
    """Return, for each public class and function that names its origin: the page, the names there, the name here."""
    pages = {"tensorpack": TENSORPACK, "FluxTraining.jl": FLUXTRAINING}
    return [
        (pages[system], names_in(cited), f"{module.__name__.removeprefix('fluxcb.')}.{name}")
        for module in (fluxcb.callbacks, fluxcb.logging)
        for name in module.__all__
        for system, cited in SOURCE.findall(inspect.getdoc(getattr(module, name)) or "")
    ]


def test_what_the_docstrings_name_as_their_origin_leads_to_them():
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


def test_no_epoch_of_one_step_shows_the_loss_of_another():
    file = io.StringIO()
    learner = testlearner(ProgressBar(file, interval=1e-9), Metrics(), batches=1, validation_batches=0)
    learner.fit(4)
    losses = dict(enumerate(learner.cbstate["metrics_step"]["training"]["loss"], 1))
    shown = re.findall(r"epoch (\d)/4 training: 1/1 steps, loss (\d+\.\d{4})", file.getvalue())
    assert shown[-3:] == [(str(epoch), f"{losses[epoch]:.4f}") for epoch in (2, 3, 4)]
    assert len({loss for _, loss in shown}) == len(shown)


def test_nothing_was_started_when_the_set_up_of_another_fails():
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
