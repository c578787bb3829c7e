"""Stopping times, compared with the tests of EarlyStopping.jl and with the definitions of Prechelt."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxcb import DeclarationError
from fluxcb.stopping import (
    GL,
    PQ,
    Criterion,
    Disjunction,
    InvalidValue,
    Never,
    NumberLimit,
    NumberSinceBest,
    Patience,
    Threshold,
    TimeLimit,
    stopping_time,
)

NAN, INF = math.nan, math.inf

# EarlyStopping.jl, test/criteria.jl
LOSSES = [10.0, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16, 17, 16]
WITH_TRAINING = [
    *(9.5, 9.3, 10),
    *(9.3, 9.1, 8.9, 8),
    *(8.3, 8.4, 9),
    *(9.9, 9.5, 10),
    *(10.6, 10.4, 11),
    *(8888, 11.8, 11.7, 12),
    *(11.6, 11.4, 12),
    *(12.2, 12.1, 13),
    *(14.5, 14.1, 14),
    *(13.9, 13.7, 15),
    *(12.5, 12.3, 16),
    *(11.2, 11.0, 17),
    *(10.5, 10.3, 16),
]
IS_TRAINING = [bool(b) for n in (2, 3, 2, 2, 2, 3, *[2] * 7) for b in [1] * n + [0]]

EVERY = [
    Never(),
    TimeLimit(1e6),
    InvalidValue(),
    GL(),
    PQ(k=2),
    Patience(2),
    NumberSinceBest(2),
    NumberLimit(4),
    Threshold(0.5),
    GL(mode="max"),
    PQ(k=2, mode="max"),
    NumberSinceBest(2) | InvalidValue() | PQ(k=3),
]


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (Never(), 0),
        (InvalidValue(), 0),
        *((GL(alpha), t) for alpha, t in [(12, 3), (20, 4), (40, 6), (90, 11), (110, 12), (1000, 0)]),
        *((Patience(n), t) for n, t in [(6, 0), (5, 12), (4, 6), (3, 5), (2, 4), (1, 3)]),
        *((NumberSinceBest(n), t) for n, t in [(6, 8), (5, 7), (4, 6), (3, 5), (2, 4), (1, 3)]),
        *((NumberLimit(n), n) for n in range(1, 14)),
        (NumberLimit(14), 0),
    ],
    ids=repr,
)
def test_stopping_times_match_original(criterion, expected):
    assert stopping_time(criterion, LOSSES) == expected


@pytest.mark.parametrize(("n", "expected"), [(2, 5), (3, 9)])
def test_new_best_restarts_count(n, expected):
    assert stopping_time(NumberSinceBest(n), [10, 9, 8, 9, 10, 7, 10, 10, 10, 10]) == expected


def test_threshold_is_met_below_value():
    assert stopping_time(Threshold(2.5), [12, 32, 3, 2, 5, 7]) == 4
    assert stopping_time(Threshold(2.0), [12, 2.0, 2.0]) == 0
    assert Threshold().value == 0.0


@pytest.mark.parametrize(("alpha", "expected"), [(2.0, 3), (3.8, 5), (11.6, 6), (15.1, 8), (15.3, 0)])
def test_stopping_times_with_training_losses_match_original(alpha, expected):
    assert stopping_time(PQ(alpha, k=2), WITH_TRAINING, IS_TRAINING) == expected


def test_stalled_training_stops_at_next_validation_loss():
    criterion = PQ(10, k=2)
    state = criterion.update(criterion.update(None, 10.0, training=True), 10.0, training=True)
    assert not criterion.done(state)
    state = criterion.update(state, 10.0)
    assert criterion.done(state)
    assert criterion.message(state) == "training makes no progress: its last 2 values are [10.0, 10.0]"
    assert not criterion.done(criterion.update(state, 10.0, training=True))


def test_pq_waits_for_k_training_losses():
    assert stopping_time(PQ(k=2), [1.0, 5.0, 9.0]) == 0
    assert stopping_time(PQ(k=3), [1.0, 1.0, 5.0, 1.0, 9.0], [1, 1, 0, 1, 0]) == 2


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_invalid_value_stops_immediately_also_in_training(bad):
    is_training = [i % 3 > 0 for i in range(1, len(LOSSES) + 1)]
    for at in range(len(LOSSES)):
        losses = [*LOSSES[:at], bad, *LOSSES[at + 1 :]]
        assert stopping_time(InvalidValue(), losses) == at + 1
        assert stopping_time(InvalidValue(), losses, is_training) == is_training[: at + 1].count(False)


# --- numbers that are none, ties, signs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "losses", "expected"),
    [
        # ties: not better, and not worse
        (NumberSinceBest(2), [1.0, 1.0, 1.0], 3),
        (Patience(2), [1.0, 1.0, 1.0, 1.0], 0),
        (Patience(2), [1.0, 2.0, 2.0, 3.0, 4.0], 5),
        (GL(1), [1.0, 1.0, 1.0], 0),
        # NaN is worse than everything, and what comes after it is better (in EarlyStopping.jl, nothing ever is again)
        (NumberSinceBest(2), [NAN, 5.0, 4.0, 4.5, 4.6], 5),
        (NumberSinceBest(3), [5.0, NAN, NAN, 4.0, NAN, NAN, NAN], 7),
        (NumberSinceBest(2), [NAN, NAN, NAN], 3),
        (Patience(1), [5.0, NAN], 2),
        (Patience(1), [NAN, 5.0, 4.0, NAN], 4),
        (Patience(1), [NAN, NAN], 0),
        (GL(1), [NAN, NAN, 3.0, 2.0, NAN], 5),
        (GL(5), [NAN, 3.0, 4.0], 3),
        (Threshold(1.0), [NAN, 2.0], 0),
        # infinite values
        (NumberSinceBest(2), [INF, INF, INF], 3),
        (NumberSinceBest(2), [INF, 1.0, INF, INF], 4),
        (GL(1e6), [INF, 1.0, INF], 3),
        (GL(1e6), [INF, INF], 0),
        (GL(1e6), [-INF, 0.0], 2),
        # a best value of 0, and negative ones, by GL = 100 (E - E_opt) / |E_opt|
        (GL(1e6), [0.0, 0.0, 1e-9], 3),
        (GL(19), [-1.0, -0.9, -0.8], 3),
        (GL(21), [-1.0, -0.9, -0.8], 0),
    ],
)
def test_unusual_values(criterion, losses, expected):
    assert stopping_time(criterion, losses) == expected


@pytest.mark.parametrize(
    ("training", "value", "expected"),
    [
        ([1.0, NAN], 2.0, 2),  # no number is no progress
        ([1.0, INF], 9.0, 0),  # as much progress as can be
        ([0.0, 0.0], 9.0, 2),
        ([0.0, 1.0], 9.0, 0),
        ([-4.0, -3.0], 1.5, 0),  # GL 50, P 1000 |-3.5 + 4| / 4 = 125: PQ 0.4
        ([-4.0, -3.99], 1.5, 2),  # P 1.25: PQ 40
    ],
)
def test_unusual_training_losses(training, value, expected):
    is_training = [False, True, True, False]
    assert stopping_time(PQ(1.0, k=2), [1.0, *training, value], is_training) == expected


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (GL(12), 3),
        (Patience(3), 5),
        (NumberSinceBest(3), 5),
        (PQ(3.8, k=2), 5),
    ],
    ids=repr,
)
def test_mode_max_mirrors_mode_min(criterion, expected):
    losses, flags = (WITH_TRAINING, IS_TRAINING) if isinstance(criterion, PQ) else (LOSSES, None)
    assert stopping_time(criterion, losses, flags) == expected
    assert stopping_time(criterion.with_mode("max"), [-loss for loss in losses], flags) == expected


def test_threshold_with_mode_max():
    assert stopping_time(Threshold(0.9, mode="max"), [0.1, 0.9, 0.91]) == 3
    assert stopping_time((NumberLimit(9) | Threshold(0.9)).with_mode("max"), [0.1, 0.9, 0.91]) == 3


# --- the clock ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only element is the time (seconds)."""
    now = [1000.0]
    monkeypatch.setattr("fluxcb.stopping.limits.monotonic", lambda: now[0])
    return now


def ticking(clock, losses, seconds):
    for loss in losses:
        clock[0] += seconds
        yield loss


def test_time_limit_starts_with_first_value(clock):
    # EarlyStopping.jl: losses every 0.1 s and a limit of 0.6 s stop at the 7th, by a clock that adds a little
    assert stopping_time(TimeLimit(0.6), ticking(clock, LOSSES, 0.125)) == 6
    assert stopping_time(TimeLimit(0.5), ticking(clock, LOSSES, 0.125)) == 6
    assert stopping_time(TimeLimit(0.625), ticking(clock, LOSSES, 0.125)) == 7


def test_time_between_save_and_resume_does_not_count(clock):
    limit = TimeLimit(10)
    state = limit.start(None)
    clock[0] += 8
    state = json.loads(json.dumps(limit.update(state, 1.0)))
    clock[0] = 5.0  # another process, another clock
    state = limit.start(state)
    clock[0] += 1.5
    state = limit.update(state, 1.0)
    assert (state["elapsed"], limit.done(state)) == (9.5, False)
    clock[0] += 1.0
    state = limit.update(state, 1.0, training=True)
    assert limit.done(state)
    assert limit.message(state) == "10.5 s have passed (limit 10 s)"


# --- combinations ---------------------------------------------------------------------------------------------------


def test_disjunction_stops_with_first_criterion_and_names_it():
    either = Patience(3) | InvalidValue()
    assert stopping_time(either, [12.0, 10.0, 11.0, 12.0, 13.0, NAN]) == 5
    assert stopping_time(either, [NAN, 12.0, 10.0, 11.0, 12.0, 13.0]) == 1
    state = either.update(None, NAN)
    assert either.message(state) == "the value is nan"
    both = NumberLimit(1) | InvalidValue()
    assert both.message(both.update(None, INF)) == "1 epoch with a value (limit 1); the value is inf"


def test_disjunctions_are_flattened_and_deduplicated():
    a, b, c = Patience(1), InvalidValue(), TimeLimit(100)
    nested = a | b | (c | a) | Disjunction(b)
    assert nested == Disjunction(a, b, c)
    assert repr(nested) == "Disjunction(Patience(n=1), InvalidValue(), TimeLimit(seconds=100))"
    assert stopping_time(Disjunction(), [NAN]) == 0
    assert (nested.needs_training, (nested | PQ()).needs_training) == (False, True)


@pytest.mark.parametrize(
    ("criterion", "losses", "said"),
    [
        (NumberSinceBest(2), [1.0, 2.0, 3.0], "no improvement on 1 for 2 epochs"),
        (Patience(2), [1.0, 2.0, 3.0], "worse than the previous epoch for 2 epochs; the last value is 3"),
        (GL(12), [10, 8, 9], "9 is 12.5 % worse than the best, 8 (limit 12 %)"),
        (Threshold(0.5), [0.25], "0.25 is below 0.5"),
        (Threshold(0.5, mode="max"), [0.75], "0.75 is above 0.5"),
        (NumberLimit(2), [1, 1], "2 epochs with a value (limit 2)"),
    ],
)
def test_messages_of_criteria(criterion, losses, said):
    state = None
    for loss in losses:
        state = criterion.update(state, loss)
    assert criterion.done(state)
    assert criterion.message(state) == said


def test_message_of_pq():
    criterion, state = PQ(2.0, k=2), None
    for loss, training in itertools.islice(zip(WITH_TRAINING, IS_TRAINING, strict=True), 10):
        state = criterion.update(state, loss, training)
    # 100 (9 - 8) / 8 = 12.5; 1000 (8.35 - 8.3) / 8.3 = 6.024
    assert criterion.message(state) == "generalization loss over training progress is 2.075 at 9 (limit 2)"


# --- laws of all ----------------------------------------------------------------------------------------------------

values = st.one_of(st.floats(-4, 4), st.sampled_from([NAN, INF, -INF, 0.0, 1.0]))


@pytest.mark.parametrize("criterion", EVERY, ids=repr)
@given(series=st.lists(st.tuples(values, st.booleans()), max_size=12), cut=st.integers(0, 12))
def test_state_survives_json(criterion, series, cut):
    def states(state, part):
        for loss, training in part:
            before = json.dumps(state)
            after = criterion.update(state, loss, training)
            assert json.dumps(state) == before  # pure
            state = after
            yield json.dumps(strip(state)), criterion.done(state)

    straight = list(states(None, series))
    state = None
    for loss, training in series[:cut]:
        state = criterion.update(state, loss, training)
    resumed = list(states(json.loads(json.dumps(state)), series[cut:]))
    assert straight[cut:] == resumed


def strip(state):
    """Return a state without clock readings."""
    return None if isinstance(state, dict) and "at" in state else state


@pytest.mark.parametrize("criterion", EVERY, ids=repr)
def test_initial_training_losses_have_no_effect(criterion):
    assert stopping_time(criterion, [4.0, 3.0, 2.0, 2.0], [True, True, False, False]) in (0, 1, 2)
    assert not criterion.done(None)


@given(losses=st.lists(values, max_size=20), n=st.integers(1, 4))
def test_number_since_best_matches_definition(losses, n):
    def rank(x):
        return INF if math.isnan(x) else math.atan(x) if math.isfinite(x) else math.copysign(2, x)

    expected = 0
    for t in range(1, len(losses) + 1):
        ranks = [rank(x) for x in losses[:t]]
        if t - 1 - ranks.index(min(ranks)) >= n:
            expected = t
            break
    assert stopping_time(NumberSinceBest(n), losses) == expected


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Patience(0), "`n` of `Patience` (values) must be a whole number of at least 1, not 0."),
        (lambda: Patience(True), "`n` of `Patience` (values) must be a whole number of at least 1, not True."),
        (
            lambda: NumberSinceBest(2.5),
            "`n` of `NumberSinceBest` (values) must be a whole number of at least 1, not 2.5.",
        ),
        (lambda: NumberLimit(-1), "`n` of `NumberLimit` (values) must be a whole number of at least 1, not -1."),
        (lambda: GL(0), "`alpha` of `GL` (percent) must be a finite number above 0, not 0."),
        (lambda: GL("2"), "`alpha` of `GL` (percent) must be a finite number above 0, not '2'."),
        (lambda: PQ(alpha=NAN), "`alpha` of `PQ` must be a finite number above 0, not nan."),
        (lambda: PQ(k=1), "`k` of `PQ` (training losses) must be a whole number of at least 2, not 1."),
        (lambda: PQ(k=INF), "`k` of `PQ` (training losses) must be a whole number of at least 2, not inf."),
        (lambda: PQ(tol=0), "`tol` of `PQ` (per mille) must be a finite number above 0, not 0."),
        (lambda: TimeLimit(0), "`seconds` of `TimeLimit` must be a finite number above 0, not 0."),
        (lambda: Threshold("low"), "`value` of `Threshold` must be a number, not 'low'."),
        (lambda: Threshold(NAN), "`value` of `Threshold` must be a number, not nan."),
        (lambda: GL(mode="most"), '`mode` of `GL` must be "min" or "max", not \'most\'.'),
        (lambda: Disjunction(Patience(1), 3), "`Disjunction` takes criteria, not 3."),
        (lambda: stopping_time(3, []), "`stopping_time` takes a criterion, not 3."),
        (lambda: stopping_time(Never(), [1.0], []), "`losses` and `is_training` differ in length."),
        (lambda: stopping_time(Never(), [1.0], [True, True]), "`losses` and `is_training` differ in length."),
    ],
)
def test_invalid_arguments_raise(make, said):
    with pytest.raises(DeclarationError) as caught:
        make()
    assert caught.value.what == said
    assert caught.value.fix


def test_non_criterion_in_disjunction_raises():
    with pytest.raises(TypeError, match="unsupported operand"):
        Patience(1) | 3


def test_custom_criterion():
    class Second(Criterion):
        def update(self, state, loss, training=False):
            return (state or 0) + 1

        def done(self, state):
            return state == 2

    assert stopping_time(Second() | Never(), [1.0, 1.0, 1.0]) == 2
    assert Second().message(2) == "Second() is met"
    assert (Second() | Never()).with_mode("max").done([2, None])
