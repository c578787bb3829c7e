"""`LogHistograms`: how parameters and gradients are distributed, counted on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, StepEnd, UpdateEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, Schedule, positive
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb.logging.loggables import Histogram

__all__ = ["LogHistograms"]

_PATHS: Mapping[str, Mapping[str, Any]] = {
    "params": {"params": Read()},
    "grads": {"step": {"grads": Read()}},
    "updates": {"step": {"updates": Read()}},
}


class LogHistograms(Callback):
    """Log a histogram of each parameter, and of its gradient, every `freq` steps: `params/dense/w`, `grads/dense/w`.

    They are counted inside the compiled step, at the steps where they are due, and the counts alone leave the device.
    Parameters are those after the step's update. Bins have equal width between the smallest and the largest number of
    an array; numbers that are not finite are left out. Arrays that are not floating-point have no histogram.

    Args:
        of: Of what: `params`, `grads`, `updates`.
        freq: Period (steps).
        bins: How many bins.

    Access:
        params: Read; step.grads, step.updates: Read, if they are asked for.
        cbstate.histograms: Write (traced), Read (host). int32[histograms, bins] and float32[histograms, 2].
        cbstate.monitors: Append.

    Runs:
        UpdateEnd x AbstractTrainingPhase (traced, every `freq` steps).
        StepEnd x AbstractTrainingPhase (host, every `freq` steps).

    Cost:
        A pass over what is counted at the steps where it is due. Ends a window there; the device goes on unless there
        are more than about 240 histograms of 64 bins.

    Raises:
        DeclarationError: `of` names something else, or `freq` or `bins` is no whole number above 0.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import LogHistograms, Monitors
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(LogHistograms(freq=4), Monitors())
        >>> history = learner.fit(1)
        >>> sorted(learner.cbstate["monitors"])
        ['grads/b', 'grads/w', 'params/b', 'params/w']
        >>> int(learner.cbstate["monitors"].latest("params/w").counts.sum())
        1

    Source:
        FluxTraining.jl, `LogHistograms`, of weights.
    """

    def __init__(self, of: str | Sequence[str] = ("params", "grads"), *, freq: int = 100, bins: int = 64) -> None:
        self.of = (of,) if isinstance(of, str) or not isinstance(of, Sequence) else tuple(of)
        for name in self.of or (None,):
            if name not in _PATHS or self.of.count(name) > 1:
                raise DeclarationError(
                    f"`of` of LogHistograms names some of {', '.join(f'`{n}`' for n in _PATHS)}, each once, "
                    f"not {of!r}.{did_you_mean(name, _PATHS) if isinstance(name, str) and name not in _PATHS else ''}",
                    fix='e.g. `LogHistograms("grads")`',
                )
        self.freq = positive(freq, "`freq` of LogHistograms (steps)")
        self.bins = positive(bins, "`bins` of LogHistograms")
        self._names: list[str] = []

    # The schedule and the accesses differ from instance to instance.

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {**self._sources(), "params": Read(), "cbstate": {"histograms": Write(), "monitors": Append()}}

    def _sources(self) -> dict[str, Any]:
        step = {name: Read() for name in self.of if name != "params"}
        return {**({"params": Read()} if "params" in self.of else {}), **({"step": step} if step else {})}

    def handlers(self) -> list[Entry]:
        """Return the handlers, with this instance's period and access."""
        return [self._own(entry) for entry in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, with this instance's period and access."""
        found = super().entry_for(event, phase)
        return None if found is None else (found[0], self._own(found[1]), (EverySteps(self.freq),))

    def _own(self, entry: Entry) -> Entry:
        when = EverySteps(self.freq)
        if entry.traced:
            return replace(entry, when=when, access={**self._sources(), "cbstate": {"histograms": Write()}})
        return replace(entry, when=when, access={"cbstate": {"histograms": Read(), "monitors": Append()}})

    def init(self, learner: Any) -> None:
        """Note the arrays' names, and create `cbstate.histograms`."""
        import jax
        import jax.numpy as jnp

        found = jax.tree.leaves_with_path(learner.params)
        names = ["/".join(map(_key, path)) for path, leaf in found if jnp.issubdtype(leaf.dtype, jnp.floating)]
        self._names = [f"{kind}/{name}" if name else kind for kind in self.of for name in names]
        shape = len(self._names), self.bins
        if "histograms" not in learner.cbstate or learner.cbstate.histograms["counts"].shape != shape:
            learner.cbstate.histograms = {
                "counts": jnp.zeros(shape, jnp.int32),
                "ranges": jnp.zeros((shape[0], 2), jnp.float32),
            }

    @on(UpdateEnd, AbstractTrainingPhase)
    def count(self, event: Event, phase: Phase, learner: Any) -> None:
        """Count how many numbers fall into each bin."""
        import jax
        import jax.numpy as jnp

        trees = [learner.params if kind == "params" else learner.step[kind] for kind in self.of]
        leaves = [leaf for leaf in jax.tree.leaves(trees) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        counted = [_counted(leaf, self.bins) for leaf in leaves]
        learner.cbstate.histograms = {
            "counts": jnp.stack([counts for counts, _ in counted]),
            "ranges": jnp.stack([extent for _, extent in counted]),
        }

    @on(StepEnd, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log the histograms."""
        import numpy as np

        found = {name: np.asarray(value) for name, value in learner.cbstate.histograms.items()}
        for name, counts, (low, high) in zip(self._names, found["counts"], found["ranges"], strict=True):
            learner.cbstate.monitors.put(name, _histogram(counts, low, high))

    def __repr__(self) -> str:
        of = "" if self.of == ("params", "grads") else f"{self.of!r}, "
        return f"LogHistograms({of}freq={self.freq})"


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _counted(leaf: Any, bins: int) -> tuple[Any, Any]:
    """Return the counts of a leaf's finite numbers, int32[bins], and the smallest and the largest, float32[2]."""
    import jax.numpy as jnp

    numbers = leaf.astype(jnp.float32).ravel()
    finite = jnp.isfinite(numbers)
    low = jnp.min(numbers, where=finite, initial=jnp.inf)
    high = jnp.max(numbers, where=finite, initial=-jnp.inf)
    # The distance of two large numbers may be infinite, and the reciprocal by which XLA multiplies may be flushed to 0.
    scale = jnp.where(high - low < 1e30, 1.0, 2.0**-40)
    place = (numbers * scale - low * scale) / (high * scale - low * scale) * bins
    index = jnp.where(high > low, jnp.clip(place, 0, bins - 1), 0).astype(jnp.int32)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(finite, index, bins)].add(1, mode="drop")
    return counts, jnp.stack([low, high])


def _histogram(counts: Any, low: Any, high: Any) -> Histogram:
    import numpy as np

    if high > low:
        return Histogram(counts, np.linspace(float(low), float(high), len(counts) + 1))
    # One number, or none at all.
    return Histogram.of(np.full(int(counts.sum()), low), bins=1)
