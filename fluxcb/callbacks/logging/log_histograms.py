"""`LogHistograms`: histograms of parameters, gradients and updates, counted on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd, UpdateEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, positive
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb.logging.loggables import Histogram

__all__ = ["LogHistograms"]

_PATHS: Mapping[str, Mapping[str, Any]] = {
    "params": {"params": Read()},
    "grads": {"step": {"grads": Read()}},
    "updates": {"step": {"updates": Read()}},
}


class LogHistograms(Callback):
    """Log histograms of the parameters and their gradients every `freq` steps.

    They are logged under names such as `params/dense/w` and `grads/dense/w`. The compiled step counts the values at the
    steps where a histogram is due, and only the counts are fetched from the device. Parameters are those after the
    update of the step. All bins of an array have the same width, from the smallest to the largest value. Values that
    are not finite are excluded, and arrays that are not floating-point have no histogram.

    Args:
        of: One or several of `params`, `grads` and `updates`.
        freq: Period (steps).
        bins: Number of bins.

    Access:
        params: Read.
        step.grads, step.updates: Read, if they are in `of`.
        cbstate.histograms: Write (traced), Read (host). int32[histograms, bins] and float32[histograms, 2].
        cbstate.monitors: Append.

    Runs:
        UpdateEnd x AbstractTrainingPhase (traced, every `freq` steps).
        StepEnd x AbstractTrainingPhase (host, every `freq` steps).

    Cost:
        At the steps where it is due, one pass over the arrays, and the end of a window. With more than about 240
        histograms of 64 bins, the device also waits for the host there.

    Raises:
        DeclarationError: `of` contains another name, or `freq` or `bins` is not a positive integer.
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
        FluxTraining.jl, `LogHistograms`, which logs the parameters.
    """

    def __init__(self, of: str | Sequence[str] = ("params", "grads"), *, freq: int = 100, bins: int = 64) -> None:
        self.of = (of,) if isinstance(of, str) or not isinstance(of, Sequence) else tuple(of)
        for name in self.of or (None,):
            if name not in _PATHS or self.of.count(name) > 1:
                raise DeclarationError(
                    f"`of` of LogHistograms must name some of {', '.join(f'`{n}`' for n in _PATHS)}, each once, "
                    f"not {of!r}.{did_you_mean(name, _PATHS) if isinstance(name, str) and name not in _PATHS else ''}",
                    fix='write e.g. `LogHistograms("grads")`',
                )
        self.freq = positive(freq, "`freq` of LogHistograms (steps)")
        self.bins = positive(bins, "`bins` of LogHistograms")
        self._names: list[str] = []

    # The schedule and the access depend on the arguments.

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {**self._sources(), "params": Read(), "cbstate": {"histograms": Write(), "monitors": Append()}}

    def _sources(self) -> dict[str, Any]:
        step = {name: Read() for name in self.of if name != "params"}
        return {**({"params": Read()} if "params" in self.of else {}), **({"step": step} if step else {})}

    def handlers(self) -> list[Handler]:
        """Return the handlers with the period and the access of this instance."""
        return [self._configured(handler) for handler in super().handlers()]

    def _configured(self, handler: Handler) -> Handler:
        when = EverySteps(self.freq)
        if handler.traced:
            return replace(handler, when=when, access={**self._sources(), "cbstate": {"histograms": Write()}})
        return replace(handler, when=when, access={"cbstate": {"histograms": Read(), "monitors": Append()}})

    def init(self, learner: LearnerView) -> None:
        """Record the names of the arrays, and create `cbstate.histograms`."""
        import jax
        import jax.numpy as jnp

        leaves = jax.tree.leaves_with_path(learner.params)
        names = ["/".join(map(_key, path)) for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        self._names = [f"{kind}/{name}" if name else kind for kind in self.of for name in names]
        shape = len(self._names), self.bins
        if "histograms" not in learner.cbstate or learner.cbstate.histograms["counts"].shape != shape:
            learner.cbstate.histograms = {
                "counts": jnp.zeros(shape, jnp.int32),
                "ranges": jnp.zeros((shape[0], 2), jnp.float32),
            }

    @on(UpdateEnd, AbstractTrainingPhase)
    def count(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Count the values in each bin."""
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
    def log(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the histograms."""
        import numpy as np

        arrays = {name: np.asarray(value) for name, value in learner.cbstate.histograms.items()}
        for name, counts, (low, high) in zip(self._names, arrays["counts"], arrays["ranges"], strict=True):
            learner.cbstate.monitors.put(name, _histogram(counts, low, high))

    def __repr__(self) -> str:
        of = "" if self.of == ("params", "grads") else f"{self.of!r}, "
        return f"LogHistograms({of}freq={self.freq})"


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def _counted(leaf: Any, bins: int) -> tuple[Any, Any]:
    """Return the histogram of the finite values of a leaf.

    Returns:
        The counts, int32[bins], and the smallest and the largest value, float32[2].
    """
    import jax.numpy as jnp

    numbers = leaf.astype(jnp.float32).ravel()
    finite = jnp.isfinite(numbers)
    low = jnp.min(numbers, where=finite, initial=jnp.inf)
    high = jnp.max(numbers, where=finite, initial=-jnp.inf)
    # If the range is 1e30 or wider, the values are scaled down. Otherwise, `high - low` can overflow to infinity, and
    # the reciprocal that XLA multiplies by can be flushed to 0.
    scale = jnp.where(high - low < 1e30, 1.0, 2.0**-40)
    place = (numbers * scale - low * scale) / (high * scale - low * scale) * bins
    index = jnp.where(high > low, jnp.clip(place, 0, bins - 1), 0).astype(jnp.int32)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(finite, index, bins)].add(1, mode="drop")
    return counts, jnp.stack([low, high])


def _histogram(counts: Any, low: Any, high: Any) -> Histogram:
    import numpy as np

    if high > low:
        return Histogram(counts, np.linspace(float(low), float(high), len(counts) + 1))
    # All values are equal, or there are none.
    return Histogram.of(np.full(int(counts.sum()), low), bins=1)
