"""`learner.explain(costs=True)`: what each callback costs, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fluxcb._check.shown import ShownText
from fluxcb._compile.costs import Cost
from fluxcb._run.costs import Costs, PhaseCosts, handler_name
from fluxcb._run.learner_display import shown_bytes

__all__ = ["explain_costs"]

_Row = tuple[str, ...]


def explain_costs(costs: Costs) -> str:
    """Return a table for each phase, and one for the memory."""
    blocks = [block for phase in costs.phases for block in _phase(phase)]
    blocks.append(_table([*_memory(costs)]))
    return ShownText("\n\n".join(map("\n".join, blocks)))


def _phase(phase: PhaseCosts) -> Iterator[Iterable[str]]:
    name, whole = phase.phase.__name__, phase.step.whole
    counted = [(part.name, part.cost) for part in phase.parts]
    # The parts are counted as separate programs, so they do not add up exactly to the whole step.
    counted += [("not attributed", phase.step.remainder), ("whole step, as XLA counts it", whole)]
    head = (f"{name}: a step of {phase.examples} examples", "FLOPs", "", "bytes", "")
    yield _table([head, *(_cost_row(name, cost, whole) for name, cost in counted)])
    if phase.reads:
        rows = [(handler_name(r.handler), shown_bytes(r.each), shown_bytes(r.due)) for r in phase.reads]
        # It includes two flags that no handler declares: whether the step ran, and whether it stopped the window.
        rows.append(("all, with shared values counted once", shown_bytes(phase.fetched), ""))
        yield _table([(f"{name}: fetched for host handlers", "each step", "when due"), *rows])


def _cost_row(name: str, cost: Cost, whole: Cost) -> _Row:
    return (
        name,
        _number(cost.flops),
        _share(cost.flops, whole.flops),
        shown_bytes(cost.bytes),
        _share(cost.bytes, whole.bytes),
    )


def _memory(costs: Costs) -> Iterator[_Row]:
    yield "memory", ""
    for entry in costs.carry:
        yield f"{entry.path} ({entry.owner})", shown_bytes(entry.bytes)
    yield "train state", shown_bytes(sum(entry.bytes for entry in costs.carry))
    for name, peak in costs.peaks.items():
        yield f"peak of a step of {name}", "unknown" if peak is None else shown_bytes(peak)


def _table(rows: Sequence[_Row]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, (first, *others) in enumerate(rows):
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        # The first column is two characters wider than its cells, because all rows but the head are indented.
        yield f"{'  ' * bool(i) + first:<{widths[0] + 2}}  {'  '.join(cells)}".rstrip()


def _number(count: float) -> str:
    for unit in ("", " k", " M", " G"):
        if abs(count) < 1000:  # negative if the parts have more operations than the whole step
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:,.3g} T"


def _share(part: float, whole: float) -> str:
    # Adding zero turns -0.0 into 0.0.
    return f"{round(part / whole, 3) + 0.0 if whole else 0:.1%}"
