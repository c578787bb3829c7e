"""`learner.explain_windows()`: what bounds windows, what leaves the device, what was compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fluxcb._check.shown import ShownText
from fluxcb._compile.arrays import leading_axis
from fluxcb._compile.plan import HostCall
from fluxcb._compile.windows import Bound, WindowPlan
from fluxcb._declare.access import dotted
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always
from fluxcb._run.assembly import Assembly
from fluxcb._run.calling import WINDOW_SECONDS
from fluxcb._run.stepping import Steps

__all__ = ["explain_windows"]


def explain_windows(parts: Assembly) -> str:
    """Return one block of text per phase."""
    return ShownText("\n\n".join("\n".join(_phase(parts, phase)) for phase in parts.phases))


def _phase(parts: Assembly, phase: Phase) -> Iterator[str]:
    yield type(phase).__name__
    if not parts.state.alive:
        gone = "the train state is gone: the call it was given to failed"
        yield f"  {gone if parts.state.built else 'unknown until the first batch has told the shapes'}"
        return
    if type(phase).name not in parts.feeds and parts.traced(phase) is None:
        yield f"  has no data: `data.{type(phase).name}` is not set"
        return
    steps = parts.engine.steps(phase)
    plan = steps.caller.plan
    if plan is None:
        plan = parts.window_plan(phase)
    yield from _lines("program", [_program(parts, steps, phase)])
    yield from _lines("length", _length(parts, steps))
    bounds = [*steps.look_before, *(plan.bounds if plan is not None else ())]
    yield from _lines("ended by", [_bound(b, before=b in steps.look_before) for b in bounds] or ["nothing"])
    if plan is not None:
        yield from _lines("fetched", list(_fetched(plan)) or ["nothing"])
    compiled = [program for program in parts.engine.programs.compiled if program.step.phase == phase]
    usual = compiled[0].step if compiled else None
    programs = [
        f"{'single steps' if p.steps == 1 else f'windows of up to {p.steps}'}"
        f"{'' if p.step is usual else f' with batches of {leading_axis(p.step.batch_spec)}'}, {p.seconds:.2f} s"
        for p in compiled
    ]
    yield from _lines("compiled", programs or ["nothing yet"])
    if steps.steps:
        yield from _lines(
            "so far", [f"{steps.steps:,} steps in {steps.windows:,} windows, {steps.caller.calls:,} calls"]
        )


def _lines(title: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield f"  {title:<9} {text}"
        title = ""


def _program(parts: Assembly, steps: Steps, phase: Phase) -> str:
    programs, step = parts.engine.programs, parts.traced(phase)
    if step is None:
        return "unknown until the first batch has told the shapes"
    kind = programs.kind_of(step, parts.state.platform)
    if programs.asked_kind is not None:
        return f"{kind}, as asked for"
    if kind == "loop":
        return "loop: windows of all lengths give the same bits"
    if step.has_convolution:
        return "straight: convolutions are slow inside loops on this platform, so steps are called one by one"
    return "straight: windows were not measured on this platform; ask for them by `steps_per_call=`"


def _length(parts: Assembly, steps: Steps) -> Iterator[str]:
    programs, caller = parts.engine.programs, steps.caller
    asked, first = f"steps_per_call={programs.steps_per_call!r}", caller.longest(idle=True)
    step = caller.usual.step if caller.usual is not None else None
    if programs.steps_per_call == 1:
        yield f"1 step in a call, up to {first} calls ahead ({asked})"
    elif step is not None and programs.kind_of(step, parts.state.platform) == "straight":
        yield f"1 step in a call, because the program is straight, up to {first} calls ahead ({asked})"
    elif caller.many is not None:
        waits = f", {first} where the device waits for them" if first < caller.many.steps else ""
        yield f"up to {caller.many.steps} steps in a call{waits} ({asked})"
    elif programs.steps_per_call == "auto" and caller.usual is not None:
        yield (
            f"1 step in a call, up to {first} calls ahead ({asked}): windows are compiled once calling single "
            f"steps has cost what compiling does ({caller.spent:.2f} of {caller.usual.seconds:.2f} s)"
        )
    else:
        yield f"1 step in a call so far, up to {first} calls ahead ({asked})"
    size = f"{programs.window_bytes / 2**20:,.0f} MiB"
    yield f"about {WINDOW_SECONDS} s at most, and {size} of batches and fetched values (window_bytes=)"


def _bound(bound: Bound, *, before: bool) -> str:
    call = bound.call
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
