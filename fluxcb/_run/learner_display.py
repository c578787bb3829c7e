"""The display of a Learner in a notebook: its parts, its progress, and its callback graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from html import escape
from typing import Any

import jax

from fluxcb._check.shown import ShownSvg
from fluxcb._compile.named_optimizers import NamedOptimizers
from fluxcb._compile.optimizers import origin_of
from fluxcb._declare.phases import Phase
from fluxcb._errors import FluxcbError
from fluxcb._run.learner_core import LearnerCore

__all__ = ["learner_html", "shown_bytes"]

# The colors come from the page, so that the table is readable in dark notebooks. Only the picture has its own
# background.
_ROW = "text-align:left;vertical-align:top;padding:2px 16px 2px 0;background:transparent;border:0;font-weight:"


def learner_html(core: LearnerCore, stop_reason: str | None) -> str:
    """Return a table of a Learner's parts above a picture of its callback graph.

    Args:
        core: The core of the Learner.
        stop_reason: The reason its last fit ended early, or None.
    """
    rows = "".join(
        f'<tr style="background:transparent"><th style="{_ROW}bold">{escape(name)}</th>'
        f'<td style="{_ROW}normal">{"<br>".join(map(escape, lines))}</td></tr>'
        for name, lines in _rows(core, stop_reason)
        if lines
    )
    picture: ShownSvg = core.graph.render("svg")  # pyright: ignore[reportAssignmentType]  # the form decides the class
    return (
        f'<table style="border-collapse:collapse;margin:0">{rows}</table>'
        f'<div style="overflow-x:auto;margin-top:8px">{picture}</div>'
    )


def _rows(core: LearnerCore, stop_reason: str | None) -> Iterator[tuple[str, list[str]]]:
    yield "Learner", [_progress(core, stop_reason)]
    yield "model", [_model(core)]
    yield "parameters", [_parameters(core)]
    yield "optimizer", [_optimizer(core)]
    yield "data", [_data(core, phase) for phase in core.phases]
    yield "callbacks", [", ".join(d.label for d in core.graph.declared)] if core.graph.declared else []
    yield "graph", [] if core.graph.edges else ["no callback has to run before another one"]


def _progress(core: LearnerCore, stop_reason: str | None) -> str:
    state = core.state
    at = f"epoch {state.progress.epoch}, step {state.progress.step:,}"
    if core.fitting:
        return f"{at}, fitting"
    if stop_reason is not None:
        return f"{at}; the last fit stopped: {stop_reason}"
    return at if state.progress.step else "not trained yet"


def _model(core: LearnerCore) -> str:
    model = core.state.model
    if core.adapter is None:
        return f"parameters, with the loss function {_name(core.state.loss_fn)}"
    if isinstance(model, tuple):
        return f"pair of functions: {', '.join(map(_name, model))}"
    return type(model).__name__


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _parameters(core: LearnerCore) -> str:
    if not core.state.train.built:
        return "unknown until the first batch"
    if not core.state.train.alive:
        return "lost: the compiled call that they were given to failed"
    # The live arrays: a display must not copy the parameters.
    leaves = jax.tree.leaves(core.state.train.live(("params",)))
    count, size = sum(leaf.size for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    return f"{count:,} in {len(leaves):,} array{'' if len(leaves) == 1 else 's'}, {shown_bytes(size)}"


def shown_bytes(size: float) -> str:
    """Return a size as text."""
    # Up to 10,000 of a unit, so that no decimals are needed.
    for unit in ("bytes", "KiB", "MiB"):
        if size < 10_000:
            return f"{size:,.0f} {unit}"
        size = size / 1024
    return f"{size:,.0f} GiB"


def _optimizer(core: LearnerCore) -> str:
    """Return the factory that created the optimizer, if it is known, and the hyperparameters."""
    state, hyperparams = core.state, core.state.train.hyperparams
    if isinstance(state.optimizer, NamedOptimizers):
        return "; ".join(f"{name}: {_factory(tx, hyperparams.names)}" for name, tx in state.optimizer.items())
    made = _factory(state.optimizer, hyperparams.names)
    # A read of the hyperparameters would fail here, and a display must never raise.
    if not state.train.alive or state.moment.ahead:
        return made
    opt_state = state.train.live(("opt_state",))
    values = (f"{name} = {float(hyperparams.get(opt_state, name)):.4g}" for name in hyperparams.names)
    return ", ".join([made, *values])


def _factory(optimizer: Any, hyperparams: tuple[str, ...]) -> str:
    origin = origin_of(optimizer, hyperparams)
    name = _name(origin.factory) if origin.factory is not None else type(optimizer).__name__
    return f"{name}, combined with other transformations" if origin.inside else name


def _data(core: LearnerCore, phase: Phase) -> str:
    cls = type(phase)
    stream = core.streams.get(cls.name)
    if stream is None:
        return f"{cls.__name__}: none"
    source = stream.source
    number = ""
    if isinstance(source, Sized):
        with contextlib.suppress(TypeError, FluxcbError):  # a wrapper can inherit a `len` that does not work
            number = f", {len(source):,} batch{'' if len(source) == 1 else 'es'}"
    # Not part of the protocol of data sources, but most loaders have it.
    examples = getattr(source, "batch_size", None)
    size = f" of {examples:,}" if number and isinstance(examples, int) else ""
    return f"{cls.__name__}: {type(source).__name__}{number}{size}"
