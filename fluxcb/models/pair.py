"""A model written as two functions, `(init, apply)`."""

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from fluxcb._calls import entry_point
from fluxcb._errors import DeclarationError
from fluxcb._step_arguments import TRAIN_FLAGS, names_a_key
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import describe
from fluxcb._typing import BoundModel, PyTree
from fluxcb.models._keywords import (
    accepted_keywords,
    boolean_options,
    defaults_of,
    fits_call,
    key_means_training,
    step_keywords,
)

__all__ = ["PairAdapter", "PairModel", "pair"]

_MODE = re.compile(r"(^|_)(train|training|dropout|eval|evaluate|evaluation|infer|inference|test|testing)($|_)")
_EVALUATION = "deterministic", "evaluation"
_TEXT_MODES = frozenset({"train", "training", "eval", "evaluation", "valid", "validation", "test", "inference"})


@entry_point
def pair(init: Callable[..., Any], apply: Callable[..., Any], *, stateful: bool = False) -> "PairAdapter":
    """Adapt two functions to the training step.

    If `apply` has a parameter named `key`, it receives the PRNG key of the step. If it has a parameter named `train`,
    `training`, `is_training` or `is_train`, it receives whether the step trains, and `deterministic` receives the
    opposite. If it has `key=None` but no such flag, evaluation passes no key. Without these parameters, it is called
    with the two arrays only, so the functions of other libraries can be used:
    `pair(*hk.without_apply_rng(hk.transform(f)))` for Haiku, and `pair(lambda key, xs: init(key, xs.shape)[1], apply)`
    for stax.

    Args:
        init: `init(key, xs) -> params`, where `xs` is an example of the input.
        apply: `apply(params, xs) -> outputs`, with optional keywords `key` and `train`. A warning names a parameter
            such as `rng`, which would get no key, or a flag such as `in_training`.
        stateful: Whether the model has state in addition to its params. If so, `init` returns `(params, model_state)`,
            and `apply(params, model_state, xs)` returns `(outputs, new_model_state)`.

    Returns:
        The adapter.

    Raises:
        DeclarationError: One of the two cannot be called, takes other arguments, or is a method of a Flax Linen module
            that has a train flag.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def init(key, xs):
        ...     return {"w": jnp.ones((xs.shape[-1], 1))}
        >>> def apply(params, xs):
        ...     return xs @ params["w"]
        >>> model = pair(init, apply)
        >>> params, model_state = model.init(jax.random.key(0), jnp.ones((2, 3)))
        >>> model.apply(params, model_state, jnp.ones((2, 3)), train=True, key=None)[0].tolist()
        [[3.0], [3.0]]
    """
    for name, function in (("init", init), ("apply", apply)):
        if not callable(function):
            raise DeclarationError(
                f"`{name}` of a model pair must be a function, not of type `{type(function).__name__}`.",
                where="fluxcb.models.pair(init, apply)",
                fix="pass `init(key, xs) -> params` and `apply(params, xs) -> outputs`",
            )
    if names_a_key(_first_parameter(apply)) and not names_a_key(_first_parameter(init)):
        raise DeclarationError(
            "The two functions of a model pair are in the wrong order.",
            where=_place(init),
            why=f"the second one takes {inspect.signature(apply)}, so it is the one that returns the params",
            fix="swap them: `(init, apply)`",
        )
    _refuse_module_with_flag(apply)
    arguments = {"init": ("key", "xs"), "apply": ("params", "model_state", "xs") if stateful else ("params", "xs")}
    for name, function in (("init", init), ("apply", apply)):
        keywords = step_keywords(apply, key=None, train=True) if name == "apply" else ()
        if not fits_call(function, len(arguments[name]), keywords) or _is_swapped(function, arguments[name]):
            raise DeclarationError(
                f"`{name}` of a model pair takes {inspect.signature(function)}, "
                f"and is called as `{name}({', '.join(arguments[name])})`.",
                where=_place(function),
                fix=[*_renamed_key(function, name), f"write `def {name}({', '.join(arguments[name])}):`"],
            )
    _warn_about_keys(apply)
    _warn_about_flags(apply)
    return PairAdapter(init, apply, stateful)


def _first_parameter(function: Callable[..., Any]) -> str:
    """Return the name of the first parameter of a function, or "" if it is not known."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):  # no signature
        return ""


def _renamed_key(function: Callable[..., Any], name: str) -> list[str]:
    """Return a fix for an `apply` whose last parameter takes a random key under another name."""
    parameters = list(inspect.signature(function).parameters)
    if name != "apply" or len(parameters) < 3 or not names_a_key(parameters[-1]) or parameters[-1] == "key":
        return []
    return [f"rename `{parameters[-1]}` to `key`: `def apply({', '.join(parameters[:-1])}, key):`"]


def _is_swapped(function: Callable[..., Any], expected: tuple[str, ...]) -> bool:
    """Return whether the names of the parameters say that an argument is expected after the next one."""
    try:
        names = list(inspect.signature(function).parameters)[: len(expected)]
    except (TypeError, ValueError):  # no signature
        return False
    if len(names) < len(expected):
        return False
    swapped = names_a_key(names[1]) if expected[0] == "key" else names[1] == "params"
    return swapped or (len(names) == 3 and names[2] in ("state", "model_state"))


class PairAdapter:
    """Runs a pair of functions as a model. `pair` returns it.

    Attributes:
        held: The `(params, model_state)` of the trained pair that this adapter was created from, or None.
    """

    def __init__(
        self,
        init: Callable[..., Any],
        apply: Callable[..., Any],
        stateful: bool,
        held: tuple[PyTree, PyTree] | None = None,
    ) -> None:
        """Store the functions, and the arrays of a trained pair."""
        self.held = held
        self._init = init
        self._apply = apply
        self._stateful = stateful
        self._key_means_training = key_means_training(apply)

    @property
    def function(self) -> Callable[..., Any]:
        """The `apply` of the pair."""
        return self._apply

    def init(self, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Return `(params, model_state)` for inputs like `xs`. The state of a stateless pair is `{}`."""
        if self.held is not None:
            return self.held
        made = self._init(key, xs)
        if not self._stateful:
            _refuse_collections(made, self._init)
            return made, {}
        if not (isinstance(made, tuple) and len(made) == 2):
            raise DeclarationError(
                f"`init` of a stateful pair must return `(params, model_state)`, but returned `{type(made).__name__}`.",
                where=_place(self._init),
                fix=["return both", "leave out `stateful=True`"],
            )
        return made[0], made[1]

    def apply(self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any) -> tuple[PyTree, PyTree]:
        """Return `(outputs, new_model_state)`. The state does not change if `train` is False."""
        return self.called(params, model_state, xs, train=train, key=self._key(train, key))

    def called(
        self, params: PyTree, model_state: PyTree, xs: PyTree, *, train: bool, key: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the same as `apply`, and pass the key to a function that would otherwise have none in evaluation."""
        keywords = step_keywords(self._apply, key=key, train=train)
        if not self._stateful:
            return self._apply(params, xs, **keywords), model_state
        outputs, new_model_state = _taken_apart(self._apply, self._apply(params, model_state, xs, **keywords))
        return outputs, new_model_state if train else model_state

    def bind(self, params: PyTree, model_state: PyTree, *, train: bool, key: Any) -> BoundModel:
        """Return a callable with these arrays for a loss function. `model(xs, ...)` passes its arguments to `apply`."""
        defaults = step_keywords(self._apply, key=self._key(train, key), train=train)
        model = BoundPair(self._apply, params, model_state, self._stateful, defaults)
        return BoundModel(model, lambda _: model.model_state)

    def rebuild(self, params: PyTree, model_state: PyTree) -> "PairModel":
        """Return a callable `model(xs)` that holds these arrays."""
        return PairModel(params, model_state, self)

    def _key(self, train: bool, key: Any) -> Any:
        # With a key, a function that uses dropout "if key is not None" would use it in evaluation.
        return None if self._key_means_training and not train else key

    def holding(self, params: PyTree, model_state: PyTree) -> "PairAdapter":
        """Return an adapter for the same functions whose `init` returns these arrays."""
        return PairAdapter(self._init, self._apply, self._stateful, (params, model_state))

    def __repr__(self) -> str:
        """Return a short form of the call that created the adapter."""
        return f"pair({_name(self._init)}, {_name(self._apply)})"


class BoundPair:
    """A pair of functions in the form that a loss function receives: `model(xs, ...)` is `apply(params, xs, ...)`.

    If `apply` takes the keywords of `step_keywords`, a call may omit them.

    Attributes:
        params: The parameters.
        model_state: The state after the last call.
    """

    def __init__(
        self, apply: Callable[..., Any], params: PyTree, model_state: PyTree, stateful: bool, defaults: dict[str, Any]
    ) -> None:
        """Store the arrays, and the keywords of `apply` for calls that omit them."""
        self.params = params
        self.model_state = model_state
        self._apply = apply
        self._stateful = stateful
        self._defaults = defaults
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Return the outputs. The first argument is usually a batch of inputs."""
        keywords = {**self._defaults, **kwargs}
        if self._calls and "key" not in kwargs and keywords.get("key") is not None:
            keywords["key"] = jax.random.fold_in(keywords["key"], self._calls)
        self._calls += 1
        if not self._stateful:
            return self._apply(self.params, *args, **keywords)
        returned = self._apply(self.params, self.model_state, *args, **keywords)
        outputs, self.model_state = _taken_apart(self._apply, returned)
        return outputs


@dataclass(frozen=True)
class PairModel:
    """A trained pair. `model(xs)` calls `apply` with the trained params, in evaluation mode.

    If you pass it to a Learner, training starts with these params.
    """

    params: PyTree
    model_state: PyTree
    adapter: PairAdapter = field(repr=False)

    def __call__(self, xs: PyTree, *, key: Any = None) -> PyTree:
        """Return the outputs for a batch of inputs. `key` is passed to `apply` if `apply` takes a key."""
        return self.adapter.called(self.params, self.model_state, xs, train=False, key=key)[0]


def _taken_apart(apply: Callable[..., Any], returned: Any) -> tuple[PyTree, PyTree]:
    """Return the outputs and the new state that `apply` of a stateful pair has returned.

    Raises:
        DeclarationError: It returned something else.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise DeclarationError(
        f"`apply` of a stateful pair must return `(outputs, new_model_state)`, but returned {describe(returned)}.",
        where=_place(apply),
        why="the next step starts from the new state",
        fix=["return both", "leave out `stateful=True`, and write `def apply(params, xs):`"],
    )


def _linen_module(function: Callable[..., Any]) -> Any:
    """Return the Flax Linen module that a function is a method of, or None."""
    module = getattr(getattr(function, "func", function), "__self__", None)  # `func` of `functools.partial`
    linen = sys.modules.get("flax.linen")  # without importing Flax
    return module if linen is not None and isinstance(module, linen.Module) else None


def _refuse_module_with_flag(apply: Callable[..., Any]) -> None:
    """Raise an error for `module.apply` of a module with a train flag, because training would never set the flag."""
    module = _linen_module(apply)
    if module is None or isinstance(apply, functools.partial):  # a partial function may set the flag
        return
    if flags := [f"`{name}`" for name in TRAIN_FLAGS if name in accepted_keywords(module.__call__)]:
        name = type(module).__qualname__
        raise DeclarationError(
            f"`apply` of a model pair is a method of the Linen module `{name}`, which takes {' and '.join(flags)}.",
            where=f"{type(module).__module__}.{name}.__call__",
            why="a pair passes neither this flag nor random keys to the module, so dropout would be off in training",
            fix="pass the module itself instead of `(module.init, module.apply)`",
        )


def _warn_about_keys(apply: Callable[..., Any]) -> None:
    """Warn about an optional parameter for a random key that gets none, because it is not called `key`."""
    fixed = getattr(apply, "keywords", {})  # of `functools.partial`
    names = [n for n in accepted_keywords(apply) if names_a_key(n) and n not in fixed]
    if names and "key" not in names:
        warn_user(
            f"`apply` of the model pair has a parameter `{min(names)}`, but receives no random key there. Rename "
            "the parameter to `key`.",
            UserWarning,
        )


def _warn_about_flags(apply: Callable[..., Any]) -> None:
    """Warn about an optional train flag that always has its default, because fluxcb does not know its name."""
    if TRAIN_FLAGS.keys() & accepted_keywords(apply):
        return
    fixed = getattr(apply, "keywords", {})  # of `functools.partial`
    for name, default in boolean_options(apply).items():
        found = _MODE.search(name)
        if found is None or name in fixed:
            continue
        meant, when = ("train", "training") if found[2] in ("train", "training", "dropout") else _EVALUATION
        warn_user(
            f"`apply` of the model pair has a parameter `{name}`, which fluxcb does not pass, so it is always "
            f"{default}. If it is true in {when}, rename the parameter to `{meant}`. Otherwise, pass "
            f"`functools.partial(apply, {name}={default})` to make the value explicit.",
            UserWarning,
        )
        return
    for name, default in defaults_of(apply).items():
        if isinstance(default, str) and default.lower() in _TEXT_MODES and name not in fixed:
            warn_user(
                f"`apply` of the model pair has a parameter `{name}`, which fluxcb does not pass, so it is always "
                f"{default!r}. If it says whether the model is being trained, replace it by a parameter `train`, which "
                "is True in training and False in evaluation. Otherwise, pass "
                f"`functools.partial(apply, {name}={default!r})` to make the value explicit.",
                UserWarning,
            )
            return


def _refuse_collections(params: PyTree, init: Callable[..., Any]) -> None:
    """Raise an error for the variables of a Flax Linen module that are not parameters."""
    if not (isinstance(params, Mapping) and "params" in params):
        return
    others = [name for name in params if name != "params"]
    # For other functions, all names except this one may be parameters.
    others = others if _linen_module(init) is not None else [name for name in others if name == "batch_stats"]
    if others:
        listed = " and ".join(f"`{name}`" for name in others)
        raise DeclarationError(
            f"`init` of a model pair returned the collections of a Flax Linen module: `params` and {listed}.",
            where=_place(init),
            why=f"the optimizer would change {listed}, such as running averages, like trained parameters",
            fix=[
                "pass the module itself instead of a pair",
                "write `fluxcb.models.pair(init, apply, stateful=True)`, where `init` returns `(params, model_state)` "
                "and `apply(params, model_state, xs)` returns `(outputs, new_model_state)`",
            ],
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{_name(function)}  {code.co_filename}:{code.co_firstlineno}" if code else _name(function)
