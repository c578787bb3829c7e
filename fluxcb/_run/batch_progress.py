"""Showing the progress of `learner.predict` and `learner.evaluate` on the console of the Learner's `ProgressBar`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from fluxcb._declare.callback import unwrap
from fluxcb._run.learner_core import LearnerCore
from fluxcb.callbacks import ProgressBar
from fluxcb.callbacks.progress.console import console_for, is_plain, print_line

__all__ = ["batch_progress"]

_BAR_AFTER = 1.0  # minimum duration before a bar appears (s), because most calls are short
_LINE_EVERY = 10.0  # interval of lines in a file or a pipe (s)


@contextlib.contextmanager
def batch_progress(core: LearnerCore, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of finished batches.

    In a terminal, a bar is shown if the work takes more than a second. The bar disappears at the end. In a file or a
    pipe, a line is printed every 10 s. Nothing is shown if the Learner has no `ProgressBar`, or while it is fitting.

    Args:
        core: The core of the Learner.
        what: The name of the work, e.g. `predict`.
        total: Number of batches, or None if it is not known.
    """
    bar = next((c for d in core.graph.declared if isinstance(c := unwrap(d.callback), ProgressBar)), None)
    # During a fit, the console belongs to the bar of the fit.
    if bar is None or core.fitting or not _is_chief():
        yield lambda done: None
        return
    console = console_for(bar.file)
    if is_plain(console):
        yield _lines(console, what, total)
        return
    with contextlib.ExitStack() as stack:
        yield _bar(console, what, total, bar.interval, stack)


def _lines(console: Any, what: str, total: int | None) -> Callable[[int], None]:
    began = shown = monotonic()

    def show(done: int) -> None:
        nonlocal shown
        now = monotonic()
        if now - shown >= _LINE_EVERY:
            shown = now
            print_line(console, f"{what}: {done}{f'/{total}' if total else ''} batches, {_rate(done, now - began)}")

    return show


def _bar(
    console: Any, what: str, total: int | None, interval: float, stack: contextlib.ExitStack
) -> Callable[[int], None]:
    # Imported here, because rich takes long to import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    # Without `auto_refresh`, which draws on a thread of its own.
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
    # The bar starts later, in `show`, so that short calls print nothing.
    task = progress.add_task(what, total=total, rate="")
    began, drawn, live = monotonic(), 0.0, False

    def show(done: int) -> None:
        nonlocal drawn, live
        now = monotonic()
        if now - began < _BAR_AFTER or now - drawn < interval:
            return
        drawn = now
        if not live:
            live = True
            stack.enter_context(progress)
        progress.update(task, completed=done, rate=_rate(done, now - began), refresh=True)

    return show


def _rate(done: int, seconds: float) -> str:
    return f"{done / max(seconds, 1e-9):,.0f} batches/s"  # two readings of a clock can be equal


def _is_chief() -> bool:
    import jax

    return jax.process_index() == 0
