"""The display of a Learner in a notebook: its parts, its progress, and the callback graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from html import escape
from typing import Any

import jax

from fluxcb._check.shown import ShownSvg
from fluxcb._compile.optimizers import origin_of
from fluxcb._declare.phases import Phase
from fluxcb._errors import FluxcbError
from fluxcb._run.assembly import Assembly

__all__ = ["learner_html"]

# Colors come from the page, so that the table is readable in dark notebooks. Only the picture has its own background.
_ROW = "text-align:left;vertical-align:top;padding:2px 16px 2px 0;background:transparent;border:0;font-weight:"


def learner_html(parts: Assembly, stop_reason: str | None) -> str:
    """Return a table of a Learner's parts above a picture of its callback graph.

    Args:
        parts: The Learner's parts.
        stop_reason: The reason its last fit ended early, or None.
    """
    rows = "".join(
        f'<tr style="background:transparent"><th style="{_ROW}bold">{escape(name)}</th>'
        f'<td style="{_ROW}normal">{"<br>".join(map(escape, lines))}</td></tr>'
        for name, lines in _rows(parts, stop_reason)
        if lines
    )
    picture: ShownSvg = parts.graph.render("svg")  # pyright: ignore[reportAssignmentType]  # the form decides the class
    return (
        f'<table style="border-collapse:collapse;margin:0">{rows}</table>'
        f'<div style="overflow-x:auto;margin-top:8px">{picture}</div>'
    )


def _rows(parts: Assembly, stop_reason: str | None) -> Iterator[tuple[str, list[str]]]:
    yield "Learner", [_progress(parts, stop_reason)]
    yield "model", [_model(parts)]
    yield "parameters", [_parameters(parts)]
    yield "optimizer", [_optimizer(parts)]
    yield "data", [_data(parts, phase) for phase in parts.phases]
    yield "callbacks", [", ".join(d.label for d in parts.graph.declared)] if parts.graph.declared else []
    yield "graph", [] if parts.graph.edges else ["no callback has to run before another one"]


def _progress(parts: Assembly, stop_reason: str | None) -> str:
    state = parts.state
    at = f"epoch {state.epoch}, step {state.step:,}"
    if parts.fitting:
        return f"{at}, fitting"
    if stop_reason is not None:
        return f"{at}; the last fit stopped: {stop_reason}"
    return at if state.step else "not trained yet"


def _model(parts: Assembly) -> str:
    model = parts.state.model
    if parts.adapter is None:
        return f"parameters, with the loss function {_name(parts.state.loss_fn)}"
    if isinstance(model, tuple):
        return f"pair of functions: {', '.join(map(_name, model))}"
    return type(model).__name__


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _parameters(parts: Assembly) -> str:
    if not parts.state.built:
        return "unknown until the first batch"
    if not parts.state.alive:
        return "lost: the compiled call that they were given to failed"
    leaves = jax.tree.leaves(parts.state.live(("params",)))
    count, size = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    return f"{count:,} in {len(leaves):,} array{'' if len(leaves) == 1 else 's'}, {_bytes(size)}"


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 10_000:
            return f"{size:,.0f} {unit}"
        size = size / 1024
    return f"{size:,.0f} GiB"


def _optimizer(parts: Assembly) -> str:
    """Return the factory that created the optimizer, if it is known, and the hyperparameters."""
    state = parts.state
    origin = origin_of(state.optimizer, state.hyperparams.names)
    name = _name(origin.factory) if origin.factory is not None else type(state.optimizer).__name__
    made = f"{name}, combined with other transformations" if origin.inside else name
    if not (state.built and state.alive) or state.ahead:
        return made
    opt_state = state.live(("opt_state",))
    values = (f"{name} = {float(state.hyperparams.get(opt_state, name)):.4g}" for name in state.hyperparams.names)
    return ", ".join([made, *values])


def _data(parts: Assembly, phase: Phase) -> str:
    cls = type(phase)
    feed = parts.feeds.get(cls.name)
    if feed is None:
        return f"{cls.__name__}: none"
    source = feed.source
    number = ""
    if isinstance(source, Sized):
        with contextlib.suppress(TypeError, FluxcbError):  # a wrapper can inherit a `len` that does not work
            number = f", {len(source):,} batch{'' if len(source) == 1 else 'es'}"
    examples = getattr(source, "batch_size", None)
    size = f" of {examples:,}" if number and isinstance(examples, int) else ""
    return f"{cls.__name__}: {type(source).__name__}{number}{size}"
