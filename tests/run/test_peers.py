"""If a process of several fails, stops, or is killed, the others end with an error that names the process."""

import os

import pytest

from tests.failing_processes import CAUSES, COLLECTIVES, check, check_lost, check_stopped, latest_stop, random_try, run


def test_other_process_raises_if_handler_fails(tmp_path):
    check(run(tmp_path, "StepEnd"), "StepEnd", 1)


@pytest.mark.long
@pytest.mark.parametrize(("case", "failing"), [(case, number % 2) for number, case in enumerate(CAUSES)])
def test_other_process_raises(case, failing, tmp_path):
    check(run(tmp_path, case, failing=failing), case, failing)


@pytest.mark.long
@pytest.mark.parametrize("case", COLLECTIVES)
def test_process_that_fails_between_collectives_is_named(case, tmp_path):
    check(run(tmp_path, case), case, 1)


def test_message_of_uneven_data(tmp_path):
    _, (_, output) = run(tmp_path, "uneven")
    message = output[output.index("fluxcb._errors.PeerError: ") :]
    assert message.startswith(
        "fluxcb._errors.PeerError: Process 0 and process 1 do not run the same steps.\n"
        "  where: process 0: continues with another step\n"
        "         process 1: the data of LossTrainingPhase ends after step 7 of epoch 1\n"
        "         reported by process 0\n"
        "  why:   each step is computed by all processes, with batches of the same shape on each\n"
        "  fix:   pass the same number of batches, of the same shapes, to all processes\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("FLUXCB_TRIES", "6"))))
def test_random_failures_with_two_and_four_processes(seed, tmp_path):
    case, at, count, failing = random_try(seed, CAUSES)
    check(run(tmp_path, case, at=at, count=count, failing=failing), case, failing)


@pytest.mark.long
@pytest.mark.parametrize(("case", "failing"), [("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 0)])
def test_lost_process_is_named(case, failing, tmp_path):
    check_lost(run(tmp_path, case, failing=failing), failing)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("FLUXCB_TRIES", "2"))))
def test_process_lost_at_random_step_is_named(seed, tmp_path):
    case, at, count, failing = random_try(seed, ["SIGKILL", "SIGSTOP"])
    check_lost(run(tmp_path, case, at=at, count=count, failing=failing), failing)


@pytest.mark.long
def test_stopped_process_raises_error_if_collectives_end(tmp_path):
    """Python cannot interrupt a collective. With this flag, XLA ends it."""
    code, output = run(tmp_path, "SIGSTOP", flags="--xla_cpu_collective_timeout_seconds=8")[0]
    assert code == 1
    assert "stopped at " in output, output[-3000:]  # `finally` was run
    assert "fluxcb._errors.PeerError: Process 1 has not responded for " in output


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("FLUXCB_TRIES", "2"))))
def test_sigterm_in_one_process_stops_all_at_same_step(seed, tmp_path):
    count = 4 if seed % 2 else 2
    tries = [random_try(10 * seed + number, ["SIGTERM"]) for number in range(10)]
    signals = [(one.at, one.failing % count) for one in tries]
    stopped = check_stopped(
        run(tmp_path, "SIGTERM", at=signals[0][0], failing=signals[0][1], count=count, more=signals[1:])
    )
    assert [at <= step <= latest_stop(at) for (at, _), step in zip(signals, stopped, strict=True)] == [True] * 10


@pytest.mark.long
def test_process_that_cannot_be_interrupted_is_ended(tmp_path):
    """A process whose handler never returns cannot raise an error. It ends with a message."""
    code, output = run(tmp_path, "stuck")[0]
    assert code == 1
    assert "fluxcb ends process 0:\nProcess 1 failed: RuntimeError: the handler failed\n" in output, output[-3000:]


@pytest.mark.long
def test_second_fit_after_one_that_all_processes_finish(tmp_path):
    """Exit handlers of JAX run as usual: the exit code of both is 0."""
    assert [code for code, _ in run(tmp_path, "none")] == [0, 0]
