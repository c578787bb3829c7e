"""Running the windows of a population: each member asks for its window, and one program runs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fluxcb._compile.arrays import batch_spec, nbytes_of, to_host
from fluxcb._compile.fetch import Fetch
from fluxcb._compile.joint_program import JointProgram, compile_joint
from fluxcb._compile.program import Outputs, Program
from fluxcb._compile.step import TracedStep
from fluxcb._declare.phases import Phase
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.program_runner import AHEAD, LONGEST, ProgramRunner
from fluxcb._run.programs import Programs, signature
from fluxcb._run.pulling import return_batches
from fluxcb._run.stacker import Stacker
from fluxcb._run.state import HostState
from fluxcb._run.window import Window
from fluxcb._typing import Rows
from fluxcb.populations.joint_carry import JointCarry, at_least_two
from fluxcb.populations.members import joined

_COMPILE_FLOPS = 4e10
"""Compiling takes about as long as this number of operations: 1 to 2 s, at 20 to 40 GFLOP/s of one core."""

__all__ = ["JointRunner", "JointSteps", "StepRequest"]


@dataclass(eq=False)
class StepRequest:
    """A window that a member wants to run.

    Attributes:
        member: The number of the member.
        phase: The phase.
        shapes: The structure, shapes and dtypes of the window's first batch.
        window: The window.
        stream: The stream of its batches.
        runner: The runner that receives the program.
    """

    member: int
    phase: type[Phase]
    shapes: Any
    window: Window
    stream: BatchStream | None
    runner: JointRunner


class JointRunner(ProgramRunner):
    """Runs the windows of one phase of a member, together with the other members.

    Args:
        state: See `ProgramRunner`.
        programs: See `ProgramRunner`.
        phase: See `ProgramRunner`.
        member: The number of the member.
        steps: The joint programs.
        wait_for: Waits until the others have asked for their windows, and all windows have been called.
    """

    def __init__(
        self,
        state: HostState,
        programs: Programs,
        phase: Phase,
        *,
        member: int,
        steps: JointSteps,
        wait_for: Callable[[StepRequest], None],
    ) -> None:
        super().__init__(state, programs, phase)
        self._member, self._steps, self._wait_for = member, steps, wait_for
        self._known: set[Any] = set()  # shapes of batches

    def call(self, window: Window, stream: BatchStream | None, *, manual: bool) -> None:
        """Run a window's steps on the device; see `ProgramRunner.call`."""
        if manual:  # `run_step` in a handler of one member
            super().call(window, stream, manual=manual)
            return
        shapes = signature(window.batches[0])
        if shapes not in self._known:
            # Errors of this member's batches are raised here, before the other members are involved.
            self._programs.traced(self._phase, window.batches[0])
            self._known.add(shapes)
        self._wait_for(StepRequest(self._member, type(self._phase), shapes, window, stream, self))

    def forget(self) -> None:
        """Forget the programs, because the model or the data was replaced."""
        super().forget()
        self._known.clear()
        self._steps.forget()

    def max_length(self, *, idle: bool) -> int:
        """Return the maximum number of steps of the next window; see `ProgramRunner.max_length`."""
        return min(AHEAD, self._steps.max_length) if idle else self._steps.max_length

    def record_duration(self, window: Window, seconds: float) -> None:
        """Record the duration of a window (s), which includes the steps of the other members."""
        self.step_seconds = seconds / window.length

    def steps_to_come(self) -> int:
        """Return the number of steps that remain in this fit, as far as it is known."""
        return self._steps_to_come()

    def receive(self, program: Program) -> None:
        """Take the program of a window."""
        if self.main_program is None:
            self.main_program = program


class _MemberRows:
    """The rows of one member in the rows of all members, with the methods of a JAX array that `Window` uses."""

    def __init__(self, joint: _JointOutputs, member: int) -> None:
        self._joint, self._member = joint, member

    def is_ready(self) -> bool:
        return self._joint.outputs.rows.is_ready()

    def block_until_ready(self) -> _MemberRows:
        self._joint.outputs.rows.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._joint.of("rows", self._joint.outputs.rows, self._member)


class _MemberValue:
    """A fetched value of one member in that of all members."""

    def __init__(self, joint: _JointOutputs, name: str, array: Any, member: int) -> None:
        self._joint, self._name, self._array, self._member = joint, name, array, member
        self.dtype = array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._joint.of(self._name, self._array, self._member)


class _JointOutputs:
    """The outputs of one call. Each array is transferred to the host once, and not once for each member.

    Args:
        outputs: The outputs.
        stacked: Whether the arrays have the steps as their leading axis, followed by the members.
    """

    def __init__(self, outputs: Outputs, *, stacked: bool) -> None:
        self.outputs = outputs
        self._stacked = stacked
        self._on_host: dict[str, np.ndarray] = {}

    def of(self, name: str, array: Any, member: int) -> np.ndarray:
        """Return a member's part of an array, on the host."""
        if name not in self._on_host:
            self._on_host[name] = to_host(array)
        values = self._on_host[name]
        return values[:, member] if self._stacked and not name.startswith("last") else values[member]

    def member(self, member: int) -> Outputs:
        """Return the outputs of one member."""
        buffers = [_MemberValue(self, f"buffer {at}", array, member) for at, array in enumerate(self.outputs.buffers)]
        leaves, structure = jax.tree.flatten(self.outputs.last)
        last = [_MemberValue(self, f"last {at}", array, member) for at, array in enumerate(leaves)]
        return Outputs(_MemberRows(self, member), buffers, structure.unflatten(last), {})


class JointSteps:
    """The joint programs of the members of a population, and the carry that they run on.

    Args:
        cores: The cores of the members.
        labels: The names of the members, for messages.

    Attributes:
        carry: The joint carry of the current fit.
        compiles: Number of compiled joint programs.
        compile_seconds: The duration of their compilation (s).
        calls: Number of calls of joint programs.
    """

    def __init__(self, cores: Sequence[LearnerCore], labels: Sequence[str]) -> None:
        self._cores, self._labels = list(cores), labels
        self.carry: JointCarry
        self._programs: dict[Any, JointProgram] = {}
        self._current: dict[Any, JointProgram] = {}  # those of the current fit, by phase and shapes of the batch
        self._members: dict[tuple[JointProgram, int], Program] = {}
        self._stackers: dict[Any, Stacker] = {}
        self._longest: int | None = None
        self._separate: set[type[Phase]] = set()  # phases in which the members have different batches
        self.compiles = self.calls = 0
        self.compile_seconds = 0.0

    def begin(self) -> None:
        """Begin a fit with the train states of the members."""
        self.carry = JointCarry([core.state.train for core in self._cores])
        self.forget()

    def end(self) -> None:
        """Free the joint arrays after a fit, when each member has its own ones again."""
        self.carry.arrays = []

    def forget(self) -> None:
        """Look the programs up again at the next window, because a member may need others."""
        self._current = {}

    @property
    def max_length(self) -> int:
        """Maximum number of steps of a window."""
        return 1 if self._longest is None else self._longest

    def run(self, requests: Sequence[StepRequest]) -> dict[int, BaseException]:
        """Run the windows of all members that have asked for one.

        Returns:
            The exceptions of members whose window could not be called, by member.
        """
        failures: dict[int, BaseException] = {}
        # Members can be in different phases, or have a shorter last batch. Each such group has its own program, which
        # leaves the rows of the other members as they are.
        groups: dict[Any, list[StepRequest]] = {}
        for request in requests:
            groups.setdefault((request.phase, request.shapes), []).append(request)
        for group in groups.values():
            try:
                self._run_group(group)
            except BaseException as error:
                if self.carry.arrays and self.carry.arrays[0].is_deleted():
                    self.carry.lose(error)
                failures.update({request.member: error for request in group})
        return failures

    def _run_group(self, group: list[StepRequest]) -> None:
        if self._compaction_pays_off(group[0]):
            self.carry.lend()
            self.carry.compact()
            self.carry.take_back(self.carry.arrays)
        buffers, length, shared, resident = self._stack(group)
        for request in group:
            return_batches(request.stream, request.window.cut(length))
        arrays = self.carry.lend()
        key = group[0].phase, group[0].shapes, shared, resident, len(self.carry.members)
        program = self._current.get(key)
        if program is None:
            program = self._current[key] = self._program(group[0], arrays, buffers, shared=shared, resident=resident)
        for request in group:
            request.window.record_program(self._program_of(program, request))
            request.window.began = time.perf_counter()
            request.runner.receive(request.window.program)
        lengths = np.zeros(len(self.carry.members), np.uint32)
        lengths[[self.carry.row_of(request.member) for request in group]] = length if program.steps > 1 else 1
        for batches in [buffers] if program.steps > 1 else _each(buffers, length, resident=resident):
            arrays, outputs = program.call(arrays, batches, lengths)
            self.carry.take_back(arrays)
            joint = _JointOutputs(outputs, stacked=program.steps > 1)
            for request in group:
                request.window.calls.append(joint.member(self.carry.row_of(request.member)))
        self.calls += 1

    def _stack(self, group: list[StepRequest]) -> tuple[Any, int, bool, bool]:
        """Return the batches of the members in one buffer, the common length, and whether they share them."""
        phase, windows = group[0].phase, [request.window for request in group]
        steps = max(2, self._buffer_length(group[0]))
        length = min([self.max_length, *(window.length for window in windows)])
        columns = [[window.batches[at] for window in windows] for at in range(length)]
        of = [batch.arrays if isinstance(batch, Rows) else None for column in columns for batch in column]
        resident = of[0] is not None and all(arrays is of[0] for arrays in of)
        if not resident:
            # Rows of different arrays on the device cannot be gathered from one of them.
            columns = [[_gathered(batch) for batch in column] for column in columns]
        shared = phase not in self._separate and all(
            _is_same(batch, column[0]) for column in columns for batch in column
        )
        width = 1
        if shared:
            flat = [column[0] for column in columns]
        else:
            # Chosen once per phase, because both programs may give other bits.
            self._separate.add(phase)
            places = {request.member: at for at, request in enumerate(group)}
            # The batches of members that do not take part are not used.
            members = self.carry.members or at_least_two(self.carry.attached)
            flat = [column[places.get(member, 0)] for column in columns for member in members]
            width = len(members)
        key = phase, signature(columns[0][0]), steps, width, resident and id(columns[0][0].arrays)
        stacker = self._stackers.get(key)
        if stacker is None:
            stacker = self._stackers[key] = Stacker(flat[0], steps * width)
        buffer, count = stacker.stack(flat)
        if not shared:
            rows = buffer.rows if resident else buffer
            rows = jax.tree.map(lambda x: x.reshape(steps, width, *x.shape[1:]), rows)
            buffer = Rows(buffer.arrays, rows) if resident else rows
        return (buffer.arrays, buffer.rows) if resident else buffer, count // width, shared, resident

    def _buffer_length(self, request: StepRequest) -> int:
        """Return the length of the buffers (steps)."""
        if self._longest is None:
            programs = self._cores[0].engine.programs
            step = programs.traced(self._phase_of(0, request.phase), request.window.batches[0])
            plan = programs.windows(step.phase, step)
            each = (nbytes_of(step.batch_spec) + plan.fetch.bytes_each) * len(self._cores)
            in_memory = max(1, programs.window_bytes // max(1, each))
            wanted = LONGEST if programs.steps_per_call == "auto" else programs.steps_per_call
            self._longest = min(wanted, in_memory)
        return self._longest

    def _compaction_pays_off(self, request: StepRequest) -> bool:
        """Return whether the rows of members that have ended cost more than another program without them.

        The estimate uses no clock, so that two runs of the same program run the same programs.
        """
        rows, attached = len(self.carry.members), max(2, len(self.carry.attached))
        if 2 * attached > rows or not request.phase.trains:
            return False
        saved = (rows - attached) * request.runner.steps_to_come() * self._traced(request.member, request).flops
        return saved > _COMPILE_FLOPS

    def _phase_of(self, member: int, phase: type[Phase]) -> Phase:
        return next(known for known in self._cores[member].phases if type(known) is phase)

    def _traced(self, member: int, request: StepRequest) -> TracedStep:
        phase = self._phase_of(member, request.phase)
        return self._cores[member].engine.programs.traced(phase, batch_spec(request.window.batches[0]))

    def _program(
        self, request: StepRequest, arrays: list[Any], buffers: Any, *, shared: bool, resident: bool
    ) -> JointProgram:
        cores = [self._cores[member] for member in self.carry.members]
        steps = [self._traced(member, request) for member in self.carry.members]
        fetches = [
            core.engine.programs.windows(step.phase, step).fetch for core, step in zip(cores, steps, strict=True)
        ]
        each = {path: spec for fetch in fetches for path, spec in fetch.each.items()}
        last = {path: spec for fetch in fetches for path, spec in fetch.last.items() if path not in each}
        key = (*steps, tuple(each), tuple(last), shared, resident)
        program = self._programs.get(key)
        if program is None:
            programs, train = cores[0].engine.programs, cores[0].state.train
            kind = programs.kind_of(steps[0], train.platform)
            program = self._programs[key] = compile_joint(
                joined(cores, steps, [self._labels[member] for member in self.carry.members]),
                arrays,
                buffers if kind == "loop" else _each(buffers, 1, resident=resident)[0],
                structure=self.carry.structure,
                fetch=Fetch(each, last),
                kind=kind,
                steps=1 if kind == "straight" else jax.tree.leaves(buffers)[-1].shape[0],
                hyperparams=train.hyperparams,
                shared=shared,
                resident=resident,
                fuses=not programs.exact_observers,
            )
            self.compiles += 1
            self.compile_seconds += program.seconds
        return program

    def _program_of(self, joint: JointProgram, request: StepRequest) -> Program:
        """Return a joint program as the program of one member, for its windows."""
        known = self._members.get((joint, request.member))
        if known is None:
            step = self._traced(request.member, request)
            on_host = self._cores[0].state.train.platform == "cpu"
            known = Program(_never_called, None, step, joint.fetch, joint.steps, joint.seconds, on_host, False, None)
            self._members[joint, request.member] = known
        return known


def _never_called(*arguments: Any) -> Any:
    raise AssertionError("the joint program runs the steps of this window")


def _each(buffers: Any, length: int, *, resident: bool) -> list[Any]:
    """Return the batches of a buffer one by one."""
    if resident:
        arrays, rows = buffers
        return [(arrays, rows[at]) for at in range(length)]
    leaves, structure = jax.tree.flatten(buffers)
    return [structure.unflatten(leaf[at] for leaf in leaves) for at in range(length)]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Rows) and isinstance(b, Rows):
        return a.arrays is b.arrays and a.rows is b.rows
    if a is b:
        return True
    # The tuple of a batch can be new although its arrays are not.
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))


def _gathered(batch: Any) -> Any:
    if not isinstance(batch, Rows):
        return batch
    rows = np.asarray(batch.rows)
    return jax.tree.map(lambda a: np.asarray(a)[rows], batch.arrays)
