"""`learner.explain_windows()`: the limits of windows, the values that leave the device, and the compiled programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fluxcb._check.shown import ShownText
from fluxcb._compile.arrays import leading_axis
from fluxcb._compile.plan import HostCall
from fluxcb._compile.windows import Bound, WindowPlan
from fluxcb._declare.access import dotted
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.program_runner import WINDOW_SECONDS
from fluxcb._run.step_loop import StepLoop

__all__ = ["explain_windows"]


def explain_windows(core: LearnerCore) -> str:
    """Return a block of text for each phase."""
    return ShownText("\n\n".join("\n".join(_phase(core, phase)) for phase in core.phases))


def _phase(core: LearnerCore, phase: Phase) -> Iterator[str]:
    yield type(phase).__name__
    # Everything below needs the shapes of the train state.
    if not core.state.train.alive:
        gone = "the train state is lost: the call that it was donated to failed"
        yield f"  {gone if core.state.train.built else 'unknown until the first batch shows the shapes'}"
        return
    # Without data, `run_step` can still run the phase, with a batch like the Learner's `example_batch`.
    if type(phase).name not in core.streams and core.traced(phase) is None:
        yield f"  has no data: `data.{type(phase).name}` is not set"
        return
    # Before the first step, the loop has no program, so the plan comes from the trace of the dry run.
    loop = core.engine.step_loop(phase)
    plan = loop.runner.plan
    if plan is None:
        plan = core.window_plan(phase)
    yield from _lines("program", [_program(core, phase)])
    yield from _lines("length", _length(core, loop))
    # Handlers that act before a step end the window of the steps before it.
    bounds = [*loop.look_before, *(plan.bounds if plan is not None else ())]
    yield from _lines("ended by", [_bound(b, before=b in loop.look_before) for b in bounds] or ["nothing"])
    if plan is not None:
        yield from _lines("fetched", list(_fetched(plan)) or ["nothing"])
    # The first program defines the usual batch; other batch sizes are named.
    compiled = [program for program in core.engine.programs.compiled if program.step.phase == phase]
    main_step = compiled[0].step if compiled else None
    programs = [
        f"{'single steps' if p.steps == 1 else f'windows of up to {p.steps}'}"
        f"{'' if p.step is main_step else f' with batches of {leading_axis(p.step.batch_spec)}'}, {p.seconds:.2f} s"
        for p in compiled
    ]
    yield from _lines("compiled", programs or ["nothing yet"])
    if loop.steps:
        yield from _lines("so far", [f"{loop.steps:,} steps in {loop.windows:,} windows, {loop.runner.calls:,} calls"])


def _lines(title: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield f"  {title:<9} {text}"
        title = ""


def _program(core: LearnerCore, phase: Phase) -> str:
    programs, step = core.engine.programs, core.traced(phase)
    if step is None:
        return "unknown until the first batch shows the shapes"
    platform = core.state.train.platform
    kind = programs.kind_of(step, platform)
    # The cases are in the order in which `Programs.kind_of` decides.
    if programs.requested_kind is not None:
        return f"{kind}, as requested"
    if type(phase).name in programs.chosen and programs.chooses(platform):
        return f"{kind}: measured to be faster than {'single steps' if kind == 'loop' else 'windows'} on this platform"
    if kind == "loop":
        return "loop: windows of all lengths give the same bits"
    if platform == "cpu":
        return "straight: convolutions are slow inside loops on this platform, so steps are called one by one"
    if programs.steps_per_call == 1:
        return "straight: steps are called one by one"
    if programs.awaits_choice(step, platform):
        return "straight: windows are measured once calling single steps has cost what compiling does"
    if not programs.chooses(platform):
        return "straight: with several processes, windows are not measured; ask for them by `steps_per_call=`"
    why = "the step has side effects" if step.jaxpr.effects else "the train state is larger than `window_bytes`"
    return f"straight: windows are not measured, because {why}; ask for them by `steps_per_call=`"


def _length(core: LearnerCore, loop: StepLoop) -> Iterator[str]:
    programs, runner = core.engine.programs, loop.runner
    # The first window is shorter if the device would have to wait until its batches are stacked.
    setting, first = f"steps_per_call={programs.steps_per_call!r}", runner.max_length(idle=True)
    step = runner.main_program.step if runner.main_program is not None else None
    if programs.steps_per_call == 1:
        yield f"1 step in a call, up to {first} calls ahead ({setting})"
    elif step is not None and programs.kind_of(step, core.state.train.platform) == "straight":
        yield f"1 step in a call, because the program is straight, up to {first} calls ahead ({setting})"
    elif runner.window_program is not None:
        waits = f", {first} where the device waits for them" if first < runner.window_program.steps else ""
        yield f"up to {runner.window_program.steps} steps in a call{waits} ({setting})"
    elif programs.steps_per_call == "auto" and runner.main_program is not None:
        yield (
            f"1 step in a call, up to {first} calls ahead ({setting}): windows are compiled once calling single "
            f"steps has cost what compiling does ({runner.call_seconds:.2f} of {runner.main_program.seconds:.2f} s)"
        )
    else:
        yield f"1 step in a call so far, up to {first} calls ahead ({setting})"
    size = f"{programs.window_bytes / 2**20:,.0f} MiB"
    yield f"about {WINDOW_SECONDS} s at most, and {size} of batches and fetched values (window_bytes=)"


def _bound(bound: Bound, *, before: bool) -> str:
    call = bound.call
    # `Always` is shown as `each step`, like the absence of schedules.
    schedules = [s for s in call.handler.schedules if not isinstance(s, Always)]
    when = f", {', '.join(map(repr, schedules))}" if schedules else ", each step"
    rest = "before the step" if before else "the next step waits" if bound.blocks else "the next step does not wait"
    return f"{_who(call)}{when}: {bound.why}; {rest}"


def _fetched(plan: WindowPlan) -> Iterator[str]:
    for paths, how in ((plan.fetch.each, "each step"), (plan.fetch.last, "at a window's end")):
        for path in paths:
            who = ", ".join(dict.fromkeys(_who(call) for call in plan.readers.get(path, ())))
            yield f"`{dotted(path)}` {how}, for {who}"
    if plan.fetch.each:
        yield f"{plan.fetch.bytes_each:,} bytes a step in all"


def _who(call: HostCall) -> str:
    return f"{call.handler.declared.label}.{call.handler.name}"
