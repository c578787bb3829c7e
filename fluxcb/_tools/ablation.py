"""`ablate`, which trains with and without each callback, and compares the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from fluxcb._calls import Constructed, entry_point
from fluxcb._declare.resolution import InOrder
from fluxcb._declare.schedules import positive
from fluxcb._declare.wrappers import switchable
from fluxcb._errors import DeclarationError
from fluxcb._run.check import is_learner
from fluxcb._tools.comparing import leaves

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["Ablation", "Effect", "ablate"]


@dataclass(frozen=True)
class Effect(Constructed):
    """What one callback changed in one training.

    Attributes:
        callback: The name of the callback.
        seed: The seed of the training, or None without `seeds`.
        metrics: The last value of each metric, with and without the callback, by names such as "validation/loss".
        params: Relative distance of the parameters: the norm of their difference divided by the norm of the parameters
            with the callback.
        identical: Whether the parameters are the same bit for bit.
        seconds: The time of the training without compilation, with and without the callback (s).
    """

    callback: str
    seed: Any
    metrics: Mapping[str, tuple[float, float]]
    params: float
    identical: bool
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Ablation(Constructed):
    """What each callback changed. Prints as a table with the means over all seeds.

    Attributes:
        effects: One entry for each callback and seed.
    """

    effects: tuple[Effect, ...]

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)

    def __len__(self) -> int:
        return len(self.effects)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the effects as plain data that `json.dumps` accepts."""
        return [
            {**vars(effect), "metrics": {k: list(v) for k, v in effect.metrics.items()}, "seconds": [*effect.seconds]}
            for effect in self.effects
        ]

    def __str__(self) -> str:
        import io

        from rich.console import Console

        console = Console(file=(file := io.StringIO()), width=120)
        console.print(self)
        return file.getvalue().rstrip("\n")

    def __rich__(self) -> Any:
        """Return the table that rich prints."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
        for name in ("callback", "value"):
            table.add_column(name, no_wrap=True)
        for name in ("with", "without", "difference"):
            table.add_column(name, justify="right", no_wrap=True)
        for callback in dict.fromkeys(effect.callback for effect in self.effects):
            effects = [effect for effect in self.effects if effect.callback == callback]
            label = callback
            for name in effects[0].metrics:
                table.add_row(label, name, *_compared([effect.metrics[name] for effect in effects]))
                label = ""
            identical = all(effect.identical for effect in effects)
            distance = "identical" if identical else _spread([effect.params for effect in effects])
            table.add_row(label, "parameters (relative distance)", "", "", distance)
            table.add_row("", "time (s)", *_compared([effect.seconds for effect in effects]))
        return table


def _compared(pairs: Sequence[tuple[float, float]]) -> tuple[str, str, str]:
    with_it, without = zip(*pairs, strict=True)
    return f"{mean(with_it):.4g}", f"{mean(without):.4g}", _spread([b - a for a, b in pairs], sign="+")


def _spread(values: Sequence[float], sign: str = "") -> str:
    """Return the mean, with the standard deviation if there are several values."""
    return f"{mean(values):{sign}.3g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")


@entry_point
def ablate(
    make_learner: Callable[..., Learner],
    names: Collection[str] | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seeds: Collection[Any] | None = None,
) -> Ablation:
    """Train with and without each callback, and compare metrics, parameters, and time.

    All trainings of a seed run the same compiled step, in which `learner.callbacks.disable` has switched one callback
    off. Everything that the callback does not influence is therefore the same bit for bit. Callbacks that only read on
    the host, such as printers, and callbacks that write files are disabled in all trainings, unless they are named.

    Args:
        make_learner: Returns a new Learner at each call.
        names: The names of the callbacks to compare; see `learner.callbacks.disable`. By default, all callbacks that
            can be disabled one by one.
        epochs: Length of each training (epochs).
        steps: Length of each training (steps), instead of epochs.
        seeds: If given, all trainings are repeated for each seed, with `make_learner(seed)`.

    Returns:
        The effects of the callbacks, which print as a table.

    Raises:
        DeclarationError: A name is unknown, a callback cannot be disabled, or an argument is invalid.

    Example:
        >>> import fluxcb
        >>> from fluxcb.callbacks import ClipGradients, Metrics
        >>> from fluxcb.testing import testlearner
        >>> result = fluxcb.ablate(lambda: testlearner(ClipGradients(0.1), Metrics()), ["ClipGradients"], epochs=2)
        >>> [effect] = result
        >>> with_clipping, without = effect.metrics["training/loss"]
        >>> with_clipping > without, effect.identical
        (True, False)
    """
    if (epochs is None) == (steps is None):
        raise DeclarationError(
            "`ablate` takes exactly one of epochs and steps.", fix="write e.g. `ablate(make_learner, epochs=3)`"
        )
    unit, number = ("epochs", epochs) if epochs is not None else ("steps", steps)
    length = {unit: positive(number, f"`{unit}` of `ablate`")}
    if isinstance(names, str):
        raise DeclarationError(f"`names` is a list of names, not {names!r}.", fix=f"write `[{names!r}]`")
    effects: list[Effect] = []
    for seed in (None,) if seeds is None else seeds:
        arguments = () if seeds is None else (seed,)
        compared = _names(_made(make_learner, arguments), names)
        with_all = _train(make_learner, arguments, compared, None, length)
        effects += (
            _effect(name, seed, with_all, _train(make_learner, arguments, compared, name, length)) for name in compared
        )
    return Ablation(tuple(effects))


@dataclass(frozen=True)
class _Trained:
    metrics: Mapping[str, float]
    params: list[Any] = field(repr=False)
    bits: list[tuple[str, Any]] = field(repr=False)
    seconds: float


def _made(make: Callable[..., Any], arguments: tuple[Any, ...]) -> Learner:
    learner = make(*arguments)
    if not is_learner(learner):
        raise DeclarationError(
            f"`make_learner` must return a Learner, not {learner!r}.",
            fix="pass a function that builds a new Learner at each call",
        )
    return learner


def _names(learner: Learner, names: Collection[str] | None) -> list[str]:
    """Return the names of the callbacks to compare, after checking that each of them can be disabled.

    Raises:
        DeclarationError: One of them cannot be disabled.
    """
    from fluxcb._run.switches import dependents, silent_names

    graph = learner._core.graph
    if names is None:
        silent = silent_names(graph)
        rest = [declared.name for declared in graph.declared if declared.name not in silent]
        return [name for name in rest if set(dependents(graph, [name])) <= {name, *silent}]
    _prepare(learner, names)
    for name in names:
        learner.callbacks.disable(name)
        learner.callbacks.enable(name)
    return list(names)


def _prepare(learner: Learner, names: Collection[str]) -> None:
    """Make the named callbacks switchable, and disable the callbacks that only produce output."""
    from fluxcb._run.switches import has_switches, silent_names

    declared = learner._core.graph.declared
    wrapped = {id(d.callback) for d in declared if d.name in names and not has_switches(d)}

    def switched(item: Any) -> Any:
        if isinstance(item, InOrder):
            return InOrder(tuple(map(switched, item)))
        return switchable(item) if id(item) in wrapped else item

    if wrapped:
        learner.callbacks.set([switched(item) for item in learner.callbacks._items])
    silent = silent_names(learner._core.graph, keep=names)
    if silent:
        learner.callbacks.disable(*silent)


def _train(
    make: Callable[..., Any], arguments: tuple[Any, ...], names: Collection[str], without: str | None, length: Any
) -> _Trained:
    import jax
    import numpy as np

    learner = _made(make, arguments)
    _prepare(learner, names)
    if without is not None:
        learner.callbacks.disable(without)
    began = time.perf_counter()
    history = learner.fit(**length)
    seconds = time.perf_counter() - began
    compiling = sum(program.seconds for program in learner._core.engine.programs.compiled)
    metrics = {name: float(history[name][-1]) for name in history if np.ndim(history[name][-1]) == 0}
    params = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(learner.params)]
    return _Trained(metrics, params, leaves(learner.params), max(0.0, seconds - compiling))


def _effect(name: str, seed: Any, with_it: _Trained, without: _Trained) -> Effect:
    import numpy as np

    distance = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(with_it.params, without.params, strict=True)))
    norm = np.sqrt(sum(np.sum(a**2) for a in with_it.params))
    metrics = {key: (value, without.metrics[key]) for key, value in with_it.metrics.items() if key in without.metrics}
    relative = float(distance / norm) if norm else float(distance)
    identical = with_it.bits == without.bits
    return Effect(name, seed, metrics, relative, identical, (with_it.seconds, without.seconds))
