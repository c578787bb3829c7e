"""The warning about a fit in which the schedule of the learning rate had already ended at 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fluxcb._compile.optimizers import injected_schedule, schedule_of_updates
from fluxcb._declare.callback import unwrap
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import AccumulateGradients, Scheduler

__all__ = ["scheduled_rates", "warn_of_ended_schedules"]

# In a compiled step, XLA rounds differently, so the end of a schedule may be -1e-8 there instead of 0.
_SMALL = 1e-6
_ROUNDING = 5e-7  # of the largest value of a schedule


class ScheduledRate(NamedTuple):
    """The schedule of a learning rate.

    Attributes:
        owner: The callback or the optimizer that has the schedule, for messages.
        rate: The learning rate, for messages.
        schedule: The schedule.
        unit: What the schedule counts: "step" or "update".
        next_count: The number with which it will be called next.
    """

    owner: str
    rate: str
    schedule: Callable[[Any], Any]
    unit: str
    next_count: int


def scheduled_rates(core: LearnerCore) -> dict[tuple[str, str], ScheduledRate]:
    """Return the schedules of learning rates, by what has the schedule and the learning rate."""
    return {(found.owner, found.rate): found for found in _scheduled(core)}


def _scheduled(core: LearnerCore) -> Iterator[ScheduledRate]:
    train = core.state.train
    for declared in core.graph.declared:
        # A wrapped Scheduler may have a schedule of its own, so what it did at each step is not known.
        scheduler = declared.callback
        if isinstance(scheduler, Scheduler) and not declared.disabled:
            rates = {name: s for name, s in scheduler.schedules.items() if _is_rate(name) and callable(s)}
            if rates:
                unit = scheduler.count.removesuffix("s")
                entry = scheduler.updates_entry
                count = core.state.progress.step if unit == "step" else int(train.carry["cbstate"][entry])
                for name, schedule in rates.items():
                    yield ScheduledRate(declared.label, f"`hyperparams.{name}`", schedule, unit, count)
    schedule = schedule_of_updates(core.state.optimizer)
    if schedule is not None:
        # The last transformation of a chain has the last state.
        *_, state = (s for s in jax.tree.leaves(train.carry["opt_state"], is_leaf=_is_state) if _is_state(s))
        yield ScheduledRate("The optimizer", "its learning rate", schedule, "update", int(state.count))
    schedule = injected_schedule(core.state.optimizer)
    if schedule is not None:
        count = train.carry["opt_state"].hyperparams_states["learning_rate"].count
        yield ScheduledRate("The optimizer", "`hyperparams.learning_rate`", schedule, "update", int(count))


def warn_of_ended_schedules(core: LearnerCore, before: Mapping[tuple[str, str], ScheduledRate]) -> None:
    """Warn if the learning rate had ended at 0 for at least the last half of a fit, after it had been positive.

    Args:
        core: The core of the Learner, after the fit.
        before: What `scheduled_rates` returned before the fit.
    """
    if not before or not _rates_are_zero(core):
        return
    for key, after in scheduled_rates(core).items():
        if key not in before or after.next_count - before[key].next_count < 2:
            continue
        # Evaluated without compiling, because this test rules out most schedules.
        if abs(float(after.schedule(np.int32(after.next_count - 1)))) > _SMALL:
            continue
        values = np.abs(np.asarray(jax.jit(jax.vmap(after.schedule))(np.arange(after.next_count, dtype=np.int32))))
        positive = np.flatnonzero(values > _ROUNDING * values.max())
        counts = np.arange(before[key].next_count, after.next_count)
        # With accumulated gradients, the learning rate has an effect only in the last of several steps.
        updating = counts[(counts + 1) % (_steps_per_update(core) if after.unit == "step" else 1) == 0]
        ended = np.sum(updating > positive[-1]) if positive.size else 0  # always 0 is what the user has chosen
        # A schedule that ends exactly with the training may be 0 in the last update.
        if ended >= 2 and 2 * ended >= updating.size:
            idle = min(counts.size, after.next_count - 1 - int(positive[-1]))
            unit = after.unit
            warn_user(
                f"{after.owner} has set {after.rate} to 0 from {unit} {int(positive[-1]) + 2} on, so the last {idle} "
                f"of the {counts.size} {unit}s of this fit trained with a learning rate of 0, which leaves the "
                f"parameters unchanged. The schedule counts the {unit}s of all fits, not epochs. Give it as many "
                f"{unit}s as all fits have together ({after.next_count} so far), or a positive final value, such as "
                f"`optax.cosine_decay_schedule(1e-2, {after.next_count}, alpha=0.01)`.",
                UserWarning,
            )
            return


def _is_rate(hyperparameter: str) -> bool:
    return hyperparameter.rpartition(".")[2] == "learning_rate"


def _is_state(value: Any) -> bool:
    return isinstance(value, optax.ScaleByScheduleState)


def _rates_are_zero(core: LearnerCore) -> bool:
    """Return whether all learning rates are 0, as far as they are known. A user may end the training of one group."""
    train, optimizer = core.state.train, core.state.optimizer
    numbers = train.hyperparams.numbers(train.carry["opt_state"])
    rates = [number for name, places in numbers.items() if _is_rate(name) for number in places]
    return all(abs(rate) <= _SMALL for rate in rates) and (
        not isinstance(optimizer, Mapping) or len(rates) >= len(optimizer)
    )


def _steps_per_update(core: LearnerCore) -> int:
    found = [unwrap(declared.callback) for declared in core.graph.declared if not declared.disabled]
    return next((callback.steps for callback in found if isinstance(callback, AccumulateGradients)), 1)
