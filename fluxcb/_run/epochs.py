"""Epochs: the steps of one phase, or of several phases in turn, between EpochBegin and EpochEnd."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import jax

from fluxcb._declare.control import CancelEpoch, CancelFitting, CancelStep
from fluxcb._declare.events import EpochBegin, EpochEnd
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, StateLostError
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.engine import Engine
from fluxcb._run.fit_record import Position
from fluxcb._run.pulling import expected_steps

__all__ = ["Epoch", "run_epoch"]


def run_epoch(engine: Engine, epoch: Epoch, *, inside: bool = False) -> int:
    """Run one epoch, or the rest of an epoch in which a checkpoint was written.

    Args:
        engine: The engine.
        epoch: The epoch.
        inside: Whether a handler runs it. The first signal does not interrupt such an epoch.

    Returns:
        The number of steps run.

    Raises:
        CancelFitting: A handler cancelled the fit; EpochEnd has been emitted.
        DeclarationError: A handler requested an epoch of training while one is running.
    """
    state, trains = engine.state, type(epoch.phase).trains
    progress, moment = state.progress, state.moment
    name = ", ".join(type(phase).__name__ for phase in epoch.phases)
    engine.emitter.refuse_concurrent(f"an epoch of {type(epoch.phase).__name__}")
    if engine.running and trains:
        raise DeclarationError(
            f"An epoch of {name} was requested while another epoch is running.",
            why="a Learner has one train state and one set of counters",
            fix="run it after the other epoch has ended; epochs that do not train, such as validation, may run inside",
        )
    if engine.running and moment.ahead:
        raise DeclarationError(
            f"A step's handler requested an epoch of {name}, but the next steps do not wait for this handler.",
            why="the device has run further steps, so the train state is not that of the handler's step",
            fix='declare `{"params": Read(borrow=True)}` for this handler; the next steps then wait for it',
        )
    # A fit that resumes within an epoch takes the position once; later epochs begin at their start.
    at = None
    names = [type(phase).name for phase in epoch.phases]
    # A validation that a handler runs is never the resumed epoch, even if it has the same phase.
    if not inside and state.fit.at is not None and state.fit.at.phase in names:
        at, state.fit.at = state.fit.at, None
    outer_counts, outer_step = progress.of_epoch(), (moment.window, moment.batch_size)
    if at is not None:  # the counters belong to the resumed epoch and not to the preceding training epoch
        outer_counts["step_in_epoch"] = at.outer
    if not trains and not inside:
        progress.outer_step_in_epoch = outer_counts["step_in_epoch"]
    # Counted, because a validation can run inside a handler of a training epoch.
    engine.running += 1
    try:
        with state.meter.span(f"epoch of {name}", "epoch", phase=name):
            return _run(engine, epoch, at, inside=inside)
    finally:
        engine.running -= 1
        if trains:
            progress.other_turns = {}
            moment.end_step()  # again, because a signal handler can raise before the step loop does this
        else:  # restore the counts of the preceding or surrounding training epoch
            progress.replace(**outer_counts)
            moment.window, moment.batch_size = outer_step
            # The carry must agree with the restored counters, because traced schedules and random keys depend on them.
            if state.train.alive:
                state.train.set_counters(progress)


def _run(engine: Engine, epoch: Epoch, at: Position | None, *, inside: bool) -> int:
    interrupt = engine.emitter.interrupt
    epoch.prepare(at)
    try:
        epoch.begin()
        epoch.run(interruptible=not inside)
        engine.wait_for_device()  # raises a failure of the device here and not at a later read
        if interrupt.requested and not inside and engine.emitter.fit_phase is not None:
            # Before EpochEnd, so that savers store a position inside the epoch.
            engine.stop(interrupt.reason, epoch.phase)
            epoch.interrupted = True
    except (CancelEpoch, CancelStep):
        pass
    except CancelFitting as cancel:
        if not engine.rewinds_after(cancel):  # a rewind runs the epoch again, so it does not end here
            epoch.end()
        raise
    except jax.errors.JaxRuntimeError:  # raised by a handler that read a value of the failed step
        with contextlib.suppress(jax.errors.JaxRuntimeError, StateLostError):
            engine.wait_for_device()
        raise
    epoch.end()
    engine.look_after_epoch()
    return epoch.steps


class Epoch:
    """One epoch of a phase, or of several phases in turn.

    Args:
        engine: The engine.
        streams: The batches of each phase, in order.
        turns: The number of consecutive steps of each phase; empty if there is only one phase.
        limit: Maximum number of steps of all phases together, or None for all the data of the first phase.
        continues_stream: Whether the next epoch of the first phase continues the stream. The other phases always
            continue.
        shares_epoch: Whether the epoch has the number of an epoch that another training phase began.

    Attributes:
        phase: The phase whose steps, EpochBegin, or EpochEnd currently run.
        phases: All phases.
        interrupted: Whether a signal or `PauseFitting` ended the steps.
    """

    def __init__(
        self,
        engine: Engine,
        streams: Mapping[Phase, BatchStream],
        turns: Sequence[int] = (),
        *,
        limit: int | None,
        continues_stream: bool,
        shares_epoch: bool = False,
    ) -> None:
        self._engine, self._emitter = engine, engine.emitter
        self._progress, self._train = engine.state.progress, engine.state.train
        self.phases = tuple(streams)
        self.phase = self.phases[0]
        self._turns, self._limit, self._shares_epoch = tuple(turns), limit, shares_epoch
        self._members = [
            _Member(p, stream, continues_stream=continues_stream or p is not self.phase)
            for p, stream in streams.items()
        ]
        self._now: _Member | None = None
        self._begun: list[_Member] = []
        self.interrupted = False

    def prepare(self, at: Position | None) -> None:
        """Set the counters.

        Args:
            at: The position at which the epoch is resumed, or None if it begins.
        """
        progress, first = self._progress, self._members[0]
        if at is None:
            # Validation belongs to the training epoch before it, so only training advances the number.
            number = progress.epoch + (type(self.phase).trains and not self._shares_epoch)
            for member in self._members:
                member.stream.begin_epoch(max(number, 1), continues_stream=member.continues_stream)
            progress.epoch, progress.cancelled_in_epoch = number, 0
        else:  # EpochBegin was emitted before the checkpoint was written
            self._begun = list(self._members)  # so `begin` emits nothing, and `end` emits EpochEnd
            for member in self._members:
                member.done = at.in_turn.get(type(member.phase).name, 0)
            current = next(member for member in self._members if type(member.phase).name == at.phase)
            current.done = progress.step_in_epoch
        if not type(self.phase).trains and first.stream.batches is None:
            # Validation data is rarely that much longer than a training epoch, so it is probably endless.
            first.stream.warn_after = max(1000, 10 * progress.outer_step_in_epoch)
        self._count_batches()
        # Read at the beginning and not when a phase takes its turn, because `progress.compiled` describes the beginning
        # of the epoch.
        for member in self._members:
            member.compiled = self._engine.step_loop(member.phase).compiled
        self._switch(first)

    def _count_batches(self) -> None:
        """Set the expected number of steps of each phase."""
        first = self._members[0]
        if not self._turns:
            first.expected = expected_steps(first.stream, self._limit, first.continues_stream)
            return
        # Only the data of the first phase bounds an epoch of several phases; the other streams run on.
        data = expected_steps(first.stream, None, False) if not first.continues_stream else 0
        for member, steps in zip(self._members, _expected(self._turns, data, self._limit), strict=True):
            member.expected = steps

    def begin(self) -> None:
        """Emit EpochBegin for each phase, unless the epoch is resumed, and iterate over the data."""
        if self._begun:
            return
        for member in self._members:
            self._switch(member)
            self._begun.append(member)
            shares_epoch = self._shares_epoch or member is not self._members[0]
            with contextlib.suppress(CancelStep):  # there is no step to cancel, only the rest of the moment
                self._emitter.emit(EpochBegin(shares_epoch=shares_epoch), member.phase)
        # After EpochBegin, whose handlers may change what a data source yields, for example by collecting new batches.
        for member in self._members:
            member.stream.open()
        self._count_batches()
        self._progress.steps_in_epoch = self._members[-1].expected

    def run(self, *, interruptible: bool) -> None:
        """Run the steps.

        Args:
            interruptible: Whether a signal ends the epoch early.
        """
        if not self._turns:
            member = self._members[0]
            self._engine.step_loop(member.phase).run(
                member.stream, self._limit, continues_stream=member.continues_stream, interruptible=interruptible
            )
            return
        while not (interruptible and self._emitter.interrupt.requested):
            member, end = self._next_turn()
            if end <= member.done:
                return
            self._switch(member)
            self._engine.step_loop(member.phase).run(
                member.stream, end, continues_stream=member.continues_stream, interruptible=interruptible
            )
            member.done = self._progress.step_in_epoch
            if member.done < end:  # its data ended, or a signal arrived
                return

    def _next_turn(self) -> tuple[_Member, int]:
        """Return the phase that runs next, and how many steps of the epoch it has when its turn ends.

        The numbers of finished steps determine the turn, so a checkpoint needs no other position.
        """
        # The phase with the fewest complete turns is next; ties go to the first one.
        rounds = [member.done // turn for member, turn in zip(self._members, self._turns, strict=True)]
        index = rounds.index(min(rounds))
        member = self._members[index]
        end = (rounds[index] + 1) * self._turns[index]
        if self._limit is not None:
            end = min(end, member.done + self._limit - sum(other.done for other in self._members))
        return member, end

    def end(self) -> None:
        """Emit EpochEnd for each phase that has begun.

        Raises:
            CancelFitting: A handler cancelled the fit; if there are several, the first one.
        """
        for member in self._members:
            member.stream.end_epoch(continues_stream=member.continues_stream)
        cancels: list[CancelFitting] = []
        for member in self._begun:  # all of them, even if one cancels: each EpochBegin has its EpochEnd
            self._switch(member)
            try:
                with contextlib.suppress(CancelEpoch, CancelStep):
                    self._emitter.emit(EpochEnd(interrupted=self.interrupted), member.phase)
            except CancelFitting as cancel:
                if self._engine.rewinds_after(cancel):
                    raise
                cancels.append(cancel)
        if cancels:
            raise cancels[0]

    @property
    def steps(self) -> int:
        """Finished steps of all phases."""
        return self._progress.step_in_epoch + sum(m.done for m in self._members if m is not self._now)

    def _switch(self, member: _Member) -> None:
        """Make a phase the current one, and load its counts."""
        progress = self._progress
        if member is self._now:
            return
        # The counters are shared by all phases, so the current ones are stored first.
        if self._now is not None:
            self._now.done = progress.step_in_epoch
        self._now, self.phase = member, member.phase
        progress.step_in_epoch, progress.steps_in_epoch = member.done, member.expected
        progress.compiled = member.compiled
        if self._turns:
            progress.other_turns = {type(m.phase).name: m.done for m in self._members if m is not member}
        if self._train.built:  # traced schedules and random keys depend on the counters in the carry
            self._train.set_counters(progress)


class _Member:
    """A phase of an epoch.

    Args:
        phase: The phase.
        stream: Its batches.
        continues_stream: Whether its next epoch continues the stream.

    Attributes:
        done: Finished steps of the epoch, up to the last switch to another phase.
        expected: Expected number of steps in the epoch; 0 if unknown.
        compiled: Whether its step was compiled when the epoch began or resumed.
    """

    def __init__(self, phase: Phase, stream: BatchStream, *, continues_stream: bool) -> None:
        self.phase, self.stream, self.continues_stream = phase, stream, continues_stream
        self.done = self.expected = 0
        self.compiled = True


def _expected(turns: Sequence[int], first: int, limit: int | None) -> list[int]:
    """Return the expected number of steps of each phase in an epoch, 0 if unknown.

    Args:
        turns: The number of consecutive steps of each phase.
        first: Batches of the first phase, or 0 if it is unknown or if `limit` alone ends the epoch.
        limit: Maximum number of steps of all phases together, or None.
    """
    # The epoch ends with the last step of the first phase's data: complete rounds, then a part of its turn.
    rounds, rest = divmod(first, turns[0])
    bounds = [rounds * sum(turns) + rest] if first else []
    bounds += [limit] if limit is not None else []
    rounds, rest = divmod(min(bounds, default=0), sum(turns))
    counts = []
    for turn in turns:
        counts.append(rounds * turn + min(rest, turn))
        rest -= min(rest, turn)
    return counts
